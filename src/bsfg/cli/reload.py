"""`bsfg reload`: have a running node take up what has changed in its file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from bsfg.cli.common import Json
from bsfg.cli.connection import Target, admin_of, connects
from bsfg.cli.output import console, examples, print_json

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection

app = typer.Typer(
    epilog=examples(
        ("bsfg reload", "take up zone.toml of this folder"),
        ("bsfg reload --config plant-a/zone.toml --json", "what changed and what waits, for a program"),
    )
)


@app.command()
@connects("operator")
def reload(node: Target, json: Json = False) -> None:
    """Have a running node take up what has changed in its file, at once and without a restart.

    Taken up are [authorities], [identities], [tokens], [links], [serve], [alerts], streams that are new, and the
    thresholds of those that are there. All of it is checked first, and counts as a whole or not at all. What else
    differs is named and waits for a restart. The node looks at its file by itself, too, about two seconds after it
    was written; this says at once how it went.
    """

    async def call(connection: Connection) -> dict[str, Any]:
        return await admin_of(connection).reload()

    found = node.run(call)
    if json:
        print_json(found)
        return
    changed, waiting = ", ".join(found["changed"]), ", ".join(found["waiting_for_restart"])
    console().print(
        f"Taken up: {changed}."
        if changed
        else "The file counts; nothing of it has changed since it was last taken up.",
        soft_wrap=True,
    )
    if waiting:
        console().print(f"These count after a restart: {waiting}.", style="yellow", soft_wrap=True)
