"""What the tests of sinks share: a plant with a node of its own, and tables of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import certificates
from tests.sdk.conftest import endpoint
from tests.servers import postgres
from tests.spark.nodes import STREAMS, SparkZone

from bsfg.ports import Buffer, ConsumerSpec, StartAt
from bsfg.sdk.endpoint import Endpoint
from bsfg.sinks.sql import SqlSettings

_numbers = itertools.count(1)


@dataclass
class Plant(SparkZone):
    """A zone whose node runs, with what tests ask of it."""

    def add_consumer(self, name: str, stream: str = "operational", start: int = 0, *, required: bool = True) -> str:
        """Make a consumer of the store buffer that begins at an offset."""

        async def work() -> None:
            async with self.admin("operator") as admin:
                await admin.create_consumer(ConsumerSpec(name, stream, Buffer.STORE, StartAt.OFFSET, start, required))

        asyncio.run(work())
        return name

    def committed(self, consumer: str = "app-sink") -> int:
        """Give what a consumer has confirmed."""
        return super().committed(consumer)

    @property
    def endpoint(self) -> Endpoint:
        """The way to the node for consumers."""
        return endpoint(self, "consumer")


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Plant]:
    """Give a plant that runs, with a consumer of what it says."""
    cleanup = Cleanup()
    made = Plant("plant", tmp_path, certificates(tmp_path, "plant"), streams=STREAMS)
    made.write()
    cleanup.zone(made)
    made.start()
    made.add_consumer("app-sink")
    yield made
    cleanup.run()


@pytest.fixture
def tables() -> SqlSettings:
    """Give a role with a schema of its own."""
    name = f"s{os.getpid()}_{next(_numbers)}"
    return SqlSettings(postgres().role(name), name)
