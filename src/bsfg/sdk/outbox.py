"""The outbox: facts wait on the producer's own disk until the node has them.

A fact that is accepted survives a crash of the producer and any absence of the node. Facts leave in the order in which
they came, per stream, and are removed after the node's answer. What the node refuses for good is kept aside, with the
reason, in ``refused.journal``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import orjson

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, StorageClosed
from bsfg.fact import Message
from bsfg.rules import check_name
from bsfg.sdk.futures import Outcome
from bsfg.sdk.intake import LOOSE, Packed
from bsfg.sdk.sender import Shipment, ShipmentPart
from bsfg.sdk.spool import Spool, Spooled
from bsfg.stores.log.files import DiskFiles, translated
from bsfg.stores.log.journal import Journal, Record, read_journal

log = logging.getLogger("bsfg.producer")

REFUSED = "refused.journal"
_STREAMS = "streams"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RefusedFact:
    """A fact that the node would not take, kept aside with the reason."""

    stream: str
    message: Message
    error: BsfgError
    at_unix_ms: int


OnRefused = Callable[[RefusedFact], None]


class Outbox:
    """The folder of a producer's outbox: a spool per stream, and what was refused."""

    def __init__(self, folder: str | os.PathLike[str], *, capacity_bytes: int = 1 << 34) -> None:
        self.folder = os.fspath(folder)
        self._capacity_bytes = capacity_bytes
        self._files = DiskFiles(folder)
        self._lanes: dict[str, OutboxLane] = {}
        try:
            self._files.make_folder("")
            self._release: Callable[[], None] | None = self._files.lock("LOCK")
            self._files.make_folder(_STREAMS)
            self._files.sync_folder("")
            self._refused = Journal(self._files, REFUSED, list)
            self._refused.open()
        except OSError as error:
            raise translated(error, f"opening the outbox {self.folder}") from None

    def streams(self) -> list[str]:
        """List the streams that an earlier producer left facts for."""
        return self._files.list(_STREAMS)

    def lane(self, stream: str, on_refused: OnRefused | None = None) -> OutboxLane:
        """Open the lane of a stream; blocks while it is read."""
        if stream not in self._lanes:
            check_name("stream", stream)
            where = os.path.join(self.folder, _STREAMS, stream)
            spool = Spool.open(where, "outbox", capacity_bytes=self._capacity_bytes)

            def refuse(facts: FactBatch, error: BsfgError) -> None:
                self._refuse(stream, facts, error, on_refused)

            self._lanes[stream] = OutboxLane(stream, spool, refuse)
        return self._lanes[stream]

    def _refuse(self, stream: str, facts: FactBatch, error: BsfgError, on_refused: OnRefused | None) -> None:
        """Keep facts aside durably before they leave the spool."""
        now = time.time_ns() // 1_000_000
        head = {"stream": stream, "at_unix_ms": now, "error": orjson.loads(orjson.dumps(error.to_dict(), default=str))}
        self._refused.append([Record(head, facts.to_ipc().to_pybytes())])
        if on_refused is not None:
            for message in facts.to_messages():
                try:
                    on_refused(RefusedFact(stream, message, error, now))
                except Exception:
                    log.exception("the producer's on_refused failed; the fact is kept aside in the outbox")

    def close(self) -> None:
        """Write all positions and give the folder back; repeats are harmless."""
        if self._release is None:
            return
        release, self._release = self._release, None
        for lane in self._lanes.values():
            lane.spool.close()
        self._refused.close()
        release()


class OutboxLane:
    """The facts of one stream in an outbox: put in by the producer, sent from here by its sender."""

    def __init__(self, stream: str, spool: Spool, refuse: Callable[[FactBatch, BsfgError], None]) -> None:
        self.stream, self.spool, self._refuse = stream, spool, refuse
        self._outcomes: WeakValueDictionary[int, Outcome] = WeakValueDictionary()
        self._kept: dict[int, np.ndarray] = {}
        self._next, self._visible = spool.done, spool.end
        self.problem: BsfgError | None = None
        self._over: set[int] = set()
        self._changed = asyncio.Event()
        self._emptied: list[asyncio.Future[None]] = []
        self._closing = False

    # Putting in.

    async def keep(self, batches: Sequence[Packed]) -> None:
        """Make batches durable with one sync; their outcomes hear of it, and later what the node answered."""
        first = await asyncio.to_thread(self._put, batches)
        for number, packed in enumerate(batches, first):
            self._outcomes[number] = packed.outcome
            if packed.rows is not None:
                self._kept[number] = packed.rows
            packed.outcome.accept()
        # Only now may the sender read them: an answer must find its outcome.
        self._visible = first + len(batches)
        self._changed.set()

    def _put(self, batches: Sequence[Packed]) -> int:
        return self.spool.put(
            [Record({"facts": len(each.facts)}, each.facts.to_ipc().to_pybytes()) for each in batches]
        )

    # Sending.

    async def next(self) -> Shipment | None:
        """Give the next facts, small records joined; None when the producer is closing."""
        while not self._closing:
            self._changed.clear()
            if self._next < self._visible:
                # More may become visible while this is read, which then was not looked for.
                visible = self._visible
                records, facts = await asyncio.to_thread(self._read, visible)
                if records:
                    return self._shipment(records, facts)
                self._pass(range(self._next, visible))
            else:
                await self._changed.wait()
        return None

    def expire(self, error: BsfgError) -> None:
        """Nothing in an outbox expires."""

    def _read(self, visible: int) -> tuple[list[Spooled], list[FactBatch]]:
        found = self.spool.read(self._next, max_bytes=_READ_BYTES)
        records = [record for record in found if record.number < visible]
        return records, [FactBatch.from_ipc(record.blob, LOOSE) for record in records]

    def _shipment(self, records: list[Spooled], batches: list[FactBatch]) -> Shipment:
        parts, rows, at = [], [], 0
        for record, facts in zip(records, batches, strict=True):
            outcome, kept = self._outcomes.get(record.number), self._kept.pop(record.number, None)
            count = len(facts) if outcome is None else outcome.count
            rows.append(at + (kept if kept is not None and outcome is not None else np.arange(len(facts))))
            parts.append(ShipmentPart(outcome, at, count))
            at += count
        numbers = range(self._next, records[-1].number + 1)
        self._next = numbers.stop
        facts = FactBatch.concat(batches)
        whole = None if at == len(facts) else np.concatenate(rows)
        return Shipment(
            self.stream, facts, parts, facts.nbytes, rows=whole, on_over=lambda sent: self._sent(sent, numbers)
        )

    def _sent(self, shipment: Shipment, numbers: range) -> None:
        """Note that the node has answered for some records; what it refused is kept aside first."""
        try:
            for facts, error in shipment.refused:
                self._refuse(facts, error)
        except OSError as error:
            # They stay in the outbox and are sent again by the next producer, which then tries to keep them aside.
            self.problem = translated(error, "keeping refused facts aside")
            return
        self._pass(numbers)

    def _pass(self, numbers: range) -> None:
        self._next = max(self._next, numbers.stop)
        self._over.update(numbers)
        done = self.spool.done
        while done in self._over:
            self._over.remove(done)
            done += 1
        self.spool.advance(done)
        if self.is_empty:
            waiting, self._emptied = self._emptied, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    @property
    def is_empty(self) -> bool:
        """Whether the node has answered for everything."""
        return self.spool.done >= self.spool.end

    async def emptied(self) -> None:
        """Wait until the node has answered for everything."""
        while not self.is_empty:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._emptied.append(waiter)
            await waiter

    def stop(self) -> None:
        """Give nothing more to the sender."""
        self._closing = True
        self._changed.set()

    def abandon(self) -> None:
        """Let the futures fail that are still waiting for an answer; their facts stay here."""
        error = StorageClosed(
            "the producer was closed before the node answered; the fact is in the outbox",
            hint="The next producer with this outbox sends it.",
        )
        for outcome in list(self._outcomes.values()):
            outcome.fail(error)


def refused_facts(folder: str | os.PathLike[str]) -> list[RefusedFact]:
    """List what the node refused for good, oldest first; the producer may be running meanwhile."""
    records, _, _ = read_journal(DiskFiles(folder), REFUSED)
    return [refused for record in records for refused in _refused_of(record)]


def _refused_of(record: Record) -> list[RefusedFact]:
    head: dict[str, Any] = record.head
    error, facts = BsfgError.from_dict(head["error"]), FactBatch.from_ipc(record.blob, LOOSE)
    return [RefusedFact(head["stream"], message, error, head["at_unix_ms"]) for message in facts.to_messages()]
