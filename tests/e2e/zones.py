"""Zones as real processes with real certificates, for tests that cut, kill and lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from bsfg.errors import BsfgError
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.stores.log.reader import open_folder
from bsfg.wire.client import BoundaryClient
from bsfg.wire.connection import Connection
from bsfg.wire.tls import TlsFiles, Watched

READY_SECONDS = 60.0
SETTLE_SECONDS = 120.0


def free_port() -> int:
    """Give a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def bsfg(*args: str) -> None:
    """Run a command of ours and insist that it works."""
    subprocess.run([sys.executable, "-m", "bsfg.cli", *args], check=True, capture_output=True, timeout=60)


@dataclass
class Zone:
    """One zone: its folder, its configuration and its process."""

    name: str
    root: Path
    certs: Path
    port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    links: str = ""
    serve: str = ""
    streams: str = "[streams.operational]\n"
    identities: str = ""
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / self.name

    @property
    def log_path(self) -> Path:
        """Where its node logs."""
        return self.folder / "node.log"

    def write(self) -> None:
        """Write its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "zone.toml").write_text(
            f"""
[zone]
name = "{self.name}"
[listen]
grpc = "127.0.0.1:{self.port}"
http = "127.0.0.1:{self.http_port}"
[tls]
ca = "{self.certs}/ca.crt"
certificate = "{self.certs}/{self.name}-bsfg.crt"
key = "{self.certs}/{self.name}-bsfg.key"
[identities.{self.name}-producer]
zone = "{self.name}"
roles = ["producer"]
[identities.{self.name}-consumer]
zone = "{self.name}"
roles = ["consumer"]
consumers = ["app-*"]
[identities.{self.name}-operator]
zone = "{self.name}"
roles = ["operator"]
[identities.{self.name}-viewer]
zone = "{self.name}"
roles = ["viewer"]
{self.identities}
{self.streams}
{self.links}
{self.serve}
"""
        )

    def start(self) -> None:
        """Start the node and wait until it serves."""
        self.starts += 1
        ready = self.folder / f"ready-{self.starts}"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bsfg.cli", "node", "-c", "zone.toml", "--ready-file", ready.name],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + READY_SECONDS
        while not (ready.exists() and ready.read_bytes()):
            assert self.process.poll() is None, self.log_path.read_text()[-3000:]
            assert time.monotonic() < deadline, "the node did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        """End the node as a power switch would end the process."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """Stop the node as an operator would, and insist that it ends well."""
        if self.process is not None:
            self.process.terminate()
            code = self.process.wait(timeout=30)
            self.process = None
            assert code == 0, self.log_path.read_text()[-3000:]

    def files(self, identity: str | None = None) -> TlsFiles:
        """Give the certificate files of an identity, by default the node's own."""
        name = identity or f"{self.name}-bsfg"
        return TlsFiles(self.certs / "ca.crt", self.certs / f"{name}.crt", self.certs / f"{name}.key")

    @contextlib.asynccontextmanager
    async def client(self, identity: str = "producer", *, whole: bool = False) -> AsyncIterator[BoundaryClient]:
        """Call the node as one of its identities."""
        name = identity if whole else f"{self.name}-{identity}"
        connection = Connection(
            f"127.0.0.1:{self.port}", watched=Watched(self.files(name)), server_name=f"{self.name}-bsfg"
        )
        async with BoundaryClient(connection) as client:
            yield client

    def end(self, buffer: Buffer, stream: str = "operational") -> int:
        """Give where a buffer ends, read from its folder."""
        for log in open_folder(self.folder / "data"):
            if (log.stream, log.buffer) == (stream, buffer):
                return log.view().end
        return 0

    def messages(self, buffer: Buffer, stream: str = "operational") -> list[Message]:
        """Read everything that a buffer holds, from its folder."""
        for log in open_folder(self.folder / "data"):
            if (log.stream, log.buffer) == (stream, buffer):
                batches = [frame.entries for frame in log.frames(0) if frame.entries is not None]
                return [entry.message for batch in batches for entry in batch.to_entries()]
        return []

    def events(self, name: str | None = None) -> list[dict[str, object]]:
        """Read the log records of the node, of all its lives."""
        found = []
        for line in self.log_path.read_bytes().splitlines():
            with contextlib.suppress(orjson.JSONDecodeError):
                record = orjson.loads(line)
                if name is None or record.get("event") == name:
                    found.append(record)
        return found


def authority(root: Path, *names: str) -> Path:
    """Make an authority and certificates for the nodes and users of some zones."""
    certs = root / "certs"
    bsfg("certs", "init-ca", str(certs))
    for name in names:
        bsfg("certs", "issue", str(certs), f"{name}-bsfg", "--host", "127.0.0.1")
        for role in ("producer", "consumer", "operator", "viewer"):
            bsfg("certs", "issue", str(certs), f"{name}-{role}")
    return certs


def link_to(sender: Zone, *, stream: str = "operational", more: str = "") -> str:
    """Write the inbound link of a receiver, and the row of the peer."""
    return f"""
[links.from-{sender.name}]
zone = "{sender.name}"
address = "127.0.0.1:{sender.port}"
engine = "native"
fetch_wait = "1s"
backoff_first = "50ms"
backoff_max = "500ms"
{more}
"""


def peer(zone: str, more: str = "") -> str:
    """Write the row of a peer and what it is served."""
    return f"""
[identities.{zone}-bsfg]
zone = "{zone}"
roles = ["peer"]
{more}
"""


def pair(root: Path, *, more: str = "") -> tuple[Zone, Zone]:
    """Make two zones that pull from each other."""
    certs = authority(root, "plant-a", "enterprise")
    plant, enterprise = Zone("plant-a", root, certs), Zone("enterprise", root, certs)
    plant.links, enterprise.links = link_to(enterprise, more=more), link_to(plant, more=more)
    for zone, other in ((plant, enterprise), (enterprise, plant)):
        zone.identities = peer(other.name)
        zone.serve = f"[serve.{other.name}]\nlost_after = '3s'\n"
        zone.write()
    return plant, enterprise


async def settled(sender: Zone, receiver: Zone, stream: str = "operational") -> None:
    """Wait until the receiver holds as many facts as the sender produced."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        with contextlib.suppress(BsfgError, OSError):
            if receiver.end(Buffer.FORWARD, stream) >= sender.end(Buffer.STORE, stream):
                return
        assert time.monotonic() < deadline, (
            receiver.end(Buffer.FORWARD, stream),
            sender.end(Buffer.STORE, stream),
            receiver.log_path.read_text()[-2000:],
        )
        await asyncio.sleep(0.05)
