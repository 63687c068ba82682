"""What is refused for good passes the frontier, is kept aside, and is listed in both zones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.journey.zones import STREAM, Inbound, Zone, connect, log_backend, origin_span, spoil_keys

from bsfg import digest, gapbook
from bsfg.errors import GapsFull, PeerUnreachable, QuarantineFull
from bsfg.fact import Message
from bsfg.journey.link import FetchRequest, Refusal, SessionMemory
from bsfg.ports import ConsumerSpec, GapRecord, StartAt
from bsfg.retention import GapReason, Policy
from bsfg.sealing import reseal
from bsfg.testing.facts import WeakHasher, altered, message, messages, sealed

MakeZone = Callable[[str], Zone]


async def conflicting(make_zone: MakeZone) -> tuple[Zone, Zone, Inbound]:
    """Make a link whose receiver already has another body under the ids of the facts 2 and 3 of six."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise, relayed=["idmz"])
    other = altered(messages(2, first=2))
    await (await enterprise.forward()).put_if_absent(sealed(other), origin_span("idmz", 0, 2))
    await plant.append(messages(6))
    return plant, enterprise, inbound


async def test_conflicts_pass_and_are_listed_on_both_sides(make_zone: MakeZone) -> None:
    """A conflicting fact is quarantined by the receiver, named in the confirm, and recorded as a gap by both."""
    plant, enterprise, inbound = await conflicting(make_zone)
    progress = await inbound.pull()
    assert (progress.inserted, progress.acknowledged) == (4, 5)
    assert progress.refused == (Refusal(2, 3, "conflict"),)
    quarantined = await (await enterprise.forward()).quarantine()
    assert [aside.key.message_id for aside in quarantined] == ["0-000002", "0-000003"]
    assert {aside.reason for aside in quarantined} == {"conflict"}
    (here,) = await enterprise.forward_gaps()
    assert (here.first, here.last, here.reason, here.origin_zone) == (2, 3, GapReason.QUARANTINED, "plant")
    (there,) = await (await plant.store()).gaps()
    assert (there.first, there.last, there.reason, there.origin_zone) == (2, 3, GapReason.QUARANTINED, None)
    assert there.detail == f"{inbound.link.consumer}: conflict"
    assert await plant.committed(inbound.link.consumer) == 5


async def test_quarantined_facts_stay_with_their_sender(make_zone: MakeZone) -> None:
    """The record of a refusal hides nothing: another receiver still gets the fact itself."""
    plant, _, inbound = await conflicting(make_zone)
    await inbound.pull()
    cloud = make_zone("cloud")
    await (await connect(plant, cloud)).pull()
    assert await cloud.received_ids() == [f"0-{number:06}" for number in range(6)]


async def test_repeated_refusal_is_recorded_once(make_zone: MakeZone) -> None:
    """When the confirm of a refusal gets lost, the repeat quarantines and records nothing twice."""
    plant, enterprise, inbound = await conflicting(make_zone)
    confirm = inbound.link.confirm

    async def lost(*_: object, **__: object) -> int:
        raise PeerUnreachable("lost")

    inbound.link.confirm = lost  # type: ignore[method-assign]
    for _ in range(3):
        try:
            await inbound.pull()
        except PeerUnreachable:
            enterprise.clock.advance(1)
    inbound.link.confirm = confirm  # type: ignore[method-assign]
    await enterprise.restart()
    inbound.memory = SessionMemory()
    await inbound.pull()
    assert len(await (await enterprise.forward()).quarantine()) == 2
    assert len(await enterprise.forward_gaps()) == 1
    assert len(await (await plant.store()).gaps()) == 1


async def test_hash_collision_is_named_as_such(make_zone: MakeZone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bodies with one digest under one id are told apart from an ordinary conflict."""
    weak = WeakHasher()
    monkeypatch.setitem(digest._known, weak.name, weak)
    enterprise = make_zone("enterprise")
    plant = make_zone("plant")
    inbound = await connect(plant, enterprise)
    first, second = message("a", 1), message("a", 2)
    forward = await enterprise.forward()
    await forward.put_if_absent(sealed([first], hasher=weak), origin_span("plant", 0, 1))
    batch = sealed([second], hasher=weak)
    assert reseal(batch).sealed
    await (await plant.store()).append(batch)
    progress = await inbound.pull()
    assert progress.refused == (Refusal(0, 0, "hash_collision"),)


async def test_what_cannot_be_compared_is_told_to_the_sender(tmp_path: Path) -> None:
    """A fact comes again while the keys of what left cannot be read: it is kept aside, recorded, and told."""
    plant, enterprise = (Zone(name, log_backend(tmp_path / name)) for name in ("plant", "enterprise"))
    inbound = await connect(plant, enterprise)
    await plant.append(messages(3))
    inbound.link.loses_confirmations = True
    with pytest.raises(PeerUnreachable):
        await inbound.pull()
    inbound.link.loses_confirmations = False
    await spoil_keys(await enterprise.forward())
    for zone in (plant, enterprise):
        zone.clock.advance(1)
    inbound.memory = SessionMemory()
    progress = await inbound.pull()
    assert (progress.inserted, progress.repeated, progress.acknowledged) == (0, 0, 2)
    assert progress.refused == (Refusal(0, 2, "undecided"),)
    assert [aside.reason for aside in await (await enterprise.forward()).quarantine()] == ["undecided"] * 3
    here = [gap for gap in await enterprise.forward_gaps() if gap.reason == GapReason.QUARANTINED]
    assert [(gap.first, gap.last, gap.origin_zone) for gap in here] == [(0, 2, "plant")]
    (there,) = await (await plant.store()).gaps()
    assert (there.first, there.last, there.reason) == (0, 2, GapReason.QUARANTINED)
    assert there.detail == f"{inbound.link.consumer}: undecided"
    for zone in (plant, enterprise):
        await zone.restart()


async def expiring(make_zone: MakeZone, facts: list[Message]) -> tuple[Zone, Zone, Inbound]:
    """Make a link with a max age of an hour, three facts two hours old and more that are fresh."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise, max_age_seconds=3600)
    await plant.append(facts[:3])
    plant.clock.advance(7200)
    enterprise.clock.advance(7200)
    await plant.append(facts[3:])
    return plant, enterprise, inbound


async def test_expired_facts_are_set_aside(make_zone: MakeZone) -> None:
    """What became durable at its origin longer ago than max age is quarantined as expired, and the rest is taken."""
    plant, enterprise, inbound = await expiring(make_zone, messages(5))
    progress = await inbound.pull()
    assert (progress.inserted, progress.acknowledged) == (2, 4)
    assert progress.refused == (Refusal(0, 2, "expired", "older than 3600 s"),)
    assert await enterprise.received_ids() == ["0-000003", "0-000004"]
    quarantined = await (await enterprise.forward()).quarantine()
    assert [(aside.reason, aside.key.message_id) for aside in quarantined] == [
        ("expired", f"0-{number:06}") for number in range(3)
    ]
    assert [aside.facts.to_messages()[0] for aside in quarantined] == messages(3)
    (gap,) = await (await plant.store()).gaps()
    assert (gap.first, gap.last, gap.detail) == (0, 2, f"{inbound.link.consumer}: expired: older than 3600 s")


async def test_all_expired_still_passes(make_zone: MakeZone) -> None:
    """An answer of which nothing can be put is confirmed all the same."""
    plant, enterprise, inbound = await expiring(make_zone, messages(3))
    assert (await inbound.pull()).acknowledged == 2
    assert await enterprise.received() == []
    assert await plant.committed(inbound.link.consumer) == 2


async def test_old_fact_that_is_here_is_a_repeat(make_zone: MakeZone) -> None:
    """A fact that arrived in time and is offered again late is a repeat, not an expired one."""
    plant, enterprise, inbound = await expiring(make_zone, messages(3))
    in_time = replace(inbound.rules, max_age_seconds=None)
    confirm = inbound.link.confirm

    async def lost(*_: object, **__: object) -> int:
        raise PeerUnreachable("lost")

    inbound.link.confirm, inbound.rules = lost, in_time  # type: ignore[method-assign]
    try:
        await inbound.pull()
    except PeerUnreachable:
        inbound.link.confirm = confirm  # type: ignore[method-assign]
    inbound.rules = replace(in_time, max_age_seconds=3600)
    progress = await inbound.pull()
    assert (progress.repeated, progress.refused) == (3, ())
    assert await (await enterprise.forward()).quarantine() == []
    assert await plant.committed(inbound.link.consumer) == 2


async def test_nothing_expires_while_the_clock_is_in_doubt(make_zone: MakeZone) -> None:
    """A receiver that does not trust its own clock takes old facts."""
    _, _, inbound = await expiring(make_zone, messages(4))
    progress = await inbound.pull(clock_trusted=False)
    assert (progress.inserted, progress.refused) == (4, ())


async def test_gaps_of_the_sender_are_stored_with_their_origin(make_zone: MakeZone) -> None:
    """A range that the sender removed arrives as a gap record in the sender's offsets, and the frontier passes it."""
    plant, lab = make_zone("plant"), make_zone("lab")
    first = await connect(plant, make_zone("enterprise"))
    await plant.append(messages(6))
    await first.pull()
    await (await plant.store()).truncate_before(4)
    late = await connect(plant, lab)
    late.link.consumer = "from-zero"
    spec = ConsumerSpec("from-zero", STREAM, start=StartAt.OFFSET, start_value=0)
    await (await plant.storage()).cursors.create(spec)
    progress = await late.pull()
    assert (progress.gaps, progress.inserted, progress.acknowledged) == (1, 2, 5)
    (gap,) = await lab.forward_gaps()
    assert replace(gap, at_unix_ms=0, detail="") == GapRecord(0, 3, GapReason.TRUNCATED, 0, "", "plant")


async def test_gap_records_without_room_pause_the_link(make_zone: MakeZone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender whose gaps have no room left waits: nothing more of it is confirmed, and nothing is lost."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    inbound = await connect(plant, enterprise, relayed=["idmz"])
    facts = messages(8)
    await (await enterprise.forward()).put_if_absent(sealed(altered(facts[::2])), origin_span("idmz", 0, 4))
    await plant.append(facts)
    monkeypatch.setattr(gapbook, "TOLD_RANGES_MAX", 2)
    inbound.request = FetchRequest(max_facts=1)
    turns = await inbound.pull_all()
    assert isinstance(turns[-1].paused, GapsFull)
    assert await plant.committed(inbound.link.consumer) == 3
    assert (await (await enterprise.forward()).stats()).gaps_full
    monkeypatch.undo()
    await inbound.pull_all()
    assert await plant.committed(inbound.link.consumer) == 7
    assert [gap.first for gap in await enterprise.forward_gaps()] == [0, 2, 4, 6]


async def test_a_full_quarantine_pauses_the_link(make_zone: MakeZone) -> None:
    """Without room for what it must refuse a link pauses: nothing is stored, dropped or confirmed until then."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    enterprise.forward_policy = Policy(quarantine_bytes=3_000)
    inbound = await connect(plant, enterprise, relayed=["idmz"])
    forward = await enterprise.forward()
    await forward.put_if_absent(sealed(altered(messages(40))), origin_span("idmz", 0, 40))
    await plant.append(messages(41))
    inbound.request = FetchRequest(max_facts=1)
    turns = await inbound.pull_all()
    paused = turns[-1].paused
    assert isinstance(paused, QuarantineFull)
    kept = len(await forward.quarantine())
    assert 0 < kept < 40
    assert (await inbound.pull()).paused is not None
    assert await plant.committed(inbound.link.consumer) == kept - 1
    assert (await forward.stats()).quarantine_full
    assert [gap.last for gap in await enterprise.forward_gaps()] == [kept - 1]
    while turns[-1].paused is not None or turns[-1].backlog:
        for aside in await forward.quarantine():
            await forward.release_quarantined(aside.id, "exported")
        turns = await inbound.pull_all()
    assert await plant.committed(inbound.link.consumer) == 40
    assert (await enterprise.received_ids())[-1] == "0-000040"
