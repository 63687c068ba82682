"""A zone on PostgreSQL and one on the log: facts go both ways, whoever is killed, the database too."""

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

import psycopg
import pytest
from tests.e2e import test_artifacts as artifacts
from tests.e2e import test_consumers as consumers
from tests.e2e import test_operating as operating
from tests.e2e import test_quarantine as quarantine
from tests.e2e import test_two_zones as two_zones
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import Insistent, calm, check_sound, expected, history, seed_of_run
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.zones import Zone, pair, until
from tests.servers import wait_for_standby, waiting_for_standby

from bsfg.errors import BsfgError, OutcomeUnknown
from bsfg.gapbook import GapBook
from bsfg.gaps import GapSet, RangeSet, listed
from bsfg.ports import Buffer, Frame
from bsfg.retention import GapReason
from bsfg.stores.shared.keeper import FrameRow
from bsfg.stores.shared.reading import entries_in
from bsfg.testing.facts import batch, sealed
from bsfg.testing.postgres import PackagedServer


@dataclass
class TableLog:
    """One buffer of a zone, read from its tables."""

    dsn: str
    stream: str
    buffer: Buffer

    def frames(self) -> Iterator[Frame]:
        """Give everything that it holds."""
        with psycopg.connect(self.dsn) as connection:
            (id_, log_id) = self._row(connection, "id, log_id")
            asked = (
                "SELECT base, count, appended_at_unix_ms, chain_before, content FROM bsfg.frame WHERE buffer_id = %s"
            )
            for row in connection.execute(f"{asked} ORDER BY base", (id_,), binary=True):
                frame = FrameRow(*row)
                yield Frame(frame.base, frame.end - 1, entries_in(frame, bytes(log_id), self.buffer))

    def view(self) -> Any:
        """Give its extent."""
        with psycopg.connect(self.dsn) as connection:
            start, end = self._row(connection, "start_offset, end_offset")
        return SimpleNamespace(start=start, end=end)

    def notes(self) -> Any:
        """Give its gap records."""
        with psycopg.connect(self.dsn) as connection:
            (id_,) = self._row(connection, "id")
            asked = "SELECT reason, ranges, detail, origin_zone, since_unix_ms FROM bsfg.gap WHERE buffer_id = %s"
            book = GapBook()
            for reason, ranges, *more in connection.execute(f"{asked} ORDER BY id", (id_,)):
                book.add(GapSet(GapReason(reason), RangeSet.decode(ranges), *more))
        return SimpleNamespace(gaps=listed(book.sets()))

    def _row(self, connection: psycopg.Connection[Any], columns: str) -> tuple[Any, ...]:
        asked = f"SELECT {columns} FROM bsfg.buffer WHERE stream = %s AND kind = %s"
        row = connection.execute(asked, (self.stream, str(self.buffer))).fetchone()
        assert row is not None
        return tuple(row)


@dataclass
class DatabaseZone(Zone):
    """A zone whose facts are in a server of its own."""

    server: PackagedServer = field(default_factory=PackagedServer)

    def write(self) -> None:
        """Write its configuration."""
        self.storage = f'backend = "postgres"\n[storage.postgres]\ndsn = "{self.server.dsn}"\npatience = "1s"\n'
        super().write()

    def log(self, buffer: Buffer, stream: str = "operational") -> Any:
        """Open one of its buffers for reading."""
        return TableLog(self.server.dsn, stream, buffer)

    def end(self, buffer: Buffer, stream: str = "operational") -> int:
        """Give where a buffer ends; while the server is away nobody knows."""
        with contextlib.suppress(psycopg.OperationalError):
            return int(self.log(buffer, stream).view().end)
        return 0


def in_database(plain: Zone, cleanup: Cleanup) -> DatabaseZone:
    """Give a zone as it is, with its facts in a server of its own."""
    zone = DatabaseZone(plain.name, plain.root, plain.certs, port=plain.port, http_port=plain.http_port)
    zone.links, zone.identities, zone.serve = plain.links, plain.identities, plain.serve
    zone.write()
    cleanup.closing(SimpleNamespace(close=zone.server.stop))
    cleanup.zone(zone)
    return zone


@pytest.fixture
def mixed(tmp_path: Path, cleanup: Cleanup) -> tuple[DatabaseZone, Zone]:
    """Give a zone on PostgreSQL and one on the log that pull from each other, not started."""
    plain, enterprise = pair(tmp_path)
    return in_database(plain, cleanup), cleanup.zone(enterprise)


@pytest.fixture
def both(tmp_path: Path, cleanup: Cleanup) -> tuple[DatabaseZone, DatabaseZone]:
    """Give two zones on PostgreSQL that pull from each other, not started."""
    plant, enterprise = pair(tmp_path)
    return in_database(plant, cleanup), in_database(enterprise, cleanup)


ALIKE = [
    artifacts.test_facts_wait_for_their_artifacts,
    consumers.test_confirmations_in_any_order,
    consumers.test_retired_consumer,
    consumers.test_slow_consumer,
    operating.test_hold_of_the_sender_ends_by_itself,
    operating.test_hold_survives_kills_and_release_ends_it,
    operating.test_stop_in_the_middle_of_everything,
    quarantine.test_conflicts_pass_the_link_and_wait_for_an_operator,
    quarantine.test_refusals_are_known_where_the_facts_were_said,
    two_zones.test_partition_and_reconciliation,
]


@pytest.mark.campaign
@pytest.mark.parametrize("test", ALIKE, ids=lambda test: test.__name__)
async def test_zones_on_postgres_behave_alike(
    test: Callable[[tuple[Zone, Zone]], Awaitable[None]], both: tuple[DatabaseZone, DatabaseZone]
) -> None:
    """What holds of two zones on the log holds of two on PostgreSQL."""
    await test(both)


async def test_facts_go_both_ways(mixed: tuple[DatabaseZone, Zone]) -> None:
    """Two zones of different storages exchange facts, over a restart too, and say what their storage can do."""
    plant, enterprise = mixed
    plant.start()
    enterprise.start()
    for first in (0, 300):
        for zone in mixed:
            async with zone.client() as client:
                await client.append("operational", batch(300, first=first, from_zone=zone.name))
        await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
        plant.restart()
    for sender, receiver in (mixed, mixed[::-1]):
        facts = batch(600, from_zone=sender.name)
        wanted = list(zip(facts.values("from_zone"), facts.values("message_id"), facts.digests(), strict=True))
        assert history(sender, Buffer.STORE) == history(receiver, Buffer.FORWARD) == wanted
    told = {}
    for zone in mixed:
        async with zone.admin() as admin:
            told[zone.name] = (await admin.status())["storage"]
    assert told["plant-a"] | {"scrub": False} == {
        "backend": "postgres", "durable": True, "hash_chain": True, "offline_reads": False, "scrub": False,
        "folder_backup": False, "keeps_all": True,
    }  # fmt: skip
    assert told["enterprise"]["backend"] == "log" and told["enterprise"]["folder_backup"]
    plant.stop()
    enterprise.stop()
    check_sound(enterprise)


async def test_a_server_that_is_away_blocks_nobody_for_good(mixed: tuple[DatabaseZone, Zone]) -> None:
    """While the database is away producers are told to retry; when it is back everything goes on by itself."""
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


async def test_a_node_whose_commits_wait_for_a_standby_can_be_stopped(mixed: tuple[DatabaseZone, Zone]) -> None:
    """Where the server's synchronous standby is away, a node that is told to stop ends well, also while it starts.

    Who waits for a commit is told that its outcome is unknown; sent again it is there once.
    """
    plant, _ = mixed
    plant.start()
    async with plant.client() as client:
        await client.append("operational", batch(3, from_zone=plant.name))
        await wait_for_standby(plant.server, "nobody")
        appending = asyncio.ensure_future(client.append("operational", batch(2, first=3, from_zone=plant.name)))
        await waiting_for_standby(plant.server)
        await asyncio.to_thread(plant.stop)
        with pytest.raises(OutcomeUnknown):
            await appending
    plant.launch()
    # The session of the last append is ended by the node that starts.
    asked = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND query = 'COMMIT'"
    await until(lambda: plant.server.execute(asked), "the node to wait with its start")
    await asyncio.to_thread(plant.stop)
    await wait_for_standby(plant.server, "")
    plant.start()
    async with plant.client() as client:
        answer = await client.append("operational", batch(5, from_zone=plant.name))
    assert answer.receipt.offsets.tolist() == list(range(5))
    assert plant.end(Buffer.STORE) == 5


async def test_artifacts_and_held_gates_are_in_the_database(mixed: tuple[DatabaseZone, Zone]) -> None:
    """An artifact arrives before its fact, and a gate stays held, when the node's folder is lost with its machine."""
    plant, enterprise = mixed
    plant.start()
    enterprise.start()
    there, back = Random(1).randbytes(2_500_000), Random(2).randbytes(70_000)
    for zone, content in ((plant, there), (enterprise, back)):
        async with zone.client() as producer:
            # Each has a name of its own: what the other zone has sent may be here already.
            named = reference(content, key=f"{zone.name}.pdf")
            await upload(producer, content, named)
            fact = naming(named)
            fact = replace(fact, envelope=replace(fact.envelope, from_zone=zone.name))
            await producer.append("operational", sealed([fact]))
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    async with plant.admin() as operator:
        await operator.hold_gate("from-enterprise", "the database is being moved")
    plant.kill()
    shutil.rmtree(plant.data)
    plant.start()
    assert await download(enterprise, reference(there)) == there == await download(plant, reference(there))
    assert await download(plant, reference(back)) == back
    async with plant.admin() as operator:
        gates = {(view.link, view.side): view.gate for view in await operator.gates()}
    assert gates["from-enterprise", "receiver"].reason == "the database is being moved"


async def test_commands_know_where_the_facts_are(mixed: tuple[DatabaseZone, Zone]) -> None:
    """The doctor looks at the database, and a backup of the folder, which would hold no facts, is refused."""
    plant, _ = mixed
    plant.start()
    async with plant.client() as client:
        await client.append("operational", batch(10, from_zone=plant.name))
    plant.stop()
    config = str(plant.folder / "zone.toml")
    found = _ran("doctor", "-c", config, "--json")
    says = [each["says"] for each in json.loads(found.stdout)["findings"] if each["check"] == "storage"]
    assert "tables of version 2, 2 buffers, 10 facts" in says[0] and "bsfg backup" in says[1], says
    refused = _ran("backup", str(plant.root / "copy"), "-c", config)
    assert refused.returncode == 1 and b"storage_unable" in refused.stderr, refused.stderr
    plant.server.kill()
    found = _ran("doctor", "-c", config, "--json")
    says = [each["level"] for each in json.loads(found.stdout)["findings"] if each["check"] == "storage"]
    assert says[0] == "problem"
    plant.server.start()


def _ran(*args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "bsfg.cli", *args], capture_output=True, timeout=120, check=False)


@pytest.mark.campaign
@pytest.mark.soak
async def test_kills_of_nodes_and_database(
    mixed: tuple[DatabaseZone, Zone], soak_size: Callable[[int, int], int]
) -> None:
    """Nodes and the database server are killed in mid-batch; afterwards both sides are equal, in order and sound."""
    plant, enterprise = mixed
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    random = Random(seed)
    plant.start()
    enterprise.start()
    producers = Insistent(plant, seed), Insistent(enterprise, seed + 1)
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    for _ in range(soak_size(15, 300)):
        before = plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)
        await until(lambda at=before: (plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)) != at, "any facts")  # type: ignore[misc]
        await asyncio.sleep(random.uniform(0, 0.1))
        victim = random.choice((plant, enterprise, plant.server))
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
    check_sound(enterprise)
