"""`bsfg bench store`: what it measures, what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nats
import orjson
import pytest
from tests.cli.conftest import Run, environment
from tests.servers import jetstream, postgres

from bsfg.batch import FactBatch
from bsfg.canonical import canonicalize
from bsfg.cli.bench import measure, servers
from bsfg.cli.bench.store import aims_of
from bsfg.cli.bench.workload import OBJECT_BYTES, batch_of, batches_of
from bsfg.cli.doctor.machine import file_system

PLOT = Path(__file__).parents[2] / "benchmarks" / "plot.py"

NUMBERS = {
    "sha256_per_second",
    "append_per_second",
    "put_if_absent_per_second",
    "duplicates_per_second",
    "replay_per_second",
    "single_append_ms_p50",
    "single_append_ms_p99",
    "fdatasync_ms_p50",
    "concurrent_append_per_second",
    "reopen_seconds",
    "reopen_trickled_seconds",
    "bytes_per_trickled_fact",
    "index_bytes_per_key",
    "append_ratio",
    "put_if_absent_ratio",
    "duplicates_ratio",
    "replay_ratio",
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the benchmark small, and give the folder that it may use."""
    monkeypatch.setattr(measure, "SINGLES", 12)
    monkeypatch.setattr(measure, "CALLERS", 4)
    monkeypatch.setattr(measure, "FACTS_PER_CALLER", 3)
    monkeypatch.setattr(measure, "YARDSTICK_FACTS", 2_000)
    monkeypatch.setattr(measure, "MILLION", 4_000)
    monkeypatch.setattr(measure, "ACKNOWLEDGED_BATCHES", 3)
    monkeypatch.setattr(measure, "TRICKLED_FACTS", 2_001)
    place = tmp_path / "disk"
    place.mkdir()
    return place


def test_all_numbers_come_from_one_run(quick: Run, small: Path) -> None:
    """The JSON has every number under its stable name, all of them positive, and the folder is gone."""
    outcome = quick("bench", "store", "--facts", "9001", "--dir", small, "--json")
    assert outcome.code == 0
    numbers = outcome.json()
    assert numbers.keys() >= NUMBERS
    assert all(numbers[name] > 0 for name in NUMBERS)
    assert len(numbers["append_per_second_by_million"]) == 3
    assert {aim["name"] for aim in numbers["aims"]} >= {"append_ratio", "reopen_seconds", "index_bytes_per_key"}
    assert numbers["machine"]["file_system"] == file_system(small)
    assert list(small.iterdir()) == []


def test_the_table(quick: Run, small: Path) -> None:
    """Without --json a table holds the measurements against the aims."""
    outcome = quick("bench", "store", "--facts", "2000", "--dir", small)
    assert outcome.code == 0
    for text in ("append_ratio", "≥ 0.2 of SHA-256", "single_append_ms_p50", "reopen_seconds", "≤ 5 s", "2,000 facts"):
        assert text in outcome.out, text


def test_the_picture_shows_every_aim(quick: Run, small: Path, tmp_path: Path) -> None:
    """`benchmarks/plot.py` draws what --json printed: a bar for each aim and for each million, and text stays text."""
    numbers = quick("bench", "store", "--facts", "9001", "--dir", small, "--json").json()
    numbers["aims"][0]["name"] = "<b> & co"
    (tmp_path / "bench.json").write_bytes(orjson.dumps(numbers))
    command = [sys.executable, str(PLOT), "bench.json", "bench.svg"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    root = ElementTree.parse(tmp_path / "bench.svg").getroot()
    shown = [node.text for node in root if node.tag.endswith("text")]
    assert {aim["name"] for aim in numbers["aims"]} | {"append, million 3"} <= set(shown)
    assert sum(node.tag.endswith("rect") for node in root) == 1 + len(numbers["aims"]) + 3


def test_what_cannot_be_written_is_said_first(bsfg: Run) -> None:
    """A folder that cannot be written is an error before anything is measured."""
    outcome = bsfg("bench", "store", "--dir", "no")
    assert outcome.code == 1
    assert outcome.err.startswith("error[invalid_argument]: ")


def test_a_wrong_answer_is_not_measured(quick: Run, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When facts are not stored as they should be, the benchmark fails instead of printing a speed."""
    monkeypatch.setattr(measure, "batch_of", lambda first, count=2_000: batch_of(first + 10**9, count))
    outcome = quick("bench", "store", "--facts", "2000", "--dir", small, "--json")
    assert outcome.code == 1
    assert outcome.json()["code"] == "storage_failed"
    assert list(small.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_it_cleans_up_when_it_is_stopped(tmp_path: Path, number: int, code: int) -> None:
    """Ctrl-C and SIGTERM end the benchmark without a word and without a file left behind."""
    # The folder is there only once everything is imported and the signal is taken care of.
    command = [sys.executable, "-m", "bsfg", "bench", "store", "--facts", "50000000", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        while not list(tmp_path.rglob("*.seg")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.communicate(timeout=60) == (b"", b"")
    finally:
        process.kill()
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_facts_are_as_promised() -> None:
    """Facts are unique, their objects are canonical JSON of 200 bytes, and a number always gives the same fact."""
    facts = FactBatch.concat(list(batches_of(7, 4_500)))
    assert len(facts) == 4_500
    objects = facts.values("object")
    assert {len(data) for data in objects} == {OBJECT_BYTES}
    assert all(canonicalize(data) == data for data in objects[:50])
    assert len(set(objects)) == len(set(facts.values("message_id"))) == 4_500
    assert [orjson.loads(data)["sequence"] - 10**15 for data in objects] == list(range(7, 4_507))
    assert batch_of(2_007, 10).to_messages() == facts.slice(2_000, 10).to_messages()


def test_aims_know_their_direction() -> None:
    """A rate must reach its aim, a time or a size must not exceed it."""
    numbers: dict[str, Any] = {
        "append_ratio": 0.2,
        "put_if_absent_ratio": 0.19,
        "duplicates_ratio": 0.5,
        "replay_ratio": 0.9,
        "single_append_ms_p50": 2.0,
        "single_append_limit_ms": 2.0,
        "reopen_seconds": 5.1,
        "reopen_trickled_seconds": 2.0,
        "bytes_per_trickled_fact": 501.0,
        "index_bytes_per_key": 20.0,
        "last_to_first_million_ratio": 0.6,
    }
    missed = [aim.name for aim in aims_of(numbers) if not aim.met]
    bytes_, million = "bytes_per_trickled_fact", "last_to_first_million_ratio"
    assert missed == ["put_if_absent_ratio", "replay_ratio", "reopen_seconds", bytes_, million]


def test_a_database_is_measured_against_itself(quick: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rates and both latencies come from one run, and nothing of it is left in the server."""
    monkeypatch.setattr(servers, "SINGLES", 5)
    asked = ("bench", "store", "--backend", "postgres", "--dsn", postgres().dsn, "--facts", "4000", "--json")
    numbers = orjson.loads(quick(*asked).out)
    assert numbers["append_ratio"] == pytest.approx(
        numbers["append_per_second"] / numbers["direct_per_second"], rel=0.01
    )
    assert numbers["single_append_ms_p50"] > 0 and numbers["direct_single_ms_p50"] > 0
    assert {aim["name"] for aim in numbers["aims"]} == {"append_per_second", "append_ratio", "single_append_ratio"}
    assert postgres().execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'bsfg_bench%'") == []


def test_jetstream_is_measured_against_itself(quick: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rates and both latencies come from one run, and nothing of it is left in the server."""
    monkeypatch.setattr(servers, "SINGLES", 5)
    asked = ("bench", "store", "--backend", "jetstream", "--dsn", jetstream().url, "--facts", "4000", "--json")
    numbers = orjson.loads(quick(*asked).out)
    assert numbers["append_per_second"] > 0 and numbers["direct_per_second"] > 0
    assert numbers["single_append_ms_p50"] > 0 and numbers["direct_single_ms_p50"] > 0

    async def left() -> list[str]:
        client = await nats.connect(jetstream().url)
        found = orjson.loads((await client.request("$JS.API.STREAM.NAMES", b"{}")).data)["streams"] or []
        await client.close()
        return [name for name in found if name.startswith("bsfg_bench")]

    assert asyncio.run(left()) == []


@pytest.mark.parametrize("more", [("--backend", "shelf"), ("--dsn", "host=db")])
def test_what_cannot_be_measured_is_refused(quick: Run, more: tuple[str, ...]) -> None:
    """Another storage, and a server without its storage, are no benchmark."""
    outcome = quick("bench", "store", *more)
    assert outcome.code == 1 and "invalid_argument" in outcome.err
