"""What leaves a buffer while somebody reads it is no damage, however late the writer is told that it has left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from bsfg.clock import SystemClock
from bsfg.digest import Sha256
from bsfg.errors import OutcomeUnknown
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Frame
from bsfg.retention import GapReason
from bsfg.stores.memory import Medium, MemoryFrames, MemoryZone
from bsfg.stores.shared.keeper import Change, FrameRow, NewBuffer
from bsfg.stores.shared.storage import FramedStorage
from bsfg.testing.facts import batch

SECONDS = 60


class SlowFrames(MemoryFrames):
    """A buffer whose departures are there for everybody before the writer has its answer, as at a server."""

    unknown = False

    def begin(self) -> None:
        """Wait with the answer to the next departure."""
        self.made, self.looked, self.answered = threading.Event(), threading.Event(), threading.Event()

    def commit(self, change: Change) -> bool:
        """Make a change; what left has left before this ends."""
        done = super().commit(change)
        if change.departed is not None:
            self.made.set()
            self.answered.wait(SECONDS)
            if self.unknown:
                raise OutcomeUnknown("the answer was lost")
        return done

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Give frames, and tell that somebody has looked at what was left of them."""
        found = super().frames(at, until, most)
        if self.made.is_set():
            self.looked.set()
        return found


class SlowZone(MemoryZone):
    """Gives such buffers."""

    def buffer(self, stream: str, kind: Buffer, new: NewBuffer) -> SlowFrames:
        """Give one buffer."""
        super().buffer(stream, kind, new)
        self.given = SlowFrames(self, self.medium.buffers[stream, kind], f"{stream}/{kind}")
        self.given.begin()
        return self.given


def _seen(frames: Sequence[Frame]) -> list[tuple[int, int, GapReason | None]]:
    return [(frame.first, frame.last, frame.gap.reason if frame.gap else None) for frame in frames]


@pytest.mark.parametrize("unknown", [False, True], ids=["answered", "in doubt"])
@pytest.mark.parametrize("before", [4, 6], ids=["some leave", "all leave"])
def test_what_has_just_left_is_not_lost(before: int, unknown: bool) -> None:
    """A reader that finds entries gone waits for the writer's turn, and is told that they were truncated."""

    async def run() -> None:
        zone = SlowZone(Medium())
        storage = await FramedStorage(zone, SystemClock(), Sha256()).begin("plant")
        store = await storage.store("operational")
        for first in range(0, 6, 2):
            await store.append(batch(2, first=first))
        await storage.cursors.create(ConsumerSpec("reader", "operational", required=True))
        await storage.cursors.commit("reader", Confirmation(through=5))
        keeper = zone.given
        keeper.unknown = unknown

        async def read() -> list[Frame]:
            return [frame async for frame in store.replay(0)]

        leaving = asyncio.ensure_future(store.truncate_before(before))
        assert await asyncio.to_thread(keeper.made.wait, SECONDS)
        reading = asyncio.ensure_future(read())
        assert await asyncio.to_thread(keeper.looked.wait, SECONDS)
        keeper.answered.set()
        [left] = await asyncio.gather(leaving, return_exceptions=True)
        assert isinstance(left, OutcomeUnknown) == unknown
        kept = [(before, 5, None)] if before < 6 else []
        assert _seen(await reading) == [(0, before - 1, GapReason.TRUNCATED), *kept]
        assert not await store.gaps() and not store.problems
        await storage.close()

    asyncio.run(run())
