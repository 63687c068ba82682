"""`bsfg verify` on sound and on damaged folders, beside a writer, and where it may not write."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli import folders
from tests.cli.conftest import Run, environment, launcher

from bsfg.cli.verify import ADVICE
from bsfg.stores.log import verify
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import batch

# Each way to harm a folder: the findings that count as problems, and those that are only notes.
HARMED = {
    "half a frame at the tail": (folders.half_a_frame, set(), {"torn_tail"}),
    "a flipped bit in the middle": (folders.flipped_bit, {"log_damaged"}, set()),
    "a missing segment": (folders.missing_segment, {"log_damaged", "chain_broken"}, set()),
    "a missing key segment": (folders.missing_key_segment, {"keys_missing"}, set()),
    "a damaged key segment": (folders.flipped_key_segment, {"keys_damaged"}, set()),
    "an index older than the log": (folders.older_index, set(), set()),
    "an index newer than the log": (folders.newer_index, set(), {"index_stale"}),
    "a damaged index": (folders.damaged_index, set(), {"index_stale"}),
    "a segment of another log": (folders.foreign_segment, {"foreign_log"}, set()),
    "the identity of another log": (folders.foreign_identity, {"foreign_log"}, set()),
    "a segment of a later format": (folders.future_segment, {"format_unsupported"}, set()),
    "damaged notes": (folders.damaged_notes, {"log_damaged"}, set()),
    "damaged cursors": (folders.damaged_cursors, {"log_damaged"}, set()),
}


def test_a_sound_folder(bsfg: Run, data: Path) -> None:
    """A sound folder is exit code 0, with a row for each log and nothing on stderr."""
    outcome = bsfg("verify", data)
    assert (outcome.code, outcome.err) == (0, "")
    assert "operational/store" in outcome.out
    assert "audit/forward" in outcome.out
    assert outcome.out.splitlines()[-1] == f"sound: 1,700 facts in 2 logs of {data}"


def test_a_sound_folder_as_json(quick: Run, data: Path) -> None:
    """As JSON every log has its id, its extent, its counts and the head of its chain."""
    report = quick("verify", data, "--json").json()
    assert (report["ok"], report["problems"], report["notes"]) == (True, [], [])
    log = next(log for log in report["logs"] if log["buffer"] == "store")
    assert (log["start"], log["end"]) == (folders.TRUNCATED, folders.FACTS)
    assert (log["facts"], log["segments"], log["key_segments"], log["index_runs"]) == (1400, 7, 3, 4)
    assert len(bytes.fromhex(log["chain_head"])) == 32


@pytest.mark.parametrize("harm", HARMED)
def test_a_harmed_folder(quick: Run, data: Path, harm: str) -> None:
    """What is harmed is named by code, place and range, and the exit code tells damage from what repairs itself."""
    break_it, problems, notes = HARMED[harm]
    break_it(data)
    outcome = quick("verify", data, "--json")
    report = outcome.json()
    assert {item["code"] for item in report["problems"]} == problems, report
    assert notes <= {item["code"] for item in report["notes"]}, report
    assert outcome.code == (1 if problems else 0)
    assert report["ok"] is not problems
    assert all(item["hint"] and item["detail"] and item["where"] for item in report["problems"] + report["notes"])
    shown = quick("verify", data)
    assert shown.code == outcome.code
    last = shown.out.splitlines()[-1]
    assert all(code in last for code in problems)
    assert last.startswith("not sound: " if problems else "sound: ")


def test_a_flipped_bit_is_placed(quick: Run, data: Path) -> None:
    """Damage in the middle is reported with the entries it covers, and no others."""
    folders.flipped_bit(data)
    [problem] = quick("verify", data, "--json").json()["problems"]
    assert (problem["last"] - problem["first"] + 1) == folders.PER_BATCH
    assert f"{folders.segments(data)[2].name} at byte " in problem["where"]


def test_damage_stays_known_after_the_writer_has_passed_it(quick: Run, data: Path) -> None:
    """A segment that was lost is still reported when the folder was opened and written again."""
    folders.missing_segment(data)
    asyncio.run(folders.append_more(data))
    outcome = quick("verify", data, "--json")
    assert outcome.code == 1
    assert {"entries_lost"} <= {item["code"] for item in outcome.json()["problems"]}


def test_a_retired_consumer_explains_no_loss(quick: Run, data: Path) -> None:
    """Its gap records tell who has not confirmed what is there; entries that are gone are damage all the same."""

    async def retire() -> None:
        storage = await LogStorage.open(data, options=folders.OPTIONS)
        await storage.cursors.retire("enterprise", "closed")
        await storage.close()

    asyncio.run(retire())
    folders.segments(data)[-3].unlink()
    problems = quick("verify", data, "--json").json()["problems"]
    assert "log_damaged" in {item["code"] for item in problems}


def marked(path: Path, mark: str) -> None:
    """Make a folder with this mark."""
    path.mkdir()
    (path / "bsfg.json").write_text(mark)


NO_FOLDER: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a path that is not there": ("not_a_data_folder", lambda path: None),
    "an empty folder": ("not_a_data_folder", lambda path: path.mkdir()),
    "a file": ("not_a_data_folder", lambda path: path.write_text("hello")),
    "a folder of something else": ("not_a_data_folder", lambda path: (path / "sub").mkdir(parents=True)),
    "a damaged mark": ("not_a_data_folder", lambda path: marked(path, "{")),
    "a later format": (
        "format_unsupported",
        lambda path: marked(path, '{"format": 99, "hasher": "sha256"}'),
    ),
}


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize("case", NO_FOLDER)
def test_what_is_no_data_folder(quick: Run, tmp_path: Path, case: str, command: str) -> None:
    """Anything but a data folder is an error that names the path and says what to give instead."""
    code, prepare = NO_FOLDER[case]
    path = tmp_path / "place"
    prepare(path)
    outcome = quick(command, path)
    assert outcome.code == 1
    assert outcome.err.startswith(f"error[{code}]: ")
    assert "hint: " in outcome.err
    assert outcome.out == ""


def test_a_folder_nearby_is_suggested(quick: Run, data: Path) -> None:
    """Who gives the zone's folder or one inside the data folder is pointed to the data folder."""
    assert f"Did you mean {data}?" in quick("verify", data.parent).err
    assert f"Did you mean {data}?" in quick("verify", data / "streams" / "operational").err


def test_a_new_folder_is_sound(quick: Run, tmp_path: Path) -> None:
    """A data folder without any log is sound."""

    async def make() -> None:
        await (await LogStorage.open(tmp_path / "new")).close()

    asyncio.run(make())
    outcome = quick("verify", tmp_path / "new")
    assert (outcome.code, outcome.err) == (0, "")
    assert quick("inspect", tmp_path / "new").code == 0


def test_verify_beside_the_writer(bsfg: Run, data: Path) -> None:
    """While a writer holds the folder, verify and inspect read it, and inspect names the writer."""

    async def beside() -> None:
        storage = await LogStorage.open(data, options=folders.OPTIONS)
        store = await storage.store(folders.STREAM)
        await store.append(batch(10, seed=77))
        verified = await asyncio.to_thread(bsfg, "verify", data)
        assert verified.code == 0
        seen = (await asyncio.to_thread(bsfg, "inspect", data, "--json")).json()
        assert seen["writer_pid"] == os.getpid()
        assert next(log["end"] for log in seen["logs"] if log["buffer"] == "store") == folders.FACTS + 10
        await storage.close()

    asyncio.run(beside())
    assert bsfg("inspect", data, "--json").json()["writer_pid"] is None


WRITER = """
import asyncio, sys
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import batch

async def write(folder):
    store = await (await LogStorage.open(folder)).store("operational")
    number = 0
    while True:
        await store.append(batch(20, seed=31, first=number))
        number += 20
        print(number, flush=True)

asyncio.run(write(sys.argv[1]))
"""


def test_verify_after_the_writer_was_killed(bsfg: Run, data: Path) -> None:
    """A folder whose writer was killed in mid-stream is sound before anybody opens it again."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(data)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 400:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    report = bsfg("verify", data, "--json").json()
    assert report["ok"], report
    log = next(log for log in report["logs"] if log["buffer"] == "store")
    assert log["end"] >= folders.FACTS + 400


WITHOUT_THE_RIGHTS_OF_ROOT = launcher(
    "[ctypes.CDLL(None).prctl(24, each, 0, 0, 0) for each in (1, 2) if os.geteuid() == 0]"
)
"""Lets permissions count even for root: it gives up the rights to write and to read whatever they say."""


def set_modes(folder: Path, of_folders: int, of_files: int) -> None:
    """Set the permissions of a whole tree."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(of_folders if path.is_dir() else of_files)


OPENER = """
import asyncio, sys
from bsfg.errors import BsfgError
from bsfg.stores.log.storage import LogStorage
try:
    asyncio.run(LogStorage.open(sys.argv[1]))
except BsfgError as error:
    print(error.code)
"""


def test_a_folder_that_may_only_be_read(bsfg: Run, data: Path) -> None:
    """In a read-only folder verify and inspect work, and a writer is told what is wrong."""
    set_modes(data, 0o555, 0o444)
    try:
        for command in ("verify", "inspect"):
            outcome = bsfg(command, data, launcher=WITHOUT_THE_RIGHTS_OF_ROOT)
            assert (outcome.code, outcome.err) == (0, "")
        opened = subprocess.run(
            [*WITHOUT_THE_RIGHTS_OF_ROOT, sys.executable, "-c", OPENER, str(data)],
            capture_output=True,
            text=True,
            env=environment(),
            check=True,
        )
        assert opened.stdout == "storage_read_only\n"
    finally:
        set_modes(data, 0o755, 0o644)


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_folder_that_may_not_be_read(bsfg: Run, data: Path, command: str) -> None:
    """A folder without the right to read is an error with a hint; one unreadable file is a finding."""
    segment = folders.segments(data)[2]
    segment.chmod(0)
    outcome = bsfg(command, data, launcher=WITHOUT_THE_RIGHTS_OF_ROOT)
    assert outcome.code == 1
    assert "storage_unreadable" in outcome.out + outcome.err
    data.chmod(0)
    try:
        outcome = bsfg(command, data, launcher=WITHOUT_THE_RIGHTS_OF_ROOT)
        assert outcome.code == 1
        assert outcome.err.startswith("error[storage_unreadable]: ")
        assert "writable" not in outcome.err
    finally:
        data.chmod(0o755)


def test_a_second_writer_is_told_who_writes(data: Path) -> None:
    """A process that opens a folder which another one writes gets `folder_locked`."""

    async def beside() -> str:
        storage = await LogStorage.open(data)
        command = [sys.executable, "-c", OPENER, str(data)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        await storage.close()
        return str(done.stdout)

    assert asyncio.run(beside()) == "folder_locked\n"


def test_a_copied_folder_is_sound(quick: Run, data: Path, tmp_path: Path) -> None:
    """A folder copied elsewhere while nobody writes verifies as the first does."""
    shutil.copytree(data, tmp_path / "copy")
    assert quick("verify", tmp_path / "copy").code == 0


def test_every_finding_has_advice() -> None:
    """Every code that verify can give has a sentence about what to do."""
    source = Path(verify.__file__).read_text(encoding="utf-8")
    codes = {
        part.split('"')[1] for part in source.split("_problem(")[1:] + source.split("_note(")[1:] if '"' in part[:40]
    }
    assert {code for code in codes if code.isidentifier()} <= ADVICE.keys()
