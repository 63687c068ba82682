"""Zones on loopback, for benchmarks and the demo: certificates, configurations, and nodes as processes of their own.

Run as `python -m bsfg.cli.zones node -c zone.toml` and so on it is a command that ends when whoever started it does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import orjson

from bsfg.errors import PeerUnreachable, TimedOut
from bsfg.wire.certs import create_authority, issue
from bsfg.wire.tls import TlsFiles

ROLES = {"producer": '"producer"', "pipeline": '"pipeline"', "crowd": '"producer", "consumer", "operator"'}
"""The identities of each zone, by the end of their names, and what they may do."""

READY_SECONDS = 60.0
STOP_SECONDS = 30.0

_NODE = """
[zone]
name = "{zone}"
[listen]
grpc = "127.0.0.1:{port}"
http_enabled = false
[tls]
ca = "{certs}/ca.crt"
certificate = "{certs}/{zone}-bsfg.crt"
key = "{certs}/{zone}-bsfg.key"
"""
_IDENTITY = """
[identities.{zone}-{name}]
zone = "{zone}"
roles = [{roles}]
streams = ["*"]
consumers = ["{zone}-{name}"]
"""
_LINK = """
[links.from-{sender.name}]
zone = "{sender.name}"
address = "{sender.address}"
engine = "{engine}"
"""


def leash() -> None:
    """Stop this process cleanly when its standard input ends, which it also does when its parent is killed."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def certificates(folder: Path, zones: Iterable[str], roles: Iterable[str], *, days: int = 1) -> None:
    """Make an authority, and certificates for the nodes and the users of some zones."""
    now = datetime.now(UTC)
    create_authority(folder, name=f"the authority of {folder.name}", days=days + 1, now=now)
    for zone in zones:
        issue(folder, f"{zone}-bsfg", days=days, now=now, hosts=["127.0.0.1"])
        for role in roles:
            issue(folder, f"{zone}-{role}", days=days, now=now, serves=False)


@dataclass(slots=True)
class LoopbackZone:
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

    @property
    def address(self) -> str:
        """Where its node listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def certs(self) -> Path:
        """Where the certificates are."""
        return (self.folder.parent / "certs").absolute()

    def files(self, role: str) -> TlsFiles:
        """Give the certificate files of one of its identities."""
        return TlsFiles(self.certs / "ca.crt", *(self.certs / f"{self.name}-{role}.{end}" for end in ("crt", "key")))

    def write(self, rest: str) -> None:
        """Write its configuration: what all zones have, and the rest."""
        common = _NODE.format(zone=self.name, port=self.port, certs=self.certs)
        identities = (_IDENTITY.format(zone=self.name, name=name, roles=roles) for name, roles in ROLES.items())
        (self.folder / "zone.toml").write_text(f"{common}{''.join(identities)}{rest}", encoding="utf-8")

    def command(self, ready: str) -> list[str]:
        """Give the command of its process, which fills the file ``ready`` when it is at work."""
        return [sys.executable, "-m", "bsfg.cli.zones", "node", "-c", "zone.toml", "--ready-file", ready]

    def start(self) -> None:
        """Start the process and wait until it is at work."""
        ready = self.folder / f"{self.name}-ready"
        with (self.folder / "node.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(ready.name),
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: self._is_ready(ready), READY_SECONDS)
        self.port = orjson.loads(ready.read_bytes()).get("grpc_port", 0)

    def stop(self) -> None:
        """End the process, gently at first: by its leash alone, as a second signal may end what it does last."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _is_ready(self, ready: Path) -> bool:
        """Tell whether the process has filled its file; raise when it never will."""
        if self.process is not None and self.process.poll() is not None:
            last = (self.folder / "node.log").read_text(encoding="utf-8", errors="replace")[-1000:]
            raise PeerUnreachable(
                f"the node of {self.name} ended with code {self.process.returncode}",
                hint=f"The end of its log: {last}",
            )
        return ready.exists() and bool(ready.read_bytes())


AnyZone = TypeVar("AnyZone", bound=LoopbackZone)


class LoopbackSite(Generic[AnyZone]):
    """A sender and the zones that pull from it, under one certificate authority.

    ``engines`` are those of the receivers by their names; ``rest`` is what the configurations of all zones end with.
    """

    def __init__(self, root: Path, kind: type[AnyZone], sender: str, engines: dict[str, str], rest: str) -> None:
        self.root, self._engines, self._rest = root, engines, rest
        self.sender, *self.receivers = self.zones = [kind(name, root / name) for name in (sender, *engines)]
        certificates(self.sender.certs, (zone.name for zone in self.zones), ROLES)
        for zone in self.zones:
            zone.folder.mkdir()

    def start(self, zone: AnyZone) -> None:
        """Start a zone: the one that producers append to, or one that pulls from it."""
        others = self.receivers if zone is self.sender else [self.sender]
        rest = "".join(
            f'[identities.{other.name}-bsfg]\nzone = "{other.name}"\nroles = ["peer"]\nstreams = ["*"]\n'
            for other in others
        )
        if zone is self.sender:
            rest += "".join(f"[serve.{other.name}]\n" for other in others)
        else:
            rest += _LINK.format(sender=self.sender, engine=self._engines[zone.name])
        zone.write(self._rest + rest)
        zone.start()
        zone.write(self._rest + rest)  # whoever reads it later finds the node by it

    def stop(self) -> None:
        """End all nodes."""
        for zone in reversed(self.zones):
            zone.stop()


def wait_until(condition: Callable[[], object], timeout_seconds: float, step_seconds: float = 0.005) -> None:
    """Wait for something that must happen; give up with an error after a time."""
    ends = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > ends:
            raise TimedOut(f"what should have happened did not within {timeout_seconds:g} s")
        time.sleep(step_seconds)


if __name__ == "__main__":
    from bsfg.cli.app import run

    leash()
    sys.exit(run(sys.argv[1:]))
