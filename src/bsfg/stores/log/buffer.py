"""Store and forward buffers of the embedded log: the ports in front, one writer behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.digest import LogHistory
from bsfg.errors import (
    BsfgError,
    BufferFull,
    DiskFull,
    InvalidArgument,
    OffsetOutOfRange,
    OutcomeUnknown,
    StorageClosed,
    StorageFailed,
)
from bsfg.fact import Entry, Key
from bsfg.gaps import RELAYED_RANGES_MAX, check_gaps
from bsfg.ports import (
    QUARANTINE_PAGE,
    Buffer,
    BufferStats,
    Frame,
    Gap,
    GapRecord,
    GapSet,
    OriginSpan,
    Quarantined,
    Receipt,
)
from bsfg.retention import Age, ConsumerStanding, GapReason, Removal, ordered_before, removable_before
from bsfg.stores.log.files import is_refusal, translated
from bsfg.stores.log.keysegments import Departure
from bsfg.stores.log.segments import SegmentFile
from bsfg.stores.log.view import history_of, read_latest, restores_of
from bsfg.stores.log.writer import LogWriter
from bsfg.stores.shared.committer import Committer, Waiters, Workers, settle
from bsfg.stores.shared.frame import Damaged
from bsfg.stores.shared.judging import AppendItem


def find_key(writer: LogWriter, key: Key) -> Entry | None:
    """Give the entry of a key while its bytes are retained."""
    hashes = writer.hash_of(pa.array([key.from_zone], pa.string()), pa.array([key.message_id], pa.string()))
    _, offsets = writer.index.keys.candidates(hashes)
    view = writer.view()
    for offset in np.unique(offsets).tolist():
        rows = view.rows_at(offset)
        if rows is not None:
            entry = rows.to_entries()[0]
            if entry.key == key:
                return entry
    return None


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


@dataclass(frozen=True, slots=True)
class WriterStep:
    """Something other than an append that the writer does in its turn."""

    run: Callable[[], Any]


class LogBuffer:
    """One log behind the ports; `LogStoreBuffer` and `LogForwardBuffer` add what differs."""

    def __init__(self, writer: LogWriter, required_frontier: Callable[[], int | None], workers: Workers) -> None:
        self._writer = writer
        self._required_frontier = required_frontier
        self.stream, self.buffer = writer.stream, writer.buffer
        self.log_id = writer.log_id.hex()
        self._waiters = Waiters()
        self._closed = False
        self._gathering = threading.Lock()
        self._oldest: tuple[int, int | None] | None = None
        self._committer: Committer[AppendItem | WriterStep, Any] = Committer(
            workers,
            self._process,
            weight=self._weight,
            max_weight=writer.options.max_group_bytes,
            others=lambda: self._waiters.ready(writer.end),
        )

    # Positions.

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""
        return self._writer.start

    @property
    def end(self) -> int:
        """The offset that the next entry will get."""
        return self._writer.end

    @property
    def problems(self) -> list[str]:
        """What was found wrong when the log was opened, and since."""
        known = list(self._writer.problems)
        path, later = self._writer.notes.path, self._writer.notes.quarantine.problems
        return known + [text for text in (f"{path}: {each}" for each in later) if text not in known]

    async def offset_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""
        return await self._look(lambda: self._writer.view().first_at_time(unix_ms))

    async def key_at(self, offset: int) -> Key | None:
        """Give the key of the entry at an offset, or None when it is not retained."""
        rows = await self._look(lambda: self._writer.view().rows_at(offset))
        return rows.to_entries()[0].key if rows is not None else None

    async def get(self, key: Key) -> Entry | None:
        """Give the entry of a key."""
        self._check_open()
        return await self._look(lambda: find_key(self._writer, key))

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

    def _weight(self, item: AppendItem | WriterStep) -> int:
        """Count an item in bytes, a fact for no fewer than its part of the largest number in one group."""
        if isinstance(item, WriterStep):
            return 1
        options = self._writer.options
        return max(len(item.batch) * options.max_group_bytes // options.max_group_facts, item.batch.weight_bytes)

    def _submit(self, item: AppendItem | WriterStep) -> asyncio.Future[Any]:
        if self._closed:
            raise StorageClosed(f"{self.stream}/{self.buffer} is closed")
        return self._committer.submit(item)

    def _append(self, batch: FactBatch, origin: OriginSpan | None = None) -> asyncio.Future[Receipt]:
        if not batch.sealed:
            raise InvalidArgument("a buffer takes sealed batches only; see bsfg.sealing.seal")
        return self._submit(AppendItem(batch.facts if isinstance(batch, EntryBatch) else batch, origin))

    def _process(self, items: Sequence[AppendItem | WriterStep]) -> list[Any]:
        outcomes: list[Any] = []
        group: list[AppendItem] = []
        for item in items:
            if isinstance(item, AppendItem):
                group.append(item)
                continue
            outcomes += self._append_all(group)
            group = []
            outcomes.append(self._attempt(self._with_room(item.run)))
        outcomes += self._append_all(group)
        return outcomes

    def _append_all(self, group: list[AppendItem]) -> list[Any]:
        if not group:
            return []
        outcome = self._attempt(lambda: self._writer.append_group(group, self._standing))
        while isinstance(outcome, DiskFull) and self._relieved():
            outcome = self._attempt(lambda: self._writer.append_group(group, self._standing))
        if isinstance(outcome, BufferFull) and len(group) > 1:
            # Together they do not fit; alone some of them may.
            return [self._append_all([item])[0] for item in group]
        return list(outcome) if isinstance(outcome, list) else [outcome] * len(group)

    def _attempt(self, run: Callable[[], Any]) -> Any:
        """Run a step of the writer and give its result or its error."""
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

    def _with_room(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Let a step have the reserve when the disk is full: by such steps the buffer empties."""
        return lambda: self._writer.reserve.with_room(run)

    def _relieved(self) -> bool:
        """Make room on a full disk by what is confirmed; tell whether something has left, so that a retry may fit."""
        self._writer.reserve.found_full()
        if self._attempt(self._with_room(lambda: self._writer.relieve(self._standing()))) is not True:
            return False
        self._writer.reserve.restore(at_once=True)
        return True

    async def relieve(self) -> None:
        """Let one piece go that every required consumer has confirmed, because the disk is full."""
        await self._submit(WriterStep(lambda: self._writer.relieve(self._standing())))

    def _standing(self) -> ConsumerStanding:
        of = ConsumerStanding.of_store if self.buffer == Buffer.STORE else ConsumerStanding.of_forward
        return of(self._required_frontier())

    # Reading.

    async def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Give everything from ``start`` up to ``end``; see `bsfg.ports.Replayable`."""
        self._check_open()
        if start < 0 or max_facts < 1 or (end is not None and end < start):
            raise InvalidArgument(f"cannot replay from {start} to {end} in steps of {max_facts}")
        view = self._writer.view()
        if start > view.end:
            raise OffsetOutOfRange(f"offset {start} is beyond the end {view.end}", end=view.end)
        stop = view.end if end is None else min(end, view.end)
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

    async def wait_for(self, offset: int, timeout_seconds: float) -> bool:
        """Wait until the entry at ``offset`` is durable."""
        self._check_open()
        if self.end > offset:
            return True
        future = self._waiters.add(offset)
        # The future itself becomes false in time: one timer, where waiting with a timeout takes a task's detour.
        timer = asyncio.get_running_loop().call_later(timeout_seconds, settle, future, False)
        try:
            # What became durable between the two looks has woken nobody.
            if self.end <= offset and not await future:
                self._check_open()
                return False
            return True
        finally:
            timer.cancel()
            self._waiters.drop(future)

    # Leaving.

    async def truncate_before(self, offset: int) -> None:
        """Remove every entry below ``offset`` once the required consumers have confirmed them."""
        if offset < 0:
            raise InvalidArgument(f"offset {offset} is negative")
        await self._remove_in_steps(lambda: self._ordered(offset))

    def _ordered(self, offset: int) -> Removal:
        writer = self._writer
        return ordered_before(offset, writer.policy, self._standing(), start=writer.start, end=writer.end)

    async def enforce_retention(self, *, link_open: bool, keys_as_of_unix_ms: int | None = None) -> None:
        """Remove what age allows and record what expired unconfirmed."""
        await self._remove_in_steps(lambda: self._aged(link_open))
        while await self._submit(WriterStep(lambda: self._forget_keys(keys_as_of_unix_ms))):
            pass

    def _aged(self, link_open: bool) -> Removal:
        # One judge of the clock for the times of entries and for their age: two could differ about the same jump.
        writer, steady = self._writer, self._writer.steady
        trusted, now = steady.trusted, steady.now_unix_ms()
        writer.seal_old(now)
        age = Age(now, link_open=link_open, clock_trusted=trusted)
        return removable_before(writer.pieces(), writer.policy, self._standing(), age)

    def _forget_keys(self, as_of_unix_ms: int | None) -> bool:
        steady = self._writer.steady
        if not steady.trusted:
            return False
        now = steady.now_unix_ms()
        return self._writer.forget_keys(now if as_of_unix_ms is None else min(now, as_of_unix_ms))

    async def _remove_in_steps(self, decide: Callable[[], Removal]) -> None:
        """Let go what a decision allows, a few segments at a time: whoever appends meanwhile waits for no more."""
        removing = Removing(self._writer, decide)
        while await self._submit(WriterStep(removing.turn)):
            await asyncio.to_thread(self._gather, removing)

    def _gather(self, removing: Removing) -> None:
        with self._gathering:
            if not self._closed:
                removing.gather()

    # Records.

    async def gaps(self) -> list[GapRecord]:
        """List all gap records."""
        self._check_open()
        return self._writer.notes.gaps

    async def gap_sets(self) -> list[GapSet]:
        """Give all gap records as sets."""
        self._check_open()
        return self._writer.notes.book.sets()

    async def gaps_told(self, after: str = "", max_ranges: int = RELAYED_RANGES_MAX) -> tuple[list[GapSet], str]:
        """Give what other zones told after a token."""
        self._check_open()
        return self._writer.notes.book.told_since(after, max_ranges)

    async def record_gap(self, gap: GapRecord) -> None:
        """Make a gap record durable."""
        await self.record_gaps([gap])

    async def record_gaps(self, gaps: Sequence[Gap]) -> None:
        """Make gap records durable with one sync."""
        check_gaps(gaps, self.end)
        if gaps:
            await self._submit(WriterStep(lambda: self._writer.notes.add_gaps(list(gaps))))

    async def quarantine(
        self, after: int | None = None, limit: int = QUARANTINE_PAGE, *, newest_first: bool = False
    ) -> list[Quarantined]:
        """List what was refused for good."""
        self._check_open()
        return await self._look(lambda: self._writer.notes.quarantine.page(after, limit, newest_first))

    async def quarantined(self, id: int) -> Quarantined | None:
        """Give one refused fact."""
        self._check_open()
        return await self._look(lambda: self._writer.notes.quarantine.get(id))

    async def set_aside(
        self, facts: FactBatch, reason: str, detail: str = "", origin: OriginSpan | None = None
    ) -> None:
        """Quarantine facts that were never put."""
        if not facts.sealed:
            raise InvalidArgument("a buffer takes sealed batches only; see bsfg.sealing.seal")
        await self._submit(WriterStep(lambda: self._set_aside(facts, reason, detail, origin)))

    def _set_aside(self, facts: FactBatch, reason: str, detail: str, origin: OriginSpan | None) -> None:
        notes, now = self._writer.notes, self._writer.clock.now_unix_ms()
        keys = map(Key, facts.values("from_zone"), facts.values("message_id"))
        notes.add_quarantined(
            [
                Quarantined(0, now, reason, key, -1, facts.slice(row, 1), detail, origin.at(row) if origin else None)
                for row, key in enumerate(keys)
            ],
            self._writer.policy.quarantine_bytes,
        )

    async def release_quarantined(self, id: int, reason: str) -> None:
        """Drop one quarantined fact by an operator's decision."""
        now = self._writer.clock.now_unix_ms()
        await self._submit(WriterStep(lambda: self._writer.notes.release(id, reason, now)))

    async def stats(self) -> BufferStats:
        """Describe the buffer at this moment."""
        self._check_open()
        await self._record_seen()
        writer = self._writer
        percent, fill = writer.policy.fill(writer.used_bytes)
        oldest = await self._oldest_unix_ms() if writer.end > writer.start else None
        return BufferStats(
            stream=self.stream,
            buffer=self.buffer,
            log_id=self.log_id,
            start=writer.start,
            end=writer.end,
            used_bytes=writer.used_bytes,
            capacity_bytes=writer.policy.capacity_bytes,
            fill_percent=percent,
            fill=fill,
            oldest_unix_ms=oldest,
            newest_unix_ms=writer.newest_unix_ms or None,
            segments=len(writer.segments),
            keys=len(writer.index.keys),
            index_bytes=writer.index.keys.nbytes,
            gaps=len(writer.notes.book),
            quarantined=len(writer.notes.quarantine),
            chain_head=writer.chain,
            quarantine_bytes=writer.notes.quarantine.used_bytes,
            quarantine_capacity_bytes=writer.policy.quarantine_bytes,
            quarantine_full=writer.notes.quarantine.full,
        )

    async def history(self, heads: Sequence[bytes] = ()) -> LogHistory:
        """Give what was kept of what was removed, and where the log had some chain heads."""
        self._check_open()
        writer = self._writer

        def look() -> LogHistory:
            found = history_of(writer.view(), writer.notes, writer.chain, heads)
            return replace(found, restores=restores_of(writer.files, writer.folder))

        return await self._look(look)

    async def _oldest_unix_ms(self) -> int | None:
        """Give the time of the first entry, which is read once for every start of the log."""
        start = self._writer.start
        if self._oldest is None or self._oldest[0] != start:
            self._oldest = (start, await self._look(lambda: self._writer.view().time_at(start)))
        return self._oldest[1]

    async def close(self) -> None:
        """Finish what is queued and release the files."""
        if self._closed:
            return
        self._closed = True
        await self._committer.close()
        await asyncio.to_thread(self._until_gathered)
        self._writer.close()
        self._waiters.close(StorageClosed(f"{self.stream}/{self.buffer} is closed"))

    def _until_gathered(self) -> None:
        with self._gathering:
            pass

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self.stream}/{self.buffer} is closed")
        if self._writer.failure is not None:
            raise StorageClosed(f"{self.stream}/{self.buffer} closed itself: {self._writer.failure.message}")


class LogStoreBuffer(LogBuffer):
    """The durable log of what this zone produced."""

    def append(self, batch: FactBatch) -> asyncio.Future[Receipt]:
        """Store a sealed batch and answer when it is durable; it is queued at once, also if nobody waits."""
        return self._append(batch)

    async def frontier(self) -> int:
        """Give the lowest frontier of the required consumers, -1 when there is none."""
        self._check_open()
        return self._standing().committed


class LogForwardBuffer(LogBuffer):
    """The durable, idempotent copy of what other zones sent."""

    async def put_if_absent(self, batch: FactBatch, origin: OriginSpan) -> Receipt:
        """Insert each fact whose key is not there yet."""
        origin.check(len(batch))
        return await self._append(batch, origin)

    async def kept_latest(self) -> EntryBatch:
        """Give the newest entries that were kept when they left."""
        self._check_open()
        try:
            return await self._look(lambda: read_latest(self._writer.files, self._writer.folder))
        except Damaged as damage:
            raise StorageFailed(str(damage)) from None

    async def query_by_time_range(self, start_unix_ms: int, end_unix_ms: int) -> AsyncIterator[Frame]:
        """Give the entries that became durable in a span of time."""
        self._check_open()
        if end_unix_ms < start_unix_ms:
            raise InvalidArgument("the end of a time range lies before its start")
        first = await self.offset_at_time(start_unix_ms)
        last = await self.offset_at_time(end_unix_ms)
        async for frame in self.replay(first, end=max(first, last)):
            yield frame
