"""Facts of a stream as server-sent events, for whoever looks on without being a consumer.

A reader who does not keep up costs nothing but his place: facts are read when he takes them, none wait in memory for
him, and one who is too far behind is told what he did not see and goes on with the newest. Whether he may is asked
anew at every look, so a right that is taken away ends what is open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from bsfg.errors import BsfgError, InvalidArgument, Overloaded
from bsfg.fact import Entry
from bsfg.filters import check_patterns
from bsfg.journey.link import FetchRequest
from bsfg.journey.look import FRAME_FACTS, FactChoice, WatchedBuffer
from bsfg.jsonform import entry_to_dict
from bsfg.node.service import NodeService, Reading
from bsfg.offload import STEP_FACTS, THREAD_BYTES, by_size
from bsfg.ports import Buffer, Frame
from bsfg.wire.http_server import buffer_in_query, integer_in_query
from bsfg.wire.limits import Admission, AnswerRoom, WireLimits
from bsfg.wire.service import Caller

if TYPE_CHECKING:
    from collections.abc import Iterator

LAST, LAST_MAX = 10, 1_000
REACH = 200_000
"""How many offsets back is looked for the newest that fit; what lies before is said not to have been searched."""

BEHIND_MAX, KEPT = 10_000, 1_000
"""Who follows and is so many offsets behind is moved to where so many are left, and told so."""

LOOK_SECONDS, REST_SECONDS = 0.25, 0.005
"""How often is looked for news; and the pause after each frame, so that others have their turn while one reads much."""

READING = 2
"""How many of those who look on are read for at once."""

ALIVE_SECONDS = 15.0
TAILS, TAILS_PER_IDENTITY = 64, 8
_PIECES = FetchRequest(max_facts=FRAME_FACTS)
_ALWAYS_UNIX_MS = 1 << 50
_PIECE_BYTES = 64 << 10

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    # A proxy in between must pass events on as they come.
    (b"x-accel-buffering", b"no"),
]

Form = Callable[[Entry], dict[str, Any]]
Send = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class TailRequest:
    """What somebody wants to look at: which facts, from where on, and whether also those to come."""

    stream: str
    buffer: Buffer
    choice: FactChoice
    last: int = LAST
    since_unix_ms: int | None = None
    after: tuple[str, int] | None = None
    """The history and the offset of the last event that was seen."""
    follow: bool = True

    @staticmethod
    def of(request: Request) -> TailRequest:
        """Read the parameters of a request; where it goes on, its header ``Last-Event-ID`` counts before them."""
        query = request.query_params
        seen = request.headers.get("last-event-id") or query.get("after")
        since = integer_in_query(request, "since_unix_ms", 0, 0, _ALWAYS_UNIX_MS) if "since_unix_ms" in query else None
        if since is not None and "last" in query:
            raise InvalidArgument("last and since_unix_ms both say where to begin", hint="Choose one.")
        follow = query.get("follow", "true")
        if follow not in ("true", "false"):
            raise InvalidArgument("follow must be true or false")
        return TailRequest(
            stream=request.path_params["stream"],
            buffer=buffer_in_query(request),
            choice=FactChoice(**{name: _pattern(request, name) for name in ("subject", "predicate", "from_zone")}),
            last=integer_in_query(request, "last", LAST, 0, LAST_MAX),
            since_unix_ms=since,
            after=None if not seen else _seen(seen),
            follow=follow == "true",
        )


def _pattern(request: Request, name: str) -> str | None:
    text = request.query_params.get(name)
    if text:
        check_patterns(name, (text,))
    return text or None


def _seen(text: str) -> tuple[str, int]:
    log_id, _, offset = text.rpartition(":")
    if not log_id or not offset.isascii() or not offset.isdigit() or len(text) > 100:
        raise InvalidArgument("Last-Event-ID is not the id of an event of this stream", hint="Leave it out.")
    return log_id, int(offset)


@dataclass(slots=True)
class ServedBuffer:
    """A buffer of this node as one caller may read it; ``log_id`` is the history that it last turned out to have."""

    service: NodeService
    caller: Caller
    stream: str
    buffer: Buffer
    turns: asyncio.Semaphore
    log_id: str = ""

    async def end(self) -> int:
        """Give the offset behind its last entry."""
        found = await self.service.read_offsets(self.caller, self.stream, self.buffer, 0, 0, FetchRequest(max_facts=1))
        self.log_id = found.head.log_id
        return found.head.end

    async def offsets(self, first: int, end: int) -> AsyncIterator[Frame]:
        """Give a range of offsets."""
        at = self.stream, self.buffer, first, end
        async for frame in self._paced(await self.service.read_offsets(self.caller, *at, _PIECES)):
            yield frame

    async def times(self, since_unix_ms: int) -> AsyncIterator[Frame]:
        """Give what became durable from a moment on."""
        at = self.stream, self.buffer, since_unix_ms, _ALWAYS_UNIX_MS
        async for frame in self._paced(await self.service.read_times(self.caller, *at, _PIECES)):
            yield frame

    async def _paced(self, reading: Reading) -> AsyncIterator[Frame]:
        """Give frames as there are turns for them: however many look, the node reads a few at a time for all."""
        while True:
            async with self.turns:
                frame = await anext(reading.frames, None)
                await asyncio.sleep(REST_SECONDS)
            if frame is None:
                return
            yield frame


@dataclass(slots=True)
class Tails:
    """All who look on at one node: there is a bound on how many they are, and each has a place as every caller has."""

    service: NodeService
    limits: WireLimits
    admission: Admission
    _by_owner: Counter[str] = field(default_factory=Counter)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READING))

    def __len__(self) -> int:
        return self._by_owner.total()

    def close(self) -> None:
        """End all of them."""
        self._stopping.set()

    async def open(
        self,
        request: Request,
        caller: Caller,
        form: Form = entry_to_dict,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> Response:
        """Give the answer to one who wants to look on, or raise why he may not; he has his place until it ends."""
        wanted, owner = TailRequest.of(request), request.state.owner
        looked_at = ServedBuffer(self.service, caller, wanted.stream, wanted.buffer, self._turns)
        end = await looked_at.end()
        with ExitStack() as held:
            held.enter_context(self._place(owner))
            held.enter_context(self.admission.enter(owner))
            room = self.admission.room(owner)
            held.callback(room.close)
            watched = WatchedBuffer(looked_at, wanted.choice, end)
            tail = FactTail(wanted, looked_at, watched, form, may_go_on)
            return TailAnswer(tail, room, self.limits.connection_age_seconds, self._stopping, held.pop_all().close)

    @contextmanager
    def _place(self, owner: str) -> Iterator[None]:
        if len(self) >= TAILS or self._by_owner[owner] >= TAILS_PER_IDENTITY:
            hint = "Close another one first; a program that needs every fact is better off as a consumer."
            raise Overloaded(f"{self._by_owner[owner]} of {owner} look on already", hint=hint, limit="tails")
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            if not self._by_owner[owner]:
                del self._by_owner[owner]


@dataclass(slots=True)
class FactTail:
    """The events of one who looks on."""

    wanted: TailRequest
    looked_at: ServedBuffer
    watched: WatchedBuffer
    form: Form
    may_go_on: Callable[[], bool]

    async def events(self, room: AnswerRoom) -> AsyncGenerator[bytes, None]:
        """Give everything from where he begins, then, if he follows, what comes; a refusal is the last event."""
        try:
            async for data in self._written(self._begin(), room):
                yield data
            if not self.wanted.follow:
                yield self._event("end", {"next_offset": self.watched.at})
                return
            async for data in self._following(room):
                yield data
        except BsfgError as error:
            yield self._event("refused", error.to_dict())

    async def _begin(self) -> AsyncIterator[Frame | bytes]:
        watched, wanted = self.watched, self.wanted
        end = watched.at
        if wanted.after is not None:
            log_id, offset = wanted.after
            if log_id != self.looked_at.log_id or offset >= end:
                yield self._event("restored", {"next_offset": end, "log_id": self.looked_at.log_id})
                return
            watched.at = offset + 1
            if end - watched.at > BEHIND_MAX:
                yield self._skip(end)
            frames = watched.news(end)
        elif wanted.since_unix_ms is not None:
            frames = watched.since(wanted.since_unix_ms)
        else:
            frames = watched.newest(wanted.last, REACH)
        async for frame in frames:
            if (unsearched := self._unsearched()) is not None:
                yield unsearched
            yield frame
        if (unsearched := self._unsearched()) is not None:
            yield unsearched

    async def _following(self, room: AnswerRoom) -> AsyncIterator[bytes]:
        watched, loop = self.watched, asyncio.get_running_loop()
        told = loop.time()
        yield self._alive()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if not self.may_go_on():
                yield self._event("ended", {})
                return
            restored = watched.restored
            end = await watched.end()
            if watched.restored > restored:
                yield self._event("restored", {"next_offset": end, "log_id": self.looked_at.log_id})
            if end - watched.at > BEHIND_MAX:
                yield self._skip(end)
            async for data in self._written(watched.news(end), room):
                told = loop.time()
                yield data
            if loop.time() - told >= ALIVE_SECONDS:
                told = loop.time()
                yield self._alive()

    def _unsearched(self) -> bytes | None:
        """Say once that older facts may fit, too, and that nobody has looked."""
        end, self.watched.unsearched = self.watched.unsearched, 0
        return self._event("skipped", {"first": 0, "last": end - 1, "reason": "not_searched"}) if end else None

    def _skip(self, end: int) -> bytes:
        """Go on with the newest, and say what is left out."""
        first, self.watched.at = self.watched.at, end - KEPT
        return self._event("skipped", {"first": first, "last": end - KEPT - 1, "reason": "behind"})

    async def _written(
        self, frames: AsyncIterator[Frame | bytes] | AsyncIterator[Frame], room: AnswerRoom
    ) -> AsyncIterator[bytes]:
        """Write frames as events, some facts at a time; what a frame weighs counts until it is taken."""
        async for frame in frames:
            if isinstance(frame, bytes):
                yield frame
            elif frame.entries is None:
                assert frame.gap is not None
                gap = {**_plain(frame.gap), "first": frame.first, "last": frame.last}
                yield self._event("gap", gap, frame.last)
            elif len(frame.entries):
                await room.take(frame.entries.weight_bytes)
                for size_bytes, entries in frame.entries.in_steps(STEP_FACTS, THREAD_BYTES):
                    yield await by_size(size_bytes, self._facts, entries)
                room.close()

    def _facts(self, entries: Sequence[Entry]) -> bytes:
        return b"".join(self._event("fact", self.form(entry), entry.offset) for entry in entries)

    def _alive(self) -> bytes:
        """Say that nothing new fits, and up to where nobody need look again."""
        at = self.watched.at
        return b"" if at == 0 else f": nothing new\nid: {self.looked_at.log_id}:{at - 1}\n\n".encode()

    def _event(self, name: str, found: dict[str, Any], offset: int | None = None) -> bytes:
        place = b"" if offset is None else f"id: {self.looked_at.log_id}:{offset}\n".encode()
        return place + b"event: " + name.encode() + b"\ndata: " + orjson.dumps(found) + b"\n\n"


def _plain(gap: Any) -> dict[str, Any]:
    return dict(orjson.loads(orjson.dumps(replace(gap, count=gap.offsets))))


class TailAnswer(Response):
    """The answer to one who looks on, as an ASGI application: it ends with him, with the node, or when it is old."""

    def __init__(
        self,
        tail: FactTail,
        room: AnswerRoom,
        age_seconds: float,
        stopping: asyncio.Event,
        release: Callable[[], None],
    ) -> None:
        super().__init__()
        self._tail, self._room, self._age_seconds = tail, room, age_seconds
        self._stopping, self._release = stopping, release

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Send events until one side ends it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            tasks = [
                asyncio.create_task(self._pump(send)),
                asyncio.create_task(gone(receive)),
                asyncio.create_task(self._stopping.wait()),
            ]
            try:
                await asyncio.wait(tasks, timeout=self._age_seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                pumped = tasks[0].done()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if not pumped or tasks[0].exception() is None:
                with suppress(OSError, TimeoutError):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                # Who takes nothing for so long is cut: the end of an answer would wait behind the rest of it.
                scope.get("state", {}).get("abort", lambda: None)()
        finally:
            self._release()

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._tail.events(self._room)) as events:
            async for data in events:
                for start in range(0, len(data), _PIECE_BYTES):
                    piece = data[start : start + _PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def gone(receive: Any) -> None:
    """Wait until a caller has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
