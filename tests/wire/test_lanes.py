"""Frames of many links in one call: each lane in its order, none waiting for another, whatever becomes of the call."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.e2e.zones import until
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site
from tests.wire.test_conversation import Opened
from tests.wire.test_putting import LINK, LOG, frame

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, NotReady, PeerUnreachable, PermissionRefused, ZoneNotAllowed
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.spark.replicate import carrying
from bsfg.spark.replicate.carrying import Courier
from bsfg.testing.facts import messages
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire import lanes, limits, streams
from bsfg.wire.client import BoundaryClient
from bsfg.wire.convert import gap_message
from bsfg.wire.frames import Release
from bsfg.wire.lanes import Laned, LaneFrames, PutLane, with_more
from bsfg.wire.limits import WireLimits
from bsfg.wire.service import PutCall, PutOutcome

LANES, FRAMES = 40, 10


async def opened(sites: Sites, **settings: object) -> tuple[Site, BoundaryClient]:
    """Open a site and a client in the role of its pipeline."""
    site = await sites(**settings)
    site.act_as("pipeline")
    return site, site.client()


def lane(client: BoundaryClient) -> PutLane:
    """Begin a lane."""
    found = client.put_lane(LINK, STREAM, LOG)
    assert found is not None
    return found


def facts(first: int, count: int = 2, *, at_unix_ms: int, zone: str = "enterprise") -> Frame:
    """Make the frame of a sender that begins at an offset."""
    return frame(messages(count, first=first, from_zone=zone), first, at_unix_ms)


async def test_lanes_share_a_call_and_keep_their_own_order(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many lanes every fact is put once, those of a lane in their order, all in one call and in few messages."""
    site, client = await opened(sites)
    calls, now = Opened(client), site.parts.clock.now_unix_ms()

    async def carry(number: int) -> list[int]:
        mine = lane(client)
        sent = [await mine.send(facts(1_000 * number + 2 * at, at_unix_ms=now)) for at in range(FRAMES)]
        return [(await each).through for each in sent]

    answered: list[int] = []
    frames, taken = lane(client)._frames, LaneFrames._take

    def take(self: LaneFrames, ack: pb.PutAck) -> None:
        answered.append(1 + len(ack.more))
        taken(self, ack)

    monkeypatch.setattr(LaneFrames, "_take", take)
    through = await asyncio.gather(*(carry(number) for number in range(LANES)))
    assert sum(answered) == LANES * FRAMES
    assert len(answered) < LANES * FRAMES / 4, "frames and their answers hardly share messages"
    assert not frames._waiting and not frames._unsent and not frames._lanes
    assert through == [[1_000 * number + 2 * at + 1 for at in range(FRAMES)] for number in range(LANES)]
    entries = [
        frame.entries async for frame in (await site.parts.forward(STREAM)).replay(0) if frame.entries is not None
    ]
    offsets = [offset for each in entries for offset in each.values("origin_offset")]
    assert len(offsets) == LANES * FRAMES * 2
    for number in range(LANES):
        mine = [offset for offset in offsets if offset // 1_000 == number]
        assert mine == sorted(mine)
    assert len(calls) == 1


async def test_who_sends_frame_by_frame_is_answered_so(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline of an earlier version knows no answers in which there are more."""
    monkeypatch.setattr(lanes, "MORE_FRAMES", 1)
    site, client = await opened(sites)
    now, mine = site.parts.clock.now_unix_ms(), [lane(client) for _ in range(LANES)]
    taken = LaneFrames._take

    def take(self: LaneFrames, ack: pb.PutAck) -> None:
        assert not ack.more
        taken(self, ack)

    monkeypatch.setattr(LaneFrames, "_take", take)
    sent = [await each.send(facts(2 * at, at_unix_ms=now)) for at, each in enumerate(mine)]
    assert [(await each).inserted for each in sent] == [2] * LANES


async def test_frames_that_were_not_sent_yet_fail_with_the_call(sites: Sites) -> None:
    """Nobody waits for ever for what never left: hung up in the same moment, every frame fails."""
    site, client = await opened(sites)
    now = site.parts.clock.now_unix_ms()
    sent = [await lane(client).send(facts(2 * at, at_unix_ms=now)) for at in range(LANES)]
    client.hang_up()
    found = await asyncio.wait_for(asyncio.gather(*sent, return_exceptions=True), 10)
    assert {type(each) for each in found} == {PeerUnreachable}


async def test_a_lane_that_is_dropped_before_it_was_sent_leaves_nothing(sites: Sites) -> None:
    """What is given up in the same moment is not sent, and the others are."""
    site, client = await opened(sites)
    now, given_up, other = site.parts.clock.now_unix_ms(), lane(client), lane(client)
    dropped = await given_up.send(facts(0, at_unix_ms=now))
    sent = await other.send(facts(2, at_unix_ms=now))
    given_up.abandon()
    with pytest.raises(NotReady):
        await dropped
    assert (await sent).inserted == 2
    assert not other._frames._lanes and not other._frames._dropped
    assert (await (await site.parts.forward(STREAM)).stats()).end == 2


@pytest.mark.parametrize("inner", [pb.PutFrame(more=[pb.PutFrame()]), pb.PutFrame(gaps=[pb.GapRecord()] * 10_001)])
async def test_frames_in_a_message_are_held_to_the_same_terms(sites: Sites, inner: pb.PutFrame) -> None:
    """They have no others inside them, and no more gap records than a frame of its own may have."""
    _, client = await opened(sites)
    call = client.connection.stream("PutLanes")
    await call.write(pb.PutFrame(link=LINK, stream=STREAM, log_id=LOG, more=[inner]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_of_one_link_takes_no_frames_inside_others(sites: Sites) -> None:
    """There they would be passed over without a word."""
    _, client = await opened(sites)
    call = client.connection.stream("PutFacts")
    await call.write(pb.PutFrame(link=LINK, stream=STREAM, log_id=LOG, more=[pb.PutFrame()]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


whole_frames = st.builds(
    pb.PutFrame,
    link=st.text(max_size=8),
    sequence=st.integers(0, 1 << 63),
    first=st.integers(-(1 << 62), 1 << 62),
    entries=st.binary(max_size=300),
    lane=st.integers(0, 1 << 63),
)


@given(st.lists(whole_frames, min_size=1, max_size=40), st.data())
def test_frames_in_a_message_are_what_protobuf_reads(frames: list[pb.PutFrame], data: st.DataObject) -> None:
    """The message that is put together by hand is the one that protobuf would have made."""
    parts: list[Any] = [each.SerializeToString() if data.draw(st.booleans()) else each for each in frames]
    whole = pb.PutFrame.FromString(frames[0].SerializeToString())
    whole.more.extend(frames[1:])
    assert pb.PutFrame.FromString(with_more(parts)) == whole


async def test_what_is_wrong_with_a_lane_touches_no_other(sites: Sites) -> None:
    """After a frame that was not taken the rest of its lane is refused; others go on, and a new lane begins anew."""
    site, client = await opened(sites)
    now = site.parts.clock.now_unix_ms()
    bad, good = lane(client), lane(client)
    refused = await bad.send(facts(0, at_unix_ms=now, zone="lab"))
    behind = await bad.send(facts(2, at_unix_ms=now))
    assert (await refused).held_code == ZoneNotAllowed.code
    with pytest.raises(NotReady):
        await behind
    assert (await (await good.send(facts(10, at_unix_ms=now)))).through == 11
    assert (await (await lane(client).send(facts(2, at_unix_ms=now)))).through == 3
    site.act_as("app")
    with pytest.raises(PermissionRefused):
        await (await lane(client).send(facts(20, at_unix_ms=now)))


async def test_a_slow_lane_delays_no_other(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ack comes when its frame is done, though one before it is not."""
    site, client = await opened(sites)
    now, put, go = site.parts.clock.now_unix_ms(), site.boundary.put, asyncio.Event()

    async def slow(caller: Any, call: PutCall) -> PutOutcome:
        if call.first < 10:
            await go.wait()
        return await put(caller, call)

    monkeypatch.setattr(site.boundary, "put", slow)
    waiting, other = lane(client), lane(client)
    first = await waiting.send(facts(0, at_unix_ms=now))
    second = await waiting.send(facts(20, at_unix_ms=now))
    assert (await (await other.send(facts(10, at_unix_ms=now)))).through == 11
    assert not first.done()
    assert not second.done(), "a frame was put before the one before it"
    go.set()
    assert [(await first).through, (await second).through] == [1, 21]


async def test_a_call_that_ends_in_peace_loses_nothing(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way to a call that the node has ended is sent again in another one, lane by lane in order."""
    monkeypatch.setattr(WireLimits, "awaited_messages", 1)
    monkeypatch.setattr(limits, "MOMENT_SECONDS", 0.0)
    site, client = await opened(sites)
    calls, now = Opened(client), site.parts.clock.now_unix_ms()
    others = site.client()

    async def carry(number: int) -> None:
        mine = lane(client)
        for at in range(FRAMES):
            sent = await mine.send(facts(1_000 * number + 2 * at, at_unix_ms=now))
            # Another call takes the only place.
            await (await lane(others).send(facts(500_000 + 1_000 * number + 2 * at, at_unix_ms=now)))
            assert (await sent).inserted == 2

    await asyncio.gather(*(carry(number) for number in range(10)))
    assert (await (await site.parts.forward(STREAM)).stats()).end == 10 * FRAMES * 2 * 2
    assert len(calls) > 1


async def test_nothing_of_a_refused_lane_is_sent_again(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame behind one that was refused must not be taken by the next call, which knows nothing of the first."""
    site, client = await opened(sites)
    now, bad = site.parts.clock.now_unix_ms(), lane(client)
    frames, taken = bad._frames, streams.FrameStream._take
    ended: list[asyncio.Task[None]] = []

    def take(self: Any, message: Any) -> None:
        taken(self, message)
        # As if the node had ended the call before it read the second one.
        ended.append(asyncio.ensure_future(self._reopen()))

    monkeypatch.setattr(streams.FrameStream, "_take", take)
    refused = await bad.send(facts(0, at_unix_ms=now, zone="lab"))
    behind = await bad.send(facts(2, at_unix_ms=now))
    assert (await refused).held_code
    with pytest.raises(NotReady):
        await behind
    await asyncio.gather(*ended)
    assert not frames._waiting
    assert (await (await site.parts.forward(STREAM)).stats()).end == 0


async def test_large_answers_go_by_a_call_of_their_own(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have the frames of all other links wait; what follows them comes behind them all the same."""
    site, client = await opened(sites)
    calls, now = Opened(client), site.parts.clock.now_unix_ms()

    async def bring(entries: EntryBatch) -> None:
        assert len(entries)

    courier = Courier(client, LINK, STREAM, None, bring)
    small, large = facts(0, at_unix_ms=now), facts(2, 400, at_unix_ms=now)
    assert small.entries is not None and large.entries is not None
    monkeypatch.setattr(carrying, "LANE_BYTES", (small.entries.weight_bytes + large.entries.weight_bytes) // 2)
    sent = [await courier.send(LOG, [each]) for each in (small, large, facts(402, at_unix_ms=now))]
    assert [(await each).inserted for each in sent] == [2, 400, 2]
    assert calls == ["PutLanes", "PutFacts"]
    relayed = GapRecord(1, 2, GapReason.EVICTED, 1_700_000_000_000, "full", "idmz")
    await (await courier.send(LOG, [], [relayed], at=404))
    assert [each.origin_zone for each in await (await site.parts.forward(STREAM)).gaps()] == ["idmz"]
    await courier.close()


async def ended(frames: LaneFrames) -> None:
    """Wait until the node has ended a silent call in peace."""
    await until(frames._reader.done)


async def test_a_frame_for_which_no_call_can_be_begun_fails(sites: Sites) -> None:
    """The connection was closed after the call had ended in peace: who sends then is told, and does not wait."""
    site, client = await opened(sites, idle_timeout_seconds=0.2)
    now, mine = site.parts.clock.now_unix_ms(), lane(client)
    assert (await (await mine.send(facts(0, at_unix_ms=now)))).inserted == 2
    await ended(mine._frames)
    await client.connection.close()
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(await mine.send(facts(2, at_unix_ms=now)), 10)


@pytest.mark.parametrize("how", ["refused", "abandoned"])
async def test_a_lane_that_is_over_sends_nothing_in_the_next_call(sites: Sites, how: str) -> None:
    """The next call knows nothing of the frame that was refused, and would put what comes behind it."""
    site, client = await opened(sites, idle_timeout_seconds=0.2)
    now, mine = site.parts.clock.now_unix_ms(), lane(client)
    assert (await (await mine.send(facts(0, at_unix_ms=now, zone="lab")))).held_code
    if how == "abandoned":
        mine.abandon()
    await ended(mine._frames)
    with pytest.raises(NotReady):
        await mine.send(facts(4, at_unix_ms=now))
    assert (await (await site.parts.forward(STREAM)).stats()).end == 0


@pytest.mark.parametrize("how", ["cancelled", "ended"])
async def test_a_call_that_ends_inside_a_message_gives_everything_back(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A message of more frames than may be under way holds its bytes until the last one is done, or never begins."""
    site, client = await opened(sites)
    begun, go, count = 0, asyncio.Event(), 200

    async def slow(caller: Any, call: PutCall) -> PutOutcome:
        nonlocal begun
        begun += 1
        await go.wait()
        return PutOutcome(call.last)

    monkeypatch.setattr(site.boundary, "put", slow)
    gap = gap_message(GapRecord(5, 5, GapReason.EVICTED, 1_700_000_000_000, "full"))
    fixed: dict[str, Any] = {"link": LINK, "stream": STREAM, "log_id": LOG, "first": 5, "last": 5, "gap": gap}
    first, *more = (pb.PutFrame(**fixed, lane=number, sequence=number) for number in range(count))
    first.more.extend(more)
    call, budget = client.connection.stream("PutLanes"), site.listeners.grpc.admission.budget
    await call.write(first)
    await until(lambda: begun)
    await asyncio.sleep(0.1)
    assert budget.used
    assert begun == 8 * WireLimits().window_frames < count
    if how == "cancelled":
        call.cancel()
    else:
        await call.done_writing()
    go.set()
    acks: list[int] = []
    while how == "ended" and (ack := await call.read()) is not grpc.aio.EOF:
        acks += [ack.sequence, *(each.sequence for each in ack.more)]
    assert sorted(acks) == list(range(count if how == "ended" else 0))
    await until(lambda: not budget.used)


class Requests:
    """Messages as the node reads them, then silence."""

    def __init__(self, *given: pb.PutFrame, endless: bool = False) -> None:
        self._given, self._endless, self.read = list(given), endless, 0

    async def __anext__(self) -> pb.PutFrame:
        await asyncio.sleep(0)
        self.read += 1
        if self._given:
            return self._given.pop(0)
        if not self._endless:
            await asyncio.sleep(3600)
        number = 1_000 + 10 * self.read
        more = [pb.PutFrame(lane=8 + each, sequence=number + each) for each in range(5)]
        return pb.PutFrame(lane=7, sequence=number + 9, more=more)

    def take_over(self) -> Release:
        """Hold nothing."""
        return lambda: None


async def test_nothing_follows_in_a_lane_in_which_something_broke() -> None:
    """What nobody expected ends the call, and the frames behind it are not begun while an ack is written."""
    begun: list[int] = []

    async def work(frame: pb.PutFrame) -> pb.PutAck:
        if frame.sequence == 1:
            raise RuntimeError("broken")
        begun.append(frame.sequence)
        return pb.PutAck(sequence=frame.sequence)

    more = [pb.PutFrame(lane=1, sequence=number) for number in range(1, 9)]
    with pytest.raises(RuntimeError, match="broken"):
        async for _ in Laned(work, window_frames=128).answers(Requests(pb.PutFrame(lane=2, more=more))):
            await asyncio.sleep(0.05)
    assert begun == [0]


async def test_what_broke_is_told_although_other_lanes_go_on() -> None:
    """There is always an ack to be written before it, and it is told all the same."""

    async def work(frame: pb.PutFrame) -> pb.PutAck:
        if frame.sequence == 2:
            raise RuntimeError("broken")
        return pb.PutAck(sequence=frame.sequence)

    given = pb.PutFrame(lane=1, sequence=1, more=[pb.PutFrame(lane=5, sequence=2)])
    with pytest.raises(RuntimeError, match="broken"):
        async with asyncio.timeout(20):
            async for _ in Laned(work, window_frames=128).answers(Requests(given, endless=True)):
                await asyncio.sleep(0.002)


async def test_who_takes_no_acks_is_read_no_further() -> None:
    """Else the acks of frames that cost nothing would fill the node's memory; when he reads they come in parts."""

    async def work(frame: pb.PutFrame) -> pb.PutAck:
        return pb.PutAck(sequence=frame.sequence)

    requests = Requests(endless=True)
    answers = Laned(work, window_frames=128).answers(requests)
    await anext(answers)
    await asyncio.sleep(0.2)
    read = requests.read
    await asyncio.sleep(0.2)
    assert requests.read == read < lanes.UNREAD_ACKS
    parts = [1 + len((await anext(answers)).more) for _ in range(3)]
    assert max(parts) <= 1 + lanes.ACKS_AT_ONCE
    await answers.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(0)


@pytest.mark.parametrize(("count", "detail"), [(9_998, "x"), (4_094, "d" * 990), (4_100, "d" * 990), (11_500, "")])
async def test_many_gap_records_of_one_sender_end_no_call_of_others(sites: Sites, count: int, detail: str) -> None:
    """They go by a call of their link's own, however few facts come with them."""
    site, client = await opened(sites)
    now = site.parts.clock.now_unix_ms()

    async def bring(entries: EntryBatch) -> None:
        assert len(entries)

    gaps = [GapRecord(at, at, GapReason.EVICTED, 1_700_000_000_000, detail, "idmz") for at in range(1, count + 1)]
    sent = [await lane(client).send(facts(10 * at, at_unix_ms=now)) for at in range(5)]
    with suppress(BsfgError):
        await (await Courier(client, LINK, STREAM, None, bring).send(LOG, [], gaps, at=0))
    assert [(await each).inserted for each in sent] == [2] * 5


async def test_a_large_frame_shares_no_message(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is near the limit of a message alone would be beyond it with others."""
    sizes: list[list[int]] = []

    def noted(taken: Any) -> bytes:
        sizes.append([len(each) for each in taken])
        return with_more(taken)

    monkeypatch.setattr(lanes, "with_more", noted)
    site, client = await opened(sites)
    now = site.parts.clock.now_unix_ms()
    sent = [await lane(client).send(facts(1_000 * at, 2 + 200 * (at == 3), at_unix_ms=now)) for at in range(6)]
    assert sum([(await each).inserted for each in sent]) == 12 + 200
    assert all(len(each) == 1 or sum(each) <= lanes.MORE_BYTES for each in sizes)
    assert max(map(max, sizes)) > lanes.MORE_BYTES


@pytest.mark.parametrize("size", [30_000, 100_000])
@pytest.mark.parametrize("method", ["PutLanes", "PutFacts"])
async def test_a_name_that_is_no_text_is_refused_beside_a_batch_of_any_size(
    sites: Sites, size: int, method: str
) -> None:
    """The caller is at fault, whichever way the message was read."""
    _, client = await opened(sites)
    call = client.connection.stream(method)
    await call.write(b"\x0a\x02\xff\xff" + pb.PutFrame(entries=b"x" * size).SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
