"""Sets of ranges on the wire: frames with what was left out among their entries, evidence, and who knows no sets."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.conftest import Sites
from tests.wire.site import STREAM

from bsfg.batch import EntryBatch
from bsfg.clock import SystemClock
from bsfg.errors import FrameInvalid
from bsfg.gaps import RANGES_TOLD_MAX, GapRecord, GapSet, RangeSet, listed
from bsfg.journey.link import NOT_CARRIED, Carriage, Fetched, SessionMemory, apart
from bsfg.journey.pull import Flow
from bsfg.journey.receive import LinkRules
from bsfg.node.server import put_call
from bsfg.ports import Buffer, Frame
from bsfg.retention import GapReason
from bsfg.stores.memory import MemoryStorage
from bsfg.testing.facts import message, sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import ClientLink
from bsfg.wire.convert import GAPS_AT_ONCE, LogEvidence, evidence_of, evidence_pieces, gap_set_message, gap_set_of
from bsfg.wire.frames import frame_messages, frames_response, read_frame, read_head


def entries(zones: list[str], first: int) -> EntryBatch:
    """Make entries for zones, at consecutive offsets."""
    facts = sealed([message(f"m-{at}", "x" * (at % 50), to_zone=zone) for at, zone in enumerate(zones)])
    return EntryBatch.of(facts.record_batch, np.arange(first, first + len(zones)), 1_000)


def chosen(zones: list[str], first: int) -> Frame:
    """Give what a link for the zone ``a`` makes of entries."""
    return Carriage(frozenset({"a"})).chosen(Frame(first, first + len(zones) - 1, entries(zones, first)))


ZONES = st.lists(st.sampled_from(["a", "a", "b"]), min_size=1, max_size=40)


def shape(frame: Frame) -> tuple[int, int, list[int], list[tuple[int, int]]]:
    """Say of a frame which offsets it brings and which it leaves out."""
    left_out = [(gap.first, gap.last) for each in frame.skips for gap in each.records()]
    brought = [] if frame.entries is None else frame.entries.offsets.tolist()
    return frame.first, frame.last, brought, left_out + ([(frame.gap.first, frame.gap.last)] if frame.gap else [])


@given(ZONES, st.integers(0, 1 << 40), st.integers(1, 4_000))
def test_a_frame_with_skips_travels_whole_or_in_pieces(zones: list[str], first: int, max_bytes: int) -> None:
    """However small the pieces, they follow each other and bring what the frame brings, and leave out what it does."""
    frame = chosen(zones, first)

    async def sent() -> list[Frame]:
        messages = [each async for each in frame_messages(frame, max_bytes)]
        return [read_frame(pb.FetchFrame.FromString(m) if isinstance(m, bytes) else m) for m in messages]

    pieces = [shape(piece) for piece in asyncio.run(sent())]
    assert [piece[0] for piece in pieces] == [first, *(piece[1] + 1 for piece in pieces[:-1])]
    assert pieces[-1][1] == frame.last
    brought = [offset for piece in pieces for offset in piece[2]]
    left_out = {offset for piece in pieces for f, t in piece[3] for offset in range(f, t + 1)}
    assert brought == [first + at for at, zone in enumerate(zones) if zone == "a"]
    assert left_out == {first + at for at, zone in enumerate(zones) if zone == "b"}


@given(ZONES, st.integers(0, 1 << 40))
def test_a_whole_answer_with_skips_is_read_as_it_was_written(zones: list[str], first: int) -> None:
    """An answer at once, head and frames, keeps the sets; taken apart it is what those get who know none."""
    gaps = [GapSet(GapReason.EVICTED, RangeSet.of([(1, 2), (9, 9)], 5), "", "plant", 4)]
    frame = chosen(zones, first)
    fetched = Fetched("log", first, frame.last + 1, b"head", [frame], gaps_token="t", gap_sets=gaps)
    head, *frames = pb.FetchResponse.FromString(frames_response(fetched)).frames
    found = read_head(head, [read_frame(each) for each in frames])
    assert (list(found.gap_sets), found.gaps, found.gaps_token) == (gaps, [], "t")
    assert [shape(each) for each in found.frames] == [shape(frame)]
    runs = list(apart(found.frames[0]))
    assert all((run.entries is None) != (run.gap is None) for run in runs)
    assert [run.first for run in runs] == [first, *(run.last + 1 for run in runs[:-1])]
    assert {run.gap.detail for run in runs if run.gap} <= {NOT_CARRIED}


def test_what_is_no_set_makes_the_frame_invalid() -> None:
    """Ranges that cannot be read, and a reason that nobody knows, are refused."""
    good = gap_set_message(GapSet(GapReason.SKIPPED, RangeSet.of([(1, 2)], 5)))
    assert gap_set_of(good).kind == (GapReason.SKIPPED, "", None)
    for bad in (pb.GapSet(reason="skipped", ranges=b"\1\0"), pb.GapSet(reason="whim", ranges=good.ranges)):
        with pytest.raises(FrameInvalid):
            read_frame(pb.FetchFrame(first=0, last=2, skips=[bad]))
    with pytest.raises(FrameInvalid):
        read_frame(pb.FetchFrame(first=0, last=2))


def many(first: int, count: int) -> GapSet:
    """Make a set of so many ranges, which take a bit or two each on the wire."""
    return GapSet(GapReason.SKIPPED, RangeSet.of_offsets(np.arange(first, first + 2 * count, 2), 5), "x", "idmz", 5)


def test_what_may_be_told_at_once_is_bounded() -> None:
    """However few bytes they take, sets with more ranges than the limit are refused, in one set or in several."""
    half = RANGES_TOLD_MAX // 2
    enough = [many(0, half), many(RANGES_TOLD_MAX, half)]
    for sets, is_good in ((enough, True), ([*enough, many(9_000_000, 1)], False), ([many(0, 2 * half + 1)], False)):
        head, *_ = pb.FetchResponse.FromString(frames_response(Fetched("log", 0, 0, b"", [], gap_sets=sets))).frames
        told = [gap_set_message(each) for each in sets]
        reads: list[Callable[[], object]] = [
            partial(read_head, head),
            partial(read_frame, pb.FetchFrame(first=0, last=9, skips=told)),
            partial(put_call, pb.PutFrame(first=0, last=-1, gap_sets=told)),
            partial(put_call, pb.PutFrame(first=0, last=9, skips=told)),
        ]
        for read in reads:
            with nullcontext() if is_good else pytest.raises(FrameInvalid, match="told at once"):
                read()


async def test_an_answer_that_tells_too_much_holds_the_link(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that are each within the limit may together be beyond it: nothing is stored, and the link is held."""
    site = await sites()
    await site.consumer()
    part = RANGES_TOLD_MAX // 2 + 1
    skips = [many(first, part) for first in (0, 2 * part)]
    frames = [Frame(2 * part * at, 2 * part * (at + 1) - 1, skips=(each,)) for at, each in enumerate(skips)]

    async def told(*_: object) -> Fetched:
        return Fetched("log", 0, 4 * part, b"", frames)

    monkeypatch.setattr(site.boundary, "fetch", told)
    link = ClientLink("plant", "historian", site.client())
    flow = Flow(link, SessionMemory(), LinkRules("lab", frozenset({"plant", "idmz"})), clock=SystemClock())
    forward = await MemoryStorage().forward(STREAM)
    progress = await flow.turn(forward)
    assert progress.held is not None and progress.held.code == "frame_invalid"
    assert "told at once" in progress.held.detail and (await forward.stats()).gaps == 0


def test_evidence_is_the_same_with_and_without_sets() -> None:
    """An auditor that knows no sets is told every range; one that does gets the same in fewer bytes."""
    gaps = [
        GapSet(GapReason.SKIPPED, RangeSet.of([(at, at) for at in range(0, 4_000, 2)], 7), NOT_CARRIED, "plant", 7),
        GapSet.of(GapRecord(3, 9, GapReason.EVICTED, 8)),
    ]
    found = LogEvidence("log", 0, 9, b"", gaps)
    pieces = list(evidence_pieces(found))
    # Others are served between two pieces, so none of them may be long.
    assert max(len(pb.GetEvidenceResponse.FromString(each).gaps) for each in pieces) == GAPS_AT_ONCE
    plain = pb.GetEvidenceResponse.FromString(b"".join(pieces))
    compact = pb.GetEvidenceResponse.FromString(b"".join(evidence_pieces(found, sets=True)))
    assert (len(plain.gaps), len(plain.gap_sets), len(compact.gaps), len(compact.gap_sets)) == (2_001, 0, 0, 2)
    assert compact.ByteSize() * 50 < plain.ByteSize()
    for answer in (plain, compact):
        read = evidence_of(answer, "operational", Buffer.STORE).gaps
        assert listed(read) == listed(replace(each) for each in gaps)
