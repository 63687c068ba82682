"""The routes of the dashboard, the files it serves, and what an operator decides on its pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

import bsfg
from bsfg.config import Token, ZoneConfig
from bsfg.config.kinds import Action
from bsfg.errors import BsfgError, IdentityUnknown, InvalidArgument, SignInRequired
from bsfg.gate import RECEIVER, SENDER
from bsfg.node.administration import Administration
from bsfg.node.authorize import Request as Asked
from bsfg.node.dashboard import records
from bsfg.node.dashboard.feed import BrowserFeed, EventStream, NodeWatch
from bsfg.node.dashboard.pages import DOCS, SAFE_HEADERS, DashboardFiles, DocPages
from bsfg.node.dashboard.sessions import ACT, VIEW, Door, Session, SessionFile, Sessions, Tokens
from bsfg.node.parts import NodeContext
from bsfg.node.status import VisibleStreams
from bsfg.node.tail import Tails
from bsfg.ports import Buffer, Clock
from bsfg.trail import TrailQuery
from bsfg.wire.http_server import Endpoint, Handler, Refused, caller_of, endpoint, integer_in_query, problem
from bsfg.wire.limits import Admission
from bsfg.wire.operations import JSON, JSON_LINES, PAGE_BODY_BYTES, PAGES, SIGN_IN_BYTES, terms_of
from bsfg.wire.service import Caller
from bsfg.wire.status import http_status

REASON_CHARACTERS_MAX = 500
HOLD_SECONDS_MAX = 366 * 86_400

Act = Callable[[Caller, dict[str, Any]], Awaitable[dict[str, Any]]]


class Actions:
    """The acts of the page, by the name in their path."""

    def __init__(self, admin: Administration, clock: Clock) -> None:
        self._admin, self._clock = admin, clock
        self.table: dict[str, Act] = {
            "hold": self.hold,
            "release": self.release,
            "retry": self.retry,
            "drop": self.drop,
            "reload": self.reload,
        }

    async def hold(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Close a gate, for a while or until it is released."""
        seconds = given.get("for_seconds")
        until = None
        if seconds is not None:
            until = self._clock.now_unix_ms() + 1000 * _whole(given, "for_seconds", 1, HOLD_SECONDS_MAX)
        view = await self._admin.hold_gate(caller, _text(given, "link"), _side(given), _reason(given), until)
        return {"mode": str(view.gate.mode)}

    async def release(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Open a held gate."""
        view = await self._admin.release_gate(caller, _text(given, "link"), _side(given), _reason(given))
        return {"mode": str(view.gate.mode)}

    async def retry(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Put a quarantined fact again."""
        stream, buffer, id, reason = _place(given)
        settled, result = await self._admin.retry_quarantined(caller, stream, buffer, id, reason)
        return {"settled": settled, "result": result.name.lower()}

    async def reload(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Take up what has changed in the node's file."""
        return await self._admin.reload(caller)

    async def drop(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Give up a quarantined fact."""
        await self._admin.drop_quarantined(caller, *_place(given))
        return {"settled": True}


def parsed(body: bytes) -> dict[str, Any]:
    """Read the body of a request."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument("the body must be a JSON object")
    return found


def _place(given: dict[str, Any]) -> tuple[str, Buffer, int, str]:
    try:
        buffer = Buffer(_text(given, "buffer"))
    except ValueError:
        raise InvalidArgument("buffer must be store or forward") from None
    return _text(given, "stream"), buffer, _whole(given, "id", 0, 1 << 62), _reason(given)


def _side(given: dict[str, Any]) -> str:
    side = _text(given, "side")
    if side not in (RECEIVER, SENDER):
        raise InvalidArgument("side must be receiver or sender")
    return side


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(f"{name} must be a text")
    return value


def _reason(given: dict[str, Any]) -> str:
    """Take the reason: one line, whatever was typed, and not without end, because it is shown and kept for long."""
    value = given.get("reason")
    reason = " ".join(value.split()) if isinstance(value, str) else ""
    if not reason:
        raise InvalidArgument("a reason is needed", hint="Say why, for those who read the record later.")
    if len(reason) > REASON_CHARACTERS_MAX:
        raise InvalidArgument(f"the reason has more than {REASON_CHARACTERS_MAX} characters")
    return reason


def _whole(given: dict[str, Any], name: str, least: int, most: int) -> int:
    value = given.get(name)
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number from {least} to {most}")
    return value


log = structlog.get_logger("bsfg.node")

HOME = "/dashboard/"
SIGN_IN = "/dashboard/sign-in"
BODY_SECONDS = 10.0


class Dashboard:
    """The pages of one node; what people see in a browser, beside the operations."""

    def __init__(
        self,
        config: ZoneConfig,
        parts: NodeContext,
        admin: Administration,
        history: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        self._parts, self._admin, self._happened = parts, admin, history
        self._tails: Tails
        self._tokens = Tokens(config.tokens)
        self._opened_to_tokens = bool(self._tokens)
        times = config.dashboard.session_seconds, config.dashboard.idle_seconds
        self._sessions = Sessions(parts.clock, *times, SessionFile(config.data_folder))
        self._sessions.load(self._tokens.mark_of, lambda caller: parts.guard.allows(caller, ACT))
        self._door = Door(parts, self._tokens, self._sessions)
        self._files, self._docs = DashboardFiles(), DocPages()
        self._feed = BrowserFeed(config.dashboard.watchers)
        self._watch = NodeWatch(admin.describe, self._feed, parts)
        self._actions = Actions(admin, parts.clock)

    @property
    def takes_tokens(self) -> bool:
        """Whether somebody without a certificate can be let in."""
        return bool(self._tokens)

    def take_tokens(self, rows: Mapping[str, Token]) -> bool:
        """Go by other tokens from now on; False when the listener, as it was opened, lets nobody in by a token."""
        self._tokens.take(rows)
        if self._sessions.revoke(self._tokens.mark_of):
            self._sessions.keep()
            self._watch.wake()
        return self._opened_to_tokens or not rows

    def caller(self, request: Request) -> Caller:
        """Give who asks for an operation."""
        return self._door.caller(request)

    def start(self) -> None:
        """Begin to keep the history."""
        self._watch.start()

    async def stop(self) -> None:
        """End all that is being watched."""
        await self._watch.stop()
        await self._keep_sessions()

    def routes(self, admission: Admission, tails: Tails) -> Sequence[BaseRoute]:
        """Give the routes of the pages."""
        self._tails = tails

        def at(path: str, method: str, handler: Handler, refused: Refused = _api_problem) -> Route:
            terms = terms_of(PAGES, handler.__name__.strip("_"))
            answer: Endpoint = endpoint(admission, terms, handler, admit=self._owner, refused=refused)
            return Route(path, answer, methods=[method], name=terms.name)

        return [
            at("/", "GET", self._home),
            at("/dashboard", "GET", self._home),
            at(HOME, "GET", self._page, self._shown),
            at(SIGN_IN, "GET", self._sign_in_page, self._shown),
            at(SIGN_IN, "POST", self._sign_in, self._shown),
            at("/dashboard/sign-out", "POST", self._sign_out),
            at("/dashboard/static/{path:path}", "GET", self._file),
            at("/dashboard/api/session", "GET", self._session),
            at("/dashboard/api/events", "GET", self._events),
            at("/dashboard/api/facts/{stream}", "GET", self._facts),
            at("/dashboard/api/history", "GET", self._history),
            at(f"{DOCS}{{path:path}}", "GET", self._doc, self._shown),
            at("/dashboard/api/gaps", "GET", self._gaps),
            at("/dashboard/api/gaps.jsonl", "GET", self._all_gaps),
            at("/dashboard/api/quarantine", "GET", self._quarantine),
            at("/dashboard/api/quarantine.jsonl", "GET", self._all_quarantine),
            at("/dashboard/api/trail", "GET", self._trail),
            at("/dashboard/api/trail.jsonl", "GET", self._whole_trail),
            at("/dashboard/api/act/{act}", "POST", self._act),
        ]

    async def _keep_sessions(self) -> None:
        """Write who is signed in; where it counts, before the answer."""
        await asyncio.to_thread(self._sessions.keeping())

    def _owner(self, request: Request, caller: Caller) -> str | None:
        """Give under whose name a browser is served: that of its session, or of its certificate; None without."""
        session = self._sessions.find(self._door.cookie(request))
        if session is not None and (name := self._parts.guard.known(session.caller)) is not None:
            return name
        return self._parts.guard.known(caller)

    # Pages.

    async def _home(self, request: Request, caller: Caller) -> Response:
        return RedirectResponse(HOME, 307, SAFE_HEADERS)

    async def _page(self, request: Request, caller: Caller) -> Response:
        session, cookie = self._door.enter(request)
        response = self._files.page("index.html", zone=self._zone)
        if cookie is not None:
            self._door.set_cookie(request, response, cookie)
            self._signed("signed_in", session, caller)
        return response

    async def _file(self, request: Request, caller: Caller) -> Response:
        return self._files.answer(request, request.path_params["path"])

    async def _sign_in_page(self, request: Request, caller: Caller) -> Response:
        says = "Your session has ended." if "ended" in request.query_params else ""
        return self._sign_in_form(caller, says)

    async def _sign_in(self, request: Request, caller: Caller) -> Response:
        given = parse_qs((await _body(request, SIGN_IN_BYTES)).decode("utf-8", "replace"))
        cookie = self._door.sign_in(request, given.get("token", [""])[0])
        await self._keep_sessions()
        session = self._sessions.find(cookie)
        log.info("signed_in", by=session.owner if session else "", caller=caller.address)
        if session is not None:
            self._signed("signed_in", session, caller)
        response = RedirectResponse(HOME, 303, SAFE_HEADERS)
        self._door.set_cookie(request, response, cookie)
        return response

    async def _sign_out(self, request: Request, caller: Caller) -> Response:
        session = self._door.acting(request)
        self._door.sign_out(request)
        self._watch.wake()
        await self._keep_sessions()
        log.info("signed_out", by=session.owner, caller=caller.address)
        self._signed("signed_out", session, caller)
        response = _json({"sign_in": SIGN_IN})
        self._door.forget_cookie(request, response)
        return response

    def _signed(self, action: str, session: Session, caller: Caller) -> None:
        """Record in the audit trail who came or left."""
        self._parts.trail.signed(action, self._parts.guard.identity(session.caller), caller.address, _by(session))

    def _shown(self, request: Request, error: BsfgError) -> Response:
        """Answer a person with a page, whatever went wrong."""
        if isinstance(error, SignInRequired) and request.method == "GET":
            # Coming from another site a browser keeps the cookie back; the page looks whether there is a session.
            elsewhere = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
            return RedirectResponse(f"{SIGN_IN}?elsewhere" if elsewhere else SIGN_IN, 303, SAFE_HEADERS)
        said = isinstance(error, IdentityUnknown) and request.method == "POST"
        says = error.message if said else f"{error.message}. {error.hint}"
        return self._sign_in_form(caller_of(request), says, http_status(error))

    def _sign_in_form(self, caller: Caller, says: str, status: int = 200) -> Response:
        known = self._parts.guard.allows(caller, VIEW)
        return self._files.page(
            "sign-in.html",
            status,
            zone=self._zone,
            says=says,
            says_hidden="" if says else "hidden",
            known_hidden="" if known else "hidden",
            form_hidden="" if self.takes_tokens else "hidden",
            identity=self._parts.guard.identity(caller) if known else "",
        )

    # What the page asks for.

    async def _session(self, request: Request, caller: Caller) -> Response:
        here = self._door.awake if "awake" in request.query_params else self._door.session
        session = here(request)
        if self._sessions.is_stale:
            await self._keep_sessions()
        return _json(self._described(session))

    def _described(self, session: Session) -> dict[str, Any]:
        return {
            "zone": self._zone,
            "version": bsfg.__version__,
            "identity": self._parts.guard.identity(session.caller),
            "by": _by(session),
            "may_act": self._door.may_act(session),
            "reads": self._readable(session),
            "page_key": session.page_key,
            "ends_unix_ms": session.ends_unix_ms,
        }

    def _readable(self, session: Session) -> list[list[str]]:
        """List the buffers whose facts somebody may look at."""
        allows, streams = self._parts.guard.allows, self._parts.settings.streams
        asked = [Asked(Action.READ, stream, buffer) for stream in streams for buffer in Buffer]
        return [[str(each.stream), str(each.buffer)] for each in asked if allows(session.caller, each)]

    async def _events(self, request: Request, caller: Caller) -> Any:
        session = self._door.session(request)
        scope = self._scope(session)
        abort: Callable[[], None] = request.scope.get("state", {}).get("abort", lambda: None)
        greeting = await self._watch.greeting(scope)

        def may_go_on() -> bool:
            # Whose streams were changed begins anew with what he may see now.
            return self._door.may_watch(session) and self._scope(session) == scope

        watcher = self._feed.join(may_go_on, abort, scope)
        watcher.offer(greeting)
        return EventStream(self._feed, watcher)

    def _scope(self, session: Session) -> VisibleStreams:
        return VisibleStreams.of(self._parts.guard.check(session.caller, VIEW))

    async def _facts(self, request: Request, caller: Caller) -> Response:
        """Show facts to somebody who looks on, as far as his own rights to read go."""
        session = self._door.session(request)
        return await self._tails.open(request, session.caller, records.fact_row, lambda: self._door.may_watch(session))

    async def _history(self, request: Request, caller: Caller) -> Response:
        """Give the alarms that were raised and cleared, and the gates that moved, since the node started."""
        scope = self._scope(self._door.session(request))
        seen = scope.document(await self._admin.describe(), self._parts.guard.matrix)
        return _json({"rows": [each for each in self._happened() if scope.sees_alert(each, seen)]})

    async def _doc(self, request: Request, caller: Caller) -> Response:
        self._door.session(request)
        # A long page takes a tenth of a second to make.
        return await asyncio.to_thread(self._docs.answer, self._files, request.path_params["path"], self._zone)

    async def _gaps(self, request: Request, caller: Caller) -> Response:
        caller = self._door.session(request).caller
        found, total = await records.gaps(self._admin, self._parts, caller, records.SHOWN_MAX)
        return _json(records.shown(found, total))

    async def _all_gaps(self, request: Request, caller: Caller) -> Response:
        found, _ = await records.gaps(self._admin, self._parts, self._door.session(request).caller)
        return _download(await asyncio.to_thread(records.lines, found), f"gaps-{self._zone}.jsonl")

    async def _quarantine(self, request: Request, caller: Caller) -> Response:
        views, total = await records.quarantine(self._admin, self._door.session(request).caller)
        return _json(records.shown(records.quarantined_rows(views), total))

    async def _all_quarantine(self, request: Request, caller: Caller) -> Response:
        # The first page is read before the answer begins, so that a refusal is an answer of its own.
        pages = records.quarantine_lines(self._admin, self._door.session(request).caller)
        first = await anext(pages)
        return _streamed(first, pages, f"quarantine-{self._zone}.jsonl")

    async def _trail(self, request: Request, caller: Caller) -> Response:
        self._parts.guard.check(self._door.session(request).caller, ACT)
        return _json(await asyncio.to_thread(records.trail_rows, self._parts.trail, _trail_query(request)))

    async def _whole_trail(self, request: Request, caller: Caller) -> Response:
        self._parts.guard.check(self._door.session(request).caller, ACT)
        pages = records.trail_lines(self._parts.trail)
        return _streamed(await anext(pages, b""), pages, f"audit-trail-{self._zone}.jsonl")

    async def _act(self, request: Request, caller: Caller) -> Response:
        session = self._door.acting(request)
        # The caller is whom the session belongs to, at the address that this request came from.
        whom = Caller(session.caller.names, caller.address, session.caller.token)
        self._parts.guard.check(whom, ACT)
        act = self._actions.table.get(request.path_params["act"])
        if act is None:
            raise InvalidArgument("there is no such act")
        done = await act(whom, parsed(await _body(request, PAGE_BODY_BYTES)))
        self._watch.wake()
        return _json(done)

    @property
    def _zone(self) -> str:
        return self._parts.settings.zone


def _by(session: Session) -> str:
    """Tell what somebody is known by."""
    return "token" if session.caller.token is not None else "certificate" if session.caller.names else "plaintext"


def _api_problem(request: Request, error: BsfgError) -> Response:
    response = problem(error)
    response.headers.update({**SAFE_HEADERS, "cache-control": "no-store"})
    return response


def _trail_query(request: Request) -> TrailQuery:
    identity, action, outcome = (request.query_params.get(name, "") for name in ("identity", "action", "outcome"))
    since = integer_in_query(request, "since_unix_ms", 0, 0, 1 << 50) or None
    return TrailQuery(since, identity=identity, action=action, outcome=outcome)


async def _body(request: Request, limit_bytes: int) -> bytes:
    parts, size = [], 0
    async with asyncio.timeout(BODY_SECONDS):
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit_bytes:
                raise InvalidArgument(f"the body has more than {limit_bytes} bytes")
            parts.append(chunk)
    return b"".join(parts)


def _json(value: Any) -> Response:
    headers = {**SAFE_HEADERS, "cache-control": "no-store"}
    return Response(orjson.dumps(value), headers=headers, media_type=JSON)


def _download(data: bytes, name: str) -> Response:
    return Response(data, headers=_download_headers(name), media_type=JSON_LINES)


def _streamed(first: bytes, rest: AsyncIterator[bytes], name: str) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield first
        async for part in rest:
            yield part

    return StreamingResponse(parts(), headers=_download_headers(name), media_type=JSON_LINES)


def _download_headers(name: str) -> dict[str, str]:
    return {**SAFE_HEADERS, "cache-control": "no-store", "content-disposition": f'attachment; filename="{name}"'}
