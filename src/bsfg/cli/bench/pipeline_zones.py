"""Three zones on loopback: one sends, one pulls with its own engine, and one is served by Spark."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bsfg.cli.bench.node_zones import PRODUCER, STREAM, Zone
from bsfg.cli.bench.workload import FROM_ZONE, TO_ZONE
from bsfg.spark.calls import Access
from bsfg.wire.certs import create_authority, issue
from bsfg.wire.tls import TlsFiles

LAKE = "lake"
LINK = f"from-{FROM_ZONE}"

_COMMON = """
[zone]
name = "{zone}"
[listen]
grpc = "127.0.0.1:{port}"
http_enabled = false
[tls]
ca = "{certs}/ca.crt"
certificate = "{certs}/{zone}-bsfg.crt"
key = "{certs}/{zone}-bsfg.key"
[log]
level = "warning"
[streams.{stream}]
store_capacity = "100GiB"
forward_capacity = "100GiB"
[identities.{zone}-pipeline]
zone = "{zone}"
roles = ["pipeline"]
streams = ["*"]
"""
_PEER = """
[identities.{other}-bsfg]
zone = "{other}"
roles = ["peer"]
streams = ["*"]
"""
_SERVE = """
[serve.{other}]
"""
_LINK = """
[links.{link}]
zone = "{other}"
address = "127.0.0.1:{other_port}"
engine = "{engine}"
"""


@dataclass(slots=True)
class PipelineSite:
    """The sender and its two receivers under one certificate authority."""

    root: Path
    sender: Zone = field(init=False)
    native: Zone = field(init=False)
    lake: Zone = field(init=False)

    def __post_init__(self) -> None:
        self.sender, self.native, self.lake = (Zone(name, self.root / name) for name in (FROM_ZONE, TO_ZONE, LAKE))
        now = datetime.now(UTC)
        create_authority(self.certs, name="bsfg bench", days=2, now=now)
        for zone in (self.sender, self.native, self.lake):
            zone.folder.mkdir()
            issue(self.certs, f"{zone.name}-bsfg", days=1, now=now)
            issue(self.certs, f"{zone.name}-pipeline", days=1, now=now, serves=False)
        issue(self.certs, PRODUCER, days=1, now=now, serves=False)

    @property
    def certs(self) -> Path:
        """Where the certificates are."""
        return (self.root / "certs").absolute()

    def start_sender(self) -> None:
        """Start the zone that producers append to."""
        rest = "".join((_PEER + _SERVE).format(other=zone.name) for zone in (self.native, self.lake))
        rest += f'[identities.{PRODUCER}]\nzone = "{self.sender.name}"\nroles = ["producer"]\nstreams = ["*"]\n'
        self._write(self.sender, rest)
        self.sender.start()

    def start(self, receiver: Zone) -> None:
        """Start a zone that pulls from the sender."""
        engine = "native" if receiver is self.native else "spark"
        rest = (_PEER + _LINK).format(other=self.sender.name, link=LINK, other_port=self.sender.port, engine=engine)
        self._write(receiver, rest)
        receiver.start()
        # Whoever reads the configuration later finds the node by it.
        self._write(receiver, rest, receiver.port)

    def access(self, zone: Zone) -> Access:
        """Give the way of a zone's own pipeline to its node."""
        name = f"{zone.name}-pipeline"
        files = TlsFiles(self.certs / "ca.crt", self.certs / f"{name}.crt", self.certs / f"{name}.key")
        return Access.of(f"127.0.0.1:{zone.port}", files, f"{zone.name}-bsfg")

    def stop(self) -> None:
        """End all nodes."""
        for zone in (self.lake, self.native, self.sender):
            zone.stop()

    def _write(self, zone: Zone, rest: str, port: int = 0) -> None:
        common = _COMMON.format(zone=zone.name, certs=self.certs, stream=STREAM, port=port)
        (zone.folder / "zone.toml").write_text(common + rest, encoding="utf-8")
