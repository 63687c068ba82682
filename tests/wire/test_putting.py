"""A pipeline puts what a link brought: checked by the link's rules, acknowledged frame by frame."""

import numpy as np
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BufferFull, FrameInvalid, GateHeld, LeaseLost, PermissionRefused, UnknownStream
from bsfg.fact import Fact, Key, Message
from bsfg.ports import Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.testing.facts import altered, messages, sealed
from bsfg.wire.streams import PutStream

LINK, LOG = "from-enterprise", "log-of-enterprise"


def frame(facts: list[Message], first: int, at_unix_ms: int) -> Frame:
    """Make a frame as it was fetched from the sender."""
    offsets = np.arange(first, first + len(facts))
    entries = EntryBatch.of(sealed(facts).record_batch, offsets, at_unix_ms)
    return Frame(first, first + len(facts) - 1, entries)


async def pipeline(sites: Sites, **settings: object) -> tuple[Site, PutStream]:
    """Open a site and a stream of frames to it, in the role of its pipeline."""
    site = await sites(**settings)
    site.act_as("pipeline")
    return site, site.client().put_stream(LINK, STREAM, LOG)


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_frames_are_put_once_and_in_order(sites: Sites, storage: str) -> None:
    """What is new is inserted, what is there is a repeat, and the ack says through where to confirm."""
    site, puts = await pipeline(sites, storage=storage)
    now = site.parts.clock.now_unix_ms()
    facts = messages(30, from_zone="enterprise")
    async with puts:
        first = await puts.put(frame(facts[:20], 100, now))
        second = await puts.put(frame(facts[10:], 110, now))
    assert (first.inserted, first.repeated, first.through, first.refusals) == (20, 0, 119, [])
    assert (second.inserted, second.repeated, second.through) == (10, 10, 129)
    forward = await site.parts.forward(STREAM)
    assert second.chain_head == (await forward.stats()).chain_head
    entry = await forward.get(Key("enterprise", "0-000025"))
    assert entry is not None
    assert entry.origin is not None
    assert (entry.origin.zone, entry.origin.offset, entry.origin.appended_at_unix_ms) == ("enterprise", 125, now)


async def test_conflicts_are_refused_and_pass(sites: Sites) -> None:
    """A fact that conflicts is quarantined and reported, so that the sender may be told to move on."""
    site, puts = await pipeline(sites)
    now = site.parts.clock.now_unix_ms()
    facts = messages(4, from_zone="enterprise")
    async with puts:
        await puts.put(frame(facts[:2], 0, now))
        outcome = await puts.put(frame([*altered(facts[:2]), *facts[2:]], 2, now))
    assert (outcome.inserted, outcome.through) == (2, 5)
    [refusal] = outcome.refusals
    assert (refusal.first, refusal.last, refusal.reason) == (2, 3, "conflict")
    assert len(await (await site.parts.forward(STREAM)).quarantine()) == 2


async def test_gap_records_travel_with_the_frames(sites: Sites) -> None:
    """A gap in the sender's log and gap records of zones behind it are stored with their origin."""
    site, puts = await pipeline(sites)
    gap = GapRecord(5, 9, GapReason.EXPIRED, 1_700_000_000_000, "too old")
    relayed = GapRecord(1, 2, GapReason.EVICTED, 1_700_000_000_000, "full", "idmz")
    async with puts:
        outcome = await puts.put(Frame(5, 9, gap=gap), [relayed])
    assert outcome.through == 9
    stored = await (await site.parts.forward(STREAM)).gaps()
    assert {(each.first, each.last, each.reason, each.origin_zone) for each in stored} == {
        (5, 9, GapReason.EXPIRED, "enterprise"),
        (1, 2, GapReason.EVICTED, "idmz"),
    }


async def test_what_a_link_may_not_bring_holds_it(sites: Sites) -> None:
    """A foreign from_zone, in a fact or in a gap record, stores nothing, holds the link and is recorded."""
    site, puts = await pipeline(sites)
    now = site.parts.clock.now_unix_ms()
    foreign = GapRecord(0, 0, GapReason.EVICTED, now, "", "lab")
    async with puts:
        facts = await puts.put(frame(messages(2, from_zone="lab"), 0, now))
    async with site.client().put_stream(LINK, STREAM, LOG) as puts:
        gaps = await puts.put(frame(messages(2, from_zone="enterprise"), 0, now), [foreign])
    assert [(each.held_code, each.through, each.inserted) for each in (facts, gaps)] == [
        ("zone_not_allowed", -1, 0)
    ] * 2
    assert "lab" in facts.held_detail
    assert (await (await site.parts.forward(STREAM)).stats()).end == 0
    assert [decision.rule for decision, _ in site.refusals] == ["from_zone_in_row"] * 2


async def test_altered_bytes_are_asked_for_again(sites: Sites) -> None:
    """What stands before altered bytes is put; the ack names the place to fetch again."""
    site, puts = await pipeline(sites)
    facts = messages(5, from_zone="enterprise")
    good = frame(facts, 0, site.parts.clock.now_unix_ms())
    assert good.entries is not None
    objects = good.entries.values("object")
    objects[3] = Fact.of("a:b", "c", "altered").object
    bad = good.entries.with_columns(object=FactBatch.from_messages(facts).column("object").from_pandas(objects))
    async with puts:
        outcome = await puts.put(Frame(0, 4, bad))
    assert (outcome.inserted, outcome.through, outcome.refetch_at) == (3, 2, 3)


async def test_old_facts_are_set_aside(sites: Sites) -> None:
    """Facts that are older than max age at their origin are quarantined and pass."""
    site, puts = await pipeline(sites, stream='max_age = "1h"\nretention = "1h"')
    old = site.parts.clock.now_unix_ms() - 7_200_000
    async with puts:
        outcome = await puts.put(frame(messages(3, from_zone="enterprise"), 0, old))
    assert (outcome.inserted, outcome.through) == (0, 2)
    assert [refusal.reason for refusal in outcome.refusals] == ["expired"]


async def test_frames_that_are_none_are_refused_alone(sites: Sites) -> None:
    """Offsets that do not fit hold the link; an unknown stream and an empty frame fail alone."""
    site, puts = await pipeline(sites)
    now = site.parts.clock.now_unix_ms()
    wrong = frame(messages(3, from_zone="enterprise"), 0, now)
    async with puts:
        assert (await puts.put(Frame(0, 7, wrong.entries))).held_code == "frame_invalid"
    async with site.client().put_stream(LINK, STREAM, LOG) as puts:
        with pytest.raises(FrameInvalid):
            await puts.put(Frame(0, 2))
    async with site.client().put_stream(LINK, STREAM, LOG) as puts:
        assert (await puts.put(wrong)).inserted == 3
    with pytest.raises((UnknownStream, PermissionRefused)):
        await site.client().put_stream(LINK, "nowhere", LOG).put(wrong)
    with pytest.raises(PermissionRefused):
        await site.client().put_stream("no-link", STREAM, LOG).put(wrong)


async def test_only_the_pipeline_with_the_lease_puts(sites: Sites) -> None:
    """Other roles may not put; a second pipeline is told that the lease is not its own; a held gate stops all."""
    site, puts = await pipeline(sites)
    now = site.parts.clock.now_unix_ms()
    one = frame(messages(1, from_zone="enterprise"), 0, now)
    lease = site.parts.links.leases.acquire(LINK, "job 1", 60_000)
    async with puts:
        with pytest.raises(LeaseLost, match="job 1"):
            await puts.put(one)
    async with site.client().put_stream(LINK, STREAM, LOG, lease=lease.token) as own:
        assert (await own.put(one)).inserted == 1
        site.parts.links.hold(LINK, "receiver", by="operator", reason="look first")
        with pytest.raises(GateHeld, match="look first"):
            await own.put(one)
    for identity in ("app", "operator", "viewer"):
        site.act_as(identity)
        with pytest.raises(PermissionRefused):
            await site.client().put_stream(LINK, STREAM, LOG, lease=lease.token).put(one)


async def test_a_full_forward_buffer_is_said_so(sites: Sites) -> None:
    """A full forward buffer refuses the frame with a retryable error; nothing of it may be confirmed."""
    site, puts = await pipeline(sites, stream='forward_capacity = "1MiB"\nmax_batch = "1MiB"\nmax_object = "64KiB"')
    await site.consumer("historian", buffer=(await site.parts.forward(STREAM)).buffer)
    now = site.parts.clock.now_unix_ms()
    async with puts:
        with pytest.raises(BufferFull):
            for number in range(40):
                facts = messages(50, first=50 * number, from_zone="enterprise", object_bytes=2_000)
                await puts.put(frame(facts, 50 * number, now))
