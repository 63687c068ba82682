"""`bsfg restore`: bring a zone back from a backup."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import argument, flag, option, orderly_end
from bsfg.cli.output import console, count_text, examples, print_json, stages, table, time_text
from bsfg.wording import counted

if TYPE_CHECKING:
    from bsfg.node.restore import Restored

app = typer.Typer()

EPILOG = examples(
    ("bsfg restore /mnt/backup/plant-a-monday plant-a", "bring a zone back into the folder of its zone.toml"),
    ("bsfg restore backup plant-a --ca ca.crt --take-config", "into an empty folder, with the zone.toml in the backup"),
    ("bsfg restore copy data --accept-unsigned", "the backup of a data folder alone, which nobody signs"),
    ("bsfg restore /mnt/move/plant-a plant-a --moved", "after a move to another machine, nothing written since"),
)

GUIDE = "bsfg help backup"
DAMAGE_SHOWN = 20


@app.command(epilog=EPILOG)
def restore(
    backup: Annotated[Path, argument("BACKUP", "A folder that `bsfg backup` made.")],
    folder: Annotated[Path, argument("FOLDER", "The zone's folder, the one for its zone.toml.")],
    *,
    moved: Annotated[bool, flag("--moved", "Keep the history: only if nothing was written since the backup.")] = False,
    accept_damage: Annotated[
        bool, flag("--accept-damage", "Restore what is left of a damaged backup, and name what is wrong.")
    ] = False,
    ca: Annotated[
        Path | None, option("FILE", "Who vouches for the zone's signature. Default: as in zone.toml.")
    ] = None,
    take_config: Annotated[
        bool, flag("--take-config", "Take zone.toml and certificates of the backup where there are none.")
    ] = False,
    accept_unsigned: Annotated[
        bool, flag("--accept-unsigned", "Ask nobody who made the backup; it may be anybody's.")
    ] = False,
    json: Annotated[bool, flag("--json", "Print what was restored and what comes next as JSON.")] = False,
) -> None:
    """Bring a zone back from a backup, into the places that its zone.toml names.

    The backup must be signed by the zone, and is held against what was signed before anything is written. Whose
    signature counts is said by the authority in the zone.toml of the folder, or by --ca. Backups of data folders alone,
    of nodes without TLS and of earlier versions are not signed and need --accept-unsigned.

    A zone.toml that is in the folder counts. One that is missing is taken from the backup only with --take-config,
    together with certificates, because it says what this machine does. What is there is never overwritten.

    Everything that was appended after the backup is missing, but peers may have seen it. So each log goes on as a new
    history: peers that pull from here hold their links with `foreign_log` until an operator releases them, and links of
    this zone are held with `frame_invalid` when their senders have gone on. Once released, each side gets what it
    lacks, and what it has is known by its key. With --moved the history stays the same and nothing is held.
    """
    from bsfg.clock import SystemClock
    from bsfg.node.restore import RestoreOptions
    from bsfg.node.restore import restore as restore_zone
    from bsfg.node.trail import told_by_user

    with orderly_end(), stages() as progress:
        options = RestoreOptions(moved, accept_damage, take_config, ca, accept_unsigned)
        restored = restore_zone(backup, folder, options, SystemClock().now_unix_ms, progress)
    how = {"backup": str(backup.resolve()), "moved": moved, "accept_damage": accept_damage}
    how |= {"accept_unsigned": accept_unsigned, "take_config": take_config, "damage": len(restored.damage)}
    told_by_user(restored.data, "restored", str(restored.data.resolve()), how, SystemClock().now_unix_ms())
    if json:
        print_json(_as_dict(restored))
    else:
        _show(restored)


def _as_dict(restored: Restored) -> dict[str, Any]:
    manifest = restored.manifest
    return {
        "zone": manifest.zone,
        "backup_begun_unix_ms": manifest.begun_unix_ms,
        "data": str(restored.data),
        "artifacts": str(restored.artifacts),
        "config": str(restored.config) if restored.config is not None else None,
        "logs": restored.logs,
        "files": restored.files,
        "lacking": restored.lacking,
        "signed_by": restored.signed_by,
        "warnings": restored.warnings,
        "sound": not restored.damage,
        "damage": restored.damage,
        "next": next_steps(restored),
    }


def _show(restored: Restored) -> None:
    out = console()
    if restored.logs:
        rows = table("log", "next offset", "newest entry", "new log_id", right=("next offset",))
        for log in restored.logs:
            newest = time_text(log.newest_unix_ms)
            rows.add_row(f"{log.stream}/{log.buffer}", count_text(log.end), newest, log.log_id)
        out.print(rows)
    when = time_text(restored.manifest.begun_unix_ms)
    out.print(f"Restored {restored.data} as it was at {when}.", soft_wrap=True)
    if restored.logs:
        out.print("What was appended after that is not here. Offsets from these on will be given to other facts.")
    if restored.damage:
        out.print(f"\nIt is damaged, as you accepted ({counted(len(restored.damage), 'problem')}):", style="bold red")
        for problem in restored.damage[:DAMAGE_SHOWN]:
            out.print(Text(f"  {problem}"), soft_wrap=True)
        if len(restored.damage) > DAMAGE_SHOWN:
            out.print(f"  and {count_text(len(restored.damage) - DAMAGE_SHOWN)} more; --json names all of them.")
        out.print("What is not in the backup is lost here; peers may have it.\n")
    out.print(f"Signed by {restored.signed_by}." if restored.signed_by else "Nobody was asked who made this backup.")
    if restored.warnings:
        out.print("\nThe zone.toml that came with it says:", style="yellow")
    for warning in restored.warnings:
        out.print(f"  {warning}", soft_wrap=True)
    out.print("\nNext:")
    for step in next_steps(restored):
        out.print(f"  {step}", soft_wrap=True)


def next_steps(restored: Restored) -> list[str]:
    """Say what is left to do."""
    steps = [f"put back {path}" for path in restored.lacking]
    if restored.config is None:
        return [*steps, f"bsfg verify {restored.data}"]
    steps.append(f"bsfg node --config {restored.config}")
    if not restored.logs:
        return steps
    zone = restored.manifest.zone
    return [
        *steps,
        f"in every zone that pulls from {zone}: bsfg gate release from-{zone.lower()} --reason '{zone} was restored'",
        f"in {zone}: bsfg gate, and release the links that are held",
        f"bring back what peers have of {zone} and the backup has not: {GUIDE}",
    ]
