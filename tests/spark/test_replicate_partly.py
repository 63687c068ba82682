"""Links that leave facts out, and facts that name an artifact by its digest alone, moved by Spark: live and in bulk."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from random import Random

import pytest
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.test_relay import covered
from tests.spark.nodes import SparkZone, facts
from tests.spark.replicating import Pipeline
from tests.spark.test_replicate import CONSUMER, arrived, sent

from bsfg.batch import FactBatch
from bsfg.fact import ArtifactRef, Message
from bsfg.journey.link import NOT_ASKED_FOR, NOT_CARRIED
from bsfg.ports import Buffer
from bsfg.retention import GapReason

pytestmark = [pytest.mark.campaign, pytest.mark.long, pytest.mark.xdist_group("replicate-once")]

BACKLOG = 6_000
PARTLY = """carry_only = ["enterprise"]
predicates = ["temperature_*"]
reconciliation_backlog = 1000
fetch_wait = "1s"
batch_facts = 10
compression = true
"""


def for_others(messages: list[Message]) -> list[Message]:
    """Address every second fact to a zone that the link does not carry, and have every sixth say what it does not."""
    others = [
        replace(each, envelope=replace(each.envelope, to_zone="lab")) if number % 2 else each
        for number, each in enumerate(messages)
    ]
    return [
        each if number % 6 else replace(each, fact=replace(each.fact, predicate="seen"))
        for number, each in enumerate(others)
    ]


def produce_bare(plant: SparkZone, content: bytes) -> ArtifactRef:
    """Upload content and append a fact that names it by its digest alone."""
    bare = ArtifactRef(digest=f"sha256:{hashlib.sha256(content).hexdigest()}")

    async def work() -> None:
        async with plant.client() as producer:
            await upload(producer, content, reference(content, f"{len(content)}.pdf"))
            named = naming(bare, f"bare-{len(content)}")
            await producer.append("operational", FactBatch.from_messages([named]))

    asyncio.run(work())
    return bare


def test_what_a_link_leaves_out_is_on_record_live_and_in_a_replay(zones: tuple[SparkZone, SparkZone]) -> None:
    """Of interleaved facts the carried ones arrive in order, the others are two sets of ranges, artifacts are there."""
    plant, enterprise = zones
    enterprise.links += PARTLY
    enterprise.restart()
    contents = [Random(size).randbytes(size) for size in (150_000, 160_000)]
    plant.produce(for_others(facts(BACKLOG)))
    bare = [produce_bare(plant, contents[0])]
    pipeline = Pipeline(enterprise, ["--replay-backlog", "1000"])
    try:
        pipeline.until(lambda: plant.committed(CONSUMER) == BACKLOG, "the backlog")
        produced = BACKLOG
        while not pipeline.link["replays"] and produced < 20 * BACKLOG:
            # What live tasks move between two looks of the driver is no backlog.
            plant.produce(for_others(facts(BACKLOG, first=produced)))
            produced += BACKLOG
        pipeline.until(lambda: pipeline.link["replays"], "a replay")
        plant.produce(for_others(facts(300, first=produced)))
        bare.append(produce_bare(plant, contents[1]))
        end = plant.end(Buffer.STORE)
        pipeline.until(lambda: plant.committed(CONSUMER) == end - 1, "live facts")
    finally:
        pipeline.kill()
    carried = {
        entry.offset
        for entry in plant.entries(Buffer.STORE)
        if entry.message.envelope.to_zone == "enterprise" and entry.message.fact.predicate != "seen"
    }
    assert arrived(enterprise) == [each for each in sent(plant) if each[0] in carried]
    gaps = enterprise.gaps(Buffer.FORWARD)
    assert {(gap.reason, gap.detail, gap.origin_zone) for gap in gaps} == {
        (GapReason.SKIPPED, detail, "plant-a") for detail in (NOT_CARRIED, NOT_ASKED_FOR)
    }
    assert covered(gaps) == set(range(end)) - carried
    for content, artifact in zip(contents, bare, strict=True):
        assert asyncio.run(download(enterprise, artifact)) == content
