"""What a node sums up of its log is what its reader would make of it, and nobody gets more of it than by reading."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.journey.zones import origin_span
from tests.spark.test_audit_model import Row, digest_of, entries
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until

from bsfg.digest import Blake3
from bsfg.errors import FrameInvalid, HasherUnknown, InvalidArgument, PermissionRefused
from bsfg.filters import EVERY_FACT, FactFilter
from bsfg.gaps import RangeSet
from bsfg.journey import serve
from bsfg.journey.link import Carriage, Fetched
from bsfg.journey.sums import RECEIVER, SENDER, AuditScope, RangeSums, Summation
from bsfg.node import server
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Frame, GapRecord, GapSet
from bsfg.retention import GapReason
from bsfg.spark.audit.ends import NodeEnd
from bsfg.spark.audit.judging import descents, totals
from bsfg.spark.audit.scope import Summing
from bsfg.spark.calls import NodeAccess, calls
from bsfg.testing.facts import altered, batch, messages, sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import SumCall, gap_set_message, sum_call_of, sum_request, sums_of, sums_response
from bsfg.wire.messages import BOUNDARY

SECRET = bytes(range(32))
SCOPE = AuditScope("enterprise", SECRET, range_facts=16)
SERVED = 'subjects = ["machine:press-1", "machine:press-3"]\n'


def told(parts: Sequence[RangeSums], keys: np.ndarray) -> dict[str, Any]:
    """Give everything that an audit goes by, whatever pieces it came in."""
    found, left_out = totals(parts), Counter[str]()
    for part in parts:
        left_out.update(part.left_out)
    gone = {
        (offset, gap.reason, gap.detail)
        for part in parts
        for gap in part.all_gaps()
        for offset in range(max(gap.first, part.first), gap.last + 1)
    }
    entries_of = [part for part in found.stretches if part.first_entry is not None]
    return {
        "sums": (found.sender, found.receiver),
        "gaps": gone,
        "left_out": +left_out,
        "read": sum(part.read for part in parts),
        "altered": sorted((each.place, each.offset, each.key) for part in parts for each in part.altered),
        "altered_count": sum(part.altered_count for part in parts),
        "descents": descents(found.stretches),
        "bounds": (found.lowest, found.highest),
        "outer": (entries_of[0].first_entry, entries_of[-1].last_entry) if entries_of else None,
        "paths": found.paths,
        "unreadable": [each for part in parts for each in part.unreadable],
        "keys": sorted(keys.tolist()),
    }


# Any log: what the node does, step by step over its messages, against what a reader does.


@dataclass(frozen=True)
class AnyLog:
    """A log of rows and gaps, which gives frames of some size."""

    rows: Sequence[Row | GapReason]
    frame_facts: int = 3

    async def replay(self, first: int, *, end: int, max_facts: int) -> AsyncIterator[Frame]:
        """Give frames as a buffer does."""
        at = first
        while at < min(end, len(self.rows)):
            row, stop = self.rows[at], at + 1
            if isinstance(row, GapReason):
                yield Frame(at, at, gap=GapRecord(at, at, row, 1, f"as {row}"))
            else:
                most = min(end, len(self.rows), at + self.frame_facts)
                while stop < most and isinstance(self.rows[stop], Row):
                    stop += 1
                part = [each for each in self.rows[at:stop] if isinstance(each, Row)]
                yield Frame(at, stop - 1, entries(part, range(at, stop)))
            at = stop

    async def served(self, first: int, carriage: Carriage, *, sets: bool) -> AsyncIterator[Frame]:
        """Serve it from an offset on."""
        async for frame in serve.serve_range(self, first, len(self.rows), carriage=carriage, sets=sets):  # type: ignore[arg-type]
            yield frame


@dataclass(frozen=True)
class ReadEnd:
    """An end whose frames were read."""

    given: Sequence[Frame]

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Give them."""
        return iter(self.given)

    def summed(self, *asked: object) -> None:
        """Nothing."""


async def by_node(log: AnyLog, side: str, scope: AuditScope, carriage: Carriage) -> tuple[list[RangeSums], np.ndarray]:
    """Sum up a log as a node does for one who asks again until he has all, over messages as they travel."""
    first, end, parts, keys = 0, len(log.rows), list[RangeSums](), [np.empty(0, dtype=np.uint64)]
    while first < end:
        asked = sum_request(SumCall(STREAM, Buffer.STORE, side, first, end, scope))
        call = sum_call_of(pb.SumFactsRequest.FromString(asked.SerializeToString()))
        summation = Summation(call.side, call.first, call.end, call.scope)
        await serve.sum_up(log.served(first, carriage, sets=True), summation)
        head = Fetched("log", first, end, b"")
        outcome = sums_of(pb.SumFactsResponse.FromString(sums_response(head, summation)), call)
        assert (outcome.log_id, outcome.log_end) == ("log", end)
        parts.append(outcome.found)
        keys.append(outcome.keys)
        first = outcome.found.end
    return parts, np.concatenate(keys)


ROWS = st.builds(
    lambda subject, wrong, **fields: Row(subject=subject, digest=digest_of("s:other" if wrong else subject), **fields),
    message_id=st.sampled_from(["a", "b", "c", "long" * 100]),
    offset=st.integers(0, 99),
    from_zone=st.sampled_from(["plant", "idmz", "enterprise"]),
    to_zone=st.sampled_from(["enterprise", "lab"]),
    labels=st.sampled_from([None, '{"shift":"night"}']),
    subject=st.sampled_from(["s:1", "s:2"]),
    wrong=st.sampled_from([False, False, True]),
    time=st.integers(0, 3),
    origin=st.sampled_from(["plant", "idmz"]),
)
GAPS = st.sampled_from([GapReason.TRUNCATED, GapReason.DAMAGED, GapReason.EVICTED])
FILTERS = st.sampled_from([EVERY_FACT, FactFilter(subjects=("s:1",)), FactFilter(from_zones=("i*",))])


@given(
    rows=st.lists(ROWS | GAPS, max_size=40),
    frame_facts=st.integers(1, 7),
    facts_at_once=st.integers(1, 50),
    step_bytes=st.sampled_from([1, 600, 1 << 20]),
    side=st.sampled_from([SENDER, RECEIVER]),
    scope=st.builds(
        AuditScope,
        st.just("plant"),
        st.just(SECRET),
        first=st.integers(0, 20),
        end=st.integers(50, 120),
        receiver_zone=st.sampled_from([None, "enterprise"]),
        carry_only=st.sampled_from([frozenset(), frozenset({"lab"})]),
        relayed=st.booleans(),
        shared=st.booleans(),
        range_facts=st.sampled_from([16, 32]),
        deep=st.booleans(),
        asked=FILTERS,
    ),
    carriage=st.builds(Carriage, st.none(), st.sampled_from([None, "enterprise"]), FILTERS),
)
@settings(max_examples=150, deadline=None)
def test_a_node_finds_what_a_reader_finds(
    rows: list[Row | GapReason],
    frame_facts: int,
    facts_at_once: int,
    step_bytes: int,
    side: str,
    scope: AuditScope,
    carriage: Carriage,
) -> None:
    """Whatever the log holds and lacks, whoever asks, and however little the node does at once."""
    log = AnyLog(rows, frame_facts)

    async def work() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "SUM_FACTS", facts_at_once)
            patch.setattr(serve, "SUM_STEP_BYTES", step_bytes)
            mine = await by_node(log, side, scope, carriage)
        end = ReadEnd([frame async for frame in log.served(0, carriage, sets=False)])
        theirs = Summing(side, end, "log", 0, len(rows), scope)()  # type: ignore[arg-type]
        assert told(*mine) == told(*theirs)

    asyncio.run(work())


# A node, on both kinds of storage.


async def furnished(sites: Sites, storage: str, **more: Any) -> Site:
    """Open a site whose buffers have all that can be: gaps, two digest functions, several origins, conflicts."""
    site = await sites(storage=storage, **more)
    store, forward = await site.parts.store(STREAM), await site.parts.forward(STREAM)
    for first in range(0, 200, 20):
        await store.append(batch(20, first=first))
    await store.append(sealed(messages(100, first=200), hasher=Blake3()))
    await store.append(batch(30, first=0, from_zone="enterprise"))
    await site.parts.storage.cursors.create(ConsumerSpec("enterprise.operational", STREAM))
    await site.parts.storage.cursors.commit("enterprise.operational", Confirmation(through=99))
    await store.truncate_before(45)
    await store.record_gaps([GapRecord(120, 121, GapReason.QUARANTINED, 1, "enterprise: conflict")])
    await forward.put_if_absent(batch(100, from_zone="enterprise"), origin_span("enterprise", 0, 100))
    await forward.put_if_absent(batch(50, from_zone="idmz"), origin_span("enterprise", 100, 50))
    await forward.put_if_absent(batch(50, from_zone="lab"), origin_span("lab", 0, 50))
    mine = sealed(messages(60, first=100, from_zone="enterprise"), hasher=Blake3())
    await forward.put_if_absent(mine, origin_span("enterprise", 150, 60))
    conflicts = sealed(altered(messages(2, first=0, from_zone="enterprise")))
    await forward.put_if_absent(conflicts, origin_span("enterprise", 210, 2))
    return site


async def both_ways(site: Site, side: str, scope: AuditScope) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Sum up a whole buffer by the node and by reading it; give both, and the bytes that the first took."""
    buffer = Buffer.STORE if side == SENDER else Buffer.FORWARD
    stats = await (await site.parts.buffer(STREAM, buffer)).stats()
    end = NodeEnd(NodeAccess(site.grpc_address), STREAM, buffer, 5.0)
    results = []
    for each in (end, replace(end, reads_all=True)):
        step = Summing(side, each, stats.log_id, 0, stats.end, scope)
        results.append(await asyncio.to_thread(step))
    (parts, _), (read, _) = results
    assert all(part.wire_bytes is not None for part in parts) and [part.wire_bytes for part in read] == [None]
    sizes = [part.wire_bytes or 0 for part in parts]
    return told(*results[0]), told(*results[1]), sum(sizes)


@pytest.mark.parametrize("storage", ["log", "memory"])
@pytest.mark.parametrize("who", ["pipeline", "enterprise-bsfg"])
@pytest.mark.parametrize("serves", ["", SERVED], ids=["all", "some"])
async def test_a_senders_node_finds_what_is_read_from_it(sites: Sites, storage: str, who: str, serves: str) -> None:
    """The zone's own pipeline and a peer, who is given all or some: the same entries, gaps and reasons count."""
    site = await furnished(sites, storage, more=serves)
    site.act_as(who)
    scope = replace(SCOPE, zone="plant", receiver_zone="enterprise", asked=FactFilter(subjects=("*-1", "*-2", "*-7")))
    mine, theirs, _ = await both_ways(site, SENDER, scope)
    assert mine == theirs
    assert mine["sums"][0] and mine["left_out"] and mine["altered_count"] == 0
    details = {detail for _, _, detail in mine["gaps"]}
    assert any("served" in detail for detail in details) == bool(serves and who != "pipeline")


@pytest.mark.parametrize("storage", ["log", "memory"])
@pytest.mark.parametrize("shared", [False, True])
async def test_a_receivers_node_finds_what_is_read_from_it(sites: Sites, storage: str, shared: bool) -> None:
    """Its own facts by the offsets at the sender, and the keys of all; they take a fraction of the bytes."""
    site = await furnished(sites, storage)
    site.act_as("pipeline")
    mine, theirs, wire_bytes = await both_ways(site, RECEIVER, replace(SCOPE, shared=shared))
    assert mine == theirs
    assert len(mine["keys"]) == mine["read"] == 260
    assert mine["paths"] == {("enterprise", "enterprise"), ("enterprise", "idmz"), ("lab", "lab")}
    assert wire_bytes < 20 * 260


async def test_an_answer_covers_what_a_node_does_at_once(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the range is that somebody asks for; he asks again, and has the same in the end."""
    site = await furnished(sites, "log")
    site.act_as("pipeline")
    whole, read, _ = await both_ways(site, SENDER, replace(SCOPE, zone="plant"))
    store = await site.parts.store(STREAM)
    call = SumCall(STREAM, Buffer.STORE, SENDER, 0, (await store.stats()).end, SCOPE)
    client = site.client()
    ended = []
    for name, value in (("SUM_FACTS", 30), ("SUM_BYTES", 1), ("SUM_SECONDS", 0.0)):
        with monkeypatch.context() as patch:
            patch.setattr(serve, name, value)
            patch.setattr(serve, "SUM_STEP_BYTES", 1)
            patch.setattr(server, "FRAMES_FACTS_DEFAULT", 20)
            ended.append((await client.sum_facts(replace(call, first=45))).found.end)
            parts, _, _ = await both_ways(site, SENDER, replace(SCOPE, zone="plant"))
            assert parts == whole == read
    assert all(45 < end < 120 for end in ended), ended


async def test_what_is_being_summed_up_counts_as_what_is_sent(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries wait for their step by the megabyte; however often somebody asks, he has his room and no more."""
    site = await sites(storage="log", message_bytes=1 << 20, memory_ceiling_bytes=1 << 24)
    site.act_as("pipeline")
    store = await site.parts.store(STREAM)
    for first in range(0, 4_000, 500):
        await store.append(batch(500, first=first))
    held, stepping = [0], asyncio.Event()

    async def waits(batches: Sequence[Any], weight_bytes: int, summation: Summation) -> None:
        held[0] += weight_bytes
        await stepping.wait()

    monkeypatch.setattr(serve, "_add", waits)
    monkeypatch.setattr(serve, "SUM_STEP_BYTES", 256 << 10)
    monkeypatch.setattr(server, "SUM_STEP_BYTES", 256 << 10)
    monkeypatch.setattr(server, "FRAMES_FACTS_DEFAULT", 50)
    call = SumCall(STREAM, Buffer.STORE, SENDER, 0, 4_000, SCOPE)
    asking = [asyncio.create_task(site.connection().call("SumFacts", sum_request(call))) for _ in range(20)]
    try:
        await until(lambda: held[0] > 0)
        await asyncio.sleep(0.3)
        assert 256 << 10 <= held[0] <= 1 << 20
    finally:
        stepping.set()
        await asyncio.gather(*asking)


async def test_a_node_that_cannot_is_read(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know the call, or a digest function of its own facts, or tells nonsense, is read."""
    site = await furnished(sites, "log")
    site.act_as("pipeline")
    stats = await (await site.parts.store(STREAM)).stats()
    end = NodeEnd(NodeAccess(site.grpc_address), STREAM, Buffer.STORE, 5.0)
    step = Summing(SENDER, end, stats.log_id, 0, stats.end, replace(SCOPE, zone="plant"))
    read = await asyncio.to_thread(replace(step, log=replace(end, reads_all=True)))
    connection = calls().connection(end.access)
    known = connection.method("SumFacts")
    unknown = replace(BOUNDARY["SumFacts"], name="WhatIsThat").callable(connection._channel)
    monkeypatch.setitem(connection._callables, "SumFacts", unknown)
    parts, _ = await asyncio.to_thread(step)
    assert [part.wire_bytes for part in parts] == [None] and told(parts, read[1]) == told(*read)
    monkeypatch.setitem(connection._callables, "SumFacts", known)

    async def unknown_hasher(*_: Any) -> None:
        raise HasherUnknown("blake4 is not known here")

    with monkeypatch.context() as patch:
        patch.setattr(server, "sum_up", unknown_hasher)
        parts, _ = await asyncio.to_thread(step)
        assert [part.wire_bytes for part in parts] == [None] and told(parts, read[1]) == told(*read)

    nonsense = pb.SumFactsResponse(end=1 << 40, log_id=stats.log_id, log_end=stats.end).SerializeToString()
    monkeypatch.setattr(server, "sums_response", lambda *_: nonsense)
    parts, _ = await asyncio.to_thread(step)
    assert [part.wire_bytes for part in parts] == [None]


async def test_who_may_not_read_may_not_have_sums(sites: Sites) -> None:
    """A buffer that is not given to somebody, a held gate and a range beyond the end are refused as for a read."""
    site = await furnished(sites, "memory")
    client = site.client()
    call = SumCall(STREAM, Buffer.FORWARD, RECEIVER, 0, 10, SCOPE)
    for who in ("enterprise-bsfg", "viewer", "narrow"):
        site.act_as(who)
        with pytest.raises(PermissionRefused):
            await client.sum_facts(call)
    site.act_as("pipeline")
    with pytest.raises(InvalidArgument, match="is not a range below the end"):
        await client.sum_facts(replace(call, first=5_000, end=5_010))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("secret", b"short", "the secret has 5 bytes, it needs 32"),
        ("secret", bytes(33), "the limit is 32"),
        ("range_facts", 15, "ranges have 16 to 1048576 offsets, not 15"),
        ("range_facts", (1 << 20) + 1, "ranges have 16 to 1048576 offsets"),
        ("carry_only", ["z"] * 1_001, "the limit is 1000"),
        ("filter", pb.FactFilter(subjects=["*" * 9]), "the limit is 8"),
    ],
)
async def test_what_no_node_does_is_refused(sites: Sites, field: str, value: Any, says: str) -> None:
    """Before anything is read."""
    site = await sites()
    request = {"stream": STREAM, "end": 0, "secret": SECRET, "range_facts": 64, field: value}
    with pytest.raises(InvalidArgument, match=says):
        await site.connection().call("SumFacts", pb.SumFactsRequest(**request))


def gaps_between(*ranges: tuple[int, int]) -> list[pb.GapSet]:
    """Tell of ranges without entries."""
    return [gap_set_message(GapSet(GapReason.EXPIRED, RangeSet.of(ranges, 1)))]


GOOD: dict[str, Any] = {
    "log_id": "x",
    "log_end": 100,
    "end": 32,
    "facts": 20,
    "numbers": [0, 1],
    "counts": [8, 12],
    "first_sums": [1, 2],
    "second_sums": [3, 4],
    "first_places": [0, 16],
    "last_places": [15, 31],
    "gap_sets": gaps_between((8, 15), (28, 31)),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"end": 0},
        {"end": 65},
        {"counts": [8]},
        {"counts": [8, -1]},
        {"counts": [8, 13]},
        {"facts": 33},
        {"numbers": [0, 2]},
        {"numbers": [-1, 0]},
        {"numbers": [1, 1]},
        {"keys": b"1234567"},
        {"gap_sets": [pb.GapSet(reason="nonsense")]},
        {"gap_sets": []},
        {"gap_sets": gaps_between((20, 32))},
        {"gap_sets": gaps_between((20, 1 << 60))},
        {"left_out": {"returning": 1}},
        {"left_out": {"returning": -1, "not_carried": 1}},
        {"size_bytes": -1},
        {"altered": [pb.NamedEntry(place=3, offset=3)]},
        {"altered": [pb.NamedEntry(place=1 << 60, offset=1 << 60)], "altered_count": 1},
        {"altered": [pb.NamedEntry(place=3, offset=1 << 60)], "altered_count": 1},
        {"altered_count": -1},
        {"altered_count": 21},
        {"descents_count": 1},
        {"descents_count": -1},
        {"lowest": 0},
        {"highest": 0},
        {"paths": [pb.EntryPath(origin_zone="plant", from_zone="plant")]},
    ],
    ids=" ".join,
)
def test_an_answer_that_cannot_be_is_not_believed(wrong: dict[str, Any]) -> None:
    """A node of another zone may say what it likes."""
    call = SumCall(STREAM, Buffer.STORE, SENDER, 0, 64, SCOPE)
    assert sums_of(pb.SumFactsResponse(**GOOD), call).found.read == 20
    with pytest.raises(FrameInvalid):
        sums_of(pb.SumFactsResponse(**{**GOOD, **wrong}), call)


RECEIVED: dict[str, Any] = {
    **GOOD,
    "keys": bytes(8 * 20),
    "lowest": 3,
    "highest": 30,
    "first_entry": pb.NamedEntry(place=0, offset=3),
    "last_entry": pb.NamedEntry(place=31, offset=30),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": [0, 1 << 50]},
        {"numbers": [0, 7]},
        {"lowest": None},
        {"lowest": 16},
        {"highest": 1 << 50},
        {"first_entry": None},
        {"last_entry": pb.NamedEntry(place=31, offset=1 << 60)},
        {"first_places": [-1, 16]},
        {"last_places": [15, 32]},
        {"first_places": [15, 16], "last_places": [14, 31]},
        {"left_out": {"returning": 1}},
        {"altered_count": -1},
        {"descents_count": -1},
        {"descents": [pb.EntryDescent()]},
    ],
    ids=" ".join,
)
def test_nor_is_one_of_a_receiver(wrong: dict[str, Any]) -> None:
    """What it says of the sender's offsets is held against itself, and against what was asked for."""
    call = SumCall(STREAM, Buffer.FORWARD, RECEIVER, 0, 64, replace(SCOPE, end=100))
    assert sums_of(pb.SumFactsResponse(**RECEIVED), call).found.highest == 30
    with pytest.raises(FrameInvalid):
        sums_of(pb.SumFactsResponse(**{**RECEIVED, **wrong}), call)


@dataclass(frozen=True)
class Holed(AnyLog):
    """A log that passes over some of its offsets without a word."""

    async def replay(self, first: int, *, end: int, max_facts: int) -> AsyncIterator[Frame]:
        """Leave out the second frame."""
        number = 0
        async for frame in super().replay(first, end=end, max_facts=max_facts):
            number += 1
            if number != 2:
                yield frame


def test_a_log_with_a_hole_is_not_summed_up() -> None:
    """Who reads it sees that frames do not follow each other; sums would hide it."""
    with pytest.raises(FrameInvalid, match="3 is expected next"):
        rows = [Row(str(at), at, digest=digest_of("s:1")) for at in range(20)]
        asyncio.run(by_node(Holed(rows), SENDER, SCOPE, Carriage()))


def test_bodies_are_hashed_where_they_lie() -> None:
    """What was altered at rest is named by the node, unless nobody asked for it."""
    rows = [Row(str(at), at, digest=digest_of("s:1")) for at in range(20)]
    rows[7] = replace(rows[7], subject="s:changed")
    for deep, expected in ((True, [7]), (False, [])):
        parts, _ = asyncio.run(by_node(AnyLog(rows), SENDER, replace(SCOPE, deep=deep), Carriage()))
        assert [each.offset for part in parts for each in part.altered] == expected


def test_an_answer_has_no_more_gaps_than_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is nothing but gaps of many kinds is told in as many answers as one of facts."""
    monkeypatch.setattr(serve, "SUM_FACTS", 50)
    rows: list[Row | GapReason] = [GapReason.EXPIRED, GapReason.EVICTED] * 100
    parts, _ = asyncio.run(by_node(AnyLog(rows), SENDER, SCOPE, Carriage()))
    assert [part.end - part.first for part in parts] == [50] * 4


def test_the_message_of_a_fact_is_no_longer_than_its_sums() -> None:
    """A log with many gaps of one kind tells them as one set."""
    rows: list[Row | GapReason] = [
        Row(str(at), at, subject=f"s:{at % 2}", digest=digest_of("s:1")) for at in range(1_000)
    ]
    scope = replace(SCOPE, deep=False)
    parts, _ = asyncio.run(by_node(AnyLog(rows, 100), SENDER, scope, Carriage(served=FactFilter(subjects=("s:1",)))))
    assert sum(len(part.all_gaps()) for part in parts) == 500
    assert sum(part.wire_bytes or 0 for part in parts) < 6_000
