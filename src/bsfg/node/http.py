"""JSON over HTTP: the operations of producers and consumers for curl and small clients, and what monitors ask for."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from bsfg.artifacts import DEFAULT_MEDIA_TYPE, skipped
from bsfg.batch import FactBatch
from bsfg.errors import (
    ArtifactMissing,
    BsfgError,
    FactTooLarge,
    InvalidArgument,
    InvalidFact,
    MessageTooLarge,
    Overloaded,
    TimedOut,
)
from bsfg.fact import Entry, Key
from bsfg.journey.link import AppendOutcome, Fetched, FetchRequest, Refusal
from bsfg.jsonform import entry_to_dict, message_from_json
from bsfg.model import DEFAULT_LIMITS, Limits
from bsfg.node.administration import Administration
from bsfg.node.service import NodeService
from bsfg.node.tail import Tails, gone
from bsfg.offload import STEP_FACTS, THREAD_BYTES, Step, by_size, step_of
from bsfg.ports import Confirmation, GapRecord
from bsfg.rows import Row, row_of
from bsfg.rules import judge
from bsfg.wire.grpc_calls import check_most
from bsfg.wire.http_server import (
    DATA_POLICY,
    Endpoint,
    Handler,
    attachment,
    bucket_of,
    buffer_in_query,
    caller_of,
    endpoint,
    integer_in_query,
    problem,
)
from bsfg.wire.limits import Admission, WireLimits
from bsfg.wire.operations import HTTP, JSON, JSON_LINES, ROUTES, Asks, HttpRoute, openapi, terms_of
from bsfg.wire.service import Caller, ObjectInfo

if TYPE_CHECKING:
    from bsfg.node.dashboard.dashboard import Dashboard

_BOM = b"\xef\xbb\xbf"


def read_facts(
    lines: Iterable[bytes], defaults: Mapping[str, Any] | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> FactBatch:
    """Read a message of each line as an unsealed batch; ``defaults`` fill envelope fields that a line leaves out.

    Blank lines are skipped. The first line that breaks a rule raises `InvalidFact` or `FactTooLarge` with its number
    (from 1) as the detail ``line``.
    """
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if line.strip():
            rows.append(_row(number, line, defaults or {}, limits))
    return FactBatch.of_rows(rows)


def _row(number: int, line: bytes, defaults: Mapping[str, Any], limits: Limits) -> Row:
    try:
        row = row_of(message_from_json(line, **defaults))
        judge(number, row, limits)
    except (InvalidFact, FactTooLarge) as error:
        raise _at_line(number, error) from None
    return row


def _at_line(number: int, error: BsfgError) -> BsfgError:
    name, rule = error.details.get("field", "message"), error.details.get("rule", error.message)
    return type(error)(f"line {number}, {name}: {rule}", line=number, field=name, rule=rule)


PIECE_BYTES = 64 << 10
_REST = re.compile(r"bytes=([0-9]{1,18})-")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpBoundary:
    """Answers the operations of the table."""

    def __init__(
        self,
        boundary: NodeService,
        admin: Administration,
        limits: WireLimits,
        admission: Admission,
        *,
        zone: str,
        pages: Dashboard | None = None,
    ) -> None:
        self._boundary, self._admin, self._limits, self._admission = boundary, admin, limits, admission
        self._zone, self._pages = zone, pages
        self.tails = Tails(boundary, limits, admission)
        self._openapi = orjson.dumps(openapi())
        self._looking: asyncio.Task[None] | None = None

    def app(self) -> Starlette:
        """Give the application, one route per operation, and the pages for people where there are any."""
        routes: list[BaseRoute] = [Route(each.path, self._endpoint(each), methods=[each.method]) for each in ROUTES]
        if self._pages is not None:
            routes += self._pages.routes(self._admission, self.tails)
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._not_an_operation})
        # A path is right or it is none: what leads elsewhere would be an answer that nobody has to wait for.
        app.router.redirect_slashes = False
        return app

    async def _not_an_operation(self, request: Request, error: Exception) -> Response:
        """Say that there is no such operation; who asks for those again and again waits for that."""
        assert isinstance(error, HTTPException)
        await self._admission.slow_down(f"{bucket_of(request)} asks for what there is not")
        what = f"{request.method} {request.url.path[:200]}"
        hint = "GET /openapi.json lists the operations."
        answer = problem(InvalidArgument(f"{what} is not an operation here", hint=hint), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    def _endpoint(self, operation: HttpRoute) -> Endpoint:
        handler: Handler = getattr(self, operation.name)
        who = caller_of if self._pages is None else self._pages.caller
        terms = terms_of(HTTP, operation.name)

        def admit(request: Request, caller: Caller) -> str | None:
            return self._boundary.admit(caller, terms.actions)

        def known(request: Request, caller: Caller) -> str | None:
            return self._boundary.known(caller)

        is_open = terms.asks == Asks.CERTIFICATE
        return endpoint(self._admission, terms, handler, who, admit=known if is_open else admit)

    async def append(self, request: Request, caller: Caller) -> Response:
        """Append one fact, or many."""
        stream = request.path_params["stream"]
        many = _media_type(request) in (JSON_LINES, "application/jsonl")
        async with asyncio.timeout(self._limits.request_timeout_seconds), self._body(request, "append") as body:
            facts = await by_size(len(body), _facts, body, self._zone, many)
            outcome = await self._boundary.commit(await self._boundary.prepare(caller, stream, facts))
        if not many:
            for conflict in outcome.conflicts():
                raise conflict
        return _answer(await by_size(outcome.facts.weight_bytes, _encoded, _appended, outcome))

    async def get(self, request: Request, caller: Caller) -> Response:
        """Give the fact of a key."""
        path = request.path_params
        key = Key(path["from_zone"], path["message_id"])
        async with asyncio.timeout(self._limits.request_timeout_seconds):
            entry = await self._boundary.get(caller, path["stream"], key, buffer_in_query(request))
        return _answer(await by_size(len(entry.message.fact.object), _encoded, entry_to_dict, entry))

    async def fetch(self, request: Request, caller: Caller) -> Response:
        """Give the next facts of a consumer."""
        wait_ms = integer_in_query(request, "wait_ms", 0, 0, 1 << 31)
        wanted = FetchRequest(
            max_facts=integer_in_query(request, "limit", 100, 1, 100_000),
            max_bytes=min(integer_in_query(request, "max_bytes", 1 << 20, 1, 1 << 40), self._limits.frame_bytes),
            wait_seconds=min(wait_ms / 1000, self._limits.fetch_wait_max_seconds),
            gaps_after=request.query_params.get("gaps_after") or None,
            after=integer_in_query(request, "after", 0, 0, 1 << 62) if "after" in request.query_params else None,
        )
        room = self._admission.room(request.state.owner)
        caller, consumer = replace(caller, room=room), request.path_params["consumer"]
        with ExitStack() as held:
            held.callback(room.close)
            async with asyncio.timeout(self._limits.request_timeout_seconds + wanted.wait_seconds):
                fetched = await _unless_gone(request, self._boundary.fetch(caller, consumer, wanted))
            is_lines = JSON_LINES in request.headers.get("accept", "")
            pieces = _lines(fetched) if is_lines else _fetched(fetched)
            data = await self._admission.written(fetched, pieces, request.state.owner)
            return _Counted(data, JSON_LINES if is_lines else JSON, held.pop_all().close)

    async def tail(self, request: Request, caller: Caller) -> Response:
        """Show the newest facts of a stream, and those that come."""
        return await self.tails.open(request, caller)

    async def confirm(self, request: Request, caller: Caller) -> Response:
        """Record a confirmation."""
        async with asyncio.timeout(self._limits.request_timeout_seconds), self._body(request, "confirm") as body:
            confirmation, refusals = await by_size(len(body), _confirmation, body)
            consumer = request.path_params["consumer"]
            advanced_to = await self._boundary.confirm(caller, consumer, confirmation, refusals)
        return _json({"cursor_advanced_to": advanced_to})

    async def put_object(self, request: Request, caller: Caller) -> Response:
        """Upload an artifact."""
        length = request.headers.get("content-length")
        info = ObjectInfo(
            request.path_params["bucket"],
            request.path_params["key"],
            _media_type(request) or ObjectInfo("", "").media_type,
            digest=request.query_params.get("digest"),
            size_bytes=int(length) if length and length.isdigit() else None,
        )
        stored = await self._boundary.put_object(caller, info, self._chunks(request))
        return _json(
            {
                "bucket": stored.bucket,
                "key": stored.key,
                "digest": stored.digest,
                "size_bytes": stored.size_bytes,
                "already_exists": stored.already_exists,
            }
        )

    async def get_object(self, request: Request, caller: Caller) -> Response:
        """Download an artifact by name; a digest decides what is meant."""
        path, digest = request.path_params, request.query_params.get("digest")
        return await self._download(request, caller, (path["bucket"], path["key"]), digest)

    async def get_artifact(self, request: Request, caller: Caller) -> Response:
        """Download an artifact by digest."""
        return await self._download(request, caller, ("", ""), request.path_params["digest"])

    async def get_fact_artifact(self, request: Request, caller: Caller) -> Response:
        """Download the artifact of a fact."""
        path = request.path_params
        key = Key(path["from_zone"], path["message_id"])
        async with asyncio.timeout(self._limits.request_timeout_seconds):
            entry = await self._boundary.get(caller, path["stream"], key, buffer_in_query(request))
        reference = entry.message.fact.artifact
        if reference is None:
            raise ArtifactMissing("the fact refers to no artifact", hint="Look at fact.artifact_digest of the fact.")
        return await self._download(request, caller, ("", ""), reference.digest, reference.media_type)

    async def _download(
        self, request: Request, caller: Caller, name: tuple[str, str], digest: str | None, media_type: str | None = None
    ) -> Response:
        """Answer with content, or with what follows the bytes that a caller has (``Range: bytes=N-``)."""
        info, data = await self._boundary.get_object(caller, *name, digest)
        offset, size_bytes = _resumed(request, info), info.size_bytes or 0
        if offset and offset >= size_bytes:
            await data.aclose()
            return problem(InvalidArgument(f"the artifact has {size_bytes} bytes, nothing follows {offset}"), 416)
        info = replace(info, media_type=media_type or info.media_type)
        return await _content(request, info, skipped(data, offset), offset)

    async def status(self, request: Request, caller: Caller) -> Response:
        """Describe the node."""
        return _json(await self._admin.status(caller))

    async def metrics(self, request: Request, caller: Caller) -> Response:
        """Give the metrics."""
        return Response(await self._admin.metrics(caller), media_type=METRICS_TYPE)

    async def healthz(self, request: Request, caller: Caller) -> Response:
        """Say that the process works."""
        return _json({"status": "ok"})

    async def readyz(self, request: Request, caller: Caller) -> Response:
        """Say whether the node serves."""
        # However many ask at once, the node looks once.
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._admin.ready())
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        async with asyncio.timeout(self._limits.request_timeout_seconds):
            await asyncio.shield(self._looking)
        return _json({"status": "ready"})

    async def openapi(self, request: Request, caller: Caller) -> Response:
        """Give the OpenAPI document."""
        return _answer(self._openapi)

    @asynccontextmanager
    async def _body(self, request: Request, operation: str) -> AsyncIterator[bytes]:
        """Read a whole body, within the limit and without long silences; its bytes count inside."""
        limit_bytes = terms_of(HTTP, operation).limit_bytes(self._limits.message_bytes)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit_bytes:
            raise MessageTooLarge(f"the body has {length[:20]} bytes, the limit is {limit_bytes}")
        owner, admission, reading = request.state.owner, self._admission, asyncio.current_task()
        assert reading is not None
        given_up: list[bool] = []

        def give_up() -> None:
            given_up.append(True)
            reading.cancel()

        try:
            await admission.awaited.begin(owner, request, give_up)
            body = await self._whole(request, limit_bytes)
            held = await admission.budget.acquire(len(body), owner)
        except asyncio.CancelledError:
            if given_up and reading.uncancel() == 0:
                raise Overloaded("too many messages are on their way", limit="awaited_messages") from None
            raise
        finally:
            admission.awaited.done(owner, request)
        try:
            yield body
        finally:
            admission.budget.release(held, owner)

    async def _whole(self, request: Request, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for chunk in self._chunks(request):
            size += len(chunk)
            if size > limit_bytes:
                raise MessageTooLarge(f"the body has more than {limit_bytes} bytes")
            parts.append(chunk)
        return b"".join(parts)

    async def _chunks(self, request: Request) -> AsyncIterator[bytes]:
        iterator = aiter(request.stream())
        while True:
            try:
                async with asyncio.timeout(self._limits.idle_timeout_seconds):
                    chunk = await anext(iterator)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TimedOut("the body fell silent before its end") from None
            if chunk:
                yield chunk


class _Counted(Response):
    """An answer whose bytes count until they are sent, or nobody is there to take them."""

    def __init__(self, data: bytes, media_type: str, release: Callable[[], None]) -> None:
        super().__init__(data, media_type=media_type)
        self._release = release

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send it in pieces: the listener takes one of any size at once, and waits before the next one."""
        body = memoryview(bytes(self.body))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for start in range(0, len(body), PIECE_BYTES):
                piece = body[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._release()


def _resumed(request: Request, info: ObjectInfo) -> int:
    """Give from where on a caller wants content; any other range than the rest of it is answered with the whole."""
    found = _REST.fullmatch(request.headers.get("range", ""))
    # What was begun may not be what the name stands for now.
    is_same = request.headers.get("if-range") in (None, f'"{info.digest}"')
    return int(found.group(1)) if found is not None and is_same and request.method != "HEAD" else 0


async def _content(request: Request, info: ObjectInfo, data: AsyncGenerator[bytes, None], offset: int) -> Response:
    """Answer with content, or for HEAD with what is known of it; content that is not right is never complete."""
    size_bytes = info.size_bytes or 0
    headers = {
        "content-length": str(size_bytes - offset),
        "accept-ranges": "bytes",
        "etag": f'"{info.digest}"',
        # A producer's file is nothing of ours: a browser keeps it, and must not show it as a page of this node.
        "content-disposition": attachment(info.file_name or info.key or info.digest or ""),
        "content-security-policy": DATA_POLICY,
    }
    # A media type is a producer's text; what cannot stand in a header is not worth an error.
    media_type = info.media_type
    if not media_type.isascii() or not media_type.isprintable():
        media_type = DEFAULT_MEDIA_TYPE
    if request.method == "HEAD":
        await data.aclose()
        return Response(media_type=media_type, headers=headers)
    if offset:
        headers["content-range"] = f"bytes {offset}-{size_bytes - 1}/{size_bytes}"
    return StreamingResponse(data, 206 if offset else 200, media_type=media_type, headers=headers)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Fetched]) -> Fetched:
    """Wait for an answer, but not for a caller who has gone: he would keep his place until the end of the wait."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _json(value: Any) -> Response:
    return _answer(orjson.dumps(value))


def _answer(data: bytes) -> Response:
    return Response(data, media_type=JSON)


def _encoded(form: Callable[[Any], Any], value: Any) -> bytes:
    """Write a value in its JSON form."""
    return orjson.dumps(form(value))


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


def _facts(body: bytes, zone: str, many: bool) -> FactBatch:
    lines = io.BytesIO(body) if many else [body]
    # The node's own limits are applied to the whole; here lines only have to be readable.
    limits = Limits(max_object_bytes=max(1, len(body)))
    facts = read_facts(lines, {"from_zone": zone}, limits=limits)
    if not len(facts):
        raise InvalidArgument("the body holds no fact")
    return facts


def _appended(outcome: AppendOutcome) -> dict[str, Any]:
    return {
        "results": [
            {
                "result": each.result.name.lower(),
                "offset": each.offset,
                "message_id": each.message_id,
                "digest": each.digest_text,
            }
            for each in outcome.results()
        ],
        "chain_head": outcome.chain_head.hex(),
        "appended_at_unix_ms": outcome.receipt.appended_at_unix_ms,
    }


def _lines(fetched: Fetched) -> Iterator[Step]:
    """Give an answer line by line, as `bsfg fetch` does: entries, and each range that is not there as a gap."""
    yield from (_line({"gap": _counted(gap)}) for gap in fetched.gaps)
    for frame in fetched.frames:
        if frame.entries is not None:
            for size_bytes, entries in frame.entries.in_steps(STEP_FACTS, THREAD_BYTES):
                yield step_of(size_bytes, _entry_lines, entries)
        elif frame.gap is not None:
            yield _line({"gap": _counted(frame.gap)})


def _entry_lines(entries: Sequence[Entry]) -> bytes:
    return b"".join(_line(entry_to_dict(entry)) for entry in entries)


def _listed_entries(entries: Sequence[Entry]) -> bytes:
    return orjson.dumps([entry_to_dict(entry) for entry in entries])[1:-1]


def _line(found: dict[str, Any]) -> bytes:
    return orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)


def _fetched(fetched: Fetched) -> Iterator[Step]:
    """Give an answer as one document, in pieces."""
    between = b'{"entries":['
    for frame in fetched.frames:
        if frame.entries is not None:
            for size_bytes, entries in frame.entries.in_steps(STEP_FACTS, THREAD_BYTES):
                yield between
                yield step_of(size_bytes, _listed_entries, entries)
                between = b","
    ranges = [frame.gap for frame in fetched.frames if frame.gap is not None]
    rest = {
        "gaps": [_counted(gap) for gap in [*fetched.gaps, *ranges]],
        "start": fetched.start,
        "next_offset": fetched.frames[-1].last + 1 if fetched.frames else fetched.start,
        "end": fetched.end,
        "log_id": fetched.log_id,
        "gaps_token": fetched.gaps_token,
    }
    yield (b"" if between == b"," else between) + b"]," + orjson.dumps(rest)[1:]


def _counted(gap: GapRecord) -> GapRecord:
    """Let a record say for how many offsets it stands, whether it was folded or not."""
    return replace(gap, count=gap.offsets)


def _confirmation(body: bytes) -> tuple[Confirmation, list[Refusal]]:
    try:
        found = orjson.loads(body)
        for field, most in terms_of(HTTP, "confirm").most.items():
            check_most(field, found.get(field, ()), most)
        confirmation = Confirmation(
            through=_optional(found, "through", int),
            ranges=tuple((_whole(first), _whole(last)) for first, last in found.get("ranges", ())),
            log_id=_optional(found, "log_id", str),
        )
        refusals = [
            Refusal(_whole(each["first"]), _whole(each["last"]), str(each["reason"]), str(each.get("detail", "")))
            for each in found.get("refusals", ())
        ]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"not a confirmation: {error}") from None
    if confirmation.through is None and not confirmation.ranges:
        raise InvalidArgument("a confirmation names `through`, `ranges` or both")
    return confirmation, refusals


def _optional(found: Mapping[str, Any], name: str, kind: type) -> Any:
    value = found.get(name)
    if value is not None and type(value) is not kind:
        raise TypeError(f"{name} must be of type {kind.__name__}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{str(value)[:80]!r} is not a whole number")
    return value
