"""The hash chains: whether every frame of a log is followed by the one that was written after it.

Segments are verified side by side; what one ends with, the next must begin with. Over the wire frames are made anew, so
only a data folder can be verified like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bsfg.spark.audit.ends import FolderEnd
from bsfg.spark.audit.evidence import Evidence
from bsfg.spark.audit.scope import RECEIVER
from bsfg.spark.audit.verdict import Finding, Kind
from bsfg.stores.log.frame import genesis
from bsfg.stores.log.segments import scan_segment


@dataclass(frozen=True, slots=True)
class SegmentChain:
    """What was found in one segment; ``heads`` are the chain values that were looked for, with the offset they precede.

    ``chain_after`` is empty when damage at the end hides it.
    """

    base: int
    end: int
    chain_before: bytes
    chain_after: bytes
    breaks: tuple[tuple[int, int], ...] = ()
    heads: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verifying:
    """Verifies the chain inside one segment."""

    log: FolderEnd
    base: int
    heads: tuple[bytes, ...] = ()

    def __call__(self) -> SegmentChain | None:
        """Do it, in whichever process this is; None when the segment has been truncated meanwhile."""
        view = self.log.folder().view()
        segment = next((each for each in view.segments if each.base == self.base), None)
        try:
            data = bytes(segment.files.read(segment.path)) if segment is not None else b""
        except FileNotFoundError:
            segment = None
        if segment is None:
            return None
        scan = scan_segment(data, segment.header, tail_may_be_torn=segment is view.segments[-1])
        scan.forget_from(view.end)
        values = [(ref.header.chain_before, ref.base) for ref in scan.frames]
        values += [(segment.header.chain_before, segment.base), (scan.chain, max(scan.end, segment.base))]
        return SegmentChain(
            segment.base,
            max(scan.end, segment.base),
            segment.header.chain_before,
            scan.chain,
            tuple((hole.first, hole.last) for hole in scan.holes if "chain" in hole.why),
            {value: offset for value, offset in values if value in self.heads},
        )


def segments_of(log: FolderEnd) -> list[int]:
    """Give the bases of the segments that a log consists of now."""
    view = log.folder().view()
    return [segment.base for segment in view.segments]


def broken(side: str, evidence: Evidence, segments: Sequence[SegmentChain]) -> list[Finding]:
    """Find where the chain of a log does not go on."""
    found = []
    before = _anchored(evidence, segments[0].base) if segments else b""
    for segment in segments:
        if before and segment.chain_before != before:
            detail = f"the segment that begins at {segment.base} does not follow the one before it"
            found.append(_break(side, segment.base, segment.base, detail))
        for first, last in segment.breaks:
            found.append(_break(side, first, last, "the frame before was replaced"))
        before = segment.chain_after
    return found


def _anchored(evidence: Evidence, base: int) -> bytes:
    """Give the chain value that the first segment must begin with, empty when it is not known."""
    if base == 0:
        # A restored log goes on from the chain of the one that it was until then.
        oldest = next((each.was_log_id for each in evidence.restores if each.first > 0), evidence.log_id)
        return genesis(bytes.fromhex(oldest))
    return next((kept.chain_after for kept in evidence.kept if kept.last + 1 == base), b"")


def _break(side: str, first: int, last: int, detail: str) -> Finding:
    if side == RECEIVER:
        return Finding(Kind.CHAIN_BROKEN, side, receiver_offset=first, detail=f"{first} to {last}: {detail}")
    return Finding(Kind.CHAIN_BROKEN, side, first, last, detail=detail)


def known_heads(
    evidence: Evidence, segments: Sequence[SegmentChain], heads: Sequence[bytes]
) -> dict[bytes, int | None]:
    """Say for each head where the log had it, None when it is nowhere in what is left of the log."""
    found: dict[bytes, int | None] = dict.fromkeys(heads)
    for kept in evidence.kept:
        for value, offset in ((kept.chain_before, kept.first), (kept.chain_after, kept.last + 1)):
            if value in found:
                found[value] = offset
    for segment in segments:
        found.update(segment.heads)
    return found
