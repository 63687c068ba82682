"""What the tests of landing share: a simulated disk for its folder, and how a plain reader sees one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from tests.spark.nodes import SparkZone

from bsfg.fact import Entry
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land.state import GAPS, LATEST, By, LandSettings
from bsfg.testing.disk import SimulatedDisk
from bsfg.testing.durability import Folder, NameChange


class SimulatedLandingDisk(SimulatedDisk):
    """A disk that forgets what was not synced, for landing folders; ``exchanges`` says whether folders can."""

    def __init__(self, seed: int | str = 0, root: Folder | None = None, *, exchanges: bool = True) -> None:
        super().__init__(seed, root)
        self.exchanges = exchanges

    def after_power_loss(self, random: Random) -> SimulatedLandingDisk:
        """Give the disk as it may be found after losing power at this moment."""
        return SimulatedLandingDisk(self._seed, self.crash(random)._root, exchanges=self.exchanges)

    def after_kill(self) -> SimulatedLandingDisk:
        """Give the disk as the next process finds it when this one is killed."""
        return SimulatedLandingDisk(self._seed, self.killed()._root, exchanges=self.exchanges)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        with self._operation("link", f"{old} -> {new}"):
            file = self._root.file(old)
            folder, name = self._root.parent_of(new)
            if name in folder.live:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
            folder.change(NameChange({name: file}))

    def exchange(self, one: str, other: str) -> None:
        """Let two folders change their names; a power loss undoes both changes, or that of the first name alone."""
        with self._operation("exchange", f"{one} <-> {other}"):
            if not self.exchanges:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), one)
            (one_parent, one_name), (other_parent, other_name) = self._root.parent_of(one), self._root.parent_of(other)
            first, second = self._root.folder(one), self._root.folder(other)
            arrival = NameChange({other_name: first})
            other_parent.change(arrival)
            one_parent.change(NameChange({one_name: second}, needs=arrival))

    def is_folder(self, path: str) -> bool:
        """Tell whether there is a folder of this name."""
        with self._looking("is_folder", path):
            try:
                return isinstance(self._root.at(path), Folder)
            except OSError:
                return False

    def copy_rights(self, old: str, new: str) -> None:
        """Do nothing: the simulated disk knows no rights."""

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it, name by name."""
        if not self.is_folder(path):
            return
        for name in self.list(path):
            if self.is_folder(f"{path}/{name}"):
                self.remove_folder(f"{path}/{name}")
            else:
                self.remove(f"{path}/{name}")
        with self._operation("remove_folder", path):
            folder, name = self._root.parent_of(path)
            folder.change(NameChange({name: None}))


def seen_offsets(out: Path, format: str = "parquet") -> list[int]:
    """Give the offsets that a plain reader of a landing folder sees, sorted."""
    found = read(out, format, ["offset"])
    return [] if found is None else sorted(found.column("offset").to_pylist())


def read(out: Path, format: str, columns: list[str] | None = None) -> pa.Table | None:
    """Read a table as a plain reader does; None when nothing is there yet."""
    if format == "delta":
        return DeltaTable(out).to_pyarrow_table(columns=columns) if DeltaTable.is_deltatable(str(out)) else None
    found = ds.dataset(out, format="parquet", partitioning="hive")
    return found.to_table(columns=columns) if found.files else None


def check_latest(out: Path, format: str) -> None:
    """Hold the table of newest facts against all facts that were landed."""
    every, latest = read(out, format), read(out / LATEST, format)
    assert every is not None
    assert latest is not None
    newest: dict[tuple[str, str], int] = {}
    for row in every.select(["subject", "predicate", "offset"]).to_pylist():
        key = row["subject"], row["predicate"]
        newest[key] = max(newest.get(key, -1), row["offset"])
    found = latest.select(["subject", "predicate", "offset"]).to_pylist()
    assert {(row["subject"], row["predicate"]): row["offset"] for row in found} == newest
    assert len(found) == len(newest)


def gap_offsets(out: Path) -> list[int]:
    """Give the offsets that the list of gaps tells of, sorted."""
    path = out / GAPS
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    return sorted(_spread((line["first"], line["last"]) for line in lines if line.get("origin_zone") is None))


def _spread(ranges: Iterable[tuple[int, int]]) -> Iterable[int]:
    return (offset for first, last in ranges for offset in range(first, last + 1))


def settings(zone: SparkZone, out: Path, stream: str = "operational", **more: Any) -> LandSettings:
    """Give the settings of a landing of a zone's buffer; without compaction unless it is asked for."""
    given = zone.options(stream)
    access = NodeAccess(given["address"], given["ca"], given["cert"], given["key"], given["serverName"])
    return LandSettings(out, access, stream, **{"compact": False, "retry_seconds": 20.0, "by": By.PRODUCED_AT, **more})


def table(out: Path) -> pa.Table:
    """Read a landing folder as a plain reader does, in the order of offsets."""
    return ds.dataset(out, format="parquet", partitioning="hive").to_table().sort_by("offset")


def check_same(rows: Sequence[dict[str, Any]], entries: Sequence[Entry], by: str = "produced_at") -> None:
    """Hold what was landed against what the node has, field by field."""
    assert len(rows) == len(entries)
    for row, entry in zip(rows, entries, strict=True):
        envelope, fact = entry.message.envelope, entry.message.fact
        assert row["offset"] == entry.offset
        assert (row["message_id"], row["from_zone"], row["to_zone"]) == (
            envelope.message_id,
            envelope.from_zone,
            envelope.to_zone,
        )
        assert (row["subject"], row["predicate"]) == (fact.subject, fact.predicate)
        assert _bytes(row) == fact.object
        assert dict(row["labels"] or ()) == envelope.labels
        assert _unix_ms(row["produced_at"]) == envelope.produced_at_unix_ms
        assert _unix_ms(row["appended_at"]) == entry.appended_at_unix_ms
        assert str(row["date"]) == row[by].astimezone(UTC).date().isoformat()


def _bytes(row: dict[str, Any]) -> bytes:
    assert (row["object"] is None) != (row["object_text"] is None)
    return bytes(row["object"]) if row["object"] is not None else row["object_text"].encode()


def _unix_ms(moment: datetime) -> int:
    return round(moment.astimezone(UTC).timestamp() * 1000)
