"""`bsfg status`: how a node is doing, at one look or all the time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.connection import CONNECTION_ERRORS, Target, connects
from bsfg.cli.output import console, examples, json_line, print_json
from bsfg.errors import BsfgError, RemoteError

if TYPE_CHECKING:
    from bsfg.wire.connection import Connection

app = typer.Typer()

EPILOG = examples(
    ("bsfg status --config plant/zone.toml", "streams, fill, frontiers, lag, links and what needs attention"),
    ("bsfg status --wait 30", "the same as soon as the node answers; after its start"),
    ("bsfg status --watch", "the same all the time, until Ctrl-C"),
    ("bsfg status --json | jq .autonomy_hours", "one value for a program"),
    ("bsfg status > /dev/null || echo look at the gateway", "the exit code for a script"),
)

Document = dict[str, Any]

WAIT_SECONDS = 0.2


@app.command(epilog=EPILOG)
@connects("viewer", "operator")
def status(
    node: Target,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long --watch waits between two looks.")
    ] = 2.0,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for a node that does not answer yet.")
    ] = 0.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON; with --watch one document a line.")
    ] = False,
) -> None:
    """Show how a node is doing: streams and fill, frontiers and backlogs, the mode and lag of every link, alerts.

    Autonomy is the time until the first store buffer is full if facts keep coming as they do and none leaves. The
    exit code is 0 when nothing is in alert, 1 when something is, or when the node cannot be asked. Warnings do not
    count.
    """
    if watch:
        code = _watch(node, interval, _json_line if json else _screen())
    else:
        document = node.run(_status) if not wait else node.run(lambda connection: _awaited(connection, wait))
        code = _exit_code(document)
        if json:
            from bsfg.node.health import as_json

            print_json(as_json(document))
        else:
            from bsfg.cli.status.view import render

            console().print(render(document))
    if code:
        raise typer.Exit(code)


async def _status(connection: Connection) -> Document:
    from bsfg.node.health import as_json
    from bsfg.wire.adminclient import AdminClient

    document = await AdminClient(connection).status()
    try:
        as_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteError(f"the status of {connection.address} is in a form not known here: {error!r}") from None
    return document


async def _awaited(connection: Connection, seconds: float) -> Document:
    """Ask until there is an answer, or it has taken too long; what can only be put right by a person is no wait."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await _status(connection)
        except BsfgError as error:
            if not error.retryable or asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(WAIT_SECONDS)


def _exit_code(document: Document) -> int:
    from bsfg.node.health import Level, findings, worst

    return int(worst(findings(document)) == Level.ALERT)


def _watch(node: Target, interval: float, show: Callable[[Document | BsfgError], None]) -> int:
    """Show the status until Ctrl-C and give the exit code of the last one; a node that is away is shown as that."""
    code = 1

    async def look(connection: Connection) -> None:
        nonlocal code
        while True:
            try:
                seen: Document | BsfgError = await _status(connection)
                code = _exit_code(seen)  # type: ignore[arg-type]
            except CONNECTION_ERRORS as error:
                seen, code = await asyncio.to_thread(node.explained, error), 1
            show(seen)
            await asyncio.sleep(interval)

    try:
        node.run(look)
    except KeyboardInterrupt:
        pass
    finally:
        getattr(show, "close", lambda: None)()
    return code


def _json_line(seen: Document | BsfgError) -> None:
    from bsfg.node.health import as_json

    document = {"error": seen.to_dict()} if isinstance(seen, BsfgError) else as_json(seen)
    sys.stdout.buffer.write(json_line(document))
    sys.stdout.buffer.flush()


def _screen() -> Callable[[Document | BsfgError], None]:
    """Give what shows a status: in place on a terminal, one after the other elsewhere."""
    out = console()
    return _LiveScreen() if out.is_terminal else lambda seen: out.print(_rendered(seen))


class _LiveScreen:
    """A terminal whose content is replaced by each new status."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(console=console(), screen=True, auto_refresh=False)
        self._live.start()

    def __call__(self, seen: Document | BsfgError) -> None:
        self._live.update(_rendered(seen), refresh=True)

    def close(self) -> None:
        self._live.stop()


def _rendered(seen: Document | BsfgError) -> Any:
    from bsfg.cli.status.view import render

    if isinstance(seen, BsfgError):
        return Text.assemble((f"{seen.code}: ", "bold red"), seen.message, f"\n{seen.hint}")
    return render(seen)
