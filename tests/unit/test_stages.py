"""A run says at its end what it did not do, so that green is not taken for more than it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_plain():
    pass

@pytest.mark.soak
def test_short():
    pass

@pytest.mark.campaign
@pytest.mark.long
def test_long():
    pass

@pytest.mark.campaign
@pytest.mark.parametrize("number", range(3))
def test_campaign(number):
    pass
"""
NOT_RUN, SHORT = "Not run: 3 campaigns; `make campaigns` runs them.", "In short form: 1 tests; `make soak`*"
LONG = "Not run: 1 long tests; `make soak` runs them."


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite with one test of each kind; whoever runs it has the plugin."""
    monkeypatch.delenv("BSFG_SOAK", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading those that are not asked for takes seconds
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    soak\n    long\n    campaign\n")
    return pytester


@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two processes"])
def test_what_is_left_out_is_counted_once(suite: pytest.Pytester, processes: tuple[str, ...]) -> None:
    """However many processes run the tests, each campaign and each long test is left out once."""
    done = suite.runpytest_subprocess("-p", "tests.stages", "-m", "not campaign and not long", *processes)
    done.stdout.fnmatch_lines([NOT_RUN, LONG, SHORT])
    assert done.parseoutcomes()["passed"] == 2


def test_a_run_that_leaves_nothing_out_says_nothing(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Campaigns that ran are no news, and a long run has no short forms."""
    monkeypatch.setenv("BSFG_SOAK", "long")
    done = suite.runpytest_subprocess("-p", "tests.stages")
    done.stdout.no_fnmatch_line("Not run*")
    done.stdout.no_fnmatch_line("In short form*")


def test_another_choice_is_not_a_campaign_left_out(suite: pytest.Pytester) -> None:
    """Whoever asks for one test by its name is not told of the others that are neither."""
    done = suite.runpytest_subprocess("-p", "tests.stages", "-k", "campaign or long")
    done.stdout.no_fnmatch_line("Not run*")
