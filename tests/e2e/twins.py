"""Two nodes of a zone on one database, and what may become of the active one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, Self

from tests.e2e.cleanup import Cleanup
from tests.e2e.proxy import Proxy
from tests.e2e.test_postgres import TableLog
from tests.e2e.zones import Zone, until

from bsfg.ports import Buffer
from bsfg.sdk.endpoint import Endpoint
from bsfg.testing.postgres import PackagedServer
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.connection import Connection
from bsfg.wire.tls import Watched


@dataclass
class Twin(Zone):
    """One of the nodes of a zone, with a folder and a way to the database of its own."""

    server: Any = None
    tag: str = ""
    takeover_after: str = "3s"
    way: Any = None

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
    def of(cls, plain: Zone, cleanup: Cleanup, server: Any = None, kind: type[Twin] = Twin) -> Self:
        """Give a zone as it is with a node more, and with its facts in a server of its own."""
        server = server or PackagedServer()
        cleanup.closing(SimpleNamespace(close=server.stop))
        first, second = (kind(plain.name, plain.root, plain.certs, server=server, tag=tag) for tag in "ab")
        for node in (first, second):
            node.links, node.identities, node.serve = plain.links, plain.identities, plain.serve
            node.streams = plain.streams
            node.write()
            if node.way is not None:
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
