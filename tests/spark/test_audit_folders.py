"""Audits of real data folders: what is right passes with its reasons, and every kind of harm is found and named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.journey.zones import STREAM, Inbound
from tests.spark.audit_worlds import (
    Change,
    FolderZone,
    audited,
    brief,
    copied,
    exchanged,
    linked,
    log_of,
    plan,
    repeated,
    rewrite,
    with_value,
    without,
)

from bsfg import gapbook
from bsfg.batch import FactBatch
from bsfg.columns import FACT_SCHEMA
from bsfg.filters import FactFilter
from bsfg.journey.link import Carriage, FetchRequest
from bsfg.ports import Buffer, GapRecord
from bsfg.retention import GapReason, Overflow, Policy
from bsfg.sealing import seal
from bsfg.spark.audit import AuditedLink, AuditedStream, FindingKind, StreamVerdict, Verdict, audit_with
from bsfg.spark.audit.ends import FolderEnd
from bsfg.spark.audit.report import page
from bsfg.spark.audit.runner import LocalRunner
from bsfg.spark.audit.verdict import CheckState
from bsfg.stores.log.segments import segment_name
from bsfg.testing.facts import altered, message, messages

FACTS = 1_000


def world(root: Path, count: int = FACTS) -> Inbound:
    """Make a plant and an enterprise that has pulled everything."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", root), FolderZone("enterprise", root)
        inbound = await linked(plant, enterprise)
        await plant.say(count)
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    return asyncio.run(work())


async def closed(*zones: FolderZone) -> None:
    """Close storages, so that all of them lies in the folders."""
    for zone in zones:
        await zone.restart()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Inbound:
    """Give two folders that agree, to be copied before they are harmed."""
    return world(tmp_path_factory.mktemp("whole"))


def harmed(whole: Inbound, root: Path, change: Change, *, side: str = "receiver") -> AuditedStream:
    """Plan the audit of a copy of which one end is changed."""
    found = plan(whole)
    end = getattr(found, side)
    folder = copied(Path(end.path), root / "harmed")
    rewrite(folder, end.buffer, change)
    return replace(found, **{side: replace(end, path=str(folder))})


def id_of(offset: int) -> str:
    """Give the id of the fact at an offset."""
    return f"0-{offset:06}"


def test_two_ends_that_agree_are_clean(whole: Inbound) -> None:
    """All facts are compared, every check passes, and the picture shows equal ranges alone."""
    verdict = audited(plan(whole))
    assert verdict.clean and verdict.compared == FACTS and verdict.absences == []
    assert {check.state for check in verdict.checks} == {CheckState.PASSED}
    assert {each.state for each in verdict.ranges} == {"equal"}
    assert (verdict.first, verdict.last, verdict.frontier) == (0, FACTS - 1, FACTS - 1)
    assert sum(each.sender for each in verdict.ranges) == sum(each.receiver for each in verdict.ranges) == FACTS


def resealed(batch: pa.RecordBatch, row: int, **values: object) -> pa.RecordBatch:
    """Change a field of a body and give it the digest that fits."""
    changed = with_value(batch, row, **values)
    one = FactBatch(changed.slice(row, 1).select(FACT_SCHEMA.names))
    return with_value(changed, row, digest=seal(one).digests()[0])


@pytest.mark.parametrize(
    ("change", "kind", "fields"),
    [
        (lambda rows: without(rows, 333), FindingKind.MISSING, ()),
        (lambda rows: repeated(rows, 333), FindingKind.DUPLICATED, ()),
        (lambda rows: repeated(rows, 333, 334), FindingKind.DUPLICATED, ()),
        (lambda rows: with_value(rows, 333, subject="machine:x"), FindingKind.BODY_ALTERED, ("subject",)),
        (lambda rows: with_value(rows, 333, predicate="seen"), FindingKind.BODY_ALTERED, ("predicate",)),
        (lambda rows: with_value(rows, 333, object=b'{"value":1}'), FindingKind.BODY_ALTERED, ("object",)),
        (lambda rows: resealed(rows, 333, object=b'{"value":1}'), FindingKind.ALTERED, ("object", "digest")),
        (lambda rows: resealed(rows, 333, subject="machine:x"), FindingKind.ALTERED, ("subject", "digest")),
        (lambda rows: with_value(rows, 333, digest=bytes(32)), FindingKind.ALTERED, ("digest",)),
        (lambda rows: with_value(rows, 333, to_zone="elsewhere"), FindingKind.ALTERED, ("to_zone",)),
        (lambda rows: with_value(rows, 333, labels='{"a":"b"}'), FindingKind.ALTERED, ("labels",)),
        (lambda rows: with_value(rows, 333, correlation_id=""), FindingKind.ALTERED, ("correlation_id",)),
        (lambda rows: with_value(rows, 333, produced_at_unix_ms=5), FindingKind.ALTERED, ("produced_at_unix_ms",)),
        (
            lambda rows: with_value(rows, 333, origin_appended_at_unix_ms=5),
            FindingKind.ALTERED,
            ("origin_appended_at_unix_ms",),
        ),
        (lambda rows: with_value(rows, 333, message_id="other"), FindingKind.ALTERED, ("message_id",)),
        (lambda rows: with_value(rows, 333, from_zone="elsewhere"), FindingKind.ALTERED, ("from_zone",)),
    ],
)
def test_one_harmed_fact_is_named(
    whole: Inbound, tmp_path: Path, change: Change, kind: FindingKind, fields: tuple[str, ...]
) -> None:
    """Whatever is done to one fact of the receiver, the audit names its offset, its key and the field."""
    verdict = audited(harmed(whole, tmp_path, change))
    found = [each for each in verdict.findings if each.kind != FindingKind.HEAD_UNKNOWN]
    [finding] = [each for each in found if each.kind == kind]
    assert finding.offset == 333
    assert finding.from_zone in ("plant-a", "elsewhere")
    assert finding.message_id == id_of(333)
    assert finding.fields == fields
    if kind != FindingKind.MISSING:
        assert finding.receiver_offset in (333, 334, FACTS)
    assert {each.kind for each in found} <= {kind, FindingKind.BODY_ALTERED}
    assert [each.state for each in verdict.ranges].count("finding") == 1


def test_harm_at_the_sender_is_named(whole: Inbound, tmp_path: Path) -> None:
    """An altered body, a removed and a replaced fact at the sender are told apart from harm at the receiver."""
    verdict = audited(harmed(whole, tmp_path / "a", lambda rows: with_value(rows, 10, object=b"{}"), side="sender"))
    [finding] = [each for each in verdict.findings if each.kind != FindingKind.HEAD_UNKNOWN]
    assert (finding.kind, finding.side, finding.offset, finding.fields) == (
        FindingKind.BODY_ALTERED,
        "sender",
        10,
        ("object",),
    )

    verdict = audited(harmed(whole, tmp_path / "b", lambda rows: without(rows, 999), side="sender"))
    kinds = {each.kind: each for each in verdict.findings}
    assert kinds[FindingKind.AHEAD].offset == 999 and kinds[FindingKind.AHEAD].message_id == id_of(999)
    assert kinds[FindingKind.FOREIGN_LOG].side == "sender"


def test_facts_in_the_wrong_place_are_out_of_order(whole: Inbound, tmp_path: Path) -> None:
    """Two entries that changed places, and two facts that changed offsets, are out of order and not missing."""
    verdict = audited(harmed(whole, tmp_path / "a", lambda rows: exchanged(rows, 400, 401)))
    found = [each for each in brief(verdict) if each[0] != FindingKind.HEAD_UNKNOWN]
    assert found == [(FindingKind.OUT_OF_ORDER, 400, id_of(400), ())]

    def offsets_exchanged(rows: pa.RecordBatch) -> pa.RecordBatch:
        return with_value(with_value(rows, 400, origin_offset=401), 401, origin_offset=400)

    verdict = audited(harmed(whole, tmp_path / "b", offsets_exchanged))
    found = [each for each in brief(verdict) if each[0] == FindingKind.OUT_OF_ORDER and each[3]]
    assert found == [
        (FindingKind.OUT_OF_ORDER, 400, id_of(400), ("origin_offset",)),
        (FindingKind.OUT_OF_ORDER, 401, id_of(401), ("origin_offset",)),
    ]
    assert FindingKind.MISSING not in verdict.finding_counts and FindingKind.EXTRA not in verdict.finding_counts

    far = audited(harmed(whole, tmp_path / "c", lambda rows: exchanged(rows, 10, 900)))
    assert far.finding_counts[FindingKind.OUT_OF_ORDER] == 2 and FindingKind.MISSING not in far.finding_counts


def test_a_copy_under_another_id_or_offset_is_found(whole: Inbound, tmp_path: Path) -> None:
    """A fact that is there a second time is found under its own key, another id, another offset and another origin."""

    def copy(**values: object) -> Change:
        return lambda rows: with_value(repeated(rows, 7), FACTS, **values)

    under_id = audited(harmed(whole, tmp_path / "a", copy(message_id="copy")))
    found = [each for each in under_id.findings if each.kind == FindingKind.DUPLICATED]
    assert [(each.offset, each.message_id, each.receiver_offset) for each in found] == [(7, "copy", FACTS)]

    under_offset = audited(harmed(whole, tmp_path / "b", copy(origin_offset=900)))
    [finding] = [each for each in under_offset.findings if each.kind != FindingKind.HEAD_UNKNOWN]
    assert (finding.kind, finding.offset, finding.receiver_offset) == (FindingKind.DUPLICATED, 900, FACTS)

    beyond = audited(harmed(whole, tmp_path / "c", copy(origin_offset=FACTS + 5, message_id="new")))
    assert beyond.finding_counts[FindingKind.AHEAD] == 1

    other_origin = audited(harmed(whole, tmp_path / "d", copy(origin_zone="idmz", origin_offset=3)))
    [finding] = [each for each in other_origin.findings if each.kind == FindingKind.DUPLICATED]
    assert (finding.message_id, finding.receiver_offset) == (id_of(7), FACTS)
    assert "7 and 1000, from plant-a and idmz" in finding.detail


def test_many_missing_facts_are_one_finding(whole: Inbound, tmp_path: Path) -> None:
    """A run of missing facts is named once, with its bounds, its number and the key of the first."""
    verdict = audited(harmed(whole, tmp_path, lambda rows: without(rows, *range(100, 350))))
    [finding] = [each for each in verdict.findings if each.kind == FindingKind.MISSING]
    assert (finding.offset, finding.last, finding.count, finding.message_id) == (100, 349, 250, id_of(100))
    assert verdict.finding_counts[FindingKind.MISSING] == 250 and verdict.compared == FACTS - 250


def test_a_window_leaves_the_rest_alone(whole: Inbound, tmp_path: Path) -> None:
    """Only the offsets that are asked for are compared; harm outside of them is not seen."""
    harm = harmed(whole, tmp_path, lambda rows: without(rows, 500))
    outside = audited(replace(harm, first=501, last=700))
    assert outside.compared == 200 and FindingKind.MISSING not in outside.finding_counts
    inside = audited(replace(harm, first=450, last=700))
    assert inside.compared == 250
    assert [each.offset for each in inside.findings if each.kind == FindingKind.MISSING] == [500]
    # The window is found in the receiver's log without reading all of it.
    assert inside.receiver.facts_read == 250


def test_a_window_does_not_hide_what_stands_elsewhere(whole: Inbound, tmp_path: Path) -> None:
    """A fact of the window that stands outside of it at the receiver is out of order and not missing."""
    found = harmed(whole, tmp_path, lambda rows: exchanged(rows, 120, 900))
    verdict = audited(replace(found, first=100, last=199))
    assert verdict.compared == 99
    wrong = [(each.kind, each.offset) for each in verdict.findings if each.kind != FindingKind.HEAD_UNKNOWN]
    assert wrong == [(FindingKind.OUT_OF_ORDER, 120)]


def test_a_window_after_a_truncation_excuses_nothing_inside(tmp_path: Path) -> None:
    """What is missing at the beginning of a window is missing, although the receiver has let older facts go."""
    inbound = asyncio.run(truncated_world(tmp_path, 0, 300))
    found = plan(inbound)
    verdict = audited(replace(found, first=600, last=699))
    assert verdict.clean and verdict.compared == 100
    folder = Path(found.receiver.name)
    log = log_of(folder, Buffer.FORWARD)
    segment = next(each for each in log.view().segments if each.base >= 500)
    data = bytearray(Path(folder / segment.path).read_bytes())
    data[data.find(b"0-000") + 2] ^= 1
    Path(folder / segment.path).write_bytes(bytes(data))
    first = segment.base
    harm = audited(replace(found, first=first, last=first + 99))
    assert harm.finding_counts[FindingKind.MISSING] == 50


def test_without_deep_bodies_are_not_hashed(whole: Inbound, tmp_path: Path) -> None:
    """Without the deep look an altered body with its old digest passes, and the verdict says what was not checked."""
    found = harmed(whole, tmp_path, lambda rows: with_value(rows, 333, object=b"{}"))
    verdict = audited(replace(found, deep=False))
    assert FindingKind.BODY_ALTERED not in verdict.finding_counts
    [check] = [each for each in verdict.checks if each.name.startswith("Bodies")]
    assert check.state == CheckState.NOT_CHECKED


# What is rightly not there.


def run(work: Callable[[], Awaitable[Inbound]]) -> StreamVerdict:
    """Make a world and audit it."""

    async def making() -> Inbound:
        return await work()

    return audited(plan(asyncio.run(making())))


def reasons(verdict: StreamVerdict) -> dict[str, int]:
    """Give how many facts are absent, by reason, of a verdict without findings."""
    assert verdict.findings == [], brief(verdict)
    return verdict.absent


def test_several_links_share_a_forward_buffer(tmp_path: Path) -> None:
    """The facts of two plants lie between each other in one forward buffer; each link is compared by itself."""

    async def work() -> tuple[Inbound, Inbound]:
        one, two, enterprise = (FolderZone(name, tmp_path) for name in ("plant-a", "plant-b", "enterprise"))
        links = await linked(one, enterprise), await linked(two, enterprise)
        for first in range(0, 600, 100):
            await one.say(100, first=first)
            await two.say(70, first=first)
            for link in links:
                await link.pull_all()
        await closed(one, two, enterprise)
        return links

    for inbound, count in zip(asyncio.run(work()), (600, 420), strict=True):
        verdict = audited(plan(inbound))
        assert reasons(verdict) == {} and verdict.compared == count
        assert verdict.receiver.facts_read == 1020


def test_a_relay_is_audited_hop_by_hop(tmp_path: Path) -> None:
    """A link that pulls a forward buffer is compared with it; facts that return are left out and counted."""

    async def work() -> tuple[Inbound, Inbound, Inbound]:
        plant, idmz, enterprise = (FolderZone(name, tmp_path) for name in ("plant-a", "idmz", "enterprise"))
        up, back = await linked(plant, idmz), await linked(enterprise, idmz)
        on = await linked(idmz, enterprise, relayed=("plant-a",), buffer=Buffer.FORWARD)
        await plant.say(300)
        await enterprise.say(40)
        for link in (up, back, on):
            await link.pull_all()
        await closed(plant, idmz, enterprise)
        return up, back, on

    up, back, on = asyncio.run(work())
    assert [audited(plan(link)).compared for link in (up, back)] == [300, 40]
    verdict = audited(plan(on))
    assert reasons(verdict) == {"returning": 40} and verdict.compared == 300


def test_two_links_from_one_zone_are_told_apart(tmp_path: Path) -> None:
    """Both buffers of a zone may be pulled: their offsets look the same at the receiver, and are not mixed up."""

    async def work() -> tuple[Inbound, Inbound]:
        plant, idmz, enterprise = (FolderZone(name, tmp_path) for name in ("plant-a", "idmz", "enterprise"))
        up = await linked(plant, idmz)
        own = await linked(idmz, enterprise)
        on = await linked(idmz, enterprise, relayed=("plant-a",), buffer=Buffer.FORWARD)
        await plant.say(200)
        await idmz.say(150)
        # A producer of the relay may speak for another zone: only its key tells by which link it came.
        await idmz.say(0, facts=[message("for-another", from_zone="plant-b")])
        own = replace(own, rules=replace(own.rules, from_zones=frozenset({"idmz", "plant-b"})))
        for link in (up, own, on):
            await link.pull_all()
        await closed(plant, idmz, enterprise)
        return own, on

    own, on = asyncio.run(work())
    for inbound, count, other in ((own, 151, Buffer.FORWARD), (on, 200, Buffer.STORE)):
        sibling = FolderEnd(str(tmp_path / "idmz"), STREAM, other)
        verdict = audited(plan(inbound, sibling=sibling))
        assert reasons(verdict) == {} and verdict.compared == count


def test_what_a_link_does_not_carry_is_no_loss(tmp_path: Path) -> None:
    """Facts for other zones are left out by the link, counted, and not missing."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        carriage = Carriage(frozenset({"enterprise"}), "enterprise")
        inbound = await linked(plant, enterprise, carriage=carriage)
        facts = [
            message(f"id-{at}", at, from_zone="plant-a", to_zone="enterprise" if at % 3 else "lab") for at in range(300)
        ]
        await plant.say(0, facts=facts)
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    verdict = run(work)
    assert reasons(verdict) == {"not_carried": 100} and verdict.compared == 200


def test_a_fact_that_came_by_another_path_is_no_loss(tmp_path: Path) -> None:
    """A fact that was there already, from a relay, is found by its key and not called missing."""

    async def work() -> Inbound:
        plant, idmz, enterprise = (FolderZone(name, tmp_path) for name in ("plant-a", "idmz", "enterprise"))
        up = await linked(plant, idmz)
        on = await linked(idmz, enterprise, relayed=("plant-a",), buffer=Buffer.FORWARD)
        direct = await linked(plant, enterprise)
        await plant.say(150)
        for link in (up, on):
            await link.pull_all()
        await plant.say(100, first=150)
        await direct.pull_all()
        await closed(plant, idmz, enterprise)
        return direct

    verdict = run(work)
    assert reasons(verdict) == {"other_path": 150} and verdict.compared == 100


def test_refused_facts_are_quarantined_and_reported(tmp_path: Path) -> None:
    """A conflict is listed as quarantined, at both ends; without the record at the sender it is a finding."""

    async def work() -> Inbound:
        plant, idmz, enterprise = (FolderZone(name, tmp_path) for name in ("plant-a", "idmz", "enterprise"))
        up = await linked(plant, idmz)
        on = await linked(idmz, enterprise, relayed=("plant-a",), buffer=Buffer.FORWARD)
        direct = await linked(plant, enterprise)
        await plant.say(100)
        forward = await enterprise.forward()
        from tests.journey.zones import origin_span

        await forward.put_if_absent(
            seal(FactBatch.from_messages(altered(messages(3, first=20, from_zone="plant-a")))),
            origin_span("lab", 0, 3),
        )
        del up, on
        await direct.pull_all()
        await closed(plant, idmz, enterprise)
        return direct

    inbound = asyncio.run(work())
    verdict = audited(plan(inbound))
    assert reasons(verdict) == {"quarantined": 3} and verdict.compared == 97
    [absence] = verdict.absences
    assert (absence.first, absence.last, absence.detail) == (20, 22, "conflict")
    assert verdict.receiver.quarantined == 3
    assert [(each.reason, each.message_id) for each in verdict.quarantine] == [
        ("conflict", id_of(at)) for at in (20, 21, 22)
    ]
    assert "In quarantine at the receiver: 3" in page(Verdict("link", "plant-a", "e", 0, 1.0, (verdict,)))

    found = plan(inbound)
    (Path(found.sender.name) / log_of(Path(found.sender.name), Buffer.STORE).path / "notes.journal").unlink()
    silent = audited(found)
    assert [(each.kind, each.offset, each.last) for each in silent.findings] == [(FindingKind.UNREPORTED, 20, 22)]


def test_evicted_facts_are_on_record(tmp_path: Path) -> None:
    """Facts that the sender had to drop before they were sent are gap records at both ends, not losses."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        plant.store_policy = Policy(capacity_bytes=200_000, overflow=Overflow.DROP_OLDEST)
        inbound = await linked(plant, enterprise)
        await plant.say(1_000)
        await inbound.pull_all()
        await plant.say(100, first=1_000)
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    inbound = asyncio.run(work())
    verdict = audited(plan(inbound))
    dropped = verdict.absent["evicted"]
    assert set(reasons(verdict)) <= {"evicted", "truncated"}
    assert dropped > 100 and verdict.compared + verdict.by_digest <= 1_100 - dropped

    found = plan(inbound)
    folder = Path(found.receiver.name)
    (folder / log_of(folder, Buffer.FORWARD).path / "notes.journal").unlink()
    silent = audited(found)
    assert silent.finding_counts == {FindingKind.GAP_UNRECORDED: dropped}


def test_what_a_receiver_evicted_is_explained(tmp_path: Path) -> None:
    """A forward buffer that let facts go for room has records of them: they are told as such, and none is missing."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        enterprise.forward_policy = Policy(capacity_bytes=200_000, overflow=Overflow.DROP_OLDEST)
        inbound = await linked(plant, enterprise)
        await plant.say(1_000)
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    inbound = asyncio.run(work())
    found = plan(inbound)
    verdict = audited(found)
    start = log_of(Path(found.receiver.name), Buffer.FORWARD).view().segments[0].header.base
    assert start > 100
    assert reasons(verdict) == {"receiver_truncated": start}
    assert {each.detail for each in verdict.absences} == {
        f"the receiver's buffer begins at {start}, on record: {start:,} evicted"
    }
    assert verdict.compared == 1_000 - start


def test_the_tail_is_in_flight(tmp_path: Path) -> None:
    """What is not confirmed yet is in flight and no loss, whether it is there already or not."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        inbound = await linked(plant, enterprise)
        await plant.say(200)
        await inbound.pull_all()
        await plant.say(300, first=200)
        await closed(plant, enterprise)
        return inbound

    verdict = run(work)
    assert reasons(verdict) == {"in_flight": 300}
    assert (verdict.in_flight, verdict.frontier, verdict.compared) == (300, 199, 200)


def test_a_confirmed_fact_that_is_gone_is_missing(whole: Inbound, tmp_path: Path) -> None:
    """A receiver that lost its tail after it had confirmed it does not pass for one that is behind."""
    verdict = audited(harmed(whole, tmp_path, lambda rows: rows.slice(0, 900)))
    [finding] = [each for each in verdict.findings if each.kind == FindingKind.MISSING]
    assert (finding.offset, finding.last, finding.count) == (900, 999, 100)


# What was let go.


async def truncated_world(root: Path, sender: int, receiver: int, per_fetch: int = 50) -> Inbound:
    """Make two ends that have let go everything below an offset each; their segments have the same borders at 50."""
    plant, enterprise = FolderZone("plant-a", root), FolderZone("enterprise", root)
    inbound = replace(await linked(plant, enterprise), request=FetchRequest(max_facts=per_fetch))
    await plant.say(FACTS)
    await inbound.pull_all()
    await (await plant.store()).truncate_before(sender)
    await (await enterprise.forward()).truncate_before(receiver)
    await closed(plant, enterprise)
    return inbound


def test_what_the_sender_let_go_is_proven_by_its_digests(tmp_path: Path) -> None:
    """Ranges that the sender truncated are held against the digests it kept; an altered envelope in them is found."""
    inbound = asyncio.run(truncated_world(tmp_path, 600, 0))
    verdict = audited(plan(inbound))
    assert reasons(verdict) == {"truncated": 600}
    kept = verdict.by_digest
    assert kept >= 400 and verdict.compared == 400
    found = plan(inbound)

    def audited_with(change: Change, name: str) -> StreamVerdict:
        folder = copied(Path(found.receiver.name), tmp_path / name)
        rewrite(folder, Buffer.FORWARD, change)
        assert isinstance(found.receiver, FolderEnd)
        return audited(replace(found, receiver=replace(found.receiver, path=str(folder))))

    envelope = audited_with(lambda rows: with_value(rows, 50, to_zone="lab"), "envelope")
    assert envelope.finding_counts[FindingKind.KEPT_DIGEST] > 0 and envelope.by_digest < kept
    removed = audited_with(lambda rows: without(rows, 50), "removed")
    assert [each.message_id for each in removed.findings if each.kind == FindingKind.MISSING] == [id_of(50)]
    changed = audited_with(lambda rows: resealed(rows, 50, object=b"{}"), "changed")
    assert [(each.offset, each.fields) for each in changed.findings if each.kind == FindingKind.ALTERED] == [
        (50, ("digest",))
    ]


def test_what_the_receiver_let_go_is_proven_by_its_digests(tmp_path: Path) -> None:
    """Ranges that the receiver truncated are held against the sender's entries; what differs is found."""
    inbound = asyncio.run(truncated_world(tmp_path, 0, 600))
    verdict = audited(plan(inbound))
    assert reasons(verdict) == {"receiver_truncated": 600}
    assert verdict.by_digest >= 400 and verdict.compared == 400
    found = plan(inbound)
    folder = copied(Path(found.sender.name), tmp_path / "harmed")
    rewrite(folder, Buffer.STORE, lambda rows: resealed(rows, 50, object=b"{}"))
    assert isinstance(found.sender, FolderEnd)
    harm = audited(replace(found, sender=replace(found.sender, path=str(folder))))
    assert harm.finding_counts[FindingKind.KEPT_DIGEST] > 0


def test_what_both_let_go_is_compared_where_it_lines_up(tmp_path: Path) -> None:
    """Two digests of one range prove it; where borders do not meet, the verdict says so instead of guessing."""
    inbound = asyncio.run(truncated_world(tmp_path / "a", 500, 600))
    verdict = audited(plan(inbound))
    assert reasons(verdict) == {"truncated": 500, "receiver_truncated": 100} and verdict.by_digest >= 500

    inbound = asyncio.run(truncated_world(tmp_path / "b", 500, 600, per_fetch=70))
    verdict = audited(plan(inbound))
    assert verdict.clean and verdict.absent["truncated"] == 500
    [check] = [each for each in verdict.checks if "let go" in each.name]
    assert check.state == CheckState.NOT_CHECKED and "cannot be compared" in check.detail


# The logs themselves.


def test_a_damaged_frame_is_found(tmp_path: Path) -> None:
    """Bytes that changed on disk are damage of the log, at the end where they lie, and its facts are missing there."""
    inbound = world(tmp_path, 300)
    found = plan(inbound)
    path = Path(found.receiver.name) / log_of(Path(found.receiver.name), Buffer.FORWARD).path / segment_name(0)
    data = bytearray(path.read_bytes())
    at = data.find(b"0-000003")
    data[at] ^= 1
    path.write_bytes(bytes(data))
    verdict = audited(found)
    assert verdict.finding_counts[FindingKind.LOG_DAMAGED] > 0 and verdict.finding_counts[FindingKind.MISSING] > 0
    assert {each.side for each in verdict.findings if each.kind == FindingKind.LOG_DAMAGED} == {"receiver"}


def test_a_replaced_segment_breaks_the_chain(tmp_path: Path) -> None:
    """A segment that was written anew, sound in itself, does not fit between its neighbours."""
    inbound = world(tmp_path, 600)
    found = plan(inbound)
    folder = Path(found.sender.name)
    other = copied(folder, tmp_path / "other")
    rewrite(other, Buffer.STORE, lambda rows: with_value(rows, 5, to_zone="lab"))
    path = log_of(folder, Buffer.STORE).path
    made = (other / path / segment_name(0)).read_bytes()
    first, second = sorted((folder / path).glob("*.seg"))[:2]
    until = int(second.stem)
    view = log_of(other, Buffer.STORE).view()
    end = next(ref.position for ref in view.segments[0].frames if ref.base == until)
    first.write_bytes(made[:end])
    verdict = audited(found)
    broken = [each for each in verdict.findings if each.kind == FindingKind.CHAIN_BROKEN]
    assert [(each.side, each.offset) for each in broken] == [("sender", until)]
    assert [(each.offset, each.fields) for each in verdict.findings if each.kind == FindingKind.ALTERED] == [
        (5, ("to_zone",))
    ]


def test_a_rewritten_history_lacks_the_exchanged_head(whole: Inbound, tmp_path: Path) -> None:
    """A log that was written anew from the beginning has a whole chain, but not the head that it told the other end."""
    for side in ("sender", "receiver"):
        found = plan(whole)
        folder = copied(Path(getattr(found, side).path), tmp_path / side)
        rewrite(folder, getattr(found, side).buffer, lambda rows: rows, per_frame=25)
        verdict = audited(replace(found, **{side: replace(getattr(found, side), path=str(folder))}))
        assert [(each.kind, each.side) for each in verdict.findings] == [(FindingKind.HEAD_UNKNOWN, side)]


def test_a_sender_with_another_log_is_found(whole: Inbound, tmp_path: Path) -> None:
    """A sender's folder that was made anew is not the log that the receiver knows, whatever is in it."""

    async def work() -> FolderZone:
        plant = FolderZone("plant-a", tmp_path)
        await plant.say(FACTS)
        await closed(plant)
        return plant

    other = asyncio.run(work())
    found = plan(whole)
    verdict = audited(replace(found, sender=FolderEnd(str(other.folder), STREAM, Buffer.STORE)))
    assert FindingKind.FOREIGN_LOG in verdict.finding_counts


def test_a_gap_record_needs_no_facts(tmp_path: Path) -> None:
    """Facts that an operator's record says were skipped are listed with its words."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        inbound = await linked(plant, enterprise)
        await plant.say(100)
        await inbound.pull_all()
        gap = GapRecord(30, 39, GapReason.SKIPPED, 1, "not wanted", "plant-a")
        await (await enterprise.forward()).record_gaps([gap])
        await closed(plant, enterprise)
        return inbound

    found = plan(asyncio.run(work()))
    rewrite(Path(found.receiver.name), Buffer.FORWARD, lambda rows: without(rows, *range(30, 40)))
    verdict = audited(found)
    assert verdict.absent == {"skipped": 10} and verdict.absences[0].detail == "not wanted"
    assert set(verdict.finding_counts) == {FindingKind.HEAD_UNKNOWN}


class Interrupted(LocalRunner):
    """Runs something between the first pass and the second."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change: Callable[[], None] | None = change

    def each(self, title: str, steps: Sequence[Callable[[], Any]]) -> list[Any]:
        """Change something once, then run all steps."""
        if self._change is not None:
            self._change()
            self._change = None
        return super().each(title, steps)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_what_is_let_go_while_it_is_read_is_no_loss(tmp_path: Path, side: str) -> None:
    """An end that lets go facts in the middle of an audit is not accused of having lost or invented them."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        inbound = await linked(plant, enterprise)
        await plant.say(500)
        await inbound.pull_all()
        await plant.say(20, first=500)
        await closed(plant, enterprise)
        return inbound

    inbound = asyncio.run(work())

    async def truncate() -> None:
        zone = inbound.link.sender if side == "sender" else inbound.receiver
        await (await (zone.store() if side == "sender" else zone.forward())).truncate_before(400)
        await zone.restart()

    # One range for everything: it is read again because of its tail.
    found = plan(inbound, range_facts=2_048)
    verdict = audit_with(Interrupted(lambda: asyncio.run(truncate())), AuditedLink("link", "plant-a", "e", [found]))
    assert verdict.findings == []
    assert verdict.streams[0].in_flight == 20


# What a link leaves out.


BY_ZONE = Carriage(frozenset({"enterprise"}), "enterprise")
BY_FILTER = Carriage(receiver_zone="enterprise", asked=FactFilter(subjects=("asset:press-*",)))


async def left_out_world(root: Path, count: int, let_go: int = 0, carriage: Carriage = BY_ZONE) -> Inbound:
    """Make a link that leaves out every other fact, and let its sender let go some."""
    plant, enterprise = FolderZone("plant-a", root), FolderZone("enterprise", root)
    inbound = await linked(plant, enterprise, carriage=carriage)
    others: list[dict[str, str]] = [{"subject": "asset:press-1"}, {"to_zone": "lab", "subject": "asset:oven-1"}]
    facts = [message(f"id-{at}", at, from_zone="plant-a", **others[at % 2]) for at in range(count)]
    for at in range(0, count, 100):
        await plant.say(0, facts=facts[at : at + 100])
    await inbound.pull_all()
    await (await plant.store()).truncate_before(let_go)
    await closed(plant, enterprise)
    return inbound


def fold_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have records folded after a few facts."""
    monkeypatch.setattr(gapbook, "SKIPPED_RANGES_MAX", 100)
    monkeypatch.setattr(gapbook, "FOLD_SHIFT", 6)


@pytest.mark.parametrize("let_go", [0, 240])
@pytest.mark.parametrize("knows", [True, False], ids=["who knows what is carried", "who does not"])
@pytest.mark.parametrize("folded", [False, True], ids=["exact", "folded"])
@pytest.mark.parametrize("carriage", [BY_ZONE, BY_FILTER], ids=["by zone", "by filter"])
def test_what_was_left_out_is_no_loss_however_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carriage: Carriage, folded: bool, knows: bool, let_go: int
) -> None:
    """Nobody is accused for what a link left out; a fact that it carried and that is gone is found all the same."""
    if folded:
        fold_soon(monkeypatch)
    inbound = asyncio.run(left_out_world(tmp_path, 400, let_go, carriage))
    found = plan(inbound)
    found = found if knows else replace(found, carry_only=frozenset(), asked=FactFilter())
    assert isinstance(found.receiver, FolderEnd)
    gaps = found.receiver.evidence().gaps
    assert sum(gap.offsets for gap in gaps) == 200 and any(gap.count is not None for gap in gaps) == folded
    verdict = audited(found)
    assert verdict.findings == []
    for offset in (50, 300):
        folder = copied(Path(found.receiver.name), tmp_path / f"without-{offset}")
        rewrite(folder, Buffer.FORWARD, lambda rows, at=offset: without(rows, at // 2))  # type: ignore[misc]
        harm = audited(replace(found, receiver=replace(found.receiver, path=str(folder))))
        missing = [each for each in harm.findings if each.kind == FindingKind.MISSING]
        assert sum(each.count for each in missing) == 1, (offset, harm.findings)


def test_what_returns_and_was_let_go_is_no_loss(tmp_path: Path) -> None:
    """Facts of the receiver's own zone come back to it from no relay, also when the relay has let them go since."""

    async def work() -> Inbound:
        plant, idmz, enterprise = (FolderZone(name, tmp_path) for name in ("plant-a", "idmz", "enterprise"))
        up, back = await linked(plant, idmz), await linked(enterprise, idmz)
        on = await linked(idmz, enterprise, relayed=("plant-a",), buffer=Buffer.FORWARD)
        for at in range(0, 300, 30):
            await plant.say(0, facts=[message(f"up-{n}", n, from_zone="plant-a") for n in range(at, at + 30)])
            await enterprise.say(0, facts=[message(f"down-{n}", n, from_zone="enterprise") for n in range(at, at + 20)])
            for link in (up, back, on):
                await link.pull_all()
        await (await idmz.forward()).truncate_before(400)
        await closed(plant, idmz, enterprise)
        return on

    verdict = audited(plan(asyncio.run(work())))
    assert verdict.findings == []
