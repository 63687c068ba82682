"""What every test shares: stable property tests, campaigns in two sizes, and no skips in CI."""

import os
import signal
from collections.abc import Callable, Generator
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings

import bsfg.wire  # noqa: F401 - gRPC takes its TLS settings when it is loaded, so what sets them comes first
from bsfg.testing.ports import OF_THIS_PROCESS

pytest_plugins = ["pytester", "tests.coroutines", "tests.servers", "tests.stages"]

# A shell starts what it puts in the background with Ctrl-C ignored, and everything started from there inherits that:
# commands that tests interrupt would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each process of a run has ports of its own: what one has chosen and not yet begun to use, no other takes.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    OF_THIS_PROCESS.share(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))

# Sparks of tests live for seconds, many of them with a cache of their own: archives are for those who come again.
os.environ.setdefault("BSFG_JAVA_ARCHIVE", "no")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

LONGEST_NAME, BEGINNING = 200, 40

LONG_SOAK = os.environ.get("BSFG_SOAK", "short") == "long"

# Every run tries the same examples, so a red test means a changed product; long campaigns explore.
settings.register_profile(
    "stable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("unshrunk", settings.get_profile("stable"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=2_000)
settings.load_profile("explore" if LONG_SOAK else "stable")


@pytest.fixture
def soak_size() -> Callable[[int, int], int]:
    """Choose between the short and the long size of a campaign: `soak_size(20, 20_000)`."""
    return lambda short, long: long if LONG_SOAK else short


def _refuse_skip(report: Report) -> Report:
    if os.environ.get("CI") and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, which counts as a failure: {report.longrepr}"
    return report


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a test with a long text or many bytes by how they begin: every process of a run hands on all names."""
    if isinstance(val, str | bytes) and len(val) > LONGEST_NAME:
        return f"{val[:BEGINNING]!a} and so on, {len(val)} in all"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped or expectedly failing test into a failure in CI."""
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module that skips itself into a failure in CI."""
    return _refuse_skip((yield))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have all tests with a Spark session of their process run in one process: a start costs many seconds."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("spark"))
