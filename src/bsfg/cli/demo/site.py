"""The site of the demo: its zones, the network between them, and the files that describe all that to the nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bsfg.cli.demo.server import DemoServer
from bsfg.cli.zones import certificates
from bsfg.config.access import consumer_name
from bsfg.node.dashboard.sessions import hash_of, make
from bsfg.ports import Buffer
from bsfg.sdk.endpoint import Endpoint
from bsfg.testing.ports import free_port

PIECE_BYTES = 64 << 10


class Wire:
    """Carries connections to a port of this machine.

    While it is cut it breaks every connection, also new ones. Its own port stays taken, so that nobody else gets it.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.port = 0

    async def open(self) -> None:
        """Take a free port and begin to carry."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Break all connections, and every new one."""
        self._is_cut = True
        for end in list(self._ends):
            end.transport.abort()

    def mend(self) -> None:
        """Carry again."""
        self._is_cut = False

    def close(self) -> None:
        """End everything."""
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, back}
        self._ends |= ends
        ways = [asyncio.create_task(_carry(reader, back)), asyncio.create_task(_carry(there, writer))]
        try:
            # One that came while the wire was being cut must not slip through.
            if not self._is_cut:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in ends:
                end.transport.abort()
            self._ends -= ends


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(PIECE_BYTES):
            target.write(data)
            await target.drain()


EVENTS, ORDERS = "operational", "documents"
"""The streams: machine events go from the plant to the enterprise, work orders the other way."""

DRAIN_FACTS_PER_SECOND = 1_500
"""How fast a link may go; without a limit what gathers here would cross before anybody could see it."""

CAUGHT_UP = {EVENTS: 80, ORDERS: 2}
"""The backlog at which a link counts as normal again: half a second of machine events, a few orders."""

BATCH = {EVENTS: 10_000, ORDERS: 10}
"""How many facts are fetched at once: orders wait for the PDFs of all that come with them."""

ROLES = ("producer", "pipeline", "operator", "viewer")


@dataclass(slots=True)
class DemoNode:
    """One node of a zone: its folder and where it listens."""

    name: str
    title: str
    root: Path
    port: int = 0
    http_port: int = 0

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / self.name

    @property
    def config(self) -> Path:
        """Its configuration."""
        return self.folder / "zone.toml"

    @property
    def words(self) -> Path:
        """What it has logged."""
        return self.root / f"{self.name}.stderr"

    @property
    def address(self) -> str:
        """Where producers, peers and operators reach it."""
        return f"127.0.0.1:{self.port}"


@dataclass(slots=True)
class DemoZone:
    """One zone and its nodes: one with its facts in a folder, or several with theirs at one server."""

    name: str
    title: str
    root: Path
    nodes: list[DemoNode] = field(default_factory=list)
    server: DemoServer | None = None

    def __post_init__(self) -> None:
        self.nodes = self.nodes or [DemoNode(self.name, "node", self.root)]

    @property
    def data(self) -> Path:
        """Where its buffers are, if its facts are in a folder."""
        return self.nodes[0].folder / "data"

    @property
    def config(self) -> Path:
        """Its configuration, that of its first node."""
        return self.nodes[0].config

    @property
    def address(self) -> str:
        """Where its nodes are, with commas between."""
        return ",".join(node.address for node in self.nodes)

    def endpoint(self, role: str, node: DemoNode | None = None) -> Endpoint:
        """Give the way to its node, whichever is active, or to one node alone."""
        certs = self.root / "certs"
        files = certs / "ca.crt", certs / f"{self.name}-{role}.crt", certs / f"{self.name}-{role}.key"
        return Endpoint(node.address if node is not None else self.address, *files, server_name=f"{self.name}-bsfg")


@dataclass(slots=True)
class DemoLink:
    """One inbound link: who pulls what from whom, and the wire that it goes over."""

    name: str
    sender: DemoZone
    receiver: DemoZone
    stream: str
    buffer: Buffer
    wire: Wire

    @property
    def key(self) -> str:
        """Its name among those of all zones."""
        return f"{self.receiver.name}/{self.name}"

    @property
    def address(self) -> str:
        """How its receiver reaches the sender, as its configuration has it: by the wire, or each of several nodes."""
        nodes = self.sender.nodes
        return f'"127.0.0.1:{self.wire.port}"' if len(nodes) == 1 else _listed([node.address for node in nodes])

    @property
    def consumer(self) -> str:
        """The cursor of the receiver at the sender."""
        return consumer_name(self.receiver.name, self.stream, self.buffer)


@dataclass(slots=True)
class DemoSite:
    """Two zones, or three with one in the middle; the first is the plant and the last the enterprise.

    With ``two_nodes`` the plant has two nodes at one server, of which one is active.
    """

    root: Path
    three_zones: bool
    spark: bool
    two_nodes: bool = False
    zones: list[DemoZone] = field(init=False)
    links: list[DemoLink] = field(init=False)
    token: str = field(default_factory=make)

    def __post_init__(self) -> None:
        names = [("plant-a", "Plant A"), ("idmz", "IDMZ"), ("enterprise", "Enterprise")]
        if not self.three_zones:
            del names[1]
        self.zones = [DemoZone(name, title, self.root) for name, title in names]
        if self.two_nodes:
            self.plant.nodes = [DemoNode(f"plant-a-{number}", f"node {number}", self.root) for number in (1, 2)]
        for node in self.nodes:
            node.port, node.http_port = free_port(), free_port()
        self.links = [*_way(self.zones, EVENTS), *_way(self.zones[::-1], ORDERS)]

    @property
    def plant(self) -> DemoZone:
        """Where machines are."""
        return self.zones[0]

    @property
    def enterprise(self) -> DemoZone:
        """Where orders come from."""
        return self.zones[-1]

    @property
    def nodes(self) -> list[DemoNode]:
        """The nodes of all zones."""
        return [node for zone in self.zones for node in zone.nodes]

    def inbound(self, zone: DemoZone) -> list[DemoLink]:
        """Give the links that a zone pulls."""
        return [link for link in self.links if link.receiver is zone]

    def write(self) -> None:
        """Make certificates, and the file of every zone."""
        certificates(self.root / "certs", (zone.name for zone in self.zones), ROLES)
        for zone in self.zones:
            for node in zone.nodes:
                node.folder.mkdir()
                node.config.write_text("".join(self._text(zone, node)), encoding="utf-8")

    def _text(self, zone: DemoZone, node: DemoNode) -> Iterator[str]:
        yield _ZONE.format(zone=zone, node=node, certs=self.root / "certs", token=hash_of(self.token))
        if zone.server is not None:
            yield zone.server.storage
        for role in ROLES:
            yield _IDENTITY.format(name=f"{zone.name}-{role}", zone=zone.name, role=role, relay="[]")
        for other in self.zones:
            pulled = [link for link in self.inbound(zone) if link.sender is other]
            served = [link for link in self.links if link.sender is zone and link.receiver is other]
            if not pulled and not served:
                continue
            relayed = [each.name for each in self.zones if each not in (zone, other)] if self.three_zones else []
            yield _IDENTITY.format(name=f"{other.name}-bsfg", zone=other.name, role="peer", relay=_listed(relayed))
            for link in pulled:
                engine = "spark" if self.spark else "native"
                calm, batch = CAUGHT_UP[link.stream], BATCH[link.stream]
                yield _LINK.format(link=link, engine=engine, rate=DRAIN_FACTS_PER_SECOND, calm=calm, batch=batch)
            if served:
                streams, buffers = ({str(getattr(link, name)) for link in served} for name in ("stream", "buffer"))
                yield _SERVE.format(zone=other.name, streams=_listed(streams), buffers=_listed(buffers))


def _way(zones: list[DemoZone], stream: str) -> Iterator[DemoLink]:
    """Give the links by which a stream travels: the first pulls what a zone has produced, another what it relays."""
    for number, (sender, receiver) in enumerate(pairwise(zones)):
        buffer = Buffer.FORWARD if number else Buffer.STORE
        name = f"over-{sender.name}" if number else f"from-{sender.name}"
        yield DemoLink(name, sender, receiver, stream, buffer, Wire(sender.nodes[0].port))


def _listed(names: list[str] | set[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in sorted(names)) + "]"


_ZONE = """\
[zone]
name = "{zone.name}"
[listen]
grpc = "{node.address}"
http = "127.0.0.1:{node.http_port}"
[tls]
ca = "{certs}/ca.crt"
certificate = "{certs}/{zone.name}-bsfg.crt"
key = "{certs}/{zone.name}-bsfg.key"
expiry_warning = "1h"
[streams.operational]
[streams.documents]
[tokens.demo]
hash = "{token}"
role = "operator"
facts = true
"""
_IDENTITY = """
[identities.{name}]
zone = "{zone}"
roles = ["{role}"]
streams = ["*"]
relay_for = {relay}
"""
_LINK = """
[links.{link.name}]
zone = "{link.sender.name}"
address = {link.address}
streams = ["{link.stream}"]
buffer = "{link.buffer}"
engine = "{engine}"
rate_limit = {rate}
normal_backlog = {calm}
batch_facts = {batch}
fetch_wait = "1s"
backoff_first = "50ms"
backoff_max = "500ms"
"""
_SERVE = """
[serve.{zone}]
streams = {streams}
buffers = {buffers}
lost_after = "2s"
"""
