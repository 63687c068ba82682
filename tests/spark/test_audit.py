"""Audits on Spark, of two real nodes over mutual TLS and of their folders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import settled
from tests.journey.zones import origin_span
from tests.spark.audit_worlds import copied, rewrite, with_value, without
from tests.spark.nodes import SparkZone, facts, zone_pair

from bsfg.config import load
from bsfg.errors import InvalidArgument, PeerUnreachable, PermissionRefused
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.spark.audit import AuditedLink, FindingKind, Verdict, audit, audit_with
from bsfg.spark.audit.case import Folders, Wish, plan_folders, plan_link
from bsfg.spark.audit.ends import FolderEnd, NodeEnd
from bsfg.spark.audit.report import page
from bsfg.spark.audit.runner import LocalRunner
from bsfg.spark.audit.verdict import CheckState
from bsfg.spark.calls import NodeAccess
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import altered, sealed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FACTS = 1_000
RANGE_FACTS = 256


def pulled(spark: SparkSession, plant: SparkZone, enterprise: SparkZone, found: list[Message]) -> None:
    """Have the plant say something and the enterprise pull it, in frames of 100, and confirm."""
    for at in range(0, len(found), 100):
        plant.produce(found[at : at + 100])
    frames = plant.reader(spark, rows="frames", gaps="rows", startingOffsets=0).load()
    enterprise.writer(
        frames,
        mode="put",
        link="from-plant-a",
        confirmAddress=f"127.0.0.1:{plant.port}",
        confirmServerName="plant-a-bsfg",
        confirmConsumer="enterprise.operational",
        confirmCert=plant.certs / "enterprise-bsfg.crt",
        confirmKey=plant.certs / "enterprise-bsfg.key",
        confirmCa=plant.certs / "ca.crt",
    ).save()


def planned(enterprise: SparkZone, **wish: object) -> AuditedLink:
    """Plan the audit of the enterprise's link as its operator would."""
    options = enterprise.options()
    own = NodeAccess(options["address"], options["ca"], options["cert"], options["key"], options["serverName"])
    wanted = Wish(streams=("operational",), **wish)  # type: ignore[arg-type]
    return smaller(plan_link(load(enterprise.folder / "zone.toml"), None, own, wanted))


async def occupy(storage: LogStorage) -> None:
    """Take two of the plant's keys in a forward buffer, so that the plant's own facts conflict with them."""
    forward = await storage.forward("operational")
    await forward.put_if_absent(sealed(altered(facts(2, first=40))), origin_span("lab", 0, 2))


async def changed(zone: SparkZone, change: Callable[[LogStorage], Awaitable[None]]) -> None:
    """Change the storage of a zone that does not run."""
    storage = await LogStorage.open(zone.data)
    await change(storage)
    await storage.close()


def smaller(plan: AuditedLink) -> AuditedLink:
    """Use ranges that fit small numbers."""
    return replace(plan, streams=[replace(stream, range_facts=RANGE_FACTS) for stream in plan.streams])


def states(verdict: Verdict) -> dict[str, CheckState]:
    """Give how each check ended."""
    return {check.name: check.state for check in verdict.streams[0].checks}


def test_two_nodes_are_audited_over_the_wire(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """Everything that was pulled is compared; chains alone cannot be seen over the wire, and exchanged heads can."""
    plant, enterprise = zones
    pulled(spark, plant, enterprise, facts(FACTS))
    plant.produce(facts(50, first=FACTS))
    told: list[tuple[str, int, int]] = []
    verdict = audit(spark, planned(enterprise), progress=lambda *step: told.append(step))
    assert verdict.clean, verdict.findings
    [stream] = verdict.streams
    assert (stream.compared, stream.in_flight, stream.frontier) == (FACTS, 50, FACTS - 1)
    assert (verdict.link, verdict.sender_zone, verdict.receiver_zone) == ("from-plant-a", "plant-a", "enterprise")
    assert verdict.facts == FACTS and verdict.facts_per_second > 0
    unsure = {name for name, state in states(verdict).items() if state == CheckState.NOT_CHECKED}
    assert unsure >= {"The sender's hash chain is unbroken", "The receiver's hash chain is unbroken"}
    assert CheckState.FAILED not in states(verdict).values()
    assert states(verdict)["The chain heads that the ends exchanged are in their logs"] == CheckState.PASSED
    title, done, total = told[-1]
    assert "operational" in title and done == total
    assert stream.sender.summed_by_node and stream.receiver.summed_by_node
    sums = stream.sender.bytes_received + stream.receiver.bytes_received
    [deep] = audit(spark, planned(enterprise, deep=True)).streams
    assert deep.clean and deep.compared == FACTS
    assert not (deep.sender.summed_by_node or deep.receiver.summed_by_node)
    assert 10 * sums < deep.sender.bytes_received + deep.receiver.bytes_received
    words = {each.name: check.detail for each, check in zip(deep.checks, stream.checks, strict=True)}
    assert "node of the sender and receiver" in words["Bodies are those that the digests were made of"]


def test_harm_is_named_over_the_wire(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """A fact that was removed and one that was altered at rest are named by a node that serves what it has."""
    plant, enterprise = zones
    pulled(spark, plant, enterprise, facts(FACTS))
    enterprise.stop()
    rewrite(enterprise.data, Buffer.FORWARD, lambda rows: without(with_value(rows, 300, subject="machine:x"), 600))
    enterprise.start()
    verdict = audit(spark, planned(enterprise))
    found = {finding.kind: finding for finding in verdict.findings}
    assert (found[FindingKind.MISSING].offset, found[FindingKind.MISSING].message_id) == (600, "0-000600")
    body = found[FindingKind.BODY_ALTERED]
    assert (body.offset, body.from_zone, body.message_id, body.fields) == (300, "plant-a", "0-000300", ("subject",))
    assert FindingKind.HEAD_UNKNOWN in found
    assert verdict.counts[FindingKind.MISSING] == verdict.counts[FindingKind.BODY_ALTERED] == 1

    by_folder = smaller(plan_folders(Folders(plant.data, enterprise.data), Wish(streams=("operational",))))
    for other in (by_folder, planned(enterprise, deep=True)):
        again = audit(spark, other)
        assert {(each.kind, each.offset) for each in again.findings} == {
            (each.kind, each.offset) for each in verdict.findings
        }


def test_what_was_let_go_is_proven_over_the_wire(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """What the sender truncated is held against the digests that it kept, which it tells its peer."""
    plant, enterprise = zones
    pulled(spark, plant, enterprise, facts(FACTS))

    async def truncate(storage: LogStorage) -> None:
        await (await storage.store("operational")).truncate_before(FACTS)

    plant.offline(truncate)
    plant.produce(facts(100, first=FACTS))
    verdict = audit(spark, planned(enterprise))
    [stream] = verdict.streams
    assert verdict.clean and (stream.by_digest, stream.compared) == (FACTS, 0)
    assert stream.absent == {"truncated": FACTS, "in_flight": 100}

    harmed = copied(enterprise.data, enterprise.folder / "harmed")
    rewrite(harmed, Buffer.FORWARD, lambda rows: with_value(rows, 9, labels='{"x":"y"}'))
    plan = planned(enterprise, receiver=harmed)
    assert isinstance(plan.streams[0].sender, NodeEnd) and isinstance(plan.streams[0].receiver, FolderEnd)
    assert FindingKind.KEPT_DIGEST in audit(spark, plan).counts


def test_conflicts_and_losses_are_told_apart(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """What the receiver refused is listed as quarantined and is on record at the sender, so nothing is missing."""
    plant, enterprise = zones
    enterprise.offline(occupy)
    pulled(spark, plant, enterprise, facts(100))
    verdict = audit(spark, planned(enterprise))
    [stream] = verdict.streams
    assert verdict.clean, verdict.findings
    assert stream.absent == {"quarantined": 2} and stream.compared == 98
    assert stream.receiver.quarantined == 2


def test_the_window_and_the_depth_are_chosen(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """Offsets bound what is compared; a bad range, stream or link is refused with what there is."""
    plant, enterprise = zones
    pulled(spark, plant, enterprise, facts(500))
    verdict = audit(spark, planned(enterprise, first=100, last=299, deep=False))
    assert verdict.facts == 200 and verdict.clean and not verdict.streams[0].deep
    config = load(enterprise.folder / "zone.toml")
    for wish, link, words in (
        (Wish(streams=("nonsense",)), None, "has no stream 'nonsense'"),
        (Wish(), "from-nowhere", "has no link 'from-nowhere'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            plan_link(config, link, None, wish)
    with pytest.raises(InvalidArgument, match="is not a range of offsets"):
        Wish(first=5, last=4)


def test_errors_of_tasks_come_back_as_our_own(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """A node that is away, or refuses, ends the audit with the error that says so."""
    plant, enterprise = zones
    pulled(spark, plant, enterprise, facts(100))
    plan = planned(enterprise)
    [stream] = plan.streams
    assert isinstance(stream.sender, NodeEnd) and isinstance(stream.receiver, NodeEnd)
    stranger = replace(stream.sender, access=replace(stream.receiver.access, address=stream.sender.access.address))
    enterprise.stop()
    hurried = replace(stream.receiver, retry_seconds=0.5)
    with pytest.raises(PeerUnreachable):
        audit(spark, replace(plan, streams=[replace(stream, receiver=hurried)]))
    denied = replace(stranger, access=replace(stranger.access, server_name="plant-a-bsfg"), buffer=Buffer.FORWARD)
    with pytest.raises(PermissionRefused):
        denied.evidence()


def test_the_report_is_one_safe_page(spark: SparkSession, zones: tuple[SparkZone, SparkZone]) -> None:
    """The page loads nothing, runs nothing, and shows what others wrote as text."""
    plant, enterprise = zones
    pulled(spark, plant, enterprise, facts(300))
    enterprise.stop()
    evil = '<script>alert("x")</script>'
    rewrite(enterprise.data, Buffer.FORWARD, lambda rows: without(with_value(rows, 7, message_id=evil), 200))
    folders = plan_folders(Folders(plant.data, enterprise.data, "plant-a"), Wish(streams=("operational",)))
    verdict = audit(spark, smaller(folders))
    text = page(verdict)
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "default-src 'none'" in text and "http://" not in text and "https://" not in text
    assert text.count("<svg") == text.count("</svg>") == 3
    assert "prefers-color-scheme: dark" in text
    for words in ("0-000200", "Missing: 1", "Altered: 1", "finding", "plant-a"):
        assert words in text


def test_a_busy_link_is_not_accused(tmp_path: Path, cleanup: Cleanup) -> None:
    """While facts cross, conflicts among them, audit after audit finds nothing wrong, over the wire and in folders."""
    plant, enterprise = zone_pair(tmp_path)
    enterprise.links = enterprise.links.replace('"spark"', '"native"')
    enterprise.write()
    asyncio.run(changed(enterprise, occupy))
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    done = threading.Event()

    def produce() -> None:
        for first in range(0, 4_000, 100):
            plant.produce(facts(100, first=first))
        done.set()

    producer = threading.Thread(target=produce)
    producer.start()
    verdicts: list[Verdict] = []
    while not done.is_set() or len(verdicts) < 4:
        folders = {} if len(verdicts) % 2 else {"sender": plant.data, "receiver": enterprise.data}
        verdicts.append(audit_with(LocalRunner(), planned(enterprise, **folders)))
    producer.join()
    assert [verdict.findings for verdict in verdicts] == [[]] * len(verdicts)
    asyncio.run(settled(plant, enterprise))
    [last] = audit_with(LocalRunner(), planned(enterprise)).streams
    assert last.clean and last.compared + sum(last.absent.values()) == 4_000
    assert last.absent["quarantined"] == 2
