"""The small port of a storage that keeps frames: sixteen methods, and all else is there.

A `ZoneKeeper` has the buffers and consumers of one zone, a `BufferKeeper` one buffer. `bsfg.stores.shared.storage`
makes a whole `bsfg.ports.Storage` of them: group commit, the judging of repeats, the chain, gap records, room,
retention, replays with holes and damage, quarantine and cursors are the same for all who keep frames.

All methods may block and may be called from any thread, those that change a buffer from one at a time. They raise
`bsfg.errors.BsfgError` alone, each driver's errors translated in one place: `DiskFull` when nothing changed and all
goes on, `OutcomeUnknown` when a change may or may not be there, `StorageTaken` when another node has the zone now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bsfg.digest import KeptRange
from bsfg.errors import StorageTaken
from bsfg.gaps import GapSet
from bsfg.ports import Buffer
from bsfg.stores.shared.cursors import ConsumerCursor

PAGE_BYTES = 4 << 20
"""About how many bytes are read at once; what is read is at least one frame, however large."""


class BufferHead(NamedTuple):
    """Where a buffer stands: its extent, size, keys, newest time, and the digest of its last frame."""

    start: int
    end: int
    used_bytes: int
    keys: int
    newest_unix_ms: int
    chain: bytes


@dataclass(frozen=True, slots=True)
class NewBuffer:
    """What a buffer that is not there yet begins with: its id, the secret of its key hashes, its first chain value."""

    log_id: bytes
    secret: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class BufferFound:
    """What is there when a buffer is opened."""

    log_id: bytes
    secret: bytes
    head: BufferHead
    gaps: Sequence[GapSet]
    """In the order in which they were recorded."""
    aside_count: int
    aside_bytes: int
    aside_last_id: int
    """The highest id that a refused fact ever had, released or not; 0 when there was none."""


def touched(place: str, there: BufferHead, known: BufferHead) -> StorageTaken:
    """Say that the head of a buffer is not the one known here.

    What is known is not taken from there: offsets that were given once must not be given again.
    """
    return StorageTaken(
        f"the head of {place} says that it ends at {there.end}, not at {known.end}: somebody changed it",
        hint="What is stored was restored or touched while the node ran: restart it, and reconcile its links.",
    )


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """What is known of a frame without its content."""

    base: int
    count: int
    size_bytes: int
    appended_at_unix_ms: int

    @property
    def end(self) -> int:
        """The offset after its last entry."""
        return self.base + self.count


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One stored frame; its content is header and payload, see `bsfg.stores.shared.frame`."""

    base: int
    count: int
    appended_at_unix_ms: int
    chain_before: bytes
    content: bytes

    @property
    def end(self) -> int:
        """The offset after its last entry."""
        return self.base + self.count


class AsideRow(NamedTuple):
    """One refused fact: its id, a hash to find it again by, what is known of it as JSON, and the fact."""

    id: int
    same: int
    head: str
    fact: bytes

    @property
    def size_bytes(self) -> int:
        """What it counts for in quarantine."""
        return len(self.head) + len(self.fact)


class KeptKeys(NamedTuple):
    """The keys of a range of entries that left, for as long as their repeats are known."""

    first: int
    last: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class DepartedRange:
    """What stays of frames that leave together: what the digest over them and the chain prove, and their keys."""

    kept: KeptRange
    newest_unix_ms: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class ReleasedFact:
    """A refused fact that an operator dropped, and why."""

    id: int
    reason: str
    at_unix_ms: int


@dataclass(frozen=True, slots=True)
class ForgottenKeys:
    """Keys that are beyond their horizon: hash and offset of each, and where the range that they are of begins."""

    first: int
    hashes: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, slots=True)
class NewFrame:
    """A frame that is appended, with the hash and the offset of each of its keys; two keys may have one hash."""

    row: FrameRow
    hashes: np.ndarray
    offsets: np.ndarray
    only_if_new: bool = False
    """Make nothing of the change when one of the hashes is known."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes durable together, as a step of the buffer from one head to the next; the rest stays as it is."""

    before: BufferHead
    after: BufferHead
    frame: NewFrame | None = None
    aside: Sequence[AsideRow] = ()
    released: ReleasedFact | None = None
    gaps: Sequence[GapSet] = ()
    gaps_anew: bool = False
    """The gap records replace all that are there."""
    departed: DepartedRange | None = None
    """Its frames go, those that begin inside it."""
    latest: bytes | None = None
    forgotten: ForgottenKeys | None = None


@dataclass(frozen=True, slots=True)
class ZoneNode:
    """A node of the zone that runs, and how long ago it gave a sign of life."""

    name: str
    active: bool
    seen_seconds: float


class ZoneKeeper(ABC):
    """Keeps the buffers and consumers of one zone, for one writer at a time."""

    @abstractmethod
    def claim(self, zone: str, hasher: str) -> Sequence[tuple[str, Buffer]]:
        """Be the zone's one writer from now on, and give the buffers that exist.

        Whoever claimed it before changes nothing any more: count an epoch up, and let every change depend on it.
        Raises `StorageTaken` while another node is at work, `StorageForeign` when another zone's facts are here,
        `HasherMismatch` when they were written with another digest function, `StorageUnsafe` when what is
        acknowledged might be lost.
        """

    @abstractmethod
    def buffer(self, stream: str, kind: Buffer, new: NewBuffer) -> BufferKeeper:
        """Give one buffer, which is made durably of ``new`` when there is none."""

    @abstractmethod
    def consumers(self) -> Sequence[ConsumerCursor]:
        """Give all consumers; see `bsfg.stores.shared.cursors.as_document` for a form to keep them in."""

    @abstractmethod
    def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Make consumers durable, all of them or none, in the place of those of the same names."""

    @abstractmethod
    def close(self) -> None:
        """Give the zone back."""


class BufferHistory(ABC):
    """One buffer as its history is read and written, by which it is carried into another storage."""

    @abstractmethod
    def found(self) -> BufferFound:
        """Give what is there now, when every change that is under way has come to its end."""

    @abstractmethod
    def commit(self, change: Change) -> bool:
        """Make a change durable, all of it or nothing; tell whether it was made.

        It is made from the head ``before`` alone, and only by who claimed the zone last: else raise `StorageTaken`.
        It was not when it is ``only_if_new`` and a key is known. A keeper that tries again after it lost its
        connection looks first whether the head is ``after`` by now: then the first attempt was made. A change whose
        heads are the same may be made twice.
        """

    @abstractmethod
    def frames(self, at: int, until: int, most: int) -> Sequence[FrameRow]:
        """Give the frames that end after an offset and begin before another, the first of them first.

        So many at most, and about `PAGE_BYTES`.
        """

    @abstractmethod
    def keys_holding(self, offsets: np.ndarray) -> Sequence[KeptKeys]:
        """Give keys of what left: the first of the ranges that hold some ascending offsets and still have theirs."""

    @abstractmethod
    def history(self, heads: Sequence[bytes]) -> tuple[Sequence[KeptRange], Mapping[bytes, int]]:
        """Give all that stays of what left, in order; and which frames have one of some digests before them."""

    @abstractmethod
    def latest(self) -> bytes | None:
        """Give what a change last said to be ``latest``."""

    @abstractmethod
    def aside(self, after: int | None, limit: int) -> Sequence[AsideRow]:
        """Give refused facts by their ids, those after one."""


class BufferKeeper(BufferHistory):
    """Keeps one buffer: its head, frames, keys, gap records and refused facts."""

    @abstractmethod
    def known(self, hashes: np.ndarray) -> np.ndarray:
        """Give the keys that have one of some different hashes, each as a row of hash and offset."""

    @abstractmethod
    def infos(self, at: int, most: int) -> Sequence[FrameInfo]:
        """Give the frames that end after an offset, the first of them first, so many at most, without their content."""

    @abstractmethod
    def holding(self, offsets: np.ndarray) -> Sequence[FrameRow]:
        """Give the first of the frames that hold some ascending offsets, about `PAGE_BYTES`; none when none does."""

    @abstractmethod
    def oldest_keys(self, before_unix_ms: int) -> KeptKeys | None:
        """Give the first range of what left that has its keys, if its newest entry was appended before a time."""

    @abstractmethod
    def aside(
        self, after: int | None, limit: int, *, newest_first: bool = False, same: Sequence[int] | None = None
    ) -> Sequence[AsideRow]:
        """Give refused facts by their ids: those after one, or before it when the newest come first.

        ``same`` gives only those with one of some hashes.
        """
