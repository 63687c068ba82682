"""`JetStreamStorage`: all of one zone in streams of NATS JetStream, its artifacts included, written by one node."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self
from uuid import uuid4

import orjson

from bsfg.artifacts import ArtifactStats, ArtifactStore, Collected, StoredArtifact, StoredContent, check_name
from bsfg.clock import SystemClock
from bsfg.digest import Hasher, Sha256
from bsfg.errors import BsfgError, StorageTaken
from bsfg.ports import Buffer, Capabilities, Clock
from bsfg.stores.jetstream.frames import JetStreamFrames
from bsfg.stores.jetstream.messages import HEAD, StoredMessage, head_text, pieces
from bsfg.stores.jetstream.server import Away, JetStreamServer, JetStreamSettings, WrongLastSequence
from bsfg.stores.jetstream.zone import SUBJECT_SEQUENCE, JetStreamZone, ZoneNames, fresh_head, listed, new_of, stream_of
from bsfg.stores.shared.artifacts import SharedArtifacts, Upload, missing
from bsfg.stores.shared.frame import Damaged
from bsfg.stores.shared.keeper import ZoneNode
from bsfg.stores.shared.reading import PAGE_FRAMES, chain_behind, entries_in
from bsfg.stores.shared.storage import FramedStorage

_CONTENT, _NAME, _REFERENCES = "content", "name", "references"
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ContentPlace:
    """Where content is: under which subject, from which message on, and until when it was needed."""

    size_bytes: int
    upload: str
    seq: int
    needed_unix_ms: int


class JetStreamArtifacts(SharedArtifacts):
    """The artifacts of a zone in its streams."""

    def __init__(
        self,
        zone: JetStreamZone,
        clock: Clock,
        *,
        max_artifact_bytes: int | None = None,
        capacity_bytes: int | None = None,
    ) -> None:
        super().__init__(clock, max_artifact_bytes=max_artifact_bytes, capacity_bytes=capacity_bytes)
        self._zone, self._server = zone, zone.server
        self._content = {
            what.removeprefix(f"{_CONTENT}."): ContentPlace(**orjson.loads(data))
            for what, data in zone.values(f"{_CONTENT}.").items()
        }
        found = [StoredArtifact(**orjson.loads(data)) for data in zone.values(f"{_NAME}.").values()]
        self._names = {(each.bucket, each.key): each for each in found}
        self.references = ValueMemory(zone, _REFERENCES)
        name, base = zone.names.artifacts
        self._server.run("opening artifacts", lambda: stream_of(self._server, name, base, {}), changes=True)

    def _named(self, bucket: str, key: str) -> StoredArtifact | None:
        return self._names.get((bucket, key))

    def _is_here(self, digest: str) -> bool:
        return digest in self._content

    def _claim(self, digests: Sequence[str]) -> list[int | None]:
        now = self._clock.now_unix_ms()
        with self._lock:
            for digest in {each for each in digests if each in self._content}:
                self._need(digest, now)
                self._needed_ms[digest] = self._clock.monotonic_ms()
            places = [self._content.get(digest) for digest in digests]
        return [place.size_bytes if place is not None else None for place in places]

    def _need(self, digest: str, unix_ms: int) -> None:
        """Note that content was needed at a time."""
        place = self._content[digest]
        if place.needed_unix_ms < unix_ms:
            self._place(digest, replace(place, needed_unix_ms=unix_ms))

    def _place(self, digest: str, place: ContentPlace) -> None:
        self._zone.keep("storing an artifact", f"{_CONTENT}.{digest}", orjson.dumps(asdict(place)))
        self._content[digest] = place

    def _upload_of(self, digest: str) -> Upload | None:
        place = self._content.get(digest)
        return Upload(place.upload, place.seq) if place is not None else None

    def _pieces_of(self, upload: Upload) -> Iterator[bytes]:
        """Read the messages of an upload."""
        name, base = self._zone.names.artifacts
        subject, seq = f"{base}.{upload.name}", upload.first

        async def read() -> StoredMessage | None:
            found = await self._server.page(name, subject, max(1, seq), 1, _READ_BYTES)
            # Whether there is none the leader knows, not each of the servers.
            return found[0] if found else await self._server.get(name, seq=max(1, seq), next_by_subj=subject)

        while (message := self._server.run("reading an artifact", read)) is not None:
            yield message.data
            seq = message.seq + 1

    async def names(self, bucket: str | None = None, *, prefix: str = "") -> AsyncIterator[StoredArtifact]:
        """List names by bucket and key."""
        if bucket is not None:
            check_name(bucket, "any")
        self._check_open()
        for name in sorted(self._names):
            found = self._names.get(name)
            if found is not None and bucket in (None, found.bucket) and found.key.startswith(prefix):
                yield found

    def _collect(self, referenced: AbstractSet[str], now_unix_ms: int, grace_ms: int) -> Collected:
        with self._lock:
            for digest in referenced & self._content.keys():
                self._need(digest, now_unix_ms)
            young = set(self._young(grace_ms))
            gone = {
                digest: place
                for digest, place in self._content.items()
                if now_unix_ms - place.needed_unix_ms >= grace_ms and digest not in referenced and digest not in young
            }
            names = [name for name, each in self._names.items() if each.digest in gone]
            for name in names:
                self._zone.drop("collecting artifacts", _name_value(*name))
                del self._names[name]
            for digest in gone:
                self._zone.drop("collecting artifacts", f"{_CONTENT}.{digest}")
                del self._content[digest]
            kept = {place.upload for place in self._content.values()} | set(self._in_use)
            self._server.run("collecting artifacts", lambda: self._purge_but(kept))
        return Collected(tuple(sorted(gone)), len(names), sum(place.size_bytes for place in gone.values()))

    async def _purge_but(self, kept: AbstractSet[str | int]) -> None:
        name, base = self._zone.names.artifacts
        subjects = await self._server.subjects(name, f"{base}.*")
        # What was listed while the zone is ours is no other node's, whoever has the zone when it is removed.
        await self._zone.still_ours()
        for subject in subjects:
            if subject.rpartition(".")[2] not in kept:
                await self._server.api(f"STREAM.PURGE.{name}", {"filter": subject})

    async def stats(self) -> ArtifactStats:
        """Describe the store at this moment."""
        self._check_open()
        return ArtifactStats(len(self._content), self._used_bytes(), self._capacity_bytes)

    def _used_bytes(self) -> int:
        return sum(place.size_bytes for place in list(self._content.values()))

    def _begin_upload(self) -> Upload:
        return Upload(uuid4().hex)

    def _write(self, upload: Upload, number: int, piece: bytes) -> None:
        """Write a piece behind the last one of its upload."""
        name, base = self._zone.names.artifacts
        subject = f"{base}.{upload.name}"
        for data in pieces(piece, self._server.piece_bytes):

            async def write(data: bytes = data, after: int = upload.last) -> int:
                try:
                    return await self._server.publish(subject, data, {SUBJECT_SEQUENCE: str(after)})
                except WrongLastSequence:
                    # Nobody else writes under this subject: a first attempt was made before its connection was lost.
                    last = await self._server.get(name, last_by_subj=subject)
                    if last is None or last.seq <= after or last.data != data:
                        raise Away("a piece is still on its way") from None
                    return last.seq

            upload.last = self._server.run("storing an artifact", write, changes=True)
            upload.first = upload.first or upload.last

    def _admit(self, upload: Upload, content: StoredContent) -> None:
        with self._lock:
            there = self._content.get(content.digest)
            needed = max(self._clock.now_unix_ms(), there.needed_unix_ms if there is not None else 0)
            self._place(content.digest, ContentPlace(content.size_bytes, str(upload.name), upload.first, needed))

    def _discard(self, upload: Upload) -> None:
        name, base = self._zone.names.artifacts
        asked = {"filter": f"{base}.{upload.name}"}
        with suppress(BsfgError):
            self._server.run("undoing an upload", lambda: self._server.api(f"STREAM.PURGE.{name}", asked))

    def _bind(self, fresh: StoredArtifact) -> StoredArtifact:
        with self._lock:
            if fresh.digest not in self._content:
                raise missing(fresh.digest)
            found = self._names.get((fresh.bucket, fresh.key))
            if found is None:
                value = _name_value(fresh.bucket, fresh.key)
                self._zone.keep("naming an artifact", value, orjson.dumps(asdict(fresh)))
                found = self._names[fresh.bucket, fresh.key] = fresh
        return found


class ValueMemory:
    """A `bsfg.artifacts.ReferenceMemory` among the values of the zone."""

    def __init__(self, zone: JetStreamZone, name: str) -> None:
        self._zone, self._name = zone, name
        self._value = zone.values(name).get(name)

    async def recall(self) -> bytes | None:
        """Give what was remembered last."""
        return self._value

    async def remember(self, data: bytes) -> None:
        """Keep something in the place of what was remembered before."""
        await asyncio.to_thread(self._zone.keep, "remembering references", self._name, data)
        self._value = data


def _name_value(bucket: str, key: str) -> str:
    """Give where the zone keeps a name; it may hold what a subject must not."""
    return f"{_NAME}.{hashlib.sha256(f'{bucket}/{key}'.encode()).hexdigest()}"


_PORT: type[ArtifactStore] = JetStreamArtifacts


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

    def keep(self, values: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        """Replace some values, all in one message, and return when they are durable."""
        fresh = {kind: dict(names) for kind, names in self._values.items()}
        for (kind, name), value in values.items():
            fresh.setdefault(kind, {})[name] = value
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


def look(settings: JetStreamSettings, zone: str, verified_bytes_max: int) -> tuple[str, int, list[str]]:
    """Say what is found at the servers, how many buffers, and what is wrong; changes nothing, raises as a start would.

    Up to so many bytes every frame is read and held against the chain.
    """
    server, names = JetStreamServer(settings), ZoneNames(settings.prefix, zone)
    try:
        server.open()
        said = f"{server.run('checking the server', server.check)}, prefix {settings.prefix}"
        found = server.run("listing buffers", lambda: listed(server, names))
        if not found:
            return f"{said}: no buffers yet; the node makes them when it is first used", 0, []
        buffers = {(stream, kind): reading(server, names, stream, kind) for stream, kind in found}
        heads = [buffer.found().head for buffer in buffers.values()]
        said = f"{said}: {len(heads)} buffers, {sum(head.end - head.start for head in heads)} facts"
        if sum(head.used_bytes for head in heads) > verified_bytes_max:
            return said, len(heads), []
        breaks = [text for (stream, kind), each in buffers.items() for text in chain_breaks(each, stream, kind)]
        return said + ("" if breaks else ", every byte verified"), len(heads), breaks
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
