"""Sessions: what a browser is known by between two requests, and the word that only the node's own page knows.

A session ends after a time, when its owner signs out, when his token is changed, or when nobody has used it for a while
and it could have changed something. The cookie's value itself is kept nowhere, and the page's word follows from it.

Those of tokens outlive the node in a small file, so that a restart does not darken the displays on the walls. Whoever
has a certificate gets a new session by loading the page, and there is nothing to keep of him.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import structlog

from bsfg.disk import translated
from bsfg.errors import StorageFailed
from bsfg.ports import Clock
from bsfg.stores.log.atomic import write_whole
from bsfg.stores.log.files import SESSIONS as KEPT
from bsfg.stores.log.files import DiskFiles
from bsfg.wire.service import Caller

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
