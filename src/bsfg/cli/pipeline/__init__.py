"""`bsfg pipeline`: the jobs that run on Spark."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

JOBS: dict[str, str] = {
    "run": "bsfg.cli.pipeline.run",
    "replicate": "bsfg.cli.pipeline.replicate",
    "land": "bsfg.cli.pipeline.land",
    "ingest": "bsfg.cli.pipeline.ingest",
    "audit": "bsfg.cli.pipeline.audit",
}
"""Every job and the module that has its ``app``, in the order in which `bsfg pipeline --help` lists them."""


class Jobs(TyperGroup):
    """The group of the jobs; a job's module is imported when the group is used."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        for name, module in JOBS.items():
            app = import_module(module).app
            command = get_command(app)
            command.name = name
            command.params = [param for param in command.params if not (param.name or "").endswith("_completion")]
            if not command.epilog and isinstance(app.info.epilog, str):
                command.epilog = app.info.epilog
            self.commands[name] = command

    def list_commands(self, ctx: Any) -> list[str]:
        """List the jobs in the order of the table."""
        return list(JOBS)


app = typer.Typer(cls=Jobs, no_args_is_help=True)


@app.callback()
def pipeline() -> None:
    """Run a job on Spark: replicate links, land facts as tables, ingest files, audit a link; or all that a zone has.

    Java comes with the package. Spark runs inside the command unless --master names a cluster.
    """
