"""What the journey's tests share: zones over every backend."""

from pathlib import Path

import pytest
from tests.coroutines import ClosedInLoop
from tests.journey.zones import BACKENDS, Backend, Zone


class Zones(ClosedInLoop):
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
