"""`bsfg bench store`: what it measures, what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import orjson
import pytest
from tests.cli.conftest import Run, environment

from bsfg.batch import FactBatch
from bsfg.canonical import canonicalize
from bsfg.cli.bench import measure, reopen
from bsfg.cli.bench.results import aims_of, file_system
from bsfg.cli.bench.workload import OBJECT_BYTES, batch_of, batches_of
from bsfg.cli.canvas import PngCanvas, SvgCanvas

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
    monkeypatch.setattr(reopen, "ACKNOWLEDGED_BATCHES", 3)
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


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_table_and_the_picture(quick: Run, small: Path, suffix: str) -> None:
    """Without --json a table holds the measurements against the aims, and --plot draws them."""
    picture = small.parent / f"bench.{suffix}"
    outcome = quick("bench", "store", "--facts", "2000", "--dir", small, "--plot", picture)
    assert outcome.code == 0
    for text in ("append_ratio", "≥ 0.2 of SHA-256", "single_append_ms_p50", "reopen_seconds", "≤ 5 s", "2,000 facts"):
        assert text in outcome.out, text
    data = picture.read_bytes()
    if suffix == "svg":
        assert ElementTree.fromstring(data).tag.endswith("svg")
    else:
        assert pixels_of(data).shape == (840, 1920, 3)


@pytest.mark.parametrize(("option", "value"), [("--plot", "bench.jpg"), ("--plot", "no/folder/b.svg"), ("--dir", "no")])
def test_what_cannot_be_written_is_said_first(bsfg: Run, option: str, value: str) -> None:
    """A picture or a folder that cannot be written is an error before anything is measured."""
    outcome = bsfg("bench", "store", option, value)
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


def pixels_of(data: bytes) -> np.ndarray:
    """Decode a PNG of the simple kind that we write, checking every checksum."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, 1 + 3 * width)
    return lines[:, 1:].reshape(height, width, 3)


def test_png_has_what_was_drawn() -> None:
    """Boxes, lines and letters are where they were put, two pixels to a unit."""
    canvas = PngCanvas(40, 20)
    canvas.box((5, 5), (10, 4), "#ff0000")
    canvas.line([(20, 10), (30, 10)], "#0000ff")
    canvas.text((2, 19), "I", colour="#00ff00")
    pixels = pixels_of(canvas.encoded())
    assert (pixels[10:18, 10:30] == (255, 0, 0)).all()
    assert (pixels[20, 40:60] == (0, 0, 255)).all()
    assert (pixels == (0, 255, 0)).all(axis=2).sum() == 4 * 11
    assert tuple(pixels[0, 0]) == (255, 255, 255)


def test_svg_escapes_text() -> None:
    """Text with angle brackets stays text."""
    canvas = SvgCanvas(10, 10)
    canvas.text((0, 5), "<b> & co")
    [text] = [node for node in ElementTree.fromstring(canvas.encoded()) if node.tag.endswith("text")]
    assert text.text == "<b> & co"
