"""Three zones: facts and gap records travel on through the zone in the middle, beside a direct path or without one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.journey.zones import STREAM, DirectLink, Inbound, Zone, connect, log_backend, origin_span

from bsfg.fact import Message
from bsfg.journey.link import RETURNING, Carriage, Fetched, FetchRequest, SessionMemory
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord, Result
from bsfg.retention import GapReason, Overflow, Policy
from bsfg.testing.facts import altered, message, messages, sealed

MakeZone = Callable[[str], Zone]


async def chain(make_zone: MakeZone) -> tuple[Zone, Zone, Zone, Inbound, Inbound]:
    """Make plant, idmz and enterprise, with the links plant to idmz and idmz's forward buffer to enterprise."""
    plant, idmz, enterprise = make_zone("plant"), make_zone("idmz"), make_zone("enterprise")
    first = await connect(plant, idmz)
    second = await connect(idmz, enterprise, relayed=["plant"], buffer=Buffer.FORWARD)
    return plant, idmz, enterprise, first, second


def bare(gaps: list[GapRecord]) -> list[tuple[int, int, GapReason, str | None]]:
    """Give what makes gap records the same."""
    return [(gap.first, gap.last, gap.reason, gap.origin_zone) for gap in gaps]


async def test_fact_keeps_its_identity_over_two_hops(make_zone: MakeZone) -> None:
    """A relayed fact keeps from_zone, message id, digest and body; its origin is the hop it came over."""
    plant, _, enterprise, first, second = await chain(make_zone)
    facts = messages(4)
    outcome = await plant.append(facts)
    await first.pull()
    await second.pull()
    entries = await enterprise.received()
    assert [entry.message for entry in entries] == facts
    assert [entry.digest for entry in entries] == outcome.facts.digests()
    assert {entry.origin.zone for entry in entries if entry.origin} == {"idmz"}


async def test_each_hop_has_its_own_cursor(make_zone: MakeZone) -> None:
    """What the middle zone confirmed to the first says nothing about the last."""
    plant, idmz, enterprise, first, second = await chain(make_zone)
    await plant.append(messages(4))
    await first.pull()
    assert await plant.committed(first.link.consumer) == 3
    assert await idmz.committed(second.link.consumer) == -1
    assert await enterprise.received() == []


async def test_direct_and_relayed_path_give_one_copy(make_zone: MakeZone) -> None:
    """A fact that arrives both directly and over the relay is there once, whichever came first."""
    plant, _, enterprise, first, second = await chain(make_zone)
    direct = await connect(plant, enterprise)
    await plant.append(messages(3))
    assert (await direct.pull()).inserted == 3
    await first.pull()
    relayed = await second.pull()
    assert (relayed.inserted, relayed.repeated, relayed.refused) == (0, 3, ())
    await plant.append(messages(3, first=3))
    await first.pull()
    assert (await second.pull()).inserted == 3
    late = await direct.pull()
    assert (late.inserted, late.repeated, late.acknowledged) == (0, 3, 5)
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(6)]


async def test_fact_does_not_return_to_its_zone(make_zone: MakeZone) -> None:
    """A relay leaves out what the asking zone said itself, as a reported range, and carries the rest."""
    plant, idmz, enterprise = make_zone("plant"), make_zone("idmz"), make_zone("enterprise")
    from_plant, from_enterprise = await connect(plant, idmz), await connect(enterprise, idmz)
    to_enterprise = await connect(idmz, enterprise, relayed=["plant"], buffer=Buffer.FORWARD)
    await plant.append(messages(2))
    await enterprise.append(messages(3, seed=1, from_zone="enterprise"))
    await from_plant.pull()
    await from_enterprise.pull()
    progress = await to_enterprise.pull()
    assert (progress.inserted, progress.acknowledged) == (2, 4)
    assert await enterprise.received_ids() == ["0-000000", "0-000001"]
    assert bare(await enterprise.forward_gaps()) == [(2, 4, GapReason.SKIPPED, "idmz")]


async def test_returning_facts_are_one_set(make_zone: MakeZone) -> None:
    """Where two zones talk through a third, returning facts lie between all others; exactly they are in one set."""
    plant, idmz, enterprise = make_zone("plant"), make_zone("idmz"), make_zone("enterprise")
    from_plant, from_enterprise = await connect(plant, idmz), await connect(enterprise, idmz)
    to_enterprise = await connect(idmz, enterprise, relayed=["plant"], buffer=Buffer.FORWARD)
    for number in range(5):
        await plant.append(messages(1, first=number))
        await enterprise.append(messages(1, first=number, seed=1, from_zone="enterprise"))
        await from_plant.pull()
        await from_enterprise.pull()
    progress = await to_enterprise.pull()
    assert (progress.inserted, progress.acknowledged) == (5, 9)
    (gaps,) = await (await enterprise.forward()).gap_sets()
    assert (gaps.reason, gaps.detail, gaps.origin_zone) == (GapReason.SKIPPED, RETURNING, "idmz")
    assert [(gap.first, gap.last) for gap in gaps.records()] == [(offset, offset) for offset in range(1, 10, 2)]


@pytest.mark.parametrize("knows_sets", [True, False])
async def test_a_hundred_thousand_interleaved_facts_cost_little(tmp_path: Path, knows_sets: bool) -> None:
    """A link that leaves out every other fact leaves under 100 kB of records, whatever form its sender knows."""
    plant, enterprise = Zone("plant", log_backend(tmp_path / "plant")), Zone("enterprise", log_backend(tmp_path / "it"))
    inbound = await connect(plant, enterprise, carriage=Carriage(frozenset({"enterprise"}), "enterprise"))
    if not knows_sets:
        link = inbound.link
        inbound.link = OlderLink(link.sender, link.consumer, link.carriage)
    count = 100_000 if knows_sets else 4_000
    for first in range(0, count, 10_000):
        facts = messages(min(count, 10_000), first=first)
        await plant.append([_to(fact, ("enterprise", "idmz")[at % 2]) for at, fact in enumerate(facts)])
    turns = await inbound.pull_all()
    assert sum(turn.inserted for turn in turns) == sum(turn.gaps for turn in turns) == count // 2
    assert turns[-1].acknowledged == count - 1
    (gaps,) = await (await enterprise.forward()).gap_sets()
    assert gaps.ranges.firsts.tolist() == gaps.ranges.lasts.tolist() == list(range(1, count, 2))
    await enterprise.restart()
    assert await (await enterprise.forward()).gap_sets() == [gaps]
    journals = [path.stat().st_size for path in (tmp_path / "it").rglob("notes.journal")]
    assert 0 < sum(journals) < 100_000
    await enterprise.restart()
    await plant.restart()


class OlderLink(DirectLink):
    """A link to a sender that knows no sets."""

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Let the sender serve as it always did."""
        return await super().fetch(replace(request, sets=False))


def _to(fact: Message, zone: str) -> Message:
    return replace(fact, envelope=replace(fact.envelope, to_zone=zone))


async def test_returned_fact_is_refused_even_if_sent(make_zone: MakeZone) -> None:
    """A sender that sends a zone its own facts back does no harm: they are not stored, and the range is reported."""
    plant, idmz, enterprise = make_zone("plant"), make_zone("idmz"), make_zone("enterprise")
    from_enterprise, from_plant = await connect(enterprise, idmz), await connect(plant, idmz)
    await enterprise.append(messages(2, seed=1, from_zone="enterprise"))
    await from_enterprise.pull()
    await plant.append(messages(2))
    await from_plant.pull()
    careless = await connect(idmz, enterprise, relayed=["plant"], carriage=Carriage(), buffer=Buffer.FORWARD)
    progress = await careless.pull()
    assert (progress.held, progress.inserted, progress.acknowledged) == (None, 2, 3)
    assert bare(await enterprise.forward_gaps()) == [(0, 1, GapReason.SKIPPED, "idmz")]


async def test_zone_that_may_not_be_relayed_holds_the_link(make_zone: MakeZone) -> None:
    """A relay that brings facts of a zone it may not relay for is held."""
    plant, _, enterprise, first, second = await chain(make_zone)
    second.rules = replace(second.rules, from_zones=frozenset({"idmz"}))
    await plant.append(messages(1))
    await first.pull()
    progress = await second.pull()
    assert progress.held is not None
    assert progress.held.code == "zone_not_allowed"
    assert await enterprise.received() == []


def by_target(count: int) -> list[Message]:
    """Make facts for enterprise and lab in turn."""
    return [message(str(number), number, to_zone=("enterprise", "lab")[number % 2]) for number in range(count)]


async def test_gap_records_travel_over_two_hops(make_zone: MakeZone) -> None:
    """What the first link left out is known in the last zone, in the offsets of the zone it comes from."""
    plant, idmz, enterprise, first, second = await chain(make_zone)
    first.link.carriage = Carriage(frozenset({"enterprise"}), receiver_zone="idmz")
    await plant.append(by_target(4))
    await first.pull()
    assert bare(await idmz.forward_gaps()) == [
        (1, 1, GapReason.SKIPPED, "plant"),
        (3, 3, GapReason.SKIPPED, "plant"),
    ]
    await second.pull()
    assert await enterprise.forward_gaps() == await idmz.forward_gaps()
    assert await enterprise.received_ids() == ["0", "2"]


async def test_relayed_gap_records_do_not_come_again(make_zone: MakeZone) -> None:
    """Stored gap records are not sent again in a session, are sent again after a restart, and are stored once."""
    plant, idmz, enterprise, first, second = await chain(make_zone)
    first.link.carriage = Carriage(frozenset({"enterprise"}))
    await plant.append(by_target(4))
    await first.pull()
    assert (await second.pull()).gaps == 2
    assert (await second.pull()).gaps == 0
    second.memory = SessionMemory()
    assert (await second.pull()).gaps == 2
    assert len(await enterprise.forward_gaps()) == 2
    await plant.append(by_target(6)[4:])
    await first.pull()
    assert (await second.pull()).gaps == 1
    assert await enterprise.forward_gaps() == await idmz.forward_gaps()


async def test_relayed_gap_record_ends_a_long_poll(make_zone: MakeZone) -> None:
    """A gap record alone is worth an answer: nobody waits for a fact to carry it."""
    plant, _, enterprise, first, second = await chain(make_zone)
    first.link.carriage = Carriage(frozenset({"moon"}))
    await plant.append(messages(3))
    await first.pull()
    second.request = replace(second.request, wait_seconds=3600)
    progress = await second.pull()
    assert (progress.gaps, progress.moved) == (1, False)
    assert bare(await enterprise.forward_gaps()) == [(0, 2, GapReason.SKIPPED, "plant")]


async def test_quarantine_in_the_middle_is_known_at_the_end(make_zone: MakeZone) -> None:
    """A fact refused by the middle zone never reaches the last one, which knows that and why."""
    plant, idmz, enterprise, first, second = await chain(make_zone)
    other = sealed(altered(messages(1, first=1)))
    await (await idmz.forward()).put_if_absent(other, origin_span("plant", 99, 1))
    await plant.append(messages(3))
    await first.pull()
    await second.pull()
    (gap,) = await enterprise.forward_gaps()
    assert (gap.first, gap.last, gap.reason, gap.origin_zone) == (1, 1, GapReason.QUARANTINED, "plant")
    assert gap.detail == "conflict"


async def test_eviction_in_the_middle_is_known_at_the_end(make_zone: MakeZone) -> None:
    """What the middle zone evicted unread arrives in band as a gap of the middle zone, and the frontier passes."""
    plant, idmz, enterprise = make_zone("plant"), make_zone("idmz"), make_zone("enterprise")
    idmz.forward_policy = Policy(capacity_bytes=60_000, overflow=Overflow.DROP_OLDEST)
    first = await connect(plant, idmz)
    second = await connect(idmz, enterprise, relayed=["plant"], buffer=Buffer.FORWARD)
    for start in range(0, 600, 50):
        await plant.append(messages(50, first=start))
        await first.pull()
    start = (await (await idmz.forward()).stats()).start
    assert 0 < start < 600
    await second.pull_all()
    gaps = await enterprise.forward_gaps()
    lost = [offset for gap in gaps for offset in range(gap.first, gap.last + 1)]
    assert lost == list(range(start))
    assert {(gap.reason, gap.origin_zone) for gap in gaps} == {(GapReason.EVICTED, "idmz")}
    assert await enterprise.received_ids() == [f"0-{number:06}" for number in range(start, 600)]
    assert await idmz.committed(second.link.consumer) == 599


async def test_expiry_counts_from_the_first_origin(make_zone: MakeZone) -> None:
    """Time spent in the middle zone counts: the age is measured from the zone before it."""
    plant, idmz, enterprise, first, second = await chain(make_zone)
    second.rules = replace(second.rules, max_age_seconds=3600)
    await plant.append(messages(1))
    for zone in (plant, idmz, enterprise):
        zone.clock.advance(3500)
    await first.pull()
    for zone in (plant, idmz, enterprise):
        zone.clock.advance(200)
    progress = await second.pull()
    assert (progress.inserted, [refusal.reason for refusal in progress.refused]) == (0, ["expired"])


async def test_local_consumer_and_relay_do_not_disturb_each_other(make_zone: MakeZone) -> None:
    """An application of the middle zone and the next zone read the same buffer with cursors of their own."""
    plant, idmz, _, first, second = await chain(make_zone)
    cursors = (await idmz.storage()).cursors
    await cursors.create(ConsumerSpec("app", STREAM, Buffer.FORWARD))
    await plant.append(messages(3))
    await first.pull()
    await cursors.commit("app", Confirmation(through=1))
    assert (await second.pull()).inserted == 3
    assert await idmz.committed("app") == 1


async def test_same_id_from_two_zones_is_two_facts(make_zone: MakeZone) -> None:
    """The key includes from_zone: equal message ids of two zones do not meet."""
    plant, idmz = make_zone("plant"), make_zone("idmz")
    lab = make_zone("lab")
    one, two = await connect(plant, idmz), await connect(lab, idmz)
    await plant.append([message("a", 1)])
    outcome = await lab.append([message("a", 2, from_zone="lab")])
    assert outcome.results()[0].result == Result.INSERTED
    assert (await one.pull()).inserted == (await two.pull()).inserted == 1
