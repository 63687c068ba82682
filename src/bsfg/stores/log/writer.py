"""What recovery hands over to the writer of a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from bsfg.batch import FACT_SCHEMA, EntryBatch, FactBatch
from bsfg.clock import JumpGuardedClock
from bsfg.columns import STORED_SCHEMA
from bsfg.digest import KeyHash, LogHistory
from bsfg.errors import BsfgError, BufferFull, DiskFull, OutcomeUnknown, StorageFailed
from bsfg.fact import Entry, Key
from bsfg.gapbook import GapBook
from bsfg.ports import Buffer, Clock, Gap, GapRecord, Quarantined, Receipt, Result
from bsfg.retention import Cause, ConsumerStanding, GapReason, Piece, Policy, Removal, departure, make_room
from bsfg.stores.log.damage import keep_aside, uncovered
from bsfg.stores.log.files import Files, NotBegun, OpenFile, is_refusal, translated, write_whole
from bsfg.stores.log.indexstore import IndexStore
from bsfg.stores.log.keysegments import Departure, KeySegments, gathered, keys_between, stored_facts
from bsfg.stores.log.notes import Notes, Watermark
from bsfg.stores.log.quarantine import Quarantine
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.segments import Hole, SegmentFile, segment_name
from bsfg.stores.log.view import LogView, history_of, keep_latest, read_latest, restores_of
from bsfg.stores.shared.frame import (
    FRAME_HEADER_BYTES,
    VERSION,
    Damaged,
    SegmentHeader,
    encode_frame,
    encode_segment_header,
    padded,
)
from bsfg.stores.shared.judging import (
    AppendItem,
    BatchJudgement,
    judge,
    lost_among,
    payload_of,
    receipts_of,
    refused_of,
)


@dataclass(slots=True)
class LogState:
    """What recovery found and the writer goes on with."""

    folder: str
    log_id: bytes
    secret: bytes
    segments: list[SegmentFile]
    end: int
    chain: bytes
    newest_unix_ms: int
    notes: Notes
    keys: KeySegments
    index: IndexStore
    problems: list[str] = field(default_factory=list)


STORE_SCHEMA = FACT_SCHEMA
FORWARD_SCHEMA = STORED_SCHEMA
_MIN_SEGMENT_BYTES = 16_384
_FEW = 32
_STEP_SEGMENTS = 4  # each costs a turn of the writer a sync of a folder
_STEP_BYTES = 64 << 20
# As plain numbers: numpy takes its time with an enumeration.
_INSERTED, _CONFLICT = int(Result.INSERTED), int(Result.CONFLICT)

OnSync = Callable[[float], None]
"""Is told how long each sync of a frame took, in seconds."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """How the embedded log lays out its files and spends memory."""

    segment_bytes: int = 64 << 20
    index_memory_bytes: int = 256 << 20
    index_run_keys: int = 131_072
    max_group_facts: int = 65_536
    max_group_bytes: int = 16 << 20
    reserve_bytes: int = 0


class LogWriter:
    """The state and the steps of one log."""

    def __init__(
        self,
        files: Files,
        state: LogState,
        *,
        stream: str,
        buffer: Buffer,
        policy: Policy,
        options: LogOptions,
        clock: Clock,
        on_sync: OnSync = lambda seconds: None,
    ) -> None:
        self.files, self.stream, self.buffer = files, stream, buffer
        self.policy, self.options, self.clock = policy, options, clock
        self.steady = JumpGuardedClock.begun(clock)
        self.folder, self.log_id = state.folder, state.log_id
        self._now_has(state.segments)
        self.end, self.chain, self.newest_unix_ms = state.end, state.chain, state.newest_unix_ms
        self.notes, self.keys, self.index = state.notes, state.keys, state.index
        self.index.source = self._keys_between
        self.index.has_room = self._has_room
        self.problems = state.problems
        self._lost_before = self.notes.book.own()
        self.seen: list[GapRecord] = []
        """Damage that somebody came across and that is not recorded yet."""
        self.failure: BsfgError | None = None
        self.reserve = Reserve(files, 0, clock)
        self._leaving: list[str] = []
        self._schema = STORE_SCHEMA if buffer == Buffer.STORE else FORWARD_SCHEMA
        self._key_hash = KeyHash(state.secret)
        self._segment_bytes = max(_MIN_SEGMENT_BYTES, min(options.segment_bytes, policy.capacity_bytes // 8))
        self._on_sync, self._watermark = on_sync, Watermark(files, self.folder)
        self._file: OpenFile | None = files.open_append(self.segments[-1].path) if self.segments else None
        self._publish_watermark()

    # What readers use.

    @property
    def start(self) -> int:
        """The first offset that is not truncated."""
        return self.notes.start

    @property
    def book(self) -> GapBook:
        """The gap records."""
        return self.notes.book

    @property
    def quarantine(self) -> Quarantine:
        """The refused facts."""
        return self.notes.quarantine

    def counts(self) -> tuple[int, int, int]:
        """Give how many segments and keys there are, and how large the index of keys is."""
        return len(self.segments), len(self.index.keys), self.index.keys.nbytes

    def first_at_time(self, unix_ms: int) -> int:
        """Give the first offset that became durable at a time or later."""
        return self.view().first_at_time(unix_ms)

    def time_at(self, offset: int) -> int | None:
        """Give the time of the entry at an offset."""
        return self.view().time_at(offset)

    def entry_at(self, offset: int) -> Entry | None:
        """Read one entry while it is retained."""
        rows = self.view().rows_at(offset)
        return rows.to_entries()[0] if rows is not None else None

    def find(self, key: Key) -> Entry | None:
        """Read the entry of a key while its bytes are retained."""
        _, offsets = self.index.keys.candidates(np.array([self._key_hash.of_one(*key)], dtype=np.uint64))
        entries = map(self.entry_at, np.unique(offsets).tolist())
        return next((entry for entry in entries if entry is not None and entry.key == key), None)

    def kept_latest(self) -> EntryBatch:
        """Read the newest entries of what has left."""
        try:
            return read_latest(self.files, self.folder)
        except Damaged as damage:
            raise StorageFailed(str(damage)) from None

    def history(self, heads: Sequence[bytes]) -> LogHistory:
        """Give what was kept of what was removed, the restores, and where the log had some chain heads."""
        found = history_of(self.view(), self.notes, self.chain, heads)
        return replace(found, restores=restores_of(self.files, self.folder))

    def view(self) -> LogView:
        """Give the log as it stands, for reading."""
        return LogView(self.segments, self.start, self.end, self.notes.book.own(), self._damage_seen)

    @property
    def used_bytes(self) -> int:
        """The size of all segment files."""
        return self._older_bytes + (self.segments[-1].size_bytes if self.segments else 0)

    def _now_has(self, segments: Sequence[SegmentFile]) -> None:
        """Exchange the segments; all but the last one stay as large as they are."""
        self.segments: tuple[SegmentFile, ...] = tuple(segments)
        for segment in self.segments:
            segment.may_leave = False
        self._older_bytes = sum(segment.size_bytes for segment in self.segments[:-1])

    def _damage_seen(self, first: int, last: int, why: str, reason: GapReason) -> GapRecord:
        gap = GapRecord(first, last, reason, self.clock.now_unix_ms(), why)
        news = any(uncovered(first, last, self.notes.book.own()))
        if news and not any(each.first <= first and last <= each.last for each in self.seen):
            self.seen.append(gap)
        return gap

    def record_damage(self, gap: GapRecord) -> None:
        """Record what cannot be read, as far as no record accounts for it."""
        spans = list(uncovered(gap.first, gap.last, self.notes.book.own()))
        if spans:
            self.notes.add_gaps([replace(gap, first=first, last=last) for first, last in spans])
            self.problems.append(f"entries {gap.first} to {gap.last}: {gap.detail or gap.reason}")

    def _has_room(self) -> bool:
        return self.reserve.has_room()

    def _keys_between(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Give the hashed keys of a range of offsets, sorted, and the offsets, from key segments and log."""
        parts = list(keys_between(self.view(), self.files, self.folder, self.keys.names, first, last))
        hashes = [self._key_hash.of(facts.column("from_zone"), facts.column("message_id")) for facts, _ in parts]
        if not parts:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        every, offsets = np.concatenate(hashes), np.concatenate([offsets for _, offsets in parts])
        order = np.argsort(every, kind="stable")
        return every[order], offsets[order]

    # Appending.

    def append_group(self, items: Sequence[AppendItem], standing: Callable[[], ConsumerStanding]) -> list[Receipt]:
        """Store the batches of several callers with one frame and one sync; ``standing`` is asked if room is short."""
        batch = FactBatch.concat([item.batch for item in items])
        now, base = max(self.steady.now_unix_ms(), self.newest_unix_ms), self.end
        if (keys := self._new_keys(batch)) is not None:
            self._store(batch, np.arange(len(batch)), items, now, standing)
            self.index.add_few(keys, self.end, self.chain)
            verdict = BatchJudgement(np.zeros(len(batch), dtype=np.int8), np.arange(base, self.end))
            return receipts_of(items, verdict, self.chain, now)
        hashes = self._key_hash.of_batch(batch)
        order = np.argsort(hashes, kind="stable")
        view = self.view()
        gone = partial(self._gone, view)
        verdict = judge(batch, hashes, order, self.index.keys.candidates, stored_facts(view, self.keys), gone)
        fresh = np.flatnonzero(verdict.results == _INSERTED)
        verdict.offsets[fresh] = np.arange(base, base + len(fresh))
        if len(fresh) < len(batch):
            for row, earlier in verdict.repeats_of.items():
                verdict.offsets[row] = verdict.offsets[earlier]
            refused = refused_of(batch, verdict, now, items, forward=self.buffer == Buffer.FORWARD)
            if refused:
                self.notes.add_quarantined(refused, self.policy.quarantine_bytes)
            order = order[verdict.results[order] == _INSERTED]
        if len(fresh):
            self._store(batch, fresh, items, now, standing)
            self.index.add(hashes[order], verdict.offsets[order], self.end, self.chain)
        return receipts_of(items, verdict, self.chain, now)

    def _gone(self, view: LogView, offsets: np.ndarray) -> np.ndarray:
        """Tell which offsets are lost for good, when their facts were just looked for in vain: on record they are.

        What a medium did not give just now may be there again soon, and must not be there twice then. It counts as
        lost when it was on record at the start already.
        """
        for gap in list(self.seen):
            self.record_damage(gap)
        lost = lost_among(offsets, self.notes.book.own())
        if view.refused and lost.any():
            lost &= ~np.isin(offsets, list(view.refused)) | lost_among(offsets, self._lost_before)
        return lost

    def _new_keys(self, batch: FactBatch) -> list[int] | None:
        """Give the hashes of a few keys that are certainly new, None for others: most small batches need no more."""
        if not 0 < len(batch) <= _FEW:
            return None
        hashes = self._key_hash.of_few(batch)
        known = len(set(hashes)) < len(hashes) or any(map(self.index.keys.may_hold, hashes))
        return None if known else hashes

    def _store(
        self,
        batch: FactBatch,
        fresh: np.ndarray,
        items: Sequence[AppendItem],
        now: int,
        standing: Callable[[], ConsumerStanding],
    ) -> None:
        chosen = batch if len(fresh) == len(batch) else batch.take(fresh)
        form, payload = payload_of(chosen, fresh, items, forward=self.buffer == Buffer.FORWARD)
        size = padded(FRAME_HEADER_BYTES + len(payload))
        if not self.reserve.restore():
            raise DiskFull(
                f"the disk of {self.stream}/{self.buffer} is full, and its reserve is needed to empty it",
                reserve_bytes=self.reserve.size_bytes,
            )
        self._make_room(size, standing)
        if self._file is None or not self._fits(self.segments[-1], size):
            self._roll()
        parts, chain = encode_frame(
            payload,
            base=self.end,
            count=len(fresh),
            appended_at_unix_ms=now,
            log_id=self.log_id,
            chain_before=self.chain,
            form=form,
        )
        active = self.segments[-1]
        self._write(active, parts)
        active.add(self.end, parts[0], payload, chosen if self.buffer == Buffer.STORE and chosen.is_by_hand else None)
        self.end, self.chain, self.newest_unix_ms = self.end + len(fresh), chain, now
        self._publish_watermark()

    def _fits(self, active: SegmentFile, size: int) -> bool:
        """Tell whether a frame belongs into a segment: one of an older version has other columns, or knows no rows."""
        return active.size_bytes + size <= self._segment_bytes and self._is_current(active.header)

    def _is_current(self, header: SegmentHeader) -> bool:
        return header.version == VERSION and bool(header.schema.equals(self._schema))

    def _write(self, active: SegmentFile, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write and sync one frame; when the disk is full the log stays as it was."""
        assert self._file is not None
        try:
            self._file.write(parts)
        except OSError as error:
            failure = translated(error, f"writing {active.path}")
            try:
                if not isinstance(error, NotBegun):
                    self._file.truncate(active.size_bytes)
                    # Durably: the next frame may go to another segment, behind which a rest found here would be damage.
                    self._file.sync()
            except OSError as second:
                self.failure = translated(second, f"undoing a failed write to {active.path}")
            if not is_refusal(failure):
                self.failure = failure
            raise failure from None
        started = time.perf_counter()
        try:
            self._file.sync()
        except OSError as error:
            raise self._ended(error, f"syncing {active.path}") from None
        self._on_sync(time.perf_counter() - started)

    def _ended(self, error: OSError, doing: str) -> OutcomeUnknown:
        """Close the log: nobody can know what is on the disk, and a second try would not tell either."""
        self.failure = OutcomeUnknown(f"{doing}: {error.strerror or error}; the log is closed until it is opened again")
        return self.failure

    # Space.

    def relieve(self, standing: ConsumerStanding) -> bool:
        """Let the oldest piece go that every required consumer has confirmed; tell whether there was one."""
        if len(self.segments) == 1 and self.segments[0].frames and self.end - 1 <= standing.committed:
            self._roll()
        oldest = next((piece for piece in self.pieces() if piece.last >= self.start), None)
        if oldest is None or not departure(oldest, self.policy, standing, Cause.DISK)[0]:
            return False
        self.remove(Removal(oldest.last + 1))
        return True

    def _make_room(self, incoming_bytes: int, standing: Callable[[], ConsumerStanding]) -> None:
        if self.used_bytes + incoming_bytes <= self.policy.capacity_bytes:
            return
        if len(self.segments) == 1 and self.segments[0].frames:
            self._roll()
        removal = make_room(
            self.pieces(),
            self.policy,
            standing(),
            used_bytes=self.used_bytes,
            incoming_bytes=incoming_bytes,
        )
        if removal is None:
            raise BufferFull(
                f"{self.stream}/{self.buffer} holds {self.used_bytes} of {self.policy.capacity_bytes} bytes",
                used_bytes=self.used_bytes,
                capacity_bytes=self.policy.capacity_bytes,
            )
        self.remove(removal)

    def pieces(self) -> list[Piece]:
        """List what can be removed as a whole: every segment but the active one."""
        result = []
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            newest = following.header.time_before_unix_ms
            result.append(Piece(max(segment.base, self.start), following.base - 1, segment.size_bytes, newest))
        return result

    def oldest(self, now_unix_ms: int) -> list[Piece]:
        """List what may leave by age, when a segment that is old enough is full."""
        age_seconds = (now_unix_ms - self.newest_unix_ms) / 1000
        if self.segments[-1].frames and age_seconds >= self.policy.retention_seconds:
            self._roll()
        return self.pieces()

    def remove(self, removal: Removal) -> None:
        """Let everything below an offset go: keys first, then the durable note, then the files."""
        self.seal_for(removal)
        self.depart(removal, [self.gather(*pair) for pair in self._leaving_before(removal.before)])

    def seal_for(self, removal: Removal) -> None:
        """Begin a new segment when the active one is to leave with the others."""
        if removal.before >= self.end and self.segments and self.segments[-1].frames:
            self._roll()

    def _leaving_before(self, offset: int) -> list[tuple[SegmentFile, SegmentFile]]:
        """Give the segments that lie wholly below an offset, each with the one that follows it."""
        pairs = zip(self.segments, self.segments[1:], strict=False)
        return [(segment, following) for segment, following in pairs if following.base <= offset]

    def next_to_leave(self, removal: Removal) -> list[tuple[SegmentFile, SegmentFile]]:
        """Give the first segments of a removal, no more than can leave in one turn, for `gather`."""
        chosen: list[tuple[SegmentFile, SegmentFile]] = []
        for pair in self._leaving_before(removal.before)[:_STEP_SEGMENTS]:
            chosen.append(pair)
            if sum(segment.size_bytes for segment, _ in chosen) >= _STEP_BYTES:
                break
        return chosen

    def gather(self, segment: SegmentFile, following: SegmentFile) -> Departure:
        """Read what must stay of a segment that is full; this may run in any thread, beside the writer's."""
        return gathered(self.keys, segment, following, self._latest_most)

    @property
    def _latest_most(self) -> int:
        """How many subjects and predicates keep their newest entry when it leaves; 0 when none do."""
        return self.policy.latest_most if self.policy.keep_latest and self.buffer == Buffer.FORWARD else 0

    def depart(self, removal: Removal, departures: Sequence[Departure]) -> None:
        """Let everything go that a removal allows, as far as what stays of it was gathered."""
        pairs = self._leaving_before(removal.before)
        going = [each for each, (segment, _) in zip(departures, pairs, strict=False) if each.segment is segment]
        self.forgo([departure for departure in departures if departure not in going])
        if len(going) < len(pairs):
            if not going:
                return
            removal = removal.up_to(pairs[len(going) - 1][1].base)
        if removal.before <= self.start and not removal.gaps:
            self._remove_files()
            return
        now = self.clock.now_unix_ms()
        gaps = [GapRecord(gap.first, gap.last, gap.reason, now) for gap in removal.gaps]
        # Recorded with the removal: while the segment stays, another look may find its bytes sound.
        gaps += [gap for each in going for hole in each.lacking for gap in self._keep_damage(each.segment, hole)]
        self.keys.add([departure.staged for departure in going if departure.staged is not None])
        if self._latest_most:
            known = {departure.segment.base: departure.latest for departure in going}
            keep_latest(self.files, self.folder, self.view(), removal.before, self._latest_most, known)
        self.notes.move_start(max(removal.before, self.start), [departure.anchor for departure in going], gaps)
        self._remove_files()

    def forgo(self, departures: Sequence[Departure]) -> None:
        """Take back what was staged of segments that stay after all."""
        for each in departures:
            if each.staged is not None:
                self.keys.unstage(each.staged[1])

    def _keep_damage(self, segment: SegmentFile, hole: Hole) -> list[GapRecord]:
        """Keep what can be read of damage in a segment that leaves; give the records that keys go with it."""
        where = segment.where(hole.position)
        self.problems.append(f"{where}: entries {hole.first} to {hole.last} leave without their keys: {hole.why}")
        with contextlib.suppress(OSError):
            data = self.files.read_at(segment.path, hole.position, hole.size_bytes)
            keep_aside(self.files, segment.path, hole.position, data, "damaged")
        gap = GapRecord(hole.first, hole.last, GapReason.DAMAGED, self.clock.now_unix_ms(), f"{where}: {hole.why}")
        spans = uncovered(hole.first, hole.last, self.notes.book.own())
        return [replace(gap, first=first, last=last) for first, last in spans]

    def finish_removal(self) -> None:
        """Remove the files that a crash left behind after the note that they may go."""
        self._remove_files()

    def _remove_files(self) -> None:
        gone = [
            segment
            for segment, following in zip(self.segments, self.segments[1:], strict=False)
            if following.base <= self.start
        ]
        if gone:
            for segment in gone:
                segment.may_leave = True
            self._now_has(self.segments[len(gone) :])
        self._leaving += [segment.path for segment in gone]
        if not self._leaving:
            return
        # That they may go is durable: a file that cannot be removed goes with the next ones, or at the next opening.
        for path in list(self._leaving):
            with contextlib.suppress(OSError):
                self.files.remove(path)
                self._leaving.remove(path)
        self.files.sync_folder(self.folder)

    def forget_keys(self, as_of_unix_ms: int) -> bool:
        """Drop key segments and index runs that were older than the key horizon at a time; tell if there are more."""
        limit = as_of_unix_ms - 1000 * self.policy.key_horizon_seconds
        due = self.notes.keys_beyond(limit)
        if due <= self.notes.keys_start:
            return False
        before = min([due, *(name.last + 1 for name in self.keys.names[_STEP_SEGMENTS - 1 : _STEP_SEGMENTS])])
        before = max(before, self.notes.keys_start)
        self.notes.forget_keys_before(before)
        self.keys.drop_before(before)
        self.index.forget_before(before)
        return before < due

    # Records.

    def add_gaps(self, gaps: Sequence[Gap]) -> None:
        """Record gaps with one sync; those already known are left out."""
        self.notes.add_gaps(gaps)

    def set_aside(self, items: Sequence[Quarantined]) -> None:
        """Keep refused facts durably."""
        self.notes.add_quarantined(items, self.policy.quarantine_bytes)

    def release(self, id_: int, reason: str) -> None:
        """Drop a refused fact, leaving a durable note of it."""
        self.notes.release(id_, reason, self.clock.now_unix_ms())

    # Files.

    def _roll(self) -> None:
        """Begin a new segment; it has its name and header on disk before anything is written to it."""
        base = self.end
        previous = self.segments[-1].base if self.segments else -1
        if self.segments and not self.segments[-1].frames and self.segments[-1].base == base:
            if not self._is_current(self.segments[-1].header):
                self._replace_empty(self.segments[-1])
            return
        header = SegmentHeader(self.log_id, base, previous, self.chain, self.newest_unix_ms, self._schema)
        path, data = f"{self.folder}/{segment_name(base)}", encode_segment_header(header)
        file = self.files.create(path)
        try:
            file.write([data])
        except OSError as error:
            file.close()
            self._unmake(path)
            raise translated(error, f"creating {path}") from None
        try:
            file.sync()
            self.files.sync_folder(self.folder)
        except OSError as error:
            file.close()
            raise self._ended(error, f"creating {path}") from None
        if self._file is not None:
            self._file.close()
        self._file = file
        segment = SegmentFile(self.files, path, replace(header, size_bytes=len(data)), len(data))
        segment.know_empty()
        if self.segments:
            self.segments[-1].let_go()
        self._now_has((*self.segments, segment))

    def _replace_empty(self, old: SegmentFile) -> None:
        """Put a segment in the place of an empty one of an older version; where that fails, all stays as it was."""
        before = old.header.previous_base
        header = SegmentHeader(self.log_id, self.end, before, self.chain, self.newest_unix_ms, self._schema)
        data = encode_segment_header(header)
        write_whole(self.files, old.path, data)
        file = self.files.open_append(old.path)
        if self._file is not None:
            self._file.close()
        self._file = file
        segment = SegmentFile(self.files, old.path, replace(header, size_bytes=len(data)), len(data))
        segment.know_empty()
        self._now_has((*self.segments[:-1], segment))

    def _unmake(self, path: str) -> None:
        """Take the name of a segment back for good: found after a power loss it would say that the log ends here."""
        try:
            self.files.remove(path)
            self.files.sync_folder(self.folder)
        except OSError as error:
            raise self._ended(error, f"undoing {path}") from None

    def _publish_watermark(self) -> None:
        """Tell readers in other processes how far the log is durable."""
        # It is a hint: where it cannot be stored, others see less than there is until the next one.
        with contextlib.suppress(OSError):
            self._watermark.publish(self.end, self.segments[-1].size_bytes if self.segments else 0)

    def close(self) -> None:
        """Release the files."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._watermark.close()
        self.notes.close()
        self.index.close()
