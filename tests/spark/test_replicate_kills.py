"""Kills while Spark moves links: of workers, their daemon, the JVM, the command, the sender and the receiver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import seed_of_run
from tests.spark.nodes import SparkZone, with_many_links, zone_pair
from tests.spark.replicating import Pipeline, wait_until
from tests.spark.test_replicate import SETTINGS, arrived, sent

from bsfg.cli.bench.workload import batch_of
from bsfg.errors import BsfgError
from bsfg.ports import Buffer

pytestmark = [pytest.mark.campaign, pytest.mark.soak, pytest.mark.xdist_group("replicate-kills")]

SHORT, LONG = 9, 300
MANY_LINKS, MANY_SHORT = 20, 6
BURST, TRICKLE = 60_000, 50
VICTIMS = ("worker",) * 12 + ("sender",) * 6 + ("receiver",) * 6 + ("daemon",) * 4 + ("jvm", "command")
FIRST = ("worker", "sender", "receiver", "daemon")
"""Who is hit in a short run, too, in an order by its seed."""


class Producing(threading.Thread):
    """A producer that never stops: a trickle, and a burst when it is told, repeated until the node has taken it."""

    def __init__(self, zone: SparkZone, streams: Sequence[str] = ("operational",)) -> None:
        super().__init__(daemon=True)
        self._zone, self._stopping, self.burst = zone, threading.Event(), threading.Event()
        self._streams, self.appended, self._turn = streams, Counter[str](), 0

    def run(self) -> None:
        """Produce until told to stop."""
        asyncio.run(self._work())

    async def _work(self) -> None:
        while not self._stopping.is_set():
            # A burst for one of them, and something for all.
            burst = self.burst.is_set()
            for number, stream in enumerate(self._streams):
                with contextlib.suppress(BsfgError):
                    await self._append(
                        stream, BURST if burst and number == self._turn % len(self._streams) else TRICKLE
                    )
            if burst:
                self._turn += 1
                self.burst.clear()
            await asyncio.sleep(0.05)

    async def _append(self, stream: str, count: int) -> None:
        done = self.appended[stream]
        async with self._zone.client("producer") as client:
            for first in range(done, done + count, 2_000):
                await client.append(stream, batch_of(first, min(2_000, done + count - first)))
        self.appended[stream] += count

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        self.join(60)


class Killing:
    """Starts and kills what a campaign says."""

    def __init__(self, plant: SparkZone, enterprise: SparkZone, random: Random, *more: str) -> None:
        self.plant, self.enterprise, self.random, self._more = plant, enterprise, random, more
        self.pipeline = self._start()

    def _start(self) -> Pipeline:
        pipeline = Pipeline(self.enterprise, ["--replay-backlog", "20000", *self._more])
        pipeline.until_moving()
        return pipeline

    def kill(self, victim: str) -> None:
        """Kill one, and start again what does not start by itself."""
        if victim == "sender":
            self._kill_node(self.plant)
        elif victim == "receiver":
            self._kill_node(self.enterprise)
        elif victim == "command":
            self.pipeline.process.kill()
            wait_until(lambda: not self.pipeline.processes(), "what the command had started to end")
            self.pipeline.kill()
            self.pipeline = self._start()
        elif victim == "jvm":
            _kill(self.pipeline.pids("/bin/java")[:1])
            assert self.pipeline.process.wait(60) == 1
            assert "Traceback" not in self.pipeline.log_path.read_text()
            self.pipeline.kill()
            self.pipeline = self._start()
        else:
            daemons = self.pipeline.workers()
            _kill(daemons[:1] if victim == "daemon" else self.random.sample(daemons[1:], min(1, len(daemons[1:]))))

    def _kill_node(self, zone: SparkZone) -> None:
        zone.kill()
        time.sleep(self.random.uniform(0, 0.5))
        zone.start()


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(0)
def test_kills_lose_nothing_and_double_nothing(
    tmp_path: Path, cleanup: Cleanup, soak_size: Callable[[int, int], int]
) -> None:
    """Whatever is killed whenever, live or in a replay: every fact arrives once, in order, and is confirmed."""
    plant, enterprise = zone_pair(tmp_path)
    enterprise.links += SETTINGS
    enterprise.write()
    campaign(plant, enterprise, cleanup, soak_size(SHORT, LONG), ["operational"])


@pytest.mark.long
@pytest.mark.timeout(0)
def test_kills_in_bundles_lose_nothing_of_any_link(
    tmp_path: Path, cleanup: Cleanup, soak_size: Callable[[int, int], int]
) -> None:
    """The same with twenty links in two bundles: each is moved by one task at a time, and none is left behind.

    That all tasks of two bundles may be killed at once is shown by tests/spark/test_replicate_many.py.
    """
    plant, enterprise = zone_pair(tmp_path)
    streams = with_many_links(plant, enterprise, MANY_LINKS, SETTINGS)
    campaign(plant, enterprise, cleanup, soak_size(MANY_SHORT, LONG), streams, "--bundles", "2")


def campaign(
    plant: SparkZone, enterprise: SparkZone, cleanup: Cleanup, kills: int, streams: Sequence[str], *more: str
) -> None:
    """Produce and kill, and look at the end whether all of it has come."""
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    random = Random(seed)
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    killing = Killing(plant, enterprise, random, *more)
    producing = Producing(plant, streams)
    producing.start()
    try:
        victims = random.sample(FIRST, len(FIRST)) + random.choices(VICTIMS, k=kills - len(FIRST))
        for number, victim in enumerate(victims):
            if number % 5 == 0:
                producing.burst.set()
            time.sleep(random.expovariate(1.5))
            killing.kill(victim)
        producing.stop()
        for stream in streams:
            end, consumer = plant.end(Buffer.STORE, stream), f"enterprise.{stream}"
            killing.pipeline.until(lambda: plant.committed(consumer) == end - 1, f"{end} facts of {stream}")  # noqa: B023
            assert arrived(enterprise, stream) == sent(plant, stream)
        assert killing.pipeline.stop() == 0
        wait_until(lambda: not killing.pipeline.processes(), "everything to end")
    finally:
        producing.stop()
        killing.pipeline.kill()
