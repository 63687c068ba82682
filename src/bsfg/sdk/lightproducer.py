"""A producer that needs nothing but ``pip install bsfg``: facts go as JSON over HTTP, by way of an outbox on disk.

::

    node = LightNode("localhost:9080", ca="ca.crt", certificate="me.crt", key="me.key", server_name="plant-a-bsfg")
    with LightProducer(node, stream="operational", to_zone="enterprise", outbox="outbox") as producer:
        producer.send(Fact.of("batch:B1042", "step_completed", {"step": 7}), message_id="B1042/7")

`send` returns when the fact is on this machine's disk. It leaves the outbox when the node has answered for it, however
long that takes and however often either side is started anew: it is always sent under the same id.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from bsfg.artifacts import DEFAULT_MEDIA_TYPE, check_name
from bsfg.errors import (
    OF_ONE_FACT,
    BsfgError,
    ConflictingDuplicate,
    InvalidArgument,
    InvalidFact,
    StorageClosed,
    TimedOut,
    unforeseen,
)
from bsfg.fact import ArtifactRef, Envelope, Fact, Message
from bsfg.jsonform import message_to_dict
from bsfg.retry import Backoff
from bsfg.sdk.light import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    JSON_LINES,
    LightCalls,
    LightNode,
    insist,
    loaded,
    path_of,
)

if TYPE_CHECKING:
    from bsfg.sdk.spool import Spool, Spooled

log = logging.getLogger("bsfg.producer")

REFUSED = "refused.jsonl"
BATCH_FACTS, BATCH_BYTES = 500, 1 << 20
_PIECE_BYTES = 256 << 10

OnLightRefused = Callable[[dict[str, Any], BsfgError], None]


@dataclass(frozen=True, slots=True)
class SentFact:
    """What the node said of a fact: ``inserted`` or ``already_exists``, its offset, id and digest."""

    result: str
    offset: int
    message_id: str
    digest: str


class LightProducer:
    """Sends single facts to the HTTP port of a node; it may be used from several threads.

    ``stream``, ``to_zone`` and ``from_zone`` (the node's own when left out) are what facts get that do not say
    otherwise. ``outbox`` is a folder in which facts wait; without it only `append` works, which waits for the node up
    to ``deadline_seconds``. ``on_refused`` is told, with the message in its JSON form, what the node refused for good
    out of the outbox; that is also kept there in ``refused.jsonl``.
    """

    def __init__(
        self,
        node: LightNode | str,
        *,
        stream: str | None = None,
        to_zone: str | None = None,
        from_zone: str | None = None,
        outbox: str | os.PathLike[str] | None = None,
        outbox_capacity_bytes: int = 1 << 30,
        deadline_seconds: float = 60.0,
        on_refused: OnLightRefused | None = None,
    ) -> None:
        node = LightNode(node) if isinstance(node, str) else node
        self._stream, self._to_zone, self._from_zone = stream, to_zone, from_zone
        self._deadline_seconds, self._on_refused = deadline_seconds, on_refused
        self._calls, self._uploads = LightCalls(node), LightCalls(node)
        self._closing, self._changed = threading.Event(), threading.Condition()
        self._spool: Spool | None = None
        self._sender: threading.Thread | None = None
        self.problem: BsfgError | None = None
        if outbox is not None:
            # Here, because it takes a third of the time to import what a producer without an outbox has no use for.
            from bsfg.sdk.spool import Spool

            self._refused = Path(outbox) / REFUSED
            self._spool = Spool.open(outbox, "light outbox", capacity_bytes=outbox_capacity_bytes)
            self._sender = threading.Thread(target=self._send_all, name="bsfg-light-producer", daemon=True)
            self._sender.start()

    def send(
        self, fact: Fact | Message, *, message_id: str | None = None, stream: str | None = None, **envelope: Any
    ) -> None:
        """Put a fact into the outbox; this returns when the disk has it, and raises `BufferFull` when it is full."""
        if self._spool is None:
            raise InvalidArgument("there is no outbox", hint="Name a folder as outbox, or use append.")
        if self._closing.is_set():
            raise StorageClosed("the producer is closed", hint="Make a new producer.")
        from bsfg.stores.log.journal import Record

        where, body = self._laid_out(fact, message_id, stream, envelope)
        self._spool.put([Record({"stream": where}, body)])
        with self._changed:
            self._changed.notify_all()

    def append(
        self, fact: Fact | Message, *, message_id: str | None = None, stream: str | None = None, **envelope: Any
    ) -> SentFact:
        """Send one fact past the outbox, and wait until the node has it; a lost answer is asked for again."""
        where, body = self._laid_out(fact, message_id, stream, envelope)
        deadline = time.monotonic() + self._deadline_seconds
        [found] = insist(lambda: self._posted(self._uploads, where, [body]), self._closing, deadline)
        return found

    def drain(self, timeout_seconds: float = math.inf) -> None:
        """Wait until the node has answered for everything in the outbox."""
        ends = time.monotonic() + timeout_seconds
        with self._changed:
            while self.waiting:
                left = ends - time.monotonic()
                if left <= 0:
                    why = f": {self.problem.message}" if self.problem is not None else ""
                    raise TimedOut(f"{self.waiting} facts are still in the outbox{why}")
                self._changed.wait(min(left, 1.0))

    @property
    def waiting(self) -> int:
        """How many facts are in the outbox."""
        return 0 if self._spool is None else self._spool.end - self._spool.done

    def upload(
        self, bucket: str, key: str, content: bytes | BinaryIO, *, media_type: str = DEFAULT_MEDIA_TYPE
    ) -> ArtifactRef:
        """Upload bytes or an open file, and give the reference for the fact that will name it."""
        check_name(bucket, key)
        size_bytes, digest = _measured(content)
        path = path_of("objects", bucket, key, digest=digest)
        headers = {"Content-Length": str(size_bytes)}

        def put() -> bytes:
            body = content if isinstance(content, bytes) else lambda: _pieces(content)
            return self._uploads.json("PUT", path, body, media_type=media_type, headers=headers)

        deadline = time.monotonic() + self._deadline_seconds
        stored = loaded(insist(put, self._closing, deadline), "digest", "size_bytes")
        return ArtifactRef(bucket, key, stored["digest"], stored["size_bytes"], media_type)

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Send what is in the outbox, as far as time allows, and end; the rest stays for the next producer."""
        if self._spool is not None and not self._closing.is_set():
            try:
                self.drain(timeout_seconds)
            except TimedOut as error:
                log.warning("closing: %s", error.message)
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._sender is not None:
            self._calls.hang_up()
            self._sender.join()
        for calls in (self._calls, self._uploads):
            calls.close()
        if self._spool is not None:
            self._spool.close()

    def __enter__(self) -> LightProducer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # What is sent.

    def _laid_out(
        self, fact: Fact | Message, message_id: str | None, stream: str | None, envelope: Mapping[str, Any]
    ) -> tuple[str, bytes]:
        """Write a fact as one line, with the time at which it was said: a retry repeats all of it."""
        where, message = stream or self._stream, fact
        if where is None:
            raise InvalidArgument("no stream is named", hint="Name one in the producer or when sending.")
        if isinstance(message, Fact):
            merged = {"produced_at_unix_ms": time.time_ns() // 1_000_000, **envelope}
            to_zone = merged.pop("to_zone", self._to_zone)
            if to_zone is None:
                raise InvalidArgument("to_zone is not named", hint="Name it in the producer or when sending.")
            from_zone = merged.pop("from_zone", self._from_zone)
            message = Message(Envelope(from_zone or "", to_zone, message_id=message_id, **merged), message)
        elif message_id is not None or envelope:
            raise InvalidArgument("a message has its envelope already", hint="Send the fact alone, or the message.")
        form = message_to_dict(message)
        if not form["envelope"]["from_zone"]:
            del form["envelope"]["from_zone"]
        try:
            return where, orjson.dumps(form)
        except (TypeError, ValueError) as error:
            raise InvalidFact(f"the fact cannot be written as JSON: {error}", rule="JSON") from None

    def _posted(self, calls: LightCalls, stream: str, bodies: Sequence[bytes]) -> list[SentFact]:
        """Append facts as a whole; a single one that conflicts is an error."""
        path = path_of("streams", stream, "facts")
        if len(bodies) == 1:
            found = loaded(calls.json("POST", path, bodies[0]), "results")
        else:
            found = loaded(calls.json("POST", path, b"\n".join(bodies), media_type=JSON_LINES), "results")
        try:
            return [SentFact(**{name: each[name] for name in SentFact.__slots__}) for each in found["results"]]
        except (KeyError, TypeError):
            raise InvalidArgument("what answered is no node of a version that is known here") from None

    # The thread that empties the outbox.

    def _send_all(self) -> None:
        assert self._spool is not None
        backoff = Backoff(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS)
        while not self._closing.is_set():
            try:
                records = self._next(self._spool)
                if records:
                    self._send(self._spool, records)
                    backoff.reset()
                    self.problem = None
            except Exception as error:
                # Whatever it is, the facts are on disk: an operator, or time, may mend it.
                self.problem = unforeseen(error, "sending")
                self._closing.wait(backoff.next_seconds())

    def _next(self, spool: Spool) -> list[Spooled]:
        """Give the next facts of one stream, waiting for them."""
        with self._changed:
            while spool.end == spool.done and not self._closing.is_set():
                self._changed.wait(1.0)
        if self._closing.is_set():
            return []
        # Before it is read: what is put in meanwhile is not to be passed over.
        end = spool.end
        records = spool.read(spool.done, max_bytes=BATCH_BYTES)[:BATCH_FACTS]
        if not records:
            # Damage, which the spool has noted: nothing of it can be read any more.
            self._done(spool, end)
        stream = records[0].head["stream"] if records else ""
        count = next((at for at, each in enumerate(records) if each.head["stream"] != stream), len(records))
        return records[:count]

    def _send(self, spool: Spool, records: list[Spooled]) -> None:
        try:
            sent = self._posted(self._calls, records[0].head["stream"], [each.blob for each in records])
            for record, each in zip(records, sent, strict=True):
                if each.result == "conflict":
                    text = f"{each.message_id} is the id of another fact, at offset {each.offset}"
                    self._refuse(record, ConflictingDuplicate(text, offset=each.offset))
        except BsfgError as error:
            if error.code not in OF_ONE_FACT:
                raise
            if len(records) > 1:
                # Only one of them is wrong, and all were refused with it.
                for record in records:
                    self._send(spool, [record])
                return
            self._refuse(records[0], error)
        self._done(spool, records[-1].number + 1)

    def _done(self, spool: Spool, number: int) -> None:
        spool.advance(number)
        with self._changed:
            self._changed.notify_all()

    def _refuse(self, record: Spooled, error: BsfgError) -> None:
        """Keep a refused fact aside, durably, before it leaves the outbox."""
        from bsfg.disk import add_lines

        message = orjson.loads(record.blob)
        kept = {"error": error.to_dict(), "stream": record.head["stream"], "message": message}
        add_lines(self._refused, [orjson.dumps(kept, default=str)])
        log.warning("a fact was refused and kept in %s: %s", self._refused, error.message)
        if self._on_refused is not None:
            try:
                self._on_refused(message, error)
            except Exception:
                log.exception("the producer's on_refused failed; the fact is kept aside in the outbox")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _measured(content: bytes | BinaryIO) -> tuple[int, str]:
    sha256, size_bytes = hashlib.sha256(), 0
    for piece in [content] if isinstance(content, bytes) else _pieces(content):
        sha256.update(piece)
        size_bytes += len(piece)
    return size_bytes, f"sha256:{sha256.hexdigest()}"
