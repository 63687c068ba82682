"""Carrying the history of a buffer into another storage: its frames as they are, and all that is known beside them.

Frames keep their bytes, so that offsets, times, digests and the chain are the same on both sides, and with them all
that peers remember. What left and is only known by its keys is brought in as frames without content, which then leave
as those did. Every step is a change of the port of frames, made from where the target stands: whoever breaks off goes
on from there, also when the source has moved on meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import orjson
import pyarrow as pa

from bsfg.batch import EntryBatch, FactBatch
from bsfg.digest import KeptRange, KeyHash
from bsfg.errors import LogDamaged, StorageFailed, StorageNotEmpty
from bsfg.gapbook import GapBook
from bsfg.gaps import GapSet, RangeSet
from bsfg.ports import Buffer
from bsfg.sealing import digest_mismatches
from bsfg.stores.shared.frame import Damaged, genesis
from bsfg.stores.shared.judging import KEY_SCHEMA, LOST, as_facts, read_aside
from bsfg.stores.shared.keeper import (
    PAGE_BYTES,
    AsideRow,
    BufferFound,
    BufferHead,
    BufferHistory,
    BufferKeeper,
    Change,
    DepartedRange,
    ForgottenKeys,
    FrameRow,
    NewFrame,
    ReleasedFact,
)
from bsfg.stores.shared.reading import PAGE_FRAMES, chain_behind, entries_in, read_keys

_KEYS_AT_ONCE = 10_000
_ASIDE_AT_ONCE = 256
_NO_KEYS = pa.RecordBatch.from_pylist([], schema=KEY_SCHEMA).serialize().to_pybytes()
_NONE = np.empty(0, dtype=np.int64)
_EVER_UNIX_MS = 1 << 62
_DAMAGED_HINT = (
    "Start the node once more on this storage: what cannot be read becomes a gap record, which is carried along; or "
    "restore the storage from a copy."
)
_AHEAD_HINT = (
    "A node has run on the new storage, this is an older copy of the zone, or the old storage has served since the "
    "migration was begun and let entries go: migrate into an empty place."
)


@dataclass(frozen=True, slots=True)
class HistoryPlace:
    """A buffer of one side: what it is called, and where its history is."""

    stream: str
    kind: Buffer
    history: BufferHistory

    def __str__(self) -> str:
        return f"{self.stream}/{self.kind}"

    def departed(self) -> Iterator[tuple[DepartedRange, bool]]:
        """Give what stays of what left, in order, and whether its keys are still known.

        Keys are forgotten from the oldest on. Those that are missing otherwise are lost, and raise `StorageFailed`:
        what is not known any more would be taken in a second time.
        """
        newest_unix_ms, oldest = 0, _first_with_keys(self.history)
        for kept in self.history.history(())[0]:
            found = [
                each.keys
                for each in self.history.keys_holding(np.array([kept.first], dtype=np.int64))
                if (each.first, each.last) == (kept.first, kept.last)
            ]
            oldest = kept.first if oldest is None and found else oldest
            if not found and oldest is not None and kept.first >= oldest:
                raise StorageFailed(f"{self}: the keys of entries {kept.first} to {kept.last} are lost")
            if found:
                times = read_keys(found[0]).column("appended_at_unix_ms").to_numpy()
                # Of a range whose entries were all damaged no time is known but that of those before it.
                newest_unix_ms = max(newest_unix_ms, int(times.max()) if len(times) else 0)
            yield DepartedRange(kept, newest_unix_ms, found[0] if found else _NO_KEYS), bool(found)

    def sound_frames(self, at: int, chain: bytes) -> Iterator[tuple[FrameRow, EntryBatch]]:
        """Give the frames from an offset on, behind a chain value, every byte checked: frame, chain and digests.

        What is damaged or missing and is not on record as lost raises `LogDamaged`.
        """
        found = self.history.found()
        head, lost = found.head, _lost_in(found.gaps)
        while frames := self.history.frames(at, head.end, PAGE_FRAMES):
            for frame in frames:
                if frame.base > at:
                    self._check_recorded(at, frame.base - 1, lost, head, "no frame holds them")
                    chain = b""
                try:
                    entries = entries_in(frame, found.log_id, self.kind)
                except Damaged as damage:
                    self._check_recorded(frame.base, frame.end - 1, lost, head, str(damage))
                    at, chain = frame.end, b""
                    continue
                if frame.base < at or (chain and frame.chain_before != chain):
                    raise self._damaged(frame.base, frame.end - 1, "they do not follow what is before them")
                at = frame.end
                if len(wrong := digest_mismatches(entries.facts)):
                    bad = frame.base + int(wrong[0])
                    raise self._damaged(bad, bad, "the digest is not that of the fact")
                chain = chain_behind(frame)
                yield frame, entries
        if at < head.end:
            self._check_recorded(at, head.end - 1, lost, head, "no frame holds them")
        elif chain and (at, chain) != (head.end, head.chain):
            raise self._damaged(at, at, "the last frame is not the one that the head of the buffer names")

    def _check_recorded(self, first: int, last: int, lost: RangeSet, head: BufferHead, why: str) -> None:
        first = max(first, head.start)
        if first <= last and not lost.cover(RangeSet.of([(first, last)], 0))[0]:
            raise self._damaged(first, last, why)

    def _damaged(self, first: int, last: int, why: str) -> LogDamaged:
        says = f"{self}: entries {first} to {last} are not what was stored, and not on record as lost: {why}"
        return LogDamaged(says, hint=_DAMAGED_HINT, first=first, last=last)


def _first_with_keys(history: BufferHistory) -> int | None:
    """Give where the first range begins that must have its keys, where that is known beside them."""
    found = history.oldest_keys(_EVER_UNIX_MS) if isinstance(history, BufferKeeper) else None
    return found.first if found is not None else None


def _lost_in(gaps: Sequence[GapSet]) -> RangeSet:
    own = [gap.ranges for gap in gaps if gap.origin_zone is None and gap.reason in LOST]
    return RangeSet.union(own) if own else RangeSet.empty()


def _hashes_of(hasher: KeyHash, facts: FactBatch) -> np.ndarray:
    return hasher.of(facts.column("from_zone"), facts.column("message_id")).astype(np.int64)


@dataclass(slots=True)
class HistoryCopy:
    """Brings the history of a buffer into another storage, from wherever an earlier attempt has ended."""

    source: HistoryPlace
    target: HistoryPlace
    copied: Callable[[int], None] = lambda size_bytes: None
    """Told the bytes that were just dealt with."""
    artifacts: set[str] = field(default_factory=set)
    """The digests of the artifacts that facts name, as far as they were seen."""
    _head: BufferHead = field(init=False)
    _hasher: KeyHash = field(init=False)

    def run(self) -> None:
        """Carry everything, and leave the target where the source stands."""
        found, there = self.source.history.found(), self.target.history.found()
        if there.log_id != found.log_id or there.head.end > found.head.end:
            says = f"{self.target} of the new storage holds another history, up to {there.head.end}"
            raise StorageNotEmpty(says, hint=_AHEAD_HINT)
        self._head, self._hasher = there.head, KeyHash(there.secret)
        self._carry_departed()
        self._carry_frames()
        self._carry_records(found)
        source, head = found.head, self._head
        self._commit(source._replace(used_bytes=head.used_bytes, keys=head.keys))

    def _commit(self, after: BufferHead | None = None, **what: object) -> None:
        """Make a step; one that changes nothing is none."""
        if after is not None and after == self._head and not what:
            return
        change = Change(self._head, after or self._head, **what)  # type: ignore[arg-type]
        if not self.target.history.commit(change):
            raise StorageFailed(f"{self.target}: a step of the migration was not made")
        self._head = change.after

    # What left.

    def _carry_departed(self) -> None:
        known = {kept.first: kept for kept in self.target.history.history(())[0]}
        for left, has_keys in self.source.departed():
            there = known.pop(left.kept.first, None)
            if there is None:
                self._depart(left, has_keys)
            elif there != left.kept:
                raise self._differs(left.kept)
            elif not has_keys:
                self._forget(left.kept)
        for kept in known.values():
            raise self._differs(kept)

    def _differs(self, kept: KeptRange) -> StorageNotEmpty:
        says = f"{self.target} of the new storage tells something else of entries {kept.first} to {kept.last}"
        return StorageNotEmpty(says, hint=_AHEAD_HINT)

    def _depart(self, left: DepartedRange, has_keys: bool) -> None:
        """Know the keys of a range, if they are known, and let it leave; frames that were brought before go with it."""
        kept, dropped = left.kept, 0
        if self._head.end > kept.first:
            dropped = sum(len(frame.content) for frame in self._there(kept.first, kept.last + 1))
        if has_keys:
            self._know(read_keys(left.keys), left.newest_unix_ms)
        head, end = self._head, kept.last + 1
        after = BufferHead(
            max(head.start, end),
            max(head.end, end),
            head.used_bytes - dropped,
            head.keys,
            max(head.newest_unix_ms, left.newest_unix_ms),
            kept.chain_after if head.end <= end else head.chain,
        )
        forgotten = None if has_keys else ForgottenKeys(kept.first, _NONE, _NONE)
        self._commit(after, departed=left, forgotten=forgotten)
        self.copied(len(left.keys))

    def _there(self, at: int, until: int) -> Iterator[FrameRow]:
        """Give the frames of the target between two offsets."""
        while frames := self.target.history.frames(at, until, PAGE_FRAMES):
            yield from frames
            at = frames[-1].end

    def _know(self, keys: pa.RecordBatch, newest_unix_ms: int) -> None:
        """Bring in keys that follow what is there, by frames without content: a key is known by the frame it came in.

        They are gone again with the next step. A frame holds offsets that follow each other, so that there is one for
        every run of them.
        """
        keys = keys.filter(pa.array(keys.column("offset").to_numpy() >= self._head.end))
        offsets, hashes = keys.column("offset").to_numpy(), _hashes_of(self._hasher, as_facts(keys))
        edges = np.flatnonzero(np.diff(offsets) != 1) + 1
        for run, hashed in zip(np.split(offsets, edges), np.split(hashes, edges), strict=True):
            for at in range(0, len(run), _KEYS_AT_ONCE):
                some = run[at : at + _KEYS_AT_ONCE]
                base, count = int(some[0]), len(some)
                self._commit(self._head._replace(end=base))
                head = self._head
                at_unix_ms = max(head.newest_unix_ms, newest_unix_ms)
                after = head._replace(end=base + count, keys=head.keys + count, newest_unix_ms=at_unix_ms)
                row = FrameRow(base, count, at_unix_ms, head.chain, b"")
                self._commit(after, frame=NewFrame(row, hashed[at : at + _KEYS_AT_ONCE], some))

    def _forget(self, kept: KeptRange) -> None:
        """Forget the keys of a range that were brought before and that the source has forgotten since."""
        for there in self.target.history.keys_holding(np.array([kept.first], dtype=np.int64)):
            if there.first != kept.first:
                continue
            keys = read_keys(there.keys)
            offsets, hashes = keys.column("offset").to_numpy(), _hashes_of(self._hasher, as_facts(keys))
            after = self._head._replace(keys=self._head.keys - len(offsets))
            self._commit(after, forgotten=ForgottenKeys(kept.first, hashes, offsets))

    # What is retained.

    def _carry_frames(self) -> None:
        begun = self._head.end
        # Facts that were carried before name artifacts, too.
        for frame, entries in self.source.sound_frames(*_beginning(self.source)):
            self._name_artifacts(entries.facts)
            self.copied(len(frame.content))
            if frame.end > begun:
                self._append(frame, entries)

    def _append(self, frame: FrameRow, entries: EntryBatch) -> None:
        self._commit(self._head._replace(end=frame.base))
        head = self._head
        after = BufferHead(
            head.start,
            frame.end,
            head.used_bytes + len(frame.content),
            head.keys + frame.count,
            frame.appended_at_unix_ms,
            chain_behind(frame),
        )
        hashes = _hashes_of(self._hasher, entries.facts)
        order = np.argsort(hashes, kind="stable")
        self._commit(after, frame=NewFrame(frame, hashes[order], np.arange(frame.base, frame.end)[order]))

    def _name_artifacts(self, facts: FactBatch) -> None:
        named = facts.column("artifact_digest")
        if named.null_count < len(named):
            self.artifacts.update(named.drop_null().to_pylist())

    # What is on record.

    def _carry_records(self, found: BufferFound) -> None:
        there = self.target.history.found()
        if _said(there.gaps) != _said(found.gaps):
            self._commit(gaps=found.gaps, gaps_anew=True)
        latest = self.source.history.latest()
        if latest is not None and latest != self.target.history.latest():
            self._commit(latest=latest)
        if latest is not None:
            self._name_artifacts(EntryBatch.from_ipc(latest))
        self._carry_aside(found.aside_last_id, there.aside_last_id)

    def _carry_aside(self, last_id: int, known_last_id: int) -> None:
        there = {row.id for row in _aside_of(self.target)}
        fresh: list[AsideRow] = []
        size_bytes = 0
        for row in _aside_of(self.source):
            self._name_artifacts(read_aside(orjson.loads(row.head), row.fact).facts)
            if row.id in there:
                there.remove(row.id)
                continue
            fresh.append(row)
            size_bytes += row.size_bytes
            if size_bytes >= PAGE_BYTES:
                self._commit(aside=fresh)
                fresh, size_bytes = [], 0
        if last_id > max([known_last_id, *(row.id for row in fresh)]):
            # No id is given twice, also not that of a fact that was released: it is known by one that is, too.
            fresh.append(AsideRow(last_id, 0, "{}", b""))
            there.add(last_id)
        if fresh:
            self._commit(aside=fresh)
        for id_ in sorted(there):
            self._commit(released=ReleasedFact(id_, "released before the migration", 0))


def _beginning(place: HistoryPlace) -> tuple[int, bytes]:
    """Give the offset and the chain value behind all that left."""
    kept = place.history.history(())[0]
    return (kept[-1].last + 1, kept[-1].chain_after) if kept else (0, genesis(place.history.found().log_id))


def _aside_of(place: HistoryPlace) -> Iterator[AsideRow]:
    after: int | None = None
    while rows := place.history.aside(after, _ASIDE_AT_ONCE):
        yield from rows
        after = rows[-1].id


def _said(gaps: Sequence[GapSet]) -> list[tuple[str, str, str, int, bytes]]:
    """Give gap records in one form, however many steps they were recorded in."""
    book = GapBook()
    book.take_in(*gaps)
    return sorted(
        (str(gap.reason), gap.detail, gap.origin_zone or "", gap.since_unix_ms, gap.ranges.encode())
        for gap in book.sets()
    )


@dataclass(frozen=True, slots=True)
class HistoryDigest:
    """What a buffer holds, in numbers and in one digest over every byte of it."""

    log_id: str
    start: int
    end: int
    chain_head: str
    facts: int
    frames: int
    keys: int
    """Of facts that left, and whose repeats are known."""
    gaps: int
    quarantined: int
    digest: str


def digest_of(place: HistoryPlace, looked_at: Callable[[int], None] = lambda size_bytes: None) -> HistoryDigest:
    """Read all of a buffer, and hold it against its own chain and digests.

    Two storages that give the same digest have the same history: offsets, frames, what stays of what left, gap records,
    refused facts, and the newest of what left. Raises `LogDamaged`, and `StorageFailed` where a key is not known.
    """
    history = place.history
    found = history.found()
    sums, head = hashlib.sha256(), found.head
    hasher, knows = KeyHash(found.secret), history if isinstance(history, BufferKeeper) else None

    def say(*parts: object) -> None:
        sums.update(orjson.dumps([part.hex() if isinstance(part, bytes) else part for part in parts]) + b"\n")

    def check_known(facts: FactBatch, offsets: np.ndarray) -> None:
        if knows is None or not len(offsets):
            return
        hashes = _hashes_of(hasher, facts)
        known = {(hashed, at) for hashed, at in knows.known(np.unique(hashes)).tolist()}
        if any(pair not in known for pair in zip(hashes.tolist(), offsets.tolist(), strict=True)):
            raise StorageFailed(f"{place}: a key of entries {offsets[0]} to {offsets[-1]} is not known")

    say("log", found.log_id, head.start, head.end, head.newest_unix_ms, head.chain)
    keys_of_gone = facts = frames = 0
    for left, has_keys in place.departed():
        keys = read_keys(left.keys)
        offsets = keys.column("offset").to_numpy()
        kept = left.kept
        say("left", kept.first, kept.last, kept.range_digest, kept.chain_before, kept.chain_after, has_keys)
        sums.update(_rows_digest(keys))
        check_known(as_facts(keys), offsets)
        keys_of_gone += len(offsets)
        looked_at(len(left.keys))
    for frame, entries in place.sound_frames(*_beginning(place)):
        say("frame", frame.base, frame.count, frame.appended_at_unix_ms, frame.chain_before)
        sums.update(hashlib.sha256(frame.content).digest())
        check_known(entries.facts, np.arange(frame.base, frame.end))
        facts, frames = facts + max(0, frame.end - max(frame.base, head.start)), frames + 1
        looked_at(len(frame.content))
    gaps = _said(found.gaps)
    for gap in gaps:
        say("gap", *gap)
    refused = 0
    for row in _aside_of(place):
        said = orjson.loads(row.head)
        say("aside", row.id, sorted(said.items()), _rows_digest(read_aside(said, row.fact).facts.record_batch))
        refused += 1
    say("last refused", found.aside_last_id)
    if (latest := history.latest()) is not None:
        say("latest")
        sums.update(_rows_digest(EntryBatch.from_ipc(latest).record_batch))
    ranges = sum(RangeSet.counted(gap[-1]) for gap in gaps)
    numbers = (facts, frames, keys_of_gone, ranges, refused)
    return HistoryDigest(found.log_id.hex(), head.start, head.end, head.chain.hex(), *numbers, sums.hexdigest())


def _rows_digest(batch: pa.RecordBatch) -> bytes:
    """Give a digest of what rows say, however their arrays lie in memory."""
    sums = hashlib.sha256()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        sums.update(f"{name}\n".encode())
        for value in column.to_pylist():
            sums.update(repr(value).encode() + b"\n")
    return sums.digest()


def first_difference(source: HistoryDigest, target: HistoryDigest) -> str | None:
    """Say in which respect two histories differ; None when they are the same."""
    if source.digest == target.digest:
        return None
    names = list(takewhile(lambda name: name != "digest", source.__slots__))
    return next((name for name in names if getattr(source, name) != getattr(target, name)), "content")
