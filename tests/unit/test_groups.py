"""Tests that share something costly run in one process; `make test` would take twice as long without it."""

from __future__ import annotations

import pytest


def test_groups_of_tests_stay_together(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test marks as a group goes to one process, with the versions of pytest and its plugins that are pinned."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading those that are not asked for takes seconds
    pytester.makepyfile(
        """
        import os
        import pytest

        pytestmark = pytest.mark.xdist_group("together")

        @pytest.mark.parametrize("number", range(8))
        def test_one(number):
            with open("pids", "a") as pids:
                print(os.getpid(), file=pids)
        """
    )
    done = pytester.runpytest_subprocess("-p", "xdist", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=8)
    assert len(set((pytester.path / "pids").read_text().split())) == 1
