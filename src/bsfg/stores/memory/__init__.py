"""Buffers and cursors in the memory of one process, for tests and simulation: the port of frames with lists and dicts.

It keeps every promise of the ports but the one that it cannot: what it calls durable is its `Medium`, which outlives
the storage and not the process.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, takewhile

import numpy as np

from bsfg.clock import SystemClock
from bsfg.digest import Hasher, KeptRange, Sha256
from bsfg.errors import DiskFull, HasherMismatch, OutcomeUnknown, StorageClosed, StorageFailed
from bsfg.gaps import GapSet
from bsfg.ports import Buffer, Capabilities, Clock
from bsfg.stores.shared.committer import Workers
from bsfg.stores.shared.cursors import ConsumerCursor
from bsfg.stores.shared.keeper import (
    AsideRow,
    BufferFound,
    BufferHead,
    BufferKeeper,
    Change,
    DepartedRange,
    FrameInfo,
    FrameRow,
    KeptKeys,
    NewBuffer,
    ZoneKeeper,
    touched,
)
from bsfg.stores.shared.storage import FramedStorage


class Fault(StrEnum):
    """How a medium can fail."""

    NO_SPACE = "no_space"
    SYNC_FAILS = "sync_fails"
    IO_ERROR = "io_error"


@dataclass(slots=True)
class RetainedBuffer:
    """Everything that one buffer retains."""

    new: NewBuffer
    head: BufferHead
    frames: list[FrameRow] = field(default_factory=list)
    keys: dict[int, list[int]] = field(default_factory=dict)
    departed: list[DepartedRange] = field(default_factory=list)
    gaps: list[GapSet] = field(default_factory=list)
    aside: dict[int, AsideRow] = field(default_factory=dict)
    aside_last_id: int = 0
    released: dict[int, str] = field(default_factory=dict)
    latest: bytes | None = None


class Medium:
    """The retained state of a storage, as a disk is: it stays when the storage is closed or abandoned.

    One storage writes to it at a time; a new one takes it over, as after a crash. Every change goes through `write`,
    so that nothing can be seen before it is kept.
    """

    def __init__(self) -> None:
        self.hasher_name: str | None = None
        self.buffers: dict[tuple[str, Buffer], RetainedBuffer] = {}
        self.consumers: dict[str, ConsumerCursor] = {}
        self.writer: MemoryZone | None = None
        self._fault: Fault | None = None
        self._kept = False
        self._held: list[Callable[[], None]] | None = None

    def fail_next(self, fault: Fault | str, *, kept: bool = False) -> None:
        """Make the next write fail; after a failed sync ``kept`` decides whether the change is there all the same."""
        self._fault, self._kept = Fault(fault), kept

    def hold(self) -> Callable[[], None]:
        """Make writes wait until the function that this gives is called."""
        self._held = []

        def release() -> None:
            held, self._held = self._held or [], None
            for work in held:
                self.later(work)

        return release

    def later(self, work: Callable[[], None]) -> None:
        """Do the work of a writer in the next turn of the event loop, or when nothing holds it any more."""
        if self._held is not None:
            self._held.append(work)
        else:
            asyncio.get_running_loop().call_soon(work)

    def write(self, change: Callable[[], None]) -> None:
        """Make a change, or raise what the medium fails with; who does not know what it holds writes no more."""
        fault, self._fault = self._fault, None
        if fault == Fault.NO_SPACE:
            raise DiskFull("the medium has no space left")
        if fault == Fault.IO_ERROR:
            raise StorageFailed("the medium reported an input/output error")
        if fault == Fault.SYNC_FAILS:
            if self._kept:
                change()
            self.writer = None
            raise OutcomeUnknown("syncing failed; the change may or may not be there")
        change()


class MediumTurns(Workers):
    """The threads of a storage that never waits for its medium: turns of the event loop."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    @property
    def are_awaited(self) -> bool:
        """Nobody waits for a thread."""
        return False

    def run(self, work: Callable[[], None]) -> None:
        """Do some work soon."""
        self._medium.later(work)

    def close(self) -> None:
        """There is nothing to end."""


class MemoryZone(ZoneKeeper):
    """The zone that a medium holds, for one storage."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium

    def check(self) -> None:
        """Raise unless the medium is ours."""
        if self.medium.writer is not self:
            raise StorageClosed("the storage is closed, or was opened anew")

    def claim(self, zone: str, hasher: str) -> list[tuple[str, Buffer]]:
        """Take the medium over from whoever wrote to it before."""
        medium = self.medium
        if medium.hasher_name not in (None, hasher):
            raise HasherMismatch(f"written with {medium.hasher_name}, opened with {hasher}")
        medium.hasher_name, medium.writer = hasher, self
        return list(medium.buffers)

    def buffer(self, stream: str, kind: Buffer, new: NewBuffer) -> MemoryFrames:
        """Give one buffer, made when there is none."""
        self.check()
        buffers = self.medium.buffers
        if (stream, kind) not in buffers:
            made = RetainedBuffer(new, BufferHead(0, 0, 0, 0, 0, new.chain))
            self.medium.write(lambda: buffers.update({(stream, kind): made}))
        return MemoryFrames(self, buffers[stream, kind], f"{stream}/{kind}")

    def consumers(self) -> list[ConsumerCursor]:
        """Give all consumers; what was sent is known until the storage is closed."""
        consumers = self.medium.consumers.values()
        return [replace(each, next_to_send=each.frontier.committed + 1) for each in consumers]

    def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Keep consumers by name."""
        self.check()
        self.medium.write(lambda: self.medium.consumers.update({each.spec.name: replace(each) for each in cursors}))

    def close(self) -> None:
        """Leave the medium."""
        if self.medium.writer is self:
            self.medium.writer = None


class MemoryFrames(BufferKeeper):
    """One buffer in a medium."""

    def __init__(self, zone: MemoryZone, kept: RetainedBuffer, place: str) -> None:
        self._zone, self._retained, self._place = zone, kept, place

    @property
    def _kept(self) -> RetainedBuffer:
        self._zone.check()
        return self._retained

    def found(self) -> BufferFound:
        """Give what is there."""
        kept = self._kept
        size = sum(row.size_bytes for row in kept.aside.values())
        last = kept.aside_last_id
        return BufferFound(kept.new.log_id, kept.new.secret, kept.head, [*kept.gaps], len(kept.aside), size, last)

    def commit(self, change: Change) -> bool:
        """Make a change at once."""
        kept, new = self._kept, change.frame
        if kept.head != change.before:
            raise touched(self._place, kept.head, change.before)
        if new is not None and new.only_if_new and not kept.keys.keys().isdisjoint(new.hashes.tolist()):
            return False
        self._zone.medium.write(lambda: _make(kept, change))
        return True

    def known(self, hashes: np.ndarray) -> np.ndarray:
        """Look hashes up."""
        keys = self._kept.keys
        rows = [(hashed, at) for hashed in hashes.tolist() for at in keys.get(hashed, ())]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    def _since(self, at: int) -> Iterable[FrameRow]:
        frames = self._kept.frames
        return islice(frames, bisect_right(frames, at, key=lambda frame: frame.end), None)

    def infos(self, at: int, most: int) -> list[FrameInfo]:
        """Describe frames."""
        return [
            FrameInfo(frame.base, frame.count, len(frame.content), frame.appended_at_unix_ms)
            for frame in islice(self._since(at), most)
        ]

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Give frames that follow each other."""
        return list(islice(takewhile(lambda frame: frame.base < until, self._since(at)), most))

    def holding(self, offsets: np.ndarray) -> list[FrameRow]:
        """Give the frames that hold offsets."""
        found = {
            frame.base: frame for at in offsets.tolist() for frame in islice(self._since(at), 1) if frame.base <= at
        }
        return list(found.values())

    def keys_holding(self, offsets: np.ndarray) -> list[KeptKeys]:
        """Give the keys of ranges that left."""
        kept = [(each.kept.first, each.kept.last, each.keys) for each in self._kept.departed if each.keys]
        edges = [np.searchsorted(offsets, [first, last + 1]) for first, last, _ in kept]
        return [KeptKeys(*each) for each, (start, stop) in zip(kept, edges, strict=True) if stop > start]

    def oldest_keys(self, before_unix_ms: int) -> KeptKeys | None:
        """Give the keys that are to be forgotten next."""
        due = (each for each in self._kept.departed if each.keys and each.newest_unix_ms < before_unix_ms)
        return next((KeptKeys(each.kept.first, each.kept.last, each.keys) for each in due), None)

    def history(self, heads: Sequence[bytes]) -> tuple[list[KeptRange], Mapping[bytes, int]]:
        """Give what stays of what left, and where chain values are."""
        places = {frame.chain_before: frame.base for frame in self._kept.frames if frame.chain_before in heads}
        return [each.kept for each in self._kept.departed], places

    def latest(self) -> bytes | None:
        """Give the newest entries of what left."""
        return self._kept.latest

    def aside(
        self, after: int | None, limit: int, *, newest_first: bool = False, same: Sequence[int] | None = None
    ) -> list[AsideRow]:
        """Give refused facts."""
        rows = sorted(self._kept.aside.values(), reverse=newest_first)
        return [
            row
            for row in rows
            if (after is None or (row.id < after if newest_first else row.id > after))
            and (same is None or row.same in same)
        ][:limit]


def _make(kept: RetainedBuffer, change: Change) -> None:
    """Do what a change says."""
    if (new := change.frame) is not None:
        kept.frames.append(new.row)
        for hashed, at in zip(new.hashes.tolist(), new.offsets.tolist(), strict=True):
            kept.keys.setdefault(hashed, []).append(at)
    for row in change.aside:
        kept.aside[row.id], kept.aside_last_id = row, row.id
    if change.released is not None:
        del kept.aside[change.released.id]
        kept.released[change.released.id] = change.released.reason
    kept.gaps = [*(() if change.gaps_anew else kept.gaps), *change.gaps]
    if (going := change.departed) is not None:
        kept.departed.append(going)
        kept.frames = [frame for frame in kept.frames if frame.base > going.kept.last]
    kept.latest = change.latest if change.latest is not None else kept.latest
    if (old := change.forgotten) is not None:
        kept.departed = [replace(each, keys=b"") if each.kept.first == old.first else each for each in kept.departed]
        for hashed, at in zip(old.hashes.tolist(), old.offsets.tolist(), strict=True):
            kept.keys[hashed].remove(at)
            if not kept.keys[hashed]:
                del kept.keys[hashed]
    kept.head = change.after


SYSTEM_CLOCK = SystemClock()
SHA256 = Sha256()


class MemoryStorage(FramedStorage):
    """All buffers and cursors of one zone in memory.

    Give the ``medium`` of another storage to open what that one kept; the other is closed by it.
    """

    capabilities = Capabilities("memory", durable=False, hash_chain=True)
    reads_block = False

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, hasher: Hasher = SHA256, medium: Medium | None = None) -> None:
        self.medium = medium or Medium()
        zone = MemoryZone(self.medium)
        super().__init__(zone, clock, hasher, lambda name, at_most: MediumTurns(self.medium))
        self._names.update(zone.claim("", hasher.name))
        self.cursors.open()
