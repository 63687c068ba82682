"""Where a consumer's entries come from: its node, asked again and again, or an inbox on its own disk."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bsfg.errors import BsfgError, DigestMismatch
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.offload import by_size
from bsfg.ports import Confirmation, Frame
from bsfg.sdk.sender import NodeLink
from bsfg.sealing import digest_mismatches

BACKOFF_FIRST_SECONDS = 0.1
BACKOFF_MAX_SECONDS = 5.0


class Feed(Protocol):
    """What a consumer reads from and confirms to."""

    async def open(self) -> None:
        """Begin."""
        ...

    async def take(self, request: FetchRequest) -> Fetched:
        """Give what follows the first unconfirmed entry, waiting as the request says; there may be no frames.

        A feed may give again, or leave out, what it gave since it was last rewound.
        """
        ...

    def rewind(self) -> None:
        """Give everything again that is not confirmed."""
        ...

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Record what the consumer has finished."""
        ...

    async def close(self) -> None:
        """End."""
        ...


@dataclass(slots=True)
class Patience:
    """Waits between attempts, longer each time; gives up at the deadline, if there is one."""

    deadline_seconds: float | None = None
    failures: int = 0
    since: float = 0.0

    def succeeded(self) -> None:
        """Begin anew."""
        self.failures = 0

    async def after(self, error: BsfgError) -> None:
        """Wait after a failure that may pass, or raise it when it cannot or there is no time left."""
        now = time.monotonic()
        if not self.failures:
            self.since = now
        if not error.retryable or (self.deadline_seconds is not None and now - self.since >= self.deadline_seconds):
            raise error
        pause_seconds = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** min(self.failures, 30))
        self.failures += 1
        await asyncio.sleep(pause_seconds * random.uniform(0.5, 1.0))


class NodeFeed:
    """The node itself: every fetch starts after what the node counts as confirmed."""

    def __init__(
        self,
        link: NodeLink,
        consumer: str,
        *,
        carry_only: Sequence[str] = (),
        deadline_seconds: float | None = None,
        on_problem: Callable[[BsfgError], None] = lambda error: None,
    ) -> None:
        self._link, self._consumer, self._carry_only = link, consumer, carry_only
        self._deadline_seconds, self._on_problem = deadline_seconds, on_problem

    async def open(self) -> None:
        """Begin; nothing is asked yet."""

    def rewind(self) -> None:
        """Nothing is needed: the node always begins at the first unconfirmed entry."""

    async def take(self, request: FetchRequest) -> Fetched:
        """Fetch once, trying for as long as the consumer has patience; every digest is checked."""
        patience, suspect = Patience(self._deadline_seconds), False
        while True:
            try:
                fetched = await self._link.client.fetch(self._consumer, request, self._carry_only)
                fetched = replace(fetched, frames=[await _checked(frame) for frame in fetched.frames])
            except DigestMismatch:
                # Damage on the way passes; damage at the node does not.
                if suspect:
                    raise
                suspect = True
            except BsfgError as error:
                self._on_problem(error)
                await patience.after(error)
            else:
                return fetched

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Confirm at the node, trying for as long as the consumer has patience."""
        patience = Patience(self._deadline_seconds)
        while True:
            try:
                await self._link.client.confirm(self._consumer, confirmation, refusals)
            except BsfgError as error:
                self._on_problem(error)
                await patience.after(error)
            else:
                return

    async def close(self) -> None:
        """End the connection."""
        await self._link.close()


async def _checked(frame: Frame) -> Frame:
    """Give a frame if every entry has its digest, or raise `DigestMismatch`."""
    entries = frame.entries
    if entries is None or not len(entries):
        return frame
    wrong = await by_size(entries.weight_bytes, digest_mismatches, entries)
    if len(wrong):
        offsets = entries.offsets[wrong][:10].tolist()
        raise DigestMismatch(f"the entries at offsets {offsets} do not have the digests they claim", offsets=offsets)
    return frame
