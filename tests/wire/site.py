"""One node's services behind real listeners on loopback, with clients to call them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

from bsfg.clock import SystemClock
from bsfg.config import parse
from bsfg.gate import RECEIVER, SENDER
from bsfg.node.administration import Administration
from bsfg.node.authorize import Decision, Guard, Matrix
from bsfg.node.links import LinkRegistry
from bsfg.node.listeners import Listeners
from bsfg.node.parts import NodeContext, NodeSettings
from bsfg.node.service import NodeService
from bsfg.ports import Buffer, ConsumerSpec, Storage
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.memory import MemoryStorage
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.certs import create_authority, issue, load_trust
from bsfg.wire.client import BoundaryClient
from bsfg.wire.connection import Connection
from bsfg.wire.service import Caller
from bsfg.wire.tls import TlsFiles, Watched, client_context

STREAM = "operational"


@dataclass(frozen=True)
class Answer:
    """The answer to an HTTP request."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Read the body as JSON."""
        return json.loads(self.body)


CONFIG = """
[zone]
name = "plant"

[storage]
reserve = "1MiB"
[listen]
grpc = "127.0.0.1:0"
http = "127.0.0.1:0"
plaintext = true
plaintext_identity = "app"

[tls]
ca = "ca.crt"
certificate = "plant-bsfg.crt"
key = "plant-bsfg.key"

[streams.operational]
{stream}
[streams.audit]

[identities.app]
zone = "plant"
roles = ["producer", "consumer"]
streams = ["*"]
consumers = ["historian", "app-*"]

[identities.enterprise-bsfg]
zone = "enterprise"
roles = ["peer"]
streams = ["*"]
relay_for = ["idmz"]

[identities.pipeline]
zone = "plant"
roles = ["pipeline"]
streams = ["*"]

[identities.operator]
zone = "plant"
roles = ["operator"]
streams = ["*"]

[identities.viewer]
zone = "plant"
roles = ["viewer"]
streams = ["*"]

[identities.narrow]
zone = "plant"
roles = ["producer", "consumer", "viewer"]
streams = ["audit"]

[identities.gone]
zone = "plant"
roles = ["producer"]
streams = ["*"]
revoked = true
reason = "laptop lost"

[identities.late]
zone = "plant"
roles = ["producer", "operator"]
expires = "2020-01-01"

[links.from-enterprise]
zone = "enterprise"
address = "127.0.0.1:9"

[serve.enterprise]
"""


@dataclass
class Site:
    """The services of one node, its listeners, and what they were asked."""

    parts: NodeContext
    boundary: NodeService
    admin: Administration
    listeners: Listeners
    folder: Path
    refusals: list[tuple[Decision, Caller]]
    watched: Watched | None = None
    _clients: list[Any] = field(default_factory=list)

    @staticmethod
    async def open(
        folder: Path,
        *,
        storage: str = "memory",
        tls: bool = False,
        stream: str = "",
        zone_lines: str = "",
        more: str = "",
        names: Sequence[str] | None = None,
        **limits: Any,
    ) -> Site:
        """Open a site; ``stream``, ``zone_lines`` and ``more`` configure it, ``names`` and ``limits`` the wire."""
        os.makedirs(folder)
        text = CONFIG.format(stream=stream).replace('name = "plant"', f'name = "plant"\n{zone_lines}', 1) + more
        config = parse(text, folder / "zone.toml")
        clock, refusals = SystemClock(), []
        opened: Storage = await LogStorage.open(folder / "data") if storage == "log" else MemoryStorage()
        watched = Watched(certificates(folder)) if tls else None
        trust = load_trust(watched.files) if watched is not None else None
        guard = Guard(
            Matrix.of(config, trust), clock, lambda *refusal: refusals.append(refusal), None if tls else "app"
        )
        settings = NodeSettings.of(config)
        settings = replace(settings, limits=replace(settings.limits, **limits))
        board = LinkRegistry(clock)
        for name in config.links:
            board.add(name, RECEIVER)
        for name in config.serve:
            board.add(name, SENDER)
        artifacts = await ArtifactFolder.open(folder / "artifacts", clock=clock)
        parts = NodeContext(opened, settings, guard, clock, board, artifacts=artifacts)
        boundary, admin = NodeService(parts), Administration(parts)
        limited = settings.limits
        listeners = Listeners(
            boundary, admin, limited, zone="plant", watched=watched, observer=parts.metrics, names=names
        )
        await listeners.start(("127.0.0.1", 0), ("127.0.0.1", 0))
        site = Site(parts, boundary, admin, listeners, folder, refusals, watched)
        for name in settings.streams:
            await parts.store(name)
            await parts.forward(name)
        return site

    @property
    def grpc_address(self) -> str:
        """Where the gRPC listener is."""
        return f"127.0.0.1:{self.listeners.grpc.port}"

    def act_as(self, identity: str) -> None:
        """Let plaintext callers be somebody else from now on."""
        self.parts.guard = replace(self.parts.guard, plaintext_identity=identity)

    def connection(self, name: str | None = None, **options: Any) -> Connection:
        """Make a connection, with the certificate of ``name`` when the site speaks TLS."""
        if self.watched is None:
            return Connection(self.grpc_address, **options)
        watched = Watched(files_of(self.folder, name or "app"))
        return Connection(self.grpc_address, watched=watched, server_name="plant-bsfg", **options)

    def client(self, name: str | None = None, **options: Any) -> BoundaryClient:
        """Make a client that is closed with the site."""
        client = BoundaryClient(self.connection(name, **options))
        self._clients.append(client)
        return client

    def admin_client(self, name: str | None = None) -> AdminClient:
        """Make a client of the administration that is closed with the site."""
        client = AdminClient(self.connection(name))
        self._clients.append(client)
        return client

    async def http(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        *,
        name: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Make one HTTP request, with the certificate of ``name`` when the site speaks TLS."""
        context = None
        if self.watched is not None:
            context = client_context(files_of(self.folder, name or "app"))

        def call() -> Answer:
            address = ("127.0.0.1", self.listeners.http.port)
            connection: HTTPConnection = (
                HTTPSConnection(*address, context=context) if context else HTTPConnection(*address)
            )
            try:
                connection.request(method, path, body, headers or {})
                response = connection.getresponse()
                return Answer(response.status, dict(response.getheaders()), response.read())
            finally:
                connection.close()

        return await asyncio.to_thread(call)

    async def consumer(self, name: str = "historian", buffer: Buffer = Buffer.STORE, stream: str = STREAM) -> None:
        """Create a durable consumer."""
        await self.parts.storage.cursors.create(ConsumerSpec(name, stream, buffer))

    async def close(self) -> None:
        """Close clients, listeners and storage."""
        for client in self._clients:
            await client.close()
        await self.listeners.stop(0)
        if self.parts.artifacts is not None:
            await self.parts.artifacts.close()
        await self.parts.storage.close()


NAMES = ("plant-bsfg", "app", "enterprise-bsfg", "pipeline", "operator", "viewer", "narrow", "gone", "late", "stranger")


def certificates(folder: Path) -> TlsFiles:
    """Make an authority and a certificate for everybody; give those of the node."""
    now = datetime.now(UTC)
    create_authority(folder, name="test authority", days=10, now=now)
    for name in NAMES:
        issue(folder, name, days=5, now=now)
    return files_of(folder, "plant-bsfg")


def files_of(folder: Path, name: str) -> TlsFiles:
    """Name the files of one certificate."""
    return TlsFiles(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so; the test's own time limit is the only one."""
    while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
        await asyncio.sleep(0.001)
