"""Step 6, truncate: what may leave a store buffer, and what keeps it."""

from collections.abc import Callable

import pytest
from tests.journey.zones import STREAM, Zone, append, connect, origin_span

from bsfg.errors import InvalidArgument, PeerUnreachable, TruncateRefused
from bsfg.gate import Mode
from bsfg.journey.link import PeerPosition
from bsfg.journey.truncate import InStep, Truncation, decide, truncate, truncate_before
from bsfg.ports import Buffer, Checkpoint, Confirmation, ConsumerSpec, ConsumerState, Result
from bsfg.retention import DAY_SECONDS, GapReason, Policy
from bsfg.testing.facts import batch, messages

MakeZone = Callable[[str], Zone]
RETENTION_SECONDS = 3600


def state(name: str, committed: int, *, required: bool = True, **fields: object) -> ConsumerState:
    """Describe a consumer for a decision."""
    spec = ConsumerSpec(name, str(fields.pop("stream", STREAM)), fields.pop("buffer", Buffer.STORE), required=required)  # type: ignore[arg-type]
    return ConsumerState(spec, Checkpoint(committed + 1, committed), (), "log", 0, **fields)  # type: ignore[arg-type]


def test_the_slowest_required_consumer_decides() -> None:
    """The frontier is the lowest of the required, living consumers of this very buffer."""
    consumers = [
        state("a", 9),
        state("b", 4),
        state("optional", 0, required=False),
        state("retired", 1, retired_reason="gone"),
        state("elsewhere", 2, stream="audit"),
        state("reader", 3, buffer=Buffer.FORWARD),
    ]
    assert decide(consumers, STREAM, Buffer.STORE, {}) == Truncation(4, (), ("b",))


def test_without_required_consumers_nothing_leaves() -> None:
    """When nobody is required nobody has confirmed: the frontier stands before the first fact."""
    assert decide([state("optional", 7, required=False)], STREAM, Buffer.STORE, {}) == Truncation(-1)


@pytest.mark.parametrize("mode", Mode)
def test_a_link_that_stands_still_is_named(mode: Mode) -> None:
    """While a required consumer's link is autonomous or held, it is what keeps old facts from leaving."""
    decision = decide([state("a", 5), state("local", 8)], STREAM, Buffer.STORE, {"a": mode})
    open_ = mode in (Mode.NORMAL, Mode.RECONCILIATION)
    assert decision == Truncation(5, () if open_ else ("a",), ("a",))


async def replicated(make_zone: MakeZone) -> tuple[Zone, Zone, str]:
    """Make a plant of whose ten facts six are confirmed by enterprise."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    plant.store_policy = enterprise.forward_policy = Policy(
        retention_seconds=RETENTION_SECONDS, max_age_seconds=7 * DAY_SECONDS, key_horizon_seconds=30 * DAY_SECONDS
    )
    inbound = await connect(plant, enterprise)
    await plant.append(messages(6))
    await inbound.pull()
    await plant.append(messages(4, first=6))
    return plant, enterprise, inbound.link.consumer


async def start_of(zone: Zone) -> int:
    """Give the first retained offset of the store buffer."""
    return (await (await zone.store()).stats()).start


async def test_confirmed_facts_leave_when_they_are_old_enough(make_zone: MakeZone) -> None:
    """Confirmed facts stay for the retention time and then leave; unconfirmed ones stay."""
    plant, _, consumer = await replicated(make_zone)
    cursors, store = (await plant.storage()).cursors, await plant.store()
    await truncate(store, cursors, {consumer: Mode.NORMAL})
    assert await start_of(plant) == 0
    plant.clock.advance(RETENTION_SECONDS)
    decision = await truncate(store, cursors, {consumer: Mode.NORMAL})
    assert (decision.frontier, decision.slowest) == (5, (consumer,))
    assert await start_of(plant) <= 6
    assert (await store.stats()).end == 10


async def test_nothing_leaves_while_the_link_is_autonomous(make_zone: MakeZone) -> None:
    """Old, confirmed facts stay for as long as the peer cannot be asked, and leave when it is back."""
    plant, _, consumer = await replicated(make_zone)
    cursors, store = (await plant.storage()).cursors, await plant.store()
    await cursors.commit(consumer, Confirmation(through=9))
    plant.clock.advance(RETENTION_SECONDS)
    for mode in (Mode.AUTONOMOUS, Mode.HELD):
        assert (await truncate(store, cursors, {consumer: mode})).held_by == (consumer,)
        assert await start_of(plant) == 0
    await truncate(store, cursors, {consumer: Mode.RECONCILIATION})
    assert await start_of(plant) == 10


async def test_truncated_facts_are_still_known_by_key(make_zone: MakeZone) -> None:
    """A producer that repeats a fact after its bytes left is answered with the offset it had."""
    plant, _, consumer = await replicated(make_zone)
    cursors, store = (await plant.storage()).cursors, await plant.store()
    await truncate_before(store, cursors, {consumer: Mode.NORMAL}, 6)
    outcome = await append(store, messages(1, first=2), clock=plant.clock)
    assert [(each.result, each.offset) for each in outcome.results()] == [(Result.ALREADY_EXISTS, 2)]


async def test_operator_cannot_truncate_past_the_frontier(make_zone: MakeZone) -> None:
    """Truncation by hand stops at the frontier and while a link stands still; at the frontier it works."""
    plant, _, consumer = await replicated(make_zone)
    cursors, store = (await plant.storage()).cursors, await plant.store()
    with pytest.raises(TruncateRefused) as caught:
        await truncate_before(store, cursors, {consumer: Mode.NORMAL}, 7)
    assert caught.value.details["committed"] == 5
    with pytest.raises(TruncateRefused) as caught:
        await truncate_before(store, cursors, {consumer: Mode.HELD}, 3)
    assert caught.value.details["held_by"] == [consumer]
    await truncate_before(store, cursors, {consumer: Mode.NORMAL}, 6)
    assert [frame.first async for frame in store.replay(6)] == [6]


async def test_retired_consumer_lets_the_frontier_go(make_zone: MakeZone) -> None:
    """Retiring the consumer that held everything back frees the rest and lists what it missed."""
    plant, _, consumer = await replicated(make_zone)
    cursors, store = (await plant.storage()).cursors, await plant.store()
    await cursors.create(ConsumerSpec("scrapped-line", STREAM))
    assert await store.frontier() == -1
    with pytest.raises(InvalidArgument):
        await cursors.retire("scrapped-line", "  ")
    gaps = await cursors.retire("scrapped-line", "line 4 was scrapped")
    assert [(gap.first, gap.last, gap.reason) for gap in gaps] == [(0, 9, GapReason.RETIRED)]
    assert await store.gaps() == gaps
    assert decide(await cursors.consumers(), STREAM, Buffer.STORE, {}) == Truncation(5, (), (consumer,))
    assert await store.frontier() == 5


async def test_forward_buffer_keeps_by_time(make_zone: MakeZone) -> None:
    """A forward buffer lets go what was read and is old, whatever its links do."""
    _, enterprise, _ = await replicated(make_zone)
    cursors, forward = (await enterprise.storage()).cursors, await enterprise.forward()
    await cursors.create(ConsumerSpec("app", STREAM, Buffer.FORWARD))
    await cursors.commit("app", Confirmation(through=5))
    await truncate(forward, cursors, {})
    assert (await forward.stats()).start == 0
    enterprise.clock.advance(RETENTION_SECONDS)
    await truncate(forward, cursors, {})
    assert (await forward.stats()).start == 6


async def test_keys_outlive_an_outage_in_which_a_confirmation_was_lost(make_zone: MakeZone) -> None:
    """Facts that were put before an outage, and are offered again long after the key horizon, are still one entry."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    plant.store_policy = enterprise.forward_policy = Policy(safety="sil")
    inbound, in_step = await connect(plant, enterprise), InStep()

    async def a_day(mode: Mode) -> None:
        for zone in (plant, enterprise):
            zone.clock.advance(DAY_SECONDS)
        now_unix_ms = enterprise.clock.now_unix_ms()
        in_step.observe("from-plant", STREAM, mode, await inbound.memory.recall(), now_unix_ms)
        cursors, forward = (await enterprise.storage()).cursors, await enterprise.forward()
        await truncate(forward, cursors, {}, in_step.since(["from-plant"], STREAM))

    await plant.append(messages(6))
    await inbound.pull()
    await a_day(Mode.NORMAL)
    await plant.append(messages(4, first=6))
    inbound.link.loses_confirmations = True
    with pytest.raises(PeerUnreachable):
        await inbound.pull()
    assert (await (await enterprise.forward()).stats()).end == 10
    for _ in range(40):
        await a_day(Mode.AUTONOMOUS)
    assert (await (await enterprise.forward()).stats()).start == 10
    inbound.link.loses_confirmations = False
    progress = await inbound.pull()
    assert (progress.inserted, progress.repeated) == (0, 4)
    for _ in range(45):
        await a_day(Mode.NORMAL)
    outcome = await (await enterprise.forward()).put_if_absent(batch(1), origin_span("plant", 10, 1))
    assert outcome.count(Result.INSERTED) == 1


def test_a_busy_link_is_in_step_with_what_there_was() -> None:
    """A link that always has facts on their way was in step when what its sender had by then was acknowledged."""
    in_step = InStep()
    assert in_step.since([], STREAM) is None
    assert in_step.since(["a"], STREAM) == 0
    for second in range(10):
        position = PeerPosition(end=100 * (second + 1), acknowledged=100 * second + 50)
        in_step.observe("a", STREAM, Mode.NORMAL, position, 1_000 * second)
    assert in_step.since(["a"], STREAM) == 8_000
    assert in_step.since(["a", "b"], STREAM) == 0
    in_step.observe("a", STREAM, Mode.AUTONOMOUS, PeerPosition(end=100, acknowledged=99), 20_000)
    assert in_step.since(["a"], STREAM) == 8_000
    in_step.observe("a", STREAM, Mode.NORMAL, PeerPosition(end=2_000, acknowledged=99), 30_000)
    assert in_step.since(["a"], STREAM) == 8_000
    in_step.observe("a", STREAM, Mode.NORMAL, PeerPosition(end=3_000, acknowledged=1_999), 40_000)
    assert in_step.since(["a"], STREAM) == 30_000
