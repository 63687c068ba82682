"""Step 2, serve: where an answer starts, how large it is, what it leaves out, and how it waits."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.journey.zones import STREAM, Zone, memory_backend

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import ConsumerRetired, InvalidArgument, OffsetOutOfRange, UnknownConsumer
from bsfg.fact import Message
from bsfg.journey.link import RETURNING, Carriage, Fetched, FetchRequest
from bsfg.journey.serve import (
    SCANNED_PER_FACT,
    _count_within,
    relayed_gaps,
    serve,
    serve_range,
)
from bsfg.ports import Confirmation, ConsumerSpec, Frame, GapRecord, StartAt
from bsfg.retention import GapReason
from bsfg.testing.facts import message, messages

MakeZone = Callable[[str], Zone]
CONSUMER = "reader"


async def zone_with(make_zone: MakeZone, facts: list[Message]) -> Zone:
    """Make a zone with a consumer and some facts."""
    zone = make_zone("plant")
    await zone.store()
    await (await zone.storage()).cursors.create(ConsumerSpec(CONSUMER, STREAM))
    if facts:
        await zone.append(facts)
    return zone


async def fetch(zone: Zone, request: FetchRequest | None = None, carriage: Carriage | None = None) -> Fetched:
    """Serve the zone's consumer."""
    storage = await zone.storage()
    return await serve(
        await zone.store(), storage.cursors, CONSUMER, request or FetchRequest(), carriage=carriage or Carriage()
    )


def shape(frames: list[Frame]) -> list[tuple[int, int, str]]:
    """Say of each frame its range and whether it holds entries or a gap."""
    return [(f.first, f.last, "entries" if f.entries else str(f.gap and f.gap.reason)) for f in frames]


async def test_same_answer_until_confirmed(make_zone: MakeZone) -> None:
    """Without a confirmation the same facts are given again; the sender only notes how far it has served."""
    zone = await zone_with(make_zone, messages(20))
    first = await fetch(zone, FetchRequest(max_facts=8))
    again = await fetch(zone, FetchRequest(max_facts=8))
    assert shape(list(first.frames)) == shape(list(again.frames)) == [(0, 7, "entries")]
    checkpoint = await (await zone.storage()).cursors.checkpoint(CONSUMER)
    assert (checkpoint.next_to_send, checkpoint.committed) == (8, -1)


async def test_bytes_limit_and_the_one_large_fact(make_zone: MakeZone) -> None:
    """An answer stays within the bytes asked for, but a fact larger than that is still served, alone."""
    large = message("large", "x" * 50_000)
    zone = await zone_with(make_zone, [*messages(50), large, *messages(50, first=50)])
    cursors = (await zone.storage()).cursors
    sizes, offset = [], 0
    while offset < 101:
        fetched = await fetch(zone, FetchRequest(max_bytes=4_000))
        (frame,) = fetched.frames
        assert frame.entries is not None
        assert frame.first == offset
        assert frame.entries.nbytes <= 4_000 or len(frame.entries) == 1
        sizes.append(len(frame.entries))
        offset = frame.last + 1
        await cursors.commit(CONSUMER, Confirmation(through=frame.last))
    assert sizes.count(1) >= 1
    assert max(sizes) > 1


async def test_small_stored_frames_travel_together(make_zone: MakeZone) -> None:
    """Facts that were appended one by one are served as one frame."""
    zone = await zone_with(make_zone, [])
    for fact in messages(7):
        await zone.append([fact])
    assert shape(list((await fetch(zone)).frames)) == [(0, 6, "entries")]


async def test_long_poll_wakes_with_the_fact(make_zone: MakeZone) -> None:
    """A fetch that waits is answered as soon as something is durable."""
    zone = await zone_with(make_zone, [])
    waiting = asyncio.create_task(fetch(zone, FetchRequest(wait_seconds=60)))
    await asyncio.sleep(0)
    assert not waiting.done()
    await zone.append(messages(1))
    assert shape(list((await waiting).frames)) == [(0, 0, "entries")]


async def test_long_poll_may_end_empty(make_zone: MakeZone) -> None:
    """When nothing comes in the time asked for, the answer has no frames and says where the log ends."""
    zone = await zone_with(make_zone, messages(2))
    await (await zone.storage()).cursors.commit(CONSUMER, Confirmation(through=1))
    fetched = await fetch(zone, FetchRequest(wait_seconds=0.01))
    assert (fetched.frames, fetched.start, fetched.end) == ([], 2, 2)


async def test_long_poll_waits_on_over_what_is_left_out(make_zone: MakeZone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that the link does not carry do not end a wait; they are reported with the first that it does carry."""
    zone = await zone_with(make_zone, [])
    kind, waits_on = type(await zone.store()), asyncio.Event()
    wait_for = kind.wait_for

    def watched(self: Any, offset: int, timeout_seconds: float) -> Any:
        if offset == 3:
            waits_on.set()
        return wait_for(self, offset, timeout_seconds)

    monkeypatch.setattr(kind, "wait_for", watched)
    carriage = Carriage(frozenset({"enterprise"}))
    waiting = asyncio.create_task(fetch(zone, FetchRequest(wait_seconds=60), carriage))
    for number in range(3):
        await zone.append([message(f"lab-{number}", number, to_zone="lab")])
    looked = asyncio.create_task(waits_on.wait())
    await asyncio.wait({waiting, looked}, return_when=asyncio.FIRST_COMPLETED)
    looked.cancel()
    assert not waiting.done(), "it has seen all three, and does not wait for the next one"
    await zone.append([message("mine", 1)])
    assert shape(list((await waiting).frames)) == [(0, 2, "skipped"), (3, 3, "entries")]


async def test_what_is_left_out_is_reported_when_the_wait_ends(make_zone: MakeZone) -> None:
    """When nothing else comes, the skipped range is the answer, so that the frontier can pass it."""
    zone = await zone_with(make_zone, messages(4))
    fetched = await fetch(zone, FetchRequest(wait_seconds=0.01), Carriage(frozenset({"moon"})))
    assert shape(list(fetched.frames)) == [(0, 3, "skipped")]


async def test_requests_for_nothing_are_refused(make_zone: MakeZone) -> None:
    """A fetch of no facts, no bytes or negative time is an invalid argument."""
    zone = await zone_with(make_zone, [])
    for request in (FetchRequest(max_facts=0), FetchRequest(max_bytes=0), FetchRequest(wait_seconds=-1)):
        with pytest.raises(InvalidArgument):
            await fetch(zone, request)


async def test_who_may_be_served(make_zone: MakeZone) -> None:
    """Unknown and retired consumers, and those of another buffer, are told so."""
    zone = await zone_with(make_zone, messages(1))
    storage = await zone.storage()
    with pytest.raises(UnknownConsumer):
        await serve(await zone.store(), storage.cursors, "nobody", FetchRequest())
    with pytest.raises(InvalidArgument, match="store buffer of operational"):
        await serve(await zone.forward(), storage.cursors, CONSUMER, FetchRequest())
    await storage.cursors.retire(CONSUMER, "replaced")
    with pytest.raises(ConsumerRetired):
        await fetch(zone)


async def test_start_positions(make_zone: MakeZone) -> None:
    """A consumer that begins at an offset or at the latest fact is served from there."""
    zone = await zone_with(make_zone, messages(5))
    cursors, store = (await zone.storage()).cursors, await zone.store()
    await cursors.create(ConsumerSpec("late", STREAM, start=StartAt.LATEST))
    await cursors.create(ConsumerSpec("third", STREAM, start=StartAt.OFFSET, start_value=3))
    assert (await serve(store, cursors, "late", FetchRequest())).frames == []
    assert shape(list((await serve(store, cursors, "third", FetchRequest())).frames)) == [(3, 4, "entries")]


async def test_truncated_range_is_a_gap_in_band(make_zone: MakeZone) -> None:
    """A consumer that stands before what was removed gets a gap record for it, then the entries."""
    zone = await zone_with(make_zone, messages(6))
    cursors, store = (await zone.storage()).cursors, await zone.store()
    await cursors.create(ConsumerSpec("optional", STREAM, required=False))
    await cursors.commit(CONSUMER, Confirmation(through=3))
    await store.truncate_before(4)
    frames = list((await serve(store, cursors, "optional", FetchRequest())).frames)
    assert shape(frames) == [(0, 3, "truncated"), (4, 5, "entries")]


async def test_link_carries_only_some_zones(make_zone: MakeZone) -> None:
    """What a link does not carry stands in the answer as skipped ranges, joined where they touch."""
    targets = ["enterprise", "lab", "lab", "enterprise", "lab"]
    zone = await zone_with(make_zone, [message(str(n), n, to_zone=to) for n, to in enumerate(targets)])
    fetched = await fetch(zone, carriage=Carriage(frozenset({"enterprise"})))
    assert shape(list(fetched.frames)) == [
        (0, 0, "entries"),
        (1, 2, "skipped"),
        (3, 3, "entries"),
        (4, 4, "skipped"),
    ]
    gaps = [frame.gap for frame in fetched.frames if frame.gap]
    assert {gap.detail for gap in gaps} == {"to_zone is not carried by this link"}


async def test_link_that_carries_nothing_answers_in_time(make_zone: MakeZone) -> None:
    """A link that carries next to nothing looks at a bounded number of facts per answer and reports what it skipped."""
    zone = await zone_with(make_zone, messages(200))
    request = FetchRequest(max_facts=2)
    fetched = await fetch(zone, request, Carriage(frozenset({"moon"})))
    (frame,) = fetched.frames
    assert frame.gap is not None
    assert frame.first == 0
    assert 1 <= frame.last + 1 <= SCANNED_PER_FACT * 2 + 2


async def test_range_reads_are_deterministic(make_zone: MakeZone) -> None:
    """A range read twice, in steps of any size, gives the same entries and moves no cursor."""
    zone = await zone_with(make_zone, messages(30))
    store = await zone.store()

    async def read(max_facts: int) -> list[EntryBatch]:
        frames = serve_range(store, 5, 25, max_facts=max_facts)
        return [frame.entries async for frame in frames if frame.entries]

    once, again, steps = await read(10_000), await read(10_000), await read(3)
    assert EntryBatch.concat(once) == EntryBatch.concat(again) == EntryBatch.concat(steps)
    assert EntryBatch.concat(once).offsets.tolist() == list(range(5, 25))
    with pytest.raises(OffsetOutOfRange):
        [frame async for frame in serve_range(store, 31, 40)]
    assert await zone.committed(CONSUMER) == -1


async def test_range_reads_skip_alike(make_zone: MakeZone) -> None:
    """A range read over a link that carries some zones gives the same skipped ranges every time."""
    zone = await zone_with(make_zone, [message(str(n), n, to_zone="ab"[n % 2]) for n in range(6)])
    carriage = Carriage(frozenset({"a"}))
    store = await zone.store()
    once = [frame async for frame in serve_range(store, 0, 6, carriage=carriage)]
    zone.clock.advance(60)
    again = [frame async for frame in serve_range(store, 0, 6, carriage=carriage)]
    assert [frame.gap for frame in once] == [frame.gap for frame in again]
    assert len(once) == 6


@given(st.lists(st.sampled_from(["a", "b", "own"]), min_size=1, max_size=40), st.integers(1, 50), st.integers(1, 9))
def test_answers_cover_everything_once(targets: list[str], max_facts: int, per_append: int) -> None:
    """Answers cover each offset once, by an entry or a skipped range, and exactly the right ones are carried."""

    async def run() -> None:
        from pathlib import Path

        zone = Zone("plant", memory_backend(Path()))
        await zone.store()
        cursors, store = (await zone.storage()).cursors, await zone.store()
        await cursors.create(ConsumerSpec(CONSUMER, STREAM))
        facts = [
            message(str(n), n, to_zone="b" if to == "b" else "a", from_zone="own" if to == "own" else "plant")
            for n, to in enumerate(targets)
        ]
        for start in range(0, len(facts), per_append):
            await zone.append(facts[start : start + per_append])
        carriage = Carriage(frozenset({"a"}), receiver_zone="own")
        carried, expected = [], 0
        while expected < len(facts):
            fetched = await serve(store, cursors, CONSUMER, FetchRequest(max_facts=max_facts), carriage=carriage)
            for frame in fetched.frames:
                assert frame.first == expected
                expected = frame.last + 1
                if frame.entries:
                    carried += frame.entries.offsets.tolist()
            await cursors.commit(CONSUMER, Confirmation(through=expected - 1))
        assert carried == [n for n, to in enumerate(targets) if to == "a"]

    asyncio.run(run())


async def test_relayed_gaps_follow_the_token(make_zone: MakeZone) -> None:
    """A receiver is told what came after its token; a token that is not known gives all, what returned is kept back."""
    zone = make_zone("idmz")
    forward = await zone.forward()
    plant = [GapRecord(first, first, GapReason.EVICTED, first, "", "plant") for first in (0, 2, 4)]
    others = [
        GapRecord(0, 0, GapReason.EVICTED, 5, "", "enterprise"),
        GapRecord(9, 9, GapReason.SKIPPED, 6, RETURNING, "plant"),
    ]
    tokens = [""]
    for gap in (plant[0], others[0], plant[1], others[1], plant[2]):
        await forward.record_gaps([gap])
        tokens.append((await forward.gaps_told(tokens[-1]))[1])

    async def told(token: str) -> list[GapRecord]:
        gaps, following = await relayed_gaps(forward, token, "enterprise")
        assert (await relayed_gaps(forward, following, "enterprise")) == ([], following)
        return [record for each in gaps for record in each.records()]

    assert await told("") == plant
    assert await told(tokens[2]) == plant[1:]
    assert await told(tokens[3]) == plant[2:]
    assert await told(tokens[5]) == []
    assert await told("plant:2-2:evicted") == plant


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=300), st.integers(0, 1_200_000), st.integers(0, 310))
def test_an_answer_is_as_long_as_there_is_room_for(sizes: list[int], max_bytes: int, max_facts: int) -> None:
    """Whatever the sizes of the facts: not one fewer than fit, and not one more."""
    batch = FactBatch.from_messages(message(f"m-{number}", "x" * size) for number, size in enumerate(sizes))
    entries = EntryBatch.of(batch.record_batch, np.arange(len(sizes)), 1)
    most = min(max_facts, len(sizes))
    fitting = [count for count in range(most + 1) if entries.slice(0, count).nbytes <= max_bytes]
    found = _count_within(entries, max_bytes, most)
    # A small batch is not counted exactly: it is taken by the size of what its columns lie in.
    assert found == most if entries.slice(0, most).size_bytes <= max_bytes else found == max(fitting, default=0)


def test_a_cut_is_found_with_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that are alike, the place of a cut is guessed: each look adds up all buffers of a batch."""
    batch = FactBatch.from_messages(messages(4_000, object_bytes=200))
    entries, looks = EntryBatch.of(batch.record_batch, np.arange(4_000), 1), list[int]()
    slice_ = EntryBatch.slice

    def counted(self: EntryBatch, start: int, count: int | None = None) -> EntryBatch:
        looks.append(count or 0)
        return slice_(self, start, count)

    monkeypatch.setattr(EntryBatch, "slice", counted)
    for max_bytes in range(100_000, entries.nbytes, 100_000):
        _count_within(entries, max_bytes, len(entries))
        assert len(looks) <= 8, looks
        looks.clear()
