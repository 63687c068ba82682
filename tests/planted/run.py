"""Plant every bug, one at a time, in a copy of its own, and demand that the tests it names fail: `make planted`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.planted.bugs import Bug, copied, escape, load, outcomes, place, reported_as, sources


def main() -> int:
    """Run as a command; give 0 when everything is caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="a bug; may be given several times")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    options = parser.parse_args()
    bugs, texts = load(), sources()
    for bug in bugs:
        place(bug, texts)
    if options.only:
        bugs = [bug for bug in bugs if bug.name in options.only]
        if unknown := set(options.only) - {bug.name for bug in bugs}:
            parser.error(f"no bug is called {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(options.jobs) as pool:
        tests = sorted({test for bug in bugs for test in bug.tests})
        halves = [tests[at :: options.jobs] for at in range(options.jobs)]
        red = [text for part in pool.map(_red_without, filter(None, halves)) for text in part]
        if red:
            print("These tests fail without any bug, and so can show nothing:", *red, sep="\n  ")
            return 1
        escaped = sum(pool.map(_tried, bugs))
    areas = len({bug.area for bug in bugs})
    print(f"{len(bugs)} bugs in {areas} areas: {len(bugs) - escaped} caught, {escaped} escaped")
    return 1 if escaped else 0


def _red_without(tests: Sequence[str]) -> list[str]:
    """Run tests on the source as it stands, and give those that do not pass."""
    with copied() as folder:
        ended = outcomes(folder, tests)
    return [test for test in tests if ended.get(reported_as(test), "it did not run")]


def _tried(bug: Bug) -> bool:
    """Try one bug and print how it went; give whether it escaped."""
    started = time.monotonic()
    why = escape(bug)
    word = "ESCAPED" if why else "caught"
    print(f"{word:8}{bug.area:15}{bug.name:42}{time.monotonic() - started:6.1f} s  {why or bug.tests[0]}", flush=True)
    return bool(why)


if __name__ == "__main__":
    sys.exit(main())
