"""`bsfg demo storage`: kill a writer in mid-stream, several times, and prove that nothing is lost or doubled."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bsfg.cli.ending import orderly_end, run
from bsfg.cli.output import console, examples, print_json
from bsfg.errors import FileExists, InvalidArgument

if TYPE_CHECKING:
    from bsfg.cli.demo.storage.director import Plan

EPILOG = examples(
    ("bsfg demo storage", "about ten seconds, nothing is left behind"),
    ("bsfg demo storage --kills 20 --facts 20000", "a rougher one"),
    ("bsfg demo storage --keep demo-data", "keep the data folder, then: bsfg inspect demo-data"),
    ("bsfg demo storage --json", "only the counts, for a program"),
)


def storage(
    *,
    producers: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="How many processes append.")] = 4,
    facts: Annotated[int, typer.Option(metavar="N", min=1, help="How many facts they append in all.")] = 12_000,
    kills: Annotated[int, typer.Option(metavar="N", min=0, help="How often the writer is killed.")] = 5,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Kill at the moments of an earlier run.")] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Put the data here and keep it; the folder must be new or empty.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print only the outcome, as JSON.")] = False,
) -> None:
    """Kill the writer in mid-stream, several times, and prove that nothing acknowledged is lost or stored twice.

    Several processes append facts through one writer, which answers each fact only when it is on disk. The writer is
    killed with SIGKILL at random moments; each time the folder is read without it, then opened again, and producers
    repeat with the same ids what was not answered. At the end every fact is counted, its place, its bytes and the hash
    chain are checked, and the exit code is 1 if anything is lost, doubled or altered.
    """
    from bsfg.cli.demo.storage.director import Plan

    plan = Plan(producers, max(1, facts // producers), kills, secrets.randbelow(10**6) if seed is None else seed)
    folder = _folder(keep)
    with orderly_end():
        backstage = Path(tempfile.mkdtemp(prefix="bsfg-demo-"))
        try:
            ok = _perform(plan, folder or backstage / "data", backstage, kept=folder, as_json=json)
        finally:
            shutil.rmtree(backstage, ignore_errors=True)
    if not ok:
        raise typer.Exit(1)


def _folder(keep: Path | None) -> Path | None:
    if keep is None:
        return None
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise FileExists(f"{keep} is not empty", hint="Give the name of a new folder.")
    except OSError as error:
        raise InvalidArgument(f"cannot use {keep}: {error.strerror}") from None
    return keep.absolute()


def _perform(plan: Plan, folder: Path, backstage: Path, *, kept: Path | None, as_json: bool) -> bool:
    from bsfg.cli.demo.storage import view
    from bsfg.cli.demo.storage.director import Director, Event, Stage
    from bsfg.cli.demo.storage.referee import judge

    screen = console(stderr=as_json)
    line_by_line = not screen.is_terminal and not as_json

    def on_event(event: Event) -> None:
        if line_by_line:
            screen.print(view.event_text(event))

    stage = Stage(plan, on_event)
    if line_by_line or screen.is_terminal:
        view.introduce(screen)
    with view.watching(stage, screen):
        run(Director(stage, folder, backstage).play())
    verdict = judge(folder, stage.acknowledged, plan.producers, plan.facts)
    where = str(kept) if kept is not None else None
    if as_json:
        print_json(view.as_dict(stage, verdict, where, time.monotonic() - stage.started))
    else:
        view.show_verdict(stage, verdict, where)
    return verdict.ok
