"""What the shell can complete: names that stand in the zone's file, without asking the node.

Completion must never fail or wait, so whatever goes wrong completes nothing, and the file is only read, not checked.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

Complete = Callable[[typer.Context, str], list[str]]
Tables = dict[str, Any]


def _from_config(names: Callable[[Tables], Iterable[str]]) -> Complete:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(Exception):
            given = ctx.params.get("config") or os.environ.get("BSFG_CONFIG") or "zone.toml"
            tables = tomllib.loads(Path(given).read_text(encoding="utf-8"))
            return [name for name in names(tables) if name.startswith(incomplete)]
        return []

    return complete


def _names(*kinds: str) -> Complete:
    return _from_config(lambda tables: [name for kind in kinds for name in tables.get(kind, {})])


def _peer_consumers(tables: Tables) -> list[str]:
    from bsfg.config import consumer_name
    from bsfg.ports import Buffer

    return [
        consumer_name(zone, stream, Buffer(buffer))
        for zone, row in tables.get("serve", {}).items()
        for stream in (tables["streams"] if "*" in row.get("streams", "*") else row["streams"])
        for buffer in row.get("buffers", ["store"])
    ]


gates = _names("links", "serve")
identities = _names("identities")
streams = _names("streams")
consumers = _from_config(_peer_consumers)
