"""Files become facts in a real node through Spark: in order, once, with every bad row accounted for."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.e2e.zones import QUICKLY_REFUSED
from tests.spark.ingesting import asked
from tests.spark.nodes import SparkZone, facts, ids

from bsfg.errors import (
    BsfgError,
    BufferFull,
    ConflictingDuplicate,
    ImplausibleTime,
    InvalidArgument,
    PermissionRefused,
    UnknownStream,
)
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess
from bsfg.spark.errors import told_by_spark
from bsfg.spark.ingest import survey as surveying
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.run import Ingest, IngestSettings, IngestWatch
from bsfg.spark.ingest.survey import find
from bsfg.spark.ingest.work import FAIL, Counts, IngestWork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAP = {"subject": "asset:PlantA/{machine}", "produced_at": "ts"}
PLAN = asked(map=MAP, object="value,unit", types={"value": "number"}).plan()
BY_COLUMN = asked(map=MAP, object="value,unit", types={"value": "number"}, id="{machine}/{n}").plan()
HEADER = ("machine", "ts", "value", "unit", "n")


def readings(first: int, count: int) -> list[dict[str, Any]]:
    """Make numbered readings."""
    return [
        {"machine": f"press-{n % 7}", "ts": "2026-03-01T06:00:00Z", "value": str(n / 4), "unit": "C", "n": str(n)}
        for n in range(first, first + count)
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format that the name says."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, HEADER)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=100)
    return path


@dataclass
class Runner:
    """Runs the pipeline against a plant."""

    spark: SparkSession
    plant: SparkZone
    folder: Path
    told: list[str]

    def __call__(
        self,
        *files: Path,
        plan: IngestPlan = PLAN,
        work: str = "work",
        changed: str = FAIL,
        again: bool = False,
        **more: Any,
    ) -> Counts:
        """Ingest files and give the counts of the run."""
        certificate = self.plant.files("plant-a-pipeline")
        access = NodeAccess.of(f"127.0.0.1:{self.plant.port}", certificate, "plant-a-bsfg")
        settings = replace(IngestSettings(access, wait_seconds=0, try_seconds=5, step_bytes=1 << 20), **more)
        watch = IngestWatch(waiting=lambda error: self.told.append(error.code))
        with IngestWork.opened(self.folder / work, plan, again=again) as job:
            run = Ingest(self.spark, job, plan, settings, watch)
            run.survey(job.new_sources(find([str(file) for file in files]).files, changed))
            run.run()
            counts = job.progress.counts
            job.report()
        return counts

    def rejects(self, work: str = "work") -> list[dict[str, Any]]:
        """Read the reject file."""
        path = self.folder / work / "rejects.jsonl"
        return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def stored(self, stream: str = "operational") -> list[Message]:
        """Give what the node has stored."""
        return self.plant.messages(Buffer.STORE, stream)


@pytest.fixture
def ingest(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> Runner:
    """Give what runs the pipeline."""
    return Runner(spark, plant, tmp_path, [])


def values(messages: Sequence[Message]) -> list[float]:
    """Give the values of stored readings."""
    return [message.fact.value()["value"] for message in messages]


def test_files_of_all_formats_become_facts_in_order(ingest: Runner, tmp_path: Path) -> None:
    """Rows of three formats are stored in the order of files and rows, with their fields; a second run adds nothing."""
    folder = tmp_path / "in"
    for number, name in enumerate(("a.csv", "b.jsonl", "c.parquet")):
        write(folder / name, readings(300 * number, 300))
    counts = ingest(folder)
    assert (counts.rows, counts.facts, counts.inserted, counts.rejected) == (900, 900, 900, 0)
    stored = ingest.stored()
    assert values(stored) == [n / 4 for n in range(900)]
    message = stored[301]
    assert message.fact.subject == "asset:PlantA/press-0"
    assert message.fact.object == b'{"unit":"C","value":75.25}'
    assert (message.envelope.from_zone, message.envelope.to_zone) == ("plant-a", "enterprise")
    assert message.envelope.produced_at_unix_ms == 1_772_344_800_000
    assert message.envelope.message_id == f"{surveying.digest_of(folder / 'b.jsonl')[:32]}-2"
    assert ingest(folder).rows == 0
    again = ingest(folder, again=True)
    assert (again.inserted, again.already_exists) == (0, 900)
    assert ids(ingest.stored()) == ids(stored)


def test_bad_rows_are_rejected_and_the_others_stored(ingest: Runner, tmp_path: Path) -> None:
    """Rows that cannot be read or are no facts stand in the reject file, in order, and nothing else is missing."""
    good = [",".join(row.values()) for row in readings(0, 6)]
    lines = [good[0], "a,b", good[1], ",2026-03-01T06:00:00Z,1,C,9", '"open,quote', good[2], "x,never,1,C,9", *good[3:]]
    (tmp_path / "a.csv").write_text(",".join(HEADER) + "\n" + "\n".join(lines))
    (tmp_path / "b.jsonl").write_text('{"machine":\n{"machine":"m","ts":"2026-03-01T06:00:00Z","value":"x"}\n\n[1]\n')
    (tmp_path / "c.parquet").write_bytes(b"no parquet at all")
    (tmp_path / "d.csv").write_text("")
    counts = ingest(*(tmp_path / name for name in ("a.csv", "b.jsonl", "c.parquet", "d.csv")))
    assert (counts.rows, counts.inserted, counts.rejected) == (14, 6, 8)
    assert values(ingest.stored()) == [n / 4 for n in range(6)]
    found = [(Path(each["file"]).name, each.get("row"), each["code"], each.get("field")) for each in ingest.rejects()]
    assert found == [
        ("a.csv", 2, "row_unreadable", None),
        ("a.csv", 4, "invalid_fact", "subject"),
        ("a.csv", 5, "row_unreadable", None),
        ("a.csv", 7, "invalid_fact", "produced_at"),
        ("b.jsonl", 1, "row_unreadable", None),
        ("b.jsonl", 2, "invalid_fact", "object"),
        ("b.jsonl", 3, "row_unreadable", None),
        ("c.parquet", None, "file_unreadable", None),
    ]
    assert ingest.rejects()[1]["record"] == ",2026-03-01T06:00:00Z,1,C,9"


def test_taken_ids_are_rejected_with_their_rows(ingest: Runner, tmp_path: Path) -> None:
    """A row whose id is taken by another body becomes a reject that names the offset; its neighbours are stored."""
    ingest(write(tmp_path / "a.csv", readings(0, 50)), plan=BY_COLUMN)
    rows = readings(0, 60)
    for number in (3, 40):
        rows[number]["value"] = "999"
    rows += [dict(rows[55], value="1"), dict(rows[55])]
    counts = ingest(write(tmp_path / "b.csv", rows), plan=BY_COLUMN)
    assert (counts.rows, counts.inserted, counts.already_exists) == (62, 10, 49)
    assert (counts.rejected, counts.conflicts, counts.facts) == (3, 3, 59)
    rejects = [(each["row"], each["code"], each["reason"]) for each in ingest.rejects()]
    assert rejects == [
        (4, "conflicting_duplicate", "message_id 'press-3/3' is taken by another body, the fact at offset 3"),
        (41, "conflicting_duplicate", "message_id 'press-5/40' is taken by another body, the fact at offset 40"),
        (61, "conflicting_duplicate", "message_id 'press-6/55' is taken by another body, the fact at offset 55"),
    ]
    assert values(ingest.stored()) == [n / 4 for n in range(60)]


def test_taken_ids_can_stop_a_run(ingest: Runner, tmp_path: Path) -> None:
    """A run that shall fail at a taken id does, and can be gone on with when the user has decided otherwise."""
    ingest(write(tmp_path / "a.csv", readings(0, 5)), plan=BY_COLUMN)
    rows = readings(0, 8)
    rows[2]["value"] = "999"
    path = write(tmp_path / "b.csv", rows)
    with pytest.raises(ConflictingDuplicate, match="press-2/2"):
        ingest(path, plan=BY_COLUMN, conflicts_fail=True)
    counts = ingest(path, plan=BY_COLUMN)
    assert (counts.rows, counts.rejected) == (8, 1)
    assert values(ingest.stored()) == [n / 4 for n in range(8)]


def test_what_only_the_node_refuses_is_rejected_row_by_row(ingest: Runner, tmp_path: Path) -> None:
    """Rows that break a rule of the stream itself are found out and rejected; the order of the others is kept."""
    ingest.plant.streams += '\n[streams.strict]\nmax_object = "1kB"\n'
    ingest.plant.changed = QUICKLY_REFUSED
    ingest.plant.restart()
    rows = readings(0, 300)
    for number in (0, 120, 121, 299):
        rows[number]["unit"] = "x" * 2_000
    plan = replace(PLAN, stream="strict")
    ingest.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "20")
    try:
        counts = ingest(write(tmp_path / "a.csv", rows), plan=plan)
    finally:
        ingest.spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (counts.rows, counts.inserted + counts.already_exists, counts.rejected) == (300, 296, 4)
    assert [(each["row"], each["code"]) for each in ingest.rejects()] == [
        (row, "fact_too_large") for row in (1, 121, 122, 300)
    ]
    assert values(ingest.stored("strict")) == [n / 4 for n in range(300) if n not in (0, 120, 121, 299)]


def test_a_rule_that_all_rows_break_stops_the_run(ingest: Runner, tmp_path: Path) -> None:
    """A zone that derives ids, or a stream that takes no old facts, is told once and not row by row."""
    ingest.plant.streams += '\n[streams.fresh]\nplausible_past = "1h"\n'
    ingest.plant.changed = QUICKLY_REFUSED
    ingest.plant.restart()
    path = write(tmp_path / "a.csv", readings(0, 3_000))
    with pytest.raises(ImplausibleTime, match="the node refuses row after row"):
        ingest(path, plan=replace(PLAN, stream="fresh"))
    with pytest.raises(InvalidArgument, match="message_id is required: this zone takes ids") as caught:
        ingest(path, plan=asked(map=MAP, id="none").plan())
    assert "--id none" in caught.value.hint
    assert ingest.stored() == []


def test_zones_from_columns_are_judged_row_by_row(ingest: Runner, tmp_path: Path) -> None:
    """A row of a foreign zone is rejected when zones come from a column; a wrong zone for all rows stops the run."""
    path = tmp_path / "a.csv"
    path.write_text("z,v\nplant-a,1\nlab,2\nplant-a,3\n")
    counts = ingest(path, plan=asked(map={"from_zone": "z"}, object="v").plan())
    assert (counts.inserted + counts.already_exists, counts.rejected) == (2, 1)
    assert (ingest.rejects()[0]["row"], ingest.rejects()[0]["code"]) == (2, "permission_denied")
    with pytest.raises(PermissionRefused, match="lab"):
        ingest(path, plan=asked(from_zone="lab", object="v").plan(), work="other")


def test_a_full_buffer_ends_the_run_and_it_can_go_on(ingest: Runner, tmp_path: Path) -> None:
    """A full buffer is told and waited for, then ends the run; with more room it goes on without loss or repetition."""
    small = '\n[streams.small]\nstore_capacity = "{}"\nmax_batch = "500kB"\nmax_object = "100kB"\n'
    before = ingest.plant.streams
    ingest.plant.streams = before + small.format("1MB")
    ingest.plant.restart()
    plan = replace(PLAN, stream="small")
    paths = [write(tmp_path / "in" / f"{number}.csv", readings(5_000 * number, 5_000)) for number in range(3)]
    with pytest.raises(BufferFull):
        ingest(*paths, plan=plan, wait_seconds=1, try_seconds=0.2, step_bytes=1)
    assert "buffer_full" in ingest.told
    assert 0 < len(ingest.stored("small")) < 15_000
    ingest.plant.streams = before + small.format("200MB")
    ingest.plant.restart()
    counts = ingest(*paths, plan=plan)
    assert (counts.rows, counts.rejected) == (15_000, 0)
    assert values(ingest.stored("small")) == [n / 4 for n in range(15_000)]


def test_tasks_side_by_side_keep_the_order(ingest: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tasks read at once, and facts and rejects still stand in the order of the rows."""
    rows = readings(0, 3_000)
    for number in range(0, 3_000, 500):
        rows[number]["ts"] = "never"
    path = write(tmp_path / "a.parquet", rows)
    counts = ingest(path, tasks=3)
    assert (counts.inserted, counts.rejected) == (2_994, 6)
    assert values(ingest.stored()) == [n / 4 for n in range(3_000) if n % 500]
    assert [each["row"] for each in ingest.rejects()] == [n + 1 for n in range(0, 3_000, 500)]
    assert not any((ingest.folder / "work" / "spool").iterdir())


def test_a_node_that_comes_back_is_waited_for(ingest: Runner, tmp_path: Path) -> None:
    """A run that finds the node away tells so, and goes on as soon as it is there."""
    ingest.plant.stop()
    told = ingest.told

    class Starting(list[str]):
        def append(self, code: str) -> None:
            told.append(code)
            if ingest.plant.pid is None:
                ingest.plant.start()

    ingest.told = Starting()
    counts = ingest(write(tmp_path / "a.csv", readings(0, 20)), wait_seconds=120, try_seconds=0.2)
    assert told[0] == "peer_unreachable"
    assert (counts.inserted, values(ingest.stored())) == (20, [n / 4 for n in range(20)])


def test_errors_of_tasks_are_told_in_their_own_words(ingest: Runner, tmp_path: Path) -> None:
    """What a task or commit raised reaches the user with its code, message and hint, not as a traceback of Spark."""
    path = write(tmp_path / "a.csv", readings(0, 3))
    with pytest.raises(UnknownStream) as caught:
        ingest(path, plan=replace(PLAN, stream="nowhere"))
    assert "nowhere" in caught.value.message
    assert caught.value.hint
    assert "Traceback" not in caught.value.message
    assert told_by_spark(RuntimeError("java.lang.OutOfMemoryError: Java heap space")).code == "spark_failed"
    assert told_by_spark(caught.value) is caught.value
    assert isinstance(told_by_spark(ValueError()), BsfgError)


def test_facts_of_others_do_not_disturb(ingest: Runner, tmp_path: Path) -> None:
    """Facts that producers append meanwhile stand between, and are not touched."""
    ingest.plant.produce(facts(5))
    ingest(write(tmp_path / "a.csv", readings(0, 5)))
    ingest.plant.produce(facts(5, first=5))
    assert len(ingest.stored()) == 15
