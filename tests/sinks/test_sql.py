"""Facts as rows: each once and in order, whatever is killed, restored or touched by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import orjson
import psycopg
import pytest
from tests.servers import postgres
from tests.sinks.conftest import Plant

from bsfg.cli.pipeline import kept
from bsfg.errors import (
    BsfgError,
    ConfigInvalid,
    DiskFull,
    ForeignLog,
    FormatUnsupported,
    SinkBehind,
    SinkChanged,
    StorageReadOnly,
    StorageUnavailable,
    StorageUnreadable,
)
from bsfg.fact import ArtifactRef, Entry, Envelope, Fact, Message
from bsfg.ports import Buffer
from bsfg.retention import GapReason, GapRecord
from bsfg.sdk.consuming import Item
from bsfg.sinks.flow import Sink, SinkBatch
from bsfg.sinks.sql import COLUMNS, NOT_TAKEN, SqlSettings, SqlTarget
from bsfg.spark.supervise import KeptTerms, PipelineKeeper, Schedule
from bsfg.testing.facts import altered, messages
from bsfg.testing.postgres import PackagedServer
from bsfg.wire.service import PipelineState

WAIT_SECONDS = 60.0


def run(plant: Plant, tables: SqlSettings, consumer: str = "app-sink", **options: Any) -> Sink:
    """Write what is there now."""
    sink = Sink(plant.endpoint, consumer, SqlTarget(tables), **options)
    sink.run(once=True)
    return sink


def rows(tables: SqlSettings, table: str = "facts", columns: str = '"offset", message_id', order: str = "1") -> Any:
    """Read a table."""
    with psycopg.connect(tables.dsn) as connection:
        return connection.execute(f"SELECT {columns} FROM {tables.schema}.{table} ORDER BY {order}").fetchall()


def execute(tables: SqlSettings, text: str) -> None:
    """Touch the tables by hand."""
    with psycopg.connect(tables.dsn, autocommit=True) as connection:
        connection.execute(f"SET search_path TO {tables.schema}")
        connection.execute(text)


def numbered(count: int, first: int = 0) -> list[tuple[int, str]]:
    """Give the offsets and ids that so many facts must have."""
    return [(number, f"0-{number:06}") for number in range(first, first + count)]


def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait until something holds."""
    ends = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.05)


def test_every_part_of_a_fact_is_in_its_row(plant: Plant, tables: SqlSettings) -> None:
    """Numbers as they were said, what jsonb would refuse, bytes that are no JSON, labels, artifacts and zones."""
    said = '{"exact":1.10,"huge":1e300,"zero":"\\u0000","ü":[null,true]}'.encode()
    head = Envelope("plant", "enterprise", 253_402_300_799_999, "a", "c-1", "b-1", {"shift": "nüght"})
    other = replace(head, message_id="b", object_media_type="image/png", produced_at_unix_ms=1, labels={})
    plant.produce(
        [
            Message(head, Fact("machine:press-1", "temperature_measured", said)),
            Message(other, Fact("machine:press-1", "picture_taken", b"\x00\xff\x00")),
        ]
    )
    sink = run(plant, tables)
    assert (sink.done.facts, sink.done.next, sink.done.backlog) == (2, 2, 0)
    entries = plant.entries(Buffer.STORE)
    names = ("object::text", "object_bytes", "labels::text", "correlation_id", "digest", "to_zone", "log_id")
    first, second = rows(tables, columns=", ".join(names), order='"offset"')
    assert first[0] == entries[0].message.fact.object.decode()
    assert "1.10" in first[0] and "1e300" in first[0]
    assert (first[1], orjson.loads(first[2]), first[3]) == (None, {"shift": "nüght"}, "c-1")
    assert (second[0], second[1], second[2]) == (None, b"\x00\xff\x00", None)
    assert [first[4], second[4]] == [entry.digest_text for entry in entries]
    times = rows(tables, columns="extract(epoch FROM produced_at)*1000, extract(epoch FROM appended_at)*1000")
    assert sorted(map(tuple, times)) == sorted(
        (entry.message.envelope.produced_at_unix_ms, entry.appended_at_unix_ms) for entry in entries
    )
    assert rows(tables, "positions", "next, tail_offset, tail_digest") == [(2, 1, entries[1].digest_text)]
    assert plant.committed() == 1


def test_an_artifact_stands_in_its_row() -> None:
    """By its digest and whatever else the fact says of it."""
    artifact = ArtifactRef("b", "k", "sha256:" + "0" * 64, 12)
    entry = Entry(0, 1, Message(Envelope("p", "e", 1, "x"), Fact("m:1", "p", b"1", artifact)), b"d" * 32)
    found = COLUMNS["artifact"][1](entry, SinkBatch("s", "l", [entry], 1))
    assert orjson.loads(found) == {"bucket": "b", "key": "k", "digest": "sha256:" + "0" * 64, "size_bytes": 12}


def test_it_goes_on_where_it_was(plant: Plant, tables: SqlSettings) -> None:
    """What is confirmed does not come again, and what comes again is not written again."""
    plant.produce(messages(500))
    assert run(plant, tables, max_facts=64).done.batches == 8
    plant.produce(messages(100, first=500))
    assert run(plant, tables).done.facts == 100
    again = run(plant, tables, plant.add_consumer("app-again"), max_facts=50)
    assert again.done.facts == 600
    assert rows(tables) == numbered(600)
    assert plant.committed("app-again") == 599
    assert len(rows(tables, "positions", "next")) == 1


def test_rows_that_somebody_took_out_do_not_come_again(plant: Plant, tables: SqlSettings) -> None:
    """A table may be emptied by whoever works on it: the position says what was written, not the rows."""
    plant.produce(messages(50))
    run(plant, tables)
    execute(tables, "DELETE FROM facts")
    run(plant, tables, plant.add_consumer("app-again"))
    assert rows(tables) == []


def test_what_is_missing_is_in_the_tables(plant: Plant, tables: SqlSettings) -> None:
    """Facts that had left the buffer, and those that were confirmed before the tables were there."""
    plant.add_consumer("app-late", "lossy", required=False)
    for first in range(0, 6_000, 500):
        plant.produce(messages(500, first=first, seed=3), "lossy")
    run(plant, tables, "app-late")
    there = [offset for (offset,) in rows(tables, columns='"offset"')]
    [(first, last, offsets, reason)] = rows(tables, "gaps", "first, last, offsets, reason")
    assert (first, reason, offsets) == (0, "evicted", last + 1)
    assert there == list(range(last + 1, 6_000))
    plant.produce(messages(10))
    run(plant, tables, plant.add_consumer("app-seven", start=7))
    assert rows(tables, "gaps", "first, last, reason") == [(0, last, "evicted"), (0, 6, NOT_TAKEN)]


def test_tables_that_were_put_back_to_an_older_copy_are_noticed(plant: Plant, tables: SqlSettings) -> None:
    """What the consumer has confirmed would never come; the error says which consumer would bring it."""
    plant.produce(messages(40))
    run(plant, tables)
    execute(tables, 'DELETE FROM facts WHERE "offset" >= 30')
    execute(tables, "UPDATE positions SET next = 30, tail_offset = NULL")
    plant.produce(messages(1, first=40))
    with pytest.raises(SinkBehind) as caught:
        run(plant, tables)
    assert "--start offset:30" in caught.value.hint
    assert plant.committed() == 39
    run(plant, tables, plant.add_consumer("app-thirty", start=30))
    assert rows(tables) == numbered(41)


def test_a_node_that_was_put_back_to_an_older_copy_is_noticed(plant: Plant, tables: SqlSettings) -> None:
    """Its offsets mean other facts now: nothing is left out for that, and nothing confirmed."""
    plant.produce(messages(20))
    run(plant, tables)
    execute(tables, "UPDATE positions SET next = 25")
    again = plant.add_consumer("app-again")
    with pytest.raises(ForeignLog, match="ends at 20, facts up to 25"):
        run(plant, tables, again)
    execute(tables, "UPDATE positions SET next = 20, tail_digest = 'sha256:other'")
    with pytest.raises(ForeignLog, match="offset 19 is another one"):
        run(plant, tables, again, max_facts=5)
    assert plant.committed(again) == -1


def test_a_key_that_another_fact_has_is_a_conflict(plant: Plant, tables: SqlSettings) -> None:
    """It goes into a table of its own, whole; a repeat of the same fact changes nothing."""
    facts = messages(3)
    plant.produce(facts, "lossy")
    run(plant, tables, plant.add_consumer("app-one", "lossy"))
    execute(tables, "UPDATE facts SET stream = 'operational'")
    plant.produce([facts[0], *altered(facts[1:2]), *messages(1, first=9)])
    sink = run(plant, tables)
    assert sink.target.noted() == {"conflicts": 1}
    assert [offset for offset, _ in rows(tables)] == [0, 1, 2, 2]
    [(offset, said)] = rows(tables, "conflicts", "\"offset\", object->>'note'")
    assert (offset, said) == (1, "altered")


def test_the_newest_facts_are_a_table(plant: Plant, tables: SqlSettings) -> None:
    """Made of what is written already when it is first asked for, and then kept by every sink of the schema."""
    facts = messages(400)
    plant.produce(facts[:300])
    run(plant, tables)
    run(plant, replace(tables, latest=True))

    def newest(count: int) -> list[tuple[str, str]]:
        last = {fact.fact.subject: str(fact.envelope.message_id) for fact in facts[:count]}
        return sorted(last.items())

    assert rows(tables, "latest", "subject, message_id") == newest(300)
    plant.produce(facts[300:])
    run(plant, tables, max_facts=7)
    assert rows(tables, "latest", "subject, message_id") == newest(400)
    run(plant, tables, plant.add_consumer("app-again"))
    assert rows(tables, "latest", "subject, message_id") == newest(400)


def given(offset: int, message_id: str, at_unix_ms: int = 1, subject: str = "m:1") -> Entry:
    """Give an entry that no node has."""
    head = Envelope("p", "e", 1, message_id)
    return Entry(offset, at_unix_ms, Message(head, Fact(subject, "p", b"1")), message_id.encode().ljust(32))


def write(tables: SqlSettings, *batches: tuple[str, list[Item]]) -> None:
    """Write items of logs past any node."""
    target = SqlTarget(tables)
    target.open()
    for log_id, items in batches:
        target.write(SinkBatch("s", log_id, items, 1_000))
    target.close()


def test_a_gap_says_nothing_of_what_is_written(tables: SqlSettings) -> None:
    """A range that has left the node meanwhile may begin before the end of the tables; its words may be anything."""
    gap = GapRecord(0, 6, GapReason.EVICTED, 1, "said\0by\nothers")
    write(tables, ("l", [given(number, str(number)) for number in range(4)]), ("l", [gap]))
    assert rows(tables, "gaps", "first, last, offsets, detail") == [(4, 6, 3, "saidby others")]
    folded = replace(gap, last=9, detail="", count=2)
    write(tables, ("l", [folded]))
    assert rows(tables, "gaps", "first, last, offsets")[1:] == [(7, 9, 2)]


def test_an_old_fact_of_another_log_is_not_the_newest(tables: SqlSettings) -> None:
    """What is brought in later from elsewhere is older all the same; in one log the order of the log counts."""
    kept = replace(tables, latest=True)
    write(kept, ("a", [given(0, "new", 1_000)]), ("b", [given(0, "old", 10)]))
    assert rows(tables, "latest", "message_id") == [("new",)]
    write(kept, ("a", [given(1, "newer", 900)]))
    assert rows(tables, "latest", "message_id") == [("newer",)]
    assert len(rows(tables)) == 3


def test_sinks_that_begin_at_once_make_one_schema() -> None:
    """None of them takes what another one makes at the same moment for a change by hand."""
    failures: list[BsfgError] = []
    for number in range(5):
        ready = threading.Barrier(6)

        def begin(number: int = number, ready: threading.Barrier = ready) -> None:
            target = SqlTarget(SqlSettings(postgres().dsn, f"begun{os.getpid()}_{number}"))
            ready.wait()
            try:
                target.open()
            except BsfgError as error:
                failures.append(error)
            target.close()

        threads = [threading.Thread(target=begin) for _ in range(ready.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_what_a_role_prefers_does_not_cost_facts(tables: SqlSettings) -> None:
    """Commits that are answered before they are on disk, an encoding that has not every letter."""
    postgres().execute(f"ALTER ROLE {tables.schema} SET synchronous_commit = off")
    execute(tables, "CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$SELECT current_setting('synchronous_commit')$$")
    target = replace(tables, dsn=f"{tables.dsn} client_encoding=latin1")
    write(target, ("l", [given(0, "0", subject="m:łódź")]))
    execute(tables, "ALTER TABLE facts ADD COLUMN mode text DEFAULT f()")
    write(target, ("l", [given(1, "1")]))
    assert rows(tables, columns="subject, mode")[::-1] == [("m:łódź", "off"), ("m:1", "on")]


@pytest.mark.parametrize(
    ("touch", "error", "says"),
    [
        ("ALTER TABLE facts DROP COLUMN labels", SinkChanged, "labels"),
        ("TRUNCATE facts; ALTER TABLE facts ADD COLUMN mine text NOT NULL", SinkChanged, "mine"),
        ("ALTER TABLE facts ALTER COLUMN subject TYPE varchar(3) USING 'm:1'", SinkChanged, "too long"),
        ("ALTER TABLE facts DROP CONSTRAINT facts_pkey", SinkChanged, "no unique"),
        ("TRUNCATE facts; CREATE UNIQUE INDEX ON facts (stream)", SinkChanged, "duplicate key"),
        ("CREATE RULE r AS ON INSERT TO facts DO INSTEAD NOTHING", SinkChanged, "is not as it was made"),
        (
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            "CREATE TRIGGER t BEFORE INSERT ON facts FOR EACH ROW EXECUTE FUNCTION f()",
            SinkChanged,
            "does not keep them",
        ),
        ("DROP TABLE gaps; CREATE VIEW gaps AS SELECT 1 AS first", SinkChanged, "gaps"),
        ("INSERT INTO migration VALUES (99, now())", FormatUnsupported, "version 99"),
    ],
)
def test_tables_that_somebody_has_changed_are_not_written(
    plant: Plant, tables: SqlSettings, touch: str, error: type[BsfgError], says: str
) -> None:
    """The sink ends with an error and nothing is confirmed: no fact is left out for what is no fault of it."""
    plant.produce(messages(5))
    run(plant, tables)
    execute(tables, touch)
    plant.add_consumer("app-late", "lossy", required=False)
    for first in range(0, 6_000, 500):
        plant.produce(messages(500, first=first, seed=3), "lossy")
    with pytest.raises(error, match=says):
        run(plant, tables, "app-late")
    assert plant.committed("app-late") == -1


def test_columns_and_views_of_others_are_left_alone(plant: Plant, tables: SqlSettings) -> None:
    """Whatever rows can be added without."""
    plant.produce(messages(5))
    run(plant, tables)
    execute(tables, "ALTER TABLE facts ADD COLUMN seen boolean DEFAULT false; CREATE VIEW v AS SELECT * FROM facts")
    plant.produce(messages(5, first=5))
    run(plant, tables)
    assert rows(tables) == numbered(10)


def test_who_may_not_write_is_told(plant: Plant, tables: SqlSettings) -> None:
    """A wrong role, a wrong database, no right to a schema, a string that is none, a server that takes no writes."""
    server, plain = postgres(), tables.dsn
    for dsn, error in (
        (plain.replace(f"user={tables.schema}", "user=nobody_here"), StorageUnreadable),
        (plain.replace("dbname=postgres", "dbname=none"), StorageUnreadable),
        ("host=/nowhere-at-all", StorageUnavailable),
        ("not a string", ConfigInvalid),
    ):
        with pytest.raises(error):
            SqlTarget(SqlSettings(dsn, tables.schema)).open()
    server.execute(f"CREATE SCHEMA {tables.schema}_other")
    with pytest.raises(StorageUnreadable) as caught:
        SqlTarget(SqlSettings(plain, f"{tables.schema}_other")).open()
    assert "all rights" in caught.value.hint
    with pytest.raises(StorageReadOnly):
        SqlTarget(SqlSettings(f"{plain} options='-c default_transaction_read_only=on'", tables.schema)).open()


def test_a_full_disk_is_waited_for(plant: Plant, tables: SqlSettings) -> None:
    """The server says so for as long as it lasts, here by a trigger; then the same facts are written."""
    plant.produce(messages(5))
    run(plant, tables, plant.add_consumer("app-none", start=5))
    raising = "RAISE EXCEPTION ''no space left'' USING ERRCODE = ''53100''"
    execute(tables, f"CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN {raising}; END'")
    execute(tables, "CREATE TRIGGER t BEFORE INSERT ON facts FOR EACH ROW EXECUTE FUNCTION f()")
    with following(plant, tables) as sink:
        until(lambda: isinstance(sink.problem, DiskFull))
        execute(tables, "DROP TRIGGER t ON facts")
        until(lambda: sink.done.facts == 5)
        assert sink.problem is None
    assert rows(tables) == numbered(5)
    assert plant.committed() == 4


@contextmanager
def following(plant: Plant, tables: SqlSettings, **options: Any) -> Iterator[Sink]:
    """Write what comes while a block runs."""
    sink = Sink(plant.endpoint, "app-sink", SqlTarget(tables), **options)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            sink.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield sink
    finally:
        sink.end()
        thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert not failures


def test_two_sinks_at_once_write_every_fact_once(plant: Plant, tables: SqlSettings) -> None:
    """One waits for the other and leaves out what that has written."""
    with following(plant, tables, max_facts=7), following(plant, tables, max_facts=5):
        for first in range(0, 600, 60):
            plant.produce(messages(60, first=first))
        until(lambda: len(rows(tables)) == 600)
    assert rows(tables) == numbered(600)
    assert plant.committed() == 599


def test_a_node_that_goes_away_is_waited_for(plant: Plant, tables: SqlSettings) -> None:
    """It says so, goes on by itself, and ends at once when it is asked to although nobody answers."""
    with following(plant, tables) as sink:
        plant.produce(messages(10))
        until(lambda: sink.done.facts == 10)
        plant.stop()
        until(lambda: sink.problem is not None)
        plant.start()
        plant.produce(messages(10, first=10))
        until(lambda: sink.done.facts == 20)
        plant.stop()
        until(lambda: sink.problem is not None)
    assert rows(tables) == numbered(20)


@pytest.mark.parametrize("more", [5, 40])
def test_a_node_that_is_put_back_while_a_sink_runs_is_noticed(
    plant: Plant, tables: SqlSettings, tmp_path: Path, more: int
) -> None:
    """Its offsets mean other facts now: none is passed over or confirmed unseen, whether it has grown since or not."""
    failures: list[BsfgError] = []

    def work() -> None:
        try:
            sink.run()
        except BsfgError as error:
            failures.append(error)

    plant.produce(messages(10))
    sink = Sink(plant.endpoint, "app-sink", SqlTarget(tables))
    thread = threading.Thread(target=work)
    thread.start()
    try:
        until(lambda: plant.committed() == 9)
        plant.stop()
        shutil.copytree(plant.data, tmp_path / "copy")
        plant.start()
        plant.produce(messages(20, first=10))
        until(lambda: plant.committed() == 29)
        plant.stop()
        shutil.rmtree(plant.data)
        shutil.copytree(tmp_path / "copy", plant.data)
        plant.start()
        plant.produce(messages(more, first=100))
        thread.join(15)
        assert [type(each) for each in failures] == [ForeignLog]
    finally:
        sink.end()
        thread.join(WAIT_SECONDS)
    assert (rows(tables), plant.committed()) == (numbered(30), 9)


def test_it_is_kept_alive_as_the_other_pipelines_are(plant: Plant, tmp_path: Path) -> None:
    """What it waits for is shown as its error, and it goes on; a server of its own is killed and started again."""
    server = PackagedServer()
    tables = SqlSettings(server.dsn, "kept")
    try:
        make = lambda: Sink(plant.endpoint, "app-sink", SqlTarget(tables))  # noqa: E731
        pipeline, spark = kept.KeptSink(make, "write"), Any
        keeper = PipelineKeeper("p", pipeline, KeptTerms(), spark, Schedule(tmp_path / "schedule.json"))  # type: ignore[arg-type]
        keeper.thread.start()

        def report() -> Any:
            pipeline.look(keeper.diary)
            return keeper.report()

        plant.produce(messages(30))
        until(lambda: report().facts == 30)
        assert (report().state, report().backlog) == (PipelineState.RUNNING, 0)
        written = report().last_good_unix_ms
        until(lambda: report().last_good_unix_ms > written > 0)
        server.kill()
        plant.produce(messages(30, first=30))
        until(lambda: report().state == PipelineState.FAILED)
        assert "storage_unavailable" in report().last_error
        server.start()
        until(lambda: report().facts == 60)
        assert (report().state, report().runs, report().failures) == (PipelineState.RUNNING, 1, 0)
        keeper.end()
        keeper.thread.join(WAIT_SECONDS)
        assert keeper.state == PipelineState.ENDED
        assert rows(tables) == numbered(60)
    finally:
        server.stop()


class Command:
    """`bsfg pipeline sql` as a process that follows."""

    def __init__(self, plant: Plant, tables: SqlSettings, log: Path) -> None:
        dsn = log.with_name("dsn")
        dsn.write_text(tables.dsn)
        config, log_file = str(plant.folder / "zone.toml"), log.open("ab")
        words = ["sql", "--config", config, "--consumer", "app-sink", "--dsn-file", str(dsn), "--schema", tables.schema]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BSFG_")}
        with log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bsfg.cli", "pipeline", *words, "--max-facts-per-batch", "13", "--latest"],
                stdout=log_file,
                stderr=log_file,
                env=environment,
            )

    def kill(self) -> None:
        """End it as a power switch would."""
        self.process.kill()
        self.process.wait()


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_killed_again_and_again_every_fact_is_written_once(
    plant: Plant, tmp_path: Path, soak_size: Callable[[int, int], int]
) -> None:
    """The sink, the node and the server are killed while facts come: every fact is one row, and rows are in order."""
    server, random = PackagedServer(), Random(5)
    tables, count = SqlSettings(server.dsn, "killed"), 0
    log, moved = tmp_path / "sink.log", []
    try:
        for _ in range(soak_size(10, 200)):
            command = Command(plant, tables, log)
            before = plant.committed()
            plant.produce(messages(200, first=count))
            count += 200
            until(lambda before=before: plant.committed() > before, "nothing was written")  # type: ignore[misc]
            time.sleep(random.uniform(0, 0.1))
            match random.randrange(4):
                case 0:
                    plant.kill()
                    command.kill()
                    plant.start()
                case 1:
                    server.kill()
                    command.kill()
                    server.start()
                case _:
                    command.kill()
            moved.append(rows(tables, "positions", "next")[0][0])
            written = rows(tables)
            assert written == numbered(moved[-1]), "rows and position are committed together"
        run(plant, tables)
        assert rows(tables) == numbered(count)
        assert len(rows(tables, "latest", "subject")) == 8
    finally:
        server.stop()
    assert moved == sorted(moved)
    assert "Traceback" not in log.read_text()
