"""A zone on JetStream beside one on the log or on PostgreSQL: facts go both ways, whoever is killed, the server too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import Insistent, calm, check_sound, expected, history, seed_of_run
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.test_high_availability import TwoZones, campaign
from tests.e2e.test_postgres import ALIKE, in_database
from tests.e2e.twins import Twin, Twins
from tests.e2e.zones import Zone, pair, until

from bsfg.errors import BsfgError
from bsfg.gapbook import GapBook
from bsfg.gaps import listed
from bsfg.ports import Buffer, Frame
from bsfg.stores.jetstream.frames import JetStreamFrames
from bsfg.stores.jetstream.server import JetStreamServer, JetStreamSettings
from bsfg.stores.jetstream.storage import reading
from bsfg.stores.jetstream.zone import ZoneNames
from bsfg.stores.shared.reading import PAGE_FRAMES, entries_in
from bsfg.testing.facts import batch, sealed
from bsfg.testing.nats import PackagedNats


@dataclass
class StreamLog:
    """One buffer of a zone, read from its stream."""

    url: str
    zone: str
    stream: str
    buffer: Buffer

    @contextlib.contextmanager
    def _reading(self) -> Iterator[JetStreamFrames]:
        server = JetStreamServer(JetStreamSettings([self.url], patience_seconds=0))
        try:
            server.open()
            yield reading(server, ZoneNames("bsfg", self.zone), self.stream, self.buffer)
        finally:
            server.close()

    def frames(self) -> Iterator[Frame]:
        """Give everything that it holds."""
        with self._reading() as frames:
            found, at = frames.found(), 0
            while page := frames.frames(at, found.head.end, PAGE_FRAMES):
                for frame in page:
                    yield Frame(frame.base, frame.end - 1, entries_in(frame, found.log_id, self.buffer))
                at = page[-1].end

    def view(self) -> Any:
        """Give its extent."""
        with self._reading() as frames:
            head = frames.found().head
        return SimpleNamespace(start=head.start, end=head.end)

    def notes(self) -> Any:
        """Give its gap records."""
        with self._reading() as frames:
            book = GapBook()
            for gap in frames.found().gaps:
                book.add(gap)
        return SimpleNamespace(gaps=listed(book.sets()))


@dataclass
class StreamZone(Zone):
    """A zone whose facts are in a server of its own."""

    server: PackagedNats = field(default_factory=lambda: PackagedNats().start())

    @staticmethod
    def storage_at(server: PackagedNats) -> str:
        """Configure a storage at a server."""
        return (
            'backend = "jetstream"\n[storage.jetstream]\n'
            f'servers = ["{server.url}"]\nmonitor_url = "{server.monitor_url}"\npatience = "1s"\n'
        )

    def write(self) -> None:
        """Write its configuration."""
        self.storage = self.storage_at(self.server)
        super().write()

    def log(self, buffer: Buffer, stream: str = "operational") -> Any:
        """Open one of its buffers for reading."""
        return StreamLog(self.server.url, self.name, stream, buffer)

    def end(self, buffer: Buffer, stream: str = "operational") -> int:
        """Give where a buffer ends; while the server is away nobody knows."""
        with contextlib.suppress(BsfgError):
            return int(self.log(buffer, stream).view().end)
        return 0


def in_streams(plain: Zone, cleanup: Cleanup) -> StreamZone:
    """Give a zone as it is, with its facts in a server of its own."""
    zone = StreamZone(plain.name, plain.root, plain.certs, port=plain.port, http_port=plain.http_port)
    zone.links, zone.identities, zone.serve = plain.links, plain.identities, plain.serve
    zone.write()
    cleanup.closing(SimpleNamespace(close=zone.server.stop))
    cleanup.zone(zone)
    return zone


@pytest.fixture
def mixed(tmp_path: Path, cleanup: Cleanup) -> tuple[StreamZone, Zone]:
    """Give a zone on JetStream and one on the log that pull from each other, not started."""
    plain, enterprise = pair(tmp_path)
    return in_streams(plain, cleanup), cleanup.zone(enterprise)


@pytest.fixture
def servers(tmp_path: Path, cleanup: Cleanup) -> tuple[StreamZone, Zone]:
    """Give a zone on JetStream and one on PostgreSQL that pull from each other, not started."""
    plant, enterprise = pair(tmp_path)
    return in_streams(plant, cleanup), in_database(enterprise, cleanup)


@pytest.fixture
def both(tmp_path: Path, cleanup: Cleanup) -> tuple[StreamZone, StreamZone]:
    """Give two zones on JetStream that pull from each other, not started."""
    plant, enterprise = pair(tmp_path)
    return in_streams(plant, cleanup), in_streams(enterprise, cleanup)


@pytest.mark.campaign
@pytest.mark.parametrize("test", ALIKE, ids=lambda test: test.__name__)
async def test_zones_on_jetstream_behave_alike(
    test: Callable[[tuple[Zone, Zone]], Awaitable[None]], both: tuple[StreamZone, StreamZone]
) -> None:
    """What holds of two zones on the log holds of two on JetStream."""
    await test(both)


@pytest.mark.parametrize("other", ["mixed", "servers"])
async def test_facts_go_both_ways(other: str, request: pytest.FixtureRequest) -> None:
    """Two zones of different storages exchange facts, over a restart too, and say what their storage can do."""
    zones: tuple[StreamZone, Zone] = request.getfixturevalue(other)
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    for first in (0, 300):
        for zone in zones:
            async with zone.client() as client:
                await client.append("operational", batch(300, first=first, from_zone=zone.name))
        await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
        plant.restart()
    for sender, receiver in ((plant, enterprise), (enterprise, plant)):
        facts = batch(600, from_zone=sender.name)
        wanted = list(zip(facts.values("from_zone"), facts.values("message_id"), facts.digests(), strict=True))
        assert history(sender, Buffer.STORE) == history(receiver, Buffer.FORWARD) == wanted
    async with plant.admin() as admin:
        told = (await admin.status())["storage"]
    assert (told["backend"], told["durable"], told["hash_chain"], told["keeps_all"]) == ("jetstream", True, True, True)


async def test_a_server_that_is_away_blocks_nobody_for_good(mixed: tuple[StreamZone, Zone]) -> None:
    """While the server is away producers are told to retry; when it is back everything goes on by itself."""
    plant, enterprise = mixed
    plant.start()
    enterprise.start()
    async with plant.client() as client:
        await client.append("operational", batch(10, from_zone=plant.name))
        plant.server.kill()
        with pytest.raises(BsfgError) as caught:
            await client.append("operational", batch(10, first=10, from_zone=plant.name))
        assert caught.value.retryable
        plant.server.start()
        for _ in range(600):
            with contextlib.suppress(BsfgError):
                answer = await client.append("operational", batch(20, from_zone=plant.name))
                break
            await asyncio.sleep(0.1)
        assert answer.receipt.offsets.tolist() == list(range(20))
    async with enterprise.client() as client:
        await client.append("operational", batch(10, from_zone=enterprise.name))
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))


async def test_artifacts_and_held_gates_are_in_the_streams(mixed: tuple[StreamZone, Zone]) -> None:
    """An artifact arrives before its fact, and a gate stays held, when the node's folder is lost with its machine."""
    plant, enterprise = mixed
    plant.start()
    enterprise.start()
    there = Random(1).randbytes(2_500_000)
    async with plant.client() as producer:
        named = reference(there, key="plant-a.pdf")
        await upload(producer, there, named)
        fact = naming(named)
        fact = replace(fact, envelope=replace(fact.envelope, from_zone=plant.name))
        await producer.append("operational", sealed([fact]))
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    async with plant.admin() as operator:
        await operator.hold_gate("from-enterprise", "the servers are being moved")
    plant.kill()
    shutil.rmtree(plant.data)
    plant.start()
    assert await download(enterprise, reference(there)) == there == await download(plant, reference(there))
    async with plant.admin() as operator:
        gates = {(view.link, view.side): view.gate for view in await operator.gates()}
    assert gates["from-enterprise", "receiver"].reason == "the servers are being moved"


async def test_commands_know_where_the_facts_are(mixed: tuple[StreamZone, Zone]) -> None:
    """The doctor looks at the streams, also when the server is away, and a backup of the folder is refused."""
    plant, _ = mixed
    plant.start()
    async with plant.client() as client:
        await client.append("operational", batch(10, from_zone=plant.name))
    plant.stop()
    config = str(plant.folder / "zone.toml")
    says = [each["says"] for each in _storage_findings(config)]
    assert "2 buffers, 10 facts, every byte verified" in says[0] and "bsfg backup" in says[1], says
    refused = _ran("backup", str(plant.root / "copy"), "-c", config)
    assert refused.returncode == 1 and b"storage_unable" in refused.stderr, refused.stderr
    plant.server.kill()
    assert _storage_findings(config)[0]["level"] == "problem"
    plant.server.start()


def _storage_findings(config: str) -> list[dict[str, str]]:
    found = _ran("doctor", "-c", config, "--json")
    return [each for each in json.loads(found.stdout)["findings"] if each["check"] == "storage"]


def _ran(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "bsfg.cli", *args], capture_output=True, timeout=120, check=False)


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.parametrize("other", ["mixed", "servers"])
async def test_kills_of_nodes_and_servers(
    other: str, request: pytest.FixtureRequest, soak_size: Callable[[int, int], int]
) -> None:
    """Nodes and their servers are killed in mid-batch; afterwards both sides are equal, in order and sound."""
    zones: tuple[StreamZone, Zone] = request.getfixturevalue(other)
    plant, enterprise = zones
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    random = Random(seed)
    plant.start()
    enterprise.start()
    producers = Insistent(plant, seed), Insistent(enterprise, seed + 1)
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    victims: list[Any] = [
        plant,
        enterprise,
        plant.server,
        *([enterprise.server] if hasattr(enterprise, "server") else []),
    ]
    for _ in range(soak_size(15, 300)):
        before = plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)
        await until(lambda at=before: (plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)) != at, "any facts")  # type: ignore[misc]
        await asyncio.sleep(random.uniform(0, 0.1))
        victim = random.choice(victims)
        victim.kill()
        await asyncio.sleep(random.uniform(0, 0.2))
        await asyncio.to_thread(victim.start)
    for producer in producers:
        producer.stop()
    await asyncio.gather(*tasks)
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    for producer, sender, receiver in ((producers[0], plant, enterprise), (producers[1], enterprise, plant)):
        assert history(sender, Buffer.STORE) == history(receiver, Buffer.FORWARD) == expected(producer)
    plant.stop()
    enterprise.stop()
    if other == "mixed":
        check_sound(enterprise)


@dataclass
class StreamTwin(Twin):
    """One of the nodes of a zone on JetStream, with a folder of its own."""

    def __post_init__(self) -> None:
        """There is no way to cut: all go to the server itself."""

    def write(self) -> None:
        """Write its configuration."""
        self.storage = StreamZone.storage_at(self.server)
        Zone.write(self)

    def log(self, buffer: Buffer, stream: str = "operational") -> Any:
        """Read one of the zone's buffers."""
        return StreamLog(self.server.url, self.name, stream, buffer)


class StreamTwins(Twins):
    """A zone of two nodes on JetStream; nobody writes down who stands by, so nothing need be known of it."""

    async def known(self) -> None:
        """Wait for nothing."""


async def test_a_node_that_stands_by_takes_over(tmp_path: Path, cleanup: Cleanup) -> None:
    """Killed, or paused and resumed: another node goes on, and each fact is there once and in order."""
    plain, enterprise = pair(tmp_path)
    plant = StreamTwins.of(plain, cleanup, PackagedNats().start(), StreamTwin)
    plant.pulled_by(enterprise, plain)
    await campaign(TwoZones(plant, cleanup.zone(enterprise)), ["kill", "pause"])
