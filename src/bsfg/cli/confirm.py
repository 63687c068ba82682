"""`bsfg confirm`: tell a node what a durable consumer has finished."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from bsfg.cli.common import Json, argument, option
from bsfg.cli.common import consumers as known_consumers
from bsfg.cli.connection import Target, connects
from bsfg.cli.output import console, examples, print_json
from bsfg.errors import InvalidArgument

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection

app = typer.Typer(
    epilog=examples(
        ("bsfg confirm historian 41", "everything up to and including offset 41"),
        ("bsfg confirm historian --ranges 50-59,65", "some beyond it; the cursor waits until the hole is closed"),
    )
)


@app.command()
@connects("consumer")
def confirm(
    node: Target,
    consumer: Annotated[str, argument("CONSUMER", "The durable consumer.", autocompletion=known_consumers)],
    offset: Annotated[int | None, argument("OFFSET", "Confirm everything up to and including this.", min=0)] = None,
    *,
    ranges: Annotated[str, option("A-B,C,…", "Confirm these offsets as well, in any order.", show_default=False)] = "",
    json: Json = False,
) -> None:
    """Confirm facts of a consumer: they do not come again, and the node may let them go.

    Only confirm what is safe elsewhere: a required consumer's confirmation allows the node to remove facts for good.
    """
    from bsfg.ports import Confirmation

    wanted = [_range(text) for text in ranges.split(",") if text.strip()]
    if offset is None and not wanted:
        raise InvalidArgument("nothing is to be confirmed", hint="Give an offset, or --ranges.")

    async def call(connection: Connection) -> int:
        from bsfg.wire.client import BoundaryClient

        return await BoundaryClient(connection).confirm(consumer, Confirmation(offset, wanted))

    advanced_to = node.run(call)
    if json:
        print_json({"consumer": consumer, "cursor_advanced_to": advanced_to})
    elif advanced_to < 0:
        console().print(f"{consumer} has nothing confirmed from the beginning yet.", markup=False)
    else:
        console().print(f"{consumer} is confirmed through offset {advanced_to}.", markup=False)


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", text)
    if found is None:
        raise InvalidArgument(f"--ranges: {text!r} is neither an offset nor a range", hint="For example: 50-59,65")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise InvalidArgument(f"--ranges: {text.strip()} ends before it begins")
    return first, last
