"""A landing folder: commits that happen once, and what an interrupted one left undone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson

from bsfg.errors import ExtraMissing, FolderLocked, FrameInvalid, InvalidArgument
from bsfg.spark.land.places import Disk, ParquetPlaces
from bsfg.spark.land.state import (
    GAPS,
    LOCK,
    STAGING,
    STATE,
    SWAP,
    WORK,
    Add,
    LandedOrigin,
    LandedState,
    PartitionChange,
    Pending,
    TableFormat,
    file_name,
)
from bsfg.stores.log.files import translated, write_whole


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that a task wrote: where it lies, its partition, and the facts in it, which lie ``first`` to ``last``."""

    path: str
    partition: str
    first: int
    last: int
    facts: int
    size_bytes: int
    values: Mapping[str, str] = field(default_factory=dict)

    def added(self, sequence: int) -> Add:
        """Give the file as a commit brings it."""
        return Add(self.path, file_name(self.first, self.last, sequence), self.facts, self.size_bytes)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A file that takes the place of others in its partition: they hold the same facts, or older ones."""

    file: Staged
    removes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a commit lands: all facts and gaps from ``first`` to before ``next``."""

    first: int
    next: int
    files: Sequence[Staged] = ()
    gaps: Sequence[dict[str, Any]] = ()
    missing: int = 0
    tail: tuple[int, str] | None = None
    gaps_token: str = ""


class Places(Protocol):
    """What makes landed files visible to readers: the one thing in which the formats of tables differ.

    A commit is the same for all: the state says what shall be, `publish` makes it so, and whoever is killed in between
    is followed by one who publishes the same again.
    """

    def partitions(self) -> Iterator[str]:
        """Give the folders of all partitions of facts."""

    def names(self, partition: str) -> Sequence[str]:
        """Give the files of a partition that readers see."""

    def check(self, state: LandedState) -> None:
        """Raise `LandingStale` when more was landed than a state knows of, and `LandingDamaged` when less is there."""

    def publish(self, state: LandedState) -> None:
        """Do what is pending in a state, or what is left of it; when this returns, it survives a power loss."""

    def vacuum(self, hours: float) -> int:
        """Remove files that readers have not seen for so long, and count them."""


class LandingFolder:
    """The one writer of a landing folder. After an error, `recover` finds out what is true."""

    def __init__(self, disk: Disk, release: Callable[[], None]) -> None:
        self.disk, self._release = disk, release
        self._state: LandedState | None = None
        self._places: Places | None = None
        self.run = f"{STAGING}/{uuid.uuid4().hex[:12]}"
        """Where tasks stage their files; another process has another folder."""

    @staticmethod
    def open(disk: Disk) -> LandingFolder:
        """Become the writer of a folder, made if need be, and finish what the one before left undone.

        Raises `FolderLocked` while there is another writer, and `InvalidArgument` for a folder of somebody else.
        """
        _check_ours(disk)
        disk.make_folder(WORK)
        try:
            folder = LandingFolder(disk, disk.lock(LOCK))
        except FolderLocked as error:
            hint = "One folder has one writer: stop the other `bsfg pipeline land`, or land into another folder."
            raise FolderLocked(error.message, hint=hint, **error.details) from None
        try:
            folder.recover()
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def places(self) -> Places:
        """What readers see of the folder."""
        if self._places is None:
            self._places = _places(self.disk, self.state.origin)
        return self._places

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever landed here."""
        return self._state is None

    @property
    def state(self) -> LandedState:
        """The folder at its last commit."""
        if self._state is None:
            raise InvalidArgument("nothing was landed in this folder yet")
        return self._state

    def recover(self) -> None:
        """Read the state from the disk, do what it still promises, and remove what belongs to nothing."""
        with telling("opening the landing folder"):
            self._state = self._places = None
            if self.disk.exists(STATE):
                state = LandedState.from_json(bytes(self.disk.read(STATE)))
                # A killed process may have left it where a power loss still takes it back, and its files must not stay.
                self.disk.sync_folder(WORK)
                self._state = state
                self.places.check(state)
                self._finish(state)
            self.disk.remove(f"{STATE}.new")
            self.disk.remove_folder(SWAP)
            self.disk.remove_folder(STAGING)
            self.disk.make_folder(self.run)
            for path in (STAGING, WORK, ""):
                self.disk.sync_folder(path)

    def begin(self, origin: LandedOrigin, start: int) -> None:
        """Write the first state of a new folder: whose facts it will hold, from which offset on."""
        with telling("writing the first state"):
            self._places = _places(self.disk, origin)
            self._write(LandedState(origin, start, start))

    def evolve(self, columns: Sequence[str]) -> None:
        """Give the table more columns; files have them from the next commit on."""
        origin = replace(self.state.origin, columns=tuple(columns))
        with telling("adding columns"):
            self._write(replace(self.state, origin=origin))
        self._places = None

    def commit(self, batch: Batch) -> LandedState:
        """Land a batch; when this returns, its facts are in their places and survive a power loss."""
        state = self.state
        _check_whole(state, batch)
        sequence = state.sequence + 1
        tail_offset, tail_digest = batch.tail or (state.tail_offset, state.tail_digest)
        with telling("landing a batch"):
            pending = Pending(_changes(batch.files, sequence), batch.gaps, self._gaps_bytes())
            new = replace(
                state,
                next=batch.next,
                sequence=sequence,
                facts=state.facts + sum(file.facts for file in batch.files),
                missing=state.missing + batch.missing,
                tail_offset=tail_offset,
                tail_digest=tail_digest,
                gaps_token=batch.gaps_token or state.gaps_token,
                pending=pending if batch.files or batch.gaps else None,
            )
            return self._commit(new)

    def replace(self, replacements: Sequence[Replacement], *, latest: int | None = None) -> LandedState:
        """Put files in the places of others, all at one commit; ``latest`` is how far the newest facts then are."""
        state = self.state
        sequence = state.sequence + 1
        changes = [
            PartitionChange(each.file.partition, [each.file.added(sequence)], list(each.removes), each.file.values)
            for each in replacements
        ]
        with telling("replacing files"):
            known = state.latest if latest is None else latest
            pending = Pending(changes) if changes else None
            return self._commit(replace(state, sequence=sequence, latest=known, pending=pending))

    def vacuum(self, hours: float) -> int:
        """Remove files that readers have not seen for so long, and count them."""
        with telling("removing old files"):
            return self.places.vacuum(hours)

    def discard_staged(self) -> None:
        """Remove what failed attempts have staged; nothing of a commit is left there."""
        for name in self.disk.list(self.run):
            with suppress(OSError):
                self.disk.remove(f"{self.run}/{name}")

    def close(self) -> None:
        """Let the next writer in."""
        release, self._release = self._release, lambda: None
        with suppress(OSError):
            self.disk.remove_folder(self.run)
        release()

    def _commit(self, new: LandedState) -> LandedState:
        self.places.check(self.state)
        # What is not known to have happened is looked up again: see `recover`.
        self._state = None
        self.disk.sync_folder(self.run)
        self._write(new)
        self._finish(new)
        return self.state

    def _write(self, state: LandedState) -> None:
        write_whole(self.disk, STATE, state.to_json())
        self._state = state

    def _finish(self, state: LandedState) -> None:
        """Do what a state promises, unless that is done, and note that it is."""
        self._state = state
        if state.pending is None:
            return
        self.places.publish(state)
        self._add_gaps(state.pending)
        published = state.published if state.pending.is_of_latest else state.sequence
        self._write(replace(state, published=published, pending=None))

    def _add_gaps(self, pending: Pending) -> None:
        if not pending.gaps:
            return
        exists = self.disk.exists(GAPS)
        file = self.disk.open_append(GAPS) if exists else self.disk.create(GAPS)
        try:
            if exists and self.disk.size(GAPS) > pending.gaps_at_bytes:
                file.truncate(pending.gaps_at_bytes)
            file.write([orjson.dumps(gap, option=orjson.OPT_APPEND_NEWLINE) for gap in pending.gaps])
            file.sync()
        finally:
            file.close()
        self.disk.sync_folder("")

    def _gaps_bytes(self) -> int:
        return self.disk.size(GAPS) if self.disk.exists(GAPS) else 0


class telling:
    """Turns errors of the operating system into ours."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            where = f" {error.filename}" if error.filename else ""
            raise translated(error, f"{self._doing}{where}") from None


def _places(disk: Disk, origin: LandedOrigin) -> Places:
    """Give the places of a table in the format that it was made in."""
    if origin.format == TableFormat.PARQUET:
        return ParquetPlaces(disk, origin.partition_by)
    try:
        from bsfg.spark.land.delta import DeltaPlaces
    except ImportError as error:
        raise ExtraMissing.behind(error, "--format delta") or error from None
    return DeltaPlaces(disk, origin)


def _changes(files: Sequence[Staged], sequence: int) -> list[PartitionChange]:
    found: dict[str, list[Staged]] = {}
    for file in files:
        found.setdefault(file.partition, []).append(file)
    return [
        PartitionChange(partition, [file.added(sequence) for file in each], (), each[0].values)
        for partition, each in sorted(found.items())
    ]


def _check_whole(state: LandedState, batch: Batch) -> None:
    """Refuse a batch that does not follow what is landed, or that does not hold all it should."""
    if batch.first != state.next:
        raise FrameInvalid(f"a batch from offset {batch.first} on was staged, {state.next} is to be landed next")
    found = sum(file.facts for file in batch.files)
    if found + batch.missing != batch.next - batch.first:
        raise FrameInvalid(
            f"{found} facts and {batch.missing} missing ones were staged for the offsets {batch.first} to {batch.next}"
        )


def _check_ours(disk: Disk) -> None:
    """Refuse a folder in which somebody else has put files."""
    names = [name for name in disk.list("") if name != WORK]
    if names and not disk.exists(STATE):
        hint = "Give an empty or a new folder; one that is landed in already has _bsfg/state.json."
        raise InvalidArgument(f"{disk} is not empty and was not made by landing: it holds {names[0]}", hint=hint)
