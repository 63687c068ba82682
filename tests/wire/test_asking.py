"""A driver that asks a sender again and again how far it is: every question is answered, and none stays open."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.wire.conftest import Sites
from tests.wire.site import STREAM

from bsfg.spark.calls import NodeAccess
from bsfg.spark.replicate.driver import LinkState, Replication
from bsfg.testing.facts import batch

TIMES = 300
"""More than the calls that one connection may have open at once."""


async def test_a_sender_is_asked_as_often_as_it_takes(sites: Sites, tmp_path: Path) -> None:
    """A long run looks several times a second; calls left open would block the connection, and the link with it."""
    site = await sites()
    await site.consumer("historian")
    await (await site.parts.store(STREAM)).append(batch(7))
    of = SimpleNamespace(stream=STREAM, consumer="historian")
    plan: Any = SimpleNamespace(
        name="from-plant",
        holder="us",
        peer=NodeAccess(site.grpc_address),
        own=NodeAccess(site.grpc_address),
        streams=[of],
        link=SimpleNamespace(carry_only=()),
    )
    spark: Any = None
    replication = Replication(spark, NodeAccess(site.grpc_address), [plan], tmp_path, 1)

    def ask() -> list[dict[str, tuple[int, int]]]:
        return [replication.spans(LinkState(plan, tmp_path)) for _ in range(TIMES)]

    assert await asyncio.to_thread(ask) == TIMES * [{STREAM: (0, 7)}]
