"""The verdict as one page of HTML: nothing is loaded from elsewhere, so it can be sent, archived and printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bsfg.printable import markup
from bsfg.spark.audit import pictures
from bsfg.spark.audit.evidence import SetAside
from bsfg.spark.audit.excuses import BEFORE_THE_LINK, GIVEN_BACK, IN_FLIGHT, OTHER_PATH, PUT_AGAIN, RECEIVER_TRUNCATED
from bsfg.spark.audit.scope import NOT_CARRIED, RETURNING
from bsfg.spark.audit.verdict import MEANINGS, Absence, EndState, Finding, Kind, State, StreamVerdict, Verdict

STYLE = Path(__file__).with_name("style.css")
ROWS_MAX = 200
MARKS = {State.PASSED: "✓", State.FAILED: "✗", State.NOT_CHECKED: "–"}

REASONS = {
    IN_FLIGHT: "in flight: not confirmed yet",
    BEFORE_THE_LINK: "from before the link began",
    OTHER_PATH: "came by another path",
    GIVEN_BACK: "given back to the sender after its restore: the time of the first append",
    PUT_AGAIN: "put again out of quarantine",
    RECEIVER_TRUNCATED: "let go by the receiver",
    RETURNING: "left out: return to the receiver's zone",
    NOT_CARRIED: "left out: for zones that the link does not carry",
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
    yield _card("The two ends side by side", pictures.two_ends(stream))
    if stream.ranges:
        width = max(each.last - each.first + 1 for each in stream.ranges)
        size = f"{len(stream.ranges):,} ranges of {width:,} offsets"
        states = [each.state if each.state in pictures.WORDS else "excused" for each in stream.ranges]
        yield _card(f"Range by range: {size}", pictures.range_map(stream.ranges) + pictures.legend(states))
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
        if kind in (Kind.MISSING, Kind.ALTERED, Kind.BODY_ALTERED)
    )
    others = sum(absent.values()) - sum(absent.get(name, 0) for name in (IN_FLIGHT, "truncated", RECEIVER_TRUNCATED))
    missing = stream.finding_counts.get(Kind.MISSING, 0)
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
    return pictures.shares(parts) + names


def _checks(stream: StreamVerdict) -> str:
    rows = []
    for check in stream.checks:
        detail = f' <span class="dim">{markup(check.detail)}</span>' if check.detail else ""
        unsure = ' <span class="dim">(not checked)</span>' if check.state == State.NOT_CHECKED else ""
        rows.append(
            f'<li><span class="{check.state}">{MARKS[check.state]}</span>{markup(check.name)}{unsure}{detail}</li>'
        )
    return f'<ul class="checks">{"".join(rows)}</ul>'


def _findings(stream: StreamVerdict) -> Iterator[str]:
    for kind in Kind:
        named = [finding for finding in stream.findings if finding.kind == kind]
        if named:
            says, hint = MEANINGS[kind]
            count = stream.finding_counts[kind]
            title = f"{kind.replace('_', ' ').capitalize()}: {count:,}"
            yield _card(title, f"<p>{says} <span class='dim'>{hint}</span></p>" + _finding_table(named))


def _finding_table(findings: Sequence[Finding]) -> str:
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
