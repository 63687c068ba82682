"""`bsfg token`: make a token with which a person signs in to the dashboard."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated

import typer

from bsfg.cli.common import argument, flag
from bsfg.cli.output import console, examples, print_json
from bsfg.rules import check_name

TOKEN_NAME = r"[a-z0-9][a-z0-9._-]{0,63}"

app = typer.Typer()

EPILOG = examples(
    ("bsfg token control-room", "a token for somebody who may look"),
    ("bsfg token shift-lead --role operator", "one for somebody who may also hold and release gates"),
    ("bsfg token support --facts", "one for somebody who may also look at facts"),
    ("bsfg token control-room --json | tee token.json | jq -r .row >> zone.toml", "the row where it belongs"),
)


class TokenKind(StrEnum):
    """What the bearer may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@app.command(epilog=EPILOG)
def token(
    name: Annotated[str, argument("NAME", "Who gets it; shown on the page and in every record.")],
    role: Annotated[TokenKind, typer.Option(help="viewer looks, operator also acts.")] = TokenKind.VIEWER,
    facts: Annotated[bool, flag("--facts", "It may also look at facts, of all streams.")] = False,
    days: Annotated[int, typer.Option("--days", help="From today, how long it is good.", min=1, max=3650)] = 90,
    json: Annotated[bool, flag("--json", "Print token, hash and row as JSON.")] = False,
) -> None:
    """Make a token for the dashboard, and the row of the zone's file that lets it in.

    The token is shown this once and kept nowhere: the file has its hash only. Give it to one person, over a way that
    others do not read. After 90 days, or as --days says, it is refused; taking the row out ends it earlier.
    """
    from bsfg.node.dashboard.sessions import hash_of, make

    check_name("token", name, TOKEN_NAME)
    made = make()
    expires = (datetime.now(UTC) + timedelta(days=days)).date().isoformat()
    reads = "facts = true\n" if facts else ""
    row = f'\n[tokens.{_quoted(name)}]\nhash = "{hash_of(made)}"\nrole = "{role}"\n{reads}expires = {expires}\n'
    if json:
        print_json(
            {
                "name": name,
                "role": str(role),
                "facts": facts,
                "expires": expires,
                "token": made,
                "hash": hash_of(made),
                "row": row,
            }
        )
        return
    where = "Add this to zone.toml. The node takes it up by itself; the first token of all, after a restart"
    shown = f"Token of {name}, shown only now:\n\n  {made}\n\n{where}:\n{row}"
    console().print(shown, soft_wrap=True, end="")


def _quoted(name: str) -> str:
    """Write a name as a key of TOML, in quotes where it has a dot."""
    return f'"{name}"' if "." in name else name
