"""What passes between the sender and the receiver of a link: what it carries, request, answer, and the port."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import is_in
from bsfg.errors import ConflictingDuplicate, ConsumerRetired, ForeignLog, InvalidArgument
from bsfg.fact import SHA256_NAME, Key, digest_text
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.gaps import RangeSet
from bsfg.ports import Confirmation, ConsumerState, Frame, GapRecord, GapSet, Receipt, Replayable, Result
from bsfg.retention import GapReason
from bsfg.wording import one_line

DETAIL_CHARACTERS_MAX = 500
"""How much of the other side's own words is stored for good."""


def words_of(other: str) -> str:
    """Give the other side's words as they are stored for good: few, and with no character that a storage refuses."""
    return one_line(other[:DETAIL_CHARACTERS_MAX])


_RANGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What a receiver asks for: how much at most, how long to wait, and which gap records it has already.

    At least one fact is served when there is one, however large. ``gaps_after`` is the `Fetched.gaps_token` of the
    last answer that was stored, empty at first; None leaves it to the sender to keep count. ``after`` names an offset
    through which the receiver has asked for everything already without having confirmed it yet; the sender then goes
    on behind it and moves no cursor. ``sets`` says that the receiver knows sets of ranges: what the link leaves out
    then comes with the entries it lies between (`Frame.skips`), and gap records of other zones as `Fetched.gap_sets`.
    ``instance`` is which process asks, where it tells.
    ``filter`` names the facts that are wanted; the rest is left out, and told as such.
    """

    max_facts: int = 10_000
    max_bytes: int = 8 << 20
    wait_seconds: float = 0.0
    gaps_after: str | None = ""
    after: int | None = None
    sets: bool = False
    instance: str = ""
    filter: FactFilter = EVERY_FACT


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a sender answers: the frames from ``start`` on, and what history they belong to.

    ``end`` and ``chain_head`` describe the sender's buffer at that moment. ``gaps`` are gap records that the sender
    itself received from other zones; they have no offsets in its buffer and travel beside the frames, as ``gap_sets``
    to those who know sets. ``served_at_unix_ms`` is the sender's clock at that moment and ``stream`` the stream
    of this log, None from a sender that does not tell it.
    """

    log_id: str
    start: int
    end: int
    chain_head: bytes
    frames: Sequence[Frame] = ()
    gaps: Sequence[GapRecord] = ()
    gaps_token: str = ""
    gap_sets: Sequence[GapSet] = ()
    served_at_unix_ms: int | None = None
    stream: str | None = None

    @property
    def facts(self) -> int:
        """How many facts there are."""
        return sum(len(frame.entries) for frame in self.frames if frame.entries is not None)

    @property
    def weight_bytes(self) -> int:
        """About how many bytes there are to judge or to write."""
        entries = sum(frame.entries.weight_bytes for frame in self.frames if frame.entries is not None)
        skips = sum(len(each.ranges) for frame in self.frames for each in frame.skips)
        ranges = skips + len(self.frames) + len(self.gaps) + sum(len(each.ranges) for each in self.gap_sets)
        return entries + _RANGE_BYTES * ranges


@dataclass(frozen=True, slots=True)
class Refusal:
    """A range that the receiver quarantined, with the error code that says why."""

    first: int
    last: int
    reason: str
    detail: str = ""


def merged_refusals(refusals: Iterable[Refusal]) -> list[Refusal]:
    """Join neighbouring refusals of one reason, in order of offsets."""
    result: list[Refusal] = []
    for refusal in sorted(refusals, key=lambda each: each.first):
        last = result[-1] if result else None
        if last and last.last + 1 == refusal.first and (last.reason, last.detail) == (refusal.reason, refusal.detail):
            result[-1] = Refusal(last.first, refusal.last, last.reason, last.detail)
        else:
            result.append(refusal)
    return result


class PeerLink(Protocol):
    """One consumer's connection to a sender, whoever dialled it.

    ``zone`` is who the other side proved to be. Both calls may fail or be repeated at any moment; what was asked may
    then have happened or not. They raise only `bsfg.errors.BsfgError`.
    """

    @property
    def zone(self) -> str:
        """Who the other side proved to be."""

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Ask for what comes next; the sender decides where that starts."""

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Tell what is durable here and what was refused; give the offset through which the sender counts it."""


@dataclass(frozen=True, slots=True)
class Release:
    """What an operator accepted by releasing a held link: the finding by its code, and the history it was made in.

    ``log_id`` is empty where the finding named none; then the history that the sender shows next is meant.
    """

    code: str
    log_id: str = ""

    def covers(self, code: str, log_id: str) -> bool:
        """Tell whether a finding in a history is the one that was accepted."""
        return self.code == code and self.log_id in ("", log_id)


@dataclass(frozen=True, slots=True)
class PeerPosition:
    """What a receiver remembers of a sender: its history, and from where it may go on.

    None stands for what is not known yet. ``latest_start`` is the highest offset at which an answer can rightly start,
    since everything below it may have been confirmed; what starts later skips something. ``acknowledged`` is the last
    offset of which the sender said that it counts as confirmed; an answer that starts there or before comes from a
    sender that lost history. ``end`` and ``chain_head`` are the sender's own as it last told them, kept as evidence.
    ``suspect`` is an offset whose bytes did not match their digest once. ``released`` is an operator's word about this
    stream that has not been acted upon yet.
    """

    log_id: str | None = None
    latest_start: int | None = None
    acknowledged: int | None = None
    end: int = 0
    chain_head: bytes | None = None
    suspect: int | None = None
    gaps_token: str = ""
    released: Release | None = None


class PeerMemory(Protocol):
    """Where a receiver keeps its `PeerPosition` of one link and stream.

    ``remember`` is called before a confirm is sent, and again when it was answered. After a restart ``recall`` gives
    either the last position or one that knows less (None fields). It never gives an older one: else a sender that goes
    on rightly would look as if it had skipped something.
    """

    async def recall(self) -> PeerPosition:
        """Give the position."""

    async def remember(self, position: PeerPosition, settles: Release | None = None) -> None:
        """Keep the position. What was released stays so, whatever the position says, until a call settles just that."""


class SessionMemory:
    """A `PeerMemory` that lasts as long as the process: enough for tests, simulation and first contact."""

    def __init__(self, position: PeerPosition | None = None) -> None:
        self.position = position or PeerPosition()

    async def recall(self) -> PeerPosition:
        """Give the position."""
        return self.position

    async def remember(self, position: PeerPosition, settles: Release | None = None) -> None:
        """Keep the position."""
        released = self.position.released
        self.position = replace(position, released=None if released == settles else released)


def check_consumer(state: ConsumerState, buffer: Replayable) -> None:
    """Raise unless the consumer is alive and its position belongs to this buffer's history."""
    spec = state.spec
    if state.retired_reason is not None:
        raise ConsumerRetired(f"consumer {spec.name} was retired: {state.retired_reason}", reason=state.retired_reason)
    if (spec.stream, spec.buffer) != (buffer.stream, buffer.buffer):
        raise InvalidArgument(
            f"consumer {spec.name} reads the {spec.buffer} buffer of {spec.stream}, "
            f"not the {buffer.buffer} buffer of {buffer.stream}"
        )
    if state.log_id != buffer.log_id:
        raise ForeignLog(f"consumer {spec.name} stands in log {state.log_id}, this is {buffer.log_id}")


_CARRIED, _OTHER_ZONE, _RETURNING, _NOT_SERVED, _NOT_ASKED_FOR = 0, 1, 2, 3, 4

NOT_CARRIED = "to_zone is not carried by this link"
RETURNING = "returns to its from_zone"
NOT_SERVED = "subject or predicate is not served to this zone"
NOT_ASKED_FOR = "the filter of the receiver leaves it out"
_DETAIL = {
    _OTHER_ZONE: NOT_CARRIED,
    _RETURNING: RETURNING,
    _NOT_SERVED: NOT_SERVED,
    _NOT_ASKED_FOR: NOT_ASKED_FOR,
}


@dataclass(frozen=True, slots=True)
class Carriage:
    """What a link carries: facts for some zones or (None) for all, and none that return to the receiver's zone.

    Of these the facts that the sender serves to the receiver at all, and of those the ones that it ``asked`` for.
    """

    to_zones: frozenset[str] | None = None
    receiver_zone: str | None = None
    served: FactFilter = EVERY_FACT
    asked: FactFilter = EVERY_FACT

    def split(self, frame: Frame) -> Iterator[Frame]:
        """Give a frame as runs of entries that the link carries and gap records for those it leaves out."""
        yield from apart(self.chosen(frame))

    def chosen(self, frame: Frame) -> Frame:
        """Give a frame with the entries that the link carries, and what it leaves out among them as sets."""
        entries = frame.entries
        if entries is None or self == EVERYTHING or (entries.has_rows and self._carries_all(entries)):
            return frame
        verdicts = self._verdicts(entries)
        if not verdicts.any():
            return frame
        # The time of the last fact, not of this answer: a repeated answer is then the same.
        at_unix_ms = int(entries.numbers("appended_at_unix_ms")[-1])
        skips = list(frame.skips)
        for verdict, detail in _DETAIL.items():
            ranges = RangeSet.of_offsets(entries.offsets[verdicts == verdict], at_unix_ms)
            if len(ranges):
                skips.append(GapSet(GapReason.SKIPPED, ranges, detail, None, at_unix_ms))
        carried = np.flatnonzero(verdicts == _CARRIED)
        return Frame(frame.first, frame.last, entries.take(carried) if len(carried) else None, skips=tuple(skips))

    def _carries_all(self, entries: EntryBatch) -> bool:
        if self.served or self.asked:
            return False
        if self.receiver_zone is not None and self.receiver_zone in entries.values("from_zone"):
            return False
        return self.to_zones is None or self.to_zones.issuperset(entries.values("to_zone"))

    def _verdicts(self, entries: EntryBatch) -> np.ndarray:
        verdicts = np.full(len(entries), _CARRIED, dtype=np.int8)
        if self.to_zones is not None:
            verdicts[~is_in(entries.column("to_zone"), self.to_zones)] = _OTHER_ZONE
        if self.receiver_zone is not None:
            verdicts[is_in(entries.column("from_zone"), frozenset({self.receiver_zone}))] = _RETURNING
        for wanted, verdict in ((self.served, _NOT_SERVED), (self.asked, _NOT_ASKED_FOR)):
            if wanted:
                verdicts[(verdicts == _CARRIED) & ~wanted.wanted(entries)] = verdict
        return verdicts


EVERYTHING = Carriage()

Carriages = Callable[[], Carriage]
"""Gives what a link carries at this moment, or raises why it carries nothing any more."""


def carriage_now(carriage: Carriage | Carriages) -> Carriage:
    """Give what a link carries now; what may change while somebody waits or reads is asked for each time."""
    return carriage if isinstance(carriage, Carriage) else carriage()


def apart(frame: Frame) -> Iterator[Frame]:
    """Give a frame as runs of entries and a gap record for each skipped range, for those who know no sets."""
    if not frame.skips:
        yield frame
        return
    gaps = sorted((gap for each in frame.skips for gap in each.records()), key=lambda gap: gap.first)
    at, row = frame.first, 0
    for gap in gaps:
        if gap.first > at:
            yield _run(frame, at, gap.first - 1, row)
            row += gap.first - at
        yield Frame(gap.first, gap.last, gap=gap)
        at = gap.last + 1
    if at <= frame.last:
        yield _run(frame, at, frame.last, row)


def _run(frame: Frame, first: int, last: int, row: int) -> Frame:
    assert frame.entries is not None
    return Frame(first, last, frame.entries.slice(row, last - first + 1))


@dataclass(frozen=True, slots=True)
class AppendedFact:
    """What became of one fact: its result, its offset (of the first, for a repeat or conflict), id and digest."""

    result: Result
    offset: int
    message_id: str
    digest: bytes
    hasher: str = SHA256_NAME

    @property
    def digest_text(self) -> str:
        """The digest as it is written for people: the name of its function, and 64 hexadecimal digits."""
        return digest_text(self.hasher, self.digest)


@dataclass(frozen=True, slots=True)
class AppendOutcome:
    """The answer to a producer, given when everything it names is durable.

    ``facts`` are the rows as they were sealed, ``receipt`` their results as columns; `results` makes objects of them.
    """

    facts: FactBatch
    receipt: Receipt
    hasher: str
    """The function that the digests were made by; a batch is sealed with one."""

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def chain_head(self) -> bytes:
        """The digest of the log's last frame after this append, for producers that keep evidence."""
        return self.receipt.chain_head

    def results(self) -> list[AppendedFact]:
        """Give one result per fact, in the order in which they were sent."""
        columns = (
            self.receipt.results.tolist(),
            self.receipt.offsets.tolist(),
            self.facts.values("message_id"),
            self.facts.digests(),
        )
        rows, hasher = zip(*columns, strict=True), self.hasher
        return [AppendedFact(Result(result), offset, id, digest, hasher) for result, offset, id, digest in rows]

    def conflicts(self) -> list[ConflictingDuplicate]:
        """Give an error for each fact whose id is taken by another body; such a fact was not stored."""
        rows = np.flatnonzero(self.receipt.results == Result.CONFLICT)
        if not len(rows):
            return []
        refused = self.facts.take(rows)
        keys = map(Key, refused.values("from_zone"), refused.values("message_id"))
        return [_conflict(int(row), key, int(self.receipt.offsets[row])) for row, key in zip(rows, keys, strict=True)]


def _conflict(row: int, key: Key, offset: int) -> ConflictingDuplicate:
    return ConflictingDuplicate(
        f"row {row}: message_id {key.message_id!r} of {key.from_zone} is taken by the fact at offset {offset}",
        row=row,
        from_zone=key.from_zone,
        message_id=key.message_id,
        existing_offset=offset,
    )


class Room(Protocol):
    """Where the bytes of an answer are counted, from before they are read until they are sent."""

    async def take(self, size_bytes: int) -> None:
        """Wait for room for so many bytes, in the place of what was taken before."""

    def keep(self, size_bytes: int) -> None:
        """Give back what is not needed after all."""

    def close(self) -> None:
        """Give everything back; repeats are harmless."""
