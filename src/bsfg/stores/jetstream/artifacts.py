"""Artifacts in JetStream: content in messages of one stream, what is known of it among the values of the zone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from uuid import uuid4

import orjson

from bsfg.artifacts import ArtifactStats, ArtifactStore, Collected, StoredArtifact, StoredContent, check_name
from bsfg.errors import BsfgError
from bsfg.ports import Clock
from bsfg.stores.jetstream.messages import StoredMessage, pieces
from bsfg.stores.jetstream.server import Away, WrongLastSequence
from bsfg.stores.jetstream.zone import SUBJECT_SEQUENCE, JetStreamZone, stream_of
from bsfg.stores.shared.artifacts import SharedArtifacts, Upload, missing

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
