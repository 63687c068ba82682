"""`bsfg bench`: how fast this machine is at what BSFG does, measured against its own SHA-256 and its own disk."""

from __future__ import annotations

import typer

from bsfg.cli.bench.store import EPILOG, store

app = typer.Typer(no_args_is_help=True)
app.command(epilog=EPILOG)(store)


@app.callback()
def bench() -> None:
    """Measure how fast this machine is at what BSFG does."""
