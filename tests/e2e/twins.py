"""Two nodes of a zone on one server, and what may become of the active one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Self

from tests.e2e.cleanup import Cleanup
from tests.e2e.homes import Home, ServerZone
from tests.e2e.zones import Zone, until

from bsfg.errors import PeerUnreachable
from bsfg.sdk.endpoint import Endpoint
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.connection import Connection
from bsfg.wire.tls import Watched


@dataclass
class Twin(ServerZone):
    """One of the nodes of a zone, with a folder and a way to the server of its own."""

    tag: str = ""

    def __post_init__(self) -> None:
        self.way = self.home.way()

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / f"{self.name}-{self.tag}"

    def times(self, event: str) -> int:
        """Count how often it has logged something."""
        return len(self.events(event)) if self.log_path.exists() else 0


@dataclass
class Twins:
    """A zone of two nodes, and which of them is active."""

    active: Twin
    other: Twin
    takeovers: list[tuple[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, plain: Zone, cleanup: Cleanup, home: Home) -> Self:
        """Give a zone as it is with a node more, and with its facts in a server of its own."""
        cleanup.closing(SimpleNamespace(close=home.server.stop))
        first, second = (Twin(plain.name, plain.root, plain.certs, home=home, tag=tag) for tag in "ab")
        for node in (first, second):
            node.links, node.identities, node.serve = plain.links, plain.identities, plain.serve
            node.streams = plain.streams
            node.write()
            cleanup.closing(node.way)
            cleanup.zone(node)
        return cls(first, second)

    @property
    def name(self) -> str:
        """The name of the zone."""
        return self.active.name

    @property
    def nodes(self) -> tuple[Twin, Twin]:
        """Both nodes, the one that stands by first."""
        return self.other, self.active

    @property
    def address(self) -> str:
        """The addresses of both nodes, the one that stands by first."""
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def pulled_by(self, receiver: Zone, plain: Zone) -> None:
        """Have a receiver's link, which goes to a zone of one node, go to both of these."""
        single = f'address = "127.0.0.1:{plain.port}"'
        assert single in receiver.links
        both = ", ".join(f'"{each}"' for each in self.address.split(","))
        receiver.links = receiver.links.replace(single, f"address = [{both}]")
        receiver.write()

    async def start(self) -> None:
        """Start both, the active node before the one that stands by."""
        self.active.start()
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
                nodes = []
                # A node that is too slow to say that it serves is left for the other one, in the midst of a call, too.
                with suppress(PeerUnreachable):
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
        files = self.active.files(f"{self.name}-{role}")
        return Endpoint(self.address, files.ca, files.certificate, files.key, f"{self.name}-bsfg")

    def admin(self) -> AdminClient:
        """Call the administration of the zone, whichever node is active."""
        watched = Watched(self.active.files(f"{self.name}-operator"))
        return AdminClient(Connection(self.address, watched=watched, server_name=f"{self.name}-bsfg"))

    def told(self) -> str:
        """Sum up how long takeovers took, by what became of the active node."""
        lines = []
        for kind in sorted({how for how, _ in self.takeovers}):
            took = sorted(seconds for how, seconds in self.takeovers if how == kind)
            lines.append(f"{self.name}, {kind}: {len(took)} takeovers, p50 {median(took):.1f} s, max {took[-1]:.1f} s")
        return "\n".join(lines)
