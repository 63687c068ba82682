"""Landing on Spark: every fact of a buffer once, whatever runs again, and nothing that is missing goes unsaid."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pandas
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, pair
from tests.spark.landing import check_same, gap_offsets, seen_offsets, settings, table
from tests.spark.nodes import SparkZone, facts

from bsfg.errors import BsfgError, FolderLocked, ForeignLog, InvalidArgument, PermissionRefused, SpoolNotShared
from bsfg.fact import Message
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land import lander as lander_module
from bsfg.spark.land.folder import Staged
from bsfg.spark.land.lander import Interrupted, Lander, land_available, landing
from bsfg.spark.land.staging import Merge
from bsfg.spark.land.state import STATE, By, Landed, LandSettings, TableFormat
from bsfg.spark.land.upkeep import Compactor
from bsfg.spark.options import position
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.clock import START_UNIX_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTLE_SECONDS = 60.0


def spread(found: list[Message]) -> list[Message]:
    """Spread facts over two predicates and three days."""
    return [
        replace(
            message,
            fact=replace(message.fact, predicate=("door_opened", "temperature_measured")[number % 2]),
            envelope=replace(message.envelope, produced_at_unix_ms=START_UNIX_MS + 86_400_000 * (number % 3)),
        )
        for number, message in enumerate(found)
    ]


def state(out: Path) -> dict[str, object]:
    """Read where a landing folder stands."""
    found: dict[str, object] = orjson.loads((out / STATE).read_bytes())
    return found


def test_each_fact_is_landed_once(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Runs one after the other land what is new, and pyarrow, pandas and Spark read the same from the folder."""
    out = tmp_path / "lake"
    plant.create_consumer("app-lake")
    plant.produce(spread(facts(70)))
    given = settings(plant, out, consumer="app-lake", max_facts_per_batch=30)
    done = land_available(spark, given)
    assert (done.facts, done.batches, done.next, done.backlog, done.missing) == (70, 3, 70, 0, 0)
    assert plant.committed("app-lake") == 69
    plant.restart()
    assert land_available(spark, given).facts == 0
    plant.produce(spread(facts(25, first=70)))
    some: Any = pytest.approx(1, abs=1e9)
    assert land_available(spark, given) == Landed(facts=25, batches=1, files=6, next=95, size_bytes=some, seconds=some)
    entries = plant.entries(Buffer.STORE)
    check_same(table(out).to_pylist(), entries)
    frame = pandas.read_parquet(out).sort_values("offset")
    assert frame["message_id"].tolist() == [entry.message.envelope.message_id for entry in entries]
    rows = spark.read.parquet(str(out)).orderBy("offset").collect()
    check_same([row.asDict() for row in rows], entries)
    assert plant.committed("app-lake") == 94


def test_what_was_landed_can_be_written_to_a_buffer(
    spark: SparkSession, zones: tuple[SparkZone, SparkZone], tmp_path: Path
) -> None:
    """A landed folder has the columns that the data source writes, so facts can be brought back as they were."""
    plant, enterprise = zones
    plant.produce(spread(facts(40)))
    land_available(spark, settings(plant, tmp_path / "lake"))
    found = spark.read.parquet(str(tmp_path / "lake")).drop("date", "stream", "buffer", "log_id")
    moved = found.selectExpr("* except (from_zone, to_zone)", "'enterprise' as from_zone", "'plant-a' as to_zone")
    enterprise.writer(moved.orderBy("offset").coalesce(1)).save()
    before = {entry.digest for entry in plant.entries(Buffer.STORE)}
    assert {entry.digest for entry in enterprise.entries(Buffer.STORE)} == before


def test_small_files_are_merged(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """With compaction, many small batches end in few files, and everything is there once."""
    out = tmp_path / "lake"
    plant.produce(facts(120))
    done = land_available(spark, settings(plant, out, compact=True, max_facts_per_batch=12))
    assert (done.batches, done.files, done.merged_files, done.merged_into) == (10, 10, 10, 1)
    assert len(list(out.rglob("*.parquet"))) == 1
    plant.produce(facts(20, first=120))
    given = settings(plant, out, compact=True)
    assert land_available(spark, given).merged_files == 0
    with landing(lambda: spark, given) as lander:
        lander.compact()
    assert lander.done.merged_files == 2
    assert len(list(out.rglob("*.parquet"))) == 1
    check_same(table(out).to_pylist(), plant.entries(Buffer.STORE))


def test_missing_facts_are_listed(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Facts that were evicted before they could be landed stand in the list of gaps, and nowhere else."""
    for first in range(0, 2_500, 500):
        plant.produce(facts(500, first=first), "lossy")
    gaps = plant.gaps(Buffer.STORE, "lossy")
    out = tmp_path / "lake"
    done = land_available(spark, settings(plant, out, "lossy", starting=position("0")))
    missing = list(range(gaps[-1].last + 1))
    assert done.missing == len(missing) > 0
    assert gap_offsets(out) == missing
    assert seen_offsets(out) == list(range(gaps[-1].last + 1, 2_500))
    assert state(out)["missing"] == len(missing)
    lines = [orjson.loads(line) for line in (out / "_gaps.jsonl").read_bytes().splitlines()]
    assert sum(line["count"] for line in lines) == len(missing)
    line = lines[0]
    assert (line["reason"], line["stream"], line["buffer"]) == ("evicted", "lossy", "store")


def test_gaps_of_other_zones_are_listed_too(spark: SparkSession, tmp_path: Path, cleanup: Cleanup) -> None:
    """With a consumer of a forward buffer, the list also tells what the sending zone could not deliver."""
    lossy = '[streams.lossy]\nstore_capacity = "600kB"\nmax_batch = "500kB"\nmax_object = "100kB"\n'
    plant, enterprise = pair(tmp_path, streams=lossy + 'overflow = "drop_oldest"\n')
    cleanup.zone(plant)
    cleanup.zone(enterprise)

    async def produce(zone: Zone) -> None:
        from bsfg.batch import FactBatch

        async with zone.client("producer") as client:
            for first in range(0, 2_500, 500):
                await client.append("lossy", FactBatch.from_messages(facts(500, first=first)))

    plant.start()
    asyncio.run(produce(plant))
    enterprise.start()

    async def consume() -> None:
        async with enterprise.admin("operator") as admin:
            await admin.create_consumer(ConsumerSpec("app-lake", "lossy", Buffer.FORWARD))
        end = plant.end(Buffer.STORE, "lossy")
        deadline = time.monotonic() + SETTLE_SECONDS
        while not any(entry.origin and entry.origin.offset == end - 1 for entry in _last(enterprise)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    asyncio.run(consume())
    files = enterprise.files("enterprise-consumer")
    access = NodeAccess.of(f"127.0.0.1:{enterprise.port}", files, "enterprise-bsfg")
    out = tmp_path / "lake"
    given = LandSettings(out, access, "lossy", "forward", By.PRODUCED_AT, consumer="app-lake", compact=False)
    land_available(spark, given)
    lines = [orjson.loads(line) for line in (out / "_gaps.jsonl").read_bytes().splitlines()]
    assert {line["origin_zone"] for line in lines} == {"plant-a"}
    told = {(line["first"], line["last"], line["count"]) for line in lines}
    assert told == {(gap.first, gap.last, gap.offsets) for gap in plant.gaps(Buffer.STORE, "lossy")}
    check_same(table(out).to_pylist(), enterprise.entries(Buffer.FORWARD, "lossy"))
    land_available(spark, given)
    assert len((out / "_gaps.jsonl").read_bytes().splitlines()) == len(lines)


def _last(zone: Zone) -> list:  # type: ignore[type-arg]
    return zone.entries(Buffer.FORWARD, "lossy")[-1:] if zone.end(Buffer.FORWARD, "lossy") else []


@pytest.mark.parametrize(
    ("starting", "first"), [("earliest", 0), ("latest", 8), ("3", 3), ("2020-01-01T00:00:00Z", 0), (None, 5)]
)
def test_a_new_folder_starts_where_it_is_told(
    spark: SparkSession, plant: SparkZone, tmp_path: Path, starting: str | None, first: int
) -> None:
    """A position counts once; later the folder itself knows where it stands, and without one its consumer does."""
    plant.produce(facts(8))
    plant.create_consumer("app-lake")

    async def confirm() -> None:
        async with plant.client("consumer") as client:
            await client.confirm("app-lake", Confirmation(through=4))

    asyncio.run(confirm())
    wanted = None if starting is None else position(starting)
    given = settings(plant, tmp_path / "lake", starting=wanted, consumer="app-lake")
    with landing(lambda: spark, given) as lander:
        lander.join()
        assert lander.folder.state.next == lander.folder.state.start == first
    plant.produce(facts(2, first=8))
    with landing(lambda: spark, replace(given, starting=position("latest"))) as lander:
        lander.join()
        assert lander.folder.state.next == first


def refused(spark: SparkSession, given: LandSettings) -> BsfgError:
    """Give the error with which a landing is refused."""
    with pytest.raises(BsfgError) as caught, landing(lambda: spark, given) as lander:
        lander.join()
    return caught.value


def test_another_history_is_refused(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Facts of another log, of one that was cut, or of one that went on differently are not mixed with those landed."""
    out = tmp_path / "lake"
    plant.produce(facts(10))
    given = settings(plant, out)
    land_available(spark, given)
    whole = (out / STATE).read_bytes()
    for found in ({"next": 11}, {"tail_digest": "00" * 32}, {"origin": {**state(out)["origin"], "log_id": "f" * 32}}):  # type: ignore[dict-item]
        (out / STATE).write_bytes(orjson.dumps({**orjson.loads(whole), **found}))
        error = refused(spark, given)
        assert isinstance(error, ForeignLog)
        assert "--out" in error.hint
    (out / STATE).write_bytes(whole)
    plant.stop()
    for path in sorted(plant.data.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    plant.start()
    plant.produce(facts(12, seed=1))
    assert isinstance(refused(spark, given), ForeignLog)
    assert seen_offsets(out) == list(range(10))


@pytest.mark.parametrize("when", ["before", "after"])
def test_files_may_be_deleted_while_they_are_merged(
    spark: SparkSession, plant: SparkZone, tmp_path: Path, when: str
) -> None:
    """What somebody deletes before or after a task has read it stays deleted, and all else is merged."""
    out = tmp_path / "lake"
    plant.produce(spread(facts(48)))
    given = settings(plant, out, max_facts_per_batch=12)
    land_available(spark, given)
    with landing(lambda: spark, given) as lander:

        def merged(merges: list[Merge]) -> list[Staged | str | None]:
            first = out / merges[0].partition
            if when == "before":
                shutil.rmtree(first)
            results = lander._merged(merges)
            shutil.rmtree(first, ignore_errors=True)
            return results

        done = Landed()
        Compactor(merged, lander.folder, 1 << 30, done).run(thorough=True)
        assert done.merged_into == 5
    assert len(list(out.rglob("*.parquet"))) == 5
    assert len(seen_offsets(out)) == 40


def test_a_job_group_is_that_of_its_thread(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """What keeps a landing names its jobs; without a name of its own it has one that nobody else has."""
    plant.produce(facts(10))
    tracker = spark.sparkContext.statusTracker()
    land_available(spark, settings(plant, tmp_path / "alone"))
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
    spark.sparkContext.setJobGroup("bsfg lake", "land facts")
    try:
        land_available(spark, settings(plant, tmp_path / "lake"))
        assert len(tracker.getJobIdsForGroup("bsfg lake")) == 1
        assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") == "bsfg lake"
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]


def test_a_folder_keeps_its_shape(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Another stream, buffer or time is refused, as are consumers of another buffer and strangers' ones."""
    out = tmp_path / "lake"
    plant.produce(facts(3))
    plant.create_consumer("app-lossy", "lossy")
    given = settings(plant, out)
    land_available(spark, given)
    others = ({"stream": "lossy"}, {"buffer": "forward"}, {"by": By.APPENDED_AT}, {"format": TableFormat.DELTA})
    for found in (*others, {"partition_by": ("date",)}):
        error = refused(spark, replace(given, **found))
        assert isinstance(error, InvalidArgument)
        assert f"was made with --{next(iter(found)).replace('_', '-')}" in error.message
    assert "reads another buffer" in refused(spark, replace(given, consumer="app-lossy")).message
    assert isinstance(refused(spark, replace(given, consumer="theirs")), PermissionRefused)
    assert (
        "the buffer ends at offset 3" in refused(spark, settings(plant, tmp_path / "b", starting=position("4"))).message
    )
    with landing(lambda: spark, given), pytest.raises(FolderLocked), landing(lambda: spark, given):
        pass


def test_a_stale_folder_lands_the_rest_once(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """A folder that is an older copy of itself goes on from where it stood, with nothing missing and nothing twice."""
    out, copy = tmp_path / "lake", tmp_path / "copy"
    plant.produce(facts(30))
    given = settings(plant, out)
    land_available(spark, given)
    shutil.copytree(out, copy)
    plant.produce(facts(30, first=30))
    land_available(spark, given)
    shutil.rmtree(out)
    shutil.copytree(copy, out)
    assert land_available(spark, given).facts == 30
    check_same(table(out).to_pylist(), plant.entries(Buffer.STORE))


def test_large_batches_are_cut_into_tasks(
    spark: SparkSession, plant: SparkZone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every core gets a part of a batch, and their parts together are the whole."""
    monkeypatch.setattr(lander_module, "FACTS_PER_TASK", 10)
    plant.produce(facts(101))
    done = land_available(spark, settings(plant, tmp_path / "lake"))
    assert (done.batches, done.files) == (1, 2)
    check_same(table(tmp_path / "lake").to_pylist(), plant.entries(Buffer.STORE))


class Following:
    """A landing that follows a buffer in a thread of its own."""

    def __init__(self, spark: SparkSession, given: LandSettings) -> None:
        self._spark, self._given = spark, given
        self.lander: Lander | None = None
        self.problems: list[str] = []
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with landing(lambda: self._spark, self._given, lambda error: self.problems.append(error.code)) as lander:
                self.lander = lander
                lander.join()
                lander.follow()
        except Interrupted:
            return
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        while self._thread.is_alive():
            if self.lander is not None:
                self.lander.end()
            self._thread.join(0.1)
        if self.failure is not None:
            raise self.failure

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not condition():
            assert self._thread.is_alive(), self.failure
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_running_landing_follows_the_buffer(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """Facts that come while it runs are landed and confirmed, also when the node is killed and started again."""
    out = tmp_path / "lake"
    plant.create_consumer("app-lake")
    given = settings(plant, out, consumer="app-lake", every_seconds=0.0, compact=True, retry_seconds=1.0)
    with Following(spark, given) as following:
        for round in range(12):
            if round in (4, 8):
                plant.kill()
                if round == 4:
                    following.until(lambda: "peer_unreachable" in following.problems)
                plant.start()
            plant.produce(facts(10, first=10 * round))
            if round % 3 == 0:
                end = 10 * round + 10
                following.until(lambda end=end: plant.committed("app-lake") == end - 1)  # type: ignore[misc]
        following.until(lambda: plant.committed("app-lake") == 119)
    assert following.lander is not None
    check_same(table(out).to_pylist(), plant.entries(Buffer.STORE))
    assert following.lander.done.facts == 120
    assert not list((out / "_bsfg").rglob("*.staged"))


@contextmanager
def ending(lander: Lander) -> Iterator[None]:
    """Ask a landing to end, again and again, once its tasks have begun and until a block has ended."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.05):
            if list((lander.settings.out / lander.folder.run).glob("*.note")):
                lander.end()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_batch_that_is_cut_off_leaves_nothing(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """A landing that is ended in the middle of a batch lands none of it, and the next one all of it."""
    out = tmp_path / "lake"
    plant.produce(facts(10))
    given = settings(plant, out, retry_seconds=600.0)
    with landing(lambda: spark, given) as lander:
        lander.join()
        plant.kill()
        with pytest.raises(Interrupted), ending(lander):
            lander._batch(10)
    assert seen_offsets(out) == []
    plant.start()
    assert land_available(spark, given).facts == 10
    assert seen_offsets(out) == list(range(10))


def test_a_folder_that_tasks_cannot_see_is_told(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """When the folder is not where the tasks run, the landing stops and says that it must be shared."""
    plant.produce(facts(3))
    with landing(lambda: spark, settings(plant, tmp_path / "lake")) as lander:
        lander.join()
        lander.folder.run = "_bsfg/staging/elsewhere"
        with pytest.raises(SpoolNotShared):
            lander._batch(3)


def test_damage_in_another_zone_is_not_needed_for_this(plant: SparkZone, tmp_path: Path, spark: SparkSession) -> None:
    """Truncated facts before the position do not matter, and those after it are told as gaps."""
    out = tmp_path / "lake"
    plant.produce(facts(10))
    given = settings(plant, out)
    land_available(spark, given)
    plant.produce(facts(10, first=10))

    async def truncate(storage: LogStorage) -> None:
        await storage.cursors.commit("enterprise.operational", Confirmation(through=19))
        await (await storage.store("operational")).truncate_before(14)

    plant.offline(truncate)
    done = land_available(spark, given)
    assert (done.facts, done.missing) == (6, 4)
    assert gap_offsets(out) == [10, 11, 12, 13]
    assert seen_offsets(out) == [*range(10), *range(14, 20)]
