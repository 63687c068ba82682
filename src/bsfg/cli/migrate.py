"""`bsfg migrate`: move a zone from one storage to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import orderly_end, run
from bsfg.cli.output import console, count_text, examples, print_json, range_text, size_text, stages, table
from bsfg.wording import counted

if TYPE_CHECKING:
    from bsfg.config import ZoneConfig
    from bsfg.node.migrate import Migration, MigrationPlan

app = typer.Typer()

EPILOG = examples(
    ("bsfg migrate --to zone-new.toml --dry-run", "what would be moved; the node must be stopped"),
    ("bsfg migrate --to zone-new.toml", "move it, or go on with what was interrupted"),
    ("bsfg node --config zone-new.toml", "start the node on the new storage"),
    ("bsfg migrate -c zone.toml --to zone-new.toml --json | jq .buffers", "for a program"),
)


@app.command(epilog=EPILOG)
def migrate(
    *,
    to: Annotated[
        Path,
        typer.Option("--to", metavar="FILE", help="The zone's file with the new [storage] and another data_folder."),
    ],
    config: Annotated[
        Path, typer.Option("--config", "-c", envvar="BSFG_CONFIG", help="The zone's file as it is now.")
    ] = Path("zone.toml"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only read the old storage, check it, and say what would be moved.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was moved as JSON.")] = False,
) -> None:
    """Move everything a zone has from one storage to another: log, PostgreSQL, JetStream, or another package's.

    Facts keep their bytes, offsets, times and hash chain. Consumers, gap records, quarantine, the keys of facts that
    left, held gates, what is known of peers, artifacts and the audit trail come along, so that links go on as after a
    restart. All of it is read again in the new storage and held against the old one by digest.

    The node must be stopped, and those that stand by. The new place must be empty. What is interrupted goes on when the
    same command is run again. Nothing of the old storage is removed; it is marked, so that no node starts on it.
    """
    from bsfg.clock import SystemClock
    from bsfg.config import load
    from bsfg.node.migrate import as_dict
    from bsfg.node.migrate import migrate as move
    from bsfg.node.migrate import plan as planned
    from bsfg.node.trail import told_by_user

    source, target, clock = load(config), load(to), SystemClock()
    if dry_run:
        with orderly_end(), stages() as progress:
            plan = run(planned(source, target, clock, progress))
        if json:
            print_json({"dry_run": True, **_sides(source, target), **as_dict(plan)})
        else:
            _show_plan(plan, source, target)
        return
    with orderly_end(), stages() as progress:
        moved = run(move(source, target, clock, progress))
    if not moved.was_done:
        for side in (source, target):
            told_by_user(side.data_folder, "migrated", source.zone.name, _sides(source, target), clock.now_unix_ms())
    if json:
        print_json({**_sides(source, target), **as_dict(moved), "next": next_steps(source, target)})
    else:
        _show(moved, source, target)


def _sides(source: ZoneConfig, target: ZoneConfig) -> dict[str, Any]:
    return {"zone": source.zone.name, "from": source.storage.backend, "to": target.storage.backend}


def _show_plan(plan: MigrationPlan, source: ZoneConfig, target: ZoneConfig) -> None:
    out = console()
    numbers = ("size", "gaps", "aside")
    rows = table("buffer", "offsets", *numbers, right=numbers)
    for each in plan.buffers:
        name, offsets = f"{each.stream}/{each.buffer}", range_text(each.start, each.end - 1)
        rows.add_row(name, offsets, size_text(each.size_bytes), count_text(each.gaps), count_text(each.quarantined))
    out.print(rows)
    held = f"{counted(plan.consumers, 'consumer')}, {counted(plan.artifacts, 'artifact')}"
    out.print(f"{held} ({size_text(plan.artifact_bytes)}), from {source.storage.backend}", soft_wrap=True)
    out.print(Text.assemble("to ", target.storage.backend, ": ", plan.target), soft_wrap=True)
    out.print(Text.assemble(("sound", "bold green"), "; nothing was moved"))


def _show(moved: Migration, source: ZoneConfig, target: ZoneConfig) -> None:
    out = console()
    if not moved.was_done:
        numbers = ("facts", "known keys", "gaps", "aside")
        rows = table("buffer", "offsets", *numbers, "digest", right=numbers)
        for each in moved.buffers:
            found = each.found
            counts = (found.facts, found.keys, found.gaps, found.quarantined)
            offsets = range_text(found.start, found.end - 1)
            rows.add_row(f"{each.stream}/{each.buffer}", offsets, *map(count_text, counts), found.digest[:16])
        out.print(rows)
        for digest in moved.missing_artifacts:
            out.print(Text.assemble(("  missing ", "yellow"), f"{digest}: a fact names it, and the old zone lacks it"))
    words = "moved before" if moved.was_done else "moved and verified"
    held = "" if moved.was_done else f": {counted(moved.consumers, 'consumer')}, {counted(moved.artifacts, 'artifact')}"
    sides = f"{source.zone.name} from {source.storage.backend} to {target.storage.backend}"
    out.print(Text.assemble((words, "bold green"), f"{held}, {sides}" if held else f": {sides}"), soft_wrap=True)
    out.print("\nNext:")
    for step in next_steps(source, target):
        out.print(f"  {step}", soft_wrap=True)


def next_steps(source: ZoneConfig, target: ZoneConfig) -> list[str]:
    """Say what is left to do."""
    return [
        f"bsfg node --config {target.source}, and let whatever starts the node name that file",
        f"bsfg doctor --config {target.source}",
        f"keep the old storage ({source.storage.backend}) until you are sure; no node starts on it any more",
    ]
