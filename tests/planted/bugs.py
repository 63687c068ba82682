"""The planted bugs: small mistakes in the source, each with the tests that must fail when somebody makes it.

They stand in the TOML files beside this one, a file per area. A mistake is an exact piece of source and what a careless
hand makes of it. The piece is looked for in the whole source, so that code may move from file to file; it must be there
exactly once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TEST_SECONDS = 60

CLUMSY = (
    "AttributeError",
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "TypeError",
    "Failed: Time",
)
"""How a test ends that was stopped by the patch itself, or by the clock, and not by what it asserts."""


class PlantedError(Exception):
    """A list of bugs that cannot be used as it stands."""


@dataclass(frozen=True, slots=True)
class Bug:
    """One mistake: what a careless engineer did, the text before and after, and the tests that catch it."""

    area: str
    name: str
    mistake: str
    old: str
    new: str
    tests: tuple[str, ...]


def load() -> list[Bug]:
    """Read all bugs, in the order of their files; raises `PlantedError` for names that are not unique."""
    bugs = [
        Bug(path.stem, each["name"], each["mistake"], _text(each["old"]), _text(each["new"]), tuple(each["tests"]))
        for path in sorted(HERE.glob("*.toml"))
        for each in tomllib.loads(path.read_text())["bug"]
    ]
    names = [bug.name for bug in bugs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlantedError(f"more than one bug is called {', '.join(sorted(twice))}")
    return bugs


def _text(block: str) -> str:
    """Give a block without the line break before its closing quotes, which only makes the files readable."""
    return block.removesuffix("\n")


def sources(folder: Path = ROOT / "src") -> dict[Path, str]:
    """Read the whole source."""
    return {path: path.read_text() for path in sorted(folder.rglob("*.py"))}


def place(bug: Bug, texts: Mapping[Path, str]) -> Path:
    """Find the one file that has the text of a bug, or raise `PlantedError`."""
    found = [path for path, text in texts.items() if bug.old in text]
    times = sum(texts[path].count(bug.old) for path in found)
    if times != 1:
        where = ", ".join(map(str, found)) or "nowhere"
        raise PlantedError(f"{bug.name}: its text must stand in the source once, it is there {times} times: {where}")
    if bug.old == bug.new:
        raise PlantedError(f"{bug.name}: it changes nothing")
    return found[0]


def plant(bug: Bug, folder: Path) -> None:
    """Make the mistake in a copy of the source."""
    texts = sources(folder)
    path = place(bug, texts)
    path.write_text(texts[path].replace(bug.old, bug.new))
    # Never within the second that the compiled form of the file remembers.
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))


@contextmanager
def copied() -> Iterator[Path]:
    """Give a copy of source and tests in a temporary folder, with all else of the project in its place."""
    with TemporaryDirectory(prefix="bsfg-planted-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path in ROOT.iterdir():
            if path.name in ("src", "tests"):
                # With the compiled files: only what is changed is compiled again.
                shutil.copytree(path, folder / path.name)
            elif not path.name.startswith(".") and path.name != "build":
                (folder / path.name).symlink_to(path)
        yield folder


def outcomes(folder: Path, tests: Sequence[str]) -> dict[str, str]:
    """Run tests in a copy and give how each ended: nothing for passed, else what stopped it."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header"]
    # That a property fails is enough; the smallest example of it takes long to find.
    command += ["--hypothesis-profile=unshrunk"]
    command += [f"--timeout={TEST_SECONDS}", f"--junitxml={report}", f"--basetemp={folder / 'temporary'}", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not report.exists():
        raise PlantedError(f"the tests did not run: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname')}::{case.get('name')}"
    for kind in ("error", "skipped"):
        if (found := case.find(kind)) is not None:
            return name, f"{kind}: {found.get('message')}"
    failure = case.find("failure")
    return name, "" if failure is None else str(failure.get("message"))


def reported_as(test: str) -> str:
    """Give the name under which a test stands in a report."""
    path, *classes, name = test.split("::")
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]) + f"::{name}"


def escape(bug: Bug) -> str:
    """Plant a bug in a copy, run its tests, and give why it was not caught; nothing when it was."""
    with copied() as folder:
        plant(bug, folder / "src")
        ended = outcomes(folder, bug.tests)
    for test in bug.tests:
        how = ended.get(reported_as(test), "error: it did not run")
        if not how:
            return f"{test} passes"
        if how.startswith(("error", "skipped", *CLUMSY)):
            return f"{test} ends with {how.splitlines()[0]}"
    return ""
