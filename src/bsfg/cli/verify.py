"""`bsfg verify`: is everything in a data folder whole, in its place and unaltered?"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import argument, checked_folder, flag
from bsfg.cli.output import advance, console, count_text, examples, fitting, print_json, progress_bar, range_text, table
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from bsfg.stores.log.damage import DamageFinding
    from bsfg.stores.log.trailcheck import TrailReport
    from bsfg.stores.log.verify import Report

app = typer.Typer()

ADVICE = {
    "log_damaged": "Restore the folder from a backup, or fetch the range again from where it came.",
    "entries_lost": "These entries are gone and recorded as a gap; fetch the range again or accept the loss.",
    "chain_broken": "Files were replaced or mixed: compare with a backup and find out who wrote here.",
    "digest_mismatch": "The fact was altered after it was sealed; restore it from a backup or from its origin.",
    "hasher_unknown": "Install what brings the function (pip install 'bsfg[blake3]') and check again.",
    "stored_twice": "One key is there twice, which BSFG never does: find out what else wrote into the folder.",
    "keys_missing": "Restore the key segment from a backup; until then a repeat from that range may be taken as new.",
    "keys_damaged": "Restore the key segment from a backup; until then a repeat from that range may be taken as new.",
    "index_damaged": "Stop the writer and remove the folder `index`: it is derived, and is rebuilt at the next open.",
    "foreign_log": "A file of another log was copied here; move it back to where it belongs.",
    "format_unsupported": "Use a version of BSFG at least as new as the one that wrote the folder.",
    "storage_failed": "Check the disk (dmesg, smartctl) before anything else.",
    "torn_tail": "Normal after a crash: nothing of it was acknowledged, and it is cut at the next open.",
    "log_unfinished": "Normal after a crash: the next open goes on where the writer stopped.",
    "index_stale": "Normal after a crash: the index is derived, and is rebuilt at the next open.",
    "trail_altered": "The audit trail was changed: compare with a backup and find out who wrote here.",
    "trail_missing": "Records of the audit trail were removed: look into a backup, and find out who wrote here.",
    "trail_reordered": "Records of the audit trail were moved or doubled: find out who wrote here.",
    "trail_head_unknown": "Normal after a power loss: the next record is written with a new head.",
    "trail_damaged": "The node met damage of the audit trail when it started, and went on behind it.",
    "cursor_ahead": "The log was restored from an older copy; reconcile this consumer before you rely on it.",
}
"""What to do about each finding."""

EPILOG = examples(
    ("bsfg verify data", "check the folder of a zone, also while its node runs"),
    ("bsfg verify data --json | jq .problems", "the same for a program; the exit code is 1 when there are any"),
)


@app.command(epilog=EPILOG)
def verify(
    folder: Annotated[
        Path, argument("DIR", "The data folder of a zone: the one with bsfg.json in it.", readable=False)
    ],
    json: Annotated[bool, flag("--json", "Print the findings as JSON.")] = False,
) -> None:
    """Check a data folder: every checksum, the hash chain, digests, key segments, index, cursors and the audit trail.

    It only reads, so it can run beside the writer and on a folder that is mounted read-only. The exit code is 0 when
    everything is sound and 1 when something is damaged or lost. What a crash leaves behind and the next open repairs
    by itself is a note, not a problem.
    """
    from bsfg.stores.log.verify import verify as verify_folder

    checked_folder(folder)
    with progress_bar("verifying") as bar:
        report = verify_folder(folder, progress=lambda done, total: advance(bar, done, total))
    if json:
        print_json(as_dict(folder, report))
    else:
        _show(folder, report)
    if not report.ok:
        raise typer.Exit(1)


def as_dict(folder: Path, report: Report) -> dict[str, Any]:
    """Give the JSON form of a report."""
    return {
        "folder": str(folder),
        "ok": report.ok,
        "logs": report.logs,
        "trail": None if report.trail is None else _trail(report.trail),
        "problems": [_finding(problem) for problem in report.problems],
        "notes": [_finding(problem) for problem in report.notes],
    }


def _trail(trail: TrailReport) -> dict[str, Any]:
    found = {name: getattr(trail, name) for name in ("records", "first", "last", "files")}
    return {**found, "head": trail.head, "ok": not trail.problems}


def _finding(problem: DamageFinding) -> dict[str, Any]:
    return {
        "code": problem.code,
        "where": problem.where,
        "first": problem.first,
        "last": problem.last,
        "detail": problem.detail,
        "hint": ADVICE.get(problem.code, ""),
    }


def _show(folder: Path, report: Report) -> None:
    out = console()
    if report.logs:
        out.print(fitting(partial(_logs_table, report), (True, False)))
    if report.trail is not None and report.trail.records:
        trail, bad = report.trail, len(report.trail.problems)
        mark = Text(f"✗ {bad}", "bold red") if bad else Text("✓", "green")
        numbers = f"{counted(trail.records, 'record')}, {range_text(trail.first, trail.last)}, head {trail.head[:16]} "
        out.print(Text.assemble("audit trail: ", numbers, mark))
    _show_findings("Problems", report.problems, "red")
    _show_findings("Notes", report.notes, "yellow")
    if report.ok:
        facts = counted(sum(log.facts for log in report.logs), "fact")
        out.print(
            Text.assemble(("sound", "bold green"), f": {facts} in {counted(len(report.logs), 'log')} of {folder}")
        )
        return
    codes = ", ".join(f"{code} ×{number}" for code, number in Counter(p.code for p in report.problems).items())
    out.print(Text.assemble(("not sound", "bold red"), f": {codes}"))


def _logs_table(report: Report, wide: bool) -> Any:
    extra = ("frames", "gaps", "aside") if wide else ()
    numbers = ("facts", "segments", *extra)
    result = table("log", "offsets", *numbers, "", right=numbers)
    for log in report.logs:
        path = f"streams/{log.stream}/{log.buffer}"
        bad = sum(problem.where.startswith(path) for problem in report.problems)
        counts = {"facts": log.facts, "segments": log.segments, "frames": log.frames, "gaps": log.gaps}
        counts["aside"] = log.quarantined
        result.add_row(
            f"{log.stream}/{log.buffer}",
            range_text(log.start, log.end - 1),
            *(count_text(counts[name]) for name in numbers),
            Text(f"✗ {bad}", "bold red") if bad else Text("✓", "green"),
        )
    return result


def _show_findings(title: str, findings: list[DamageFinding], style: str) -> None:
    if not findings:
        return
    out = console()
    out.print(Text(title, f"bold {style}"))
    for finding in findings:
        what = "records" if finding.code.startswith("trail_") else "entries"
        entries = f"  {what} {range_text(finding.first, finding.last)}" if finding.first is not None else ""
        out.print(Text.assemble("  ", (finding.code, style), entries))
        out.print(Text(one_line(f"    {finding.where}"), "dim"), soft_wrap=True)
        out.print(Text(one_line(f"    {finding.detail}")), soft_wrap=True)
    for code in dict.fromkeys(finding.code for finding in findings):
        if code in ADVICE:
            out.print(Text.assemble((f"  {code}: ", "bold"), ADVICE[code]), soft_wrap=True)
    out.print()
