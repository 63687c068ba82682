"""What the checks of `bsfg doctor` look at, and those of the machine: its limits, its clock and its disk."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from bsfg.cli.output import count_text, size_text, time_text
from bsfg.wording import CheckFinding, Says

if TYPE_CHECKING:
    from bsfg.cli.inspect.gather import FolderInfo
    from bsfg.config import ZoneConfig


@dataclass(frozen=True)
class Subject:
    """What is examined: a zone's configuration on this machine, at one moment."""

    config: ZoneConfig
    now: datetime
    writer_pid: int | None = None
    """The process that has the data folder open for writing: the zone's own node, if it runs."""
    progress: Callable[[int, int], None] | None = None
    """Is told how many bytes were verified, and how many there are."""

    @cached_property
    def data(self) -> FolderInfo:
        """What is in the data folder; it is gathered once for all checks."""
        from bsfg.cli.inspect.gather import gather

        return gather(self.config.data_folder)


def existing_parent(path: Path) -> Path:
    """Give the path itself, or the innermost folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


FILES_BASE = 256
"""What a node needs for itself, however many streams it has: idle ones hold no file."""

_limits_says = Says("limits")


def limits(subject: Subject) -> Iterator[CheckFinding]:
    """Look at the number of files and connections that the node may have open."""
    config, pid = subject.config, subject.writer_pid
    wanted = FILES_BASE + 2 * config.limits.connections
    allowed = _of_process(pid) if pid is not None else None
    whose = "the running node" if allowed is not None else "a node started from here"
    if allowed is None:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY or allowed >= wanted:
        shown = "any number of" if allowed == resource.RLIM_INFINITY else count_text(allowed)
        yield _limits_says.ok(f"{whose} may open {shown} files; it may need {count_text(wanted)}")
        return
    do = "ulimit -n 65536 before the start, or LimitNOFILE=65536 in its systemd unit; or lower connections in [limits]."
    yield _limits_says.warning(
        f"{whose} may open only {count_text(allowed)} files, it may need {count_text(wanted)}", do
    )


def _of_process(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Max open files"):
            word = line.split()[3]
            return resource.RLIM_INFINITY if word == "unlimited" else int(word)
    return None


EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)
"""No machine that runs this was set up before."""

AHEAD_MS = 60_000
_UNSYNCHRONISED = 0x40

_clock_says = Says("clock")


def clock(subject: Subject) -> Iterator[CheckFinding]:
    """Look whether the time is plausible, kept by a time service, and not behind what is stored."""
    now = subject.now
    if now < EARLIEST:
        yield _clock_says.problem(f"the clock says {now:%Y-%m-%d %H:%M}Z, which cannot be", "Set it, and enable NTP.")
        return
    newest = _newest(subject)
    if newest is not None and newest > now.timestamp() * 1000 + AHEAD_MS:
        says = f"the newest stored fact is of {time_text(newest)}, but the clock says {now:%Y-%m-%d %H:%M:%S}Z"
        do = "Find out when the clock was wrong; new facts carry the later time until the clock has passed it."
        yield _clock_says.warning(says, do)
    synchronised = kernel_synchronised()
    if synchronised is None:
        yield _clock_says.ok(f"the clock says {now:%Y-%m-%d %H:%M:%S}Z; whether it is synchronised cannot be told here")
    elif synchronised:
        yield _clock_says.ok(f"the clock says {now:%Y-%m-%d %H:%M:%S}Z and is synchronised")
    else:
        do = "Enable a time service (chrony, systemd-timesyncd); ages, expiry and certificates go by this clock."
        yield _clock_says.warning(f"the clock says {now:%Y-%m-%d %H:%M:%S}Z but no time service keeps it", do)


class _Timex(ctypes.Structure):
    """The kernel's ``struct timex``: the status is its sixth long; the rest is room enough."""

    _fields_ = [("values", ctypes.c_long * 64)]


def kernel_synchronised() -> bool | None:
    """Ask the kernel whether a time service keeps the clock; None when it does not say."""
    try:
        answer = _Timex()
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(answer))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return not answer.values[5] & 0xFFFF_FFFF & _UNSYNCHRONISED


def _newest(subject: Subject) -> int | None:
    from bsfg.errors import BsfgError

    try:
        times = [log.newest_unix_ms for log in subject.data.logs]
    except BsfgError:
        return None
    return max((each for each in times if each is not None), default=None)


SYNCS = 100
SYNC_SECONDS_MAX = 3.0
SYNC_BYTES = 4_096
SLOW_P50_MS, SLOW_P99_MS, TOO_FAST_P50_MS = 20.0, 500.0, 0.01
FREE_PERCENT_WARNING = 5.0
FREE_BYTES_LEAST = 64 << 20

NETWORK = frozenset({"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"})
MEMORY = frozenset({"ramfs", "tmpfs"})

_disk_says = Says("disk")


@dataclass(frozen=True, slots=True)
class Syncs:
    """How long making a small write durable took."""

    p50_ms: float
    p99_ms: float


def disk(subject: Subject) -> Iterator[CheckFinding]:
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


def _kind(where: Path) -> Iterator[CheckFinding]:
    kind = file_system(where)
    if kind in MEMORY:
        do = "Keep the data folder on a disk: everything here is gone after a restart of the machine."
        yield _disk_says.warning(f"{where} is on {kind}, which lives in memory", do)
    elif kind in NETWORK or kind.startswith("fuse"):
        do = "Use a local disk: locks and syncs over a network may not hold what they promise."
        yield _disk_says.warning(f"{where} is on {kind}, which is not a local file system", do)
    elif kind == "overlay":
        do = "Mount a volume for the data folder: a container's own layer goes with the container."
        yield _disk_says.warning(f"{where} is on a container's own layer (overlay)", do)
    elif kind:
        yield _disk_says.ok(f"{where} is on {kind}")


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


def _space(where: Path, names: list[str], wanted: int, used: int) -> Iterator[CheckFinding]:
    stats = os.statvfs(where)
    free, whole = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    what = " and ".join(names)
    shown = f"{size_text(free)} free of {size_text(whole)}"
    if free < FREE_BYTES_LEAST:
        yield _disk_says.problem(f"{where}: {shown}", "Free some space; a node refuses facts with disk_full.")
        return
    if free * 100 < whole * FREE_PERCENT_WARNING:
        yield _disk_says.warning(f"{where}: {shown}", "Free some space before the disk is full.")
    grow = max(0, wanted - used)
    if grow > free:
        says = f"{what} may grow by {size_text(grow)}, but {where} has only {size_text(free)} free"
        do = "Lower store_capacity, forward_capacity or [artifacts] capacity, or give them a larger volume."
        yield _disk_says.warning(says, do)
    else:
        yield _disk_says.ok(f"{shown}; {what} may grow by {size_text(grow)}")


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


def _syncs(where: Path) -> Iterator[CheckFinding]:
    try:
        found = measure_syncs(where)
    except OSError as error:
        do = "Make the folder writable for the user that runs the node, and look at the disk (dmesg)."
        yield _disk_says.problem(f"nothing can be written to {where}: {error.strerror}", do)
        return
    rate = 1000 / max(found.p50_ms, 0.001)
    says = (
        f"a sync takes {found.p50_ms:.2f} ms (p50), {found.p99_ms:.2f} ms (p99): a producer that waits for every ack "
        f"appends at most {rate:,.0f} times a second; producers at the same time share a sync"
    )
    if found.p50_ms < TOO_FAST_P50_MS:
        do = "Make sure that this disk really syncs: a write cache without battery loses facts when the power goes."
        yield _disk_says.warning(f"{says}. That is faster than disks are", do)
    elif found.p50_ms > SLOW_P50_MS or found.p99_ms > SLOW_P99_MS:
        do = "Use a faster disk (SSD with power-loss protection), or larger batches and several producers."
        yield _disk_says.warning(says, do)
    else:
        yield _disk_says.ok(says)


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
