"""Says at the end of a run what it left to others: campaigns it did not run, and tests it ran in their short form."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import pytest

LEFT_OUT, LONG, SHORT = "left out", "long", "short"
COUNTS = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[COUNTS] = Counter()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the campaigns and the long tests that this run leaves out."""
    for item in items:
        # A campaign that is long, too, is left to `make soak` alone.
        found = (name for marker, name in (("long", LONG), ("campaign", LEFT_OUT)) if item.get_closest_marker(marker))
        item.config.stash[COUNTS].update(itertools.islice(found, 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests that run in their short form."""
    if os.environ.get("BSFG_SOAK", "short") != "long":
        short = sum(item.get_closest_marker("soak") is not None for item in session.items)
        session.config.stash[COUNTS][SHORT] = short


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts of a process of tests to the one that reports; every process of a run has the same."""
    if hasattr(session.config, "workeroutput"):
        counts = session.config.stash[COUNTS]
        session.config.workeroutput["stages"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process of tests; one that crashed has none."""
    counts = getattr(node, "workeroutput", {}).get("stages", {})
    node.config.stash[COUNTS] |= Counter(counts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say it, unless there is nothing to say."""
    counts = config.stash[COUNTS]
    if counts[LEFT_OUT]:
        terminalreporter.write_line(f"Not run: {counts[LEFT_OUT]} campaigns; `make campaigns` runs them.")
    if counts[LONG]:
        terminalreporter.write_line(f"Not run: {counts[LONG]} long tests; `make soak` runs them.")
    if counts[SHORT]:
        terminalreporter.write_line(f"In short form: {counts[SHORT]} tests; `make soak` runs them for hours.")
