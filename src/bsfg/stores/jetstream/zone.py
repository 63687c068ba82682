"""What a zone has in its streams: who writes, its buffers, its consumers and the node's values.

The zone's own stream keeps the last message of each subject. What is written there must follow the last message that
the writer knows: who does not have the zone any more writes nothing, and nothing old comes late.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import orjson

from bsfg.errors import (
    BsfgError,
    FormatUnsupported,
    HasherMismatch,
    StorageFailed,
    StorageReadOnly,
    StorageTaken,
    StorageUnavailable,
    StorageUnsafe,
)
from bsfg.ports import Buffer
from bsfg.stores.jetstream.frames import JetStreamFrames, mark
from bsfg.stores.jetstream.messages import CHANGE, EXPECTED, StoredMessage
from bsfg.stores.jetstream.server import ApiRefusal, Away, JetStreamServer, JetStreamSettings, WrongLastSequence
from bsfg.stores.shared.cursors import ConsumerCursor, as_document, from_document
from bsfg.stores.shared.keeper import BufferHead, NewBuffer, ZoneKeeper, ZoneNode

VERSION = 1
_TAKEN_SECONDS = 5.0
"""A node that is stopping may need a moment."""
_ALIVE_SECONDS = 4.0
"""A node that does not answer for so long is taken for dead; if it is not, it can write nothing."""
_DOUBTED_SECONDS = 2.0
"""Who stands by looks closer at a node that does not answer for so long: it opens the zone, and asks there again."""
_STANDS_SECONDS = 10.0
"""A node that stands by asks every second; one that does not for so long has gone."""
_PAUSE_SECONDS = 0.2
_READ_BYTES = 16 << 20
SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"


class ZoneNames:
    """The names of a zone's streams and subjects. A dot, which both have another use for, is written ``~``."""

    def __init__(self, prefix: str, zone: str) -> None:
        self.zone = zone
        self._stream, self._subject = f"{prefix}={_token(zone)}", f"{prefix}.{_token(zone)}"

    @property
    def all(self) -> str:
        """The subjects of all that the zone has."""
        return f"{self._subject}.>"

    @property
    def own(self) -> tuple[str, str]:
        """The zone's own stream, and what its subjects begin with; no stream of facts has such a name."""
        return self._stream, f"{self._subject}.=zone"

    @property
    def artifacts(self) -> tuple[str, str]:
        """The stream of the zone's artifacts."""
        return f"{self._stream}=artifacts", f"{self._subject}.=artifact"

    @property
    def alive(self) -> str:
        """Where the node that has the zone answers."""
        return f"{self._subject}.=alive"

    def buffer(self, stream: str, kind: Buffer) -> tuple[str, str]:
        """The stream of one buffer."""
        return f"{self._stream}={_token(stream)}={kind}", f"{self._subject}.{_token(stream)}.{kind}"


def _token(name: str) -> str:
    return name.replace(".", "~")


async def stream_of(
    server: JetStreamServer, name: str, base: str, metadata: Mapping[str, str], *, last_only: bool = False
) -> dict[str, str]:
    """Give what is written at a stream, which is made when there is none; refuse one that may lose messages."""
    config = {
        "name": name, "subjects": [f"{base}.>"], "storage": "file", "retention": "limits", "discard": "new",
        "allow_direct": True, "num_replicas": server.settings.replicas, "metadata": dict(metadata),
        "max_msgs_per_subject": 1 if last_only else -1,
    }  # fmt: skip
    try:
        found = await server.api(f"STREAM.INFO.{name}")
    except ApiRefusal as refusal:
        if not refusal.is_absent:
            raise
        found = await server.api(f"STREAM.CREATE.{name}", config)
    check_stream(found["config"], last_only=last_only, replicas=server.settings.replicas)
    return dict(found["config"].get("metadata") or {})


def check_stream(config: Mapping[str, Any], *, last_only: bool, replicas: int) -> None:
    """Refuse a stream whose settings would lose facts, or make them unreadable."""
    name = config["name"]
    if config.get("sealed"):
        raise StorageReadOnly(f"the stream {name} is sealed", hint="It takes nothing any more: restore a copy of it.")
    discards = [
        text
        for is_so, text in (
            (config["retention"] != "limits", f"retention is {config['retention']}"),
            (config["discard"] != "new", f"discard is {config['discard']}"),
            (config["max_age"], "max_age is set"),
            (config["max_msgs_per_subject"] != (1 if last_only else -1), "max_msgs_per_subject is not as it was made"),
            (config["storage"] != "file", "it is in memory"),
            (config.get("persist_mode") == "async", "persist_mode is async"),
            (config["num_replicas"] < min(replicas, 3), f"it has {config['num_replicas']} replicas"),
            (not config.get("allow_direct"), "allow_direct is off"),
        )
        if is_so
    ]
    if discards:
        hint = "Change the stream back (nats stream edit); the node makes streams that discard nothing."
        raise StorageUnsafe(f"the stream {name} may lose facts: {', '.join(discards)}", hint=hint, stream=name)


class JetStreamZone(ZoneKeeper):
    """The streams of one zone."""

    def __init__(self, server: JetStreamServer) -> None:
        self.server = server
        self.names = ZoneNames(server.settings.prefix, "")
        self._claim_seq = self._last_seq = 0
        self._keeping = threading.Lock()
        self._writer, self._kept = uuid4().hex, 0
        self.nodes: list[ZoneNode] = []
        self._reached = 0.0
        self._marks: dict[str, StoredMessage | BsfgError] = {}
        self._consumers: dict[str, dict[str, Any]] = {}
        self._values: dict[str, bytes] = {}

    # Claiming.

    def claim(self, zone: str, hasher: str) -> list[tuple[str, Buffer]]:
        """Be the zone's one writer, and write a mark into every stream."""
        self.names = ZoneNames(self.server.settings.prefix, zone)
        self.server.open()
        self.server.run("checking the server", self.server.check)
        self.server.run(f"taking over {zone}", lambda: self._take(hasher))
        self._values = self.server.run(f"reading {zone}", self._read)
        buffers = self.server.run("listing buffers", lambda: listed(self.server, self.names))
        for stream, kind in buffers:
            name, base = self.names.buffer(stream, kind)
            try:
                self._marks[name] = self.server.run(f"taking over {name}", partial(self._mark, name, base))
            except (StorageFailed, StorageReadOnly, StorageUnsafe) as failed:
                # One stream that was touched keeps no other from its work.
                self._marks[name] = failed
        return buffers

    async def _take(self, hasher: str) -> None:
        name, base = self.names.own
        metadata = {"bsfg-version": str(VERSION), "bsfg-zone": self.names.zone}
        await stream_of(self.server, name, base, metadata, last_only=True)
        # An attempt that broke off may have left us answering.
        await self.server.answer_no_more()
        deadline = time.monotonic() + _TAKEN_SECONDS
        while True:
            if (active := await self.server.who_answers(self.names.alive, _ALIVE_SECONDS)) is not None:
                if time.monotonic() > deadline:
                    raise StorageTaken(f"another node has the zone {self.names.zone} open", active=active)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            last = await self.server.get(name, last_by_subj=f"{base}.claim")
            claim: dict[str, Any] = {"epoch": 0, "hasher": hasher, "version": VERSION}
            if last is not None:
                claim = orjson.loads(last.data)
            if claim["version"] > VERSION:
                says = f"the zone's streams have version {claim['version']}, this program knows {VERSION}"
                raise FormatUnsupported(says)
            if claim["hasher"] != hasher:
                raise HasherMismatch(f"the streams were written with {claim['hasher']}, not {hasher}")
            claim |= {"epoch": claim["epoch"] + 1, "by": uuid4().hex}
            # Whoever comes next finds us from now on, whether we have the zone already or not.
            await self.server.answer_at(self.names.alive)
            try:
                headers = {SUBJECT_SEQUENCE: str(last.seq if last is not None else 0)}
                self._claim_seq = await self.server.publish(f"{base}.claim", orjson.dumps(claim), headers)
                self._last_seq = self._claim_seq
                return
            except WrongLastSequence:
                await self.server.answer_no_more()

    async def _mark(self, name: str, base: str) -> StoredMessage:
        found = await self.server.api(f"STREAM.INFO.{name}")
        check_stream(found["config"], last_only=False, replicas=self.server.settings.replicas)
        return await mark(self.server, name, base, fresh_head(new_of(found["config"]["metadata"])), self.still_ours)

    # Buffers.

    def buffer(self, stream: str, kind: Buffer, new: NewBuffer) -> JetStreamFrames:
        """Give one buffer, in a stream that is made when there is none."""
        place, (name, base) = f"{stream}/{kind}", self.names.buffer(stream, kind)
        metadata = {
            "bsfg-version": str(VERSION), "bsfg-zone": self.names.zone, "bsfg-stream": stream, "bsfg-kind": str(kind),
            "bsfg-log-id": new.log_id.hex(), "bsfg-secret": new.secret.hex(), "bsfg-chain": new.chain.hex(),
        }  # fmt: skip
        there = self.server.run(f"opening {place}", lambda: stream_of(self.server, name, base, metadata), changes=True)
        marked = self._marks.pop(name, None)
        if isinstance(marked, BsfgError):
            raise marked
        if marked is None:
            marked = self.server.run(f"opening {place}", lambda: self._mark(name, base), changes=True)
        return JetStreamFrames(self.server, name, base, place, new_of(there), marked)

    # The zone's own stream.

    async def still_ours(self) -> None:
        """Raise when another node has the zone by now."""
        name, base = self.names.own
        last = await self.server.get(name, last_by_subj=f"{base}.claim")
        if last is None or last.seq != self._claim_seq:
            raise StorageTaken(f"another node has taken over the zone {self.names.zone}")

    def check_claim(self) -> None:
        """Raise when another node has the zone by now; take note of those that stand by."""
        self.server.run("looking who has the zone", self.still_ours, patience_seconds=0)
        now = self._reached = time.monotonic()
        standing = ((name, now - at) for name, at in sorted(self.server.standing.copy().items()))
        standby = [ZoneNode(name, False, seconds) for name, seconds in standing if seconds < _STANDS_SECONDS]
        self.nodes = [ZoneNode(self.server.settings.node_name, True, 0.0), *standby]

    @property
    def is_silent(self) -> bool:
        """Whether another node may take over, since no server was reached for so long; alone it is better to stay."""
        return len(self.nodes) > 1 and time.monotonic() - self._reached >= _ALIVE_SECONDS

    async def _read(self) -> dict[str, bytes]:
        """Read all values, up to our claim at least."""
        name, base = self.names.own
        found: dict[str, bytes] = {}
        seq = 0
        while seq < self._claim_seq:
            page = await self.server.page(name, f"{base}.>", seq + 1, 1 << 30, _READ_BYTES)
            found |= {message.subject[len(base) + 1 :]: message.data for message in page}
            if not page:
                raise Away("a server is behind the others")
            seq = page[-1].seq
        # A server that is behind still gives what was dropped.
        there = await self.server.subjects(name, f"{base}.>")
        return {what: data for what, data in found.items() if f"{base}.{what}" in there}

    def values(self, kind: str) -> dict[str, bytes]:
        """Give the values whose names begin with a kind, as they were when the zone was claimed."""
        return {what: data for what, data in self._values.items() if what.startswith(kind) and data}

    def keep(self, doing: str, what: str, data: bytes, *, patience_seconds: float | None = None) -> int:
        """Replace a value of the zone, while the zone is ours; what was sent before it is not stored behind it."""
        if len(data) > self.server.piece_bytes:
            says = f"{doing}: {len(data)} bytes are more than a message may have"
            raise StorageFailed(says, hint="Raise max_payload in the configuration of the servers; 8MB is a good size.")
        patience = self.server.settings.patience_seconds if patience_seconds is None else patience_seconds
        if not self._keeping.acquire(timeout=max(patience, _PAUSE_SECONDS)):
            raise StorageUnavailable(f"{doing}: what is to be kept before it waits for the server")
        try:
            self._kept += 1
            return self.server.run(
                doing, lambda: self._write(what, data), changes=True, patience_seconds=patience_seconds
            )
        finally:
            self._keeping.release()

    async def _write(self, what: str, data: bytes) -> int:
        """Write a value behind the last message that is known, or find that an earlier attempt did."""
        name, base = self.names.own
        ours = f"{self._writer};{self._kept};1"
        while True:
            try:
                headers = {EXPECTED: str(self._last_seq), CHANGE: ours}
                self._last_seq = await self.server.publish(f"{base}.{what}", data, headers)
                return self._last_seq
            except WrongLastSequence:
                seq: int = (await self.server.api(f"STREAM.INFO.{name}"))["state"]["last_seq"]
                if seq == self._last_seq:
                    raise Away("a message is still on its way") from None
                last = await self.server.get(name, seq=seq)
                # It is ours, an earlier one of ours that came late, or a hand's, as long as nobody claimed the zone.
                await self.still_ours()
                self._last_seq = seq
                if last is not None and last.headers.get(CHANGE) == ours:
                    return seq

    def drop(self, doing: str, what: str) -> None:
        """Let a value go: first it is empty, while the zone is ours, then it is removed up to there."""
        seq = self.keep(doing, what, b"")
        name, base = self.names.own
        self.server.run(doing, lambda: self.server.purge(name, f"{base}.{what}", seq + 1))

    def consumers(self) -> list[ConsumerCursor]:
        """Read all consumers."""
        self._consumers = orjson.loads(self._values.get("consumers", b"{}"))
        return [from_document(each) for each in self._consumers.values()]

    def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write all consumers in one message, so that those that change do so together."""
        fresh = self._consumers | {cursor.spec.name: as_document(cursor) for cursor in cursors}
        self.keep("keeping consumers", "consumers", orjson.dumps(fresh))
        self._consumers = fresh

    def close(self) -> None:
        """End the connection: nobody answers for the zone any more."""
        self.server.close()


class ClaimWatch:
    """Watches, for a node that stands by, whether the active node of its zone answers."""

    interval_seconds = 1.0

    def __init__(self, settings: JetStreamSettings, zone: str) -> None:
        self._server, self._names = JetStreamServer(settings), ZoneNames(settings.prefix, zone)
        self._connected = False

    def look(self) -> str | None:
        """Give the name of the active node; None when its place is free."""
        if not self._connected:
            self._server.open()
            self._connected = True
        name = self._server.settings.node_name
        asked = partial(self._server.who_answers, self._names.alive, _DOUBTED_SECONDS, name)
        return self._server.run("watching the active node", asked, patience_seconds=0)

    def interrupt(self) -> None:
        """Nothing that it asks waits for long."""

    def close(self) -> None:
        """End the connection."""
        self._server.close()


async def listed(server: JetStreamServer, names: ZoneNames) -> list[tuple[str, Buffer]]:
    """List the buffers of a zone."""
    found: list[tuple[str, Buffer]] = []
    at = 0
    while True:
        page = (await server.api("STREAM.LIST", {"offset": at, "subject": names.all}))["streams"] or []
        for each in page:
            metadata = each["config"].get("metadata") or {}
            if metadata.get("bsfg-zone") == names.zone and "bsfg-stream" in metadata:
                found.append((metadata["bsfg-stream"], Buffer(metadata["bsfg-kind"])))
        at += len(page)
        if not page:
            return found


def new_of(metadata: Mapping[str, str]) -> NewBuffer:
    """Read what a buffer was made of from what is written at its stream."""
    log_id, secret, chain = (bytes.fromhex(metadata[f"bsfg-{each}"]) for each in ("log-id", "secret", "chain"))
    return NewBuffer(log_id, secret, chain)


def fresh_head(new: NewBuffer) -> BufferHead:
    """Give the head of a buffer that nothing was written to yet."""
    return BufferHead(0, 0, 0, 0, 0, new.chain)
