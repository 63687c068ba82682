"""Whatever is done to the files of a folder, the command line answers with findings or an error, never a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from bsfg.cli import main


def harm(path: Path, random: Random) -> str:
    """Do something to one file, and say what."""
    data = path.read_bytes()
    place = random.randrange(len(data) + 1)
    kind = random.choice(["empty", "delete", "flip", "cut", "junk", "append", "folder", "zeros"])
    if kind == "delete":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        changed = {
            "empty": b"",
            "flip": data[:place]
            + bytes([byte ^ (1 << random.randrange(8)) for byte in data[place : place + 1]])
            + data[place + 1 :],
            "cut": data[:place],
            "junk": random.randbytes(random.randrange(3_000)),
            "append": data + random.randbytes(random.randrange(300)),
            "zeros": data[:place] + bytes(min(512, len(data) - place)) + data[place + 512 :],
        }
        path.write_bytes(changed[kind])
    return f"{kind} {path.name}"


@pytest.mark.soak
def test_no_damage_leads_to_a_traceback(
    pattern: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], soak_size: Callable[[int, int], int]
) -> None:
    """One or two files of a sound folder are emptied, cut, filled with junk or removed, over and over."""
    for seed in range(soak_size(60, 20_000)):
        random = Random(seed)
        folder = tmp_path / "data"
        shutil.copytree(pattern, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        done = [harm(path, random) for path in random.sample(files, random.choice([1, 1, 2]))]
        for args in (["verify"], ["inspect"], ["inspect", "--stream", "operational", "--buffer", "store", "--export"]):
            code = main([args[0], str(folder), *args[1:]])
            words = capfdbinary.readouterr().err
            assert code in (0, 1), (seed, done, args, words)
            assert b"error[internal]" not in words, (seed, done, args, words)
        shutil.rmtree(folder)
