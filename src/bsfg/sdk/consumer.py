"""Consumers: they hand an application the facts that its zone received, in order, at least once.

The blocking one and the one for asyncio have the same methods::

    with Consumer("mes", endpoint) as consumer:
        for entry in consumer:
            store(entry.message.fact)       # must bear to be done twice with the same entry
            consumer.confirm(entry)

or, with a handler that confirms what it finished and stops at the first failure::

        consumer.run(lambda entry: store(entry.message.fact))

A consumer is a named position that an operator creates (``bsfg consumers add``); it belongs to no process. Several
processes under one name would each see everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Unpack

from bsfg.errors import BsfgError, InvalidArgument, StorageClosed
from bsfg.fact import Entry
from bsfg.journey.link import Refusal
from bsfg.ports import GapRecord
from bsfg.sdk.artifacts import ArtifactReader, AsyncArtifacts, NodeArtifacts
from bsfg.sdk.consuming import ConsumerCore, ConsumerFeed, ConsumerOptions, ConsumerSettings, Item, NodeFeed
from bsfg.sdk.endpoint import Endpoint, Where
from bsfg.sdk.inbox import InboxFeed
from bsfg.sdk.sender import NodeLink
from bsfg.sdk.thread import LoopThread, close_forgotten

log = logging.getLogger("bsfg.consumer")

CLOSE_SECONDS = 10.0


def _core(endpoint: Endpoint, name: str, options: ConsumerOptions) -> ConsumerCore:
    feed: ConsumerFeed = NodeFeed(
        NodeLink(endpoint),
        name,
        carry_only=options.carry_only,
        deadline_seconds=options.deadline_seconds,
        on_problem=options.on_problem or (lambda error: None),
    )
    if options.inbox is not None:
        feed = InboxFeed(
            feed,
            name,
            options.inbox,
            capacity_bytes=options.inbox_capacity_bytes,
            max_facts=options.prefetch_facts,
            wait_seconds=options.fetch_wait_seconds,
        )
    return ConsumerCore(feed, options)


def _range(item: Item | int) -> tuple[int, int]:
    """Give the offsets that an item stands for."""
    if isinstance(item, int):
        return item, item
    if isinstance(item, Entry):
        return item.offset, item.offset
    return item.first, item.last


class _Rules:
    """What both kinds of consumers do with items: gaps to their callback, signatures checked."""

    def __init__(self, name: str, options: ConsumerOptions) -> None:
        self._name, self._options = name, options

    def on_gap(self, core: ConsumerCore, gap: GapRecord) -> None:
        """Report a gap, and confirm it when that succeeded."""
        if self._options.on_gap is not None:
            self._options.on_gap(gap)
        else:
            where = f" of {gap.origin_zone}" if gap.origin_zone else ""
            log.warning(
                "consumer %s: offsets %d to %d%s are not there: %s %s",
                self._name, gap.first, gap.last, where, gap.reason, gap.detail,
            )  # fmt: skip
        _confirmed(core, gap)

    def check(self, core: ConsumerCore, item: Item) -> None:
        """Raise `SignatureInvalid` for an entry that is not signed as it must be."""
        if self._options.keys is not None and isinstance(item, Entry):
            self._options.keys.verify(item, self._options.stream or core.stream)


def confirm_item(core: ConsumerCore, item: Item | int, refusal: Refusal | None = None) -> None:
    """Confirm one item; a gap of another zone's offsets has no place in this buffer and needs none."""
    if isinstance(item, GapRecord) and item.origin_zone is not None:
        return
    core.confirm(*_range(item), refusal)


class _Confirming:
    """What both kinds of consumers offer for what was handled."""

    _core: ConsumerCore | None = None

    def confirm(self, item: Item | int) -> None:
        """Confirm one item (or offset): it was handled, and does not come again. It is sent with others, soon."""
        confirm_item(self._started(), item)

    def confirm_through(self, item: Item | int) -> None:
        """Confirm everything up to and including an item (or offset)."""
        self._started().confirm_through(_range(item)[1])

    def refuse(self, item: Item | int, reason: str, detail: str = "") -> None:
        """Pass an entry that cannot be handled: it counts as confirmed, and the node keeps a gap record of it."""
        confirm_item(self._started(), item, Refusal(*_range(item), _checked_reason(reason), detail))

    @property
    def committed(self) -> int:
        """The offset through which everything is confirmed; -1 when nothing is, or before the first entry came."""
        return self._core.committed if self._core is not None else -1

    @property
    def source(self) -> tuple[str, str]:
        """The stream that the node gives, and the id of its log; empty before its first answer."""
        core = self._core
        return ("", "") if core is None else (core.stream or "", core.log_id or "")

    @property
    def backlog(self) -> int:
        """How many entries there were beyond what is confirmed, when the node was last asked."""
        return self._core.backlog if self._core is not None else 0

    def _started(self) -> ConsumerCore:
        if self._core is None:
            raise InvalidArgument("the consumer is not started", hint="Use it as a context manager, or call start().")
        return self._core


class AsyncConsumer(_Confirming):
    """A consumer for asyncio: ``async for entry in consumer``.

    ``name`` is the durable consumer. ``endpoint`` is an `Endpoint`, or ``host:port`` on loopback, or None to take it
    from the environment. The options are those of `ConsumerOptions`. Use it as an async context manager: leaving it
    sends the confirmations that wait.
    """

    def __init__(self, name: str, endpoint: Where = None, **options: Unpack[ConsumerSettings]) -> None:
        self.name = name
        self._endpoint = Endpoint.of(endpoint, role="consumer")
        self._options = ConsumerOptions(**options)
        self._rules = _Rules(name, self._options)
        self._node = NodeArtifacts(self._endpoint)

    async def start(self) -> None:
        """Begin; entering the context does it."""
        core = _core(self._endpoint, self.name, self._options)
        await core.open()
        self._core = core

    async def items(self, *, idle_seconds: float | None = None) -> AsyncIterator[Item]:
        """Give entries and gap records in their order, from the first that is not confirmed.

        It goes on for ever, until nothing came for ``idle_seconds``, or until the consumer is closed. Confirm both
        kinds.
        """
        core = self._started()
        core.rewind()
        while found := await core.take(idle_seconds):
            for item in found:
                if core.closing:
                    return
                self._rules.check(core, item)
                yield item

    async def batches(
        self, max_facts: int = 1_000, max_bytes: int = 1 << 20, *, idle_seconds: float | None = None
    ) -> AsyncIterator[list[Item]]:
        """Give what `items` gives, many at a time: what is there without waiting longer, at most so much."""
        core = self._started()
        core.rewind()
        while found := await core.take_many(max_facts, max_bytes, idle_seconds):
            for item in found:
                self._rules.check(core, item)
            yield found

    async def entries(self, *, idle_seconds: float | None = None) -> AsyncIterator[Entry]:
        """Give the entries alone; gap records go to ``on_gap`` in their place."""
        async for item in self.items(idle_seconds=idle_seconds):
            if isinstance(item, GapRecord):
                self._rules.on_gap(self._started(), item)
            else:
                yield item

    def __aiter__(self) -> AsyncIterator[Entry]:
        return self.entries()

    async def run(
        self, handler: Callable[[Entry], Awaitable[object] | object], *, idle_seconds: float | None = None
    ) -> int:
        """Give each entry to the handler and confirm what it finished; stop at the first failure and raise it.

        The failed entry comes first the next time. It ends as `items` does. Gives how many were handled and confirmed.
        """
        count = 0
        try:
            async for entry in self.entries(idle_seconds=idle_seconds):
                result = handler(entry)
                if inspect.isawaitable(result):
                    await result
                if not _confirmed(self._started(), entry):
                    return count
                count += 1
        except Exception:
            with contextlib.suppress(BsfgError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.flush()
            raise
        await self.flush()
        return count

    async def flush(self) -> None:
        """Send the confirmations that wait."""
        await self._started().flush()

    @property
    def artifacts(self) -> AsyncArtifacts:
        """The artifacts that entries refer to: ``await consumer.artifacts.read(entry)``."""
        return AsyncArtifacts(self._node.get)

    async def close(self, timeout_seconds: float | None = CLOSE_SECONDS) -> None:
        """Send the confirmations that wait and end; what cannot be sent in time comes again. Repeats are harmless."""
        await self._node.close()
        if self._core is not None:
            await self._core.close(timeout_seconds)

    async def __aenter__(self) -> AsyncConsumer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class Consumer(_Confirming):
    """A consumer for ordinary, blocking programs: ``for entry in consumer``.

    ``name`` is the durable consumer. ``endpoint`` is an `Endpoint`, or ``host:port`` on loopback, or None to take it
    from the environment. The options are those of `ConsumerOptions`. Use it as a context manager: leaving it sends the
    confirmations that wait. One thread iterates; any thread may confirm.
    """

    def __init__(self, name: str, endpoint: Where = None, **options: Unpack[ConsumerSettings]) -> None:
        self.name = name
        where, self._options = Endpoint.of(endpoint, role="consumer"), ConsumerOptions(**options)
        self._rules = _Rules(name, self._options)
        self._thread = LoopThread("bsfg-consumer")

        async def opened() -> ConsumerCore:
            core = _core(where, name, self._options)
            await core.open()
            return core

        try:
            self._core = core = self._thread.run(opened())
        except BaseException:
            self._thread.stop()
            raise
        self._node = node = NodeArtifacts(where)

        async def close(timeout_seconds: float | None) -> None:
            await node.close()
            await core.close(timeout_seconds)

        self._close = close
        self._forgotten = weakref.finalize(self, close_forgotten, self._thread, close)

    def items(self, *, idle_seconds: float | None = None) -> Iterator[Item]:
        """Give entries and gap records in their order, from the first that is not confirmed.

        It goes on for ever, until nothing came for ``idle_seconds``, or until another thread closes the consumer.
        Confirm both kinds.
        """
        self._thread.run(self._rewind())
        while found := self._taken(self._started().take(idle_seconds)):
            for item in found:
                if self._started().closing:
                    return
                self._rules.check(self._started(), item)
                yield item

    def batches(
        self, max_facts: int = 1_000, max_bytes: int = 1 << 20, *, idle_seconds: float | None = None
    ) -> Iterator[list[Item]]:
        """Give what `items` gives, many at a time: what is there without waiting longer, at most so much."""
        self._thread.run(self._rewind())
        while found := self._taken(self._started().take_many(max_facts, max_bytes, idle_seconds)):
            for item in found:
                self._rules.check(self._started(), item)
            yield found

    def _taken(self, taking: Coroutine[Any, Any, list[Item]]) -> list[Item]:
        try:
            return self._thread.run(taking)
        except StorageClosed:
            if self._started().closing:
                return []
            raise

    async def _rewind(self) -> None:
        self._started().rewind()

    def entries(self, *, idle_seconds: float | None = None) -> Iterator[Entry]:
        """Give the entries alone; gap records go to ``on_gap`` in their place."""
        for item in self.items(idle_seconds=idle_seconds):
            if isinstance(item, GapRecord):
                self._rules.on_gap(self._started(), item)
            else:
                yield item

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def run(self, handler: Callable[[Entry], object], *, idle_seconds: float | None = None) -> int:
        """Give each entry to the handler and confirm what it finished; stop at the first failure and raise it.

        The failed entry comes first the next time. It ends as `items` does. Gives how many were handled and confirmed.
        """
        count = 0
        try:
            for entry in self.entries(idle_seconds=idle_seconds):
                handler(entry)
                if not _confirmed(self._started(), entry):
                    return count
                count += 1
        except Exception:
            with contextlib.suppress(BsfgError):
                self.flush(CLOSE_SECONDS)
            raise
        try:
            self.flush()
        except StorageClosed:
            # Whoever closes it sends the confirmations himself.
            if not self._started().closing:
                raise
        return count

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Send the confirmations that wait."""
        self._thread.run(self._started().flush(), timeout_seconds)

    @property
    def artifacts(self) -> ArtifactReader:
        """The artifacts that entries refer to: ``consumer.artifacts.read(entry)``."""
        return self._node.blocking(self._thread)

    def close(self, timeout_seconds: float | None = CLOSE_SECONDS) -> None:
        """Send the confirmations that wait and end; what cannot be sent in time comes again. Repeats are harmless."""
        if self._forgotten.detach() is None:
            return
        try:
            self._thread.run(self._close(timeout_seconds))
        finally:
            self._thread.stop()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _confirmed(core: ConsumerCore, item: Item) -> bool:
    """Confirm an item, unless the consumer was closed while it was being handled: then it comes again."""
    try:
        confirm_item(core, item)
    except StorageClosed:
        return False
    return True


def _checked_reason(reason: str) -> str:
    if not reason.strip():
        raise InvalidArgument("refusing an entry needs a reason")
    return reason
