"""`bsfg pipeline ingest` as a user types it: it teaches, looks before it leaps, and says what is wrong."""

from __future__ import annotations

from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Run

HEADER = "machine,ts,value\n"
GOOD = "press-1,2026-03-01T06:00:00Z,21.5\n"
OPTIONS = (
    *("--stream", "operational", "--from-zone", "plant-a", "--to-zone", "enterprise"),
    *("--map", "subject=asset:{machine}", "--map", "produced_at=ts", "--set", "predicate=temperature_measured"),
    *("--object", "value", "--type", "value=number"),
)


@pytest.fixture
def readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a file with three good rows and two bad ones, in the folder where the user is."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "readings.csv"
    path.write_text(HEADER + GOOD + ",2026-03-01T06:00:00Z,1\n" + GOOD + "press-2,yesterday,2\n" + GOOD)
    return path


def test_the_help_teaches(quick: Run) -> None:
    """The help explains ids, rejects, exit codes and resuming, and shows whole commands."""
    outcome = quick("pipeline", "ingest", "--help", env={"COLUMNS": "200"})
    assert outcome.code == 0
    for words in ("reject file", "exit code is 0", "goes on where it was", "SHA-256", "--dry-run", "Examples"):
        assert words in " ".join(outcome.out.split())


def test_a_dry_run_shows_facts_and_rejects(quick: Run, readings: Path) -> None:
    """A dry run needs no node; it shows the first facts, which rows would be rejected, and says so by its exit code."""
    outcome = quick("pipeline", "ingest", readings, *OPTIONS, "--dry-run")
    assert outcome.code == 3
    assert '"subject": "asset:press-1"' in outcome.out
    assert "Of 5 rows 3 would become facts of operational." in outcome.out
    assert "readings.csv:3  invalid_fact  subject: is required, and column machine is empty" in outcome.out
    assert "readings.csv:5  invalid_fact  produced_at: column ts: 'yesterday' is not an ISO time" in outcome.out
    assert "Nothing was sent." in outcome.out
    assert not Path("bsfg-ingest").exists()


def test_a_dry_run_as_json(quick: Run, readings: Path) -> None:
    """The same as JSON: counts, facts as `bsfg fetch` writes them, and rejects as the reject file has them."""
    found = quick("pipeline", "ingest", readings, *OPTIONS, "--dry-run", "--json").json()
    assert (found["dry_run"], found["whole"], found["rows"], found["facts"], found["rejected"]) == (True, True, 5, 3, 2)
    first = found["first_facts"][0]
    assert first["fact"] == {"subject": "asset:press-1", "predicate": "temperature_measured", "object": {"value": 21.5}}
    assert first["envelope"]["from_zone"] == "plant-a"
    assert [(reject["row"], reject["line"], reject["field"]) for reject in found["first_rejects"]] == [
        (2, 3, "subject"),
        (4, 5, "produced_at"),
    ]


def test_a_dry_run_ends_well_when_all_is_well(quick: Run, tmp_path: Path) -> None:
    """A dry run without rejects has exit code 0, and can be limited to the first rows."""
    path = tmp_path / "a.parquet"
    rows = {"machine": ["m"] * 1000, "ts": ["2026-03-01T06:00:00Z"] * 1000, "value": list(range(1000))}
    pq.write_table(pa.table(rows), path, row_group_size=100)
    outcome = quick("pipeline", "ingest", path, *OPTIONS, "--dry-run", "--limit", "150")
    assert outcome.code == 0
    assert "Of the first 200 rows 200 would become facts" in outcome.out
    assert "--limit 0 looks at all rows" in outcome.out
    assert "Of 1,000 rows" in quick("pipeline", "ingest", path, *OPTIONS, "--dry-run", "--limit", "0").out


def test_ids_that_repeat_are_noticed(quick: Run, readings: Path) -> None:
    """A dry run warns of ids that two rows share, since only one of the rows would be stored."""
    outcome = quick("pipeline", "ingest", readings, *OPTIONS, "--id", "{machine}", "--dry-run")
    assert "2 rows have an id that an earlier row has, the first is 'press-1'" in outcome.out


def test_a_mapping_file_serves_as_options(quick: Run, readings: Path) -> None:
    """A mapping in a file says the same as options, which go before it."""
    Path("m.toml").write_text("""
stream = "operational"
to_zone = "enterprise"
object = "value"
[map]
subject = "asset:{machine}"
produced_at = "ts"
[set]
predicate = "temperature_measured"
[types]
value = "number"
""")
    options = ("--mapping", "m.toml", "--dry-run", "--json")
    found = quick("pipeline", "ingest", readings, *options).json()
    assert found["facts"] == 3
    assert found["first_facts"][0]["envelope"]["from_zone"] == "this-zone"
    other = quick("pipeline", "ingest", readings, *options, "--set", "predicate=other").json()
    assert other["first_facts"][0]["fact"]["predicate"] == "other"


def test_folders_are_searched_and_strangers_named(quick: Run, readings: Path) -> None:
    """Files in a folder that no format fits are left out and named."""
    readings.with_name("notes.txt").write_text("hello")
    found = quick("pipeline", "ingest", readings.parent, *OPTIONS, "--dry-run", "--json").json()
    assert [Path(path).name for path in found["left_out"]] == ["notes.txt"]
    assert "notes.txt" in quick("pipeline", "ingest", readings.parent, *OPTIONS, "--dry-run").out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("no.csv", "--dry-run"), "there is no file 'no.csv'"),
        (("readings.csv", "--dry-run", "--map", "subject"), "--map 'subject' is not of the form NAME=VALUE"),
        (("readings.csv", "--dry-run", "--set", "subject=a:b"), "is both mapped and set"),
        (("readings.csv", "--dry-run", "--map", "produced_at=x"), "--map says produced_at twice"),
        (("readings.csv", "--dry-run", "--max-object", "big"), "--max-object must be a size"),
        (("readings.csv", "--dry-run", "--mapping", "no.toml"), "no.toml cannot be read"),
        (("readings.csv", "--dry-run", "--format", "xml"), "the format must be one of csv, jsonl, parquet"),
        (("readings.csv",), "which node is not said"),
        (("readings.csv", "--address", "127.0.0.1:1", "--conflicts", "x"), "--conflicts is reject or fail"),
        (("readings.csv", "--address", "127.0.0.1:1", "--step", "x"), "--step must be a size"),
    ],
)
def test_wrong_use_is_explained(quick: Run, readings: Path, args: tuple[str, ...], says: str) -> None:
    """What is wrong is named in one sentence, with a hint, before Spark is started."""
    outcome = quick("pipeline", "ingest", *args, *OPTIONS)
    assert outcome.code == 1
    assert says in outcome.err
    assert "hint: " in outcome.err


def test_a_column_that_is_not_there_is_explained(quick: Run, readings: Path) -> None:
    """A misspelt column is told with those that there are."""
    found = quick("pipeline", "ingest", readings, *OPTIONS, "--map", "label.x=shift", "--dry-run", "--json").json()
    [reject] = found["first_rejects"]
    assert reject["reason"] == "has no column 'shift'; it has machine, ts, value"
    assert (reject["rows"], found["rejected"]) == (5, 5)


def test_a_node_that_is_away_is_an_error_before_anything_is_done(quick: Run, readings: Path) -> None:
    """When nobody answers, the command says so at once and remembers nothing."""
    outcome = quick("pipeline", "ingest", readings, *OPTIONS, "--address", "127.0.0.1:1", "--json")
    assert outcome.code == 1
    assert orjson.loads(outcome.out)["code"] == "peer_unreachable"
    assert list(Path("bsfg-ingest").glob("*/job.json")) == []
