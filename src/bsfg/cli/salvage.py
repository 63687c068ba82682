"""`bsfg salvage`: save what can be read of a damaged data folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import argument, flag, option, orderly_end
from bsfg.cli.output import console, count_text, examples, print_json, range_text, stages, table
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from bsfg.node.salvage import Salvaged
    from bsfg.stores.log.salvage import Missing

app = typer.Typer()

EPILOG = examples(
    ("bsfg salvage plant-a/data /mnt/new/data", "save everything readable; the node must be stopped"),
    ("bsfg salvage data saved --json | jq .missing", "what could not be saved, for a program"),
    ("bsfg salvage data saved --artifacts /srv/artifacts", "when artifacts are not in the data folder"),
)

SHOWN = 100


@app.command(epilog=EPILOG)
def salvage(
    source: Annotated[Path, argument("DIR", "The damaged data folder; it is only read.", readable=False)],
    target: Annotated[Path, argument("TARGET", "A new folder, best on another disk.")],
    *,
    artifacts: Annotated[Path | None, option("DIR", "The folder of artifacts. Default: DIR/artifacts.")] = None,
    json: Annotated[bool, flag("--json", "Print what was saved and what is missing as JSON.")] = False,
) -> None:
    """Write everything that can be read of a damaged data folder into a new one, and say what is missing.

    Facts keep their offsets and their order. What cannot be read, decoded or found becomes a gap record with file and
    byte. Gap records, quarantine, consumers, what is known of peers, and artifacts come along as far as they are sound.

    Each log is a new history: peers that pull from here hold their links with `foreign_log` until an operator releases
    them. The node must be stopped; nothing in DIR is changed. The exit code is 1 when something is missing.
    """
    from bsfg.clock import SystemClock
    from bsfg.node.salvage import salvage as salvage_folder
    from bsfg.node.trail import told_by_user

    with orderly_end(), stages() as progress:
        saved = salvage_folder(source, target, artifacts, SystemClock().now_unix_ms(), progress)
    how = {"source": str(source.resolve()), "missing": len(saved.missing)}
    told_by_user(saved.target, "salvaged", str(saved.target.resolve()), how, SystemClock().now_unix_ms())
    if json:
        print_json(as_dict(source, saved))
    else:
        _show(source, saved)
    if saved.missing:
        raise typer.Exit(1)


def as_dict(source: Path, saved: Salvaged) -> dict[str, Any]:
    """Give the JSON form of what was saved."""
    return {
        "folder": str(source),
        "target": str(saved.target),
        "complete": not saved.missing,
        "logs": [asdict(log) for log in saved.data.logs],
        "consumers": saved.data.consumers,
        "artifacts": saved.artifacts,
        "missing": [asdict(each) for each in saved.missing],
        "notes": [asdict(each) for each in saved.data.notes],
        "next": next_steps(saved),
    }


def _show(source: Path, saved: Salvaged) -> None:
    out = console()
    numbers = ("facts", "lost", "aside")
    rows = table("log", "offsets", *numbers, "new log_id", right=numbers)
    for log in saved.data.logs:
        name, offsets = f"{log.stream}/{log.buffer}", range_text(log.start, log.end - 1)
        lost = Text(count_text(log.lost), "bold red" if log.lost else "")
        rows.add_row(name, offsets, count_text(log.facts), lost, count_text(log.quarantined), log.log_id)
    if saved.data.logs:
        out.print(rows)
    _list("Missing", saved.missing, "red")
    _list("Repaired", saved.data.notes, "yellow")
    facts, lost = (sum(getattr(log, name) for log in saved.data.logs) for name in ("facts", "lost"))
    words = ("complete", "bold green") if not saved.missing else (f"{counted(lost, 'entry')} lost", "bold red")
    others = f"{counted(saved.data.consumers, 'consumer')}, {counted(saved.artifacts, 'artifact')}"
    out.print(
        Text.assemble(words, f": {counted(facts, 'fact')}, {others} of {source} in {saved.target}"), soft_wrap=True
    )
    out.print("\nNext:")
    for step in next_steps(saved):
        out.print(f"  {step}", soft_wrap=True)


def _list(title: str, findings: list[Missing], style: str) -> None:
    if not findings:
        return
    out = console()
    out.print(Text(title, f"bold {style}"))
    for each in findings[:SHOWN]:
        entries = f": entries {range_text(each.first, each.last)}" if each.first is not None else ""
        out.print(Text.assemble("  ", (one_line(each.where), style), entries), soft_wrap=True)
        out.print(Text(one_line(f"    {each.detail}")), soft_wrap=True)
    if len(findings) > SHOWN:
        out.print(f"  and {count_text(len(findings) - SHOWN)} more; --json lists all")


def next_steps(saved: Salvaged) -> list[str]:
    """Say what is left to do."""
    return [
        f"bsfg verify {saved.target}",
        f"set [zone] data_folder in zone.toml to {saved.target}, or move it into its place, and start the node",
        "in every zone that pulls from this one: bsfg gate, and release the links that are held",
        "keep the old folder until what is missing was fetched again or is not needed",
    ]
