"""Draws what `bsfg bench … --json` measured, each figure against its aim, as an SVG file.

    bsfg bench store --json > bench.json
    python benchmarks/plot.py bench.json bench.svg

A bar is what was measured as a share of its aim, so that one line serves for all of them: a rate has to reach it, a
time or a size has to stay below. Where a run has more than a million facts, the append rate by million stands below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

WIDTH, ROW, LEFT, UNIT = 960, 22, 260, 280
"""The picture's width, a row's height, where bars begin, and how long a bar is that just reaches its aim."""

MET, MISSED, PLAIN, INK = "#3b8f5a", "#d9822b", "#2f6db3", "#333333"


def picture(numbers: dict[str, Any]) -> str:
    """Give the whole picture as SVG."""
    rows = [*_aims(numbers["aims"]), *_by_million(numbers.get("append_per_second_by_million", []))]
    height = ROW * (len(rows) + 3)
    title = f"{numbers['facts']:,} facts on {numbers['machine']['file_system']}; the line is the aim"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, ROW, title, 15),
    ]
    for number, (name, share, says, colour) in enumerate(rows):
        y = ROW * (number + 2)
        length = max(1.0, min(share * UNIT, WIDTH - LEFT - 200))
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 6}" fill="{colour}"/>')
        lines += [_text(20, y + 12, name), _text(LEFT + length + 8, y + 12, says)]
    aims = len(numbers["aims"])
    line = f'x1="{LEFT + UNIT}" x2="{LEFT + UNIT}" y1="{2 * ROW - 4}" y2="{ROW * (aims + 2) - 2}"'
    return "\n".join([*lines, f'<line {line} stroke="{INK}" stroke-dasharray="5 4"/>', "</svg>", ""])


def _aims(aims: list[dict[str, Any]]) -> Iterator[tuple[str, float, str, str]]:
    for aim in aims:
        wanted = float(aim["aim"].split()[1])
        share = aim["measured"] / wanted if wanted else 0.0
        yield aim["name"], share, f"{aim['measured']:.4g} ({aim['aim']})", MET if aim["met"] else MISSED


def _by_million(rates: list[float]) -> Iterator[tuple[str, float, str, str]]:
    if len(rates) > 1:
        for number, rate in enumerate(rates, 1):
            yield f"append, million {number}", rate / max(rates), f"{rate:,.0f} facts/s", PLAIN


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{INK}">{escape(text)}</text>'


if __name__ == "__main__":
    numbers = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(picture(numbers), encoding="utf-8")
