"""`bsfg bench`: how fast this machine is at what BSFG does, measured against its own SHA-256 and its own disk."""

from __future__ import annotations

import typer

from bsfg.cli.bench.node import EPILOG as NODE_EPILOG
from bsfg.cli.bench.node import node
from bsfg.cli.bench.pipeline import EPILOG as PIPELINE_EPILOG
from bsfg.cli.bench.pipeline import pipeline
from bsfg.cli.bench.store import EPILOG as STORE_EPILOG
from bsfg.cli.bench.store import store

app = typer.Typer(no_args_is_help=True)
app.command(epilog=STORE_EPILOG)(store)
app.command(epilog=NODE_EPILOG)(node)
app.command(epilog=PIPELINE_EPILOG)(pipeline)


@app.callback()
def bench() -> None:
    """Measure how fast this machine is at what BSFG does."""
