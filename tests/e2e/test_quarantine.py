"""What a receiver refuses for good: it is set aside, reported to the sender, and settled by an operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.liar import Answers, Liar, entries_of, frame, head
from tests.e2e.zones import Zone, link_to, pair, settled, until

from bsfg.errors import InvalidArgument
from bsfg.ports import Buffer, Result
from bsfg.retention import GapReason
from bsfg.testing.facts import altered, batch, messages, sealed
from bsfg.wire import boundary_pb2 as pb

GOOD = messages(10, from_zone="plant-a")
LOG_ID = "f0" * 16


async def test_conflicts_pass_the_link_and_wait_for_an_operator(zones: tuple[Zone, Zone]) -> None:
    """Other bodies under known ids are set aside, the frontier passes, and the sender is told; an operator settles."""
    plant, enterprise = zones
    enterprise.start()
    async with Liar(plant) as liar:

        def answer(request: pb.FetchFramesRequest) -> Answers:
            start = 1 + max(liar.confirmed, default=-1)
            said = [*GOOD, *altered(GOOD[3:5]), *messages(5, first=10, from_zone="plant-a")][start:]
            return [head(LOG_ID, start, 17), *([frame(entries_of(said, start))] if said else [])]

        liar.answer = answer
        await until(lambda: liar.confirmed[-1:] == [16])
        assert [(each.first, each.last, each.reason) for each in liar.refusals] == [(10, 11, "conflict")]
    assert enterprise.messages(Buffer.FORWARD) == messages(15, from_zone="plant-a")
    assert not enterprise.events("link_held")
    [gap] = enterprise.gaps(Buffer.FORWARD)
    assert (gap.first, gap.last, gap.reason, gap.origin_zone) == (10, 11, GapReason.QUARANTINED, "plant-a")
    async with enterprise.admin() as operator:
        first, second = await operator.quarantine("operational")
        assert {each.quarantined.reason for each in (first, second)} == {"conflict"}
        shown = await operator.quarantined("operational", first.quarantined.id)
        assert shown.quarantined.facts.to_messages() == altered(GOOD[3:4])
        assert await operator.retry_quarantined("operational", first.quarantined.id, "try") == (False, Result.CONFLICT)
        await operator.drop_quarantined("operational", first.quarantined.id, "a test run wrote it")
        with pytest.raises(InvalidArgument):
            await operator.drop_quarantined("operational", second.quarantined.id, " ")
        enterprise.kill()
        enterprise.start()
        assert [each.quarantined.id for each in await operator.quarantine()] == [second.quarantined.id]


async def test_expired_facts_are_set_aside(tmp_path: Path, cleanup: Cleanup) -> None:
    """Facts that are older than the link allows are not delivered, but kept, reported and put by an operator."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    enterprise.links = link_to(plant, more='max_age = "1h"')
    enterprise.write()
    enterprise.start()
    async with Liar(plant) as liar:
        old, new = entries_of(GOOD[:4], at_unix_ms=1_600_000_000_000), entries_of(GOOD[4:], 4)
        liar.answer = lambda request: [head(LOG_ID, 10)] if liar.confirmed else [head(LOG_ID), frame(old), frame(new)]
        await until(lambda: liar.confirmed == [9])
        assert [(each.first, each.last, each.reason) for each in liar.refusals] == [(0, 3, "expired")]
    assert enterprise.messages(Buffer.FORWARD) == GOOD[4:]
    async with enterprise.admin() as operator:
        for each in await operator.quarantine("operational"):
            settled_now, result = await operator.retry_quarantined(
                "operational", each.quarantined.id, "they are still wanted"
            )
            assert settled_now and result == Result.INSERTED
        assert not await operator.quarantine()
    assert sorted(enterprise.messages(Buffer.FORWARD), key=str) == sorted(GOOD, key=str)


async def test_refusals_are_known_where_the_facts_were_said(zones: tuple[Zone, Zone]) -> None:
    """A sender lists what its peer did not take, with the reason, and its facts go on."""
    plant, enterprise = zones
    # Another plant of the same name was here before, and used the same ids.
    enterprise.start()
    async with Liar(plant) as liar:
        liar.answer = lambda request: [head(LOG_ID, 10)] if liar.confirmed else [head(LOG_ID), frame(entries_of(GOOD))]
        await until(lambda: liar.confirmed == [9])
    plant.start()
    async with plant.client() as producer:
        await producer.append("operational", sealed(altered(GOOD)))
        await producer.append("operational", batch(5, first=10, from_zone="plant-a"))
    assert (await enterprise.seen("link_held"))["code"] == "foreign_log"
    async with enterprise.admin() as operator:
        await operator.release_gate("from-plant-a", "the plant was built anew")
    await settled(plant, enterprise)
    [gap] = await until(lambda: plant.gaps(Buffer.STORE))
    assert (gap.first, gap.last, gap.reason, gap.detail) == (0, 9, GapReason.QUARANTINED, "enterprise: conflict")
    assert enterprise.messages(Buffer.FORWARD) == messages(15, from_zone="plant-a")
