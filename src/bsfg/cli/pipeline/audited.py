"""The verdict of an audit for a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from bsfg.cli.output import console, count_text, range_text, table
from bsfg.printable import counted, one_line

if TYPE_CHECKING:
    from bsfg.spark.audit.verdict import Finding, StreamVerdict, Verdict

FINDINGS_MAX = 20
MARKS = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "not_checked": ("–", "yellow")}


def show(verdict: Verdict, report: Path | None) -> None:
    """Print the verdict: checks, what is wrong, what is rightly not there, and the sum of it."""
    out = console()
    for stream in verdict.streams:
        out.print(Text(f"{verdict.link}: {stream.stream}", "bold"))
        _checks(stream)
        _absences(stream)
        _findings(stream)
    if report is not None:
        out.print(Text(f"The report is {report}.", "dim"))
    facts, seconds = counted(verdict.facts, "fact"), f"{verdict.seconds:,.1f} s"
    rate = f"{count_text(round(verdict.facts_per_second))} facts/s"
    if verdict.clean:
        out.print(Text.assemble(("clean", "bold green"), f": {facts}, the same at both ends ({seconds}, {rate})"))
        return
    kinds = ", ".join(f"{kind} ×{count_text(count)}" for kind, count in sorted(verdict.counts.items()))
    out.print(Text.assemble(("not clean", "bold red"), f": {kinds} among {facts} ({seconds}, {rate})"))


def _checks(stream: StreamVerdict) -> None:
    for check in stream.checks:
        mark, style = MARKS[str(check.state)]
        text = Text.assemble("  ", (mark, style), " ", check.name)
        if check.detail:
            text.append(f"  {one_line(check.detail)}", "dim")
        console().print(text, soft_wrap=True)
    console().print()


def _absences(stream: StreamVerdict) -> None:
    from bsfg.spark.audit.report import REASONS

    absent = sorted(stream.absent.items(), key=lambda each: -each[1])
    if absent:
        rows: Any = table("rightly not there", "facts", right=("facts",))
        for reason, count in absent:
            rows.add_row(REASONS.get(reason, reason), count_text(count))
        console().print(rows)


def _findings(stream: StreamVerdict) -> None:
    from bsfg.spark.audit.verdict import MEANINGS

    if not stream.findings:
        return
    rows: Any = table("finding", "where", "offset", "at receiver", "from_zone", "message_id", "fields", "")
    for finding in stream.findings[:FINDINGS_MAX]:
        rows.add_row(*_row(finding))
    out = console()
    out.print(rows)
    more = len(stream.findings) - FINDINGS_MAX
    if more > 0:
        out.print(Text(f"  and {count_text(more)} more; --json and --report name them", "dim"))
    for kind in dict.fromkeys(finding.kind for finding in stream.findings):
        says, hint = MEANINGS[kind]
        out.print(Text.assemble((f"  {kind}: ", "bold"), f"{says} ", (hint, "dim")), soft_wrap=True)
    out.print()


def _row(finding: Finding) -> list[Any]:
    last = finding.offset if finding.last is None else finding.last
    return [
        Text(str(finding.kind), "red"),
        finding.side,
        range_text(finding.offset, last),
        "" if finding.receiver_offset is None else str(finding.receiver_offset),
        Text(finding.from_zone or ""),
        Text(finding.message_id or ""),
        ", ".join(finding.fields),
        Text(finding.detail),
    ]
