"""Step 1, append: what a producer is told, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.journey.zones import Zone, append

from bsfg.batch import FactBatch
from bsfg.errors import ImplausibleTime, InvalidFact
from bsfg.fact import Message
from bsfg.journey.append import AppendRules, Plausibility
from bsfg.ports import Result
from bsfg.sealing import IdStrategy, MessageIds
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.facts import altered, message, messages

MakeZone = Callable[[str], Zone]


def without_id(fact: Message) -> Message:
    """Leave the id to the zone."""
    return replace(fact, envelope=replace(fact.envelope, message_id=None))


async def test_outcome_names_result_offset_id_and_digest(make_zone: MakeZone) -> None:
    """Each fact is answered with its result, offset, message id and digest, in the order it was sent."""
    zone = make_zone("plant")
    outcome = await zone.append(messages(3))
    results = outcome.results()
    assert [(each.result, each.offset, each.message_id) for each in results] == [
        (Result.INSERTED, 0, "0-000000"),
        (Result.INSERTED, 1, "0-000001"),
        (Result.INSERTED, 2, "0-000002"),
    ]
    assert [each.digest for each in results] == outcome.facts.digests()
    assert outcome.chain_head == (await (await zone.store()).stats()).chain_head
    assert outcome.conflicts() == []


async def test_repeat_after_restart_gives_the_first_offsets(make_zone: MakeZone) -> None:
    """A producer that sends the same facts again, even after a restart of the zone, gets the offsets of the first."""
    zone = make_zone("plant")
    await zone.append(messages(4))
    await zone.restart()
    outcome = await zone.append(messages(5, first=2))
    assert [(each.result, each.offset) for each in outcome.results()] == [
        (Result.ALREADY_EXISTS, 2),
        (Result.ALREADY_EXISTS, 3),
        (Result.INSERTED, 4),
        (Result.INSERTED, 5),
        (Result.INSERTED, 6),
    ]


async def test_conflicts_are_named_and_refuse_only_themselves(make_zone: MakeZone) -> None:
    """A fact whose id is taken by another body is named with the offset of the first; its neighbours are stored."""
    zone = make_zone("plant")
    first = messages(3)
    await zone.append(first)
    outcome = await zone.append([*altered(first[1:2]), *messages(1, first=9)])
    assert [each.result for each in outcome.results()] == [Result.CONFLICT, Result.INSERTED]
    (conflict,) = outcome.conflicts()
    assert conflict.code == "conflicting_duplicate"
    assert conflict.details == {
        "row": 0,
        "from_zone": "plant",
        "message_id": "0-000001",
        "existing_offset": 1,
    }
    assert (await (await zone.store()).stats()).end == 4


@pytest.mark.parametrize(
    ("moved_seconds", "plausible"), [(-61, False), (-60, True), (0, True), (600, True), (601, False)]
)
async def test_plausibility_window(make_zone: MakeZone, moved_seconds: int, plausible: bool) -> None:
    """With a window, a fact produced too far in the future or the past is refused; its edges are still plausible."""
    zone = make_zone("plant")
    zone.clock.jump(moved_seconds)
    window = Plausibility(past_seconds=600, future_seconds=60)
    if plausible:
        outcome = await append(await zone.store(), [message("a")], clock=zone.clock, window=window)
        assert outcome.results()[0].result == Result.INSERTED
    else:
        with pytest.raises(ImplausibleTime) as caught:
            await append(await zone.store(), [message("a")], clock=zone.clock, window=window)
        assert caught.value.details["ahead_ms"] == START_UNIX_MS - zone.clock.now_unix_ms()


async def test_any_time_without_window(make_zone: MakeZone) -> None:
    """Without a window the producer's clock is never questioned."""
    zone = make_zone("plant")
    zone.clock.jump(10 * 365 * 86_400)
    assert (await zone.append([message("a")])).results()[0].result == Result.INSERTED


async def test_invalid_fact_stores_nothing(make_zone: MakeZone) -> None:
    """One broken rule refuses the batch before anything of it is stored."""
    zone = make_zone("plant")
    with pytest.raises(InvalidFact):
        await zone.append([message("a"), message("b", predicate="NotSnake")])
    assert (await (await zone.store()).stats()).end == 0


async def test_batch_and_messages_are_the_same(make_zone: MakeZone) -> None:
    """Facts given as columns are the facts given as objects."""
    zone = make_zone("plant")
    await zone.append(messages(100))
    batch = FactBatch.from_messages(messages(100))
    outcome = await append(await zone.store(), batch, clock=zone.clock)
    assert outcome.receipt.count(Result.ALREADY_EXISTS) == len(outcome) == 100


async def test_ids_by_payload(make_zone: MakeZone) -> None:
    """A zone that derives ids from the payload merges equal facts."""
    zone = make_zone("plant")
    rules = AppendRules(ids=MessageIds(IdStrategy.PAYLOAD))
    facts = [without_id(message("a", value)) for value in (1, 1, 2)]
    outcome = await append(await zone.store(), facts, clock=zone.clock, rules=rules)
    assert [each.offset for each in outcome.results()] == [0, 0, 1]
