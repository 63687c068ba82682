"""Two nodes of a zone on one server: whatever becomes of the active one, the other goes on where it ended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPSConnection
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.homes import HOMES
from tests.e2e.producing import history, seed_of_run
from tests.e2e.twins import Twin, Twins
from tests.e2e.zones import Zone, bsfg, pair, until

from bsfg.config import text_digest
from bsfg.errors import IdentityRevoked, StandingBy
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.sdk.consumer import AsyncConsumer
from bsfg.sdk.endpoint import Endpoint
from bsfg.sdk.producer import AsyncProducer
from bsfg.testing.facts import batch, messages
from bsfg.wire.tls import client_context

PLANT, ENTERPRISE = "plant-a", "enterprise"


@dataclass
class TwoZones:
    """A plant of two nodes, and the zone of one node that it exchanges facts with."""

    plant: Twins
    enterprise: Zone

    async def start(self) -> None:
        """Start all nodes."""
        await self.plant.start()
        self.enterprise.start()


@pytest.fixture(params=HOMES)
def site(tmp_path: Path, cleanup: Cleanup, request: pytest.FixtureRequest) -> TwoZones:
    """Give a zone of two nodes that exchanges facts with another zone, not started."""
    plain, enterprise = pair(tmp_path)
    plant = Twins.of(plain, cleanup, HOMES[request.param]())
    plant.pulled_by(enterprise, plain)
    return TwoZones(plant, cleanup.zone(enterprise))


class Traffic:
    """Facts both ways while nodes come and go: a producer and a consumer of the zone with two, and one of the other."""

    def __init__(self, site: TwoZones) -> None:
        self._site = site
        self.sent = {PLANT: 0, ENTERPRISE: 0}
        self.consumed: list[str | None] = []
        self._stopping = False

    async def run(self) -> None:
        """Produce and consume until `stop`, and until all that was produced has arrived."""
        site = self._site
        files = site.enterprise.files(f"{ENTERPRISE}-producer")
        there = (files.ca, files.certificate, files.key, f"{ENTERPRISE}-bsfg")
        other = Endpoint(f"127.0.0.1:{site.enterprise.port}", *there)
        async with asyncio.TaskGroup() as group:
            producing = [
                group.create_task(self._produce(PLANT, site.plant.endpoint("producer"))),
                group.create_task(self._produce(ENTERPRISE, other)),
            ]
            consuming = group.create_task(self._consume())
            await asyncio.gather(*producing)
            await until(lambda: len(self.consumed) >= self.sent[ENTERPRISE], "everything to be consumed")
            consuming.cancel()

    def stop(self) -> None:
        """Produce nothing new."""
        self._stopping = True

    async def flows(self) -> None:
        """Wait until what both zones produce from now on has arrived."""
        sent = dict(self.sent)
        await until(lambda: len(self.consumed) > sent[ENTERPRISE], "facts to be consumed again")
        await until(lambda: self._site.enterprise.end(Buffer.FORWARD) > sent[PLANT], "facts to arrive again")

    async def _produce(self, zone: str, endpoint: Endpoint) -> None:
        async with AsyncProducer(endpoint, stream="operational") as producer:
            futures = []
            while not self._stopping:
                (message,) = messages(1, first=self.sent[zone], from_zone=zone)
                futures.append(await producer.send(message))
                self.sent[zone] += 1
                await asyncio.sleep(0.02)
            assert [(await future).offset for future in futures] == list(range(len(futures)))

    async def _consume(self) -> None:
        async with AsyncConsumer("app-1", self._site.plant.endpoint("consumer"), fetch_wait_seconds=5) as consumer:
            async for entry in consumer:
                self.consumed.append(entry.message.envelope.message_id)
                consumer.confirm(entry)


def ids(zone: str, count: int) -> list[str | None]:
    """Give the ids of what a zone has produced, in order."""
    return [each.envelope.message_id for each in messages(count, from_zone=zone)]


async def campaign(site: TwoZones, how: list[str]) -> Traffic:
    """Disturb the active node again and again while facts flow; then insist that each is there once and in order."""
    await site.start()
    async with site.plant.admin() as admin:
        await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.FORWARD))
    traffic = Traffic(site)
    running = asyncio.create_task(traffic.run())
    for each in how:
        await traffic.flows()
        await site.plant.disturb(each)
    await traffic.flows()
    traffic.stop()
    await running
    await until(lambda: site.enterprise.end(Buffer.FORWARD) >= traffic.sent[PLANT], "everything to arrive")
    for sender, zone, kind in (
        (PLANT, site.plant.active, Buffer.STORE),
        (PLANT, site.enterprise, Buffer.FORWARD),
        (ENTERPRISE, site.enterprise, Buffer.STORE),
        (ENTERPRISE, site.plant.active, Buffer.FORWARD),
    ):
        assert [each[1] for each in history(zone, kind)] == ids(sender, traffic.sent[sender]), (sender, kind)
    assert traffic.consumed == ids(ENTERPRISE, traffic.sent[ENTERPRISE])
    return traffic


@pytest.mark.soak
async def test_takeovers(site: TwoZones, soak_size: Callable[[int, int], int]) -> None:
    """The active node is killed, paused and cut off from its storage: each fact is there once, and in order."""
    kinds = ["kill", "pause", "cut"]
    # A line that swallows everything is the slowest to be noticed.
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    how = kinds + Random(seed).choices([*kinds, "stall"], k=soak_size(0, 97))
    traffic = await campaign(site, how)
    print(f"{traffic.sent} facts, {len(how)} takeovers\n{site.plant.told()}")


async def test_who_stands_by_says_so(site: TwoZones) -> None:
    """A second node tells every caller who is active, and is not healthy; it takes over with held gates as they are."""
    await site.start()
    twins = site.plant
    standing, active = twins.other, twins.active
    name = f"{socket.gethostname()}:{active.port}"
    async with standing.client() as client:
        with pytest.raises(StandingBy, match=f"{name} is active") as caught:
            await client.append("operational", batch(1, from_zone=PLANT))
        assert caught.value.retryable and caught.value.details["active"] == name
        assert not await client.connection.check_health()
    for path in ("/readyz", "/v1/status", "/"):
        status, body = await asyncio.to_thread(_asked, standing, path)
        assert (status, body["code"]) == (503, "standing_by"), path
    assert (await asyncio.to_thread(_asked, standing, "/healthz"))[0] == 200
    await twins.known()
    async with twins.admin() as admin:
        nodes = (await admin.status())["nodes"]
        assert [(each["name"], each["active"]) for each in nodes] == [
            (name, True), (f"{socket.gethostname()}:{standing.port}", False),
        ]  # fmt: skip
        # The command moves to the active node, too.
        where, config = f"127.0.0.1:{standing.port},127.0.0.1:{active.port}", str(active.folder / "zone.toml")
        shown = bsfg("status", "--config", config, "--address", where, "--identity", f"{PLANT}-operator").decode()
        assert f"active: {name}; stands by: " in shown, shown
        await admin.hold_gate(f"from-{ENTERPRISE}", "the furnace is being relined")
        await twins.disturb("kill")
        gates = {(view.link, view.side): view.gate for view in await admin.gates()}
    assert gates[f"from-{ENTERPRISE}", "receiver"].reason == "the furnace is being relined"
    twins.active.stop()
    assert not twins.active.events("sessions_not_kept")


async def test_who_takes_over_goes_by_the_file_of_now(site: TwoZones) -> None:
    """Somebody is revoked while a node stands by: when it takes over, he is refused, and it tells of that file."""
    await site.start()
    standing = site.plant.other
    digest = _revoke(standing, f"{PLANT}-producer")
    await site.plant.disturb("kill")
    async with standing.client() as client:
        with pytest.raises(IdentityRevoked, match="laptop lost"):
            await client.append("operational", batch(1, from_zone=PLANT))
    assert standing.events("node_started")[-1]["digest"] == digest
    assert not standing.events("access_reloaded")


def _revoke(node: Twin, identity: str) -> str:
    """Revoke an identity in the file of one node; give the digest of what it is then."""
    path, row = node.folder / "zone.toml", f"[identities.{identity}]\n"
    text = path.read_text()
    assert row in text
    path.write_text(text.replace(row, f'{row}revoked = true\nreason = "laptop lost"\n'))
    return text_digest(path.read_bytes())


def _asked(node: Twin, path: str) -> tuple[int, dict[str, Any]]:
    context = client_context(node.files(f"{PLANT}-viewer"))
    with closing(HTTPSConnection("127.0.0.1", node.http_port, context=context, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, orjson.loads(answer.read())
