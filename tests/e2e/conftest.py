"""What the tests with real zones share: coroutines as tests, and no node that outlives its test."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, pair


@pytest.fixture
def cleanup() -> Iterator[Cleanup]:
    """Give what ends zones and other things behind a test."""
    cleanup = Cleanup()
    yield cleanup
    cleanup.run()


@pytest.fixture
def zones(tmp_path: Path, cleanup: Cleanup) -> tuple[Zone, Zone]:
    """Give two zones that pull from each other, not started."""
    plant, enterprise = pair(tmp_path)
    return cleanup.zone(plant), cleanup.zone(enterprise)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True
