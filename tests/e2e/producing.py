"""A producer that never gives up, and what must be true of two zones when everything has calmed down."""

from __future__ import annotations

import asyncio
import json
import os
from random import Random

from tests.e2e.zones import Zone, bsfg, settled

from bsfg.errors import BsfgError
from bsfg.ports import Buffer, Result
from bsfg.testing.facts import batch
from bsfg.wire.client import BoundaryClient

CALL_SECONDS = 5.0
CHUNK_FACTS = 10_000


def seed_of_run() -> int:
    """Give the seed of a campaign: the same in every short run, another in each long one unless BSFG_SEED is set."""
    long = os.environ.get("BSFG_SOAK") == "long"
    return int(os.environ.get("BSFG_SEED", Random().randrange(10**6) if long else 7))


class Insistent:
    """Appends numbered facts of its zone batch by batch; a batch that was not answered is sent again as it was."""

    def __init__(
        self, zone: Zone, seed: int, *, stream: str = "operational", batch_facts: int = 200, pause_seconds: float = 0.02
    ) -> None:
        self.zone, self.stream, self.count, self.repeated = zone, stream, 0, 0
        self.seed, self.batch_facts, self._pause_seconds = seed, batch_facts, pause_seconds
        self._random = Random(f"producer {zone.name} {seed}")
        self._stopping = False

    async def run(self) -> None:
        """Append until `stop` is called; the last batch is answered before this returns."""
        async with BoundaryClient(self.zone.connection("producer", request_timeout_seconds=CALL_SECONDS)) as client:
            while not self._stopping:
                # Mostly small batches, now and then one that takes long enough to be interrupted.
                size = self._random.choice((1, 5, self.batch_facts, self._random.randint(1, self.batch_facts)))
                await self._append(client, size)
                await asyncio.sleep(self._random.uniform(0, 2 * self._pause_seconds))

    def stop(self) -> None:
        """Append nothing new."""
        self._stopping = True

    async def _append(self, client: BoundaryClient, size: int) -> None:
        facts = batch(size, seed=self.seed, first=self.count, from_zone=self.zone.name)
        while True:
            try:
                answer = await asyncio.wait_for(client.append(self.stream, facts), CALL_SECONDS)
            except (BsfgError, TimeoutError):
                await asyncio.sleep(0.02)
                continue
            break
        assert answer.receipt.offsets.tolist() == list(range(self.count, self.count + size))
        assert Result.CONFLICT not in answer.receipt.results
        self.repeated += answer.receipt.count(Result.ALREADY_EXISTS)
        self.count += size


def history(zone: Zone, buffer: Buffer, stream: str = "operational") -> list[tuple[str, str, bytes]]:
    """Give zone, id and digest of everything a buffer holds, in order."""
    result = []
    for frame in zone.log(buffer, stream).frames():
        if frame.entries is not None:
            columns = (frame.entries.values("from_zone"), frame.entries.values("message_id"), frame.entries.digests())
            result += list(zip(*columns, strict=True))
    return result


def expected(producer: Insistent) -> list[tuple[str, str, bytes]]:
    """Give what a buffer must hold of a producer."""
    result = []
    for first in range(0, producer.count, CHUNK_FACTS):
        count = min(CHUNK_FACTS, producer.count - first)
        facts = batch(count, seed=producer.seed, first=first, from_zone=producer.zone.name)
        result += list(zip(facts.values("from_zone"), facts.values("message_id"), facts.digests(), strict=True))
    return result


async def calm(sender: Zone, receiver: Zone, stream: str = "operational") -> None:
    """Wait until the receiver has everything of the sender and the sender knows it."""
    await settled(sender, receiver, stream)
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        async with sender.admin() as admin:
            views = {view.state.spec.name: view for view in await admin.consumers()}
        committed = views[f"{receiver.name}.{stream}"].state.checkpoint.committed
        if committed == sender.end(Buffer.STORE, stream) - 1:
            return
        assert asyncio.get_running_loop().time() < deadline, f"the frontier stays at {committed}"
        await asyncio.sleep(0.05)


def check_sound(*zones: Zone) -> None:
    """Insist that `bsfg verify` finds nothing wrong in the folders of zones."""
    for zone in zones:
        report = json.loads(bsfg("verify", str(zone.data), "--json"))
        assert report["ok"] and not report["problems"], report["problems"]
