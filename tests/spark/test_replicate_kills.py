"""Kills while Spark moves a link: of workers, their daemon, the JVM, the command, the sender and the receiver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import seed_of_run
from tests.spark.nodes import SparkZone, zone_pair
from tests.spark.replicating import Pipeline, wait_until
from tests.spark.test_replicate import CONSUMER, SETTINGS, arrived, sent

from bsfg.cli.bench.workload import batch_of
from bsfg.errors import BsfgError
from bsfg.ports import Buffer

pytestmark = [pytest.mark.campaign, pytest.mark.soak, pytest.mark.xdist_group("replicate-kills")]

SHORT, LONG = 30, 300
BURST, TRICKLE = 60_000, 50
VICTIMS = ("worker",) * 12 + ("sender",) * 6 + ("receiver",) * 6 + ("daemon",) * 4 + ("jvm", "command")


class Producing(threading.Thread):
    """A producer that never stops: a trickle, and a burst when it is told, repeated until the node has taken it."""

    def __init__(self, zone: SparkZone) -> None:
        super().__init__(daemon=True)
        self._zone, self._stopping, self.burst = zone, threading.Event(), threading.Event()
        self.appended = 0

    def run(self) -> None:
        """Produce until told to stop."""
        asyncio.run(self._work())

    async def _work(self) -> None:
        while not self._stopping.is_set():
            count = BURST if self.burst.is_set() else TRICKLE
            with contextlib.suppress(BsfgError):
                async with self._zone.client("producer") as client:
                    for first in range(self.appended, self.appended + count, 2_000):
                        await client.append("operational", batch_of(first, min(2_000, self.appended + count - first)))
                self.appended += count
                self.burst.clear()
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        self._stopping.set()
        self.join(60)


class Killing:
    """Starts and kills what a campaign says."""

    def __init__(self, plant: SparkZone, enterprise: SparkZone, random: Random) -> None:
        self.plant, self.enterprise, self.random = plant, enterprise, random
        self.pipeline = self._start()

    def _start(self) -> Pipeline:
        pipeline = Pipeline(self.enterprise, ["--replay-backlog", "20000"])
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
    seed = seed_of_run()
    print(f"BSFG_SEED={seed}")
    random = Random(seed)
    plant, enterprise = zone_pair(tmp_path)
    enterprise.links += SETTINGS
    enterprise.write()
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    killing = Killing(plant, enterprise, random)
    producing = Producing(plant)
    producing.start()
    try:
        for number in range(soak_size(SHORT, LONG)):
            if number % 5 == 0:
                producing.burst.set()
            time.sleep(random.expovariate(1.5))
            killing.kill(random.choice(VICTIMS))
        producing.stop()
        end = plant.end(Buffer.STORE)
        killing.pipeline.until(lambda: plant.committed(CONSUMER) == end - 1, f"{end} facts")
        assert arrived(enterprise) == sent(plant)
        assert killing.pipeline.stop() == 0
        wait_until(lambda: not killing.pipeline.processes(), "everything to end")
    finally:
        producing.stop()
        killing.pipeline.kill()
