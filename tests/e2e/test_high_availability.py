"""Two nodes of a zone on one database: whatever becomes of the active one, the other goes on where it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPSConnection
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.nursery import nursery
from tests.e2e.producing import history, seed_of_run
from tests.e2e.proxy import Proxy
from tests.e2e.test_postgres import TableLog
from tests.e2e.zones import Zone, bsfg, certificates, link_to, peer, serve, until

from bsfg.errors import StandingBy
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.sdk.consumer import AsyncConsumer
from bsfg.sdk.endpoint import Endpoint
from bsfg.sdk.producer import AsyncProducer
from bsfg.testing.facts import batch, messages
from bsfg.testing.postgres import PackagedServer
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.connection import Connection
from bsfg.wire.tls import Watched, client_context

PLANT, ENTERPRISE = "plant-a", "enterprise"


@dataclass
class Twin(Zone):
    """One of the nodes of a zone, with a folder and a way to the database of its own."""

    server: Any = None
    tag: str = ""
    takeover_after: str = "3s"
    way: Proxy = field(init=False)

    def __post_init__(self) -> None:
        (path,) = [each for each in self.server.folder.glob(".s.PGSQL.*") if each.suffix != ".lock"]
        self.way = Proxy(Path(path))

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / f"{self.name}-{self.tag}"

    def write(self) -> None:
        """Write its configuration."""
        dsn = f"host=127.0.0.1 port={self.way.port} user=postgres dbname=postgres sslmode=disable"
        table = f'dsn = "{dsn}"\npatience = "1s"\ntakeover_after = "{self.takeover_after}"\n'
        self.storage = f'backend = "postgres"\n[storage.postgres]\n{table}'
        super().write()

    def log(self, buffer: Buffer, stream: str = "operational") -> Any:
        """Read one of the zone's buffers."""
        return TableLog(self.server.dsn, stream, buffer)

    def launch(self) -> None:
        """Start the node, without waiting for what becomes of it."""
        assert self.pid is None
        self.starts += 1
        self.pid = nursery().start(self.folder, self.log_path, f"ready-{self.starts}")

    def times(self, event: str) -> int:
        """Count how often it has logged something."""
        return len(self.events(event)) if self.log_path.exists() else 0


@dataclass
class Twins:
    """A zone of two nodes, the one that is active first, and the zone it exchanges facts with."""

    active: Twin
    other: Twin
    enterprise: Zone
    takeovers: list[tuple[str, float]] = field(default_factory=list)

    async def start(self) -> None:
        """Start all, the active node before the one that stands by."""
        self.active.start()
        self.enterprise.start()
        self.other.launch()
        await self.other.seen("standing_by")

    async def disturb(self, how: str) -> None:
        """Have the other node take over, and the one that was active stand by."""
        await self.known()
        old, new = self.active, self.other
        started, stood = new.times("node_started"), old.times("standing_by")
        begun = time.monotonic()
        match how:
            case "kill":
                old.kill()
            case "pause":
                assert old.pid is not None
                os.kill(old.pid, signal.SIGSTOP)
            case "cut":
                old.way.cut()
            case "stall":
                old.way.stall()
        await until(lambda: new.times("node_started") > started, f"a takeover after {how}")
        self.takeovers.append((how, time.monotonic() - begun))
        self.active, self.other = new, old
        match how:
            case "kill":
                old.launch()
            case "pause":
                assert old.pid is not None
                os.kill(old.pid, signal.SIGCONT)
            case "cut" | "stall":
                await until(lambda: old.times("standing_by") > stood, "a node without storage to stand by")
                old.way.mend()
        await until(lambda: old.times("standing_by") > stood, f"the node that was overtaken by {how} to stand by")

    async def known(self) -> None:
        """Wait until the active node knows that another one stands by."""

        async with self.admin() as admin:
            for _ in range(600):
                nodes = (await admin.status())["nodes"]
                if [each["active"] for each in nodes] == [True, False]:
                    # On a busy machine a node may have been too slow to be taken for alive.
                    if nodes[0]["name"].endswith(f":{self.other.port}"):
                        self.active, self.other = self.other, self.active
                    return
                await asyncio.sleep(0.1)
        raise AssertionError("the active node does not see the one that stands by")

    def endpoint(self, role: str) -> Endpoint:
        """Give the addresses of both nodes, the one that stands by first."""
        nodes = (self.other, self.active)
        files = nodes[0].files(f"{PLANT}-{role}")
        where = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        return Endpoint(where, files.ca, files.certificate, files.key, f"{PLANT}-bsfg")

    def admin(self) -> AdminClient:
        """Call the administration of the zone, whichever node is active."""
        endpoint = self.endpoint("operator")
        watched = Watched(self.active.files(f"{PLANT}-operator"))
        return AdminClient(Connection(endpoint.address, watched=watched, server_name=f"{PLANT}-bsfg"))


@pytest.fixture
def twins(tmp_path: Path, cleanup: Cleanup) -> Twins:
    """Give a zone of two nodes that exchanges facts with another zone, not started."""
    certs = certificates(tmp_path, PLANT, ENTERPRISE)
    server = PackagedServer()
    cleanup.closing(SimpleNamespace(close=server.stop))
    nodes = [Twin(PLANT, tmp_path, certs, server=server, tag=tag) for tag in "ab"]
    enterprise = Zone(ENTERPRISE, tmp_path, certs)
    both = ", ".join(f'"127.0.0.1:{node.port}"' for node in nodes)
    single = f'address = "127.0.0.1:{nodes[0].port}"'
    enterprise.links = link_to(nodes[0]).replace(single, f"address = [{both}]")
    enterprise.identities, enterprise.serve = peer(PLANT), serve(PLANT)
    enterprise.write()
    cleanup.zone(enterprise)
    for node in nodes:
        node.links, node.identities, node.serve = link_to(enterprise), peer(ENTERPRISE), serve(ENTERPRISE)
        node.write()
        cleanup.closing(node.way)
        cleanup.zone(node)
    return Twins(nodes[0], nodes[1], enterprise)


class Traffic:
    """Facts both ways while nodes come and go: a producer and a consumer of the zone with two, and one of the other."""

    def __init__(self, twins: Twins) -> None:
        self._twins = twins
        self.sent = {PLANT: 0, ENTERPRISE: 0}
        self.consumed: list[str | None] = []
        self._stopping = False

    async def run(self) -> None:
        """Produce and consume until `stop`, and until all that was produced has arrived."""
        twins = self._twins
        files = twins.enterprise.files(f"{ENTERPRISE}-producer")
        there = (files.ca, files.certificate, files.key, f"{ENTERPRISE}-bsfg")
        other = Endpoint(f"127.0.0.1:{twins.enterprise.port}", *there)
        async with asyncio.TaskGroup() as group:
            producing = [
                group.create_task(self._produce(PLANT, twins.endpoint("producer"))),
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
        await until(lambda: self._twins.enterprise.end(Buffer.FORWARD) > sent[PLANT], "facts to arrive again")

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
        async with AsyncConsumer("app-1", self._twins.endpoint("consumer"), fetch_wait_seconds=5) as consumer:
            async for entry in consumer:
                self.consumed.append(entry.message.envelope.message_id)
                consumer.confirm(entry)


def ids(zone: str, count: int) -> list[str | None]:
    """Give the ids of what a zone has produced, in order."""
    return [each.envelope.message_id for each in messages(count, from_zone=zone)]


async def campaign(twins: Twins, how: list[str]) -> Traffic:
    """Disturb the active node again and again while facts flow; then insist that each is there once and in order."""
    await twins.start()
    async with twins.admin() as admin:
        await admin.create_consumer(ConsumerSpec("app-1", "operational", Buffer.FORWARD))
    traffic = Traffic(twins)
    running = asyncio.create_task(traffic.run())
    for each in how:
        await traffic.flows()
        await twins.disturb(each)
    await traffic.flows()
    traffic.stop()
    await running
    await until(lambda: twins.enterprise.end(Buffer.FORWARD) >= traffic.sent[PLANT], "everything to arrive")
    for sender, zone, kind in (
        (PLANT, twins.active, Buffer.STORE),
        (PLANT, twins.enterprise, Buffer.FORWARD),
        (ENTERPRISE, twins.enterprise, Buffer.STORE),
        (ENTERPRISE, twins.active, Buffer.FORWARD),
    ):
        assert [each[1] for each in history(zone, kind)] == ids(sender, traffic.sent[sender]), (sender, kind)
    assert traffic.consumed == ids(ENTERPRISE, traffic.sent[ENTERPRISE])
    return traffic


@pytest.mark.soak
async def test_takeovers(twins: Twins, soak_size: Callable[[int, int], int]) -> None:
    """The active node is killed, paused and cut off from its storage: each fact is there once, and in order."""
    kinds = ["kill", "pause", "cut"]
    # A line that swallows everything is the slowest to be noticed.
    how = kinds + Random(seed_of_run()).choices([*kinds, "stall"], k=soak_size(0, 97))
    await campaign(twins, how)
    for kind in sorted(set(how)):
        took = sorted(seconds for each, seconds in twins.takeovers if each == kind)
        print(f"{kind}: {len(took)} takeovers, p50 {median(took):.1f} s, max {took[-1]:.1f} s")


async def test_who_stands_by_says_so(twins: Twins) -> None:
    """A second node tells every caller who is active, and is not healthy; it takes over with held gates as they are."""
    await twins.start()
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


def _asked(node: Twin, path: str) -> tuple[int, dict[str, Any]]:
    context = client_context(node.files(f"{PLANT}-viewer"))
    with closing(HTTPSConnection("127.0.0.1", node.http_port, context=context, timeout=30)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, orjson.loads(answer.read())
