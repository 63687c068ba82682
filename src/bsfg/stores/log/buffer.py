"""Store and forward buffers of the embedded log: the ports in front, one writer behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from bsfg.errors import BsfgError, DiskFull, OutcomeUnknown, StorageClosed
from bsfg.ports import BufferStats, Frame, GapRecord
from bsfg.retention import GapReason, Removal
from bsfg.stores.log.files import is_refusal, translated
from bsfg.stores.log.keysegments import Departure
from bsfg.stores.log.segments import SegmentFile
from bsfg.stores.log.writer import LogWriter
from bsfg.stores.shared.buffer import SharedBuffer, SharedForwardBuffer, SharedStoreBuffer, WriterStep
from bsfg.stores.shared.committer import Workers
from bsfg.stores.shared.judging import AppendItem


class Removing:
    """One removal that is under way; ``decide`` is asked in every turn, because consumers come and go between them."""

    def __init__(self, writer: LogWriter, decide: Callable[[], Removal]) -> None:
        self._writer, self._decide = writer, decide
        self._wanted: list[tuple[SegmentFile, SegmentFile]] = []
        self._ready: list[Departure] = []
        self._failed: tuple[SegmentFile, OSError] | None = None

    def turn(self) -> bool:
        """Let go what was gathered and may still go; tell whether there is more to gather. Runs as the writer."""
        ready, self._ready = self._ready, []
        failed, self._failed = self._failed, None
        try:
            # What can no longer be read because somebody else removed it needs no reading.
            if failed is not None and failed[0] in self._writer.segments:
                raise failed[1]
            removal = self._decide()
            self._writer.seal_for(removal)
            self._writer.depart(removal, ready)
        except BaseException:
            self._writer.forgo(ready)
            raise
        self._wanted = self._writer.next_to_leave(removal)
        return bool(self._wanted)

    def gather(self) -> None:
        """Read what the next turn needs; an error is kept for it."""
        for segment, following in self._wanted:
            try:
                self._ready.append(self._writer.gather(segment, following))
            except OSError as error:
                self._failed = segment, error
                return


Found = TypeVar("Found")


class LogBuffer(SharedBuffer[LogWriter]):
    """One log behind the ports; `LogStoreBuffer` and `LogForwardBuffer` add what differs."""

    def __init__(self, writer: LogWriter, required_frontier: Callable[[], int | None], workers: Workers) -> None:
        options = writer.options
        super().__init__(
            writer,
            required_frontier,
            workers,
            max_group_bytes=options.max_group_bytes,
            max_group_facts=options.max_group_facts,
        )
        self._gathering = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """What was found wrong when the log was opened, and since."""
        known = super().problems
        path, later = self._writer.notes.path, self._writer.notes.quarantine.problems
        return known + [text for text in (f"{path}: {each}" for each in later) if text not in known]

    async def _look(self, look: Callable[[], Found]) -> Found:
        """Read in another thread; when a segment is truncated meanwhile, look once more."""
        try:
            try:
                found = await asyncio.to_thread(look)
            except FileNotFoundError:
                found = await asyncio.to_thread(look)
        except OSError as error:
            raise translated(error, f"reading {self.stream}/{self.buffer}") from None
        await self._record_seen()
        return found

    # Writing.

    def _step(self, run: Callable[[], Any]) -> Any:
        """Let a step have the reserve when the disk is full: by such steps the buffer empties."""
        return self._attempt(lambda: self._writer.reserve.with_room(run))

    def _append_group(self, group: Sequence[AppendItem]) -> Any:
        outcome = self._attempt(lambda: self._writer.append_group(group, self._standing))
        while isinstance(outcome, DiskFull) and self._relieved():
            outcome = self._attempt(lambda: self._writer.append_group(group, self._standing))
        return outcome

    def _attempt(self, run: Callable[[], Any]) -> Any:
        """Run something as the writer and give its result or its error."""
        failure = self._writer.failure
        if failure is not None:
            return StorageClosed(f"{self.stream}/{self.buffer} closed itself: {failure.message}")
        try:
            return run()
        except OutcomeUnknown as error:  # whatever it was that failed to become durable, the log ends with it
            self._writer.failure = self._writer.failure or error
            return error
        except BsfgError as error:
            return error
        except OSError as error:
            failure = translated(error, f"writing {self.stream}/{self.buffer}")
            if is_refusal(failure):
                return failure
            self._writer.failure = failure
            return OutcomeUnknown(f"{failure.message}; the log is closed until it is opened again")
        except BaseException as error:  # the writer's state is in doubt: stop here
            self._writer.failure = StorageClosed(f"the writer stopped: {error!r}")
            return error

    def _relieved(self) -> bool:
        """Make room on a full disk by what is confirmed; tell whether something has left, so that a retry may fit."""
        self._writer.reserve.found_full()
        if self._step(lambda: self._writer.relieve(self._standing())) is not True:
            return False
        self._writer.reserve.restore(at_once=True)
        return True

    async def relieve(self) -> None:
        """Let one piece go that every required consumer has confirmed, because the disk is full."""
        await self._submit(WriterStep(lambda: self._writer.relieve(self._standing())))

    # Reading.

    async def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end``; see `bsfg.ports.Replayable`."""
        view = self._writer.view()
        stop = self._stop_of(start, end, max_facts, view.end)
        frames = view.frames(start, stop, max_facts)
        at = start
        while at < stop:
            try:
                frame = next(frames) if view.is_at_hand(at) else await asyncio.to_thread(next, frames)
            except FileNotFoundError:
                # The segment was truncated under us: look again from here.
                view = self._writer.view()
                frames = view.frames(at, stop, max_facts)
                continue
            except OSError as error:
                raise translated(error, f"reading {self.stream}/{self.buffer}") from None
            self._check_open()
            if frame.gap is not None and frame.gap.reason in (GapReason.DAMAGED, GapReason.LOST):
                await self._record_seen()
                await self._record_damage(frame.gap)
            yield frame
            at = frame.last + 1

    async def _record_damage(self, gap: GapRecord) -> None:
        await self._submit(WriterStep(lambda: self._writer.record_damage(gap)))

    async def _record_seen(self) -> None:
        """Record the damage that was come across; what cannot be recorded now is at the next look."""
        while self._writer.seen:
            gap = self._writer.seen[0]
            try:
                await self._record_damage(gap)
            except BsfgError:
                return
            with contextlib.suppress(ValueError):
                self._writer.seen.remove(gap)

    async def stats(self) -> BufferStats:
        """Describe the log at this moment."""
        self._check_open()
        await self._record_seen()
        return await super().stats()

    # Leaving.

    async def _remove(self, decide: Callable[[], Removal]) -> None:
        """Let go what a decision allows, a few segments at a time: whoever appends meanwhile waits for no more."""
        removing = Removing(self._writer, decide)
        while await self._submit(WriterStep(removing.turn)):
            await asyncio.to_thread(self._gather, removing)

    def _gather(self, removing: Removing) -> None:
        with self._gathering:
            if not self._closed:
                removing.gather()

    async def _end(self) -> None:
        await asyncio.to_thread(self._until_gathered)
        self._writer.close()

    def _until_gathered(self) -> None:
        with self._gathering:
            pass

    def _check_open(self) -> None:
        super()._check_open()
        if self._writer.failure is not None:
            raise StorageClosed(f"{self.stream}/{self.buffer} closed itself: {self._writer.failure.message}")


class LogStoreBuffer(LogBuffer, SharedStoreBuffer[LogWriter]):
    """The durable log of what this zone produced."""


class LogForwardBuffer(LogBuffer, SharedForwardBuffer[LogWriter]):
    """The durable, idempotent copy of what other zones sent."""
