"""Links moved by Spark: live, in bulk, held, cut, and handed from one engine to another."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.proxy import Proxy
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.test_backup import back_up, destroy, restore
from tests.e2e.zones import Zone
from tests.spark.nodes import SparkZone, zone_pair
from tests.spark.replicating import Pipeline, wait_until

from bsfg.batch import FactBatch
from bsfg.cli.bench.workload import batch_of, batches_of
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.sealing import functions_of
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import altered
from bsfg.wire.service import GateView

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("replicate")]

LINK, CONSUMER = "from-plant-a", "enterprise.operational"
SETTINGS = 'fetch_wait = "1s"\nbackoff_first = "50ms"\nbackoff_max = "300ms"\nreconciliation_backlog = 1000\n'


@dataclass
class Story:
    """Two zones, the network between them, and the pipeline of the second one."""

    plant: SparkZone
    enterprise: SparkZone
    proxy: Proxy
    pipeline: Pipeline
    produced: int = 0

    def produce(self, count: int) -> None:
        """Append facts at the plant."""

        async def work() -> None:
            async with self.plant.client("producer") as client:
                for batch in batches_of(self.produced, count):
                    await client.append("operational", batch)

        asyncio.run(work())
        self.produced += count

    def produce_until_replayed(self, count: int, replays: int) -> None:
        """Append backlogs until one has been replayed: what live tasks move between two looks of the driver is none."""
        while self.pipeline.link["replays"] == replays and self.produced < 20 * count:
            self.produce(count)
        self.pipeline.until(lambda: self.pipeline.link["replays"] > replays, "a replay")

    def settle(self) -> None:
        """Wait until everything is confirmed, and insist that it arrived once and in order."""
        end = self.plant.end(Buffer.STORE)
        self.pipeline.until(lambda: self.plant.committed(CONSUMER) == end - 1, f"{end} facts")
        assert arrived(self.enterprise) == sent(self.plant)
        assert functions(self.enterprise, Buffer.FORWARD) == functions(self.plant, Buffer.STORE) == {"blake3"}

    def mode(self, mode: str) -> None:
        """Wait until the gate is in a mode."""
        self.pipeline.until(lambda: self.enterprise.modes(LINK)[-1:] == [mode], f"the gate to be {mode}")


def sent(zone: Zone, stream: str = "operational") -> list[tuple[int, str]]:
    """Give offset and id of every fact that a zone has appended."""
    return _columns(zone, Buffer.STORE, stream, "offset")


def arrived(zone: Zone, stream: str = "operational") -> list[tuple[int, str]]:
    """Give the sender's offset and the id of every fact that has come to a zone, in the order of arrival."""
    return _columns(zone, Buffer.FORWARD, stream, "origin_offset")


def functions(zone: SparkZone, buffer: Buffer) -> set[str]:
    """Give the functions of the digests in a buffer."""
    frames = zone.log(buffer, "operational").frames()
    return {name for frame in frames if frame.entries is not None for name in functions_of(frame.entries.facts)}


def _columns(zone: Zone, buffer: Buffer, stream: str, offset: str) -> list[tuple[int, str]]:
    result: list[tuple[int, str]] = []
    for frame in zone.log(buffer, stream).frames():
        if frame.entries is not None:
            offsets, found = frame.entries.column(offset), frame.entries.column("message_id")
            result += zip(offsets.to_pylist(), found.to_pylist(), strict=True)
    return result


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Start both zones, whose digests are by different functions, and the pipeline between them."""
    cleanup = Cleanup()
    plant, enterprise = zone_pair(tmp_path_factory.mktemp("replicate"))
    plant.hasher = "blake3"
    plant.write()
    proxy = cleanup.closing(Proxy(plant.port))
    enterprise.links = enterprise.links.replace(f":{plant.port}", f":{proxy.port}") + SETTINGS
    enterprise.write()
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    story = Story(plant, enterprise, proxy, Pipeline(enterprise, ["--replay-backlog", "20000"]))
    try:
        story.pipeline.until_moving()
        yield story
    finally:
        story.pipeline.kill()  # the one that a test may have put into the place of the first
        cleanup.run()


def test_facts_cross_as_they_come(story: Story) -> None:
    """What is appended arrives, is confirmed, and shows in the status of the receiver's node."""
    for _ in range(5):
        story.produce(20)
        story.settle()
    story.mode("normal")

    def lag_seconds() -> float | None:
        return {each["stream"]: each["lag_seconds"] for each in story.pipeline.link["streams"]}.get("operational")

    story.pipeline.until(lambda: lag_seconds() is not None, "the lag to be shown")


@pytest.mark.soak
def test_a_backlog_is_replayed(story: Story, soak_size: Callable[[int, int], int]) -> None:
    """After an outage the backlog crosses as a DataFrame, and live facts follow it without hole, repeat or disorder."""
    story.settle()
    before = story.pipeline.link["replays"]
    story.proxy.cut()
    story.mode("autonomous")
    story.produce(soak_size(60_000, 10_000_000))
    story.proxy.mend()
    story.produce_until_replayed(60_000, before)
    story.produce(500)
    story.settle()
    story.mode("normal")
    assert "reconciliation" in story.enterprise.modes(LINK)


def test_artifacts_travel_with_their_facts(story: Story) -> None:
    """Live and in a replay, an artifact is there when the fact that names it is."""
    contents = [Random(seed).randbytes(200_000) for seed in range(2)]
    named = [reference(content, f"report-{number}.pdf") for number, content in enumerate(contents)]

    async def append(number: int) -> None:
        async with story.plant.client() as producer:
            await upload(producer, contents[number], named[number])
            await producer.append("operational", FactBatch.from_messages([naming(named[number], f"report-{number}")]))

    asyncio.run(append(0))
    story.settle()
    story.proxy.cut()
    story.mode("autonomous")
    story.produce(30_000)
    asyncio.run(append(1))
    story.produce(30_000)
    story.proxy.mend()
    story.settle()
    for content, artifact in zip(contents, named, strict=True):
        assert asyncio.run(download(story.enterprise, artifact)) == content


def test_a_conflict_passes_and_is_reported(story: Story) -> None:
    """A fact whose id is taken by another body here is quarantined, told to the sender, and the rest goes on."""
    taken = batch_of(story.produced, 1).to_messages()
    story.settle()
    before = len(arrived(story.enterprise))

    hold(story, held=True)
    story.enterprise.offline(lambda storage: _plant_impostor(storage, taken))
    story.produce(10)
    hold(story, held=False)
    end = story.plant.end(Buffer.STORE)
    story.pipeline.until(lambda: story.plant.committed(CONSUMER) == end - 1, "the rest")
    assert len(arrived(story.enterprise)) == before + 1 + 9
    [quarantined] = story.enterprise.log(Buffer.FORWARD).notes().quarantine.all()
    assert quarantined.key.message_id == taken[0].envelope.message_id
    refused = [gap for gap in story.plant.gaps(Buffer.STORE) if gap.reason == "quarantined"]
    assert [(gap.first, gap.last) for gap in refused] == [(end - 10, end - 10)]


async def _plant_impostor(storage: LogStorage, messages: list[Message]) -> None:
    import numpy as np

    from bsfg.ports import OriginSpan
    from bsfg.testing.facts import sealed

    forward = await storage.forward("operational")
    await forward.put_if_absent(sealed(altered(messages)), OriginSpan("plant-a", np.array([10**9]), np.array([1])))


def test_an_operator_holds_and_releases(story: Story) -> None:
    """While the gate is held nothing arrives, however much is appended; after the release everything does."""
    hold(story, held=True)
    before = story.enterprise.end(Buffer.FORWARD)
    end = story.plant.end(Buffer.STORE) + 300
    story.produce(300)
    assert story.enterprise.end(Buffer.FORWARD) == before
    assert story.enterprise.modes(LINK)[-1] == "held"
    hold(story, held=False)
    story.pipeline.until(lambda: story.plant.committed(CONSUMER) == end - 1, "what was held")


def test_a_second_pipeline_waits_and_takes_over(story: Story) -> None:
    """Two pipelines for one link on one machine: the second says who has it and waits, and goes on after the first."""
    second = Pipeline(story.enterprise)
    try:
        second.until(lambda: second.link.get("holder") is not None, "the second to look")
        assert not second.link["ours"]
        end = story.plant.end(Buffer.STORE) + 100
        story.produce(100)
        story.pipeline.until(lambda: story.plant.committed(CONSUMER) == end - 1, "the first to go on beside it")
        assert not story.pipeline.link["restarts"]
        story.pipeline.kill()
        second.until_moving()
        end = story.plant.end(Buffer.STORE) + 100
        story.produce(100)
        second.until(lambda: story.plant.committed(CONSUMER) == end - 1, "facts")
    finally:
        story.pipeline = second
    assert not second.link["problem"]


def test_engines_take_over_from_each_other(story: Story) -> None:
    """The node itself goes on where Spark stopped, and Spark where the node stopped; a clean stop leaves nothing."""
    assert story.pipeline.stop() == 0
    wait_until(lambda: not story.pipeline.processes(), "all its processes to end")
    text = story.enterprise.links
    end = story.plant.end(Buffer.STORE)
    for engine in ("native", "spark"):
        story.enterprise.links = text.replace('engine = "spark"', f'engine = "{engine}"')
        story.enterprise.restart()
        if engine == "spark":
            story.pipeline = Pipeline(story.enterprise)
        story.produce(200)
        end += 200
        wait_until(lambda: story.plant.committed(CONSUMER) == end - 1, f"{engine} to move facts")  # noqa: B023
    ours = [entry for entry in arrived(story.enterprise) if entry[0] < 10**9]
    refused = {gap.first for gap in story.enterprise.gaps(Buffer.FORWARD) if gap.reason == "quarantined"}
    assert ours == [entry for entry in sent(story.plant) if entry[0] not in refused]


def test_another_history_is_held(story: Story) -> None:
    """A sender whose log is another one holds the link; it begins anew after a release, also without a pipeline."""
    story.plant.stop()
    shutil.rmtree(story.plant.data)
    story.plant.start()
    story.produced += 1_000_000
    story.produce(10)
    story.mode("held")
    [gate] = [each for each in asyncio.run(gates(story)) if each.side == "receiver"]
    assert gate.gate.reason.startswith("foreign_log")
    assert story.pipeline.stop() == 0
    holds = story.enterprise.modes(LINK).count("held")
    hold(story, held=False)
    story.pipeline = Pipeline(story.enterprise)
    story.pipeline.until(lambda: story.plant.committed(CONSUMER) == 9, "the new history")
    assert story.enterprise.modes(LINK).count("held") == holds


def test_a_restored_zone_is_brought_back(story: Story) -> None:
    """A receiver lost its disk and what it had confirmed: the link is held, and after the release nothing lacks."""
    before = len(arrived(story.enterprise)) - story.plant.end(Buffer.STORE)
    backup, _ = back_up(story.enterprise)
    story.produce(30)
    end = story.plant.end(Buffer.STORE)
    story.pipeline.until(lambda: story.plant.committed(CONSUMER) == end - 1, "facts after the backup")
    destroy(story.enterprise)
    restore(story.enterprise, backup)
    story.enterprise.start()
    story.produce(10)
    story.mode("held")
    hold(story, held=False)
    story.pipeline.until(lambda: story.plant.committed(CONSUMER) == end + 9, "what the restored zone lacked")
    assert arrived(story.enterprise)[before:] == sent(story.plant)


async def gates(story: Story) -> list[GateView]:
    """Ask the node of the enterprise for its gates."""
    async with story.enterprise.admin() as admin:
        return await admin.gates()


def hold(story: Story, *, held: bool) -> None:
    """Hold or release the gate, as an operator."""

    async def work() -> None:
        async with story.enterprise.admin() as admin:
            await (admin.hold_gate(LINK, "test") if held else admin.release_gate(LINK, "test"))

    asyncio.run(work())
