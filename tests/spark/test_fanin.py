"""One query over many nodes and streams: each is read from where it was, and none waits for another."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from tests.spark.nodes import SparkZone, facts

from bsfg.errors import BsfgError, FactsMissing, ForeignLog, FrameInvalid, InvalidArgument, PeerUnreachable
from bsfg.spark.confirming import ConfirmingListener, confirm_batches
from bsfg.spark.fanin import FactsOrigin, OriginRange, cut, shared_out
from bsfg.spark.mapping import COLUMNS
from bsfg.spark.options import READ, READ_STREAM, parse
from bsfg.spark.source import FactsStreamReader, OriginsReader, OriginsStreamReader
from bsfg.testing.ports import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PLANT, LOSSY, HUB = "plant-a/operational", "plant-a/lossy", "enterprise/operational"
EVERYTHING = ReadAllAvailable()
WAIT_SECONDS = 60


def listed(plant: SparkZone, enterprise: SparkZone, **options: object) -> dict[str, str]:
    """Give the options of three sources at two nodes, as the enterprise's pipeline reads them."""
    sources = [
        {
            "name": "plant-a",
            "address": f"127.0.0.1:{plant.port}",
            "streams": ["operational", "lossy"],
            "serverName": "plant-a-bsfg",
            "consumer": "enterprise.{stream}",
        },
        {
            "name": "enterprise",
            "address": f"127.0.0.1:{enterprise.port}",
            "stream": "operational",
            "serverName": "enterprise-bsfg",
        },
    ]
    common = {name: value for name, value in enterprise.options().items() if name in ("ca", "cert", "key")}
    given = {"sources": orjson.dumps(sources).decode(), "retrySeconds": "20", **common}
    return given | {name: str(value) for name, value in options.items()}


def reader(options: dict[str, str]) -> OriginsStreamReader:
    """Give a reader as Spark makes it, without Spark."""
    return OriginsStreamReader(parse(options, READ_STREAM), (*COLUMNS, "source"))


def rows_of(found: OriginsStreamReader, start: dict[str, Any], end: dict[str, Any]) -> dict[str, list[int]]:
    """Read everything between two offsets as a task would, and give the offsets of each source."""
    rows: dict[str, list[int]] = {}
    for part in found.partitions(start, end):
        there = pickle.loads(pickle.dumps(found))
        for batch in there.read(pickle.loads(pickle.dumps(part))):
            for row in batch.select(["source", "offset"]).to_pylist():
                rows.setdefault(row["source"], []).append(row["offset"])
    return rows


def until_moved(found: OriginsStreamReader, start: dict[str, Any], key: str, offset: int) -> dict[str, Any]:
    """Ask for the end of the next micro-batch until a source has come so far."""
    ends = time.monotonic() + WAIT_SECONDS
    while (end := found.latestOffset(start, EVERYTHING)).get(key) != offset:
        assert time.monotonic() < ends, end
        time.sleep(0.1)
    return end


def test_sources_are_read_side_by_side(zones: tuple[SparkZone, SparkZone]) -> None:
    """Offsets are kept by source, limits shared out fairly, tasks as many as told, and a re-read gives the same."""
    plant, enterprise = zones
    plant.produce(facts(50))
    plant.produce(facts(7), "lossy")
    enterprise.produce(facts(20, zone="enterprise"))
    found = reader(listed(plant, enterprise, numPartitions=4))
    start = found.initialOffset()
    assert {key: start[key] for key in (PLANT, LOSSY, HUB)} == {PLANT: 0, LOSSY: 0, HUB: 0}
    assert set(start) == {PLANT, LOSSY, HUB, "log_ids"}
    end = found.latestOffset(start, ReadMaxRows(40))
    assert {key: end[key] for key in (PLANT, LOSSY, HUB)} == {PLANT: 16, LOSSY: 7, HUB: 17}
    assert len(found.partitions(start, end)) == 4
    rows = rows_of(found, start, end)
    assert rows == {PLANT: list(range(16)), LOSSY: list(range(7)), HUB: list(range(17))}
    plant.produce(facts(5, first=50))
    other = reader(listed(plant, enterprise, numPartitions=4))
    assert rows_of(other, start, end) == rows
    last = other.latestOffset(end, EVERYTHING)
    assert {key: last[key] for key in (PLANT, LOSSY, HUB)} == {PLANT: 55, LOSSY: 7, HUB: 20}
    assert other.reportLatestOffset() == last
    other.commit(last)
    assert (plant.committed("enterprise.operational"), plant.committed("enterprise.lossy")) == (54, 6)
    assert other.partitions(last, last) == []


def test_positions_are_given_by_source(zones: tuple[SparkZone, SparkZone]) -> None:
    """As users of Kafka know it: a JSON object of offsets and words, the rest from the oldest on."""
    plant, enterprise = zones
    plant.produce(facts(10))
    enterprise.produce(facts(10, zone="enterprise"))
    told = orjson.dumps({PLANT: 4, HUB: "latest"}).decode()
    start = reader(listed(plant, enterprise, startingOffsets=told)).initialOffset()
    assert (start[PLANT], start[LOSSY], start[HUB]) == (4, 0, 10)
    again = reader(listed(plant, enterprise, startingOffsets=orjson.dumps(start).decode())).initialOffset()
    assert again == start
    kafka = orjson.dumps({PLANT: -1, HUB: -2}).decode()
    start = reader(listed(plant, enterprise, startingOffsets=kafka)).initialOffset()
    assert (start[PLANT], start[HUB]) == (10, 0)
    with pytest.raises(InvalidArgument, match="there is no source 'nosuch/operational'"):
        reader(listed(plant, enterprise, startingOffsets='{"nosuch/operational": 1}'))
    with pytest.raises(ForeignLog, match="plant-a/operational: the log of the node ends at 10"):
        reader(listed(plant, enterprise, startingOffsets=orjson.dumps({PLANT: 11}).decode())).initialOffset()
    with pytest.raises(FrameInvalid, match="no offsets of several sources"):
        reader(listed(plant, enterprise)).latestOffset({"log_id": "x", "offset": 3}, EVERYTHING)
    with pytest.raises(FrameInvalid, match="no offsets of several sources"):
        reader(listed(plant, enterprise)).latestOffset({PLANT: "3", "log_ids": {PLANT: "x"}}, EVERYTHING)


def test_a_source_that_is_away_stops_nobody(zones: tuple[SparkZone, SparkZone]) -> None:
    """Its offset stands still and the progress says why; when it is back it goes on from there."""
    plant, enterprise = zones
    plant.produce(facts(10))
    found = reader(listed(plant, enterprise))
    start = found.initialOffset()
    end = until_moved(found, start, PLANT, 10)
    plant.kill()
    enterprise.produce(facts(5, zone="enterprise"))
    later = until_moved(found, end, HUB, 5)
    assert (later[PLANT], later["log_ids"]) == (10, end["log_ids"])
    assert "peer_unreachable" in found.reportLatestOffset()["away"][PLANT]
    began = time.monotonic()
    found.latestOffset(later, EVERYTHING)
    assert time.monotonic() - began < 2, "who is known to be away is not waited for"
    found.commit(later)
    plant.start()
    plant.produce(facts(3, first=10))
    last = until_moved(found, later, PLANT, 13)
    assert rows_of(found, later, last) == {PLANT: [10, 11, 12]}
    assert PLANT not in found.reportLatestOffset().get("away", {})


def test_a_source_that_is_missing_at_the_start(zones: tuple[SparkZone, SparkZone]) -> None:
    """It is an error that names it, unless the stream is told to begin without it; then it joins when it is there."""
    plant, enterprise = zones
    plant.produce(facts(4))
    port, plant.port = plant.port, free_port()
    strict = reader(listed(plant, enterprise, retrySeconds=0))
    with pytest.raises(PeerUnreachable, match="plant-a/operational: ") as caught:
        strict.initialOffset()
    assert 'missingSources = "wait"' in caught.value.hint
    plant.port = port
    options = listed(plant, enterprise, missingSources="wait")
    plant.kill()
    found = reader(options)
    start = found.initialOffset()
    assert set(start) == {HUB, "log_ids"}
    plant.start()
    joined = until_moved(found, start, PLANT, 0)
    assert rows_of(found, start, joined) == {}
    assert rows_of(found, joined, until_moved(found, joined, PLANT, 4)) == {PLANT: [0, 1, 2, 3]}


def test_a_log_that_is_another_one_stands_still(zones: tuple[SparkZone, SparkZone]) -> None:
    """It is said in the progress, and the others go on; when none is left that could, the query ends."""
    plant, enterprise = zones
    found = reader(listed(plant, enterprise))
    start = found.initialOffset()
    plant.produce(facts(3))
    enterprise.produce(facts(3, zone="enterprise"))
    log_ids = {**start["log_ids"], PLANT: "f" * 32}
    end = until_moved(found, {**start, "log_ids": log_ids}, HUB, 3)
    assert (end[PLANT], end["log_ids"][PLANT]) == (0, "f" * 32)
    assert "foreign_log" in found.reportLatestOffset()["away"][PLANT]
    nobody = {**start, "log_ids": dict.fromkeys(start["log_ids"], "f" * 32)}
    with pytest.raises(ForeignLog, match="the log of the node is"):
        reader(listed(plant, enterprise)).latestOffset(nobody, EVERYTHING)


def test_links_of_a_zone_are_sources(zones: tuple[SparkZone, SparkZone]) -> None:
    """With a zone.toml its links are read with the zone's certificate; what is added to it comes in while it runs."""
    plant, enterprise = zones
    plant.produce(facts(6))
    link = enterprise.links
    enterprise.links = link.replace('engine = "spark"', 'engine = "spark"\nstreams = ["operational"]')
    enterprise.write()
    options = {"config": str(enterprise.folder / "zone.toml"), "consumer": "enterprise.{stream}"}
    found = reader(options)
    one, two = "from-plant-a/operational", "from-plant-a/lossy"
    start = found.initialOffset()
    assert start == {one: 0, "log_ids": {one: start["log_ids"][one]}}
    end = until_moved(found, start, one, 6)
    found.commit(end)
    assert plant.committed("enterprise.operational") == 5
    plant.produce(facts(2), "lossy")
    enterprise.links = link
    enterprise.write()
    joined = until_moved(found, end, two, 0)
    last = until_moved(found, joined, two, 2)
    assert rows_of(found, end, last) == {}
    assert rows_of(found, joined, last) == {two: [0, 1]}
    enterprise.links = link + 'subjects = ["nothing"]\n'
    enterprise.write()
    assert found.latestOffset(last, EVERYTHING) == last
    assert rows_of(found, joined, last) == {}, "the filter of the link counts"
    (enterprise.folder / "zone.toml").write_text("[zone\n")
    assert found.latestOffset(last, EVERYTHING) == last, "a file that cannot be read changes nothing"
    enterprise.links = ""
    enterprise.write()
    plant.produce(facts(2, first=6))
    assert found.latestOffset(last, EVERYTHING) == last, "what is no source any more stands still"


def test_gaps_are_told_with_their_source(zones: tuple[SparkZone, SparkZone]) -> None:
    """Facts that have left a buffer are an error that names the source, or rows of it."""
    plant, enterprise = zones
    for first in range(0, 2_500, 500):
        plant.produce(facts(500, first=first), "lossy")
    told = orjson.dumps({LOSSY: 0}).decode()
    found = reader(listed(plant, enterprise, startingOffsets=told))
    start = found.initialOffset()
    end = found.latestOffset(start, EVERYTHING)
    with pytest.raises(FactsMissing, match=f"of {LOSSY} are not there: evicted"):
        rows_of(found, start, end)
    rows = rows_of(reader(listed(plant, enterprise, startingOffsets=told, gaps="rows")), start, end)[LOSSY]
    assert rows[0] == 0 and rows[-1] == 2_499


def test_one_query_lands_all_of_them(spark: SparkSession, zones: tuple[SparkZone, SparkZone], tmp_path: Path) -> None:
    """Every fact of every source once per checkpoint, each batch confirmed when it is done and not one later."""
    plant, enterprise = zones
    plant.produce(facts(40))
    enterprise.produce(facts(10, zone="enterprise"))
    options = listed(plant, enterprise, maxFactsPerBatch=20, consumer="app-{stream}")
    options = options | {
        "sources": options["sources"].replace('"name":"enterprise"', '"name":"enterprise","consumer":"app-lake"')
    }
    enterprise.create_consumer("app-lake")

    def landing(**trigger: Any) -> StreamingQuery:
        writing = spark.readStream.format("bsfg").options(**options).load().writeStream.format("parquet")
        writing = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(**trigger)
        return writing.start(str(tmp_path / "facts"))

    query = landing(availableNow=True)
    with confirm_batches(spark, query, options):
        query.awaitTermination()
    assert (plant.committed("enterprise.operational"), enterprise.committed("app-lake")) == (39, 9)
    plant.produce(facts(5, first=40))
    query = landing(processingTime="0 seconds")
    try:
        with confirm_batches(spark, query, options):
            query.processAllAvailable()
            ends = time.monotonic() + WAIT_SECONDS
            while plant.committed("enterprise.operational") != 44:
                assert time.monotonic() < ends, "the last batch is confirmed although none follows it"
    finally:
        query.stop()
    found = spark.read.parquet(str(tmp_path / "facts"))
    counts = {row["source"]: (row["count"], row["facts"]) for row in _counted(found)}
    assert counts == {PLANT: (45, 45), HUB: (10, 10)}
    batch = spark.read.format("bsfg").options(
        **{k: v for k, v in options.items() if k not in ("maxFactsPerBatch", "consumer")}
    )
    assert {row["source"]: row["count"] for row in _counted(batch.load())} == {PLANT: 45, HUB: 10}
    assert batch.option("endingOffsets", f'{{"{PLANT}": 3, "{HUB}": 0, "{LOSSY}": 0}}').load().count() == 3


def _counted(found: Any) -> Any:
    from pyspark.sql import functions

    return (
        found.groupBy("source")
        .agg(functions.count("*").alias("count"), functions.countDistinct("offset").alias("facts"))
        .collect()
    )


def test_a_filter_leaves_no_rows(zones: tuple[SparkZone, SparkZone]) -> None:
    """What was not asked for is neither a row nor missing; what was is complete."""
    plant, enterprise = zones
    plant.produce(facts(30))
    wanted = facts(30)[7].fact.subject
    found = reader(listed(plant, enterprise, subjects=wanted, gaps="fail"))
    start = found.initialOffset()
    end = found.latestOffset(start, EVERYTHING)
    assert end[PLANT] == 30
    expected = [number for number, each in enumerate(facts(30)) if each.fact.subject == wanted]
    assert rows_of(found, start, end) == {PLANT: expected}


def test_wrong_sources_are_named(zones: tuple[SparkZone, SparkZone]) -> None:
    """A stream that a node does not have ends the query with the key of the source in the error."""
    plant, enterprise = zones
    options = listed(plant, enterprise)
    with pytest.raises(BsfgError, match="plant-a/nosuch: ") as caught:
        reader(options | {"sources": options["sources"].replace('"lossy"', '"nosuch"')}).initialOffset()
    assert caught.value.code == "unknown_consumer"


def test_one_log_by_two_names_is_not_read_twice(zones: tuple[SparkZone, SparkZone]) -> None:
    """Addresses that differ can be those of one node; that shows when it is asked, also when it comes later."""
    plant, enterprise = zones
    options = listed(plant, enterprise)
    sources = orjson.loads(options["sources"])
    alias = {**sources[0], "name": "plant", "address": f"localhost:{plant.port}", "streams": ["operational"]}
    doubled = options | {"sources": orjson.dumps([*sources, alias]).decode()}
    with pytest.raises(InvalidArgument, match="plant-a/operational and plant/operational are the same log"):
        reader(doubled).initialOffset()
    batch = {name: value for name, value in doubled.items() if name != "consumer"}
    with pytest.raises(InvalidArgument, match="are the same log"):
        OriginsReader(parse(batch, READ), (*COLUMNS, "source")).partitions()
    start = reader(options).initialOffset()
    with pytest.raises(InvalidArgument, match="are the same log"):
        reader(doubled).latestOffset(start, EVERYTHING)


ORIGIN = FactsOrigin("a:1/s", "a:1", "s")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 300)), min_size=1, max_size=12), st.integers(1, 20))
def test_ranges_are_shared_out_evenly(sizes: list[tuple[int, int]], pieces: int) -> None:
    """All offsets once and in order, in as many parts as told, none larger than the others by more than one."""
    ranges = [OriginRange(ORIGIN, "log", first, first + size) for first, size in sizes]
    parts = cut(ranges, pieces)
    whole = [(number, at) for number, each in enumerate(ranges) for at in range(each.first, each.end)]
    assert [at for part in parts for each in part for at in range(each.first, each.end)] == [at for _, at in whole]
    counts = [sum(each.end - each.first for each in part) for part in parts]
    assert len(parts) == min(pieces, len(whole))
    assert max(counts) - min(counts) <= 1


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1_000), max_size=8), st.none() | st.integers(1, 2_000))
def test_limits_are_shared_out_fairly(backlogs: dict[str, int], limit: int | None) -> None:
    """The limit is used up where there is enough, and nobody gets more than one who still has something left."""
    shares = shared_out(backlogs, limit)
    assert sum(shares.values()) == min(sum(backlogs.values()), limit if limit is not None else 1 << 30)
    waiting = [shares[key] for key in backlogs if shares[key] < backlogs[key]]
    assert not waiting or max(shares.values()) <= min(waiting) + 1


def test_who_reads_a_log_twice_confirms_what_both_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query may be further in one place that reads a log than in another, which still needs the facts between."""
    query: Any = SimpleNamespace(id="q", lastProgress=None)
    one = ConfirmingListener(query, query, {"address": "localhost:1", "stream": "s", "consumer": "c"})
    several = ConfirmingListener(query, query, {"sources": "a:1/s,b:1/s", "consumer": "c"})
    told: list[Any] = []
    for listener in (one, several):
        monkeypatch.setattr(listener, "_confirm_end", told.append)
    one._confirm(['{"log_id":"A","offset":9}', {"log_id": "A", "offset": 4}, {"log_id": "B", "offset": 2}, None])
    assert [(end["log_id"], end["offset"]) for end in told] == [("A", 4), ("A", 4), ("B", 2)]
    told.clear()
    log_ids = {"a:1/s": "A", "b:1/s": "B"}
    several._confirm([{"a:1/s": 9, "b:1/s": 1, "log_ids": log_ids}, {"a:1/s": 4, "b:1/s": 7, "log_ids": log_ids}])
    assert told == 2 * [{"a:1/s": 4, "b:1/s": 1, "log_ids": log_ids}]


class ToldQuery:
    """What a listener knows of a query: its id, and the progress that it told last."""

    def __init__(self, *ends: object) -> None:
        self.id = "0b7e2b5c"
        self.lastProgress = {"sources": [{"endOffset": end} for end in ends]} if ends else None


class ToldSession:
    """A session that notes who listens."""

    def __init__(self) -> None:
        self.streams = self
        self.listening: list[Any] = []

    def addListener(self, listener: Any) -> None:
        """Let somebody listen."""
        self.listening.append(listener)

    def removeListener(self, listener: Any) -> None:
        """Let somebody listen no more."""
        self.listening.remove(listener)


def told(id: str, *ends: str) -> Any:
    """Give the event of a batch that is done."""
    sources = [SimpleNamespace(endOffset=end) for end in ends]
    return SimpleNamespace(progress=SimpleNamespace(id=id, sources=sources))


def test_a_listener_confirms_for_one_source(plant: SparkZone, caplog: pytest.LogCaptureFixture) -> None:
    """Ends of its own query are confirmed, those of others and of other formats are not, and a node may be away."""
    plant.produce(facts(30))
    plant.create_consumer("app-lake")
    options = plant.options() | {"consumer": "app-lake", "retrySeconds": "0"}
    log_id = FactsStreamReader(parse(options, READ_STREAM), COLUMNS).initialOffset()["log_id"]

    def end(offset: int) -> str:
        return orjson.dumps({"log_id": log_id, "offset": offset}).decode()

    session, query = ToldSession(), ToldQuery(end(5))
    listener = confirm_batches(cast("SparkSession", session), cast("StreamingQuery", query), options)
    assert (session.listening, plant.committed("app-lake")) == ([listener], 4)
    listener.onQueryProgress(told(query.id, end(0)))
    listener.onQueryProgress(told(query.id, '{"topic":{"0":7}}', "17", end(12)))
    assert plant.committed("app-lake") == 11
    listener.onQueryProgress(told("another", end(20)))
    listener.onQueryProgress(told(query.id, end(12)))
    assert plant.committed("app-lake") == 11
    plant.kill()
    listener.onQueryProgress(told(query.id, end(20)))
    assert "stands still: peer_unreachable" in caplog.text
    plant.start()
    ends = time.monotonic() + WAIT_SECONDS
    while plant.committed("app-lake") < 24:
        assert time.monotonic() < ends, "a later batch is confirmed when the node is back"
        listener.onQueryProgress(told(query.id, end(25)))
        time.sleep(0.2)
    query.lastProgress = {"sources": [{"endOffset": end(30)}]}
    listener.close()
    assert session.listening == []


def test_a_listener_needs_somebody_to_confirm_for(plant: SparkZone) -> None:
    """Without a consumer there is nothing to do, and the user is told so."""
    for options in (plant.options(), {"sources": "a:1/s"}):
        with pytest.raises(InvalidArgument, match="there is nobody to confirm for") as caught:
            confirm_batches(cast("SparkSession", ToldSession()), cast("StreamingQuery", ToldQuery()), options)
        assert "the options that the stream was read with" in caught.value.hint


@pytest.mark.parametrize("columns", ["offset", "offset,source,subject", "message_id,stream,source,log_id,buffer"])
def test_columns_of_several_sources(zones: tuple[SparkZone, SparkZone], columns: str) -> None:
    """Only what was asked for is read, and every row knows where it is from."""
    plant, enterprise = zones
    plant.produce(facts(9))
    names = tuple(columns.split(","))
    found = OriginsStreamReader(parse(listed(plant, enterprise, columns=columns), READ_STREAM), names)
    start = found.initialOffset()
    end = found.latestOffset(start, EVERYTHING)
    batches = [batch for part in found.partitions(start, end) for batch in found.read(part)]
    assert sum(batch.num_rows for batch in batches) == 9
    for batch in batches:
        assert tuple(batch.schema.names) == names
        assert all(column.null_count == 0 for column in batch.columns)
        if "source" in names:
            assert set(batch.column("source").to_pylist()) == {PLANT}


def test_tasks_take_several_sources(zones: tuple[SparkZone, SparkZone]) -> None:
    """However many sources have something, there are as many tasks as told, and without a word few for each core."""
    plant, enterprise = zones
    for zone in (plant, enterprise):
        zone.produce(facts(6, zone=zone.name))
    plant.produce(facts(6), "lossy")
    for options, expected in (
        ({"numPartitions": 1}, 1),
        ({"numPartitions": 2}, 2),
        ({"numPartitions": 100}, 18),
        ({}, 3),
    ):
        found = reader(listed(plant, enterprise, **options))
        start = found.initialOffset()
        end = found.latestOffset(start, EVERYTHING)
        parts = found.partitions(start, end)
        assert len(parts) == expected
        assert rows_of(found, start, end) == {key: list(range(6)) for key in (PLANT, LOSSY, HUB)}
