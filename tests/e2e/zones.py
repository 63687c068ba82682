"""Zones as real processes with real certificates, for tests that cut, kill and lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from tests.e2e.nursery import alive, nursery

from bsfg.cli import zones as loopback
from bsfg.errors import BsfgError
from bsfg.fact import Entry, Message
from bsfg.ports import Buffer, GapRecord
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.testing.ports import free_port
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.client import BoundaryClient
from bsfg.wire.connection import Connection
from bsfg.wire.tls import TlsFiles, Watched

READY_SECONDS = 60.0
SETTLE_SECONDS = 60.0
"""How long something that must happen may take before a test gives up; it is never what is measured."""

ROLES = ("producer", "consumer", "operator", "viewer")

QUICKLY_REFUSED = {"bsfg.wire.limits.DELAY_SECONDS_MAX": 0.01}
"""Changes a node so that who is refused hundreds of times waits for his answers as in the product, and not as long."""


def bsfg(*args: str) -> bytes:
    """Run a command of ours, insist that it works, and give what it printed."""
    done = subprocess.run([sys.executable, "-m", "bsfg.cli", *args], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, (args, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


async def until(condition: Callable[[], object], what: str = "", *, timeout_seconds: float = SETTLE_SECONDS) -> Any:
    """Wait until a condition holds and give its value; what is not there yet counts as not holding."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        asked = time.thread_time()
        with contextlib.suppress(BsfgError, OSError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
        # Who asks costly questions asks less often: the nodes that are waited for need the processor, too.
        await asyncio.sleep(max(0.02, 4 * (time.thread_time() - asked)))


@dataclass
class RecordsRead:
    """What a node has logged, each line read once however often somebody looks for news."""

    found: list[dict[str, Any]] = field(default_factory=list)
    bytes_read: int = 0

    def read(self, path: Path) -> None:
        """Read the lines that were added; one that is still being written is read the next time."""
        with path.open("rb") as log:
            log.seek(self.bytes_read)
            whole, end, _ = log.read().rpartition(b"\n")
        self.bytes_read += len(whole) + len(end)
        for line in whole.splitlines():
            with contextlib.suppress(orjson.JSONDecodeError):
                record = orjson.loads(line)
                if isinstance(record, dict):
                    self.found.append(record)


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
    hasher: str = "sha256"
    identities: str = ""
    storage: str = ""
    more: str = ""
    changed: dict[str, float] = field(default_factory=dict)
    """Constants of its node that are others than in the product, each with its whole name."""
    pid: int | None = None
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    records: RecordsRead = field(default_factory=RecordsRead)

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.root / self.name

    @property
    def data(self) -> Path:
        """Where its buffers are."""
        return self.folder / "data"

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
hasher = "{self.hasher}"
[storage]
reserve = "1MiB"
{self.storage}
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
streams = ["*"]
[identities.{self.name}-consumer]
zone = "{self.name}"
roles = ["consumer"]
streams = ["*"]
consumers = ["app-*"]
[identities.{self.name}-operator]
zone = "{self.name}"
roles = ["operator"]
streams = ["*"]
[identities.{self.name}-viewer]
zone = "{self.name}"
roles = ["viewer"]
streams = ["*"]
{self.identities}
{self.streams}
{self.links}
{self.serve}
{self.more}
"""
        )

    # Its process.

    def start(self, *, by_command: bool = False, descriptors: int | None = None) -> None:
        """Start the node and wait until it serves; ``by_command`` runs `bsfg node` as a person would.

        With ``descriptors`` the system allows it so many and no more.
        """
        pid = self.launch(by_command=by_command, descriptors=descriptors)
        ready = self.folder / f"ready-{self.starts}"
        deadline = time.monotonic() + READY_SECONDS
        while not (ready.exists() and ready.read_bytes()):
            assert alive(pid), self.log_path.read_text()[-3000:]
            assert time.monotonic() < deadline, "the node did not start"
            time.sleep(0.01)

    def launch(self, *, by_command: bool = False, descriptors: int | None = None) -> int:
        """Start the node, without waiting for what becomes of it, and give its process id."""
        assert self.pid is None, f"{self.name} runs already"
        self.starts += 1
        ready = f"ready-{self.starts}"
        if by_command or descriptors is not None:
            assert not self.changed, "a command runs the product as it is"
            self.pid = self._run_command(ready, descriptors)
        else:
            self.pid = nursery().start(self.folder, self.log_path, ready, self.changed)
        return self.pid

    def _run_command(self, ready: str, descriptors: int | None = None) -> int:
        limited = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh"] if descriptors is not None else []
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*limited, sys.executable, "-m", "bsfg.cli", "node", "-c", "zone.toml", "--ready-file", ready],
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        return self.process.pid

    def mapped(self) -> str:
        """Name what the node's process has loaded."""
        assert self.process is not None
        return Path(f"/proc/{self.process.pid}/maps").read_text()

    def kill(self) -> None:
        """End the node as a power switch would end the process."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the node as an operator would, and insist that it ends well."""
        if self.pid is not None:
            assert self._end(signal.SIGTERM) == 0, self.log_path.read_text()[-3000:]

    def restart(self) -> None:
        """Stop the node well and start it again, with its configuration as it is now."""
        self.stop()
        self.write()
        self.start()

    def _end(self, how: signal.Signals) -> int:
        pid, self.pid = self.pid, None
        if pid is None:
            return 0
        os.kill(pid, how)
        if self.process is not None:
            process, self.process = self.process, None
            return process.wait(30)
        return nursery().wait(pid)

    # Calls.

    def files(self, identity: str | None = None) -> TlsFiles:
        """Give the certificate files of an identity, by default the node's own."""
        name = identity or f"{self.name}-bsfg"
        return TlsFiles(self.certs / "ca.crt", self.certs / f"{name}.crt", self.certs / f"{name}.key")

    def connection(self, identity: str, *, request_timeout_seconds: float = 30.0) -> Connection:
        """Give a connection to the node as one of the identities of this zone, or of another with its whole name."""
        name = f"{self.name}-{identity}" if identity in ROLES else identity
        return Connection(
            f"127.0.0.1:{self.port}",
            watched=Watched(self.files(name)),
            server_name=f"{self.name}-bsfg",
            request_timeout_seconds=request_timeout_seconds,
        )

    @contextlib.asynccontextmanager
    async def client(self, identity: str = "producer") -> AsyncIterator[BoundaryClient]:
        """Call the node as one of its identities."""
        async with BoundaryClient(self.connection(identity)) as client:
            yield client

    @contextlib.asynccontextmanager
    async def admin(self, identity: str = "operator") -> AsyncIterator[AdminClient]:
        """Call the node's administration."""
        async with AdminClient(self.connection(identity)) as client:
            yield client

    # Its folder, read without asking the node.

    def log(self, buffer: Buffer, stream: str = "operational") -> LogFolder:
        """Open one of its logs for reading."""
        for log in open_folder(self.data):
            if (log.stream, log.buffer) == (stream, buffer):
                return log
        raise FileNotFoundError(f"{self.name} has no {buffer} buffer of {stream}")

    def end(self, buffer: Buffer, stream: str = "operational") -> int:
        """Give where a buffer ends; 0 when it is not there yet."""
        try:
            return self.log(buffer, stream).view().end
        except FileNotFoundError:
            return 0

    def entries(self, buffer: Buffer, stream: str = "operational") -> list[Entry]:
        """Read everything that a buffer holds."""
        frames = self.log(buffer, stream).frames()
        return [entry for frame in frames if frame.entries is not None for entry in frame.entries.to_entries()]

    def messages(self, buffer: Buffer, stream: str = "operational") -> list[Message]:
        """Read the messages that a buffer holds."""
        return [entry.message for entry in self.entries(buffer, stream)]

    def gaps(self, buffer: Buffer, stream: str = "operational") -> list[GapRecord]:
        """Read the gap records of a buffer."""
        return self.log(buffer, stream).notes().gaps

    def events(self, name: str | None = None, **fields: object) -> list[dict[str, Any]]:
        """Read the log records of the node, of all its lives."""
        self.records.read(self.log_path)
        return [
            record
            for record in self.records.found
            if (name is None or record.get("event") == name) and fields.items() <= record.items()
        ]

    def modes(self, link: str, side: str = "receiver") -> list[str]:
        """Give the modes that a gate has gone through, in order."""
        return [event["mode"] for event in self.events("gate_moved", link=link, side=side)]

    async def seen(self, name: str, *, count: int = 1, **fields: object) -> dict[str, Any]:
        """Wait until the node has logged something, and give its last such record."""
        found: list[dict[str, Any]] = await until(
            lambda: (e := self.events(name, **fields))[count - 1 :] and e, f"{name} {fields}"
        )
        return found[-1]

    async def mode(self, link: str, mode: str, side: str = "receiver") -> None:
        """Wait until a gate is in a mode."""
        await until(lambda: self.modes(link, side)[-1:] == [mode], f"{self.name}: {link}/{side} to be {mode}")


def certificates(root: Path, *zones: str, folder: str = "certs") -> Path:
    """Make an authority and certificates for the nodes and users of some zones."""
    loopback.certificates(root / folder, zones, ROLES, days=60)
    return root / folder


def link_to(sender: Zone, *, name: str | None = None, port: int | None = None, more: str = "") -> str:
    """Write the inbound link of a receiver; ``port`` is that of something between the two."""
    return f"""
[links.{name or f"from-{sender.name}"}]
zone = "{sender.name}"
address = "127.0.0.1:{port or sender.port}"
engine = "native"
fetch_wait = "1s"
backoff_first = "50ms"
backoff_max = "500ms"
{more}
"""


def peer(zone: str, more: str = "") -> str:
    """Write the row of a peer."""
    return f"""
[identities.{zone}-bsfg]
zone = "{zone}"
roles = ["peer"]
streams = ["*"]
{more}
"""


def serve(zone: str, more: str = "") -> str:
    """Write what a peer is served."""
    return f"""
[serve.{zone}]
lost_after = "3s"
{more}
"""


def pair(root: Path, *, more: str = "", streams: str = "[streams.operational]\n") -> tuple[Zone, Zone]:
    """Make two zones that pull from each other."""
    certs = certificates(root, "plant-a", "enterprise")
    plant, enterprise = (Zone(name, root, certs, streams=streams) for name in ("plant-a", "enterprise"))
    plant.links, enterprise.links = link_to(enterprise, more=more), link_to(plant, more=more)
    for zone, other in ((plant, enterprise), (enterprise, plant)):
        zone.identities, zone.serve = peer(other.name), serve(other.name)
        zone.write()
    return plant, enterprise


async def settled(sender: Zone, receiver: Zone, stream: str = "operational") -> None:
    """Wait until the receiver holds as many facts as the sender produced."""
    await until(
        lambda: receiver.end(Buffer.FORWARD, stream) >= sender.end(Buffer.STORE, stream),
        f"{receiver.name} to have what {sender.name} has",
    )
