"""The pictures of the report, as SVG inside the page; their colours are those of the page's style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bsfg.printable import markup
from bsfg.spark.audit.verdict import RangeState, StreamVerdict

WIDTH = 1000
CELLS_MAX = 900
COLUMNS_MAX = 60

WORDS = {
    "equal": "the same at both ends",
    "finding": "something is wrong",
    "excused": "differs for reasons on record",
    "in_flight": "in flight, not confirmed yet",
    "truncated": "let go by the sender",
    "receiver_truncated": "let go by the receiver",
    "gap": "no facts, for reasons on record",
}
"""What the colours of ranges mean, the worst last to be hidden when many ranges share a cell."""

_WEIGHT = ("finding", "excused", "in_flight", "receiver_truncated", "truncated", "gap", "equal")


def shares(parts: Sequence[tuple[str, str, int]]) -> str:
    """Draw what became of the facts as one bar: class, words and number of each part."""
    total = sum(count for *_, count in parts) or 1
    return _svg(64, "".join(_share_bars(parts, total)), "What became of the sender's facts")


def _share_bars(parts: Sequence[tuple[str, str, int]], total: int) -> Iterator[str]:
    at = 0.0
    visible = [part for part in parts if part[2]]
    # A part that is too small to be seen is drawn as wide as a hair, since it may be the one that matters.
    widths = [max(3.0, WIDTH * count / total) for *_, count in visible]
    scale = WIDTH / sum(widths) if widths else 1.0
    for (name, words, count), width in zip(visible, (width * scale for width in widths), strict=True):
        yield _rect(name, (at, 4, width, 56), f"{words}: {count:,} ({100 * count / total:.4g} %)")
        if width > 130:
            yield f'<text class="on" x="{at + 12:.2f}" y="29">{count:,}</text>'
            yield f'<text class="on small" x="{at + 12:.2f}" y="47">{markup(words)}</text>'
        at += width


def two_ends(stream: StreamVerdict) -> str:
    """Draw both logs over the sender's offsets: what each still has, where confirmation stands, where findings lie."""
    end = max(stream.sender.end, (stream.receiver_last or 0) + 1, 1)

    def x(offset: float) -> float:
        return 110 + (WIDTH - 130) * min(max(offset, 0), end) / end

    parts = [_label(28, "sender"), _label(88, "receiver")]
    parts.append(_lane(18, x(0), x(stream.sender.start), "truncated", "let go by the sender"))
    parts.append(_lane(18, x(stream.sender.start), x(stream.sender.end), "equal", "retained by the sender"))
    if stream.receiver_first is not None and stream.receiver_last is not None:
        parts.append(_lane(78, x(0), x(stream.receiver_first), "receiver_truncated", "not retained by the receiver"))
        parts.append(
            _lane(78, x(stream.receiver_first), x(stream.receiver_last + 1), "equal", "retained by the receiver")
        )
    parts += [_tick(x(value), f"{value:,}", anchor) for value, anchor in ((0, "start"), (end, "end"))]
    if 0 <= stream.frontier < stream.sender.end:
        parts.append(_marker(x(stream.frontier + 1), f"confirmed through {stream.frontier:,}"))
    parts += [_flag(x(finding.offset)) for finding in stream.findings[:200] if finding.offset is not None]
    return _svg(150, "".join(parts), "Both logs over the sender's offsets")


def _label(y: float, text: str) -> str:
    return f'<text x="0" y="{y + 8}">{text}</text>'


def _lane(y: float, start: float, stop: float, state: str, words: str) -> str:
    if stop <= start:
        return ""
    return _rect(state, (start, y, stop - start, 26), words)


def _tick(x: float, text: str, anchor: str) -> str:
    return f'<text class="small dim" x="{x:.2f}" y="144" text-anchor="{anchor}">{text}</text>'


def _marker(x: float, text: str) -> str:
    anchor, shift = ("end", -6) if x > WIDTH / 2 else ("start", 6)
    line = f'<line class="mark" x1="{x:.2f}" y1="10" x2="{x:.2f}" y2="122"/>'
    return f'{line}<text class="small" x="{x + shift:.2f}" y="66" text-anchor="{anchor}">{text}</text>'


def _flag(x: float) -> str:
    return f'<path class="s-finding" d="M{x:.2f} 108 l-6 12 h12 z"/>'


def range_map(ranges: Sequence[RangeState]) -> str:
    """Draw every range as a cell, row by row; where there are too many, a cell stands for several."""
    if not ranges:
        return ""
    per_cell = -(-len(ranges) // CELLS_MAX)
    cells = [_cell(ranges[at : at + per_cell]) for at in range(0, len(ranges), per_cell)]
    columns = min(COLUMNS_MAX, max(20, len(cells)))
    size = WIDTH / columns
    rows = -(-len(cells) // columns)
    drawn = []
    for number, (state, title) in enumerate(cells):
        x, y = number % columns * size, number // columns * size
        drawn.append(_rect(state, (x + 1, y + 1, size - 2, size - 2), title))
    return _svg(rows * size, "".join(drawn), "Range by range")


def _cell(ranges: Sequence[RangeState]) -> tuple[str, str]:
    state = min((each.state if each.state in _WEIGHT else "excused" for each in ranges), key=_WEIGHT.index)
    counts = [sum(getattr(each, side) for each in ranges) for side in ("sender", "receiver")]
    title = f"{ranges[0].first:,} to {ranges[-1].last:,}: {WORDS[state]}; sender {counts[0]:,}, receiver {counts[1]:,}"
    return state, title


def legend(states: Sequence[str]) -> str:
    """Explain the colours that a picture uses."""
    return "".join(
        f'<span class="key"><i class="b-{state}"></i>{markup(WORDS[state])}</span>'
        for state in WORDS
        if state in states
    )


def _rect(state: str, place: tuple[float, float, float, float], title: str) -> str:
    x, y, width, height = place
    where = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="s-{state}" {where} rx="2"><title>{markup(title)}</title></rect>'


def _svg(height: float, content: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.2f}" role="img" aria-label="{markup(label)}" '
        f'preserveAspectRatio="xMidYMid meet">{content}</svg>'
    )
