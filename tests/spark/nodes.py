"""Zones with an identity for pipelines, as Spark reads and writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.zones import Zone, certificates, peer, serve

from bsfg.batch import FactBatch
from bsfg.fact import Message
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import messages
from bsfg.wire.certs import issue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, DataFrameWriter, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader

STREAMS = """
[streams.operational]
[streams.lossy]
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
overflow = "drop_oldest"
"""


@dataclass
class SparkZone(Zone):
    """A zone, and the options by which Spark reaches its node."""

    def options(self, stream: str = "operational", *, as_text: bool = False) -> dict[str, str]:
        """Give the options of the data source; ``as_text`` gives certificate and key themselves instead of paths."""
        files = self.files(f"{self.name}-pipeline")
        parts = {"ca": files.ca, "cert": files.certificate, "key": files.key}
        return {
            "address": f"127.0.0.1:{self.port}",
            "serverName": f"{self.name}-bsfg",
            "stream": stream,
            "retrySeconds": "20",
            **{name: path.read_text() if as_text else str(path) for name, path in parts.items()},
        }

    def reader(self, spark: SparkSession, stream: str = "operational", **options: object) -> DataFrameReader:
        """Give a reader of a buffer."""
        return spark.read.format("bsfg").options(**self.options(stream)).options(**_texts(options))

    def stream_reader(self, spark: SparkSession, stream: str = "operational", **options: object) -> DataStreamReader:
        """Give a reader of a buffer as a stream."""
        return spark.readStream.format("bsfg").options(**self.options(stream)).options(**_texts(options))

    def writer(self, frame: DataFrame, stream: str = "operational", **options: object) -> DataFrameWriter:
        """Give a writer into a buffer."""
        return frame.write.format("bsfg").mode("append").options(**self.options(stream)).options(**_texts(options))

    def produce(self, facts: Sequence[Message], stream: str = "operational") -> None:
        """Append facts as a producer of this zone."""

        async def work() -> None:
            async with self.client("producer") as client:
                await client.append(stream, FactBatch.from_messages(facts))

        asyncio.run(work())

    def create_consumer(self, name: str, stream: str = "operational") -> None:
        """Create a durable consumer of the store buffer."""

        async def work() -> None:
            async with self.admin("operator") as admin:
                await admin.create_consumer(ConsumerSpec(name, stream, Buffer.STORE))

        asyncio.run(work())

    def committed(self, consumer: str) -> int:
        """Give what a consumer has confirmed."""

        async def work() -> int:
            async with self.admin("operator") as admin:
                found = {each.state.spec.name: each.state for each in await admin.consumers()}
                return found[consumer].checkpoint.committed

        return asyncio.run(work())

    def offline(self, change: Callable[[LogStorage], Coroutine[Any, Any, object]]) -> None:
        """Stop the node, change its storage, and start it again."""

        async def work() -> None:
            storage = await LogStorage.open(self.data)
            try:
                await change(storage)
            finally:
                await storage.close()

        self.stop()
        asyncio.run(work())
        self.start()


def facts(count: int, *, first: int = 0, zone: str = "plant-a", seed: int = 0) -> list[Message]:
    """Make numbered facts of a zone."""
    return messages(count, first=first, from_zone=zone, seed=seed)


def ids(found: Sequence[Message]) -> list[str | None]:
    """Give the ids of messages."""
    return [message.envelope.message_id for message in found]


def zone_pair(root: Path) -> tuple[SparkZone, SparkZone]:
    """Make a plant and an enterprise that has a link from it, which no engine of the node moves."""
    certs = certificates(root, "plant-a", "enterprise")
    now = datetime.now(UTC)
    plant, enterprise = (SparkZone(name, root, certs, streams=STREAMS) for name in ("plant-a", "enterprise"))
    for zone in (plant, enterprise):
        issue(certs, f"{zone.name}-pipeline", days=20, now=now, serves=False)
        zone.identities = _pipeline(zone.name)
    plant.identities += peer("enterprise") + _pipeline("enterprise", "peer", "enterprise.*")
    plant.serve = serve("enterprise")
    enterprise.identities += peer("plant-a")
    enterprise.links = f"""
[links.from-plant-a]
zone = "plant-a"
address = "127.0.0.1:{plant.port}"
engine = "spark"
"""
    for zone in (plant, enterprise):
        zone.write()
    return plant, enterprise


def with_many_links(plant: SparkZone, enterprise: SparkZone, count: int, settings: str = "") -> list[str]:
    """Give both zones so many streams, and the enterprise a link for each; give the names of the streams."""
    streams = [f"line-{number:02}" for number in range(count)]
    for zone in (plant, enterprise):
        zone.streams = "".join(f"[streams.{stream}]\n" for stream in streams)
    enterprise.links = "".join(link_of(plant, stream, settings) for stream in streams)
    for zone in (plant, enterprise):
        zone.write()
    return streams


def link_of(plant: SparkZone, stream: str, settings: str = "") -> str:
    """Give the table of a link that carries one stream alone."""
    return f"""
[links.from-{stream}]
zone = "plant-a"
address = "127.0.0.1:{plant.port}"
engine = "spark"
streams = ["{stream}"]
{settings}
"""


def _pipeline(zone: str, roles: str = 'pipeline", "producer", "consumer', consumers: str = "app-*") -> str:
    return f"""
[identities.{zone}-pipeline]
zone = "{zone}"
roles = ["{roles}"]
streams = ["*"]
consumers = ["{consumers}"]
"""


def _texts(options: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in options.items()}
