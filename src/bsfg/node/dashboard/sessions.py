"""Who looks at the dashboard: tokens, sessions, and whether it is our own page that asks."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import structlog
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from bsfg.config import Token
from bsfg.config.kinds import Action
from bsfg.disk import translated
from bsfg.errors import BsfgError, IdentityUnknown, PermissionRefused, SignInRequired, StorageFailed
from bsfg.node.authorize import Decision, Request, Rule
from bsfg.node.parts import NodeContext
from bsfg.ports import Clock
from bsfg.stores.log.files import SESSIONS as KEPT
from bsfg.stores.log.files import DiskFiles, write_whole
from bsfg.wire.http_server import caller_of
from bsfg.wire.service import Caller

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Digits and letters that cannot be taken for each other: 5 bits each."""

GROUPS, GROUP_CHARACTERS = 5, 5
_FORM = re.compile("bsfg" + f"-[{ALPHABET}]{{{GROUP_CHARACTERS}}}" * GROUPS)
_MISREAD = str.maketrans({"o": "0", "i": "1", "l": "1", "u": "v"})


def make() -> str:
    """Make a token of 125 random bits, in groups that can be read out and typed."""
    groups = ("".join(secrets.choice(ALPHABET) for _ in range(GROUP_CHARACTERS)) for _ in range(GROUPS))
    return "-".join(("bsfg", *groups))


def hash_of(token: str) -> str:
    """Give the hash that stands in the configuration."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def cleaned(text: str) -> str | None:
    """Give the token that somebody typed, None when it has not the form of one; case and misread letters are kind."""
    token = "".join(text[:200].split()).lower().translate(_MISREAD)
    return token if _FORM.fullmatch(token) else None


class Tokens:
    """The tokens of a zone."""

    def __init__(self, rows: Mapping[str, Token]) -> None:
        self._rows = rows

    def __bool__(self) -> bool:
        return bool(self._rows)

    def take(self, rows: Mapping[str, Token]) -> None:
        """Go by other rows from now on."""
        self._rows = rows

    def mark_of(self, name: str) -> str | None:
        """Give what a session of a token depends on: another token under its name, or another role, is another mark."""
        row = self._rows.get(name)
        return None if row is None else f"{row.hash} {row.role}"

    def name_of(self, text: str) -> str | None:
        """Give the name of the row whose token this is; the time it takes does not depend on which one it is."""
        token = cleaned(text)
        shown = hash_of(token or "")
        found = None
        for name, row in self._rows.items():
            if hmac.compare_digest(row.hash, shown):
                found = name
        return found if token is not None else None


log = structlog.get_logger("bsfg.node")

SESSIONS_MAX = 1_000
SESSIONS_OF_ONE_MAX = 50
KEEP_EVERY_MS = 60_000
"""How much of somebody's last use may be lost by a crash: his session then ends that much earlier, never later."""

MarkOf = Callable[[str], str | None]
"""Gives what the row of a token says at present, None without a row: a session ends with what it began by."""


@dataclass(slots=True)
class Session:
    """One browser: who uses it, until when, and what its requests must repeat to show that our page made them.

    ``idle_ms`` is how long it may be left alone, None for one that only looks: a display on a wall is never touched.
    ``mark`` is what the row of its token said when it began.
    """

    caller: Caller
    ends_ms: int
    ends_unix_ms: int
    used_ms: int
    idle_ms: int | None = None
    mark: str | None = None
    page_key: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def owner(self) -> str:
        """Who it belongs to, whatever he called from."""
        return str(self.caller)


class Sessions:
    """All sessions of one node, each found by its cookie."""

    def __init__(
        self, clock: Clock, session_seconds: float, idle_seconds: float, file: SessionFile | None = None
    ) -> None:
        self._clock, self._session_ms, self._idle_ms = clock, int(1000 * session_seconds), int(1000 * idle_seconds)
        self._open: OrderedDict[bytes, Session] = OrderedDict()
        self._file, self._kept_ms = file, 0

    def begin(self, caller: Caller, *, may_act: bool, mark: str | None = None) -> tuple[str, Session]:
        """Begin a session and give its cookie; too many of one owner end his oldest."""
        cookie = secrets.token_urlsafe(32)
        now_ms = self._clock.monotonic_ms()
        ends_unix_ms = self._clock.now_unix_ms() + self._session_ms
        idle_ms = self._idle_ms if may_act else None
        session = Session(caller, now_ms + self._session_ms, ends_unix_ms, now_ms, idle_ms, mark, _page_key(cookie))
        self._forget(session.owner)
        self._open[_name(cookie)] = session
        return cookie, session

    def find(self, cookie: str | None) -> Session | None:
        """Give the session of a cookie that is in force, or None."""
        if not cookie:
            return None
        session = self._open.get(_name(cookie))
        if session is None or not self.in_force(session):
            return None
        session.page_key = _page_key(cookie)
        return session

    def in_force(self, session: Session) -> bool:
        """Tell whether a session has time left, and was not left alone for too long."""
        now_ms = self._clock.monotonic_ms()
        return now_ms < session.ends_ms and (session.idle_ms is None or now_ms < session.used_ms + session.idle_ms)

    def used(self, session: Session) -> None:
        """Note that somebody is there."""
        session.used_ms = self._clock.monotonic_ms()

    def known(self, session: Session) -> bool:
        """Tell whether a session is open still: neither over nor ended by its owner."""
        return self.in_force(session) and any(each is session for each in self._open.values())

    def end(self, cookie: str | None) -> None:
        """End a session; one that is not there is no matter."""
        if cookie:
            self._open.pop(_name(cookie), None)

    def revoke(self, mark_of: MarkOf) -> bool:
        """End the sessions whose token is no longer the one they began by; tell whether there were any."""
        gone = [
            name
            for name, session in self._open.items()
            if (token := session.caller.token) is not None and session.mark != mark_of(token)
        ]
        for name in gone:
            del self._open[name]
        return bool(gone)

    # What outlives the node.

    def load(self, mark_of: MarkOf, may_act: Callable[[Caller], bool]) -> None:
        """Take up the sessions that were open when the node last ran, unless their time is over or their token changed.

        What is not taken up leaves the file as well: a row that comes back later must not bring them with it.
        """
        if self._file is None:
            return
        now_ms, now_unix_ms = self._clock.monotonic_ms(), self._clock.now_unix_ms()
        for row in self._file.read():
            caller = Caller(token=row["token"])
            # A clock that was set back in between gives nobody more than a new session would have.
            left_ms = min(row["ends_unix_ms"] - now_unix_ms, self._session_ms)
            used_ms = now_ms - max(0, now_unix_ms - row["used_unix_ms"])
            idle_ms = self._idle_ms if may_act(caller) else None
            session = Session(caller, now_ms + left_ms, now_unix_ms + left_ms, used_ms, idle_ms, row["mark"])
            self._open[bytes.fromhex(row["cookie"])] = session
        self.revoke(mark_of)
        self.keep()

    def keep(self) -> None:
        """Write which sessions are open."""
        self.keeping()()

    def keeping(self) -> Callable[[], None]:
        """Give what writes which sessions are open at this moment, for another thread; the newest of several counts."""
        now_ms, now_unix_ms = self._clock.monotonic_ms(), self._clock.now_unix_ms()
        self._kept_ms = now_ms
        rows = [
            {
                "cookie": name.hex(),
                "token": session.caller.token,
                "mark": session.mark,
                "ends_unix_ms": session.ends_unix_ms,
                "used_unix_ms": now_unix_ms - (now_ms - session.used_ms),
            }
            for name, session in self._open.items()
            if session.mark is not None and self.in_force(session)
        ]
        return self._file.writing(rows) if self._file is not None else lambda: None

    @property
    def is_stale(self) -> bool:
        """Whether somebody has used a session long enough after it was written that it should be written again."""
        return any(
            session.idle_ms is not None and session.used_ms > self._kept_ms + KEEP_EVERY_MS
            for session in self._open.values()
        )

    def _forget(self, owner: str) -> None:
        """Make room for one more."""
        for name in [name for name, session in self._open.items() if not self.in_force(session)]:
            del self._open[name]
        own = [name for name, session in self._open.items() if session.owner == owner]
        for name in own[: max(0, len(own) + 1 - SESSIONS_OF_ONE_MAX)]:
            del self._open[name]
        while len(self._open) >= SESSIONS_MAX:
            self._open.popitem(last=False)


class SessionFile:
    """The file of the sessions: the hash of each cookie, and nothing that would open a session to whoever reads it.

    It is no part of a backup. What cannot be written is removed, because an old file may know whom a new one would not.
    """

    def __init__(self, data_folder: Path) -> None:
        self._files, self._lock = DiskFiles(data_folder), threading.Lock()
        self._given = self._written = 0

    def read(self) -> list[dict[str, Any]]:
        """Give the rows of the file; none when there is no file, or none that can be read."""
        try:
            rows = orjson.loads(bytes(self._files.read(KEPT)))["sessions"]
            return [_checked(row) for row in rows[-SESSIONS_MAX:]]
        except FileNotFoundError:
            return []
        except OSError as error:
            failure = translated(error, f"reading {KEPT}")
        except (ValueError, TypeError, KeyError, AttributeError):
            failure = StorageFailed(f"{KEPT} is not as the node writes it")
        log.warning("sessions_not_kept", code=failure.code, reason=failure.message)
        return []

    def writing(self, rows: Sequence[dict[str, Any]]) -> Callable[[], None]:
        """Give what writes these rows, unless newer ones were written before."""
        self._given += 1
        number, data = self._given, orjson.dumps({"sessions": rows})

        def write() -> None:
            with self._lock:
                if number > self._written:
                    self._written = number
                    self._write(data)

        return write

    def _write(self, data: bytes) -> None:
        try:
            # Where the storage keeps the node's state nobody else makes its folder.
            self._files.make_folder(KEPT.partition("/")[0])
            write_whole(self._files, KEPT, data)
        except OSError as error:
            with suppress(OSError):
                self._files.remove(KEPT)
            failure = translated(error, f"writing {KEPT}")
            log.warning("sessions_not_kept", code=failure.code, reason=failure.message)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    kinds = {"cookie": str, "token": str, "mark": str, "ends_unix_ms": int, "used_unix_ms": int}
    if {name: type(value) for name, value in row.items()} != kinds or len(bytes.fromhex(row["cookie"])) != 32:
        raise ValueError("a row has other values")
    return row


def _name(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


def _page_key(cookie: str) -> str:
    """Give the word of a session's page: from the cookie to it there is a way, and none back."""
    return hashlib.sha256(b"page:" + cookie.encode()).hexdigest()


PAGE_KEY_HEADER = "x-bsfg-page-key"
VIEW = Request(Action.VIEW)
ACT = Request(Action.ACT)


class Door:
    """Decides who comes in."""

    def __init__(self, parts: NodeContext, tokens: Tokens, sessions: Sessions) -> None:
        self._parts, self._tokens, self._sessions = parts, tokens, sessions

    # Callers of operations.

    def caller(self, request: HttpRequest) -> Caller:
        """Give who asks for an operation: by the token in its header, else by certificate."""
        caller = caller_of(request)
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._tokens:
            return self._bearer(caller, shown, SignInRequired("the token is not known here"))
        if caller.names is None and request.url.scheme == "https":
            raise SignInRequired("neither a certificate nor a token was shown")
        return caller

    def sign_in(self, request: HttpRequest, token: str) -> str:
        """Begin the session of somebody who has shown a token, and give its cookie."""
        self.check_origin(request)
        caller = self._bearer(caller_of(request), token, IdentityUnknown("That is not a token of this zone."))
        self._parts.guard.check(caller, VIEW)
        self._sessions.end(self.cookie(request))
        mark = self._tokens.mark_of(caller.token or "")
        return self._sessions.begin(caller, may_act=self._parts.guard.allows(caller, ACT), mark=mark)[0]

    def _bearer(self, caller: Caller, token: str, error: BsfgError) -> Caller:
        name = self._tokens.name_of(token)
        if name is None:
            raise self._refused(caller, Rule.TOKEN, error)
        return Caller(caller.names, caller.address, name)

    # Sessions.

    def enter(self, request: HttpRequest) -> tuple[Session, str | None]:
        """Give the session of a browser that opens the page, or begin one for the holder of a certificate.

        The second value is the cookie of a session that was begun. Raises `SignInRequired` when a token is wanted.
        """
        session = self._sessions.find(self.cookie(request))
        if session is not None and self._same(session, caller_of(request)):
            self._parts.guard.check(session.caller, VIEW)
            self._sessions.used(session)
            return session, None
        caller = caller_of(request)
        if caller.names is None and request.url.scheme == "https":
            raise SignInRequired("sign in with a token, or use a client certificate")
        self._parts.guard.check(caller, VIEW)
        cookie, session = self._sessions.begin(caller, may_act=self._parts.guard.allows(caller, ACT))
        return session, cookie

    def session(self, request: HttpRequest) -> Session:
        """Give the session of a request of our page, or raise `SignInRequired`."""
        caller = caller_of(request)
        session = self._sessions.find(self.cookie(request))
        if session is None or not self._same(session, caller):
            raise SignInRequired("there is no session, or it has ended")
        # Whoever has lost the right to look since he came has lost it for everything.
        self._parts.guard.check(session.caller, VIEW)
        return session

    def acting(self, request: HttpRequest) -> Session:
        """Give the session of a request that changes something, which only our own page may make."""
        self.check_origin(request)
        session = self.session(request)
        shown = request.headers.get(PAGE_KEY_HEADER, "")
        if not hmac.compare_digest(shown.encode(), session.page_key.encode()):
            says = "the request does not repeat the key of its page"
            raise self._refused(session.caller, Rule.SESSION, PermissionRefused(says, hint="Load the page again."))
        self._sessions.used(session)
        return session

    def awake(self, request: HttpRequest) -> Session:
        """Give the session of a browser at which somebody has just moved a hand."""
        session = self.session(request)
        self._sessions.used(session)
        return session

    def may_watch(self, session: Session) -> bool:
        """Tell whether a session may still be given what happens."""
        return self._sessions.known(session) and self._parts.guard.allows(session.caller, VIEW)

    def may_act(self, session: Session) -> bool:
        """Tell whether a session belongs to an operator."""
        return self._parts.guard.allows(session.caller, ACT)

    def sign_out(self, request: HttpRequest) -> None:
        """End the session of a request."""
        self._sessions.end(self.cookie(request))

    def _same(self, session: Session, caller: Caller) -> bool:
        """Tell whether a session is used by whom it was begun for: a stolen cookie is worth nothing."""
        if session.caller.token is not None:
            return True
        begun_with, shown = session.caller.names, caller.names
        if begun_with is None or shown is None:
            return begun_with == shown
        return begun_with == shown and begun_with.certificate == shown.certificate

    # Cookies: browsers share them between the ports of a machine, so their names tell zones apart.

    def cookie(self, request: HttpRequest) -> str | None:
        """Give the value of the session's cookie."""
        return request.cookies.get(self._cookie_name(request))

    def set_cookie(self, request: HttpRequest, response: Response, value: str) -> None:
        """Have the browser keep a session: for our pages only, out of reach of scripts, gone when it is closed."""
        secure = request.url.scheme == "https"
        response.set_cookie(
            self._cookie_name(request), value, path="/", secure=secure, httponly=True, samesite="strict"
        )

    def forget_cookie(self, request: HttpRequest, response: Response) -> None:
        """Have the browser forget a session."""
        secure = request.url.scheme == "https"
        response.delete_cookie(self._cookie_name(request), path="/", secure=secure, httponly=True, samesite="strict")

    def _cookie_name(self, request: HttpRequest) -> str:
        prefix = "__Host-" if request.url.scheme == "https" else ""
        return f"{prefix}bsfg-{self._parts.settings.zone}"

    # Where a request comes from.

    def check_origin(self, request: HttpRequest) -> None:
        """Refuse what did not come from a page of this node."""
        origin = request.headers.get("origin", "")
        if not origin or origin.lower() != f"{request.url.scheme}://{request.headers.get('host', '')}".lower():
            says = f"the request comes from {origin[:200] or 'nowhere'}, not from a page of this node"
            hint = "Open the dashboard at the address that the node itself is called by."
            raise self._refused(caller_of(request), Rule.ORIGIN, PermissionRefused(says, hint=hint))

    def _refused(self, caller: Caller, rule: Rule, error: BsfgError) -> BsfgError:
        """Record a refusal and give its error."""
        guard = self._parts.guard
        guard.audit(Decision(guard.identity(caller), None, ACT, rule, error), caller)
        return error
