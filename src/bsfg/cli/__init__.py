"""The command line, `bsfg`: one command per file, each imported only when it is asked for.

A new command is a module with ``app = typer.Typer()`` and a row in `COMMANDS`. Importing the module must be cheap:
libraries that are slow to load, or that belong to an extra, are imported inside the command's function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

COMMANDS: dict[str, str] = {
    "demo": "bsfg.cli.demo",
    "init": "bsfg.cli.init",
    "certs": "bsfg.cli.certs",
    "token": "bsfg.cli.token",
    "node": "bsfg.cli.node",
    "reload": "bsfg.cli.reload",
    "append": "bsfg.cli.append",
    "fetch": "bsfg.cli.fetch",
    "confirm": "bsfg.cli.confirm",
    "tail": "bsfg.cli.tail",
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
    "migrate": "bsfg.cli.migrate",
    "bench": "bsfg.cli.bench",
    "completion": "bsfg.cli.completion",
    "help": "bsfg.cli.help",
}
"""Every command and the module that has its ``app``, in the order in which `bsfg --help` lists them."""

SUMMARIES: dict[str, str] = {
    "demo": "Cut the network between two zones, kill a node, heal it all, and prove that nothing is lost or "
    "there twice.",
    "init": "Write a commented zone.toml for a new zone.",
    "certs": "Make a development authority and certificates, show and check existing ones.",
    "token": "Make a token for the dashboard, and the row of the zone's file that lets it in.",
    "node": "Run the node of a zone.",
    "reload": "Have a running node take up what has changed in its file, at once and without a restart.",
    "append": "Append facts to a stream of the zone; each is durable when it is counted as stored.",
    "fetch": "Write the next facts of a consumer to stdout, one JSON object a line.",
    "confirm": "Confirm facts of a consumer: they do not come again, and the node may let them go.",
    "tail": "Show the newest facts of a stream, and with --follow those that come.",
    "status": "Show how a node is doing: streams and fill, frontiers and backlogs, the mode and lag of every link, "
    "alerts.",
    "gate": "See, hold and release the gates of the links.",
    "consumers": "List, add and retire the named durable consumers of a node.",
    "streams": "Show how far the buffers of a node are confirmed, and truncate them by hand.",
    "quarantine": "See, retry, export and drop facts that were refused for good and kept aside.",
    "artifact": "Upload, download and look at artifacts: the files that facts refer to by digest.",
    "pipeline": "Run a job on Spark: replicate links, land facts as tables, ingest files, audit a link; or all that a "
    "zone has.",
    "doctor": "Check everything a node needs: configuration, certificates, clock, disk, ports, peers, data folder, "
    "limits.",
    "verify": "Check a data folder: every checksum, the hash chain, digests, key segments, index, cursors and the "
    "audit trail.",
    "inspect": "Show what is in a data folder: streams, segments, offsets, sizes, consumers, gaps, quarantine, key "
    "index.",
    "audit-trail": "See who did what at a node, or was kept from it: refusals, sign-ins, acts of operators, starts, "
    "backups.",
    "backup": "Copy everything a zone has into a new folder, while its node runs and producers append.",
    "restore": "Bring a zone back from a backup, into the places that its zone.toml names.",
    "salvage": "Write everything that can be read of a damaged data folder into a new one, and say what is missing.",
    "migrate": "Move everything a zone has from one storage to another: log, PostgreSQL, JetStream, or another "
    "package's.",
    "bench": "Measure how fast this machine is at what BSFG does.",
    "completion": "Write a shell's completion script to stdout: commands, options, and the names in the zone's file.",
    "help": "Show a page of the documentation; it comes with the package and needs no network.",
}
"""The first sentence of each command's own help, so that a list of all of them imports none."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code: 0 done, 1 an error or a finding, 2 wrong usage, 130 interrupted."""
    # Linear algebra that nobody uses here would start a thread per core, in this process and in all that it starts,
    # each of which turns in circles for 30 ms of the processor before it sleeps.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from bsfg.cli.app import run

    return run(args)
