"""Calls to nodes from Spark's Python processes, which know nothing of event loops, and the frames they ask for."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from bsfg.config.kinds import Addresses
from bsfg.errors import BsfgError, ForeignLog, FrameInvalid, InvalidArgument, PeerUnreachable
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.offload import by_size
from bsfg.ports import Buffer, Confirmation, Frame, GapRecord
from bsfg.retry import Retry

if TYPE_CHECKING:
    from bsfg.journey.link import Fetched
    from bsfg.wire.connection import Connection
    from bsfg.wire.tls import TlsFiles


T = TypeVar("T")

AHEAD = 2
"""How many items of a stream are fetched before they are asked for."""

BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS = 0.1, 2.0
PEM = "-----BEGIN "


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """A node's address and the caller's certificate; each of the three PEM parts is a path or the content itself.

    Of a zone with several nodes ``address`` lists all, with commas between. ``to_peer`` is for the links of another
    zone, whose answers are read with care.
    """

    address: str
    ca: str | None = field(default=None, repr=False)
    certificate: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    server_name: str | None = None
    to_peer: bool = False

    def __post_init__(self) -> None:
        parts = (self.ca, self.certificate, self.key)
        if any(parts) and not all(parts):
            raise InvalidArgument("TLS needs all three of the options ca, cert and key")
        object.__setattr__(self, "address", str(Addresses.of(self.address)))

    @staticmethod
    def of(address: str, files: TlsFiles | None, server_name: str | None) -> NodeAccess:
        """Give the way to a node by the paths of certificate files, which stay right wherever they are used."""
        if files is None:
            return NodeAccess(address)
        ca, certificate, key = (str(path.absolute()) for path in (files.ca, files.certificate, files.key))
        return NodeAccess(address, ca, certificate, key, server_name)

    def with_contents(self) -> NodeAccess:
        """Give the same with the certificates themselves in place of their paths."""
        if self.ca is None or self.certificate is None or self.key is None:
            return self
        ca, certificate, key = (_content(part).decode() for part in (self.ca, self.certificate, self.key))
        return replace(self, ca=ca, certificate=certificate, key=key)

    @property
    def watched(self) -> Any:
        """The certificates as connections use them, None without TLS."""
        return self._watched()

    def options(self, prefix: str = "") -> dict[str, str]:
        """Give it as the options of the data source, or as those that begin with a prefix."""
        names = ("address", "ca", "cert", "key", "serverName")
        values = (self.address, self.ca, self.certificate, self.key, self.server_name)
        found = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return {f"{prefix}{name[0].upper()}{name[1:]}": value for name, value in found.items()} if prefix else found

    def connect(self) -> Connection:
        """Make a connection for the running event loop; nothing is sent before its first call."""
        from bsfg.wire.connection import Connection

        return Connection(self.address, watched=self._watched(), server_name=self.server_name, to_peer=self.to_peer)

    def _watched(self) -> Any:
        from bsfg.wire.tls import Material, TlsFiles, Watched

        if self.ca is None or self.certificate is None or self.key is None:
            return None
        parts = (self.ca, self.certificate, self.key)
        if not any(PEM in part for part in parts):
            return Watched(TlsFiles(*map(Path, parts)))
        return _Unchanging(Material(*(_content(part) for part in parts)))


def _content(part: str) -> bytes:
    if PEM in part:
        return part.encode()
    try:
        return Path(part).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{part} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class _Unchanging:
    """What `bsfg.wire.tls.Watched` is for files, for content that was given as such."""

    material: Any

    def refresh(self) -> int:
        return 1


class NodeCalls:
    """The event loop of this process, in a thread of its own, and its connections."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._connections: dict[NodeAccess, Connection] = {}
        self._connecting = Lock()
        Thread(target=self.loop.run_forever, name="bsfg-calls", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def connection(self, access: NodeAccess) -> Connection:
        """Give the connection to a node, the same for everybody in this process; it is renewed by itself."""
        with self._connecting:
            found = self._connections.get(access)
            if found is None:
                found = self._connections[access] = access.connect()
        return found

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Give the items of an asynchronous generator, the next ones being fetched meanwhile."""
        queue: asyncio.Queue[tuple[T | None, BaseException | None]] = asyncio.Queue(AHEAD)
        pump = asyncio.run_coroutine_threadsafe(_pump(items, queue), self.loop)
        try:
            while True:
                item, end = self.run(queue.get())
                if end is not None:
                    break
                yield item  # type: ignore[misc]
        finally:
            pump.cancel()
        if not isinstance(end, StopAsyncIteration):
            raise end


async def _pump(items: AsyncIterator[T], queue: asyncio.Queue[tuple[T | None, BaseException | None]]) -> None:
    end: BaseException = StopAsyncIteration()
    try:
        async with aclosing(items) as closing:  # type: ignore[type-var]
            async for item in closing:
                await queue.put((item, None))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # nobody asks for more
        # So gRPC ends the calls of a connection that is closed, as an old one is some time after certificates changed.
        end = PeerUnreachable("the call was ended here before its end")
    except Exception as error:
        end = error
    await queue.put((None, end))


_of_process: dict[int, NodeCalls] = {}
_making: dict[int, Lock] = {}


def calls() -> NodeCalls:
    """Give the calls of this process, made when they are first needed, the same for all its threads."""
    pid = os.getpid()
    found = _of_process.get(pid)
    if found is None:
        # A lock of this process: one that was taken over by a fork may have been taken by a thread that is not here.
        with _making.setdefault(pid, Lock()):
            found = _of_process.get(pid)
            if found is None:
                _of_process.clear()
                found = _of_process[pid] = NodeCalls()
    return found


class CallRetry(Retry):
    """Bears errors of calls that a thread waits for."""

    def __init__(self, seconds: float) -> None:
        super().__init__(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, seconds)

    def bear(self, error: BsfgError) -> None:
        """Wait a little before the next try, or raise the error when it will not pass or lasts too long."""
        time.sleep(self.pause_after(error))

    def made(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make calls to nodes until they succeed or patience ends."""
        while True:
            try:
                result = calls().run(call())
            except BsfgError as error:
                self.bear(error)
            else:
                self.reset()
                return result


F = TypeVar("F", "Frame", "RawFrame")


@dataclass(frozen=True, slots=True)
class RawFrame:
    """A frame as it travels: entries in Arrow's IPC form, or a gap record."""

    first: int
    last: int
    data: bytes = b""
    gap: GapRecord | None = None


@dataclass(frozen=True, slots=True)
class BufferSource:
    """One buffer of one stream at one node, as often as it is asked; picklable, connects in the process that asks."""

    access: NodeAccess
    stream: str
    buffer: str
    retry_seconds: float
    carry_only: tuple[str, ...] = ()
    filter: FactFilter = EVERY_FACT
    columns: tuple[str, ...] = ()
    """The columns of entries that are to cross the wire; empty means all."""

    def head(self, *, unix_ms: int | None = None) -> Fetched:
        """Describe the buffer: its log, its end, and as ``start`` the first fact that is kept from a time on."""
        return CallRetry(self.retry_seconds).made(lambda: self.asked_head(unix_ms=unix_ms))

    async def asked_head(self, *, unix_ms: int | None = None) -> Fetched:
        """Ask once for the same."""
        from bsfg.wire import boundary_pb2 as pb

        if unix_ms is None:
            request = pb.FetchFramesRequest(offsets=self._offsets(0, 0))
        else:
            times = pb.TimeSelection(
                stream=self.stream, buffer=self._number, start_unix_ms=unix_ms, end_unix_ms=unix_ms
            )
            request = pb.FetchFramesRequest(times=times)
        return await self._head(request)

    def consumer_head(self, consumer: str, *, gaps_after: str = "") -> Fetched:
        """Describe the buffer of a durable consumer; ``start`` is what it has not confirmed yet.

        ``gaps`` are the gap records that came from other zones after those of the token ``gaps_after``.
        """
        return CallRetry(self.retry_seconds).made(lambda: self.asked_consumer_head(consumer, gaps_after))

    async def asked_consumer_head(self, consumer: str, gaps_after: str = "") -> Fetched:
        """Ask once for the same."""
        from bsfg.wire import boundary_pb2 as pb

        selection = pb.ConsumerSelection(consumer=consumer, gaps_after=gaps_after)
        return await self._head(pb.FetchFramesRequest(consumer=selection, max_facts=1))

    def confirm(self, consumer: str, through: int, log_id: str) -> None:
        """Confirm for a durable consumer everything through an offset."""
        CallRetry(self.retry_seconds).made(lambda: self.asked_to_confirm(consumer, through, log_id))

    async def asked_to_confirm(self, consumer: str, through: int, log_id: str) -> None:
        """Ask once for the same."""
        from bsfg.wire.client import BoundaryClient

        client = BoundaryClient(calls().connection(self.access))
        await client.confirm(consumer, Confirmation(through=through, log_id=log_id))

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give the frames of a range (``end`` exclusive), without hole or overlap, whatever happens to the connection.

        Raises `ForeignLog` when the buffer is another one, or an older copy, than the one that is meant.
        """
        return self._range(first, end, log_id, self._chosen)

    def raw_frames(self, first: int, end: int, log_id: str) -> Iterator[RawFrame]:
        """Give the frames of a range likewise, as they travel."""
        return self._range(first, end, log_id, _raw)

    async def _chosen(self, message: Any) -> Frame:
        """Read a frame, and leave out what was not asked for where the node did not."""
        from bsfg.columns import AGELESS_ENTRY_SCHEMA, entry_schema
        from bsfg.ipc import begins_as
        from bsfg.wire.client import RECEIVED, asked_for
        from bsfg.wire.frames import read_frame

        schema = entry_schema(self.columns) if self.columns else AGELESS_ENTRY_SCHEMA
        frame = await by_size(len(message.entries), read_frame, message, RECEIVED, schema)
        # Who knows columns knows filters; and what is not there cannot be looked at.
        if not self.filter or (self.columns and message.entries and begins_as(message.entries, schema)):
            return frame
        return asked_for(frame, self.filter)

    def _range(self, first: int, end: int, log_id: str, read: Callable[[Any], Awaitable[F]]) -> Iterator[F]:
        from bsfg.wire import boundary_pb2 as pb
        from bsfg.wire.convert import filter_message
        from bsfg.wire.frames import hashers_here

        patience, at = CallRetry(self.retry_seconds), first
        while at < end:
            request = pb.FetchFramesRequest(
                offsets=self._offsets(at, end),
                carry_only=self.carry_only,
                ages=True,
                hashers=hashers_here(),
                filter=filter_message(self.filter),
                columns=self.columns,
                sets=bool(self.filter),
            )
            try:
                for item in calls().iterate(_messages(self.access, request, read)):
                    if not isinstance(item, (Frame, RawFrame)):
                        check_log(item, log_id, end)
                        continue
                    if item.first != at or not at <= item.last < end:
                        raise FrameInvalid(f"a frame has offsets {item.first}..{item.last}, {at} is expected next")
                    at = item.last + 1
                    yield item
                    patience.reset()
                if at < end:
                    raise FrameInvalid(f"the node gave nothing from offset {at} on, {end} is its end")
            except BsfgError as error:
                patience.bear(error)

    @property
    def _number(self) -> Any:
        from bsfg.wire.convert import buffer_number

        return buffer_number(Buffer(self.buffer))

    def _offsets(self, first: int, end: int) -> Any:
        from bsfg.wire import boundary_pb2 as pb

        return pb.OffsetSelection(stream=self.stream, buffer=self._number, first=first, end=end)

    async def _head(self, request: Any) -> Fetched:
        messages = _messages(self.access, request, _raw)
        try:
            async for item in messages:
                if not isinstance(item, RawFrame):
                    return item
        finally:
            await messages.aclose()  # type: ignore[attr-defined]
        raise FrameInvalid("an answer begins with its head")


def check_log(head: Fetched, log_id: str, end: int) -> None:
    """Raise `ForeignLog` unless a buffer is the log that is meant, and at least as long as it was."""
    check_history(head.log_id, head.end, log_id, end)


def check_history(found_id: str, found_end: int, log_id: str, end: int) -> None:
    """Raise the same for a log that a node names by its id and its end."""
    hint = "The node was replaced or restored from a copy. Start with a new checkpoint when that is meant."
    if found_id != log_id:
        raise ForeignLog(f"the log of the node is {found_id}, it was {log_id}", hint=hint)
    if found_end < end:
        raise ForeignLog(f"the log of the node ends at {found_end}, it had reached {end}", hint=hint)


async def _messages(
    access: NodeAccess, request: Any, read: Callable[[Any], Awaitable[F]]
) -> AsyncIterator[Fetched | F]:
    """Give the answer to a request: its head, then its frames."""
    from bsfg.wire.frames import read_head

    head = True
    async for message in calls().connection(access).answers("FetchFrames", request):
        if head:
            yield read_head(message)
            head = False
        else:
            yield await read(message)


async def _raw(message: Any) -> RawFrame:
    from bsfg.wire.convert import gap_of

    content = message.WhichOneof("content")
    if content == "gap":
        return RawFrame(message.first, message.last, gap=gap_of(message.gap))
    if content != "entries":
        raise FrameInvalid("a frame holds neither entries nor a gap record")
    return RawFrame(message.first, message.last, message.entries)
