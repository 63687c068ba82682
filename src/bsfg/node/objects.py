"""Artifacts at the boundary: uploads and downloads for those who may, and facts only with the artifacts they name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import orjson

from bsfg.artifacts import BY_DIGEST, DEFAULT_MEDIA_TYPE, check_digest, skipped
from bsfg.batch import FactBatch
from bsfg.config.access import Identity
from bsfg.config.kinds import Action, Role
from bsfg.errors import (
    ArtifactMissing,
    DigestMismatch,
    InvalidArgument,
    PermissionRefused,
    StreamUnavailable,
    ZoneNotAllowed,
)
from bsfg.journey.artifacts import bring_artifacts, require_artifacts
from bsfg.node.authorize import Decision, Request, Rule
from bsfg.node.parts import NodeContext
from bsfg.ports import ArtifactStore, Buffer, Replayable
from bsfg.wire.client import BoundaryClient
from bsfg.wire.service import Caller, ObjectInfo


class RemoteArtifacts:
    """The artifacts of a peer, by digest; ``came`` is called for every piece that comes."""

    def __init__(self, client: BoundaryClient, came: Callable[[], None]) -> None:
        self._client, self._came = client, came

    async def get(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Give the bytes of an artifact as they come, verified."""
        _, pieces = await self._client.get_object("", "", digest=digest)
        async with aclosing(pieces):
            async for piece in pieces:
                self._came()
                yield piece


class ArtifactFetcher:
    """The check and the copying for one stream of a link; call it with the facts that are about to be put."""

    def __init__(self, parts: NodeContext, link: str, stream: str, client: BoundaryClient) -> None:
        self._parts, self._link, self._stream = parts, link, stream
        self._source = RemoteArtifacts(client, lambda: parts.links.spoke(link))

    async def __call__(self, facts: FactBatch) -> None:
        """Raise `ZoneNotAllowed` for what the peer may not bring; fetch the artifacts that are missing.

        `GateHeld` when an operator has closed the gate since these facts were asked for.
        """
        self._parts.links.check_open(self._link)
        # What is read again after a release may take longer than any turn.
        self._parts.links.spoke(self._link)
        guard, now_unix_ms = self._parts.guard, self._parts.clock.now_unix_ms()
        zones = frozenset(facts.distinct("from_zone")), frozenset(facts.distinct("to_zone"))
        decision = guard.matrix.decide_link(self._link, self._stream, *zones, now_unix_ms)
        if decision.error is not None:
            guard.audit(decision, Caller(address=f"link {self._link}"))
            raise ZoneNotAllowed(decision.error.message)
        if self._parts.artifacts is not None and facts.names_artifacts:
            await bring_artifacts(facts, self._source, self._parts.artifacts)
            self._parts.links.check_open(self._link)


_NOT_NAMED = "An artifact can be read by whoever may read a retained fact that names it; see `streams` and [serve]."


class Objects:
    """The artifact store behind the door of the node."""

    def __init__(self, parts: NodeContext) -> None:
        self._parts = parts

    async def put(self, caller: Caller, info: ObjectInfo, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Store an artifact."""
        row = self._parts.guard.check(caller, Request(Action.UPLOAD))
        if info.link is None and Role.PRODUCER not in row.roles:
            # Who is no producer uploads for a link, and a held gate stops everything of that.
            raise InvalidArgument("an artifact that a pipeline brings must name its link")
        if info.link is not None:
            self._parts.links.check_open(info.link)
            chunks = self._brought(info.link, chunks)
        store = self._store()
        if info.bucket == BY_DIGEST:
            return await self._put_unnamed(info, chunks)
        before = await store.stat(info.bucket, info.key)
        stored = await store.put(
            info.bucket,
            info.key,
            chunks,
            media_type=info.media_type,
            digest=info.digest,
            size_bytes=info.size_bytes,
        )
        return ObjectInfo(
            stored.bucket,
            stored.key,
            stored.media_type,
            info.file_name,
            stored.digest,
            stored.size_bytes,
            already_exists=before is not None,
        )

    async def _brought(self, link: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass on what a link brings while its gate is open."""
        async for chunk in chunks:
            self._parts.links.check_open(link)
            yield chunk

    async def _put_unnamed(self, info: ObjectInfo, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Store content that is known by its digest alone; its key must be the digits of that."""
        digest = f"sha256:{info.key}"
        check_digest(digest)
        if info.digest not in (None, digest):
            raise InvalidArgument(
                f"in the bucket {BY_DIGEST} a key is the digest of its content, not of {info.digest}",
                hint="Choose another bucket, or give the digits of the content's SHA-256 as the key.",
            )
        store = self._store()
        before = await store.exists(digest)
        stored = await store.add(chunks, digest=digest, size_bytes=info.size_bytes)
        return replace(info, digest=digest, size_bytes=stored.size_bytes, already_exists=before)

    async def get(
        self, caller: Caller, bucket: str, key: str, digest: str | None, offset: int = 0
    ) -> tuple[ObjectInfo, AsyncGenerator[bytes, None]]:
        """Give an artifact and its bytes, which are verified while they are read, also those before the offset.

        A digest decides by itself: a name beside it says at most of which media type the content is. Without one, the
        name is looked up in this zone. Whoever may read no fact that names the content is told that there is none: that
        it is here is a fact, too.
        """
        row = self._parts.guard.check(caller, Request(Action.DOWNLOAD))
        self._parts.links.check_serving(row.zone)
        store = self._store()
        if digest is None and bucket == BY_DIGEST:
            digest = f"sha256:{key}"
        what = f"{bucket}/{key}" if digest is None else digest
        found = await store.stat(bucket, key) if bucket or digest is None else None
        digest = digest or (found.digest if found is not None else None)
        if digest is None or not await self._may_read(caller, row, digest):
            raise ArtifactMissing(f"there is no artifact {what[:200]} here that {row.name!r} may read", hint=_NOT_NAMED)
        [size_bytes] = await store.claim([digest])
        if size_bytes is None:
            size_bytes = await _measured(store, digest)
        if offset < 0:
            raise InvalidArgument("an offset is not negative")
        if offset > size_bytes:
            raise DigestMismatch(f"{offset} bytes cannot be the beginning of {size_bytes}", digest=digest)
        media_type = found.media_type if found is not None and found.digest == digest else DEFAULT_MEDIA_TYPE
        content = self._taken(caller, store.get(digest))
        return ObjectInfo(bucket, key, media_type, None, digest, size_bytes), skipped(content, offset)

    async def _may_read(self, caller: Caller, row: Identity, digest: str) -> bool:
        """Tell whether a caller may read a fact that names a digest; note when he asks for what he may not have."""
        check_digest(digest)
        references = self._parts.references_for(row)
        readable, unavailable = await self._readable(caller)
        if any(references.is_known(each, digest) for each in readable):
            return True
        for each in readable:
            if await references.names(each, digest):
                return True
        if unavailable is not None:
            raise unavailable
        # Whoever puts facts asks for the content that they name before he puts them.
        if Role.PIPELINE not in row.roles and await self._store().exists(digest):
            refusal = PermissionRefused(f"no fact that {row.name!r} may read names {digest}", digest=digest)
            decision = Decision(row.name, row.zone, Request(Action.DOWNLOAD), Rule.NAMED, refusal)
            self._parts.guard.audit(decision, caller)
        return False

    async def _readable(self, caller: Caller) -> tuple[list[Replayable], StreamUnavailable | None]:
        """Give the buffers that a caller may read, and why one of them is not there if so."""
        parts, found, unavailable = self._parts, list[Replayable](), None
        for stream in parts.settings.streams:
            for buffer in Buffer:
                if parts.guard.allows(caller, Request(Action.DOWNLOAD, stream, buffer)):
                    try:
                        found.append(await parts.buffer(stream, buffer))
                    except StreamUnavailable as error:
                        unavailable = error
        return found, unavailable

    async def _taken(self, caller: Caller, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """Give pieces to who may have them, until the gate is held: who is slow to take a large one is not away."""
        async with aclosing(pieces):
            async for piece in pieces:
                zone = self._parts.guard.check(caller, Request(Action.DOWNLOAD)).zone
                self._parts.links.check_serving(zone)
                self._parts.links.downloads(zone)
                yield piece

    async def require(self, facts: FactBatch) -> FactBatch:
        """Give a producer's facts with whole references; raise unless every artifact that they name is here."""
        return await require_artifacts(facts, self._store())

    async def claim(self, facts: FactBatch) -> None:
        """Raise unless every artifact that facts name is here and has the size they say; keep those that are."""
        sizes = _named(facts)
        if not sizes:
            return
        found = await self._store().claim(list(sizes))
        for (digest, said), size_bytes in zip(sizes.items(), found, strict=True):
            if size_bytes is None:
                raise ArtifactMissing(f"a fact names the artifact {digest}, which is not here", digest=digest)
            if said not in (None, size_bytes):
                raise DigestMismatch(f"artifact {digest} has {size_bytes} bytes, a fact says {said}", digest=digest)

    def _store(self) -> ArtifactStore:
        store = self._parts.artifacts
        if store is None:
            raise InvalidArgument("this node keeps no artifacts", hint="Use a node with an artifact store.")
        return store


async def _measured(store: ArtifactStore, digest: str) -> int:
    """Give the size of content that was found damaged and put right since; else raise what is wrong with it."""
    async with aclosing(store.get(digest)) as pieces:
        return sum([len(piece) async for piece in pieces])


def _named(facts: FactBatch) -> dict[str, int | None]:
    """Give the size that facts say of each artifact they name, if they do, by digest."""
    if not facts.has_rows and facts.column("artifact").null_count == len(facts):
        return {}
    references = [orjson.loads(text) for text in facts.values("artifact") if text is not None]
    return {reference["digest"]: reference.get("size_bytes") for reference in references}
