"""Checks of the disk: what kind it is, whether it is large enough, and how long it takes to make something durable."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bsfg.cli.doctor.findings import Finding, Says, Subject, existing_parent
from bsfg.cli.output import size_text

SYNCS = 100
SYNC_SECONDS_MAX = 3.0
SYNC_BYTES = 4_096
SLOW_P50_MS, SLOW_P99_MS, TOO_FAST_P50_MS = 20.0, 500.0, 0.01
FREE_PERCENT_WARNING = 5.0
FREE_BYTES_LEAST = 64 << 20

NETWORK = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"})
MEMORY = frozenset({"ramfs", "tmpfs"})

_says = Says("disk")


@dataclass(frozen=True, slots=True)
class Syncs:
    """How long making a small write durable took."""

    p50_ms: float
    p99_ms: float


def disk(subject: Subject) -> Iterator[Finding]:
    """Look at the file systems of data and artifacts."""
    config = subject.config
    folders = {"data": config.data_folder, "artifacts": config.artifacts_folder}
    capacities = {
        "data": sum(stream.store_capacity_bytes + stream.forward_capacity_bytes for stream in config.streams.values()),
        "artifacts": config.artifacts.capacity_bytes,
    }
    volumes: dict[int, list[str]] = {}
    for name, folder in folders.items():
        volumes.setdefault(existing_parent(folder).stat().st_dev, []).append(name)
    for names in volumes.values():
        where = existing_parent(folders[names[0]])
        yield from _kind(where)
        wanted = sum(capacities[name] for name in names)
        used = sum(_size(folder) for folder in _outermost([folders[name] for name in names]))
        yield from _space(where, names, wanted, used)
    yield from _syncs(existing_parent(config.data_folder))


def _kind(where: Path) -> Iterator[Finding]:
    kind = file_system(where)
    if kind in MEMORY:
        do = "Keep the data folder on a disk: everything here is gone after a restart of the machine."
        yield _says.warning(f"{where} is on {kind}, which lives in memory", do)
    elif kind in NETWORK or kind.startswith("fuse"):
        do = "Use a local disk: locks and syncs over a network may not hold what they promise."
        yield _says.warning(f"{where} is on {kind}, which is not a local file system", do)
    elif kind == "overlay":
        do = "Mount a volume for the data folder: a container's own layer goes with the container."
        yield _says.warning(f"{where} is on a container's own layer (overlay)", do)
    elif kind:
        yield _says.ok(f"{where} is on {kind}")


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Give the kind of file system that a path is on, nothing when it cannot be told."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    real, kind, depth = path.resolve(), "", 0
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(left.split()[4].replace("\\040", " "))
        # The innermost mount counts, and of several on one point the last.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            kind, depth = right.split()[0], len(point.parts)
    return kind


def _space(where: Path, names: list[str], wanted: int, used: int) -> Iterator[Finding]:
    stats = os.statvfs(where)
    free, whole = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    what = " and ".join(names)
    shown = f"{size_text(free)} free of {size_text(whole)}"
    if free < FREE_BYTES_LEAST:
        yield _says.problem(f"{where}: {shown}", "Free some space; a node refuses facts with disk_full.")
        return
    if free * 100 < whole * FREE_PERCENT_WARNING:
        yield _says.warning(f"{where}: {shown}", "Free some space before the disk is full.")
    grow = max(0, wanted - used)
    if grow > free:
        says = f"{what} may grow by {size_text(grow)}, but {where} has only {size_text(free)} free"
        do = "Lower store_capacity, forward_capacity or [artifacts] capacity, or give them a larger volume."
        yield _says.warning(says, do)
    else:
        yield _says.ok(f"{shown}; {what} may grow by {size_text(grow)}")


def _outermost(folders: list[Path]) -> list[Path]:
    """Leave out folders that lie inside others, so that nothing is counted twice."""
    return [each for each in folders if not any(each != other and each.is_relative_to(other) for other in folders)]


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total


def _syncs(where: Path) -> Iterator[Finding]:
    try:
        found = measure_syncs(where)
    except OSError as error:
        do = "Make the folder writable for the user that runs the node, and look at the disk (dmesg)."
        yield _says.problem(f"nothing can be written to {where}: {error.strerror}", do)
        return
    rate = 1000 / max(found.p50_ms, 0.001)
    says = (
        f"a sync takes {found.p50_ms:.2f} ms (p50), {found.p99_ms:.2f} ms (p99): a producer that waits for every ack "
        f"appends at most {rate:,.0f} times a second; producers at the same time share a sync"
    )
    if found.p50_ms < TOO_FAST_P50_MS:
        do = "Make sure that this disk really syncs: a write cache without battery loses facts when the power goes."
        yield _says.warning(f"{says}. That is faster than disks are", do)
    elif found.p50_ms > SLOW_P50_MS or found.p99_ms > SLOW_P99_MS:
        do = "Use a faster disk (SSD with power-loss protection), or larger batches and several producers."
        yield _says.warning(says, do)
    else:
        yield _says.ok(says)


def measure_syncs(folder: Path) -> Syncs:
    """Append small blocks to a file and sync each, as the log does."""
    taken: list[float] = []
    block = bytes(SYNC_BYTES)
    with tempfile.TemporaryFile(dir=folder, prefix="bsfg-doctor-") as file:
        end = time.monotonic() + SYNC_SECONDS_MAX
        while len(taken) < SYNCS and (not taken or time.monotonic() < end):
            start = time.perf_counter()
            os.write(file.fileno(), block)
            os.fdatasync(file.fileno())
            taken.append(1000 * (time.perf_counter() - start))
    taken.sort()
    return Syncs(taken[len(taken) // 2], taken[min(len(taken) - 1, len(taken) * 99 // 100)])
