"""Sessions: what a browser is known by between two requests, and the word that only the node's own page knows.

A session lives in memory and ends with the node, after a time, when its owner signs out, or when nobody has used it for
a while and it could have changed something. The cookie's value itself is kept nowhere.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from bsfg.ports import Clock
from bsfg.wire.service import Caller

SESSIONS_MAX = 1_000
SESSIONS_OF_ONE_MAX = 50


@dataclass(slots=True)
class Session:
    """One browser: who uses it, until when, and what its requests must repeat to show that our page made them.

    ``idle_ms`` is how long it may be left alone, None for one that only looks: a display on a wall is never touched.
    """

    caller: Caller
    page_key: str
    ends_ms: int
    ends_unix_ms: int
    used_ms: int
    idle_ms: int | None = None

    @property
    def owner(self) -> str:
        """Who it belongs to, whatever he called from."""
        return str(self.caller)


class Sessions:
    """All sessions of one node, each found by its cookie."""

    def __init__(self, clock: Clock, session_seconds: float, idle_seconds: float) -> None:
        self._clock, self._session_ms, self._idle_ms = clock, int(1000 * session_seconds), int(1000 * idle_seconds)
        self._open: OrderedDict[bytes, Session] = OrderedDict()

    def begin(self, caller: Caller, *, may_act: bool) -> tuple[str, Session]:
        """Begin a session and give its cookie; too many of one owner end his oldest."""
        cookie = secrets.token_urlsafe(32)
        now_ms = self._clock.monotonic_ms()
        ends_unix_ms = self._clock.now_unix_ms() + self._session_ms
        idle_ms = self._idle_ms if may_act else None
        session = Session(caller, secrets.token_urlsafe(32), now_ms + self._session_ms, ends_unix_ms, now_ms, idle_ms)
        self._forget(session.owner)
        self._open[_name(cookie)] = session
        return cookie, session

    def find(self, cookie: str | None) -> Session | None:
        """Give the session of a cookie that is in force, or None."""
        if not cookie:
            return None
        session = self._open.get(_name(cookie))
        return session if session is not None and self.in_force(session) else None

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

    def _forget(self, owner: str) -> None:
        """Make room for one more."""
        for name in [name for name, session in self._open.items() if not self.in_force(session)]:
            del self._open[name]
        own = [name for name, session in self._open.items() if session.owner == owner]
        for name in own[: max(0, len(own) + 1 - SESSIONS_OF_ONE_MAX)]:
            del self._open[name]
        while len(self._open) >= SESSIONS_MAX:
            self._open.popitem(last=False)


def _name(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()
