"""The shared test configuration keeps its own promises."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()

SKIPS = '''
import pytest

@pytest.mark.skip(reason="no server")
def test_marked():
    """Never runs."""

def test_inside():
    """Skips itself."""
    pytest.skip("no server")

@pytest.mark.xfail(strict=False)
def test_expected():
    """Fails as expected."""
    assert False
'''


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the copy of the configuration find what it loads."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading those that are not asked for takes seconds


def test_skips_fail_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A marked skip, a skip from inside and an expected failure all fail when CI is set."""
    monkeypatch.setenv("CI", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SKIPS)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(failed=2, errors=1)


def test_module_skip_fails_in_ci(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that skips itself during collection is an error when CI is set."""
    monkeypatch.setenv("CI", "1")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile('import pytest\npytest.importorskip("no_such_module")\n')
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(errors=1)


def test_skips_are_allowed_at_the_desk(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CI a skip stays a skip."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SKIPS)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(skipped=2, xfailed=1)
