"""What passes between the sender and the receiver of a link: the request, the answer, and the port between them.

`bsfg.journey.serve` makes the answers, `bsfg.journey.pull` judges them; a network client, a queue inside one process
or a simulator stands between the two as a `PeerLink`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bsfg.ports import Confirmation, Frame, GapRecord, GapSet

DETAIL_CHARACTERS_MAX = 500
"""How much of the other side's own words is stored for good."""

_RANGE_BYTES = 64


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What a receiver asks for: how much at most, how long to wait, and which gap records it has already.

    At least one fact is served when there is one, however large. ``gaps_after`` is the `Fetched.gaps_token` of the
    last answer that was stored, empty at first; None leaves it to the sender to keep count. ``after`` names an offset
    through which the receiver has asked for everything already without having confirmed it yet; the sender then goes
    on behind it and moves no cursor. ``sets`` says that the receiver knows sets of ranges: what the link leaves out
    then comes with the entries it lies between (`Frame.skips`), and gap records of other zones as `Fetched.gap_sets`.
    """

    max_facts: int = 10_000
    max_bytes: int = 8 << 20
    wait_seconds: float = 0.0
    gaps_after: str | None = ""
    after: int | None = None
    sets: bool = False


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
        ...

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Ask for what comes next; the sender decides where that starts."""
        ...

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Tell what is durable here and what was refused; give the offset through which the sender counts it."""
        ...


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
        ...

    async def remember(self, position: PeerPosition, settles: Release | None = None) -> None:
        """Keep the position. What was released stays so, whatever the position says, until a call settles just that."""
        ...


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
