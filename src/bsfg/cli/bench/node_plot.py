"""The benchmark of a node as a picture: latency of single appends on the left, lag between two nodes on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bsfg.cli.bench.node_measure import NodeSamples
from bsfg.cli.bench.plot import BLUE, HEIGHT, ORANGE, WIDTH, Series, histogram, write
from bsfg.cli.canvas import canvas_for

GREEN = "#3b8f5a"


def draw(path: Path, numbers: dict[str, Any], samples: NodeSamples) -> None:
    """Draw both histograms and write the file."""
    canvas = canvas_for(path, WIDTH, HEIGHT)
    canvas.text((40, 30), "bsfg bench node: latency in ms (logarithmic), number of samples", large=True)
    appends = [
        Series(f"bare fdatasync: p50 {numbers['fdatasync_ms_p50']:.2f}", samples.fdatasync_ms, ORANGE),
        Series(f"a call that does nothing: p50 {numbers['rpc_floor_ms_p50']:.2f}", samples.floor_ms, GREEN),
        Series(_text("one append", numbers, "append_ms"), samples.append_ms, BLUE),
    ]
    histogram(canvas, (90, 470), "a single append", appends)
    lags = [Series(_text("lag", numbers, "lag_ms"), samples.lag_ms, BLUE)]
    histogram(canvas, (560, 930), f"from durable here to durable there, at {numbers['rate']:g} facts/s", lags)
    write(path, canvas)


def _text(name: str, numbers: dict[str, Any], key: str) -> str:
    return f"{name}: p50 {numbers[f'{key}_p50']:.2f}, p99 {numbers[f'{key}_p99']:.2f}"
