"""`bsfg pipeline audit` as a user runs it: exit codes, JSON, the report, and mistakes on the command line."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import orjson
import pytest
from tests.spark.audit_worlds import FolderZone, copied, linked, rewrite, without
from tests.spark.test_without_java import path_without_java

from bsfg.cli.app import run
from bsfg.ports import Buffer
from bsfg.spark.audit.runner import LocalRunner

FACTS = 400


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folders of two zones that agree, and of a receiver that lacks a fact."""
    root = tmp_path_factory.mktemp("audit")

    async def work() -> None:
        plant, enterprise = FolderZone("plant-a", root), FolderZone("enterprise", root)
        inbound = await linked(plant, enterprise)
        await plant.say(FACTS)
        await inbound.pull_all()
        for zone in (plant, enterprise):
            await zone.restart()

    asyncio.run(work())
    rewrite(copied(root / "enterprise", root / "harmed"), Buffer.FORWARD, lambda rows: without(rows, 123))
    return root


@pytest.fixture
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the command run its steps in this process, which shows what it prints as well as Spark does."""
    monkeypatch.setattr("bsfg.cli.pipeline.audit.spark_session", lambda *given, **options: nullcontext())
    monkeypatch.setattr("bsfg.spark.audit.SparkRunner", lambda spark, progress: LocalRunner())


@pytest.mark.campaign
def test_harm_is_found_by_the_command_on_spark(folders: Path, tmp_path: Path) -> None:
    """The verdict is JSON on stdout and nothing else, the report is written, and the exit code is 1."""
    page = tmp_path / "audit.html"
    args = ["--sender", folders / "plant-a", "--receiver", folders / "harmed", "--json", "--report", page]
    command = [sys.executable, "-m", "bsfg.cli", "pipeline", "audit", *map(str, args), "--master", "local[1]"]
    done = subprocess.run(command, capture_output=True, timeout=280, check=False)
    assert done.returncode == 1, done.stderr[-2000:]
    assert done.stderr == b"", "Java and Spark have nothing to say to a person"
    verdict = orjson.loads(done.stdout)
    assert not verdict["clean"] and verdict["counts"]["missing"] == 1
    [finding] = [each for each in verdict["streams"][0]["findings"] if each["kind"] == "missing"]
    assert (finding["offset"], finding["from_zone"], finding["message_id"]) == (123, "plant-a", "0-000123")
    assert "0-000123" in page.read_text(encoding="utf-8") and "<svg" in page.read_text(encoding="utf-8")


@pytest.mark.campaign
@pytest.mark.long
def test_a_machine_without_java_hears_nothing_of_it(folders: Path, tmp_path: Path) -> None:
    """On the Java that the package brings, which warns of much, a command prints what it does and nothing else; where
    Spark does not start it says so in a sentence, and its hint names the file with the rest.

    The first is shown by test_the_whole_story_on_spark_without_java in tests/cli/test_demo.py, the second by
    tests/spark/test_aborts.py and tests/unit/test_spark_words.py.
    """
    hidden = {"PATH": str(path_without_java(tmp_path / "bin")), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    ends = ["--sender", folders / "plant-a", "--receiver", folders / "enterprise"]
    command = [sys.executable, "-m", "bsfg.cli", "pipeline", "audit", *map(str, ends), "--master", "local[1]"]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
    assert f"clean: {FACTS} facts" in done.stdout and "Java" not in done.stdout
    assert not list(tmp_path.glob("*.log")), "a file that nobody needs is removed"
    elsewhere = [*command[:-1], "nowhere[1]", "--allow-clear-rpc"]
    done = subprocess.run(elsewhere, env=hidden, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1 and done.stdout == ""
    said, hint = done.stderr.splitlines()
    assert said == "error[spark_failed]: Spark did not start with the master nowhere[1]. Java ended with exit code 1."
    [log] = tmp_path.glob("*.log")
    assert str(log) in hint and "Master" in log.read_text()


@pytest.mark.usefixtures("without_spark")
def test_ends_that_agree_exit_with_0(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code says that the ends agree, and the verdict what was compared and checked."""
    ends = ["--sender", str(folders / "plant-a"), "--receiver", str(folders / "enterprise")]
    assert run(["pipeline", "audit", *ends, "--json"]) == 0
    verdict = orjson.loads(capsys.readouterr().out)
    assert (verdict["clean"], verdict["facts"], verdict["counts"]) == (True, FACTS, {})
    assert verdict["sender_zone"] == "plant-a" and verdict["facts_per_second"] > 0
    [stream] = verdict["streams"]
    assert stream["clean"] and stream["compared"] == FACTS and stream["findings"] == []
    assert {check["state"] for check in stream["checks"]} == {"passed"}
    assert run(["pipeline", "audit", *ends]) == 0
    assert f"clean: {FACTS} facts, the same at both ends" in capsys.readouterr().out


@pytest.mark.usefixtures("without_spark")
def test_harm_is_named_to_people(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal names the fact, says what it means and what to do, and the exit code is 1."""
    ends = ["--sender", str(folders / "plant-a"), "--receiver", str(folders / "harmed")]
    assert run(["pipeline", "audit", *ends, "--json"]) == 1
    assert orjson.loads(capsys.readouterr().out)["counts"] == {"head_unknown": 1, "missing": 1}
    assert run(["pipeline", "audit", *ends]) == 1
    text = capsys.readouterr().out
    for words in ("missing", "123", "0-000123", "plant-a", "not clean", "Have the receiver read the range again"):
        assert words in text


@pytest.mark.usefixtures("without_spark")
def test_a_report_that_cannot_be_written_is_told(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report in a folder that is not there is an error of its own, not a finding."""
    ends = ["--sender", str(folders / "plant-a"), "--receiver", str(folders / "enterprise")]
    assert run(["pipeline", "audit", *ends, "--report", str(folders / "no" / "where.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "there is no configuration zone.toml"),
        (["--sender", "plant-a"], "there is no configuration zone.toml"),
        (["--sender", "nowhere", "--receiver", "enterprise"], "there is no folder nowhere"),
        (["--sender", "plant-a", "--receiver", "enterprise", "--from", "9", "--to", "3"], "9 to 3 is not a range"),
        (["--sender", "plant-a", "--receiver", "enterprise", "--stream", "x"], "has no stream 'x'"),
        (["--sender", "enterprise", "--receiver", "plant-a"], "no stream has a store buffer"),
        (["--sender", "plant-a", "--receiver", "enterprise", "--conf", "x"], "not of the form spark.name=value"),
    ],
)
def test_mistakes_are_told_before_spark_starts(
    folders: Path, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be meant is refused at once, in a sentence."""
    monkeypatch.chdir(folders)
    assert run(["pipeline", "audit", *args]) == 1
    assert words in capsys.readouterr().err
