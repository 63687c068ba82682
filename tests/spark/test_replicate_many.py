"""Many links in one pair of queries: neighbours that do not touch each other, and changes of the configuration."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.proxy import Proxy
from tests.spark.nodes import link_of, with_many_links, zone_pair
from tests.spark.replicating import Pipeline, wait_until
from tests.spark.test_replicate import SETTINGS, arrived, sent

from bsfg.cli.bench.workload import batch_of
from bsfg.ports import Buffer

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("replicate-many")]

LINKS = 6
BACKLOG = 60_000
"""More facts than a link has left when it is replayed."""

AT_ONCE = 5_000


class World:
    """A plant whose streams each have a link of their own, and a pipeline that moves them."""

    def __init__(self, folder: Path, cleanup: Cleanup) -> None:
        self.plant, self.enterprise = zone_pair(folder)
        self.streams = with_many_links(self.plant, self.enterprise, LINKS, SETTINGS)
        # The last one is reached by a line of its own.
        self.proxy = cleanup.closing(Proxy(self.plant.port))
        head, table, last = self.enterprise.links.rpartition(f"\n[links.from-{self.streams[-1]}]")
        self.enterprise.links = head + table + last.replace(f":{self.plant.port}", f":{self.proxy.port}")
        self.enterprise.write()
        for zone in (self.plant, self.enterprise):
            cleanup.zone(zone)
            zone.start()
        self._produced = 0

    def produce(self, count: int, streams: Sequence[str]) -> None:
        """Append facts to some streams."""

        async def work() -> None:
            async with self.plant.client("producer") as client:
                for first in range(0, count, AT_ONCE):
                    batch = batch_of(self._produced + first, min(AT_ONCE, count - first))
                    for stream in streams:
                        await client.append(stream, batch)

        asyncio.run(work())
        self._produced += count

    def settle(self, pipeline: Pipeline, streams: Sequence[str]) -> None:
        """Wait until everything of some streams is confirmed, and insist that it came once and in order."""
        for stream in streams:
            end = self.plant.end(Buffer.STORE, stream)
            consumer = f"enterprise.{stream}"
            pipeline.until(lambda: self.plant.committed(consumer) == end - 1, f"{end} facts of {stream}")  # noqa: B023
            assert arrived(self.enterprise, stream) == sent(self.plant, stream)

    def hold(self, stream: str, *, held: bool) -> None:
        """Hold or release the gate of a link."""

        async def work() -> None:
            async with self.enterprise.admin() as admin:
                await (admin.hold_gate if held else admin.release_gate)(f"from-{stream}", "test")

        asyncio.run(work())


def test_many_links_share_tasks_and_nothing_else(tmp_path: Path, cleanup: Cleanup) -> None:
    """Held, cut off, far behind, added, removed, or in a file that is wrong: the others go on, in few processes."""
    world = World(tmp_path, cleanup)
    pipeline = Pipeline(world.enterprise, ["--bundles", "2", "--replay-backlog", "20000"])
    try:
        pipeline.until_moving()
        world.produce(50, world.streams)
        world.settle(pipeline, world.streams)
        assert len(pipeline.workers()) <= 9, "tasks are made by the bundle, not by the link"
        _neighbours(world, pipeline)
        _killed(world, pipeline)
        _changed(world, pipeline)
        assert pipeline.stop() == 0
        wait_until(lambda: not pipeline.processes(), "everything to end")
    finally:
        pipeline.kill()


def _neighbours(world: World, pipeline: Pipeline) -> None:
    """One link is held, one is cut off and comes back with a backlog: the rest hears nothing of it."""
    held, *others, cut = world.streams
    world.hold(held, held=True)
    world.proxy.cut()
    pipeline.until(lambda: pipeline.links[f"from-{cut}"]["mode"] == "autonomous", "the line to be cut")
    world.produce(20, [held, cut, *others])
    world.settle(pipeline, others)
    assert world.plant.committed(f"enterprise.{held}") < world.plant.end(Buffer.STORE, held) - 1
    world.produce(BACKLOG, [cut])
    world.proxy.mend()
    world.produce(20, others)
    world.settle(pipeline, others)
    world.hold(held, held=False)
    world.settle(pipeline, world.streams)


def _killed(world: World, pipeline: Pipeline) -> None:
    """When all tasks of both bundles are killed at once, their links move again."""
    for pid in pipeline.workers()[1:]:
        os.kill(pid, signal.SIGKILL)
    world.produce(20, world.streams)
    world.settle(pipeline, world.streams)


def _changed(world: World, pipeline: Pipeline) -> None:
    """A link that is added moves and one that is removed does not, without a restart; a wrong file changes nothing."""
    gone, *staying = world.streams
    whole = world.enterprise.links
    _, table, rest = whole.partition(f"[links.from-{staying[0]}]")
    world.enterprise.links = table + rest
    world.enterprise.write()
    said = said_by(pipeline)
    pipeline.until(lambda: f"from-{gone}: no longer moved" in said(), "the removal to be said")
    pipeline.until(lambda: f"from-{gone}" not in pipeline.links, "the link to be gone")
    wait_until(lambda: holder(world, f"from-{gone}") is None, "nobody to move it")
    world.produce(20, world.streams)
    world.settle(pipeline, staying)
    assert world.plant.committed(f"enterprise.{gone}") < world.plant.end(Buffer.STORE, gone) - 1
    world.enterprise.links = table + rest + "\n[links.nonsense]\naddress = 7\n"
    world.enterprise.write()
    pipeline.until(lambda: "is not taken up: config_invalid" in said(), "the mistake to be said")
    world.produce(20, staying)
    world.settle(pipeline, staying)
    changed = link_of(world.plant, gone, f"{SETTINGS}rate_limit = 5000\n")
    world.enterprise.links = table + rest + changed
    world.enterprise.write()
    pipeline.until(lambda: f"from-{gone}: new" in said(), "the new link to be said")
    world.settle(pipeline, world.streams)


def said_by(pipeline: Pipeline) -> Callable[[], str]:
    """Give what tells what a pipeline has said from now on."""
    begun = pipeline.log_path.stat().st_size

    def said() -> str:
        return pipeline.log_path.read_bytes()[begun:].decode()

    return said


def holder(world: World, link: str) -> str | None:
    """Say who holds the lease of a link, if anybody does."""

    async def work() -> str | None:
        async with world.enterprise.admin() as admin:
            status = await admin.status()
            # A node takes up its own file by itself, so a link that left it may be gone from here as well.
            return next((each["lease"] for each in status["links"] if each["link"] == link), None)

    return asyncio.run(work())
