"""Two zones on loopback for the benchmark: certificates, configurations, and their nodes as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import crc32c
import orjson

from bsfg.cli.bench.workload import FROM_ZONE, TO_ZONE
from bsfg.errors import PeerUnreachable, TimedOut
from bsfg.ports import Buffer
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.notes import WATERMARK, read_watermark
from bsfg.stores.log.storage import log_folder
from bsfg.wire.certs import create_authority, issue

STREAM = "bench"
PRODUCER = f"{FROM_ZONE}-producer"
CROWD = f"{FROM_ZONE}-crowd"
"""All others at once, beside whom a producer is a bystander."""

READY_SECONDS = 60.0
STOP_SECONDS = 30.0

_COMMON = """
[zone]
name = "{zone}"
[listen]
grpc = "127.0.0.1:0"
http_enabled = false
[tls]
ca = "{certs}/ca.crt"
certificate = "{certs}/{zone}-bsfg.crt"
key = "{certs}/{zone}-bsfg.key"
[log]
level = "warning"
[streams.{stream}]
"""
_SENDER = """
[identities.{producer}]
zone = "{zone}"
roles = ["producer"]
streams = ["*"]
[identities.{crowd}]
zone = "{zone}"
roles = ["producer", "consumer", "operator"]
streams = ["*"]
consumers = ["{crowd}"]
[identities.{other}-bsfg]
zone = "{other}"
roles = ["peer"]
streams = ["*"]
[serve.{other}]
"""
_RECEIVER = """
[identities.{other}-bsfg]
zone = "{other}"
roles = ["peer"]
streams = ["*"]
[links.from-{other}]
zone = "{other}"
address = "127.0.0.1:{port}"
engine = "native"
"""


@dataclass(slots=True)
class BenchZone:
    """One zone: its folder and, while it runs, its node."""

    name: str
    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process of the node."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the node and wait until it serves."""
        ready = self.folder / "ready"
        command = [sys.executable, "-m", "bsfg.cli.bench.node_server", "-c", "zone.toml", "--ready-file", "ready"]
        with (self.folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(lambda: self._is_ready(ready), READY_SECONDS)
        self.port = orjson.loads(ready.read_bytes())["grpc_port"]

    def stop(self) -> None:
        """End the node, gently at first."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def end(self, buffer: Buffer) -> int:
        """Give how far a buffer is durable, read from its folder without asking the node."""
        watermark = read_watermark(DiskFiles(self.folder / "data"), log_folder(STREAM, buffer))
        return watermark[1] if watermark is not None else 0

    @contextmanager
    def published_end(self, buffer: Buffer) -> Iterator[Callable[[], int]]:
        """Open what the writer of a buffer publishes, and give a quick look at how far it is durable."""
        path = self.folder / "data" / log_folder(STREAM, buffer) / "durable"
        with path.open("rb", buffering=0) as published:
            last = 0

            def end() -> int:
                nonlocal last
                data = os.pread(published.fileno(), WATERMARK.size, 0)
                # While it is being written the checksum is wrong; then what was seen before still holds.
                if crc32c.crc32c(data[:-4]) == WATERMARK.unpack(data)[3]:
                    last = WATERMARK.unpack(data)[1]
                return last

            yield end

    def cpu_seconds(self) -> float:
        """Give the processor time that the node has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _is_ready(self, ready: Path) -> bool:
        """Tell whether the node has written its ports; raise when it never will."""
        if self.process is not None and self.process.poll() is not None:
            last = (self.folder / "node.log").read_text(encoding="utf-8", errors="replace")[-1000:]
            raise PeerUnreachable(
                f"the node of {self.name} ended with code {self.process.returncode}",
                hint=f"The end of its log: {last}",
            )
        return ready.exists() and bool(ready.read_bytes())


@dataclass(slots=True)
class BenchSite:
    """A sender and a receiver that pulls from it, under one certificate authority."""

    root: Path
    sender: BenchZone = field(init=False)
    receiver: BenchZone = field(init=False)

    def __post_init__(self) -> None:
        self.sender, self.receiver = (BenchZone(name, self.root / name) for name in (FROM_ZONE, TO_ZONE))
        now = datetime.now(UTC)
        create_authority(self.certs, name="bsfg bench", days=2, now=now)
        for zone in (self.sender, self.receiver):
            zone.folder.mkdir()
            issue(self.certs, f"{zone.name}-bsfg", days=1, now=now)
        for name in (PRODUCER, CROWD):
            issue(self.certs, name, days=1, now=now, serves=False)
        self._write(self.sender, self.receiver, _SENDER)

    @property
    def certs(self) -> Path:
        """Where the certificates are."""
        return self.root / "certs"

    def start_sender(self) -> None:
        """Start the zone that producers append to."""
        self.sender.start()

    def start_receiver(self) -> None:
        """Start the zone that pulls from the other."""
        self._write(self.receiver, self.sender, _RECEIVER)
        self.receiver.start()

    def stop(self) -> None:
        """End both nodes."""
        self.receiver.stop()
        self.sender.stop()

    def _write(self, zone: BenchZone, other: BenchZone, rest: str) -> None:
        values: dict[str, Any] = {
            "zone": zone.name,
            "other": other.name,
            "port": other.port,
            "certs": self.certs.absolute(),
            "stream": STREAM,
            "producer": PRODUCER,
            "crowd": CROWD,
        }
        (zone.folder / "zone.toml").write_text((_COMMON + rest).format(**values), encoding="utf-8")


def wait_until(condition: Callable[[], object], timeout_seconds: float, step_seconds: float = 0.005) -> None:
    """Wait for something that must happen; give up with an error after a time."""
    ends = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimedOut(f"what should have happened did not within {timeout_seconds:g} s")
        time.sleep(step_seconds)
