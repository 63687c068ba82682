"""The demo as people see it: a live picture on a terminal, a story line by line anywhere else, a verdict at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bsfg.cli.demo.storage.director import Event, Stage
from bsfg.cli.demo.storage.referee import Verdict
from bsfg.cli.output import console, count_text, table

SHOWN_EVENTS = 14

INTRODUCTION = (
    "Several producers append facts through one writer. The writer is killed in mid-stream, again and again. "
    "Producers send again, with the same ids, whatever was not acknowledged. Then we count."
)


class Picture:
    """Draws the stage whenever the terminal asks for it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __rich__(self) -> RenderableType:
        stage = self._stage
        rows = Table.grid(padding=(0, 1))
        for number in range(stage.plan.producers):
            done = stage.acknowledged_by[number]
            bar = ProgressBar(total=stage.plan.facts, completed=done, width=24)
            rows.add_row(f"producer {number + 1}", bar, f"{done:,} of {stage.plan.facts:,} acknowledged")
        alive = stage.writer_pid is not None
        state = Text(f"alive, process {stage.writer_pid}", "green") if alive else Text("dead", "bold red")
        rows.add_row("writer", state, f"killed {stage.deaths} of {stage.plan.kills} times")
        return Group(rows, Text(), *(event_text(event) for event in stage.events[-SHOWN_EVENTS:]))


def event_text(event: Event) -> Text:
    """Write one event with its time."""
    return Text.assemble((f"{event.seconds:6.2f} s  ", "dim"), (event.text, event.style))


@contextmanager
def watching(stage: Stage, screen: Console) -> Iterator[None]:
    """Show the stage live while a block runs, when there is a terminal; the events stay when it ends."""
    if not screen.is_terminal:
        yield
        return
    with Live(Picture(stage), console=screen, refresh_per_second=10, transient=True):
        yield
    for event in stage.events:
        screen.print(event_text(event))


def introduce(screen: Console) -> None:
    """Say what is about to happen."""
    screen.print(Text(INTRODUCTION))
    screen.print()


def show_verdict(stage: Stage, verdict: Verdict, kept: str | None) -> None:
    """Print the count and what it means."""
    out = console()
    rows = table("", "facts", right=("facts",))
    for name, value, bad in _counts(stage, verdict):
        rows.add_row(name, Text(count_text(value), "bold red" if bad else ""))
    out.print(rows)
    out.print(
        f"writer killed {stage.deaths} times; longest append {stage.longest_ms / 1000:.2f} s, "
        "kills and reopening included"
    )
    if verdict.chain_verified:
        out.print("hash chain, checksums and digests verified")
    for problem in verdict.problems:
        out.print(Text(f"{problem['code']}: {problem.get('where', '')} {problem.get('detail', '')}", "red"))
    if verdict.ok:
        out.print(Text("Nothing acknowledged was lost, and nothing is there twice.", "bold green"))
    else:
        out.print(Text(f"A promise was broken; this is a defect. Repeat it with --seed {stage.plan.seed}.", "bold red"))
    if kept:
        out.print(f"Kept in {kept}; look inside with: bsfg inspect {kept}")


def _counts(stage: Stage, verdict: Verdict) -> list[tuple[str, int, bool]]:
    return [
        ("sent", verdict.sent, False),
        ("sent again after a kill", sum(stage.retried_by), False),
        ("  of these already stored", stage.repeats, False),
        ("acknowledged", verdict.acknowledged, verdict.acknowledged != verdict.sent),
        ("stored", verdict.stored, verdict.stored != verdict.sent),
        ("lost", verdict.lost, verdict.lost > 0),
        ("twice", verdict.twice, verdict.twice > 0),
        ("altered", verdict.altered, verdict.altered > 0),
    ]


def as_dict(stage: Stage, verdict: Verdict, kept: str | None, seconds: float) -> dict[str, Any]:
    """Give the JSON form of the outcome."""
    return {
        "ok": verdict.ok,
        "sent": verdict.sent,
        "acknowledged": verdict.acknowledged,
        "stored": verdict.stored,
        "lost": verdict.lost,
        "twice": verdict.twice,
        "altered": verdict.altered,
        "sent_again": sum(stage.retried_by),
        "answered_as_repeats": stage.repeats,
        "kills": stage.deaths,
        "longest_append_ms": round(stage.longest_ms, 1),
        "gaps": verdict.gaps,
        "chain_verified": verdict.chain_verified,
        "problems": verdict.problems,
        "seed": stage.plan.seed,
        "folder": kept,
        "seconds": round(seconds, 1),
    }
