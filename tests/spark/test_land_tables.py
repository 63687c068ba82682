"""Tables of a landing: a Delta Lake that every reader understands, columns that come later, and the newest facts."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import duckdb
import orjson
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType
from tests.spark.landing import check_latest, check_same, read, seen_offsets, settings
from tests.spark.nodes import SparkZone, facts
from tests.spark.test_land_columns import saying
from tests.spark.test_land_files import HOSTILE, LOG_ID, compact, entries_of, predicates, work

from bsfg.errors import DiskFull, ExtraMissing, LandingDamaged, LandingStale
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land import delta
from bsfg.spark.land.columns import read_columns
from bsfg.spark.land.folder import Batch, LandingFolder, Replacement
from bsfg.spark.land.lander import Lander, land_available, landing
from bsfg.spark.land.places import LocalDisk
from bsfg.spark.land.staging import Merge, StagedFile, merge, small_files, stage
from bsfg.spark.land.state import (
    LATEST,
    STATE,
    Add,
    LandedOrigin,
    LandedState,
    LandSettings,
    PartitionChange,
    Pending,
    TableFormat,
    escaped,
)
from bsfg.spark.land.upkeep import LatestTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS = ("parquet", "delta")


def opened(root: Path, format: str = "delta", **more: Any) -> LandingFolder:
    """Open a landing folder, a new one with a format and a shape."""
    folder = LandingFolder.open(LocalDisk(root))
    if folder.is_new:
        folder.begin(LandedOrigin("operational", "store", LOG_ID, "produced_at", format, **more), 0)
    return folder


def batch_of(folder: LandingFolder, root: Path, found: list[Message], end: int) -> Batch:
    """Stage facts up to an offset, as tasks would."""
    shape, first = folder.state.origin.shape, folder.state.next
    receipt = stage(work(root, found, shape=shape, run=folder.run), first, end, lambda done: None)
    return Batch(first, receipt.next, receipt.files, receipt.gaps, receipt.missing, receipt.tail)


def land(folder: LandingFolder, root: Path, found: list[Message], batches: int = 1) -> None:
    """Land all facts that are not landed yet, in so many batches."""
    first, left = folder.state.next, len(found) - folder.state.next
    for number in range(1, batches + 1):
        folder.commit(batch_of(folder, root, found, first + left * number // batches))


def test_every_reader_finds_the_same(tmp_path: Path) -> None:
    """delta-rs, Arrow, pandas, Polars and DuckDB read the table as it is in the node, whatever predicates look like."""
    # Polars takes values from paths, where those that are longer than any that a node takes are shortened.
    found = predicates(*(name for name in HOSTILE if "~" not in escaped(name)), count=2, days=2)
    folder = opened(tmp_path)
    land(folder, tmp_path, found, 3)
    folder.close()
    table = DeltaTable(tmp_path)
    rows = table.to_pyarrow_table().sort_by("offset")
    check_same(rows.to_pylist(), entries_of(found).to_entries())
    offsets = list(range(len(found)))
    names = [message.fact.predicate for message in found]
    dataset = table.to_pyarrow_dataset()
    assert sorted(dataset.to_table(columns=["offset"]).column("offset").to_pylist()) == offsets
    frame = table.to_pandas().sort_values("offset")
    assert (frame["offset"].tolist(), frame["predicate"].tolist()) == (offsets, names)
    lazily = polars.scan_delta(str(tmp_path)).select("offset", "predicate", "date").sort("offset").collect()
    assert (lazily["offset"].to_list(), lazily["predicate"].to_list()) == (offsets, names)
    with duckdb.connect() as connection:
        connection.register("facts", dataset)
        some = connection.execute(
            "select \"offset\", predicate from facts where predicate = 'a/b' order by 1"
        ).fetchall()
    assert some == [(offset, name) for offset, name in enumerate(names) if name == "a/b"]
    assert table.transaction_version(f"bsfg-{LOG_ID}") == len(found)
    assert seen_offsets(tmp_path) == offsets


def test_files_that_merges_replace_stay_until_they_are_vacuumed(tmp_path: Path) -> None:
    """Merging changes no fact; readers that began before still find their files, until those are old enough."""
    found = predicates("door_opened", "temperature_measured", count=40, days=2)
    folder = opened(tmp_path)
    land(folder, tmp_path, found, 5)
    before = DeltaTable(tmp_path)
    whole = before.to_pyarrow_table().sort_by("offset")
    assert compact(folder, tmp_path, 1 << 30) == 2
    assert compact(folder, tmp_path, 1 << 30) == 0
    assert DeltaTable(tmp_path).to_pyarrow_table().sort_by("offset").equals(whole)
    assert before.to_pyarrow_table().sort_by("offset").equals(whole)
    assert len(DeltaTable(tmp_path).file_uris()) == 2
    assert folder.vacuum(168) == 0
    assert folder.vacuum(0) == 10
    assert len(list(tmp_path.rglob("part-*.parquet"))) == 2
    land(folder, tmp_path, [*found, *predicates("door_opened")])
    assert seen_offsets(tmp_path, "delta") == list(range(81))
    folder.close()


@pytest.mark.parametrize("hours", [168, 1000])
def test_files_that_left_long_ago_are_removed_whatever_the_log_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A checkpoint leaves out what left long ago; until it was removed, that must not be so long."""
    folder = opened(tmp_path)
    land(folder, tmp_path, predicates("door_opened", "a/b", count=20), 5)
    assert folder.vacuum(hours) == 0
    with monkeypatch.context() as earlier:
        ago = time.time() - (hours + 1) * 3600
        earlier.setattr(delta, "time", SimpleNamespace(time=lambda: ago))
        assert compact(folder, tmp_path, 1 << 30) == 2
    DeltaTable(tmp_path).create_checkpoint()
    folder.close()
    folder = opened(tmp_path)
    version = DeltaTable(tmp_path).version()
    assert folder.vacuum(hours + 2) == 0
    assert folder.vacuum(hours) == 10
    assert len(list(tmp_path.rglob("part-*.parquet"))) == 2
    assert folder.vacuum(24) == 0
    assert DeltaTable(tmp_path).version() <= version + 3
    folder.close()


def test_others_may_merge_the_files_of_a_table(tmp_path: Path) -> None:
    """Whatever merges files of a table of Delta Lake before or while we do, every fact stays there once."""
    # delta-rs itself cannot merge what lies in the folder of a shortened value.
    found = predicates(*(name for name in HOSTILE if "~" not in escaped(name)), count=8, days=2)
    folder = opened(tmp_path)
    latest = LatestTable(tmp_path, folder)
    land(folder, tmp_path, found[:60], 3)
    latest.run(())
    partition = next(iter(folder.places.partitions()))
    small = small_files(folder.disk, partition, folder.places.names(partition), 1 << 30)
    merged = merge(tmp_path, folder.run, folder.state.origin.shape, Merge(partition, [each.name for each in small], 0))
    for root in (tmp_path, tmp_path / LATEST):
        DeltaTable(root).optimize.compact()
    folder.replace([Replacement(merged, [each.name for each in small])])
    assert seen_offsets(tmp_path, "delta") == list(range(60))
    land(folder, tmp_path, found, 3)
    compact(folder, tmp_path, 1 << 30)
    assert seen_offsets(tmp_path, "delta") == list(range(len(found)))
    for root in (tmp_path, tmp_path / LATEST):
        DeltaTable(root).optimize.compact()
        DeltaTable(root).vacuum(0, dry_run=False, enforce_retention_duration=False)
    latest.run(folder.places.partitions())
    check_latest(tmp_path, "delta")
    folder.close()


def test_the_newest_of_what_others_have_merged(tmp_path: Path) -> None:
    """The newest facts are found in files of any name, when they are first asked for after somebody merged the rest."""
    folder = opened(tmp_path)
    land(folder, tmp_path, predicates(*HOSTILE[:6], count=8, days=2), 3)
    DeltaTable(tmp_path).optimize.compact()
    LatestTable(tmp_path, folder).run(())
    check_latest(tmp_path, "delta")
    folder.close()


def test_a_stale_landing_is_refused(tmp_path: Path) -> None:
    """Whoever has fallen behind the table's log, by a lock that did not hold or an older state, lands nothing."""
    found, root = predicates("door_opened", count=60), tmp_path / "table"
    root.mkdir()
    slow = opened(root)
    land(slow, root, found[:20])
    old = (root / STATE).read_bytes()
    late = batch_of(slow, root, found, 30)
    kept = slow.run
    shutil.copytree(root / kept, tmp_path / "kept")
    slow._release()
    other = opened(root)
    land(other, root, found[:40])
    shutil.copytree(tmp_path / "kept", root / kept)
    with pytest.raises(LandingStale, match="has facts up to offset 40"):
        slow.commit(late)
    assert seen_offsets(root, "delta") == list(range(40))
    land(other, root, found)
    other.close()
    (root / STATE).write_bytes(old)
    with pytest.raises(LandingStale) as caught:
        LandingFolder.open(LocalDisk(root))
    assert "from one copy" in caught.value.hint
    assert seen_offsets(root, "delta") == list(range(60))


def test_two_that_commit_at_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that both found the table as they knew it, the log lets one through."""
    found = predicates("door_opened", count=40)
    first = opened(tmp_path)
    land(first, tmp_path, found[:20])
    late = batch_of(first, tmp_path, found, 40)
    write = DeltaTable.create_write_transaction

    def raced(table: DeltaTable, *args: Any, **more: Any) -> None:
        write(DeltaTable(tmp_path), *args, **more)
        write(table, *args, **more)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", raced)
    with pytest.raises(LandingStale, match="meanwhile"):
        first.commit(late)
    monkeypatch.undo()
    first.recover()
    assert (first.state.next, seen_offsets(tmp_path, "delta")) == (40, list(range(40)))
    first.close()


@pytest.mark.parametrize("damage", [b"", b'{"commitInfo":{"timestamp":1'])
def test_a_commit_that_a_power_loss_has_torn(tmp_path: Path, damage: bytes) -> None:
    """An entry of the log that was not synced is written again, because the state still promises it."""
    found = predicates("door_opened", count=40)
    folder = opened(tmp_path)
    land(folder, tmp_path, found[:20])
    pending: list[bytes] = []
    publish = folder.places.publish

    def watched(state: LandedState) -> None:
        pending.append((tmp_path / STATE).read_bytes())
        publish(state)

    folder.places.publish = watched  # type: ignore[method-assign]
    land(folder, tmp_path, found)
    folder.close()
    (tmp_path / STATE).write_bytes(pending[0])
    newest = max((tmp_path / "_delta_log").glob("*.json"))
    newest.write_bytes(damage)
    (tmp_path / "_delta_log" / "_last_checkpoint").write_bytes(b"torn")
    folder = opened(tmp_path)
    assert folder.state.pending is None
    assert seen_offsets(tmp_path, "delta") == list(range(40))
    folder.close()


@pytest.mark.parametrize("is_new", [True, False])
def test_commits_that_a_power_loss_has_torn_together(tmp_path: Path, is_new: bool) -> None:
    """What comes before a commit, such as new columns or the table itself, is not synced either until the commit is."""
    found = predicates("door_opened", count=40)
    folder = opened(tmp_path)
    if not is_new:
        land(folder, tmp_path, found[:20])
        folder.evolve(["value double"])
    before = folder.state
    land(folder, tmp_path, found)
    made = json_commits(tmp_path)[-2:]
    folder.close()
    first = before.next
    pending = [
        PartitionChange(
            str(path.parent.relative_to(tmp_path)), [Add("gone", path.name, 40 - first, path.stat().st_size)]
        )
        for path in tmp_path.rglob(f"part-{first:015}-*.parquet")
    ]
    promised = replace(folder.state, published=before.published, pending=Pending(pending))
    (tmp_path / STATE).write_bytes(promised.to_json())
    made[0].write_bytes(b"")
    folder = opened(tmp_path)
    assert (folder.state.pending, seen_offsets(tmp_path, "delta")) == (None, list(range(40)))
    folder.close()


def json_commits(root: Path) -> list[Path]:
    """Give the entries of the log of a table, in order."""
    return sorted((root / "_delta_log").glob("*.json"))


@pytest.mark.parametrize("what", ["all", "last"])
def test_a_log_that_has_lost_commits_is_told(tmp_path: Path, what: str) -> None:
    """Facts that were landed and are no longer in the table are not passed over in silence."""
    folder = opened(tmp_path)
    land(folder, tmp_path, predicates("door_opened", count=20), 2)
    LatestTable(tmp_path, folder).run(())
    folder.close()
    if what == "all":
        shutil.rmtree(tmp_path / "_delta_log")
    else:
        json_commits(tmp_path)[-1].write_bytes(b"")
    with pytest.raises(LandingDamaged, match="knows nothing of commit 2"):
        opened(tmp_path)


def test_a_log_that_is_damaged_is_told(tmp_path: Path) -> None:
    """A table whose log lacks what it needs is refused with what is wrong."""
    folder = opened(tmp_path)
    land(folder, tmp_path, predicates("door_opened", count=20), 2)
    folder.close()
    (tmp_path / "_delta_log" / f"{1:020}.json").unlink()
    with pytest.raises(LandingDamaged, match="the log of the table"):
        opened(tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_columns_may_come_later(tmp_path: Path, format: str) -> None:
    """Facts that were landed before a column came have none of it, also after a merge with later ones."""
    found = saying({"value": 1.5}, {"value": 2.5}, {"value": "x", "unit": "C"})
    folder = opened(tmp_path, format)
    land(folder, tmp_path, found[:1])
    for number, columns in ((2, ["value double"]), (3, ["value double", "unit string"])):
        folder.evolve(columns)
        land(folder, tmp_path, found[:number])
    if format == "delta":
        check_columns(DeltaTable(tmp_path).to_pyarrow_table())
    assert compact(folder, tmp_path, 1 << 30) == 1
    folder.close()
    whole = read(tmp_path, format)
    assert whole is not None
    check_columns(whole)
    assert opened(tmp_path, format).state.origin.columns == ("value double", "unit string")


@pytest.mark.parametrize("name", ["value", "VALUE"])
def test_a_column_that_somebody_else_has_made(tmp_path: Path, name: str) -> None:
    """Files whose columns have other types than the table says would make all of it unreadable: none is added."""
    found = saying({"value": 1.5}, {"value": 2.5})
    folder = opened(tmp_path)
    land(folder, tmp_path, found[:1])
    DeltaTable(tmp_path).alter.add_columns([Field(name, PrimitiveType("string"))])
    folder.evolve(["value double"])
    with pytest.raises(LandingDamaged, match=f"has a column {name} of type string, value of type double is landed"):
        land(folder, tmp_path, found)
    assert seen_offsets(tmp_path, "delta") == [0]
    folder.close()


def check_columns(found: pa.Table) -> None:
    """Hold the typed columns against what was said."""
    rows = found.sort_by("offset").select(["value", "unit", "rescued"]).to_pylist()
    assert rows == [
        {"value": None, "unit": None, "rescued": None},
        {"value": 2.5, "unit": None, "rescued": None},
        {"value": None, "unit": "C", "rescued": '{"value":"x"}'},
    ]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("partition_by", [("date", "predicate"), ("subject",), ("from_zone", "hour")])
def test_the_newest_facts_are_kept(tmp_path: Path, format: str, partition_by: tuple[str, ...]) -> None:
    """Beside all facts, a table has the newest of each subject and predicate, whole, however the others lie."""
    found = predicates(*HOSTILE[:6], count=8, days=3)
    folder = opened(tmp_path, format, partition_by=partition_by)
    latest = LatestTable(tmp_path, folder)
    land(folder, tmp_path, found[:20])
    assert latest.run(()) > 0
    check_latest(tmp_path, format)
    assert latest.run(()) == 0
    folder.evolve(["value double"])
    land(folder, tmp_path, found)
    # A new one has not looked yet, as after a kill.
    LatestTable(tmp_path, folder).run(())
    check_latest(tmp_path, format)
    shutil.rmtree(tmp_path / LATEST)
    folder.recover()
    LatestTable(tmp_path, folder).run(())
    check_latest(tmp_path, format)
    newest = read(tmp_path / LATEST, format)
    assert newest is not None
    by_id = {message.envelope.message_id: message for message in found}
    for row in newest.to_pylist():
        message = by_id[row["message_id"]]
        assert (row["object_text"] or "").encode() == message.fact.object
        assert (row["from_zone"], row["subject"]) == (message.envelope.from_zone, message.fact.subject)
    assert seen_offsets(tmp_path, format) == list(range(len(found)))
    folder.close()


@pytest.mark.parametrize("format", FORMATS)
def test_the_newest_facts_are_made_again_whenever_somebody_removes_them(tmp_path: Path, format: str) -> None:
    """Also while a landing runs: all that was landed is looked at, and not only what comes."""
    folder = opened(tmp_path, format)
    latest = LatestTable(tmp_path, folder)
    land(folder, tmp_path, predicates("door_opened", count=10))
    latest.run(folder.places.partitions())
    before = set(folder.places.partitions())
    shutil.rmtree(tmp_path / LATEST)
    land(folder, tmp_path, [*predicates("door_opened", count=10), *predicates("door_closed", count=10)])
    latest.run(set(folder.places.partitions()) - before)
    check_latest(tmp_path, format)
    folder.close()


def test_the_newest_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain files that somebody deletes between a look at a folder and at its files hold up nobody."""
    folder = opened(tmp_path, "parquet")
    land(folder, tmp_path, [*predicates("door_opened", count=10), *predicates("door_closed", count=10)])
    names = folder.places.names

    def deleting(partition: str) -> Any:
        found = names(partition)
        if "door_opened" in partition and not partition.startswith(LATEST):
            shutil.rmtree(tmp_path / partition)
        return found

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(folder.places, "names", deleting)
        assert LatestTable(tmp_path, folder).run(()) > 0
    check_latest(tmp_path, "parquet")
    folder.close()


def test_a_commit_that_failed_half_way_is_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts whose commit failed and was finished later are among the newest, in whatever partition they are."""
    found = [*predicates("door_opened", count=10), *predicates("door_closed", count=10)]
    folder = opened(tmp_path)
    settings = LandSettings(tmp_path, NodeAccess("localhost:1"), "operational", latest=True)
    lander = Lander(lambda: pytest.fail("no Spark"), settings, folder)
    lander.folder.commit(batch_of(folder, tmp_path, found, 10))
    lander._keep_latest()
    receipt = stage(work(tmp_path, found, shape=folder.state.origin.shape, run=folder.run), 10, 20, lambda done: None)
    with monkeypatch.context() as broken, pytest.raises(DiskFull):
        broken.setattr(folder.places, "publish", lambda state: raising(DiskFull("full")))
        lander._commit(10, [receipt])
    folder.recover()
    lander._keep_latest()
    check_latest(tmp_path, "delta")
    folder.close()


def test_a_full_disk_under_the_newest_facts_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver itself writes fails as what tasks write does: with an error that a landing bears."""
    folder = opened(tmp_path)
    land(folder, tmp_path, predicates("door_opened", count=10))
    with monkeypatch.context() as broken, pytest.raises(DiskFull, match="keeping the newest facts"):
        broken.setattr(StagedFile, "finish", lambda file: raising(OSError(ENOSPC, "No space left on device")))
        LatestTable(tmp_path, folder).run(())
    LatestTable(tmp_path, folder).run(())
    check_latest(tmp_path, "delta")
    folder.close()


def raising(error: Exception) -> None:
    """Fail."""
    raise error


def test_a_fact_taken_in_again_stays_one(tmp_path: Path) -> None:
    """The newest facts are the same when those since the last commit are read twice."""
    folder = opened(tmp_path, "parquet")
    land(folder, tmp_path, predicates("door_opened", count=30))
    LatestTable(tmp_path, folder).run(())
    state = orjson.loads((tmp_path / STATE).read_bytes())
    (tmp_path / STATE).write_bytes(orjson.dumps({**state, "latest": 10}))
    folder.recover()
    LatestTable(tmp_path, folder).run(())
    check_latest(tmp_path, "parquet")
    folder.close()


def test_a_batch_makes_so_many_files_at_most(tmp_path: Path) -> None:
    """A range with more partitions than there may be files is staged in part, and the next goes on from there."""
    found = predicates(*(f"predicate_{number}" for number in range(25)), count=4)
    given, at, counts = work(tmp_path, found, max_files=10), 0, []
    while at < len(found):
        receipt = stage(given, at, len(found), lambda done: None)
        assert receipt.first == at < receipt.next
        assert sum(file.facts for file in receipt.files) == receipt.next - at
        counts.append(len(receipt.files))
        at = receipt.next
    assert max(counts) <= 10
    one = stage(replace(given, max_files=1), 0, 5, lambda done: None)
    assert (one.next, len(one.files)) == (1, 1)


def test_a_folder_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """A state of format 1, with what it promised, is read as plain Parquet by date and predicate."""
    add = {"staged": "_bsfg/staging/x/f.staged", "name": "part-000000000000000-000000000000009-00000001.parquet"}
    partition = "date=2026-03-01/predicate=door_opened"
    change = {"partition": partition, "adds": [add], "removes": []}
    form = {
        "format": 1,
        "origin": {"stream": "operational", "buffer": "store", "log_id": LOG_ID, "by": "produced_at"},
        "start": 0,
        "next": 10,
        "sequence": 1,
        "facts": 10,
        "missing": 0,
        "tail_offset": 9,
        "tail_digest": "cd",
        "gaps_token": "",
        "pending": {"changes": [change], "gaps": [], "gaps_at_bytes": 0},
    }
    (tmp_path / "_bsfg/staging/x").mkdir(parents=True)
    (tmp_path / add["staged"]).write_bytes(b"facts")
    (tmp_path / STATE).write_bytes(orjson.dumps(form))
    folder = LandingFolder.open(LocalDisk(tmp_path))
    assert (folder.state.origin.format, folder.state.origin.partition_by) == ("parquet", ("date", "predicate"))
    assert (tmp_path / partition / add["name"]).read_bytes() == b"facts"
    folder.close()


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without deltalake, a landing says which extra is missing, and writes nothing."""
    monkeypatch.setitem(sys.modules, "deltalake", None)
    monkeypatch.delitem(sys.modules, "bsfg.spark.land.delta")
    with pytest.raises(ExtraMissing, match="--format delta needs deltalake") as caught:
        opened(tmp_path)
    assert caught.value.hint == "pip install 'bsfg[delta]'"
    assert not (tmp_path / STATE).exists()


def test_a_table_is_landed_on_spark(spark: SparkSession, plant: SparkZone, tmp_path: Path) -> None:
    """All of it together: a Delta table with found-out columns, its newest facts, merged files, some files at once."""
    out = tmp_path / "table"
    plant.produce(facts(60))
    given = settings(
        plant,
        out,
        format=TableFormat.DELTA,
        infer=True,
        latest=True,
        compact=True,
        vacuum_hours=0.0,
        max_facts_per_batch=6,
        columns=read_columns("extra bigint"),
    )
    done = land_available(spark, given)
    assert (done.facts, done.batches, done.next) == (60, 10, 60)
    assert (done.merged_files, done.merged_into) == (10, 1)
    assert done.removed_files >= 10
    assert done.columns
    check_same(DeltaTable(out).to_pyarrow_table().sort_by("offset").to_pylist(), plant.entries(Buffer.STORE))
    check_latest(out, "delta")
    assert [each for each in DeltaTable(out).schema().to_json().split('"') if each == "extra"] == ["extra"]
    plant.produce(facts(20, first=60))
    with landing(lambda: spark, settings(plant, out)) as lander:
        lander.join()
        lander.land_available()
    check_same(DeltaTable(out).to_pyarrow_table().sort_by("offset").to_pylist(), plant.entries(Buffer.STORE))
