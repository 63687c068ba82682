"""The verdict as one page of HTML with its pictures: nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bsfg.journey.sums import NOT_ASKED_FOR, NOT_CARRIED, NOT_SERVED, RETURNING
from bsfg.spark.audit.judging import BEFORE_THE_LINK, GIVEN_BACK, IN_FLIGHT, OTHER_PATH, PUT_AGAIN, RECEIVER_TRUNCATED
from bsfg.spark.audit.scope import SetAside
from bsfg.spark.audit.verdict import (
    MEANINGS,
    Absence,
    AuditFinding,
    CheckState,
    EndState,
    FindingKind,
    RangeState,
    StreamVerdict,
    Verdict,
)
from bsfg.wording import markup

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


STYLE = Path(__file__).with_name("style.css")
ROWS_MAX = 200
MARKS = {CheckState.PASSED: "✓", CheckState.FAILED: "✗", CheckState.NOT_CHECKED: "–"}

REASONS = {
    IN_FLIGHT: "in flight: not confirmed yet",
    BEFORE_THE_LINK: "from before the link began",
    OTHER_PATH: "came by another path",
    GIVEN_BACK: "given back to the sender after its restore: the time of the first append",
    PUT_AGAIN: "put again out of quarantine",
    RECEIVER_TRUNCATED: "let go by the receiver",
    RETURNING: "left out: return to the receiver's zone",
    NOT_CARRIED: "left out: for zones that the link does not carry",
    NOT_ASKED_FOR: "left out: by the filter of the link",
    NOT_SERVED: "left out: not served to the receiver's zone",
    "truncated": "let go by the sender",
    "evicted": "dropped by the sender: its buffer was full",
    "expired": "expired before they were sent",
    "damaged": "damaged",
    "lost": "lost",
    "torn": "torn by a crash, never acknowledged",
    "quarantined": "refused by the receiver and kept aside",
    "skipped": "left out by the sender",
    "consumer_retired": "given up: the consumer was retired",
}
"""What the reasons for which facts are not there mean."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(verdict: Verdict) -> str:
    """Write the whole page."""
    title = f"Audit of {verdict.link}"
    body = "\n".join([*_head(verdict), *(part for stream in verdict.streams for part in _stream(stream)), _foot()])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{markup(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(verdict: Verdict) -> Iterator[str]:
    found = sum(verdict.counts.values())
    word = "Clean" if verdict.clean else f"{found:,} finding{'s' if found != 1 else ''}"
    zones = f"{verdict.sender_zone} → {verdict.receiver_zone or 'receiver'}"
    yield f'<p class="dim">BSFG audit · {_time(verdict.started_unix_ms)}</p>'
    yield f"<h1>{markup(verdict.link)}: {markup(zones)}</h1>"
    kind = "banner" if verdict.clean else "banner bad"
    yield f'<div class="{kind}"><span class="word">{word}</span><span>{_sentence(verdict)}</span></div>'


def _sentence(verdict: Verdict) -> str:
    speed = (
        f"{verdict.facts:,} facts compared in {verdict.seconds:,.1f} s ({verdict.facts_per_second:,.0f} per second)."
    )
    if verdict.clean:
        return f"Both ends agree in everything that could be compared. {speed}"
    kinds = ", ".join(f"{kind.replace('_', ' ')} {count:,}" for kind, count in sorted(verdict.counts.items()))
    return f"The two ends do not agree: {markup(kinds)}. {speed}"


def _stream(stream: StreamVerdict) -> Iterator[str]:
    window = f"offsets {stream.first:,} to {stream.last:,}" if stream.last >= stream.first else "no facts yet"
    depth = "bodies hashed again" if stream.deep else "bodies not hashed again"
    yield f"<h2>Stream {markup(stream.stream)}</h2>"
    yield f'<p class="dim">{window} of the sender · {depth} · {stream.seconds:,.1f} s</p>'
    yield _tiles(stream)
    yield _card("What became of the sender's facts", _shares(stream))
    yield _card("The two ends side by side", two_ends(stream))
    if stream.ranges:
        width = max(each.last - each.first + 1 for each in stream.ranges)
        size = f"{len(stream.ranges):,} ranges of {width:,} offsets"
        states = [each.state if each.state in WORDS else "excused" for each in stream.ranges]
        yield _card(f"Range by range: {size}", range_map(stream.ranges) + legend(states))
    yield from _findings(stream)
    yield _card("What was checked", _checks(stream))
    if stream.absences:
        yield _card("What is rightly not there", _absences(stream.absences))
    if stream.quarantine:
        yield _card(f"In quarantine at the receiver: {stream.receiver.quarantined:,}", _quarantine(stream.quarantine))
    yield _card("The two logs", _ends(stream))


def _tiles(stream: StreamVerdict) -> str:
    found = sum(stream.finding_counts.values())
    explained = sum(stream.absent.values()) - stream.in_flight
    tiles = [
        ("facts compared", stream.compared, False),
        ("by a kept digest", stream.by_digest, False),
        ("in flight", stream.in_flight, False),
        ("not there, with a reason", explained, False),
        ("findings", found, found > 0),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile{" bad" if bad else ""}"><b>{count:,}</b><span class="dim">{words}</span></div>'
            for words, count, bad in tiles
        )
        + "</div>"
    )


def _shares(stream: StreamVerdict) -> str:
    absent = stream.absent
    concerned = sum(
        count
        for kind, count in stream.finding_counts.items()
        if kind in (FindingKind.MISSING, FindingKind.ALTERED, FindingKind.BODY_ALTERED)
    )
    others = sum(absent.values()) - sum(absent.get(name, 0) for name in (IN_FLIGHT, "truncated", RECEIVER_TRUNCATED))
    missing = stream.finding_counts.get(FindingKind.MISSING, 0)
    parts = [
        ("equal", "the same at both ends", max(0, stream.compared - (concerned - missing))),
        ("in_flight", "in flight", absent.get(IN_FLIGHT, 0)),
        ("truncated", "let go by the sender", absent.get("truncated", 0)),
        ("receiver_truncated", "let go by the receiver", absent.get(RECEIVER_TRUNCATED, 0)),
        ("excused", "not there, with a reason", others),
        ("finding", "missing or altered", concerned),
    ]
    names = "".join(
        f'<span class="key"><i class="b-{name}"></i>{words}: {count:,}</span>' for name, words, count in parts if count
    )
    return shares(parts) + names


def _checks(stream: StreamVerdict) -> str:
    rows = []
    for check in stream.checks:
        detail = f' <span class="dim">{markup(check.detail)}</span>' if check.detail else ""
        unsure = ' <span class="dim">(not checked)</span>' if check.state == CheckState.NOT_CHECKED else ""
        rows.append(
            f'<li><span class="{check.state}">{MARKS[check.state]}</span>{markup(check.name)}{unsure}{detail}</li>'
        )
    return f'<ul class="checks">{"".join(rows)}</ul>'


def _findings(stream: StreamVerdict) -> Iterator[str]:
    for kind in FindingKind:
        named = [finding for finding in stream.findings if finding.kind == kind]
        if named:
            says, hint = MEANINGS[kind]
            count = stream.finding_counts[kind]
            title = f"{kind.replace('_', ' ').capitalize()}: {count:,}"
            yield _card(title, f"<p>{says} <span class='dim'>{hint}</span></p>" + _finding_table(named))


def _finding_table(findings: Sequence[AuditFinding]) -> str:
    rows = [
        [
            finding.side,
            _bounds(finding.offset, finding.last),
            _number(finding.receiver_offset),
            _code(finding.from_zone),
            _code(finding.message_id),
            markup(", ".join(finding.fields)),
            markup(finding.detail),
        ]
        for finding in findings[:ROWS_MAX]
    ]
    heads = ("where", "#offset", "#at the receiver", "from_zone", "message_id", "fields", "")
    more = len(findings) - ROWS_MAX
    note = f'<p class="dim">and {more:,} more, which the JSON verdict names</p>' if more > 0 else ""
    return _table(heads, rows) + note


def _absences(absences: Sequence[Absence]) -> str:
    rows = [
        [
            markup(REASONS.get(each.reason, each.reason)),
            f"{each.count:,}",
            _bounds(each.first, each.last),
            each.side,
            _time(each.at_unix_ms) if each.at_unix_ms else "",
            markup(each.detail),
        ]
        for each in sorted(absences, key=lambda each: -each.count)[:ROWS_MAX]
    ]
    return _table(("reason", "#facts", "#between offsets", "says", "since", ""), rows)


def _quarantine(set_aside: Sequence[SetAside]) -> str:
    rows = [
        [
            markup(each.reason.replace("_", " ")),
            _number(each.origin_offset),
            _code(each.from_zone),
            _code(each.message_id),
            _time(each.at_unix_ms),
            markup(each.detail),
        ]
        for each in set_aside
    ]
    return _table(("reason", "#offset", "from_zone", "message_id", "since", ""), rows)


def _ends(stream: StreamVerdict) -> str:
    columns = [_end(end) for end in (stream.sender, stream.receiver)]
    rows = [[words, *(column[at][1] for column in columns)] for at, (words, _) in enumerate(columns[0])]
    return _table(("", "sender", "receiver"), rows)


def _end(end: EndState) -> list[tuple[str, str]]:
    return [
        ("read from", _code(end.name)),
        ("log", _code(end.log_id)),
        ("offsets that it retains", f"{end.start:,} to {end.end - 1:,}" if end.end > end.start else "none"),
        ("facts and bytes read", f"{end.facts_read:,} · {end.bytes_read / 1e6:,.1f} MB"),
        ("read and summed up by", "its node" if end.summed_by_node else "the audit"),
        ("gap records · in quarantine", f"{end.gap_records:,} · {end.quarantined:,}"),
        ("chain head", _code(end.chain_head)),
    ]


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h3>{markup(title)}</h3>{content}</section>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table; columns whose head begins with # hold numbers."""
    numbers = [head.startswith("#") for head in heads]
    used = [any(row[at] for row in rows) or (heads[at] == "" and at == 0) for at in range(len(heads))]

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if number else ''}>{value}</{tag}>"
            for value, number, shown in zip(values, numbers, used, strict=True)
            if shown
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><tr>{cells("th", [head.lstrip("#") for head in heads])}</tr>{body}</table></div>'
    )


def _bounds(first: int | None, last: int | None) -> str:
    if first is None:
        return ""
    return f"{first:,}" if last is None or last == first else f"{first:,} – {last:,}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _code(text: str | None) -> str:
    return f"<code>{markup(text)}</code>" if text else ""


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _foot() -> str:
    import bsfg

    return f"<footer>bsfg {bsfg.__version__} · bsfg pipeline audit --json gives the same for programs</footer>"
