"""Which artifacts are named by facts that a zone retains, known without reading all of them every time.

Per buffer it is enough to know the last offset that names each digest: entries leave a buffer from its start, so a
digest is referenced exactly as long as its last offset has not left. Each scan reads only what came since the one
before. What is remembered is a shortcut and never trusted alone: the last entry seen must still be the same, else the
history was replaced and the buffer is read anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson

from bsfg.artifacts import ReferenceMemory
from bsfg.batch import EntryBatch, FactBatch
from bsfg.ports import Buffer, Replayable, Storage
from bsfg.retention import Policy

FORMAT = 1
SCANNED_FACTS = 50_000


@dataclass(slots=True)
class Seen:
    """What is known of one buffer: how far it was read, its last entry then, and who is named last where."""

    log_id: str
    next_offset: int = 0
    anchor_offset: int = -1
    anchor_digest: str = ""
    last_offsets: dict[str, int] = field(default_factory=dict)

    def take(self, entries: EntryBatch) -> None:
        """Note what entries name; they follow what was seen before."""
        digests, offsets = named_digests(entries), entries.offsets
        self.last_offsets.update(zip(digests[0], offsets[digests[1]].tolist(), strict=True))
        self.anchor_offset = int(offsets[-1])
        self.anchor_digest = entries.slice(len(entries) - 1).digests()[0].hex()

    def forget_before(self, start: int) -> None:
        """Forget what is named only by entries that have left."""
        self.last_offsets = {digest: last for digest, last in self.last_offsets.items() if last >= start}


def named_digests(batch: FactBatch) -> tuple[list[str], np.ndarray]:
    """Give the artifact digests in a batch and the rows they stand in."""
    column = batch.column("artifact_digest")
    if column.null_count == len(batch):
        return [], np.empty(0, dtype=np.int64)
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    return column.drop_null().to_pylist(), rows


class References:
    """The digests that retained facts name, kept up to date by `scan`."""

    def __init__(self, memory: ReferenceMemory | None = None) -> None:
        self._memory = memory
        self._seen: dict[str, Seen] | None = None
        self._remembered: bytes | None = None

    async def scan(self, buffers: Iterable[Replayable]) -> frozenset[str]:
        """Give every digest that a durable, retained or quarantined fact of these buffers names at this moment.

        The buffers must be all that the zone has (see `all_buffers`): what a buffer that is left out names would be
        taken for an orphan.
        """
        if self._seen is None:
            self._seen = await self._recall()
        known, referenced = self._seen, set[str]()
        present: dict[str, Seen] = {}
        for buffer in buffers:
            name = f"{buffer.buffer}/{buffer.stream}"
            present[name] = seen = await _up_to_date(buffer, known.get(name))
            referenced.update(seen.last_offsets)
            after: int | None = None
            while page := await buffer.quarantine(after):
                for item in page:
                    referenced.update(named_digests(item.facts)[0])
                after = page[-1].id
        self._seen = present
        await self._remember(present)
        return frozenset(referenced)

    async def _recall(self) -> dict[str, Seen]:
        self._remembered = await self._memory.recall() if self._memory is not None else None
        return decoded(self._remembered) if self._remembered is not None else {}

    async def _remember(self, seen: Mapping[str, Seen]) -> None:
        data = encoded(seen)
        if self._memory is not None and data != self._remembered:
            await self._memory.remember(data)
            self._remembered = data


async def _up_to_date(buffer: Replayable, known: Seen | None) -> Seen:
    """Read what came since the last scan, or everything when what is known does not fit the buffer."""
    stats = await buffer.stats()
    seen = known if known is not None and await _fits(buffer, known, stats.end) else Seen(buffer.log_id)
    # The replay begins where the buffer begins: what lies before has left and cannot come back.
    seen.next_offset = max(seen.next_offset, stats.start)
    async for frame in buffer.replay(min(seen.next_offset, stats.end), end=stats.end, max_facts=SCANNED_FACTS):
        if frame.entries is not None:
            seen.take(frame.entries)
        seen.next_offset = frame.last + 1
    seen.forget_before(stats.start)
    return seen


async def _fits(buffer: Replayable, seen: Seen, end: int) -> bool:
    """Tell whether the last entry seen is still there and the same."""
    if seen.log_id != buffer.log_id or seen.next_offset > end or seen.anchor_offset < 0:
        return False
    async for frame in buffer.replay(seen.anchor_offset, end=seen.anchor_offset + 1):
        if frame.entries is not None:
            return frame.entries.digests()[0].hex() == seen.anchor_digest
    return False


async def all_buffers(
    storage: Storage, policies: Mapping[tuple[str, Buffer], Policy] | None = None
) -> list[Replayable]:
    """Open every buffer that a storage has, those of streams that are no longer configured included."""
    buffers: list[Replayable] = []
    for stream, kind in await storage.streams():
        policy = (policies or {}).get((stream, kind))
        buffers.append(await (storage.store if kind == Buffer.STORE else storage.forward)(stream, policy))
    return buffers


def encoded(seen: Mapping[str, Seen]) -> bytes:
    """Write what is known as JSON."""
    return orjson.dumps({"format": FORMAT, "buffers": {name: asdict(each) for name, each in seen.items()}})


def decoded(data: bytes) -> dict[str, Seen]:
    """Read what is known; what cannot be read is forgotten, which costs one full scan."""
    try:
        found: Any = orjson.loads(data)
        if found["format"] != FORMAT:
            return {}
        return {name: Seen(**each) for name, each in found["buffers"].items()}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return {}
