"""The folders of runs: each has its own, the living are left alone, the dead are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from bsfg.cli.pipeline.running import LOCK, RUNS, run_folder

HOLDS = """
import sys, time
from pathlib import Path
from bsfg.cli.pipeline.running import run_folder
with run_folder(Path(sys.argv[1])) as folder:
    (folder / "plan").write_text("mine")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_run_leaves_others_alone_until_they_are_dead(tmp_path: Path) -> None:
    """While a run lives another one with the same work folder touches nothing of it; after a SIGKILL it is removed."""
    first = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE)
    assert first.stdout is not None
    try:
        its = Path(first.stdout.readline().decode().strip())
        with run_folder(tmp_path) as ours:
            assert ours != its
            assert (its / "plan").read_text() == "mine"
        assert not ours.exists()
        assert its.exists()
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        first.stdout.close()
    assert its.exists(), "nobody was there to remove it"
    with run_folder(tmp_path):
        assert not its.exists()


def test_a_folder_that_was_never_locked_is_removed(tmp_path: Path) -> None:
    """A run that died between making its folder and locking it leaves nothing for good; files beside it stay."""
    runs = tmp_path / RUNS
    (runs / "1-dead").mkdir(parents=True)
    (runs / "note").write_text("kept")
    with run_folder(tmp_path) as ours:
        assert {each.name for each in runs.iterdir()} == {LOCK, "note", ours.name}
