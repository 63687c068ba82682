"""Step 2, serve: a sender answers a receiver that asks for what comes next.

The sender is passive: it looks up what this consumer has confirmed, gives what follows, and changes nothing durable
until a confirmation arrives. An answer that gets lost is therefore given again, from the same place.

What a link leaves out is part of the answer: a gap record with reason ``skipped`` stands in the place of every range
that the link does not carry, so that the receiver sees one sequence of offsets without holes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import constant_value
from bsfg.batch import EntryBatch
from bsfg.errors import ForeignLog, InvalidArgument
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.journey.position import check_consumer
from bsfg.ports import Buffer, CursorTracker, ForwardBuffer, Frame, GapRecord, Replayable
from bsfg.retention import GapReason

SCANNED_PER_FACT = 16
"""A link that carries little looks at this many facts per fact asked for, then answers with what it has."""

RELAYED_GAPS_MAX = 1_000

_CARRIED, _OTHER_ZONE, _RETURNING = 0, 1, 2
_SKIPPED_DETAIL = {_OTHER_ZONE: "to_zone is not carried by this link", _RETURNING: "returns to its from_zone"}


@dataclass(frozen=True, slots=True)
class Carriage:
    """What a link carries: facts for some zones or (None) for all, and none that return to the receiver's zone."""

    to_zones: frozenset[str] | None = None
    receiver_zone: str | None = None

    def split(self, frame: Frame) -> Iterator[Frame]:
        """Give a frame as runs of entries that the link carries and gap records for those it leaves out."""
        if frame.entries is None or (self.to_zones is None and self.receiver_zone is None):
            yield frame
            return
        verdicts = self._verdicts(frame.entries)
        edges = np.flatnonzero(np.diff(verdicts)) + 1
        for start, stop in zip([0, *edges], [*edges, len(verdicts)], strict=True):
            yield _run(frame, int(start), int(stop), int(verdicts[start]))

    def _verdicts(self, entries: EntryBatch) -> np.ndarray:
        verdicts = np.full(len(entries), _CARRIED, dtype=np.int8)
        if self.to_zones is not None:
            verdicts[~_is_in(entries.column("to_zone"), self.to_zones)] = _OTHER_ZONE
        if self.receiver_zone is not None:
            verdicts[_is_in(entries.column("from_zone"), frozenset({self.receiver_zone}))] = _RETURNING
        return verdicts


EVERYTHING = Carriage()


async def serve(
    buffer: Replayable,
    cursors: CursorTracker,
    consumer: str,
    request: FetchRequest,
    *,
    carriage: Carriage = EVERYTHING,
) -> Fetched:
    """Answer one fetch of a named durable consumer: what follows the last offset it confirmed without a gap.

    When there is nothing yet, wait for it as long as the request says; then the answer may have no frames. Raises
    `UnknownConsumer`, `ConsumerRetired`, and `ForeignLog` when the consumer's position is not one of this buffer.
    """
    check_request(request)
    state = await cursors.consumer(consumer)
    check_consumer(state, buffer)
    start = state.checkpoint.committed + 1
    gaps = relayed_gaps(await _gaps(buffer), request.gaps_after, carriage.receiver_zone)
    await buffer.wait_for(start, 0 if gaps else request.wait_seconds)
    stats = await buffer.stats()
    if start > stats.end:
        raise ForeignLog(f"{consumer} confirmed offset {start - 1}, but this log ends before {stats.end}")
    collector = _Collector(request)
    async for frame in buffer.replay(start, end=stats.end, max_facts=request.max_facts):
        if not collector.take(carriage.split(frame)):
            break
    frames = collector.frames()
    if frames:
        await cursors.sent(consumer, frames[-1].last + 1)
    token = gap_token(gaps[-1]) if gaps else request.gaps_after
    return Fetched(buffer.log_id, start, stats.end, stats.chain_head, frames, gaps, token)


async def serve_range(
    buffer: Replayable, first: int, end: int, *, max_facts: int = 10_000, carriage: Carriage = EVERYTHING
) -> AsyncIterator[Frame]:
    """Give a range of offsets (``end`` exclusive); asked again, it gives the same while the entries are retained.

    No cursor moves: this is for re-reads, for fetching in parallel, and for auditors.
    """
    async for frame in buffer.replay(first, end=end, max_facts=max_facts):
        for piece in carriage.split(frame):
            yield piece


async def serve_time_range(
    buffer: ForwardBuffer, start_unix_ms: int, end_unix_ms: int, *, carriage: Carriage = EVERYTHING
) -> AsyncIterator[Frame]:
    """Give what became durable here in a span of time (its end exclusive), in the order of offsets."""
    async for frame in buffer.query_by_time_range(start_unix_ms, end_unix_ms):
        for piece in carriage.split(frame):
            yield piece


def check_request(request: FetchRequest) -> None:
    """Raise `InvalidArgument` for a request that asks for nothing."""
    if request.max_facts < 1 or request.max_bytes < 1 or request.wait_seconds < 0:
        raise InvalidArgument("a fetch asks for at least one fact and one byte, and waits no negative time")


def relayed_gaps(gaps: Sequence[GapRecord], after: str, receiver_zone: str | None) -> list[GapRecord]:
    """Choose the gap records of other zones that follow the one the receiver stored last.

    A token that is not found, because the list was restored or shortened, gives all of them again: storing one twice
    does no harm, leaving one out would.
    """
    foreign = [gap for gap in gaps if gap.origin_zone is not None and gap.origin_zone != receiver_zone]
    known = next((at + 1 for at in range(len(foreign) - 1, -1, -1) if gap_token(foreign[at]) == after), 0)
    return foreign[known : known + RELAYED_GAPS_MAX]


def gap_token(gap: GapRecord) -> str:
    """Name a gap record by what makes it the same one: origin, range and reason."""
    return f"{gap.origin_zone}:{gap.first}-{gap.last}:{gap.reason}"


async def _gaps(buffer: Replayable) -> list[GapRecord]:
    """List the gap records that may be of other zones; a store buffer has none."""
    return await buffer.gaps() if buffer.buffer == Buffer.FORWARD else []


class _Collector:
    """Gathers frames until a request is satisfied, joining neighbours so that small ones travel together."""

    def __init__(self, request: FetchRequest) -> None:
        self._facts = request.max_facts
        self._bytes = request.max_bytes
        self._scanned = request.max_facts * SCANNED_PER_FACT
        self._frames: list[Frame] = []
        self._pending: list[EntryBatch] = []

    def take(self, pieces: Iterator[Frame]) -> bool:
        """Take frames in order, the last one perhaps in part; tell whether more are wanted."""
        for piece in pieces:
            if piece.entries is not None:
                if not self._take_entries(piece.entries):
                    return False
            else:
                self._take_gap(piece)
        return self._facts > 0 and self._bytes > 0 and self._scanned > 0

    def frames(self) -> list[Frame]:
        """Give what was gathered."""
        if self._pending:
            entries = EntryBatch.concat(self._pending)
            offsets = entries.offsets
            self._frames.append(Frame(int(offsets[0]), int(offsets[-1]), entries))
            self._pending = []
        return self._frames

    def _take_entries(self, entries: EntryBatch) -> bool:
        count = _count_within(entries, self._bytes, min(len(entries), self._facts))
        if count == 0 and not self._pending and not self._frames:
            count = 1
        if count:
            self._pending.append(entries.slice(0, count))
        self._facts -= count
        self._scanned -= count
        self._bytes -= entries.slice(0, count).nbytes
        return count == len(entries) and self._facts > 0

    def _take_gap(self, piece: Frame) -> None:
        assert piece.gap is not None
        frames = self.frames()
        if piece.gap.reason == GapReason.SKIPPED:
            self._scanned -= piece.last - piece.first + 1
        if frames and (joined := _joined(frames[-1], piece)):
            frames[-1] = joined
        else:
            frames.append(piece)


def _joined(one: Frame, next_one: Frame) -> Frame | None:
    """Join two neighbouring skipped ranges of one kind, or give None."""
    a, b = one.gap, next_one.gap
    if a is None or b is None or a.reason != GapReason.SKIPPED or (a.reason, a.detail) != (b.reason, b.detail):
        return None
    gap = GapRecord(a.first, b.last, a.reason, b.at_unix_ms, a.detail)
    return Frame(one.first, next_one.last, gap=gap)


def _count_within(entries: EntryBatch, max_bytes: int, max_facts: int) -> int:
    """Count the leading rows that fit into a number of bytes, by halving."""
    if max_facts <= 0 or max_bytes <= 0:
        return 0
    if entries.slice(0, max_facts).nbytes <= max_bytes:
        return max_facts
    fits, too_many = 0, max_facts
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if entries.slice(0, middle).nbytes <= max_bytes:
            fits = middle
        else:
            too_many = middle
    return fits


def _run(frame: Frame, start: int, stop: int, verdict: int) -> Frame:
    """Give the rows from ``start`` to ``stop`` as entries, or as the gap record for leaving them out."""
    assert frame.entries is not None
    rows = frame.entries.slice(start, stop - start)
    first, last = int(rows.offsets[0]), int(rows.offsets[-1])
    if verdict == _CARRIED:
        return Frame(first, last, rows)
    # The time of the last fact, not of this answer: a repeated answer is then the same.
    at_unix_ms = int(rows.column("appended_at_unix_ms")[-1].as_py())
    return Frame(first, last, gap=GapRecord(first, last, GapReason.SKIPPED, at_unix_ms, _SKIPPED_DETAIL[verdict]))


def _is_in(column: pa.Array, zones: frozenset[str]) -> np.ndarray:
    single = constant_value(column)
    if single is not None:
        return np.full(len(column), single in zones)
    return np.asarray(pc.is_in(column, value_set=pa.array(sorted(zones), pa.string())).to_numpy(zero_copy_only=False))
