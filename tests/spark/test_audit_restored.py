"""Audits after a restore: what a restore changes by its nature is named and no finding; every harm is still found."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from tests.spark.test_audit_folders import closed, resealed

from bsfg.fact import Message
from bsfg.journey.link import PeerPosition
from bsfg.ports import Buffer
from bsfg.spark.audit import AuditedLink, AuditedStream, FindingKind, StreamVerdict, audit_with
from bsfg.spark.audit.report import page
from bsfg.spark.audit.runner import LocalRunner
from bsfg.stores.log.backup import begin_new_histories
from bsfg.stores.log.files import DiskFiles
from bsfg.testing.facts import messages

BACKED_UP, SAID = 400, 1_000


def said_by(receiver: FolderZone, first: int) -> list[Message]:
    """Give what a receiver has of its sender from an offset of the sender on, as `bsfg inspect --facts` exports it."""
    found = [
        message
        for frame in log_of(receiver.folder, Buffer.FORWARD).frames()
        if frame.entries is not None
        for message in frame.entries.to_messages()
    ]
    return found[first:]


async def restored(sender: FolderZone, backup: Path) -> None:
    """Put a sender's folder back to an earlier copy, which becomes a new history."""
    await sender.restart()
    shutil.rmtree(sender.folder)
    shutil.copytree(backup, sender.folder)
    sender.clock.advance(1_000)
    begin_new_histories(DiskFiles(sender.folder), sender.clock.now_unix_ms())
    sender.clock.advance(1_000)


def world(root: Path, before: Sequence[Message] = (), after: Sequence[Message] = ()) -> Inbound:
    """Lose a plant after 1,000 facts, restore it to 400, give the rest back and let the link go on."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", root), FolderZone("enterprise", root)
        inbound = await linked(plant, enterprise)
        await plant.say(BACKED_UP)
        await inbound.pull_all()
        await closed(plant, enterprise)
        backup = copied(plant.folder, root / "backup")
        await plant.say(SAID - BACKED_UP, first=BACKED_UP)
        await inbound.pull_all()
        await closed(plant, enterprise)
        await restored(plant, backup)
        if before:
            await plant.say(0, facts=before)
        await plant.say(0, facts=said_by(enterprise, BACKED_UP))
        if after:
            await plant.say(0, facts=after)
        # What an operator's release does: the receiver asks the new history from where the sender has it.
        await inbound.memory.remember(PeerPosition())
        inbound.begin_anew()
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    return asyncio.run(work())


@pytest.fixture(scope="module")
def healed(tmp_path_factory: pytest.TempPathFactory) -> Inbound:
    """Give a link whose sender was restored, to be copied before it is harmed."""
    return world(tmp_path_factory.mktemp("healed"))


def test_a_restored_sender_is_clean(healed: Inbound) -> None:
    """What was given back has a later time at the sender; that is named, and nothing is altered."""
    verdict = audited(plan(healed))
    assert brief(verdict) == []
    assert verdict.compared == SAID
    assert verdict.absent == {"given_back": SAID - BACKED_UP}
    [absence] = verdict.absences
    assert (absence.first, absence.last) == (BACKED_UP, SAID - 1)


def harmed(healed: Inbound, root: Path, change: Change, side: str = "receiver") -> StreamVerdict:
    """Audit a copy of which one end is changed, keeping the restore that it has behind it."""
    found: AuditedStream = plan(healed)
    end = getattr(found, side)
    folder = copied(Path(end.path), root / "harmed")
    rewrite(folder, end.buffer, change)
    return audited(replace(found, **{side: replace(end, path=str(folder))}))


HARMS = [
    (without, FindingKind.MISSING, ()),
    (repeated, FindingKind.DUPLICATED, ()),
    (lambda rows, at: exchanged(rows, at, at + 5), FindingKind.OUT_OF_ORDER, ()),
    (lambda rows, at: with_value(rows, at, subject="machine:x"), FindingKind.BODY_ALTERED, ("subject",)),
    (lambda rows, at: resealed(rows, at, object=b'{"value":1}'), FindingKind.ALTERED, ("object", "digest")),
    (lambda rows, at: with_value(rows, at, to_zone="elsewhere"), FindingKind.ALTERED, ("to_zone",)),
    (lambda rows, at: with_value(rows, at, labels='{"a":"b"}'), FindingKind.ALTERED, ("labels",)),
    (lambda rows, at: with_value(rows, at, produced_at_unix_ms=5), FindingKind.ALTERED, ("produced_at_unix_ms",)),
    (lambda rows, at: with_value(rows, at, message_id="other"), FindingKind.ALTERED, ("message_id",)),
]


@pytest.mark.parametrize("at", [333, 777], ids=["before the restore", "given back"])
@pytest.mark.parametrize(
    ("harm", "kind", "fields"), HARMS, ids=lambda part: str(part) if isinstance(part, FindingKind) else ""
)
def test_harm_is_found_after_a_restore(
    healed: Inbound, tmp_path: Path, harm: object, kind: FindingKind, fields: tuple[str, ...], at: int
) -> None:
    """Whatever is done to a fact of the receiver, the restore of the sender hides none of it."""
    verdict = harmed(healed, tmp_path, lambda rows: harm(rows, at))  # type: ignore[operator]
    found = [each for each in verdict.findings if each.kind == kind]
    assert found, brief(verdict)
    assert all(set(fields) <= set(each.fields) for each in found)
    assert any(each.offset in (at, at + 5) for each in found)


def test_a_time_from_before_the_restore_is_found(healed: Inbound, tmp_path: Path) -> None:
    """Of facts that were not given back the time must be the same at both ends, as without a restore."""
    verdict = harmed(healed, tmp_path, lambda rows: with_value(rows, 333, origin_appended_at_unix_ms=5))
    assert ("altered", 333, "0-000333", ("origin_appended_at_unix_ms",)) in brief(verdict)


def test_a_time_after_the_restore_is_found(healed: Inbound, tmp_path: Path) -> None:
    """A copy that claims to be younger than the restore was not given back, so its time must be the sender's."""
    late = 1 << 50
    verdict = harmed(healed, tmp_path, lambda rows: with_value(rows, 777, origin_appended_at_unix_ms=late))
    assert ("altered", 777, "0-000777", ("origin_appended_at_unix_ms",)) in brief(verdict)


def test_without_a_restore_other_times_are_altered(tmp_path: Path) -> None:
    """Nobody can pass off an altered log as one that was restored: that stands in the log's own lineage."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        inbound = await linked(plant, enterprise)
        await plant.say(100)
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    inbound = asyncio.run(work())

    def later(rows: pa.RecordBatch) -> pa.RecordBatch:
        times = [time + 10**9 for time in rows.column("appended_at_unix_ms").to_pylist()]
        at = rows.schema.get_field_index("appended_at_unix_ms")
        return rows.set_column(at, rows.schema.field(at), pa.array(times, rows.column(at).type))

    verdict = harmed(inbound, tmp_path, later, "sender")
    assert verdict.finding_counts["altered"] == 100


def test_what_is_said_after_the_restore_is_compared_too(tmp_path: Path) -> None:
    """New facts of the restored sender cross as ever, behind those that were given back."""
    more = messages(50, first=5_000, from_zone="plant-a")
    verdict = audited(plan(world(tmp_path, after=more)))
    assert brief(verdict) == [] and verdict.compared == SAID + 50
    assert verdict.stream == STREAM


def test_the_report_names_what_was_given_back(healed: Inbound) -> None:
    """A reader of the report sees how many facts it concerns, and why."""
    text = page(audit_with(LocalRunner(), AuditedLink("link", "plant-a", "enterprise", [plan(healed)])))
    assert "given back to the sender after its restore" in text


def test_a_restored_sender_without_what_it_had_said(tmp_path: Path) -> None:
    """Where nothing was given back the verdict says so: the receiver is ahead, and new facts have taken old offsets."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        inbound = await linked(plant, enterprise)
        await plant.say(BACKED_UP)
        await inbound.pull_all()
        await closed(plant, enterprise)
        backup = copied(plant.folder, tmp_path / "backup")
        await plant.say(SAID - BACKED_UP, first=BACKED_UP)
        await inbound.pull_all()
        await closed(plant, enterprise)
        await restored(plant, backup)
        await plant.say(20, first=7_000)
        await inbound.memory.remember(PeerPosition())
        inbound.begin_anew()
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    verdict = audited(plan(asyncio.run(work())))
    assert verdict.finding_counts["ahead"] == SAID - BACKED_UP - 20
    assert not {"missing", "altered", "foreign_log", "chain_broken"} & set(verdict.finding_counts)


def test_a_restored_receiver_that_has_read_again(tmp_path: Path) -> None:
    """A receiver that was restored and has read again what it lacked agrees with its sender."""

    async def work() -> Inbound:
        plant, enterprise = FolderZone("plant-a", tmp_path), FolderZone("enterprise", tmp_path)
        inbound = await linked(plant, enterprise)
        await plant.say(BACKED_UP)
        await inbound.pull_all()
        await closed(plant, enterprise)
        backup = copied(enterprise.folder, tmp_path / "backup")
        await plant.say(SAID - BACKED_UP, first=BACKED_UP)
        await closed(plant, enterprise)
        await restored(enterprise, backup)
        await inbound.memory.remember(PeerPosition())
        inbound.begin_anew()
        await inbound.pull_all()
        await closed(plant, enterprise)
        return inbound

    verdict = audited(plan(asyncio.run(work())))
    assert brief(verdict) == [] and verdict.compared == SAID
