"""One stream of a link under audit: planned from a configuration or two folders, both ends at one moment."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bsfg.errors import FrameInvalid, InvalidArgument
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.journey.sums import NO_END, RANGE_FACTS, RECEIVER, SENDER, AuditScope, received
from bsfg.ports import Buffer, GapRecord
from bsfg.spark.audit.ends import FolderEnd, NodeEnd
from bsfg.spark.audit.judging import Excuses, Totals, for_absent, let_go_before, told_gaps, totals
from bsfg.spark.audit.runner import Runner
from bsfg.spark.audit.scope import End, Evidence, Sibling, Summing
from bsfg.spark.calls import NodeAccess
from bsfg.stores.log.reader import LogFolder, open_folder

if TYPE_CHECKING:
    from bsfg.config import Link, ZoneConfig


_LOOK_FACTS = 1_000


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the receiver's log to be read (``end`` exclusive), and the lowest offset that the log has at all."""

    first: int
    end: int
    lowest: int | None = None


def window_of(log: End, evidence: Evidence, scope: AuditScope) -> Window:
    """Find the part of a receiver's log that holds the window of a scope."""
    if scope.first == 0 and scope.end == NO_END:
        return Window(evidence.start, evidence.end)
    looking = _Looking(log, evidence, replace(scope, first=0, end=NO_END))
    begin = looking.first_from(evidence.start)
    first = looking.place_of(scope.first)
    end = evidence.end if scope.end == NO_END else looking.place_of(scope.end)
    return Window(first, end, begin[1] if begin is not None else None)


@dataclass(frozen=True, slots=True)
class _Looking:
    log: End
    evidence: Evidence
    scope: AuditScope

    def place_of(self, offset: int) -> int:
        """Give the first place from which on no entry of the link has a lower offset."""
        low, high = self.evidence.start, self.evidence.end
        while low < high:
            middle = (low + high) // 2
            found = self.first_from(middle)
            if found is None or found[1] >= offset:
                high = middle
            else:
                low = found[0] + 1
        return low

    def left(self) -> tuple[int, int | None]:
        """Give before which place the log has let go what it had, 0 for none, and the lowest offset that is left."""
        gaps = list[GapRecord]()
        found = self.first_from(self.evidence.start, gaps)
        return let_go_before(gaps), None if found is None else found[1]

    def first_from(self, place: int, gaps: list[GapRecord] | None = None) -> tuple[int, int] | None:
        """Give place and offset of the first entry of the link at a place or after it, and what is gone before it."""
        size = _LOOK_FACTS
        while place < self.evidence.end:
            stop = min(place + size, self.evidence.end)
            for frame in self.log.frames(place, stop, self.evidence.log_id):
                if frame.entries is not None:
                    rows = received(frame.entries, self.scope)
                    if len(rows):
                        return int(rows.places[0]), int(rows.offsets[0])
                elif frame.gap is not None and gaps is not None:
                    gaps.append(frame.gap)
            place, size = stop, 2 * size
        return None


STRETCH_RANGES = 4
"""How many ranges one task reads."""

RANGES_MAX = 1 << 22
"""More ranges are not audited at once: each has its place in the verdict."""


@dataclass(frozen=True, slots=True)
class AuditedStream:
    """One stream of a link that is to be audited: both ends, and what the link carries.

    ``first`` and ``last`` bound the sender's offsets, both inclusive. ``sibling`` is the sender's other buffer, when
    another link of the receiver pulls that. The other words are those of `AuditScope`.
    """

    stream: str
    sender: End
    receiver: End
    zone: str
    receiver_zone: str | None = None
    carry_only: frozenset[str] = frozenset()
    relayed: bool = False
    sibling: End | None = None
    first: int = 0
    last: int | None = None
    deep: bool = True
    range_facts: int = RANGE_FACTS
    asked: FactFilter = EVERY_FACT

    def scope(self) -> AuditScope:
        """Give what is compared, with a secret of its own."""
        end = NO_END if self.last is None else self.last + 1
        return AuditScope(
            self.zone,
            secrets.token_bytes(32),
            self.first,
            end,
            self.receiver_zone,
            self.carry_only,
            self.relayed,
            self.sibling is not None,
            self.range_facts,
            self.deep,
            self.asked,
        )


@dataclass(frozen=True, slots=True)
class AuditedLink:
    """A link that is to be audited: its name, its two zones, and the streams."""

    link: str
    sender_zone: str
    receiver_zone: str
    streams: Sequence[AuditedStream]


@dataclass(frozen=True, slots=True)
class Case:
    """What everything after the first pass goes by.

    ``repeated`` are hashed keys that the receiver has more than once. ``frontier`` is the last offset that the receiver
    must have, ``excuses`` say what it may lack all the same, and ``end`` is where the sender's part of it ends.
    ``lowest`` is the lowest of the sender's offsets that the receiver has, inside the window or before it.
    """

    plan: AuditedStream
    scope: AuditScope
    sender: Evidence
    receiver: Evidence
    totals: Totals
    repeated: np.ndarray
    frontier: int
    excuses: Excuses
    end: int
    lowest: int | None = None
    sibling: Sibling | None = None

    def side(self, side: str) -> tuple[End, Evidence]:
        """Give one end and its evidence."""
        return (self.plan.sender, self.sender) if side == SENDER else (self.plan.receiver, self.receiver)

    def heads(self, side: str) -> tuple[bytes, ...]:
        """Give the chain heads that one end told the other, so that its log must have them."""
        return self.receiver.told_by_sender if side == SENDER else self.sender.told_by_receiver


def open_case(plan: AuditedStream, runner: Runner) -> Case:
    """Look at both ends and read both logs once."""
    sender, receiver = _look(plan)
    scope = plan.scope()
    end = max(plan.first, min(scope.end, sender.end))
    _check_extent(plan.sender, sender, (scope.first, end), scope)
    _check_extent(plan.receiver, receiver, (receiver.start, receiver.end), scope)
    window = window_of(plan.receiver, receiver, scope)
    # One of each end in turn: where nodes sum up, both have something to do.
    pairs = zip_longest(
        stretches(SENDER, plan.sender, sender, (scope.first, end), scope),
        stretches(RECEIVER, plan.receiver, receiver, (window.first, window.end), scope),
    )
    steps = [step for pair in pairs for step in pair if step is not None]
    title = f"{plan.stream}: reading both ends"
    results, repeated = runner.each_with_keys(title, steps, window.end - window.first)
    found = totals(part for parts in results for part in parts)
    lowest = min((each for each in (found.lowest, window.lowest) if each is not None), default=None)
    if (scope.first, scope.end) != (0, NO_END) or let_go_before(found.gaps(RECEIVER)):
        # What was lowest when it was read may have left with what came behind it.
        gone, left = _Looking(plan.receiver, receiver, replace(scope, first=0, end=NO_END)).left()
        if gone:
            receiver, lowest = replace(receiver, start=max(receiver.start, gone)), left
    frontier = _must_have(sender, receiver, found, scope)
    excuses = for_absent(scope, sender, receiver, frontier, lowest)
    sibling = None
    if plan.sibling is not None:
        evidence = plan.sibling.evidence()
        sibling = Sibling(plan.sibling, evidence.log_id, evidence.end)
    return Case(plan, scope, sender, receiver, found, repeated, frontier, excuses, end, lowest, sibling)


def _look(plan: AuditedStream) -> tuple[Evidence, Evidence]:
    """Look at both ends, what is confirmed first and what there is to confirm last, so that neither seems behind."""
    before = plan.sender.evidence()
    receiver = plan.receiver.evidence(before.told_by_receiver)
    return replace(plan.sender.evidence(receiver.told_by_sender), cursor=before.cursor), receiver


def _check_extent(log: End, evidence: Evidence, bounds: tuple[int, int], scope: AuditScope) -> None:
    """Raise unless a log begins and ends where one can, and what is to be audited of it is not endless."""
    start, end = evidence.start, evidence.end
    if not 0 <= start <= end < NO_END:
        raise FrameInvalid(f"{log.name} says that its log goes from {start} to {end}")
    if (bounds[1] - bounds[0]) // scope.range_facts > RANGES_MAX:
        most = f"one audit takes {RANGES_MAX * scope.range_facts:,}"
        hint = "Audit it part by part, with --from and --to."
        raise InvalidArgument(f"{log.name} has {bounds[1] - bounds[0]:,} offsets, {most}", hint=hint)


def stretches(side: str, log: End, evidence: Evidence, bounds: tuple[int, int], scope: AuditScope) -> Iterator[Summing]:
    """Cut what is to be read of a log into steps; what it has let go is one step, since there is nothing to read."""
    first, end = bounds
    cuts = list(range(max(first, evidence.start), end, STRETCH_RANGES * scope.range_facts))
    if first < min(evidence.start, end):
        cuts = [first, *cuts]
    for start, stop in zip(cuts, [*cuts[1:], end], strict=True) if cuts else ():
        yield Summing(side, log, evidence.log_id, start, stop, scope)


def _must_have(sender: Evidence, receiver: Evidence, found: Totals, scope: AuditScope) -> int:
    """Give the last offset that the receiver must have: what was confirmed, or else the last that it has.

    While facts are on their way, a fact can be there already and the record of a refused one before it not yet.
    """
    position, cursor = receiver.position, sender.cursor
    known = [cursor.checkpoint.committed] if cursor is not None else []
    if position is not None and position.acknowledged is not None and position.log_id == sender.log_id:
        known.append(position.acknowledged)
    if known:
        return max(known)
    told = [gap.last for gap in told_gaps(scope, receiver)]
    return max([-1 if found.highest is None else found.highest, *told])


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be audited of a link: some of its streams, some of its offsets (both ends inclusive), how deeply.

    With folders, the ends are read from there instead of from the nodes. ``deep`` says of bodies at nodes that they are
    read and hashed here (True), hashed by the nodes themselves (None), or not hashed again (False). Those in folders
    are hashed here unless it is False.
    """

    streams: Sequence[str] = ()
    first: int = 0
    last: int | None = None
    deep: bool | None = None
    sender: Path | None = None
    receiver: Path | None = None
    shipped: bool = False

    def __post_init__(self) -> None:
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise InvalidArgument(f"{self.first} to {self.last} is not a range of offsets")


def plan_link(config: ZoneConfig, name: str | None, own: NodeAccess | None, wish: Wish) -> AuditedLink:
    """Plan the audit of a link of a zone; ``own`` calls the zone's node, None when its folder is read."""
    link = _chosen(config, name)
    known = config.streams_of(link)
    streams = [_known(stream, known, link.name) for stream in wish.streams] or list(known)
    return AuditedLink(
        link.name,
        link.zone,
        config.zone.name,
        [_stream(config, link, stream, own, wish) for stream in streams],
    )


def _chosen(config: ZoneConfig, name: str | None) -> Link:
    names = ", ".join(config.links) or "none"
    if name is None and len(config.links) == 1:
        return next(iter(config.links.values()))
    if name is None:
        raise InvalidArgument("which link is not said", hint=f"Give --link; {config.source} has {names}.")
    if name not in config.links:
        raise InvalidArgument(f"{config.source} has no link {name!r}", hint=f"There are {names}.")
    return config.links[name]


def _known(stream: str, known: Sequence[str], where: str) -> str:
    if stream not in known:
        hint = f"There are {', '.join(known) or 'none'}."
        raise InvalidArgument(f"{where} has no stream {stream!r}", hint=hint)
    return stream


def _stream(config: ZoneConfig, link: Link, stream: str, own: NodeAccess | None, wish: Wish) -> AuditedStream:
    other = Buffer.STORE if link.buffer == Buffer.FORWARD else Buffer.FORWARD
    shared = any(
        each.zone == link.zone and each.buffer == other and stream in config.streams_of(each)
        for each in config.links.values()
    )
    return AuditedStream(
        stream,
        _sender(config, link, stream, link.buffer, wish),
        _receiver(link, stream, own, wish),
        link.zone,
        config.zone.name,
        frozenset(link.carry_only),
        link.buffer == Buffer.FORWARD,
        _sender(config, link, stream, other, wish) if shared else None,
        wish.first,
        wish.last,
        wish.deep is not False,
        asked=link.filter,
    )


def _sender(config: ZoneConfig, link: Link, stream: str, buffer: Buffer, wish: Wish) -> End:
    from bsfg.config.access import consumer_name
    from bsfg.spark.replicate.plan import peer_access

    consumer = consumer_name(config.zone.name, stream, buffer)
    if wish.sender is not None:
        return FolderEnd(str(wish.sender.absolute()), stream, buffer, consumer=consumer)
    access, deep = peer_access(config, link), wish.deep is True
    shipped = access.with_contents() if wish.shipped else access
    return NodeEnd(shipped, stream, buffer, consumer=consumer, reads_all=deep)


def _receiver(link: Link, stream: str, own: NodeAccess | None, wish: Wish) -> End:
    if wish.receiver is not None:
        return FolderEnd(str(wish.receiver.absolute()), stream, Buffer.FORWARD, link=link.name)
    assert own is not None
    shipped = own.with_contents() if wish.shipped else own
    return NodeEnd(shipped, stream, Buffer.FORWARD, link=link.name, reads_all=wish.deep is True)


@dataclass(frozen=True, slots=True)
class Folders:
    """Two data folders without a configuration: whose they are, and which of the sender's buffers was pulled."""

    sender: Path
    receiver: Path
    zone: str | None = None
    receiver_zone: str | None = None
    buffer: Buffer = Buffer.STORE


def plan_folders(folders: Folders, wish: Wish) -> AuditedLink:
    """Plan the audit of two folders; all streams that both have are meant unless some are named."""
    mine = {log.stream: log for log in open_folder(folders.receiver) if log.buffer == Buffer.FORWARD}
    theirs = [log.stream for log in open_folder(folders.sender) if log.buffer == folders.buffer]
    known = [stream for stream in theirs if stream in mine]
    streams = [_known(stream, known, "the pair of folders") for stream in wish.streams] or known
    if not streams:
        raise InvalidArgument(f"no stream has a {folders.buffer} buffer in {folders.sender} and is forwarded to")
    zone = folders.zone or _only_origin([mine[stream] for stream in streams])
    plans = [
        AuditedStream(
            stream,
            FolderEnd(str(folders.sender.absolute()), stream, folders.buffer),
            FolderEnd(str(folders.receiver.absolute()), stream, Buffer.FORWARD),
            zone,
            folders.receiver_zone,
            relayed=folders.buffer == Buffer.FORWARD,
            first=wish.first,
            last=wish.last,
            deep=wish.deep is not False,
        )
        for stream in streams
    ]
    return AuditedLink(f"{folders.sender.name} to {folders.receiver.name}", zone, folders.receiver_zone or "", plans)


def _only_origin(logs: Sequence[LogFolder]) -> str:
    """Find out whose facts a folder holds, when they are all of one zone as far as the first of them tell."""
    zones: set[str] = set()
    for log in logs:
        for frame in log.frames():
            if frame.entries is not None:
                zones |= {zone for zone in frame.entries.column("origin_zone").unique().to_pylist() if zone}
                break
    if len(zones) == 1:
        return zones.pop()
    found = f"it holds facts from {', '.join(sorted(zones))}" if zones else "it holds no facts"
    raise InvalidArgument(
        f"whose folder the sender's is cannot be told from the receiver's: {found}", hint="Give --zone."
    )
