"""A safety system reads its zone's last known state from the folder, whether the node is alive, dead or starting."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
from tests.e2e.zones import Zone, settled, until

from bsfg import LocalReader
from bsfg.batch import FactBatch
from bsfg.ports import Buffer
from bsfg.testing.facts import message, sealed

VALVE = ("valve:7", "set_point_given")


def set_points(first: int, count: int) -> FactBatch:
    """Make set points number so and so of one valve, and other facts between them."""
    numbers = range(first, first + count)
    facts = [message(f"v-{n}", n, from_zone="enterprise", subject=VALVE[0], predicate=VALVE[1]) for n in numbers]
    return sealed([each for n in numbers for each in (facts[n - first], message(f"x-{n}", n, from_zone="enterprise"))])


class Watching:
    """A safety system: it asks for the last known state all the time and notes what it sees."""

    def __init__(self, folder: Path) -> None:
        self._reader = LocalReader(folder)
        self._stopping = threading.Event()
        self.seen: list[int] = []
        self.reads = 0
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(0.002):
                entry = self._reader.latest(*VALVE)
                self.reads += 1
                if entry is not None and (value := int(entry.message.fact.object)) not in self.seen[-1:]:
                    self.seen.append(value)
        except Exception as error:
            self.failure = error

    def close(self) -> None:
        """Stop watching and insist that no read has failed and that nothing went back."""
        self._stopping.set()
        self._thread.join()
        assert self.failure is None
        assert self.seen == sorted(set(self.seen))


async def test_last_known_state_while_the_node_dies(zones: tuple[Zone, Zone]) -> None:
    """Reads never fail and never go back over kills and starts; with the node dead they give the last durable fact."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    watching = Watching(plant.data)
    try:
        async with enterprise.client() as producer:
            for number in range(0, 80, 10):
                await producer.append("operational", set_points(number, 10))
                if number % 20:
                    await settled(enterprise, plant)
                plant.kill()
                dead_at = plant.end(Buffer.FORWARD)
                # Whoever comes now, with the node dead, sees the same as the one who was there before.
                latest = LocalReader(plant.data).latest(*VALVE)
                assert (latest is None) == (dead_at == 0)
                if latest is not None:
                    expected = latest.message.fact.object
                    await until(lambda: watching.seen[-1:] == [int(expected)])  # noqa: B023
                await asyncio.to_thread(plant.start)
            await settled(enterprise, plant)
        await until(lambda: watching.seen[-1:] == [79])
        plant.kill()
        reads = watching.reads
        await until(lambda: watching.reads > reads + 20)
    finally:
        watching.close()
    assert LocalReader(plant.data).latest(*VALVE) == plant.entries(Buffer.FORWARD)[-2]
    print(f"{watching.reads} reads, {len(watching.seen)} states seen of 80")


@pytest.mark.parametrize("how", ["copied", "read-only"])
async def test_folder_without_a_node(how: str, zones: tuple[Zone, Zone], tmp_path: Path) -> None:
    """A copy of the folder, or one that nobody may write, is read like the original."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    async with enterprise.client() as producer:
        await producer.append("operational", set_points(0, 50))
    await settled(enterprise, plant)
    plant.kill()
    folder = plant.data
    if how == "copied":
        folder = Path(shutil.copytree(plant.data, tmp_path / "copy"))
    else:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = _content(folder)
    reader = LocalReader(folder)
    latest = reader.latest(*VALVE)
    assert latest is not None and latest.message.fact.object == b"49"
    assert len(list(reader.entries("operational"))) == 100
    assert _content(folder) == before
    for path in (plant.data, *plant.data.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
