"""The command line, `bsfg`: one command per file, each imported only when it is asked for.

A new command is a module with ``app = typer.Typer()`` and a row in `COMMANDS`. Importing the module must be cheap:
libraries that are slow to load, or that belong to an extra, are imported inside the command's function.
"""

from __future__ import annotations

from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "demo": "bsfg.cli.demo",
    "init": "bsfg.cli.init",
    "certs": "bsfg.cli.certs",
    "token": "bsfg.cli.token",
    "node": "bsfg.cli.node",
    "append": "bsfg.cli.append",
    "fetch": "bsfg.cli.fetch",
    "confirm": "bsfg.cli.confirm",
    "status": "bsfg.cli.status",
    "gate": "bsfg.cli.gate",
    "consumers": "bsfg.cli.consumers",
    "streams": "bsfg.cli.streams",
    "quarantine": "bsfg.cli.quarantine",
    "artifact": "bsfg.cli.artifact",
    "pipeline": "bsfg.cli.pipeline",
    "doctor": "bsfg.cli.doctor",
    "verify": "bsfg.cli.verify",
    "inspect": "bsfg.cli.inspect",
    "audit-trail": "bsfg.cli.audit_trail",
    "backup": "bsfg.cli.backup",
    "restore": "bsfg.cli.restore",
    "salvage": "bsfg.cli.salvage",
    "bench": "bsfg.cli.bench",
    "completion": "bsfg.cli.completion",
    "help": "bsfg.cli.help",
}
"""Every command and the module that has its ``app``, in the order in which `bsfg --help` lists them."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0 done, 1 an error or a finding, 2 wrong usage, 130 interrupted."""
    from bsfg.cli.app import run

    return run(args)
