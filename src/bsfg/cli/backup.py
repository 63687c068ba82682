"""`bsfg backup`: copy a zone while its node runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bsfg.cli.common import argument, config_or_data, flag, option, orderly_end
from bsfg.cli.output import console, count_text, examples, print_json, range_text, size_text, stages, table
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from bsfg.node.backup import Manifest, ZonePlace

app = typer.Typer()

EPILOG = examples(
    ("bsfg backup /mnt/backup/plant-a-monday --config plant-a/zone.toml", "copy a zone; its node may run"),
    ("bsfg backup tuesday --base monday", "take what did not change from an earlier backup, by links"),
    ("bsfg backup copy --data data", "a data folder alone"),
    ("bsfg verify /mnt/backup/plant-a-monday/data", "check a backup again later"),
    ("bsfg inspect /mnt/backup/plant-a-monday/data", "see what is in it"),
)

KEYS_NOTE = "Private keys are not in it: keep them elsewhere, or use --with-keys."
UNSIGNED_NOTE = (
    "It is not signed, because there is no key of the zone's node to sign with, or no cryptography (it comes with "
    "bsfg[node]): see `bsfg restore --help`."
)


@app.command(epilog=EPILOG)
def backup(
    target: Annotated[Path, argument("TARGET", "A new folder for the backup.")],
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The zone's file. Default: zone.toml.", envvar="BSFG_CONFIG")
    ] = None,
    data: Annotated[Path | None, option("DIR", "A data folder alone, without a zone's file.")] = None,
    base: Annotated[
        Path | None, option("BACKUP", "An earlier backup on this disk; what did not change is linked.")
    ] = None,
    with_keys: Annotated[bool, flag("--with-keys", "Put the private key of the zone's node into it as well.")] = False,
    no_verify: Annotated[bool, flag("--no-verify", "Do not read the copy again to check it; a restore does.")] = False,
    json: Annotated[bool, flag("--json", "Print what is in the backup as JSON.")] = False,
) -> None:
    """Copy everything a zone has into a new folder, while its node runs and producers append.

    The backup holds all that was acknowledged before it began, in order and without a hole: facts, gap records,
    quarantine, consumers, what is known of peers, artifacts, the zone's file and its certificates, but not their keys:
    with --with-keys the node's own, and never that of an authority or of anybody else. The node's key signs it all.

    It is checked byte by byte at the end; the exit code is 1 when something is damaged (the zone itself then is, too).
    Nothing is ever overwritten, and what is interrupted leaves nothing behind. `bsfg restore` brings it back.
    """
    from bsfg.clock import SystemClock
    from bsfg.node.backup import BackupOptions, back_up, is_signed
    from bsfg.node.trail import told_by_user

    place = _place(config, data)
    with orderly_end(), stages() as progress:
        options = BackupOptions(base, with_keys, verify=not no_verify)
        manifest = back_up(place, target, options, SystemClock().now_unix_ms, progress)
    made = {"size_bytes": manifest.size_bytes, "with_keys": with_keys, "sound": not manifest.damage}
    told_by_user(place.data, "backup_made", str(target.resolve()), made, manifest.made_unix_ms)
    if json:
        about = {name: value for name, value in asdict(manifest).items() if name != "contents"}
        print_json({"backup": str(target), "sound": not manifest.damage, "signed": is_signed(target), **about})
    else:
        _show(target, manifest, place)
    if manifest.damage:
        raise typer.Exit(1)


def _place(config: Path | None, data: Path | None) -> ZonePlace:
    from bsfg.config import load
    from bsfg.node.backup import ZonePlace

    path = config_or_data(config, data, "what to back up")
    return ZonePlace.of_folder(data) if data is not None else ZonePlace.of(load(path))


def _show(target: Path, manifest: Manifest, place: ZonePlace) -> None:
    from bsfg.node.backup import is_signed

    out = console()
    rows = table("log", "offsets", "entries", right=("entries",))
    for log in manifest.logs:
        offsets, entries = range_text(log.start, log.end - 1), count_text(log.end - log.start)
        rows.add_row(f"{log.stream}/{log.buffer}", offsets, entries)
    out.print(rows)
    for problem in manifest.damage:
        out.print(Text.assemble(("  " + problem["code"], "red"), one_line(f" {problem['where']}: {problem['detail']}")))
    size = size_text(manifest.size_bytes)
    held = f"{size} with {counted(manifest.artifacts, 'artifact')}" if manifest.artifacts else size
    state = ("not verified", "bold yellow") if manifest.problems is None else ("sound", "bold green")
    if manifest.damage:
        state = ("damaged, as the zone is", "bold red")
    out.print(Text.assemble(state, f": {held} in {target}"), soft_wrap=True)
    if not is_signed(target):
        out.print(UNSIGNED_NOTE, style="yellow", soft_wrap=True)
    if place.key is not None and not manifest.with_keys:
        out.print(KEYS_NOTE, soft_wrap=True)
