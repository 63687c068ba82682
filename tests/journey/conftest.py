"""What the journey's tests share: coroutines as tests, and zones over every backend."""

import asyncio
import inspect
from pathlib import Path

import pytest
from tests.journey.zones import BACKENDS, Backend, Zone


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        try:
            await pyfuncitem.obj(**arguments)
        finally:
            for zones in arguments.values():
                if isinstance(zones, Zones):
                    await zones.close()

    asyncio.run(run())
    return True


class Zones:
    """Makes zones by name, each with a storage of its own, and closes them after the test."""

    def __init__(self, backend: Backend, path: Path) -> None:
        self._backend, self._path = backend, path
        self._made: list[Zone] = []

    def __call__(self, name: str) -> Zone:
        zone = Zone(name, self._backend(self._path / name))
        self._made.append(zone)
        return zone

    async def close(self) -> None:
        """Close the storages of all zones."""
        for zone in self._made:
            await zone.restart()


@pytest.fixture(params=sorted(BACKENDS))
def make_zone(request: pytest.FixtureRequest, tmp_path: Path) -> Zones:
    """Make zones over one of the backends."""
    return Zones(BACKENDS[request.param], tmp_path)


@pytest.fixture
def make_memory_zone(tmp_path: Path) -> Zones:
    """Make zones in memory, for what does not depend on the backend."""
    return Zones(BACKENDS["memory"], tmp_path)
