"""A landing as a table of Delta Lake: a file is visible when the table's log names it.

`deltalake` keeps the log. Every commit carries two of Delta's application transactions, the next offset and the number
of the commit, so that the log itself tells what was landed: what is there already is not added again, and whoever has
fallen behind is refused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from bsfg.errors import DiskFull, LandingDamaged, LandingStale
from bsfg.spark.land.places import Disk, move_into_place
from bsfg.spark.land.state import (
    LATEST,
    VACUUM_HOURS,
    LandedOrigin,
    LandedState,
    PartitionChange,
    Shape,
    file_range,
)

LOG = "_delta_log"
_LAST_CHECKPOINT = "_last_checkpoint"
_REMEMBERED = "delta.deletedFileRetentionDuration"
_REMEMBERED_HOURS = 168
"""How much longer the log knows of a file that has left than the file itself is kept."""

_HOURS = {"hour": 1, "day": 24, "week": 168}
_INTERVAL = re.compile(r"interval (\d+) (hour|day|week)s?")


def _interval(kept_hours: int) -> str:
    return f"interval {kept_hours + _REMEMBERED_HOURS} hours"


_CONFIGURATION = {
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 7 days",
    _REMEMBERED: _interval(ceil(VACUUM_HOURS)),
}
"""A commit every ten seconds makes 60,000 files of the log in a week, and readers begin at the last checkpoint."""


_UNSYNCED_MAX = 4
"""So many commits are made at most before they are synced: a vacuum makes two, and so does one with new columns."""


class DeltaPlaces:
    """The tables of a landing folder: that of all facts, and that of the newest where it is kept."""

    def __init__(self, disk: Disk, origin: LandedOrigin) -> None:
        self._disk = disk
        shape = origin.shape
        root, app = Path(str(disk)), f"bsfg-{origin.log_id}"
        self._facts = DeltaLog(root, app, shape)
        self._newest = DeltaLog(root / LATEST, app, shape.of_latest, keeps_newest=True)

    def partitions(self) -> Iterator[str]:
        """Give the partitions that the log has files in."""
        return iter(list(self._facts.active()))

    def names(self, partition: str) -> Sequence[str]:
        """Give the files of a partition that the log names."""
        log, partition = self._log(partition)
        return list(log.active().get(partition, ()))

    def check(self, state: LandedState) -> None:
        """Raise `LandingStale` when the log tells of more than a state does, `LandingDamaged` when it tells of less."""
        next_offset, sequence = self._facts.position()
        if next_offset > state.next or sequence > state.sequence:
            raise LandingStale(
                f"the table has facts up to offset {next_offset} (commit {sequence}), "
                f"this landing knows of {state.next} (commit {state.sequence})"
            )
        if sequence < state.published:
            raise LandingDamaged(
                f"the log of the table {self._disk} knows nothing of commit {state.published}, which was landed"
            )
        self._facts.check_columns()

    def publish(self, state: LandedState) -> None:
        """Move files to their places, where nobody sees them yet, and add what comes and goes to the logs."""
        assert state.pending is not None
        changes = state.pending.changes
        move_into_place(self._disk, changes)
        if state.pending.is_of_latest:
            self._newest.commit(changes, state, is_new=True)
        else:
            self._facts.commit(changes, state, is_new=not any(change.removes for change in changes))

    def vacuum(self, hours: float) -> int:
        """Remove the files that left the tables so long ago, and count them."""
        return self._facts.vacuum(hours) + self._newest.vacuum(hours)

    def _log(self, partition: str) -> tuple[DeltaLog, str]:
        if partition.startswith(f"{LATEST}/"):
            return self._newest, partition.removeprefix(f"{LATEST}/")
        return self._facts, partition


class DeltaLog:
    """The log of one table; ``app`` is the name under which it knows of our commits."""

    def __init__(self, root: Path, app: str, shape: Shape, *, keeps_newest: bool = False) -> None:
        self._root, self._shape, self._keeps_newest = root, shape, keeps_newest
        self._offset_app, self._sequence_app = app, f"{app}-commit"
        self._table: DeltaTable | None = None
        self._active: dict[str, list[str]] | None = None
        self._synced = -1

    def position(self) -> tuple[int, int]:
        """Give the next offset and the number of the last commit that the log knows of; -1 where there is none."""
        with _told(self._root):
            table = self._loaded()
            if table is None:
                return -1, -1
            found = [table.transaction_version(app) for app in (self._offset_app, self._sequence_app)]
        next_offset, sequence = (-1 if each is None else each for each in found)
        return next_offset, sequence

    def check_columns(self) -> None:
        """Raise `LandingDamaged` when somebody else gave the table a column of a name of ours, and of another type."""
        with _told(self._root):
            table = self._loaded()
            there = {} if table is None else {field.name.lower(): field for field in table.schema().fields}
        for field in Schema.from_arrow(pa.schema([column.field for column in self._shape.columns])).fields:
            other = there.get(field.name.lower(), field)
            if (other.name, other.type) != (field.name, field.type):
                says = (
                    f"a column {other.name} of type {other.type.type}, {field.name} of type {field.type.type} is landed"
                )
                raise LandingDamaged(f"the table {self._root} has {says}")

    def active(self) -> dict[str, list[str]]:
        """Give the names of the files that readers see, by partition; others may have merged them since we looked."""
        with _told(self._root):
            table = self._loaded()
            if self._active is not None:
                return self._active
            paths = [] if table is None else pa.table(table.get_add_actions()).column("path").to_pylist()
            self._active = {}
            for path in paths:
                partition, _, name = unquote(path).rpartition("/")
                self._active.setdefault(partition, []).append(name)
        return self._active

    def commit(self, changes: Sequence[PartitionChange], state: LandedState, *, is_new: bool) -> None:
        """Add a commit of the landing, unless it is there; ``is_new`` says whether facts come that were not there."""
        with _told(self._root):
            table = self._loaded() or self._created()
            if self.position()[1] < state.sequence:
                self._evolve(table)
                table.create_write_transaction(
                    self._actions(self._still_true(changes), is_new),
                    "append",
                    table.schema(),
                    list(self._shape.partition_by),
                    commit_properties=CommitProperties(
                        app_transactions=[
                            Transaction(self._offset_app, state.next),
                            Transaction(self._sequence_app, state.sequence),
                        ]
                    ),
                )
                self._active = None
            self._sync()

    def vacuum(self, hours: float) -> int:
        """Remove the files that left the table so long ago, and count them."""
        with _told(self._root):
            table, kept = self._loaded(), ceil(hours)
            if table is None:
                return 0
            self._remember(table, kept)
            old = table.vacuum(kept, dry_run=True, enforce_retention_duration=False)
            # The log tells of files for a while after they were removed, too.
            there = [path for path in old if (self._root / path).exists() or (self._root / unquote(path)).exists()]
            if there:
                table.vacuum(kept, dry_run=False, enforce_retention_duration=False)
                self._sync()
            return len(there)

    def _remember(self, table: DeltaTable, kept_hours: int) -> None:
        """Have the log know of files that have left for longer than they are kept.

        A checkpoint leaves out those that left longer ago than the table says, a week unless it says so, and what the
        log knows nothing of is never removed.
        """
        found = _INTERVAL.fullmatch(table.metadata().configuration.get(_REMEMBERED) or "")
        if found is None or int(found[1]) * _HOURS[found[2]] < kept_hours + _REMEMBERED_HOURS:
            table.alter.set_table_properties({_REMEMBERED: _interval(kept_hours)})
            self._sync()

    def _still_true(self, changes: Sequence[PartitionChange]) -> list[PartitionChange]:
        """Give the changes as they are to be done to the table as it is now.

        Others may merge files of the table as well. Where one that is to be replaced has left the table, its facts are
        in a file of theirs: ours would bring them a second time, and is left out. Of the newest facts, ours has all
        that were in the partition and more, so it replaces whatever is there.
        """
        active = self.active()
        there = [active.get(self._folder(change), []) for change in changes]
        if self._keeps_newest:
            return [replace(change, removes=names) for change, names in zip(changes, there, strict=True)]
        return [change for change, names in zip(changes, there, strict=True) if {*change.removes} <= {*names}]

    def _folder(self, change: PartitionChange) -> str:
        return "/".join(change.partition.split("/")[-len(self._shape.partition_by) :])

    def _actions(self, changes: Sequence[PartitionChange], is_new: bool) -> list[AddAction | RemoveAction]:
        now = int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = []
        for change in changes:
            folder = self._folder(change)
            values = {name: value or None for name, value in change.values.items()}
            for add in change.adds:
                first, last = file_range(add.name) or (0, 0)
                stats = {"numRecords": add.facts, "minValues": {"offset": first}, "maxValues": {"offset": last}}
                text = orjson.dumps({**stats, "nullCount": {"offset": 0}}).decode()
                actions.append(AddAction(f"{folder}/{add.name}", add.size_bytes, values, now, is_new, text))
            for name in change.removes:
                actions.append(RemoveAction(f"{folder}/{name}", is_new, now, None, values))
        return actions

    def _evolve(self, table: DeltaTable) -> None:
        """Add the columns that the table does not have yet."""
        known = {field.name for field in table.schema().fields}
        more = pa.schema([field for field in self._shape.schema if field.name not in known])
        if len(more):
            table.alter.add_columns(Schema.from_arrow(more).fields)
            table.update_incremental()

    def _loaded(self) -> DeltaTable | None:
        """Give the table as it is now, or None when there is none yet."""
        if self._table is not None and not (self._root / LOG).is_dir():
            self._table = self._active = None
            self._synced = -1
        if self._table is not None:
            known = self._table.version()
            self._table.update_incremental()
            if self._table.version() != known:
                self._active = None
        elif (self._root / LOG).is_dir():
            self._mend()
            with suppress(TableNotFoundError):
                self._table = DeltaTable(str(self._root))
                # Whoever made the newest commit may have been killed before it was synced.
                self._synced = self._table.version() - 2
        return self._table

    def _created(self) -> DeltaTable:
        self._root.mkdir(exist_ok=True)
        self._table = DeltaTable.create(
            str(self._root),
            self._shape.table_schema,
            mode="ignore",
            partition_by=list(self._shape.partition_by),
            configuration=_CONFIGURATION,
        )
        return self._table

    def _sync(self) -> None:
        """Have what was added to the log survive a power loss; `deltalake` leaves that to the system."""
        table = self._loaded()
        assert table is not None
        log = self._root / LOG
        versions = range(max(0, self._synced + 1), table.version() + 1)
        names = [f"{version:020}{suffix}" for version in versions for suffix in (".json", ".checkpoint.parquet")]
        for path in [*(log / name for name in (*names, _LAST_CHECKPOINT)), log, self._root]:
            with suppress(FileNotFoundError):
                _fsync(path)
        self._synced = table.version()

    def _mend(self) -> None:
        """Remove what a power loss has left half written: it was not synced, and so nothing was built on it."""
        log = self._root / LOG
        commits = sorted(path for path in log.glob("*.json") if path.stem.isdigit())[-_UNSYNCED_MAX:]
        torn = next((at for at, commit in enumerate(commits) if not _is_whole(commit)), len(commits))
        for commit in reversed(commits[torn:]):
            commit.unlink()
        with suppress(FileNotFoundError):
            try:
                version = orjson.loads((log / _LAST_CHECKPOINT).read_bytes())["version"]
                pq.read_metadata(log / f"{version:020}.checkpoint.parquet")
            except (orjson.JSONDecodeError, pa.ArrowInvalid):
                (log / _LAST_CHECKPOINT).unlink()


def _is_whole(commit: Path) -> bool:
    try:
        return bool([orjson.loads(line) for line in commit.read_bytes().splitlines()])
    except orjson.JSONDecodeError:
        return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told(root: Path) -> Iterator[None]:
    """Turn errors of Delta Lake into ours."""
    try:
        yield
    except (DeltaError, TableNotFoundError) as error:
        says = " ".join(str(error).split())[:300]
        if "No space left" in says:
            raise DiskFull(f"writing to {root / LOG}: {says}") from None
        if isinstance(error, CommitFailedError):
            raise LandingStale(f"another process has landed in {root} meanwhile: {says}") from None
        raise LandingDamaged(f"the log of the table {root} cannot be used: {says}") from None
