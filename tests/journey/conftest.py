"""What the journey's tests share: coroutines as tests, and zones over every backend."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.journey.zones import BACKENDS, Zone


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(params=sorted(BACKENDS))
def make_zone(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Zone]:
    """Make zones by name, each with a storage of its own."""
    backend = BACKENDS[request.param]
    return lambda name: Zone(name, backend(tmp_path / name))
