"""Zones on PostgreSQL and on JetStream, and one on the log: facts go both ways, whoever is killed, servers too."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.e2e import test_artifacts as artifacts
from tests.e2e import test_consumers as consumers
from tests.e2e import test_operating as operating
from tests.e2e import test_quarantine as quarantine
from tests.e2e import test_two_zones as two_zones
from tests.e2e.cleanup import Cleanup
from tests.e2e.homes import HOMES, InDatabase, InStreams, ServerZone
from tests.e2e.producing import Insistent, calm, check_sound, expected, history, seed_of_run
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.zones import Zone, pair, until
from tests.servers import wait_for_standby, waiting_for_standby

from bsfg.errors import BsfgError, OutcomeUnknown
from bsfg.ports import Buffer
from bsfg.testing.facts import batch, sealed

Mixed = tuple[ServerZone, Zone]


@pytest.fixture(params=HOMES)
def mixed(tmp_path: Path, cleanup: Cleanup, request: pytest.FixtureRequest) -> Mixed:
    """Give a zone on a server and one on the log that pull from each other, not started."""
    plain, enterprise = pair(tmp_path)
    return ServerZone.of(plain, HOMES[request.param](), cleanup), cleanup.zone(enterprise)


@pytest.fixture
def database(tmp_path: Path, cleanup: Cleanup) -> ServerZone:
    """Give a zone on PostgreSQL, not started."""
    return ServerZone.of(pair(tmp_path)[0], InDatabase(), cleanup)


@pytest.fixture
def servers(tmp_path: Path, cleanup: Cleanup) -> Mixed:
    """Give a zone on JetStream and one on PostgreSQL that pull from each other, not started."""
    plant, enterprise = pair(tmp_path)
    return ServerZone.of(plant, InStreams(), cleanup), ServerZone.of(enterprise, InDatabase(), cleanup)


@pytest.fixture(params=HOMES)
def both(tmp_path: Path, cleanup: Cleanup, request: pytest.FixtureRequest) -> tuple[ServerZone, ServerZone]:
    """Give two zones on servers that pull from each other, not started."""
    plant, enterprise = (ServerZone.of(each, HOMES[request.param](), cleanup) for each in pair(tmp_path))
    return plant, enterprise


OfTwoZones = Callable[[tuple[Zone, Zone]], Awaitable[None]]
BY_STORAGE = [
    artifacts.test_facts_wait_for_their_artifacts,
    consumers.test_confirmations_in_any_order,
    operating.test_stop_in_the_middle_of_everything,
    quarantine.test_conflicts_pass_the_link_and_wait_for_an_operator,
    two_zones.test_partition_and_reconciliation,
]
"""What a storage has a part in: artifacts, cursors, the end of its sessions, what is set aside, and a backlog."""

BY_NODE = [
    consumers.test_retired_consumer,
    consumers.test_slow_consumer,
    operating.test_hold_of_the_sender_ends_by_itself,
    operating.test_hold_survives_kills_and_release_ends_it,
    quarantine.test_refusals_are_known_where_the_facts_were_said,
]
"""What a node decides, whatever its storage is."""


@pytest.mark.campaign
@pytest.mark.parametrize("test", BY_STORAGE, ids=lambda test: test.__name__)
async def test_zones_on_servers_behave_alike(test: OfTwoZones, both: tuple[ServerZone, ServerZone]) -> None:
    """What holds of two zones on the log holds of two on PostgreSQL, and of two on JetStream."""
    await test(both)


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.parametrize("test", BY_NODE, ids=lambda test: test.__name__)
async def test_nodes_decide_alike(test: OfTwoZones, both: tuple[ServerZone, ServerZone]) -> None:
    """So does what nodes decide, which the same tests show on the log every time.

    That consumers, holds and refusals are kept by each storage is shown by tests/conformance and, over the loss of a
    node's folder, by test_artifacts_and_held_gates_are_at_the_server.
    """
    await test(both)


async def test_facts_go_both_ways(mixed: Mixed) -> None:
    """Two zones of different storages exchange facts, over a restart too, and say what their storage can do."""
    await exchange(mixed)
    plant, enterprise = mixed
    told = {}
    for zone in mixed:
        async with zone.admin() as admin:
            told[zone.name] = (await admin.status())["storage"]
    assert told["plant-a"] | {"scrub": False} == {
        "backend": plant.home.backend, "durable": True, "hash_chain": True, "offline_reads": False, "scrub": False,
        "folder_backup": False, "keeps_all": True,
    }  # fmt: skip
    assert told["enterprise"]["backend"] == "log" and told["enterprise"]["folder_backup"]
    plant.stop()
    enterprise.stop()
    check_sound(enterprise)


async def test_facts_go_both_ways_between_servers(servers: Mixed) -> None:
    """So do two zones on two kinds of servers."""
    await exchange(servers)


async def exchange(zones: Mixed) -> None:
    """Have facts go both ways, over a restart too, and insist that each is there once and in order."""
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


async def test_a_server_that_is_away_blocks_nobody_for_good(mixed: Mixed) -> None:
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


async def test_a_node_whose_commits_wait_for_a_standby_can_be_stopped(database: ServerZone) -> None:
    """Where the server's synchronous standby is away, a node that is told to stop ends well, also while it starts.

    Who waits for a commit is told that its outcome is unknown; sent again it is there once.
    """
    plant = database
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


async def test_artifacts_and_held_gates_are_at_the_server(mixed: Mixed) -> None:
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
        await operator.hold_gate("from-enterprise", "the servers are being moved")
    plant.kill()
    shutil.rmtree(plant.data)
    plant.start()
    assert await download(enterprise, reference(there)) == there == await download(plant, reference(there))
    assert await download(plant, reference(back)) == back
    async with plant.admin() as operator:
        gates = {(view.link, view.side): view.gate for view in await operator.gates()}
    assert gates["from-enterprise", "receiver"].reason == "the servers are being moved"


async def test_commands_know_where_the_facts_are(mixed: Mixed) -> None:
    """The doctor looks at the server, also when it is away, and a backup of the folder, without facts, is refused."""
    plant, _ = mixed
    plant.start()
    async with plant.client() as client:
        await client.append("operational", batch(10, from_zone=plant.name))
    plant.stop()
    config = str(plant.folder / "zone.toml")
    says = [each["says"] for each in _storage_findings(config)]
    assert "2 buffers, 10 facts, every byte verified" in says[0] and "bsfg backup" in says[1], says
    assert ("tables of version 2" in says[0]) == (plant.home.backend == "postgres"), says
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
async def test_kills_of_nodes_and_server(mixed: Mixed, soak_size: Callable[[int, int], int]) -> None:
    """Nodes and the server are killed in mid-batch; afterwards both sides are equal, in order and sound."""
    await killed_again_and_again(mixed, soak_size(9, 300))
    check_sound(mixed[1])


@pytest.mark.campaign
@pytest.mark.long
@pytest.mark.soak
async def test_kills_of_nodes_and_both_servers(servers: Mixed, soak_size: Callable[[int, int], int]) -> None:
    """So they are where both zones have servers, which are killed, too.

    Each kind of server is killed by test_kills_of_nodes_and_server, as the storage of a sender and of a receiver.
    """
    await killed_again_and_again(servers, soak_size(8, 300))


async def killed_again_and_again(zones: Mixed, kills: int) -> None:
    """Kill nodes and servers while both zones produce, and insist that each fact is there once and in order."""
    plant, enterprise = zones
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    random = Random(seed)
    plant.start()
    enterprise.start()
    producers = Insistent(plant, seed), Insistent(enterprise, seed + 1)
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    victims: list[Any] = [*zones, *(zone.server for zone in zones if isinstance(zone, ServerZone))]
    # Each in turn, in an order that is new every time round: few kills hit everybody, too.
    turns = (victim for _ in itertools.count() for victim in random.sample(victims, len(victims)))
    for victim in itertools.islice(turns, kills):
        before = plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)
        await until(lambda at=before: (plant.end(Buffer.FORWARD), enterprise.end(Buffer.FORWARD)) != at, "any facts")  # type: ignore[misc]
        await asyncio.sleep(random.uniform(0, 0.1))
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
