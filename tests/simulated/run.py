"""Run campaigns from the command line: ``python -m tests.simulated.run 0-19 --hours 2``; a seed repeats a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from tests.simulated.campaign import Campaign

SHOWN_LINES = 60


def seeds_of(text: str) -> Iterator[int]:
    """Read ``7``, ``0-19`` and lists of such with commas."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main(arguments: list[str] | None = None) -> int:
    """Run the campaigns that are named, up to the first that fails."""
    parser = argparse.ArgumentParser(description="Two nodes on simulated machines, in virtual time, one run per seed.")
    parser.add_argument("seeds", nargs="?", default="0-9", help="such as 7, 0-19 or 3,5,10-12 (default: 0-9)")
    parser.add_argument("--hours", type=float, default=1.0, help="how long the trouble lasts, in virtual hours")
    parser.add_argument(
        "--pipelines",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have tasks of the Spark engine take the links too",
    )
    parser.add_argument("--trace", action="store_true", help="print what happened, also when nothing was wrong")
    given = parser.parse_args(arguments)
    print("    seed  virtual h    facts  crashes  seconds")
    for seed in seeds_of(given.seeds):
        campaign, begun = Campaign(seed, given.hours, pipelines=given.pipelines), time.monotonic()
        try:
            campaign.run()
        except Exception as error:
            print("\n".join(campaign.happened if given.trace else campaign.happened[-SHOWN_LINES:]))
            print(
                f"seed {seed} FAILED after {campaign.virtual_hours:.2f} virtual hours: {type(error).__name__}: {error}"
            )
            print(f"Run it again with: make simulate SEEDS={seed} HOURS={given.hours:g}")
            return 1
        if given.trace:
            print("\n".join(campaign.happened))
        seconds, hours = time.monotonic() - begun, campaign.virtual_hours
        print(f"{seed:8} {hours:10.1f} {campaign.facts:8} {campaign.crashes:8} {seconds:8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
