"""The benchmark as a picture: append rate by million on the left, latency of single appends on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bsfg.cli.bench.measure import Samples
from bsfg.cli.canvas import Canvas, canvas_for
from bsfg.errors import InvalidArgument

WIDTH, HEIGHT = 960, 420
TOP, BOTTOM = 70, 350
BLUE, ORANGE, GREY, INK = "#2f6db3", "#d9822b", "#d5d9de", "#333333"
BINS = 40


def checked_path(path: Path) -> None:
    """Refuse a picture that could not be written, before minutes are spent on measuring."""
    canvas_for(path, 1, 1)
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"there is no folder {path.absolute().parent} for the picture")


def draw(path: Path, numbers: dict[str, Any], samples: Samples) -> None:
    """Draw both panels and write the file."""
    canvas = canvas_for(path, WIDTH, HEIGHT)
    canvas.text((40, 30), f"bsfg bench store: {numbers['facts']:,} facts", large=True)
    _rates(canvas, numbers)
    _latencies(canvas, samples, numbers)
    write(path, canvas)


def write(path: Path, canvas: Canvas) -> None:
    """Write a picture to its file."""
    try:
        path.write_bytes(canvas.encoded())
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from None


def _rates(canvas: Canvas, numbers: dict[str, Any]) -> None:
    left, right = 90, 470
    rates = numbers["append_per_second_by_million"]
    aim = 0.2 * numbers["sha256_per_second"]
    top = 1.15 * max(*rates, aim)
    canvas.text((left, 56), "append, facts per second, by million")
    _scale(canvas, left, right, [(top * part / 4, f"{top * part / 4:,.0f}") for part in range(5)], top)
    step = (right - left) / len(rates)
    for number, rate in enumerate(rates):
        height = (BOTTOM - TOP) * rate / top
        canvas.box((left + step * (number + 0.15), BOTTOM - height), (0.7 * step, height), BLUE)
        if len(rates) <= 20 or (number + 1) % 5 == 0:
            canvas.text((left + step * (number + 0.5), BOTTOM + 16), str(number + 1), anchor="middle")
    y = BOTTOM - (BOTTOM - TOP) * aim / top
    canvas.line([(left, y), (right, y)], ORANGE, dashed=True)
    canvas.text((right, y - 5), "0.2 of SHA-256", colour=ORANGE, anchor="end")


def _latencies(canvas: Canvas, samples: Samples, numbers: dict[str, Any]) -> None:
    median, tail = numbers["single_append_ms_p50"], numbers["single_append_ms_p99"]
    series = [
        Series(f"bare fdatasync: p50 {numbers['fdatasync_ms_p50']:.2f}", samples.fdatasync_ms, ORANGE),
        Series(f"one append: p50 {median:.2f}, p99 {tail:.2f}", samples.single_ms, BLUE),
    ]
    histogram(canvas, (560, 930), "latency in ms (logarithmic), number of samples", series)


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one kind, with the line of text and the colour that stand for them."""

    text: str
    samples: Sequence[float]
    colour: str


def histogram(canvas: Canvas, sides: tuple[int, int], title: str, all_series: Sequence[Series]) -> None:
    """Draw how often each latency occurred, all series over one logarithmic scale."""
    left, right = sides
    everything = np.concatenate([series.samples for series in all_series])
    edges = np.geomspace(max(1e-3, everything.min() * 0.95), max(2e-3, everything.max() * 1.05), BINS + 1)
    counts = [np.histogram(np.maximum(series.samples, edges[0]), edges)[0] for series in all_series]
    top = 1.15 * max(int(count.max()) for count in counts)
    canvas.text((left, 56), title)
    _scale(canvas, left, right, [(top * part / 4, f"{top * part / 4:.0f}") for part in range(5)], top)
    step = (right - left) / BINS
    for number, (series, count) in enumerate(zip(all_series, counts, strict=True)):
        outline = []
        for at, found in enumerate(count):
            y = BOTTOM - (BOTTOM - TOP) * found / top
            outline += [(left + at * step, y), (left + (at + 1) * step, y)]
        canvas.line([(left, BOTTOM), *outline, (right, BOTTOM)], series.colour)
        canvas.text((right, 88 + 16 * number), series.text, colour=series.colour, anchor="end")
    for at in range(0, BINS + 1, BINS // 4):
        canvas.text((left + at * step, BOTTOM + 16), f"{edges[at]:.2f}", anchor="middle")


def _scale(canvas: Canvas, left: int, right: int, marks: list[tuple[float, str]], top: float) -> None:
    for value, text in marks:
        y = BOTTOM - (BOTTOM - TOP) * value / top
        canvas.line([(left, y), (right, y)], GREY)
        canvas.text((left - 6, y + 4), text, anchor="end")
