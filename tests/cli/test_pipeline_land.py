"""`bsfg pipeline land` as a user runs it: what it tells, and mistakes that are told before Spark is started."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import orjson
import pandas
import pytest
from tests.cli.conftest import Run, environment
from tests.cli.operating.test_guide import resolved
from tests.e2e.cleanup import Cleanup
from tests.spark.nodes import SparkZone, facts, zone_pair

from bsfg.cli.pipeline.running import WorkProgress
from bsfg.spark.land.state import EVERY_SECONDS, FILE_SIZE_BYTES, MAX_FACTS_PER_BATCH

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "landing.md").read_text(encoding="utf-8")


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> SparkZone:
    """Give a plant that runs, with facts."""
    plant, _ = zone_pair(tmp_path)
    cleanup.zone(plant)
    plant.start()
    plant.produce(facts(50))
    return plant


@pytest.fixture
def cleanup() -> object:
    """Give what ends nodes behind a test."""
    cleanup = Cleanup()
    yield cleanup
    cleanup.run()


def node(plant: SparkZone) -> list[str]:
    """Give the options that name a node."""
    given = plant.options()
    named = [part for name in ("address", "ca", "cert", "key") for part in (f"--{name}", given[name])]
    return [*named, "--server-name", given["serverName"]]


def land(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "bsfg", "pipeline", "land", *map(str, args), "--master", "local[1]"]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment())


@pytest.mark.campaign
def test_it_lands_once_and_says_so(plant: SparkZone, tmp_path: Path) -> None:
    """The first run lands, the second finds nothing to do without Spark, and the folder is as any reader wants it."""
    out = tmp_path / "lake"
    plant.create_consumer("app-lake")
    done = land("--stream", "operational", "--out", out, "--once", "--consumer", "app-lake", "--json", *node(plant))
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)
    assert (found["facts"], found["next"], found["backlog"], found["missing"]) == (50, 50, 0, 0)
    assert (found["out"], found["files"]) == (str(out), 1)
    assert len(pandas.read_parquet(out)) == 50
    assert plant.committed("app-lake") == 49
    again = land("--stream", "operational", "--out", out, "--once", *node(plant), "--conf", "spark.master=nonsense")
    assert (again.returncode, again.stdout) == (0, f"Landed 0 facts in {out}, up to offset 50.\n")
    assert again.stderr == ""
    merged = land("--out", out, "--compact-only")
    assert (merged.returncode, merged.stdout) == (0, "Merged 0 small files into 0.\n")


def test_mistakes_are_told_before_spark_starts(quick: Run, plant: SparkZone, tmp_path: Path) -> None:
    """Each wrong option is named, with what to do about it, and nothing is written."""
    out, there = tmp_path / "lake", node(plant)
    cases: list[tuple[list[str | Path], str]] = [
        (["--out", out], "which stream is not said"),
        (["--out", out, "--stream", "UPPER"], "is not a name"),
        (["--out", out, "--stream", "nope"], "there is no stream 'nope'"),
        (["--out", out, "--stream", "operational", "--by", "now"], "There are produced_at and appended_at."),
        (["--out", out, "--stream", "operational", "--format", "iceberg"], "There are parquet and delta."),
        (["--out", out, "--stream", "operational", "--partition-by", "date,x"], "'x' is nothing that facts have"),
        (["--out", out, "--stream", "operational", "--partition-by", "date,date"], "each once"),
        (["--out", out, "--stream", "operational", "--columns", "value"], "'value', which is no column"),
        (["--out", out, "--stream", "operational", "--columns", "@nowhere"], "--columns @nowhere cannot be read"),
        (["--out", out, "--stream", "operational", "--from", "now"], "must be earliest, latest, an offset or a time"),
        (["--out", out, "--stream", "operational", "--file-size", "big"], "--file-size must be a size"),
        (["--out", out, "--stream", "operational", "--conf", "x"], "is not of the form spark.name=value"),
        (["--out", out, "--stream", "operational", "--consumer", "app-none"], "app-none"),
        (["--out", "s3://bucket/lake", "--stream", "operational"], "is not a folder"),
        (["--out", plant.folder, "--stream", "operational"], "is not empty and was not made by landing"),
    ]
    for args, says in cases:
        outcome = quick("pipeline", "land", *args, *there, "--once")
        assert outcome.code == 1, args
        assert says in outcome.err, outcome.err
        assert "hint:" in outcome.err
    assert not list(out.rglob("*.parquet"))
    alone = quick("pipeline", "land", "--out", tmp_path / "none", "--compact-only")
    assert (alone.code, (tmp_path / "none").exists()) == (1, False)
    assert "nothing was landed in" in alone.err


def test_a_node_that_is_not_there_is_told(quick: Run, tmp_path: Path) -> None:
    """Without a node's address the command says how to give one."""
    outcome = quick("pipeline", "land", "--out", tmp_path / "lake", "--stream", "operational")
    assert outcome.code == 1
    assert "which node is not said" in outcome.err


def test_the_help_teaches(quick: Run) -> None:
    """The help names every option, the defaults of the job, and examples."""
    outcome = quick("pipeline", "land", "--help", env={"COLUMNS": "160"})
    assert outcome.code == 0
    for text in (
        "--compact-only",
        "--latest",
        "--vacuum-hours",
        "--every",
        "--from",
        "_gaps.jsonl",
        "pandas.read_parquet",
        "--master",
        "--identity",
    ):
        assert text in outcome.out
    assert f"[default: {EVERY_SECONDS}]" in outcome.out
    assert f"[default: {MAX_FACTS_PER_BATCH}]" in outcome.out
    assert f"[default: {FILE_SIZE_BYTES // 1_000_000}MB]" in outcome.out


@pytest.mark.parametrize(
    "line", re.findall(r"^bsfg [^#\n]*", "\n".join(re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)), re.MULTILINE)
)
def test_what_the_guide_types_exists(line: str) -> None:
    """Every command of the guide is one, with options that it has."""
    command, words = resolved(shlex.split(line)[1:])
    known = {option for param in command.params for option in param.opts + param.secondary_opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_progress_tells_rate_and_time_left() -> None:
    """The rate is that of the last seconds, and gives the time that the backlog will take."""
    now = [0.0]
    progress = WorkProgress("landed", lambda: now[0])
    assert progress.text(0, 0) == "0 facts landed · nothing waiting"
    now[0] = 10.0
    assert progress.text(50_000, 600_000) == "50,000 facts landed · 5,000/s · 600,000 waiting · 2:00 left"
    now[0] = 30.0
    assert progress.text(50_000, 1_000) == "50,000 facts landed · 1,000 waiting"
    now[0] = 31.0
    assert progress.text(50_100, 10_000_000).endswith("27:46:40 left")
