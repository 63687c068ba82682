"""`bsfg node`: run the gateway of one zone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import orjson
import typer

from bsfg.cli.output import examples

app = typer.Typer(
    epilog=examples(
        ("bsfg init plant --zone plant-a", "write a configuration to begin with"),
        ("bsfg doctor --config plant/zone.toml", "see whether this machine is ready for it"),
        ("bsfg node --config plant/zone.toml", "run the node until Ctrl-C or SIGTERM"),
    )
)


@app.command()
def node(
    config: Annotated[Path, typer.Option("--config", "-c", help="The zone's configuration.")] = Path("zone.toml"),
    ready_file: Annotated[
        Path | None, typer.Option(help="Write the ports as JSON to this file once the node serves; for scripts.")
    ] = None,
) -> None:
    """Run the node of a zone.

    The node stores what its zone's producers append, serves it to the zones that may have it, and pulls from the zones
    its links name. It logs JSON lines to standard error. SIGTERM and Ctrl-C stop it cleanly; being killed loses nothing
    that was acknowledged.
    """
    # gRPC takes its cipher suites from the environment when it is first imported, which bsfg.wire sees to.
    from bsfg.columns import leave_pandas_out
    from bsfg.config import load
    from bsfg.node.logs import configure
    from bsfg.node.node import Node
    from bsfg.node.running import run

    leave_pandas_out()
    settings = load(config)
    configure(str(settings.log.level), str(settings.log.format))

    def ready(running: Node) -> None:
        if ready_file is not None:
            ports = {"grpc_port": running.grpc_port, "http_port": running.http_port}
            ready_file.write_bytes(orjson.dumps(ports))

    asyncio.run(run(settings, ready))
