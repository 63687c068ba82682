"""`bsfg salvage`: what it prints, its exit codes, and its refusals."""

from __future__ import annotations

from pathlib import Path

from tests.cli import folders
from tests.cli.conftest import Run


def test_a_sound_folder(quick: Run, data: Path, tmp_path: Path) -> None:
    """Everything is saved: exit code 0, a row for each log, and what comes next."""
    outcome = quick("salvage", data, tmp_path / "saved")
    assert (outcome.code, outcome.err) == (0, "")
    assert "operational/store" in outcome.out
    assert "complete: 1,650 facts, 3 consumers, " in outcome.out
    assert f"0 artifacts of {data} in {tmp_path / 'saved'}\n" in outcome.out
    assert "bsfg gate" in outcome.out
    assert quick("verify", tmp_path / "saved").code == 0


def test_a_damaged_folder(quick: Run, data: Path, tmp_path: Path) -> None:
    """What is missing is named with file, byte and entries, the exit code is 1, and the folder is there."""
    folders.flipped_bit(data)
    outcome = quick("salvage", data, tmp_path / "saved", "--json")
    report = outcome.json()
    assert (outcome.code, report["complete"]) == (1, False)
    [missing] = report["missing"]
    assert "at byte" in missing["detail"]
    assert missing["last"] - missing["first"] + 1 == folders.PER_BATCH
    assert sum(log["lost"] for log in report["logs"]) == folders.PER_BATCH
    assert (tmp_path / "saved" / "bsfg.json").is_file()


def test_refusals(quick: Run, data: Path, tmp_path: Path) -> None:
    """A target that is not empty and a folder that is none are refused with a code and a hint."""
    outcome = quick("salvage", data, data.parent)
    assert outcome.code == 1
    assert "file_exists" in outcome.err
    outcome = quick("salvage", tmp_path / "nowhere", tmp_path / "saved")
    assert "not_a_data_folder" in outcome.err
