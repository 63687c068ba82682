"""Step 4, confirm: what advances the frontier, what is refused, and what is recorded."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tests.journey.zones import STREAM, Zone

from bsfg.errors import (
    BsfgError,
    ConsumerRetired,
    ForeignLog,
    InvalidArgument,
    OffsetOutOfRange,
    TooManyRanges,
    UnknownConsumer,
)
from bsfg.frontier import MAX_OPEN_RANGES, Frontier
from bsfg.gapbook import DETAILS_MAX
from bsfg.journey.confirm import check_refusals, confirm_receipt
from bsfg.journey.link import Refusal, merged_refusals
from bsfg.ports import Confirmation, ConsumerSpec
from bsfg.retention import GapReason
from bsfg.testing.facts import messages

MakeZone = Callable[[str], Zone]
CONSUMER = "plant-a-receiver"


async def zone_with(make_zone: MakeZone, facts: int) -> Zone:
    """Make a zone with a consumer and some facts."""
    zone = make_zone("plant")
    await zone.store()
    await (await zone.storage()).cursors.create(ConsumerSpec(CONSUMER, STREAM))
    await zone.append(messages(facts))
    return zone


async def confirm(zone: Zone, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
    """Confirm for the zone's consumer, as the peer ``enterprise``."""
    return await confirm_receipt(
        await zone.store(),
        (await zone.storage()).cursors,
        CONSUMER,
        confirmation,
        refusals,
        clock=zone.clock,
        peer="enterprise",
    )


async def test_cursor_advances_to_the_confirmed_offset(make_zone: MakeZone) -> None:
    """Confirming offset 199 answers that the cursor advanced to 199, durably."""
    zone = await zone_with(make_zone, 300)
    assert await confirm(zone, Confirmation(through=199)) == 199
    await zone.restart()
    assert await zone.committed(CONSUMER) == 199


async def test_repeats_and_older_confirmations_change_nothing(make_zone: MakeZone) -> None:
    """The frontier never moves back, whatever arrives late."""
    zone = await zone_with(make_zone, 10)
    assert [await confirm(zone, Confirmation(through=through)) for through in (7, 7, 3)] == [7, 7, 7]


BAD: dict[str, tuple[Confirmation, Sequence[Refusal], type[BsfgError]]] = {
    "through beyond the end": (Confirmation(through=10), (), OffsetOutOfRange),
    "a range beyond the end": (Confirmation(ranges=[(4, 10)]), (), OffsetOutOfRange),
    "a refusal beyond the end": (Confirmation(through=9), [Refusal(10, 10, "conflict")], OffsetOutOfRange),
    "another log": (Confirmation(through=5, log_id="another"), (), ForeignLog),
    "refusals of another log": (Confirmation(5, log_id="another"), [Refusal(3, 4, "conflict")], ForeignLog),
    "a refusal that is not confirmed": (Confirmation(through=5), [Refusal(5, 6, "conflict")], InvalidArgument),
    "a refusal in an open hole": (Confirmation(ranges=[(0, 2), (5, 9)]), [Refusal(2, 5, "x")], InvalidArgument),
    "a refusal that runs backwards": (Confirmation(through=5), [Refusal(3, 2, "conflict")], InvalidArgument),
    "a negative refusal": (Confirmation(through=5), [Refusal(-1, 2, "conflict")], InvalidArgument),
    "a range that runs backwards": (Confirmation(ranges=[(5, 4)]), (), InvalidArgument),
}


@pytest.mark.parametrize("case", BAD)
async def test_refused_without_effect(make_memory_zone: MakeZone, case: str) -> None:
    """A confirmation that cannot be right is refused as a whole: no cursor moves and nothing is recorded."""
    confirmation, refusals, error = BAD[case]
    zone = await zone_with(make_memory_zone, 10)
    await confirm(zone, Confirmation(through=1))
    with pytest.raises(error):
        await confirm(zone, confirmation, refusals)
    assert await zone.committed(CONSUMER) == 1
    assert await (await zone.store()).gaps() == []


async def test_too_many_open_ranges(make_zone: MakeZone) -> None:
    """Thousands of open ranges are refused with a code of their own, and the hole can still be closed."""
    zone = await zone_with(make_zone, 3_000)
    islands = [(offset, offset) for offset in range(1, 2 * (MAX_OPEN_RANGES + 2), 2)]
    with pytest.raises(TooManyRanges):
        await confirm(zone, Confirmation(ranges=islands))
    assert await confirm(zone, Confirmation(through=2_999)) == 2_999


async def test_too_many_open_ranges_leave_no_refusals_behind(make_zone: MakeZone) -> None:
    """A confirmation that the cursor cannot take leaves no gap record either, however many refusals come with it."""
    zone = await zone_with(make_zone, 3_000)
    islands = [(offset, offset) for offset in range(1, 2 * (MAX_OPEN_RANGES + 2), 2)]
    with pytest.raises(TooManyRanges):
        await confirm(zone, Confirmation(ranges=islands), [Refusal(first, last, "x") for first, last in islands])
    assert await (await zone.store()).gaps() == []


async def test_refusal_in_an_island_confirmed_before(make_zone: MakeZone) -> None:
    """What was confirmed out of order by an earlier call may be refused by a later one."""
    zone = await zone_with(make_zone, 10)
    await confirm(zone, Confirmation(ranges=[(4, 6)]))
    assert await confirm(zone, Confirmation(ranges=[(8, 8)]), [Refusal(5, 6, "conflict")]) == -1
    assert len(await (await zone.store()).gaps()) == 1


async def test_the_work_of_checking_refusals_grows_with_their_number() -> None:
    """Each refusal is looked up among the confirmed ranges by halving; none of them lists all that is missing."""
    count, looked = 4_000, 0

    class Counted(list[tuple[int, int]]):
        """Confirmed ranges that count how often one of them is looked at."""

        def __getitem__(self, at: Any) -> Any:
            nonlocal looked
            looked += 1
            return super().__getitem__(at)

        def __iter__(self) -> Iterator[tuple[int, int]]:
            nonlocal looked
            for item in super().__iter__():
                looked += 1
                yield item

    confirmed = Frontier(-1, Counted((offset, offset) for offset in range(1, 2 * count, 2)), max_ranges=count)
    check_refusals(confirmed, [Refusal(offset, offset, "x") for offset in range(1, 2 * count, 2)])
    assert looked <= 20 * count


async def test_refusals_become_gap_records(make_zone: MakeZone) -> None:
    """Refused ranges are recorded with the peer and its reason, neighbours joined, and survive a restart."""
    zone = await zone_with(make_zone, 10)
    refusals = [Refusal(7, 7, "expired", "old"), Refusal(2, 2, "conflict"), Refusal(3, 4, "conflict")]
    assert await confirm(zone, Confirmation(through=8), refusals) == 8
    await zone.restart()
    gaps = sorted(await (await zone.store()).gaps(), key=lambda gap: gap.first)
    assert [(gap.first, gap.last, gap.reason, gap.detail) for gap in gaps] == [
        (2, 4, GapReason.QUARANTINED, "enterprise: conflict"),
        (7, 7, GapReason.QUARANTINED, "enterprise: expired: old"),
    ]


async def test_refusal_in_a_confirmed_island(make_zone: MakeZone) -> None:
    """A refusal may lie in a range beyond the frontier that is confirmed out of order."""
    zone = await zone_with(make_zone, 10)
    assert await confirm(zone, Confirmation(ranges=[(4, 6)]), [Refusal(5, 6, "conflict")]) == -1
    assert len(await (await zone.store()).gaps()) == 1


async def test_who_may_confirm(make_zone: MakeZone) -> None:
    """Unknown and retired consumers, and consumers of another buffer, cannot confirm."""
    zone = await zone_with(make_zone, 3)
    storage, store = await zone.storage(), await zone.store()
    with pytest.raises(UnknownConsumer):
        await confirm_receipt(store, storage.cursors, "nobody", Confirmation(through=1), clock=zone.clock)
    with pytest.raises(InvalidArgument):
        forward = await zone.forward()
        await confirm_receipt(forward, storage.cursors, CONSUMER, Confirmation(), clock=zone.clock)
    await storage.cursors.retire(CONSUMER, "gone")
    before = await store.gaps()
    with pytest.raises(ConsumerRetired):
        await confirm(zone, Confirmation(through=1), [Refusal(0, 0, "conflict")])
    assert await store.gaps() == before


async def test_empty_confirmation_tells_the_frontier(make_zone: MakeZone) -> None:
    """A confirmation of nothing is a question: it answers where the frontier stands."""
    zone = await zone_with(make_zone, 3)
    assert await confirm(zone, Confirmation()) == -1


def test_merging_keeps_reasons_apart() -> None:
    """Only neighbours with the same reason and detail are joined."""
    refusals = [Refusal(0, 1, "a"), Refusal(2, 2, "a"), Refusal(3, 3, "b"), Refusal(5, 5, "b"), Refusal(6, 6, "b", "x")]
    assert merged_refusals(reversed(refusals)) == [
        Refusal(0, 2, "a"),
        Refusal(3, 3, "b"),
        Refusal(5, 5, "b"),
        Refusal(6, 6, "b", "x"),
    ]


async def test_refusing_in_ever_other_words_leaves_no_records_without_end(make_zone: MakeZone) -> None:
    """A receiver may refuse one fact as often as it likes, each time for another reason: what is kept is bounded."""
    zone = await zone_with(make_zone, 3)
    for at in range(3):
        refusals = [Refusal(0, 0, f"reason\x00 {at}", f"word\x1b {each}") for each in range(DETAILS_MAX)]
        assert await confirm(zone, Confirmation(through=0), refusals) == 0
    await zone.restart()
    sets = await (await zone.store()).gap_sets()
    assert len(sets) == DETAILS_MAX + 1
    assert {each.detail.partition(":")[0] for each in sets} == {"enterprise"}
    assert all(each.detail.isprintable() for each in sets)
