"""`JetStreamStorage`: all buffers and cursors of one zone in streams of NATS JetStream, written by one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import orjson

from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import BsfgError, StorageTaken
from bsfg.ports import Buffer, Capabilities, Clock
from bsfg.stores.jetstream.artifacts import JetStreamArtifacts
from bsfg.stores.jetstream.frames import JetStreamFrames
from bsfg.stores.jetstream.messages import HEAD, StoredMessage, head_text
from bsfg.stores.jetstream.server import JetStreamServer, JetStreamSettings
from bsfg.stores.jetstream.zone import JetStreamZone, ZoneNames, fresh_head, listed, new_of
from bsfg.stores.shared.frame import Damaged
from bsfg.stores.shared.keeper import ZoneNode
from bsfg.stores.shared.reading import PAGE_FRAMES, chain_behind, entries_in
from bsfg.stores.shared.storage import FramedStorage

STATE_PATIENCE_SECONDS = 2.0
OVERTAKEN_SECONDS = 1.0
"""How often an active node looks whether another one has claimed its zone."""


class JetStreamState:
    """The small values that a node keeps beside its buffers, in one message; see `bsfg.node.state.StateKeeper`."""

    problems: Sequence[str] = ()
    is_lost = False

    def __init__(self, zone: JetStreamZone) -> None:
        self._zone = zone
        self._values: dict[str, dict[str, Any]] = {}

    def load(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Read all values, by kind and name."""
        self._values = orjson.loads(self._zone.values("state").get("state", b"{}"))
        return {(kind, name): value for kind, names in self._values.items() for name, value in names.items()}

    def keep(self, kind: str, name: str, value: dict[str, Any]) -> None:
        """Replace a value and return when it is durable."""
        fresh = {**self._values, kind: {**self._values.get(kind, {}), name: value}}
        # Not for long: whoever holds a gate keeps everybody waiting meanwhile.
        self._zone.keep(
            "keeping the state of the node", "state", orjson.dumps(fresh), patience_seconds=STATE_PATIENCE_SECONDS
        )
        self._values = fresh

    def close(self) -> None:
        """The connection is the storage's."""


class JetStreamStorage(FramedStorage):
    """The storage of a zone in JetStream; open it with `JetStreamStorage.open`."""

    capabilities = Capabilities("jetstream", hash_chain=True, keeps_all=True)

    def __init__(self, server: JetStreamServer, clock: Clock, hasher: Hasher) -> None:
        self.zone = JetStreamZone(server)
        super().__init__(self.zone, clock, hasher)
        self.server = server

    @classmethod
    async def open(
        cls,
        settings: JetStreamSettings,
        *,
        zone: str,
        clock: Clock | None = None,
        hasher: Hasher | None = None,
        on_sync: Callable[[float], None] = lambda seconds: None,
    ) -> Self:
        """Open the streams of a zone as its one writer, making them when there are none."""
        storage = cls(JetStreamServer(settings, on_sync), clock or SystemClock(), hasher or Sha256())
        return await storage.begin(zone)

    def artifacts(self, *, max_artifact_bytes: int | None, capacity_bytes: int | None) -> JetStreamArtifacts:
        """Give the store of the zone's artifacts, beside its facts."""
        return JetStreamArtifacts(
            self.zone, self.clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes
        )

    def state(self) -> JetStreamState:
        """Give what keeps the node's own values."""
        return JetStreamState(self.zone)

    def nodes(self) -> Sequence[ZoneNode]:
        """Give this node, and those that stand by and ask for it."""
        return self.zone.nodes

    async def end_waiting(self) -> None:
        """Have nobody wait for a server any more."""
        await asyncio.to_thread(self.server.close)

    async def overtaken(self) -> None:
        """Wait until another node has claimed the zone, or may have, since no server is reached from here."""
        while not self.zone.is_silent:
            await asyncio.sleep(OVERTAKEN_SECONDS)
            try:
                await asyncio.to_thread(self.zone.check_claim)
            except StorageTaken:
                return
            except BsfgError:
                continue  # the server is away, or slow


def look(settings: JetStreamSettings, zone: str, verified_bytes_max: int) -> tuple[str, list[str]]:
    """Say what is found at the servers without changing anything, and what is wrong; raises what a start would.

    Up to so many bytes every frame is read and held against the chain.
    """
    server, names = JetStreamServer(settings), ZoneNames(settings.prefix, zone)
    try:
        server.open()
        said = f"{server.run('checking the server', server.check)}, prefix {settings.prefix}"
        found = server.run("listing buffers", lambda: listed(server, names))
        if not found:
            return f"{said}: no buffers yet; the node makes them when it is first used", []
        buffers = {(stream, kind): reading(server, names, stream, kind) for stream, kind in found}
        heads = [buffer.found().head for buffer in buffers.values()]
        said = f"{said}: {len(heads)} buffers, {sum(head.end - head.start for head in heads)} facts"
        if sum(head.used_bytes for head in heads) > verified_bytes_max:
            return said, []
        breaks = [text for (stream, kind), each in buffers.items() for text in chain_breaks(each, stream, kind)]
        return said + ("" if breaks else ", every byte verified"), breaks
    finally:
        server.close()


def reading(server: JetStreamServer, names: ZoneNames, stream: str, kind: Buffer) -> JetStreamFrames:
    """Open a buffer to read it only, as its last message leaves it."""
    name, base = names.buffer(stream, kind)

    async def ask() -> tuple[dict[str, Any], StoredMessage | None]:
        found = await server.api(f"STREAM.INFO.{name}")
        seq = found["state"]["last_seq"]
        return found["config"]["metadata"], await server.get(name, seq=seq) if seq else None

    metadata, last = server.run(f"reading {stream}/{kind}", ask)
    new = new_of(metadata)
    last = last or StoredMessage(0, "", {HEAD: head_text(fresh_head(new))}, b"")
    return JetStreamFrames(server, name, base, f"{stream}/{kind}", new, last, reads_only=True)


def chain_breaks(buffer: JetStreamFrames, stream: str, kind: Buffer) -> Iterator[str]:
    """Read every frame of a buffer, and say where one is not what was written, or does not follow the one before it."""
    found, (kept, _) = buffer.found(), buffer.history(())
    at, chain = (kept[-1].last + 1, kept[-1].chain_after) if kept else (0, buffer.first_chain)
    while frames := buffer.frames(at, found.head.end, PAGE_FRAMES):
        for frame in frames:
            if (frame.base, frame.chain_before) != (at, chain):
                yield f"{stream}/{kind}: the frame at {frame.base} does not follow what is before offset {at}"
            try:
                entries_in(frame, found.log_id, kind)
            except Damaged as damage:
                yield f"{stream}/{kind}: the frame at {frame.base}: {damage}"
            at, chain = frame.end, chain_behind(frame)
    if (at, chain) != (found.head.end, found.head.chain):
        yield f"{stream}/{kind}: the last frame is not the one that the last message names"
