"""From intake to sender: straight to the node, or by way of the outbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from bsfg.errors import BsfgError, unforeseen
from bsfg.sdk.intake import Gathering, Intake, Lane
from bsfg.sdk.outbox import OutboxLane
from bsfg.sdk.packing import Packed, Packer
from bsfg.sdk.shipment import Shipment

GROUP_BATCHES, GROUP_BYTES = 64, 4 << 20
"""At most so much shares a sync of the outbox."""

_FULL_PAUSE_SECONDS = 0.25


class Straight:
    """A source of shipments that takes them from the intake; nothing is kept on disk."""

    def __init__(self, intake: Intake, lane: Lane, packer: Packer) -> None:
        self._intake, self._lane, self._packer = intake, lane, packer

    async def next(self) -> Shipment | None:
        """Give the next shipment that has any fact in it."""
        while (gathering := await self._intake.next(self._lane)) is not None:
            packed = await packed_or_failed(self._packer, gathering, self._lane.stream)
            if packed is None:
                self._intake.finish(gathering.outcome, gathering.size_bytes)
                continue
            shipment = packed.shipment(self._lane.stream)
            shipment.on_over = partial(self._over, packed)
            return shipment
        return None

    def _over(self, packed: Packed, _: Shipment) -> None:
        self._intake.finish(packed.outcome, packed.size_bytes)

    def expire(self, error: BsfgError) -> None:
        """Give up what waited too long without ever being sent."""
        self._intake.expire(self._lane, error)


class Keeper:
    """Moves facts from the intake into the outbox; many batches share a sync."""

    def __init__(
        self,
        intake: Intake,
        lane: Lane,
        packer: Packer,
        outbox: OutboxLane,
        on_problem: Callable[[BsfgError], None],
    ) -> None:
        self._intake, self._lane, self._packer, self._outbox = intake, lane, packer, outbox
        self._on_problem = on_problem

    async def run(self) -> None:
        """Keep until the producer is closed and everything is in the outbox."""
        while (gathering := await self._intake.next(self._lane)) is not None:
            group, size_bytes = [gathering], gathering.size_bytes
            while len(group) < GROUP_BATCHES and size_bytes < GROUP_BYTES:
                more, _ = self._intake.take(self._lane)
                if more is None:
                    break
                group.append(more)
                size_bytes += more.size_bytes
            packed = [await packed_or_failed(self._packer, each, self._lane.stream) for each in group]
            whole = [each for each in packed if each is not None]
            if whole:
                await self._keep(whole)
            for each in group:
                self._intake.finish(each.outcome, each.size_bytes)

    async def _keep(self, group: list[Packed]) -> None:
        """Keep a group; while the disk or the outbox is full, try again for as long as the facts have time."""
        while group:
            try:
                await self._outbox.keep(group)
            except BsfgError as error:
                self._on_problem(error)
                if error.code not in ("buffer_full", "quarantine_full", "disk_full"):
                    _fail(group, error)
                    return
                now = time.monotonic()
                _fail([each for each in group if each.ends is not None and each.ends <= now], error)
                group = [each for each in group if each.ends is None or each.ends > now]
                await asyncio.sleep(_FULL_PAUSE_SECONDS)
            except Exception as error:
                _fail(group, unforeseen(error, "keeping the facts"))
                return
            else:
                return


def _fail(group: list[Packed], error: BsfgError) -> None:
    for each in group:
        each.outcome.fail(error)


async def packed_or_failed(packer: Packer, gathering: Gathering, stream: str) -> Packed | None:
    """Pack a gathering; None when nothing of it can be sent, and its futures have failed."""
    try:
        packed = await packer.pack(gathering, stream)
    except Exception as error:
        # Also what nobody foresaw: the facts must not wait for ever because of it.
        gathering.outcome.fail(unforeseen(error, "packing the facts"))
        return None
    return packed if len(packed.facts) else None
