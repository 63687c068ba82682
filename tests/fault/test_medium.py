"""A medium that fails under the log is an error with a code, never a fault of memory that ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

READ = """
data = files.read("some")
os.truncate(folder + "/some", 0)
assert bytes(data) == bytes(range(256)) * 256
"""
SLOT = """
slot = files.slot("some", 36)
os.truncate(folder + "/some", 0)
slot.store(b"x" * 36)
assert files.read_at("some", 0, 40) == b"x" * 36
"""
RUN = """
from bsfg.stores.log.indexstore import IndexStore
hashes = np.sort(np.random.default_rng(1).integers(0, 2**64, size=4096, dtype=np.uint64))
store = IndexStore(files, ".", b"o" * 16, 0, 1024)
store.add(hashes, np.arange(4096), 4096, bytes(32))
[name] = files.list("index")
os.truncate(folder + "/index/" + name, 0)
try:
    store.keys.candidates(hashes)
except OSError as error:
    assert "ends before" in str(error)
else:
    raise AssertionError("an empty file answered")
"""
PRELUDE = """
import os, sys
import numpy as np
from bsfg.stores.log.files import DiskFiles
folder = sys.argv[1]
files = DiskFiles(folder)
"""


@pytest.mark.parametrize("work", [READ, SLOT, RUN], ids=["read", "slot", "index run"])
def test_a_file_that_shrinks_under_a_process_does_not_end_it(tmp_path: Path, work: str) -> None:
    """Bytes that vanish after a file was opened, as bad sectors do, never become SIGBUS."""
    (tmp_path / "some").write_bytes(bytes(range(256)) * 256)
    command = [sys.executable, "-c", PRELUDE + work, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
