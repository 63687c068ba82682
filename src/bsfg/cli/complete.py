"""What the shell can complete: names that stand in the zone's file, without asking the node.

Completion must never fail or wait, so whatever goes wrong completes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from bsfg.node.config import ZoneConfig

Complete = Callable[[typer.Context, str], list[str]]


def _from_config(names: Callable[[ZoneConfig], Iterable[str]]) -> Complete:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(Exception):
            from bsfg.node.config import load

            given = ctx.params.get("config") or os.environ.get("BSFG_CONFIG") or "zone.toml"
            return [name for name in names(load(Path(given))) if name.startswith(incomplete)]
        return []

    return complete


def _peer_consumers(config: ZoneConfig) -> list[str]:
    from bsfg.node.config import consumer_name

    return [
        consumer_name(zone, stream, buffer)
        for zone, row in config.serve.items()
        for stream in config.streams_of(row)
        for buffer in row.buffers
    ]


gates = _from_config(lambda config: [*config.links, *config.serve])
identities = _from_config(lambda config: config.identities)
streams = _from_config(lambda config: config.streams)
consumers = _from_config(_peer_consumers)
