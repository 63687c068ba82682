"""`bsfg demo storage`: it proves what it says, notices when that is not so, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Run, environment
from tests.cli.test_verify import WITHOUT_THE_RIGHTS_OF_ROOT

from bsfg.cli.demo.storage import referee
from bsfg.cli.demo.storage.script import message_id
from bsfg.stores.log.reader import open_folder

PRODUCERS, FACTS = 2, 150
SMALL = ("--producers", str(PRODUCERS), "--facts", str(PRODUCERS * FACTS))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the data folder of a small demo; do not change it."""
    folder = tmp_path_factory.mktemp("demo") / "kept"
    command = [sys.executable, "-m", "bsfg", "demo", "storage", *SMALL, "--kills", "1", "--keep", str(folder)]
    subprocess.run(command, env=environment(), capture_output=True, check=True, timeout=120)
    return folder


def test_nothing_is_lost_or_doubled(bsfg: Run, tmp_path: Path) -> None:
    """With the writer killed twice every fact is there once, as JSON and in a table; the temporary folder is gone."""
    place = tmp_path / "temporary"
    place.mkdir()
    outcome = bsfg("demo", "storage", *SMALL, "--kills", "2", "--json", env={"TMPDIR": str(place)})
    assert (outcome.code, outcome.err) == (0, "")
    result = outcome.json()
    assert result["ok"] is True
    assert result["sent"] == result["acknowledged"] == result["stored"] == PRODUCERS * FACTS
    assert (result["lost"], result["twice"], result["altered"]) == (0, 0, 0)
    assert (result["kills"], result["chain_verified"], result["problems"]) == (2, True, [])
    assert result["longest_append_ms"] > 0
    assert list(place.iterdir()) == []


def test_the_story_is_told(bsfg: Run, tmp_path: Path) -> None:
    """Without a terminal the story is told line by line, and ends with the count; it can be kept and looked at."""
    outcome = bsfg("demo", "storage", *SMALL, "--kills", "1", "--keep", "kept")
    assert (outcome.code, outcome.err) == (0, "")
    assert "killed (SIGKILL)" in outcome.out
    assert "read without a writer" in outcome.out
    assert "Nothing acknowledged was lost, and nothing is there twice." in outcome.out
    assert bsfg("verify", tmp_path / "kept").code == 0


def test_a_folder_in_use_is_not_touched(quick: Run, data: Path) -> None:
    """The demo refuses to write into a folder that has something in it."""
    before = sorted(path.name for path in data.iterdir())
    outcome = quick("demo", "storage", "--keep", data)
    assert outcome.code == 1
    assert outcome.err.startswith("error[file_exists]: ")
    assert sorted(path.name for path in data.iterdir()) == before


def test_a_writer_that_cannot_start_is_reported(bsfg: Run, tmp_path: Path) -> None:
    """When the folder cannot be written the demo ends with the reason, not with a hanging producer."""
    place = tmp_path / "sealed"
    place.mkdir()
    place.chmod(0o555)
    outcome = bsfg("demo", "storage", *SMALL, "--keep", place, launcher=WITHOUT_THE_RIGHTS_OF_ROOT)
    assert outcome.code == 1
    assert outcome.err.startswith("error[storage_failed]: the writer did not start: ")
    assert "StorageReadOnly" in outcome.err


def processes_with(text: str) -> list[int]:
    """List the processes that have a text in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(int(entry.name))
    return found


def started(place: Path) -> subprocess.Popen[str]:
    """Start a long demo and wait until its writer is at work."""
    place.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "bsfg", "demo", "storage", "--facts", "10000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(place), PYTHONUNBUFFERED="1"),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "opened the folder" in line:
            return process
    raise AssertionError(process.communicate())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_it_cleans_up_when_it_is_stopped(tmp_path: Path, number: int, code: int) -> None:
    """Ctrl-C and SIGTERM end the demo without a word, without a process and without a file left behind."""
    place = tmp_path / "temporary"
    process = started(place)
    process.send_signal(number)
    _, words = process.communicate(timeout=60)
    assert (process.returncode, words) == (code, "")
    assert list(place.iterdir()) == []
    assert processes_with(str(place)) == []


def test_no_process_outlives_a_killed_demo(tmp_path: Path) -> None:
    """When the demo itself is killed its writer and its producers end by themselves."""
    place = tmp_path / "temporary"
    process = started(place)
    others = [os.pidfd_open(pid) for pid in processes_with(str(place))]
    assert others
    process.kill()
    process.communicate(timeout=60)
    for other in others:
        assert select.select([other], [], [], 60)[0], "it is still running"
        os.close(other)


def acknowledged(folder: Path) -> dict[str, int]:
    """Give what producers were told, as the folder has it."""
    return dict(referee.read(folder).places)


def test_the_referee_is_content_with_a_good_folder(kept: Path) -> None:
    """What was acknowledged and what is stored agree."""
    verdict = referee.judge(kept, acknowledged(kept), PRODUCERS, FACTS)
    assert verdict.ok
    assert (verdict.sent, verdict.stored, verdict.lost, verdict.twice) == (PRODUCERS * FACTS, PRODUCERS * FACTS, 0, 0)


def test_the_referee_notices_a_loss(kept: Path) -> None:
    """A fact that was acknowledged at an offset where it is not is lost."""
    told = acknowledged(kept)
    told[message_id(1, 5)] += 1
    verdict = referee.judge(kept, told, PRODUCERS, FACTS)
    assert (verdict.ok, verdict.lost) == (False, 1)


def test_the_referee_notices_who_was_never_answered(kept: Path) -> None:
    """A fact that was sent and never acknowledged spoils the proof."""
    told = acknowledged(kept)
    del told[message_id(2, 7)]
    verdict = referee.judge(kept, told, PRODUCERS, FACTS)
    assert (verdict.ok, verdict.never_acknowledged, verdict.lost) == (False, 1, 0)


def test_the_referee_notices_strangers_and_changes(kept: Path) -> None:
    """Facts that nobody planned, or with other bytes, count as altered."""
    verdict = referee.judge(kept, acknowledged(kept), PRODUCERS, FACTS - 1)
    assert (verdict.ok, verdict.altered) == (False, PRODUCERS)


def test_the_referee_notices_what_is_there_twice(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a reader meets twice is counted."""
    logs = open_folder(kept)
    monkeypatch.setattr(referee, "open_folder", lambda folder: [*logs, *logs])
    verdict = referee.judge(kept, acknowledged(kept), PRODUCERS, FACTS)
    assert (verdict.ok, verdict.twice) == (False, PRODUCERS * FACTS)


def test_a_broken_promise_is_exit_code_1(quick: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the referee finds a loss the exit code is 1 and the seed to repeat it is named."""
    real = referee.judge

    def unlucky(folder: Path, told: dict[str, int], producers: int, facts: int) -> referee.Verdict:
        return real(folder, {id_: offset + 1 for id_, offset in told.items()}, producers, facts)

    monkeypatch.setattr(referee, "judge", unlucky)
    outcome = quick("demo", "storage", "--producers", "1", "--facts", "20", "--kills", "0", "--seed", "11")
    assert outcome.code == 1
    assert "--seed 11" in outcome.out
