"""Compaction: which small files of a partition are worth merging, and how they are merged.

A fact is rewritten few times: files are merged when together they make one of full size, or when there are many of
about the same size, so that the result is several times as large as each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from bsfg.spark.land.disk import Disk
from bsfg.spark.land.folder import Staged
from bsfg.spark.land.layout import file_range, is_date_folder, is_predicate_folder
from bsfg.spark.land.parquet import ROW_GROUP_BYTES, StagedFile, partition_of

MANY_FILES = 8
"""So many files of about the same size are merged although they do not fill a file yet."""

SMALLEST_BYTES = 64 << 10
MERGED_FILES_MAX = 1_000
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class Small:
    """A landed file that may be merged with others."""

    name: str
    first: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Merge:
    """Files of one partition that are to become one; ``partition`` is its folder."""

    partition: str
    names: Sequence[str]
    size_bytes: int


def partitions(disk: Disk) -> Iterator[str]:
    """Give the folders of all partitions."""
    for date in filter(is_date_folder, disk.list("")):
        for predicate in filter(is_predicate_folder, disk.list(date)):
            yield f"{date}/{predicate}"


def small_files(disk: Disk, partition: str, file_size_bytes: int) -> list[Small]:
    """Give the files of a partition that are smaller than half of what they should be, in the order of offsets."""
    found = []
    for name in disk.list(partition):
        offsets = file_range(name)
        if offsets is None:
            continue
        size = disk.size(f"{partition}/{name}")
        if size < file_size_bytes // 2:
            found.append(Small(name, offsets[0], size))
    return sorted(found, key=lambda small: (small.first, small.name))


def plan(partition: str, files: Sequence[Small], file_size_bytes: int, *, thorough: bool) -> list[Merge]:
    """Choose what is merged; a thorough plan leaves no two small files that could be one."""
    merges = []
    for group in _groups(files, file_size_bytes):
        fills = sum(small.size_bytes for small in group) >= file_size_bytes // 2
        chosen = group if thorough or fills else _many_alike(group)
        if len(chosen) > 1:
            total = sum(small.size_bytes for small in chosen)
            merges.append(Merge(partition, [small.name for small in chosen], total))
    return merges


def _groups(files: Sequence[Small], file_size_bytes: int) -> Iterator[list[Small]]:
    """Cut files into runs that fill a file each; the last run may be smaller."""
    group: list[Small] = []
    total = 0
    for small in files:
        if group and (total + small.size_bytes > file_size_bytes or len(group) >= MERGED_FILES_MAX):
            yield group
            group, total = [], 0
        group.append(small)
        total += small.size_bytes
    if group:
        yield group


def _many_alike(group: Sequence[Small]) -> list[Small]:
    """Give the smallest files of a group when there are many of about one size; larger ones are left alone."""
    tiers = [max(small.size_bytes // SMALLEST_BYTES, 1).bit_length() // 3 for small in group]
    for tier in sorted(set(tiers)):
        if tiers.count(tier) >= MANY_FILES:
            return [small for small, each in zip(group, tiers, strict=True) if each <= tier]
    return []


class NotOurs(Exception):
    """A file has the name of a landed one, and another content."""


def merge(root: Path, run: str, work: Merge) -> Staged:
    """Stage one file with the facts of several; raises `NotOurs` with the name of one that is not of our making."""
    target: StagedFile | None = None
    for name in work.names:
        with pq.ParquetFile(root / work.partition / name) as source:
            partition = partition_of(source)
            if partition is None or partition.path != work.partition:
                raise NotOurs(name)
            target = target or StagedFile(root, run, partition)
            for batch in source.iter_batches(ROWS_AT_ONCE, use_threads=False):
                target.add(batch)
                if target.waiting_bytes >= ROW_GROUP_BYTES:
                    target.flush()
    assert target is not None
    return target.finish()
