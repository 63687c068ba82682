"""`bsfg pipeline`: the jobs that run on Spark, and the sinks beside them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from bsfg.cli.common import command_of

JOBS: dict[str, str] = {
    "run": "bsfg.cli.pipeline.run",
    "replicate": "bsfg.cli.pipeline.replicate",
    "land": "bsfg.cli.pipeline.land",
    "ingest": "bsfg.cli.pipeline.ingest",
    "audit": "bsfg.cli.pipeline.audit",
    "sql": "bsfg.cli.pipeline.sinks:sql_app",
    "webhook": "bsfg.cli.pipeline.sinks:webhook_app",
    "pack": "bsfg.cli.pipeline.pack",
}
"""Every job and the module that has its ``app``, or what it calls that, in the order of `bsfg pipeline --help`."""


def app_of(job: str) -> Any:
    """Give the application of a job, whose module is imported when it is asked for."""
    module, _, name = JOBS[job].partition(":")
    return getattr(import_module(module), name or "app")


class Jobs(TyperGroup):
    """The group of the jobs; a job's module is imported when the group is used."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands.update({name: command_of(app_of(name), name) for name in JOBS})

    def list_commands(self, ctx: Any) -> list[str]:
        """List the jobs in the order of the table."""
        return list(JOBS)


app = typer.Typer(cls=Jobs, no_args_is_help=True)


@app.callback()
def pipeline() -> None:
    """Run a job on Spark: replicate links, land facts as tables, ingest files, audit a link; or all that a zone has.

    Java comes with the package. Spark runs inside the command unless --master names a cluster. The sinks, sql and
    webhook, are plain consumers and need neither. With what pack makes, nothing need be installed on a cluster's
    machines.
    """
