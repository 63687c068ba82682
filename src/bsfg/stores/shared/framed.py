"""What one buffer of frames writes: facts, removals, records and refused facts, each a change that is whole or not.

The head of the buffer orders all of it: a change moves it from where this writer knows it to be, and a keeper that
finds it elsewhere writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch, LatestEntries
from bsfg.clock import JumpGuardedClock
from bsfg.digest import KeptRange, KeyHash, LogHistory, RangeDigest
from bsfg.errors import BufferFull, DiskFull, InvalidArgument, OutcomeUnknown, QuarantineFull
from bsfg.fact import Entry, Key
from bsfg.gapbook import GapBook
from bsfg.gaps import Gap, GapRecord
from bsfg.ports import Buffer, Clock, Frame, Quarantined, Receipt, Result
from bsfg.retention import ConsumerStanding, GapReason, Piece, Policy, Removal, make_room
from bsfg.stores.shared.frame import encode_frame
from bsfg.stores.shared.judging import (
    KEY_SCHEMA,
    LOST,
    AppendItem,
    BatchJudgement,
    as_facts,
    identity_hash,
    identity_of,
    judge,
    lost_among,
    payload_of,
    read_aside,
    receipts_of,
    refused_of,
    told,
)
from bsfg.stores.shared.keeper import (
    AsideRow,
    BufferFound,
    BufferHead,
    BufferKeeper,
    Change,
    DepartedRange,
    ForgottenKeys,
    FrameRow,
    NewFrame,
    ReleasedFact,
    touched,
)
from bsfg.stores.shared.reading import ABSENT, PAGE_FRAMES, FrameReader, absent, chain_behind, has_hole, read_keys
from bsfg.wording import check_reason

_INSERTED = int(Result.INSERTED)
_COMPACT_RECORDS = 256
_COMPACT_RANGES = 256


class FramedQuarantine:
    """The refused facts of one buffer; how many there are, and how large, is known without asking."""

    def __init__(self, keeper: BufferKeeper, found: BufferFound, capacity_bytes: int) -> None:
        self._keeper, self._capacity_bytes = keeper, capacity_bytes
        self._count, self.used_bytes, self._next_id = found.aside_count, found.aside_bytes, found.aside_last_id + 1
        self.full = False

    def __len__(self) -> int:
        return self._count

    def rows_of(self, items: Sequence[Quarantined]) -> list[AsideRow]:
        """Give the rows of refused facts that are not there yet; raises `QuarantineFull` when they do not fit."""
        identities = {identity_of(item): item for item in reversed(items)}
        if not identities:
            return []
        hashed = {identity: identity_hash(identity) for identity in identities}
        there = self._keeper.aside(None, 1 << 31, same=[_signed(each) for each in hashed.values()])
        known = {identity_of(_fact(row)) for row in there}
        rows: list[AsideRow] = []
        for identity in reversed(identities):
            if identity not in known:
                item = replace(identities[identity], id=self._next_id + len(rows))
                head, fact = told(item, hashed[identity])
                rows.append(AsideRow(item.id, _signed(hashed[identity]), orjson.dumps(head).decode(), fact))
        size = sum(row.size_bytes for row in rows)
        self.full = bool(rows) and self.used_bytes + size > self._capacity_bytes
        if self.full:
            raise QuarantineFull(
                f"{len(rows)} refused facts of {size} bytes do not fit into quarantine, which holds "
                f"{self.used_bytes} of {self._capacity_bytes} bytes",
                used_bytes=self.used_bytes,
                capacity_bytes=self._capacity_bytes,
            )
        return rows

    def added(self, rows: Sequence[AsideRow]) -> None:
        """Count rows that are durable."""
        self._count += len(rows)
        self.used_bytes += sum(row.size_bytes for row in rows)
        self._next_id += len(rows)

    def row(self, id_: int) -> AsideRow | None:
        """Find one row; None when it is not there."""
        found = self._keeper.aside(id_ - 1, 1)
        return found[0] if found and found[0].id == id_ else None

    def released(self, row: AsideRow) -> None:
        """Count a row that is gone."""
        self._count -= 1
        self.used_bytes -= row.size_bytes
        self.full = False

    def page(self, after: int | None, limit: int, newest_first: bool = False) -> list[Quarantined]:
        """Read the facts that follow an id, in the order in which they came or the other way round."""
        return [_fact(row) for row in self._keeper.aside(after, limit, newest_first=newest_first)]

    def get(self, id_: int, /) -> Quarantined | None:
        """Read one fact; None when it is not there."""
        row = self.row(id_)
        return _fact(row) if row is not None else None


def _fact(row: AsideRow) -> Quarantined:
    return read_aside(orjson.loads(row.head), row.fact)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


@dataclass(frozen=True, slots=True)
class AppendGroup:
    """What several callers append together, and whom to ask when room is short."""

    items: Sequence[AppendItem]
    batch: FactBatch
    hashes: np.ndarray
    now_unix_ms: int
    standing: Callable[[], ConsumerStanding]


class FramedWriter:
    """The state and the steps of one buffer; one thread at a time runs the steps, any may read the state."""

    head: BufferHead
    book: GapBook
    quarantine: FramedQuarantine

    def __init__(self, keeper: BufferKeeper, stream: str, kind: Buffer, policy: Policy, clock: Clock) -> None:
        self._keeper, self.stream, self.buffer, self.policy, self.clock = keeper, stream, kind, policy, clock
        self.place = f"{stream}/{kind}"
        self.steady = JumpGuardedClock.begun(clock)
        self.problems: list[str] = []
        self._seen: list[GapRecord] = []
        self._in_doubt: Change | None = None
        found = keeper.found()
        self._take(found)
        self.log_id, self._key_hash = found.log_id, KeyHash(found.secret)
        self._reader = FrameReader(keeper, self.log_id, kind, self._damaged)
        self._compact_gaps()

    def _take(self, found: BufferFound) -> None:
        self.head, self.book = found.head, GapBook()
        self.book.take_in(*found.gaps)
        self._gap_rows = len(found.gaps)
        self.quarantine = FramedQuarantine(self._keeper, found, self.policy.quarantine_bytes)

    # What is known.

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""
        return self.head.start

    @property
    def end(self) -> int:
        """The offset that the next entry will get."""
        return self.head.end

    @property
    def used_bytes(self) -> int:
        """The size of all frames."""
        return self.head.used_bytes

    @property
    def newest_unix_ms(self) -> int:
        """The time of the last entry."""
        return self.head.newest_unix_ms

    @property
    def chain(self) -> bytes:
        """The digest of the last frame."""
        return self.head.chain

    def counts(self) -> tuple[int, int, int]:
        """Give how many segments and keys there are, and how large the index of keys is."""
        return 1, self.head.keys, 0

    def first_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""
        start, end = self.start, self.end
        return max(start, self._reader.first_at_time(unix_ms, start, end))

    def time_at(self, offset: int) -> int | None:
        """Give the time of the entry at an offset, or of the first one behind it."""
        return next((frame.appended_at_unix_ms for frame in self._keeper.infos(offset, 1)), None)

    def entry_at(self, offset: int) -> Entry | None:
        """Read one entry while it is retained."""
        return self._reader.entry_at(offset) if offset >= self.start else None

    def find(self, key: Key) -> Entry | None:
        """Read the entry of a key while it is retained."""
        return self._reader.entry_of(_signed(self._key_hash.of_one(*key)), key, self.start)

    def page(self, at: int, stop: int, max_facts: int, *, in_turn: bool = False) -> list[Frame] | None:
        """Give the next steps of a replay: what left, or what one look at the frames shows.

        None when entries are missing, unless it is the writer's turn: what leaves is gone before that is known here.
        """
        start = self.start
        if at < start:
            gone = (gap for gap in self.book.own() if gap.reason in ABSENT)
            return list(absent(at, min(start, stop), gone, GapReason.TRUNCATED))
        frames = self._keeper.frames(at, stop, min(PAGE_FRAMES, max_facts, stop - at))
        if not in_turn and has_hole(frames, at):
            return None
        return list(self._reader.steps(frames, at, stop, max_facts))

    def history(self, heads: Sequence[bytes]) -> LogHistory:
        """Give what was kept of what was removed, and where the buffer had some chain heads."""
        head = self.head
        kept, places = self._keeper.history(heads)
        known = {each.chain_before: each.first for each in kept} | {each.chain_after: each.last + 1 for each in kept}
        known = known | {head.chain: head.end} | dict(places)
        return LogHistory(tuple(kept), {each: known.get(each) for each in heads})

    # Changing.

    def settle(self) -> None:
        """Look up what became of a change whose outcome was unknown, before the next one is made."""
        change = self._in_doubt
        if change is None:
            return
        found = self._keeper.found()
        if found.head not in (change.before, change.after):
            raise touched(self.place, found.head, self.head)
        self._take(found)
        self._in_doubt = None

    def _commit(self, after: BufferHead | None = None, **what: Any) -> bool:
        """Make a change durable, then known here; tell whether it was made."""
        change = Change(self.head, after or self.head, **what)
        try:
            done = self._keeper.commit(change)
        except OutcomeUnknown:
            self._in_doubt = change
            raise
        if done:
            self.head = change.after
            self.quarantine.added(change.aside)
            self.book.take_in(*change.gaps)
            self._gap_rows = len(change.gaps) + (0 if change.gaps_anew else self._gap_rows)
        return done

    # Appending.

    def append_group(self, items: Sequence[AppendItem], standing: Callable[[], ConsumerStanding]) -> list[Receipt]:
        """Store the batches of several callers with one frame and one commit; ``standing`` is asked if room is short.

        Most batches are new throughout: they are written at once, unless a key of theirs may be known.
        """
        batch = FactBatch.concat([item.batch for item in items])
        hashes = self._key_hash.of_batch(batch)
        order = np.argsort(hashes, kind="stable")
        ranked = hashes[order]
        now = max(self.steady.now_unix_ms(), self.head.newest_unix_ms)
        group = AppendGroup(items, batch, hashes, now, standing)
        verdict = BatchJudgement(np.zeros(len(batch), dtype=np.int8), np.full(len(batch), -1, dtype=np.int64))
        if len(batch) and not (ranked[1:] == ranked[:-1]).any() and self._store(group, order, verdict, unsure=True):
            return receipts_of(items, verdict, self.head.chain, now)
        verdict = judge(batch, hashes, order, self._candidates, self._reader.fetch, self._gone)
        fresh = order[verdict.results[order] == _INSERTED]
        verdict.offsets[np.sort(fresh)] = np.arange(self.head.end, self.head.end + len(fresh))
        for row, earlier in verdict.repeats_of.items():
            verdict.offsets[row] = verdict.offsets[earlier]
        refused = refused_of(batch, verdict, now, items, forward=self.buffer == Buffer.FORWARD)
        if len(fresh) or refused:
            self._store(group, fresh, verdict, refused=refused)
        return receipts_of(items, verdict, self.head.chain, now)

    def _candidates(self, ranked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = self._keeper.known(np.unique(ranked).astype(np.int64))
        firsts = np.searchsorted(ranked, known[:, 0].astype(np.uint64))
        counts = np.searchsorted(ranked, known[:, 0].astype(np.uint64), side="right") - firsts
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(firsts, counts) + within, np.repeat(known[:, 1], counts)

    def _gone(self, offsets: np.ndarray) -> np.ndarray:
        """Tell which offsets, whose facts were just looked for in vain, are on record as lost: on record they are."""
        self.record_seen()
        return lost_among(offsets, self.book.own())

    def _store(
        self,
        group: AppendGroup,
        order: np.ndarray,
        verdict: BatchJudgement,
        *,
        unsure: bool = False,
        refused: Sequence[Quarantined] = (),
    ) -> bool:
        """Write the rows of a batch that ``order`` names, and what is refused with them, in one change.

        ``unsure`` says that no key of them may be known: else nothing is written, nor is room made for what may be a
        repeat. Tells whether it was.
        """
        fresh = np.sort(order) if len(order) > 1 else order
        verdict.offsets[fresh] = np.arange(self.head.end, self.head.end + len(fresh))
        aside = self.quarantine.rows_of(refused)
        if not len(fresh):
            return not aside or self._commit(aside=aside)
        frame, chain = self._frame(group, fresh)
        size = len(frame.content)
        if unsure and self.head.used_bytes + size > self.policy.capacity_bytes:
            return False
        self._make_room(size, group.standing)
        head = self.head
        used, keys = head.used_bytes + size, head.keys + len(fresh)
        after = BufferHead(head.start, frame.end, used, keys, group.now_unix_ms, chain)
        hashes = group.hashes[order].astype(np.int64)
        return self._commit(after, frame=NewFrame(frame, hashes, verdict.offsets[order], unsure), aside=aside)

    def _frame(self, group: AppendGroup, fresh: np.ndarray) -> tuple[FrameRow, bytes]:
        """Write some rows of a batch as the next frame; give it, and the chain value after it."""
        chosen = group.batch if len(fresh) == len(group.batch) else group.batch.take(fresh)
        form, payload = payload_of(chosen, fresh, group.items, forward=self.buffer == Buffer.FORWARD)
        before, base = self.head.chain, self.head.end
        parts, chain = encode_frame(
            payload,
            base=base,
            count=len(fresh),
            appended_at_unix_ms=group.now_unix_ms,
            log_id=self.log_id,
            chain_before=before,
            form=form,
        )
        return FrameRow(base, len(fresh), group.now_unix_ms, before, b"".join(parts[:2])), chain

    # Room.

    def _make_room(self, incoming_bytes: int, standing: Callable[[], ConsumerStanding]) -> None:
        used, capacity = self.head.used_bytes, self.policy.capacity_bytes
        if used + incoming_bytes <= capacity:
            return
        pieces = self._pieces(enough_bytes=used + incoming_bytes - capacity)
        removal = make_room(pieces, self.policy, standing(), used_bytes=used, incoming_bytes=incoming_bytes)
        if removal is None:
            raise BufferFull(f"{self.place} holds {used} of {capacity} bytes", used_bytes=used, capacity_bytes=capacity)
        while self.depart(removal):
            pass

    def _pieces(self, enough_bytes: int) -> list[Piece]:
        """List the oldest frames: a page of them, or as many as make up some bytes."""
        pieces: list[Piece] = []
        at, size, start = 0, 0, self.head.start
        while frames := self._keeper.infos(at, PAGE_FRAMES):
            for frame in frames:
                at, size = frame.end, size + frame.size_bytes
                first = max(frame.base, start)
                pieces.append(Piece(first, frame.end - 1, frame.size_bytes, frame.appended_at_unix_ms))
            if size >= enough_bytes:
                break
        return pieces

    def oldest(self, now_unix_ms: int) -> list[Piece]:
        """List the oldest frames, as many as are judged at once."""
        return self._pieces(0)

    def depart(self, removal: Removal) -> bool:
        """Let a bounded part of what a removal allows go; tell whether there is more of it."""
        if removal.before <= self.head.start and not removal.gaps:
            return False
        frames = self._keeper.frames(0, removal.before, PAGE_FRAMES)
        going = [frame for frame in frames if frame.end <= removal.before]
        # A page that was full, or ended at a bound of bytes, may not be all of it.
        following = self._keeper.infos(going[-1].end, 1) if going else []
        more = bool(following) and following[0].end <= removal.before
        self._depart(removal.up_to(going[-1].end) if more else removal, going)
        return more

    def _depart(self, removal: Removal, going: Sequence[FrameRow]) -> None:
        now, head = self.clock.now_unix_ms(), self.head
        entries = [self._reader.decoded(frame) for frame in going]
        gaps: list[Gap] = [GapRecord(gap.first, gap.last, gap.reason, now) for gap in removal.gaps]
        readable = [each for each in entries if each is not None]
        used = head.used_bytes - sum(len(frame.content) for frame in going)
        self._commit(
            head._replace(start=max(removal.before, head.start), used_bytes=used),
            gaps=self.book.missing([*gaps, *self._seen]),
            departed=departed_of(going, readable) if going else None,
            latest=self._latest(readable) if self._latest_most and readable else None,
        )
        self._seen = []
        self._compact_gaps()

    @property
    def _latest_most(self) -> int:
        """How many subjects and predicates keep their newest entry when it leaves; 0 when none do."""
        return self.policy.latest_most if self.policy.keep_latest and self.buffer == Buffer.FORWARD else 0

    def _latest(self, entries: Sequence[EntryBatch]) -> bytes:
        latest = LatestEntries(self.kept_latest(), self._latest_most)
        for each in entries:
            latest.add(each)
        return bytes(latest.result().to_ipc())

    def kept_latest(self) -> EntryBatch:
        """Read the newest entries of what has left."""
        data = self._keeper.latest()
        return EntryBatch(EntryBatch.from_ipc(data).record_batch, sealed=True) if data else EntryBatch.empty()

    def forget_keys(self, as_of_unix_ms: int) -> bool:
        """Forget the keys of one part of what left that is beyond the horizon; tell whether there may be more."""
        due = self._keeper.oldest_keys(as_of_unix_ms - 1000 * self.policy.key_horizon_seconds)
        if due is None:
            return False
        keys = read_keys(due.keys)
        facts, offsets = as_facts(keys), keys.column("offset").to_numpy()
        hashes = self._key_hash.of(facts.column("from_zone"), facts.column("message_id")).astype(np.int64)
        after = self.head._replace(keys=self.head.keys - len(offsets))
        return self._commit(after, forgotten=ForgottenKeys(due.first, hashes, offsets))

    # Records.

    def _damaged(self, first: int, last: int, why: str, reason: GapReason) -> GapRecord:
        """Take note of what cannot be read; it is recorded as soon as the writer has its turn."""
        if reason == GapReason.LOST and (known := self._on_record(first, last)) is not None:
            return known
        gap = GapRecord(first, last, reason, self.clock.now_unix_ms(), why)
        if self.book.missing([gap]) and all((each.first, each.last) != (first, last) for each in self._seen):
            self._seen.append(gap)
            self.problems.append(f"{self.place}: entries {first} to {last}: {why}")
        return gap

    def _on_record(self, first: int, last: int) -> GapRecord | None:
        """Give the record that accounts for entries that no frame holds: they did not come along from another storage.

        It is told as it was: to a peer another reason would be another gap.
        """
        lost = (gap for gap in self.book.own() if gap.reason in LOST)
        return next((gap for gap in lost if gap.first <= first and last <= gap.last), None)

    @property
    def has_seen(self) -> bool:
        """Whether damage waits to be recorded."""
        return bool(self._seen)

    def record_seen(self) -> None:
        """Record the damage that was come across."""
        seen, self._seen = self._seen, []
        # As far as no record accounts for it: another time the same damage has another time and words.
        known = [(gap.first, gap.last) for gap in self.book.own() if gap.reason in LOST]
        news = [gap for gap in seen if not any(first <= gap.first and gap.last <= last for first, last in known)]
        if news:
            self.add_gaps(news)

    def add_gaps(self, gaps: Sequence[Gap]) -> None:
        """Record gaps durably; those already known are left out."""
        fresh = self.book.taken(gaps)
        if fresh:
            self._commit(gaps=fresh)
            self._compact_gaps()

    def _compact_gaps(self) -> None:
        """Write the records of gaps anew when they are many more than the sets they make: each turn adds some."""
        kinds, ranges = self.book.kinds, len(self.book)
        if self._gap_rows <= _COMPACT_RECORDS + 4 * kinds + ranges // _COMPACT_RANGES:
            return
        # They are durable as they are: without room for both forms they stay so until there is.
        with suppress(DiskFull):
            self._commit(gaps=self.book.sets(), gaps_anew=True)

    def set_aside(self, items: Sequence[Quarantined]) -> None:
        """Keep refused facts durably, those already there left out."""
        rows = self.quarantine.rows_of(items)
        if rows:
            self._commit(aside=rows)

    def release(self, id_: int, reason: str) -> None:
        """Drop a refused fact, leaving a durable note of it."""
        check_reason(reason, "dropping a quarantined fact")
        row = self.quarantine.row(id_)
        if row is None:
            raise InvalidArgument(f"nothing is quarantined under id {id_}", id=id_)
        self._commit(released=ReleasedFact(id_, reason, self.clock.now_unix_ms()))
        self.quarantine.released(row)


def departed_of(frames: Sequence[FrameRow], entries: Sequence[EntryBatch]) -> DepartedRange:
    """Give what stays of frames that leave together: the digest over their entries, the chain, and their keys."""
    digest = RangeDigest()
    parts = [pa.RecordBatch.from_pylist([], schema=KEY_SCHEMA)]
    for each in entries:
        digest.add(each)
        parts.append(each.record_batch.select(KEY_SCHEMA.names))
    first, last = frames[0], frames[-1]
    kept = KeptRange(first.base, last.end - 1, digest.hexdigest(), first.chain_before, chain_behind(last))
    return DepartedRange(kept, last.appended_at_unix_ms, pa.concat_batches(parts).serialize().to_pybytes())
