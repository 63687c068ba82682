"""The audit trail of a running node: whoever has something to record gives it here, and a thread writes it.

Nothing here ever delays or fails a request. An operator's act is answered when its record is durable; what strangers
are refused is written once a second, and what repeats once a minute with how often. Where the trail cannot be written
the node goes on: `failure` says why, an alert is made of it, and what waits is written when that is possible again.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from bsfg.clock import SystemClock
from bsfg.errors import BsfgError
from bsfg.node.authorize import Decision, Rule
from bsfg.ports import Clock
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.trailfile import TrailWriter, newest_first, oldest_first, tell, trail_failure
from bsfg.trail import FAILED, NODE, REFUSED, STRANGER, USER, TrailEvent, TrailQuery, TrailRecord

if TYPE_CHECKING:
    # The command line leaves word in the trail where nothing but the core is installed.
    from bsfg.wire.service import Caller

LINGER_SECONDS = 1.0
"""How long an event that nobody waits for may stay in memory."""

ANSWER_SECONDS = 10.0
"""How long an operator's act waits for its record when the disk does not answer."""

QUIET_MS = 60_000
"""After an event was recorded, others of its kind are only counted for so long."""

KINDS_MAX = 256
"""So many kinds are counted apart; a caller may choose his own name, but not fill the trail with it."""

ADDRESSES_MAX = 8
WAITING_MAX = 10_000
TOGETHER_MAX = 100
TRIM_MS = 3_600_000
SIGN_INS_MAX = 20
"""So many sign-ins of one identity are recorded one by one in a minute, and the others counted."""

Kind = tuple[str, str, str]
"""What counts as the same: action, identity and rule."""


@dataclass(slots=True)
class _Counted:
    """Events of one kind: since when they are counted, how many were recorded, and what was said of the others."""

    since_ms: int
    recorded: int = 0
    count: int = 0
    last: TrailEvent | None = None
    addresses: set[str] = field(default_factory=set)


class Counting:
    """Lets the first events of a kind through, and makes one of the others that come within a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[Kind, _Counted] = {}

    def take(self, event: TrailEvent, at_most: int) -> TrailEvent | None:
        """Give an event that is to be recorded now, None when it is only counted."""
        kind = (event.action, event.identity, event.rule)
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            kind = (event.action, STRANGER, "")
        now_ms = self._clock.monotonic_ms()
        counted = self._kinds.setdefault(kind, _Counted(now_ms))
        if counted.recorded < at_most:
            counted.recorded += 1
            return event
        counted.count, counted.last = counted.count + 1, event
        if len(counted.addresses) < ADDRESSES_MAX:
            counted.addresses.add(event.address.rpartition(":")[0])
        return None

    def due(self, *, everything: bool = False) -> list[TrailEvent]:
        """Give what has been counted for long enough, and forget kinds that came no more."""
        now_ms, found = self._clock.monotonic_ms(), []
        for kind, counted in list(self._kinds.items()):
            if now_ms - counted.since_ms < QUIET_MS and not everything:
                continue
            if counted.last is None:
                del self._kinds[kind]
                continue
            more = {"count": counted.count, "addresses": sorted(filter(None, counted.addresses))}
            found.append(replace(counted.last, details={**counted.last.details, **more}))
            # The kind goes on: its next event is counted again, not recorded at once.
            self._kinds[kind] = _Counted(now_ms, recorded=counted.recorded)
        return found


@dataclass(slots=True)
class _Waiting:
    event: TrailEvent
    written: Future[None] | None = None

    def answer(self) -> None:
        if self.written is not None and not self.written.done():
            self.written.set_result(None)


class AuditTrail:
    """Takes events from anywhere and has them written in order; one without a writer forgets them."""

    def __init__(
        self,
        writer: TrailWriter | None = None,
        clock: Clock | None = None,
        expiry_clock: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._writer, self._clock, self._expiry_clock = writer, clock or SystemClock(), expiry_clock
        self._counting = Counting(self._clock)
        self._wake = threading.Condition()
        self._queue: list[_Waiting] = []
        self._unwritten: list[_Waiting] = []
        self._last: list[_Waiting] = []
        self._closing = self._urgent = False
        self._lost = self._again = 0
        self._trimmed_ms: int | None = None
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why the trail cannot be written at present."""
        self.trimmed_early = 0
        """How often old files had to leave before their time because the trail was too large."""

    # Life.

    def start(self) -> list[str]:
        """Open the trail and begin to write; give what was wrong with it. A trail that cannot be opened comes later."""
        if self._writer is None:
            return []
        try:
            self._writer.open(urgent=True)
        except Exception as error:
            self.failure = trail_failure(error)
        problems = [f"audit: {text}" for text in self._writer.problems]
        if problems:
            self.record(TrailEvent("trail_damaged", NODE, about="audit", outcome=FAILED, reason="; ".join(problems)))
        self._thread = threading.Thread(target=self._run, name="bsfg-audit-trail", daemon=True)
        self._thread.start()
        return problems

    async def close(self, last: TrailEvent | None = None) -> None:
        """Write what waits, counts included, then one more if there is one, and release the trail."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._last = [] if last is None else [_Waiting(last.at(self._clock.now_unix_ms()))]
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(thread.join, ANSWER_SECONDS)

    # What is read.

    def newest(self, query: TrailQuery | None = None) -> Iterator[TrailRecord]:
        """Give the records that are durable and asked for, the last first."""
        return iter(()) if self._writer is None else newest_first(self._writer.files, query or TrailQuery())

    def oldest(self, after: int) -> Iterator[TrailRecord]:
        """Give the records behind a number."""
        return iter(()) if self._writer is None else oldest_first(self._writer.files, TrailQuery(), after)

    # What is recorded.

    def record(self, event: TrailEvent) -> None:
        """Take an event; it is durable soon. Never blocks and never raises."""
        self._take(_Waiting(event.at(self._clock.now_unix_ms())))

    def counted(self, event: TrailEvent, at_most: int = 1) -> None:
        """Take an event of which there may be many: beyond some in a minute they are counted."""
        if self._writer is None:
            return
        with self._wake:
            now = self._counting.take(event.at(self._clock.now_unix_ms()), at_most)
        if now is not None:
            self._take(_Waiting(now))

    async def recorded(self, event: TrailEvent) -> None:
        """Take an event and return when it is durable, or when it is clear that it cannot be now."""
        if self._writer is None or self._thread is None:
            return
        waiting = _Waiting(event.at(self._clock.now_unix_ms()), Future())
        self._take(waiting)
        assert waiting.written is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(waiting.written)), ANSWER_SECONDS)

    def refused(self, decision: Decision, caller: Caller, *, known: bool) -> None:
        """Take a refusal; all who are in no table are counted as one."""
        request = decision.request
        named = [f"{what} {name}" for what in ("consumer", "link") if (name := getattr(request, what))]
        about = " ".join([str(request.action), *([request.stream] if request.stream else []), *named])
        error = decision.error
        event = TrailEvent(
            "sign_in_refused" if decision.rule == Rule.TOKEN else "request_refused",
            decision.identity if known else STRANGER,
            _plain(caller.address),
            about,
            REFUSED,
            str(decision.rule),
            error.message if error is not None else "",
            {**({} if known else {"name": decision.identity[:200]}), "code": error.code if error else ""},
        )
        self.counted(event)

    def signed(self, action: str, identity: str, address: str, how: str) -> None:
        """Take note of somebody who came to the dashboard or left it."""
        self.counted(TrailEvent(action, identity, _plain(address), "dashboard", details={"by": how}), SIGN_INS_MAX)

    @asynccontextmanager
    async def act(
        self, identity: str, caller: Caller, action: str, about: str, reason: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Record what an operator does around the doing of it, with how it ended; details may be added meanwhile.

        What is done is durable in the trail before the operator has his answer. What fails is recorded as well, and
        counted when it fails again and again.
        """
        details: dict[str, Any] = {}
        event = TrailEvent(action, identity, _plain(caller.address), about, reason=reason, details=details)
        try:
            yield details
        except BaseException as error:
            code = error.code if isinstance(error, BsfgError) else type(error).__name__
            self.counted(replace(event, outcome=FAILED, rule=code), SIGN_INS_MAX)
            raise
        await self.recorded(event)

    # The thread.

    def _take(self, waiting: _Waiting) -> None:
        if self._writer is None:
            return
        with self._wake:
            if len(self._queue) + len(self._unwritten) >= WAITING_MAX:
                self._lost += 1
                waiting.answer()
                return
            self._queue.append(waiting)
            if waiting.written is not None:
                self._urgent = True
                self._wake.notify()

    def _run(self) -> None:
        assert self._writer is not None
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._urgent or self._closing, LINGER_SECONDS)
                closing, self._urgent = self._closing, False
                due = [_Waiting(event) for event in self._counting.due(everything=closing)]
                self._unwritten += [*self._queue, *due, *self._last]
                self._queue = []
            self._write()
            if closing:
                self._writer.close()
                return

    def _write(self) -> None:
        """Write what waits; whatever goes wrong, whoever waits goes on, and it is tried again later."""
        assert self._writer is not None
        try:
            while self._unwritten:
                # What may have been written already is given again just as it was.
                part = self._unwritten[: self._again or TOGETHER_MAX]
                self._again = len(part)
                urgent = any(each.written is not None for each in part)
                self._writer.append([each.event for each in part], urgent=urgent)
                del self._unwritten[: len(part)]
                self._again = 0
                for each in part:
                    each.answer()
            self._tell_lost()
            self._writer.take_in(self._clock.now_unix_ms())
            self._trim()
        except Exception as error:
            self.failure = trail_failure(error)
            for each in self._unwritten:
                each.answer()
            return
        self.failure = None

    def _tell_lost(self) -> None:
        assert self._writer is not None
        with self._wake:
            lost, self._lost = self._lost, 0
        if lost:
            reason = "the trail could not be written for too long"
            event = TrailEvent("events_lost", NODE, about="audit", outcome=FAILED, reason=reason)
            self._writer.append([replace(event, details={"count": lost}).at(self._clock.now_unix_ms())])

    def _trim(self) -> None:
        assert self._writer is not None
        now_ms = self._clock.monotonic_ms()
        if self._trimmed_ms is None or now_ms - self._trimmed_ms >= TRIM_MS:
            self._trimmed_ms = now_ms
            self._writer.trim(self._expiry_clock())
        elif self._writer.is_too_large and self._writer.trim(None):
            self.trimmed_early += 1


def _plain(address: str) -> str:
    """Write an address as people do; gRPC names its family first and escapes brackets."""
    family, _, rest = str(address).partition(":")
    return unquote(rest) if family in ("ipv4", "ipv6") else str(address)


def told_by_user(data: Path, action: str, about: str, details: Mapping[str, Any], now_unix_ms: int) -> None:
    """Leave word in a data folder of what somebody has done to it at the command line; its node takes it in."""
    tell(DiskFiles(data), TrailEvent(action, _user(), about=about, details=details, at_unix_ms=now_unix_ms))


def _user() -> str:
    """Name the user of the system who runs this process, and who he was before he became another."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    before = os.environ.get("SUDO_USER", "")
    return f"{USER}{name}" + (f" ({before})" if before and before != name else "")
