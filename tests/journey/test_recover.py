"""Step 7, recover: what a start reports about buffers and consumers."""

from collections.abc import Callable
from dataclasses import replace

from tests.journey.zones import STREAM, Zone, connect

from bsfg.journey.recover import RecoveredBuffer, look_at, recover
from bsfg.ports import Buffer, Checkpoint, Confirmation, ConsumerSpec, ConsumerState, GapRecord
from bsfg.retention import GapReason, Policy
from bsfg.testing.facts import messages

MakeZone = Callable[[str], Zone]


async def test_nothing_there(make_zone: MakeZone) -> None:
    """A new zone has nothing to report."""
    report = await recover(await make_zone("plant").storage())
    assert (report.buffers, report.consumers, report.problems) == ((), (), ())


async def test_positions_after_a_crash(make_zone: MakeZone) -> None:
    """After a crash each consumer continues after what it confirmed, and the report says how much lies before it."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    await plant.append(messages(10))
    cursors = (await plant.storage()).cursors
    await cursors.commit(inbound.link.consumer, Confirmation(through=3, ranges=[(6, 7)]))
    await cursors.sent(inbound.link.consumer, 10)
    await plant.restart()
    report = await recover(await plant.storage())
    (buffer,) = report.buffers
    assert buffer.name == (STREAM, Buffer.STORE)
    assert (buffer.stats.start, buffer.stats.end, buffer.gaps) == (0, 10, {})
    (consumer,) = report.consumers
    assert (consumer.next_to_send, consumer.committed, consumer.ranges, consumer.backlog) == (4, 3, ((6, 7),), 4)
    assert report.problems == ()
    assert (consumer.name, consumer.retired, consumer.problem) == (inbound.link.consumer, False, None)


async def test_gaps_are_counted_by_reason(make_zone: MakeZone) -> None:
    """Own gap records are counted in offsets by reason; those of other zones are not this buffer's."""
    zone = make_zone("plant")
    await zone.append(messages(10))
    store = await zone.store()
    await store.record_gaps([GapRecord(2, 4, GapReason.DAMAGED, 0)])
    await store.record_gaps([GapRecord(7, 7, GapReason.QUARANTINED, 0)])
    await store.record_gaps([GapRecord(0, 99, GapReason.EVICTED, 0, origin_zone="lab")])
    report = await recover(await zone.storage())
    assert report.buffers[0].gaps == {GapReason.DAMAGED: 3, GapReason.QUARANTINED: 1}
    assert report.problems == ("3 offsets of the store buffer of operational are damaged",)


async def test_retired_consumers_are_listed(make_zone: MakeZone) -> None:
    """A retired consumer appears in the report and is no problem."""
    zone = make_zone("plant")
    await zone.append(messages(2))
    cursors = (await zone.storage()).cursors
    await cursors.create(ConsumerSpec("old", STREAM))
    await cursors.retire("old", "replaced")
    report = await recover(await zone.storage())
    assert report.consumers[0].retired
    assert report.problems == ()


async def test_buffers_are_opened_under_their_policies(make_zone: MakeZone) -> None:
    """Recovery is the first to open the buffers, so it does that with the policies of the zone."""
    zone = make_zone("plant")
    await zone.append(messages(1))
    await zone.restart()
    policies = {(STREAM, Buffer.STORE): Policy(capacity_bytes=123_456)}
    report = await recover(await zone.storage(), policies)
    assert report.buffers[0].stats.capacity_bytes == 123_456


async def test_positions_that_do_not_fit_are_named(make_zone: MakeZone) -> None:
    """A position of another log, beyond the end, or of a buffer that is gone is named with its code."""
    zone = make_zone("plant")
    await zone.append(messages(5))
    stats = await (await zone.store()).stats()
    buffer = RecoveredBuffer(stats, {})
    fine = ConsumerState(ConsumerSpec("a", STREAM), Checkpoint(5, 4), (), stats.log_id, 0)
    assert look_at(fine, buffer).problem is None
    assert look_at(replace(fine, log_id="another"), buffer).problem == "foreign_log"
    assert look_at(replace(fine, checkpoint=Checkpoint(6, 5)), buffer).problem == "offset_out_of_range"
    assert look_at(replace(fine, ranges=((7, 9),)), buffer).problem == "offset_out_of_range"
    assert look_at(fine, None).problem == "unknown_buffer"


async def test_replication_goes_on_after_recovery(make_zone: MakeZone) -> None:
    """Recovery needs no procedure: both zones restart, are looked at, and the link simply goes on."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise)
    await plant.append(messages(5))
    await inbound.pull()
    await plant.append(messages(5, first=5))
    for zone in (plant, enterprise):
        await zone.restart()
        assert (await recover(await zone.storage())).problems == ()
    await inbound.pull()
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(10)]
