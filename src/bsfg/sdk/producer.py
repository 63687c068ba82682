"""Producers: they take facts from an application and do not let go before the node has them.

The blocking one and the one for asyncio have the same methods::

    with Producer("127.0.0.1:9443", stream="operational", from_zone="plant-a", to_zone="enterprise") as producer:
        fact = Fact.of("batch:B1042", "step_completed", {"step": 7})
        future = producer.send(fact, message_id="B1042/7/completed")
        print(future.result().offset)

Derive the message id from the event (what happened to which thing), never from the clock or from chance: then a program
that starts over and sends the same again does no harm.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, InvalidArgument, InvalidFact
from bsfg.fact import JSON_MEDIA_TYPE, ArtifactRef, Envelope, Fact, Message
from bsfg.journey.link import AppendedFact
from bsfg.rows import Row, row_of
from bsfg.sdk.core import Content, ProducerCore, ProducerOptions, ProducerSettings
from bsfg.sdk.endpoint import Endpoint, Where
from bsfg.sdk.futures import BatchFuture, FactFuture
from bsfg.sdk.intake import ProducerIntake
from bsfg.sdk.thread import LoopThread, close_forgotten


class EnvelopeFields(TypedDict, total=False):
    """What a single fact's envelope may say besides its id; what is left out comes from the producer."""

    from_zone: str
    to_zone: str
    produced_at_unix_ms: int
    correlation_id: str
    causation_id: str
    labels: Mapping[str, str]
    object_media_type: str
    object_schema: str


class _Address:
    """What a producer adds to facts: the stream they go to, and the zones."""

    def __init__(self, stream: str | None, from_zone: str | None, to_zone: str | None) -> None:
        self._stream, self._from_zone, self._to_zone = stream, from_zone, to_zone

    def stream(self, stream: str | None) -> str:
        """Give the stream that is meant."""
        found = stream or self._stream
        if found is None:
            raise InvalidArgument("no stream is named", hint="Name one in the producer or when sending.")
        return found

    def row(self, fact: Fact | Message, message_id: str | None, envelope: EnvelopeFields) -> Row:
        """Lay a fact out as a row; this runs for every fact, so it does as little as it can."""
        if isinstance(fact, Message):
            if message_id is not None or envelope:
                raise InvalidArgument("a message has its envelope already", hint="Send the fact alone, or the message.")
            if type(fact.fact.object) is not bytes:
                raise _not_bytes()
            return row_of(fact)
        if envelope or fact.artifact is not None:
            if type(fact.object) is not bytes:
                raise _not_bytes()
            return row_of(self._message(fact, message_id, envelope))
        from_zone, to_zone = self._from_zone, self._to_zone
        if from_zone is None or to_zone is None:
            raise _no_zone()
        data = fact.object
        if type(data) is not bytes:
            raise _not_bytes()
        now = time.time_ns() // 1_000_000
        return (
            message_id, from_zone, to_zone, now, None, None, None, JSON_MEDIA_TYPE, None, None,
            fact.subject, fact.predicate, data, None, None, None,
        )  # fmt: skip

    def _message(self, fact: Fact, message_id: str | None, envelope: EnvelopeFields) -> Message:
        merged: dict[str, Any] = {"produced_at_unix_ms": time.time_ns() // 1_000_000, **envelope}
        from_zone = merged.pop("from_zone", self._from_zone)
        to_zone = merged.pop("to_zone", self._to_zone)
        if from_zone is None or to_zone is None:
            raise _no_zone()
        return Message(Envelope(from_zone, to_zone, message_id=message_id, **merged), fact)


def _no_zone() -> BsfgError:
    return InvalidArgument("from_zone and to_zone are not named", hint="Name them in the producer or when sending.")


def _not_bytes() -> BsfgError:
    return InvalidFact(
        "object: must be bytes",
        hint="Use Fact.of to write a Python value as JSON.",
        field="object",
        rule="must be bytes",
    )


class AsyncProducer:
    """A producer for asyncio.

    ``endpoint`` is an `Endpoint`, or ``host:port`` on loopback, or None to take it from the environment (BSFG_ADDRESS
    and so on). ``stream``, ``from_zone`` and ``to_zone`` are what facts get that do not say otherwise. The options are
    those of `ProducerOptions`. Use it as an async context manager: leaving it sends what is queued.
    """

    def __init__(
        self,
        endpoint: Where = None,
        *,
        stream: str | None = None,
        from_zone: str | None = None,
        to_zone: str | None = None,
        **options: Unpack[ProducerSettings],
    ) -> None:
        self._endpoint = Endpoint.of(endpoint, role="producer")
        self._options = ProducerOptions(**options)
        self._address = _Address(stream, from_zone, to_zone)
        self._core: ProducerCore | None = None
        self._intake: ProducerIntake | None = None

    async def start(self) -> None:
        """Begin; entering the context does it."""
        core = ProducerCore(self._endpoint, self._options)
        await core.start()
        self._core, self._intake = core, core.intake

    async def send(
        self,
        fact: Fact | Message,
        *,
        message_id: str | None = None,
        stream: str | None = None,
        **envelope: Unpack[EnvelopeFields],
    ) -> FactFuture:
        """Queue a fact and give its future; this waits only while the queue is full.

        Await the future to learn what became of the fact; waiting sends at once what is queued.
        """
        intake = self._intake or self._started().intake
        if intake.queued_bytes >= intake.max_queued_bytes:
            await intake.room()
        return intake.add(self._address.stream(stream), self._address.row(fact, message_id, envelope))

    async def append(
        self,
        fact: Fact | Message,
        *,
        message_id: str | None = None,
        stream: str | None = None,
        **envelope: Unpack[EnvelopeFields],
    ) -> AppendedFact:
        """Send one fact and wait until the node has it."""
        return await (await self.send(fact, message_id=message_id, stream=stream, **envelope))

    async def send_batch(self, facts: FactBatch, *, stream: str | None = None) -> BatchFuture:
        """Queue a whole batch and give its future; the node stores all of it or nothing, up to some megabytes."""
        core = self._started()
        await core.intake.room()
        return BatchFuture(core.add_batch(self._address.stream(stream), facts))

    async def flush(self) -> None:
        """Send everything now and wait until it is safe: at the node, or in the outbox when there is one."""
        await self._started().flush()

    async def drain(self) -> None:
        """Send everything now and wait until the node has answered for all of it, the outbox included."""
        await self._started().drain()

    async def upload(
        self, bucket: str, key: str, content: Content, *, media_type: str = DEFAULT_MEDIA_TYPE
    ) -> ArtifactRef:
        """Upload bytes or a file, and give the reference for the fact that will name it: ``Fact(…, artifact=…)``."""
        return await self._started().upload(bucket, key, content, media_type)

    @property
    def problem(self) -> BsfgError | None:
        """What last kept facts from being sent, None when nothing did."""
        return self._core.problem if self._core is not None else None

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Send what is queued and stop; facts whose deadline passes meanwhile fail. Repeats are harmless."""
        if self._core is not None:
            await self._core.close(timeout_seconds)

    async def __aenter__(self) -> AsyncProducer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _started(self) -> ProducerCore:
        if self._core is None:
            raise InvalidArgument("the producer is not started", hint="Use it as a context manager, or call start().")
        return self._core


class Producer:
    """A producer for ordinary, blocking programs; it may be used from many threads.

    ``endpoint`` is an `Endpoint`, or ``host:port`` on loopback, or None to take it from the environment (BSFG_ADDRESS
    and so on). ``stream``, ``from_zone`` and ``to_zone`` are what facts get that do not say otherwise. The options are
    those of `ProducerOptions`. Use it as a context manager: leaving it sends what is queued.
    """

    def __init__(
        self,
        endpoint: Where = None,
        *,
        stream: str | None = None,
        from_zone: str | None = None,
        to_zone: str | None = None,
        **options: Unpack[ProducerSettings],
    ) -> None:
        where, settings = Endpoint.of(endpoint, role="producer"), ProducerOptions(**options)
        self._address = _Address(stream, from_zone, to_zone)
        self._thread = LoopThread("bsfg-producer")

        async def started() -> ProducerCore:
            core = ProducerCore(where, settings)
            await core.start()
            return core

        try:
            self._core = self._thread.run(started())
        except BaseException:
            self._thread.stop()
            raise
        self._intake = self._core.intake
        self._forgotten = weakref.finalize(self, close_forgotten, self._thread, self._core.close)

    def send(
        self,
        fact: Fact | Message,
        *,
        message_id: str | None = None,
        stream: str | None = None,
        **envelope: Unpack[EnvelopeFields],
    ) -> FactFuture:
        """Queue a fact and give its future; this blocks only while the queue is full.

        ``future.result()`` tells what became of the fact; waiting sends at once what is queued.
        """
        intake = self._intake
        if intake.queued_bytes >= intake.max_queued_bytes:
            intake.wait_for_room()
        return intake.add(self._address.stream(stream), self._address.row(fact, message_id, envelope))

    def append(
        self,
        fact: Fact | Message,
        *,
        message_id: str | None = None,
        stream: str | None = None,
        **envelope: Unpack[EnvelopeFields],
    ) -> AppendedFact:
        """Send one fact and wait until the node has it."""
        return self.send(fact, message_id=message_id, stream=stream, **envelope).result()

    def send_batch(self, facts: FactBatch, *, stream: str | None = None) -> BatchFuture:
        """Queue a whole batch and give its future; the node stores all of it or nothing, up to some megabytes."""
        self._intake.wait_for_room()
        return BatchFuture(self._core.add_batch(self._address.stream(stream), facts))

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Send everything now and wait until it is safe: at the node, or in the outbox when there is one."""
        self._thread.run(self._core.flush(), timeout_seconds)

    def drain(self, timeout_seconds: float | None = None) -> None:
        """Send everything now and wait until the node has answered for all of it, the outbox included."""
        self._thread.run(self._core.drain(), timeout_seconds)

    def upload(self, bucket: str, key: str, content: Content, *, media_type: str = DEFAULT_MEDIA_TYPE) -> ArtifactRef:
        """Upload bytes or a file, and give the reference for the fact that will name it: ``Fact(…, artifact=…)``."""
        return self._thread.run(self._core.upload(bucket, key, content, media_type))

    @property
    def problem(self) -> BsfgError | None:
        """What last kept facts from being sent, None when nothing did."""
        return self._core.problem

    def close(self, timeout_seconds: float | None = None) -> None:
        """Send what is queued and stop; facts whose deadline passes meanwhile fail. Repeats are harmless."""
        if self._forgotten.detach() is None:
            return
        try:
            self._thread.run(self._core.close(timeout_seconds))
        finally:
            self._thread.stop()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
