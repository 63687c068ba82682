"""Two zones and one link: the scenarios of the replay model and of peer replication."""

from collections.abc import Callable, Sequence

import pytest
from tests.journey.zones import STREAM, DirectLink, Inbound, Zone, connect

from bsfg.errors import BufferFull, PeerUnreachable
from bsfg.journey.link import FetchRequest, PeerPosition, Refusal
from bsfg.ports import Confirmation, ConsumerSpec, Result
from bsfg.retention import Policy
from bsfg.testing.facts import messages

MakeZone = Callable[[str], Zone]


def ids(facts: int, first: int = 0) -> list[str]:
    """Give the message ids of numbered test facts."""
    return [f"0-{number:06}" for number in range(first, first + facts)]


async def linked(make_zone: MakeZone) -> tuple[Zone, Zone, Inbound]:
    """Make a plant and an enterprise that pulls from it."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    return plant, enterprise, await connect(plant, enterprise)


async def test_replication_loop_step_by_step(make_zone: MakeZone) -> None:
    """A fetch of 100 gives offsets 0 to 99, their confirmation advances the cursor to 99, the next starts at 100."""
    plant, enterprise, inbound = await linked(make_zone)
    inbound.request = FetchRequest(max_facts=100)
    await plant.append(messages(150))
    first = await inbound.pull()
    assert (first.inserted, first.through, first.acknowledged, first.backlog) == (100, 99, 99, 50)
    assert await plant.committed(inbound.link.consumer) == 99
    second = await inbound.pull()
    assert (second.inserted, second.through, second.acknowledged, second.backlog) == (50, 149, 149, 0)
    assert await enterprise.received_ids() == ids(150)


async def test_nothing_new_is_no_progress(make_zone: MakeZone) -> None:
    """An answer without facts changes nothing and is not confirmed."""
    _, enterprise, inbound = await linked(make_zone)
    progress = await inbound.pull()
    assert not progress.moved
    assert (progress.held, progress.paused, progress.refetch_at) == (None, None, None)
    assert inbound.link.confirmations == []
    assert await enterprise.received() == []


async def test_entries_keep_envelope_digest_and_origin(make_zone: MakeZone) -> None:
    """A received entry is the fact as it was said, with the zone, offset and time it had at its sender."""
    plant, enterprise, inbound = await linked(make_zone)
    facts = messages(3)
    outcome = await plant.append(facts)
    plant.clock.advance(5)
    enterprise.clock.advance(60)
    await inbound.pull()
    entries = await enterprise.received()
    assert [entry.message for entry in entries] == facts
    assert [entry.digest for entry in entries] == outcome.facts.digests()
    origins = [entry.origin for entry in entries]
    assert [(o.zone, o.offset, o.appended_at_unix_ms) for o in origins if o] == [
        ("plant", offset, outcome.receipt.appended_at_unix_ms) for offset in range(3)
    ]


async def test_partition_with_appends_on_both_sides(make_zone: MakeZone) -> None:
    """During a partition both zones append and read; afterwards each receives what the other said, in order."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    down, up = await connect(plant, enterprise), await connect(enterprise, plant)
    await plant.append(messages(5))
    await down.pull()
    down.link.up = up.link.up = False
    for turn in range(3):
        await plant.append(messages(4, first=5 + 4 * turn))
        await enterprise.append(messages(3, first=3 * turn, seed=1, from_zone="enterprise"))
        with pytest.raises(PeerUnreachable):
            await down.pull()
        with pytest.raises(PeerUnreachable):
            await up.pull()
    assert await enterprise.received_ids() == ids(5)
    assert await plant.committed(down.link.consumer) == 4
    down.link.up = up.link.up = True
    await down.pull_all()
    await up.pull_all()
    assert await enterprise.received_ids() == ids(17)
    assert await plant.received_ids() == [f"1-{number:06}" for number in range(9)]
    assert await plant.committed(down.link.consumer) == 16


async def test_receiver_crash_after_put_before_confirm(make_zone: MakeZone) -> None:
    """Facts put but not confirmed are offered again after a restart, are repeats then, and are there once."""
    plant, enterprise, inbound = await linked(make_zone)
    await plant.append(messages(10))
    confirm = inbound.link.confirm

    async def lost(*_: object, **__: object) -> int:
        raise PeerUnreachable("the confirmation did not arrive")

    inbound.link.confirm = lost  # type: ignore[method-assign]
    with pytest.raises(PeerUnreachable):
        await inbound.pull()
    await enterprise.restart()
    inbound.link.confirm = confirm  # type: ignore[method-assign]
    inbound.memory = type(inbound.memory)()
    progress = await inbound.pull()
    assert (progress.inserted, progress.repeated, progress.acknowledged) == (0, 10, 9)
    assert await enterprise.received_ids() == ids(10)


async def test_confirmation_counted_but_answer_lost(make_zone: MakeZone) -> None:
    """A sender that counted a confirmation whose answer got lost goes on after it, and that is no jump."""
    plant, enterprise, inbound = await linked(make_zone)
    await plant.append(messages(10))
    confirm = inbound.link.confirm

    async def answer_lost(confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        await confirm(confirmation, refusals)
        raise PeerUnreachable("the answer did not arrive")

    inbound.link.confirm = answer_lost  # type: ignore[method-assign]
    with pytest.raises(PeerUnreachable):
        await inbound.pull()
    inbound.link.confirm = confirm  # type: ignore[method-assign]
    await plant.append(messages(2, first=10))
    progress = await inbound.pull()
    assert progress.held is None
    assert (progress.inserted, progress.through) == (2, 11)
    assert await enterprise.received_ids() == ids(12)


async def test_sender_crash_with_unconfirmed_facts(make_zone: MakeZone) -> None:
    """A sender that restarts still has its facts and its cursor, and serves what follows the last confirmation."""
    plant, enterprise, inbound = await linked(make_zone)
    inbound.request = FetchRequest(max_facts=4)
    await plant.append(messages(10))
    await inbound.pull()
    await plant.restart()
    progress = await inbound.pull()
    assert (progress.through, progress.held) == (7, None)
    await plant.restart()
    await inbound.pull_all()
    assert await enterprise.received_ids() == ids(10)


async def test_backlog_drains_in_bounded_answers(make_zone: MakeZone) -> None:
    """A large backlog comes in answers of the size asked for, and the backlog counts down."""
    plant, enterprise, inbound = await linked(make_zone)
    inbound.request = FetchRequest(max_facts=64)
    await plant.append(messages(1_000))
    turns = await inbound.pull_all()
    assert [turn.backlog for turn in turns] == [*range(936, 0, -64), 0]
    assert all(turn.inserted <= 64 for turn in turns)
    assert await enterprise.received_ids() == ids(1_000)


async def test_out_of_order_frontier_of_the_replay_model(make_zone: MakeZone) -> None:
    """With 0 to 5 stored and all but 3 confirmed the cursor stands at 2; with 3 confirmed too it stands at 5."""
    plant, _, inbound = await linked(make_zone)
    await plant.append(messages(6))
    link = inbound.link
    assert await link.confirm(Confirmation(ranges=[(0, 2), (4, 5)])) == 2
    assert [frame.first for frame in (await link.fetch(FetchRequest())).frames] == [3]
    assert await link.confirm(Confirmation(ranges=[(3, 3)])) == 5


async def test_out_of_order_frontier_of_peer_replication(make_zone: MakeZone) -> None:
    """Confirmed through 100 and 102 to 103, the frontier waits at 100 for 101, then jumps to 103."""
    plant, _, inbound = await linked(make_zone)
    await plant.append(messages(104))
    assert await inbound.link.confirm(Confirmation(through=100, ranges=[(102, 103)])) == 100
    await plant.restart()
    assert await inbound.link.confirm(Confirmation(ranges=[(101, 101)])) == 103


async def test_recovery_proposes_from_the_checkpoint(make_zone: MakeZone) -> None:
    """With the checkpoint at 5, a reconnecting receiver is offered 6 onward, and repeats are silently known."""
    plant, enterprise, inbound = await linked(make_zone)
    await plant.append(messages(6))
    await inbound.pull()
    await plant.append(messages(4, first=6))
    await plant.restart()
    await enterprise.restart()
    fetched = await inbound.link.fetch(FetchRequest())
    assert (fetched.start, fetched.end) == (6, 10)
    await inbound.pull()
    assert await enterprise.received_ids() == ids(10)


async def test_two_receivers_have_separate_cursors(make_zone: MakeZone) -> None:
    """Each receiving zone has its own cursor; a slow one does not slow the other."""
    plant, enterprise, cloud = make_zone("plant"), make_zone("enterprise"), make_zone("cloud")
    fast, slow = await connect(plant, enterprise), await connect(plant, cloud)
    slow.request = FetchRequest(max_facts=2)
    await plant.append(messages(9))
    await fast.pull_all()
    await slow.pull()
    assert await plant.committed(fast.link.consumer) == 8
    assert await plant.committed(slow.link.consumer) == 1
    assert await (await plant.store()).frontier() == 1
    assert await cloud.received_ids() == ids(2)


async def test_full_forward_buffer_pauses_the_pull(make_zone: MakeZone) -> None:
    """A forward buffer full of unread facts pauses the link without loss; it goes on when room was made."""
    plant, enterprise, inbound = await linked(make_zone)
    enterprise.forward_policy = Policy(capacity_bytes=20_000)
    cursors = (await enterprise.storage()).cursors
    forward = await enterprise.forward()
    await cursors.create(ConsumerSpec("app", STREAM, forward.buffer))
    inbound.request = FetchRequest(max_facts=10)
    await plant.append(messages(400))
    turns = await inbound.pull_all()
    assert isinstance(turns[-1].paused, BufferFull)
    assert turns[-1].acknowledged is None
    held_back = len(await enterprise.received())
    assert 0 < held_back < 400
    assert await plant.committed(inbound.link.consumer) == held_back - 1
    await cursors.commit("app", Confirmation(through=held_back - 1))
    assert (await inbound.pull()).inserted == 10


async def test_peer_heads_are_exchanged(make_zone: MakeZone) -> None:
    """At a confirm the sender learns the receiver's chain head, and the receiver remembers the sender's."""
    plant, enterprise, inbound = await linked(make_zone)
    outcome = await plant.append(messages(3))
    await inbound.pull()
    state = await (await plant.storage()).cursors.consumer(inbound.link.consumer)
    assert state.peer_head == (await (await enterprise.forward()).stats()).chain_head
    position = await inbound.memory.recall()
    assert position.chain_head == outcome.chain_head
    assert position == PeerPosition(
        log_id=(await plant.store()).log_id, latest_start=3, acknowledged=2, end=3, chain_head=outcome.chain_head
    )


async def test_before_put_must_succeed_first(make_zone: MakeZone) -> None:
    """What must be here before the facts, such as artifacts, is brought first; if that fails nothing is put."""
    plant, enterprise, inbound = await linked(make_zone)
    await plant.append(messages(2))
    seen: list[int] = []

    async def bring(facts: object) -> None:
        seen.append(len(facts))  # type: ignore[arg-type]
        if seen == [0, 2]:
            raise PeerUnreachable("no artifact yet")

    inbound.before_put = bring
    with pytest.raises(PeerUnreachable):
        await inbound.pull()
    assert await enterprise.received() == []
    assert await plant.committed(inbound.link.consumer) == -1
    await inbound.pull()
    assert seen == [0, 2, 0, 2]
    assert await enterprise.received_ids() == ids(2)


async def test_repeat_at_the_producer_does_not_travel(make_zone: MakeZone) -> None:
    """A producer's retry is known in its own zone and never offered to another."""
    plant, enterprise, inbound = await linked(make_zone)
    await plant.append(messages(3))
    outcome = await plant.append(messages(3))
    assert outcome.receipt.count(Result.ALREADY_EXISTS) == 3
    progress = await inbound.pull()
    assert (progress.inserted, progress.repeated) == (3, 0)
    assert await enterprise.received_ids() == ids(3)


def test_direct_link_is_a_peer_link() -> None:
    """The link of these tests has the shape that the pull asks for."""
    from bsfg.journey.link import PeerLink

    def takes(link: PeerLink) -> PeerLink:
        return link

    assert takes(DirectLink(Zone("plant", None), "c")).zone == "plant"  # type: ignore[arg-type]
