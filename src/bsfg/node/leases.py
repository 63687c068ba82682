"""The leases of the links: one engine at a time moves a link, and the parts of one engine take turns.

A lease ends by itself unless it is renewed. Whoever shares the holder's name may wait for its turn, and the holder
learns that somebody waits; an urgent waiter comes first. Who else is about a link can be asked, so that the node's own
engine can stand back for a pipeline.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum

from bsfg.errors import InvalidArgument, LeaseHeld, LeaseLost
from bsfg.ports import Clock

TTL_MS_MIN, TTL_MS_MAX = 1_000, 300_000
SILENT_MS = 300
"""How long a lease lasts whose holder has hung up; time enough to call again, if it was only the line."""


ABOUT_MS = 3_000
"""How long somebody who asked for a lease, or had it, counts as being about it: longer than he waits to ask again."""


class Wanted(IntEnum):
    """Who else of the holder's own waits for the lease."""

    NOBODY = 0
    TURN = 1
    URGENT = 2


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was granted."""

    holder: str
    token: str
    ends_ms: int


@dataclass(slots=True)
class Leases:
    """The leases of all links of one node."""

    clock: Clock
    _held: dict[str, Lease] = field(default_factory=dict)
    _waiting: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    _news: dict[str, asyncio.Event] = field(default_factory=dict)
    _about: dict[str, dict[str, int]] = field(default_factory=dict)

    def acquire(self, link: str, holder: str, ttl_ms: int, *, urgent: bool = False) -> Lease:
        """Take the lease of a link for a while, or raise `LeaseHeld`."""
        check_ttl(ttl_ms)
        self._saw(link, holder)
        held = self.live(link)
        if held is not None:
            left_ms = held.ends_ms - self.clock.monotonic_ms()
            raise LeaseHeld(
                f"{held.holder} holds the lease of {link} for at most {left_ms} ms more",
                holder=held.holder,
                left_ms=left_ms,
            )
        if not urgent and self._waiting[link, holder, True]:
            raise LeaseHeld(f"{holder} is about to take the lease of {link}", holder=holder, left_ms=SILENT_MS)
        return self._grant(link, holder, secrets.token_hex(16), ttl_ms)

    async def turn(self, link: str, holder: str, ttl_ms: int, wait_seconds: float, *, urgent: bool = False) -> Lease:
        """Take the lease, waiting for it while it is another part of the same holder that has it."""
        deadline = asyncio.get_running_loop().time() + wait_seconds
        with self._waits(link, holder, urgent):
            while True:
                try:
                    return self.acquire(link, holder, ttl_ms, urgent=urgent)
                except LeaseHeld as held:
                    left_seconds = deadline - asyncio.get_running_loop().time()
                    if left_seconds <= 0 or held.details["holder"] != holder:
                        raise
                    await self._wait(link, min(left_seconds, held.details["left_ms"] / 1000 + 0.005))

    def renew(self, link: str, token: str, ttl_ms: int) -> Lease:
        """Keep a lease. After a restart of the node the first who asks with a token keeps his."""
        check_ttl(ttl_ms)
        held = self._held.get(link)
        if held is not None and held.token != token:
            raise LeaseLost(f"the lease of {link} is held by {held.holder}", holder=held.holder)
        return self._grant(link, held.holder if held else "unknown", token, ttl_ms)

    async def keep(self, link: str, token: str, ttl_ms: int, wait_seconds: float, seen: int) -> Lease:
        """Renew a lease, and wait a while for somebody to want it more urgently than its holder has ``seen``.

        When the holder hangs up meanwhile, which it also does by dying, the lease ends soon.
        """
        lease = self.renew(link, token, ttl_ms)
        deadline = asyncio.get_running_loop().time() + min(wait_seconds, ttl_ms / 2000)
        try:
            while self.wanted(link, token) <= seen:
                left_seconds = deadline - asyncio.get_running_loop().time()
                if left_seconds <= 0:
                    break
                await self._wait(link, left_seconds)
        except asyncio.CancelledError:
            if self._held.get(link) == lease:
                self._grant(link, lease.holder, token, SILENT_MS)
                self._tell(link)
            raise
        return lease

    def wanted(self, link: str, token: str) -> Wanted:
        """Tell who waits for a lease that is held with a token."""
        held = self._held.get(link)
        if held is None or held.token != token:
            return Wanted.NOBODY
        if self._waiting[link, held.holder, True]:
            return Wanted.URGENT
        return Wanted.TURN if self._waiting[link, held.holder, False] else Wanted.NOBODY

    def give_back(self, link: str, token: str) -> None:
        """End a lease."""
        held = self._held.get(link)
        if held is not None and held.token == token:
            self._saw(link, held.holder)
            del self._held[link]
            self._tell(link)

    def check(self, link: str, token: str | None) -> None:
        """Raise `LeaseLost` when somebody else holds the lease of a link."""
        held = self.live(link)
        if held is not None and held.token != token:
            raise LeaseLost(f"the lease of {link} is held by {held.holder}", holder=held.holder)

    def live(self, link: str) -> Lease | None:
        """Give the lease of a link, None when nobody holds it."""
        held = self._held.get(link)
        return held if held is not None and held.ends_ms > self.clock.monotonic_ms() else None

    def other(self, link: str, than: str) -> str | None:
        """Say who else asks for the lease of a link, has it, or had it a moment ago; None when nobody does."""
        held, since_ms = self.live(link), self.clock.monotonic_ms() - ABOUT_MS
        if held is not None and held.holder != than:
            return held.holder
        about = self._about.get(link, {})
        return next((holder for holder, at_ms in about.items() if holder != than and at_ms > since_ms), None)

    def _saw(self, link: str, holder: str) -> None:
        now_ms = self.clock.monotonic_ms()
        fresh = {name: at_ms for name, at_ms in self._about.get(link, {}).items() if at_ms > now_ms - ABOUT_MS}
        self._about[link] = fresh | {holder: now_ms}

    def _grant(self, link: str, holder: str, token: str, ttl_ms: int) -> Lease:
        lease = self._held[link] = Lease(holder, token, self.clock.monotonic_ms() + ttl_ms)
        return lease

    @contextmanager
    def _waits(self, link: str, holder: str, urgent: bool) -> Iterator[None]:
        self._waiting[link, holder, urgent] += 1
        self._tell(link)
        try:
            yield
        finally:
            self._waiting[link, holder, urgent] -= 1
            if not self._waiting[link, holder, urgent]:
                del self._waiting[link, holder, urgent]
            self._tell(link)

    def _tell(self, link: str) -> None:
        """Wake everybody who waits for news of a link."""
        news = self._news.pop(link, None)
        if news is not None:
            news.set()

    async def _wait(self, link: str, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.setdefault(link, asyncio.Event()).wait(), seconds)


def check_ttl(ttl_ms: int) -> None:
    """Raise `InvalidArgument` unless a lease may last so long."""
    if not TTL_MS_MIN <= ttl_ms <= TTL_MS_MAX:
        raise InvalidArgument(f"a lease lasts {TTL_MS_MIN} to {TTL_MS_MAX} ms, not {ttl_ms}")
