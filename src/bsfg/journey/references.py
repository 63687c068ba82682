"""Which artifacts are named by facts that a zone retains, known without reading all of them every time.

Per buffer it is enough to know the last offset that names each digest: entries leave a buffer from its start, so a
digest is referenced exactly as long as its last offset has not left. Each scan reads only what came since the one
before. What is remembered is a shortcut and never trusted alone: the last entry seen must still be the same, else the
history was replaced and the buffer is read anew.

Two ask: the collection of orphans, which wants all digests at once (`scan`), and the door, which wants to know whether
a buffer names one digest (`names`), because who may read a stream may read its artifacts. The door's answer costs a
look into a table, or reading what came since the last question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson

from bsfg.artifacts import ReferenceMemory
from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import StorageFailed
from bsfg.ports import UNREADABLE, Buffer, BufferStats, Replayable, Storage
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
    """The digests that retained facts name, kept up to date by whoever asks."""

    def __init__(self, memory: ReferenceMemory | None = None) -> None:
        self._memory = memory
        self._seen: dict[str, Seen] | None = None
        self._remembered: bytes | None = None
        self._recalling = asyncio.Lock()
        self._reading: dict[str, asyncio.Lock] = {}
        self._trusted: set[str] = set()
        """The buffers of which what is known was found to fit since this was made."""

    async def scan(self, buffers: Iterable[Replayable]) -> frozenset[str]:
        """Give every digest that a durable, retained or quarantined fact of these buffers names at this moment.

        The buffers must be all that the zone has (see `all_buffers`): what a buffer that is left out names would be
        taken for an orphan. What has left a buffer is forgotten here.
        """
        referenced, present = set[str](), set[str]()
        for buffer in buffers:
            present.add(_name(buffer))
            seen = await self._up_to_date(buffer, trusting=False)
            seen.forget_before((await buffer.stats()).start)
            referenced.update(seen.last_offsets)
            after: int | None = None
            while page := await buffer.quarantine(after):
                for item in page:
                    if item.reason == UNREADABLE:
                        raise StorageFailed(f"what a fact in quarantine names is not known: {item.detail}")
                    referenced.update(named_digests(item.facts)[0])
                after = page[-1].id
        known = await self._known()
        for name in known.keys() - present:
            del known[name]
        await self._remember(known)
        return frozenset(referenced)

    async def names(self, buffer: Replayable, digest: str) -> bool:
        """Tell whether a fact of a buffer names a digest, or did so at the last scan and has left since.

        Whoever was given a fact a moment ago may still ask for what it names, although others have let the fact go.
        """
        return self.is_known(buffer, digest) or digest in (await self._up_to_date(buffer)).last_offsets

    def is_known(self, buffer: Replayable, digest: str) -> bool:
        """Tell whether it is known without reading anything that a fact of a buffer names a digest."""
        name = _name(buffer)
        seen = self._seen.get(name) if self._seen is not None and name in self._trusted else None
        return seen is not None and seen.log_id == buffer.log_id and digest in seen.last_offsets

    async def _up_to_date(self, buffer: Replayable, *, trusting: bool = True) -> Seen:
        """Read what came since the last time, or everything when what is known does not fit the buffer."""
        known, name = await self._known(), _name(buffer)
        async with self._reading.setdefault(name, asyncio.Lock()):
            stats, seen = await buffer.stats(), known.get(name)
            trusted = trusting and name in self._trusted
            if seen is None or not (_follows(seen, buffer, stats.end) and (trusted or await _fits(buffer, seen))):
                seen = Seen(buffer.log_id)
            await _read_on(buffer, seen, stats)
            known[name] = seen
            self._trusted.add(name)
            return seen

    async def _known(self) -> dict[str, Seen]:
        async with self._recalling:
            if self._seen is None:
                self._remembered = await self._memory.recall() if self._memory is not None else None
                self._seen = decoded(self._remembered) if self._remembered is not None else {}
        return self._seen

    async def _remember(self, seen: Mapping[str, Seen]) -> None:
        data = encoded(seen)
        if self._memory is not None and data != self._remembered:
            await self._memory.remember(data)
            self._remembered = data


def _name(buffer: Replayable) -> str:
    return f"{buffer.buffer}/{buffer.stream}"


async def _read_on(buffer: Replayable, seen: Seen, stats: BufferStats) -> None:
    # The replay begins where the buffer begins: what lies before has left and cannot come back.
    seen.next_offset = max(seen.next_offset, stats.start)
    if seen.next_offset >= stats.end:
        return
    async for frame in buffer.replay(seen.next_offset, end=stats.end, max_facts=SCANNED_FACTS):
        if frame.entries is not None:
            seen.take(frame.entries)
        seen.next_offset = frame.last + 1


def _follows(seen: Seen, buffer: Replayable, end: int) -> bool:
    return seen.log_id == buffer.log_id and seen.next_offset <= end and seen.anchor_offset >= 0


async def _fits(buffer: Replayable, seen: Seen) -> bool:
    """Tell whether the last entry seen is still there and the same."""
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
