"""Checks of the data folder: who writes it, whether it is whole, and whether the configuration fits it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bsfg.cli.doctor.findings import Finding, Says, Subject, counted, existing_parent
from bsfg.cli.doctor.ports import command_of
from bsfg.cli.output import size_text

if TYPE_CHECKING:
    from bsfg.cli.inspect.gather import FolderInfo
    from bsfg.stores.log.verify import Progress

VERIFIED_BYTES_MAX = 64 << 20
"""A folder up to this size is verified as a whole, which takes some seconds; a larger one only in its structure."""

_says = Says("data")


def folder(subject: Subject) -> Iterator[Finding]:
    """Look at the data folder."""
    from bsfg.errors import BsfgError

    path = subject.config.data_folder
    if not path.exists():
        yield _new(path)
        return
    if not os.access(path, os.W_OK):
        do = "Give it to the user that runs the node (chown), or run this check as that user."
        yield _says.problem(f"{path} cannot be written by this user", do)
    yield from _readers(path, group_reads=subject.config.storage.group_reads)
    if not os.listdir(path):
        yield _says.ok(f"{path} is empty; the node fills it when it first starts")
        return
    try:
        info = subject.data
    except BsfgError as error:
        yield _says.problem(f"{path}: {error.message}", error.hint)
        return
    yield _writer(subject)
    yield from _whole(info, path, subject.progress)
    yield from _fits(subject, info)


def _readers(path: Path, *, group_reads: bool) -> Iterator[Finding]:
    """Look whether others than the node's account can look into the folder, which earlier versions let them."""
    mode = path.stat().st_mode
    wanted = 0o750 if group_reads else 0o700
    if mode & 0o777 & ~wanted & 0o077:
        who = "everybody on this machine" if mode & 0o007 else "its group"
        yield _says.warning(f"{path} can be looked into by {who}", f"chmod {wanted:o} {path}")


def _new(path: Path) -> Finding:
    parent = existing_parent(path)
    if not os.access(parent, os.W_OK):
        return _says.problem(f"{path} is not there and cannot be made", f"Make {parent} writable for the node's user.")
    return _says.ok(f"{path} is not there yet; the node makes it when it first starts")


def _writer(subject: Subject) -> Finding:
    pid, path = subject.writer_pid, subject.config.data_folder
    if pid is None:
        return _says.ok(f"{path} is written by nobody: the node does not run")
    return _says.ok(f"{path} is written by process {pid} ({command_of(pid)})")


def _whole(info: FolderInfo, path: Path, progress: Progress | None) -> Iterator[Finding]:
    from bsfg.cli.verify import ADVICE
    from bsfg.stores.log.verify import verify

    for log in info.logs:
        if log.error is not None:
            yield _says.problem(f"{log.stream}/{log.buffer}: {log.error['message']}", str(log.error["hint"]))
    for text in info.problems:
        yield _says.problem(f"{text}", f"bsfg verify {path}")
    if info.size_bytes > VERIFIED_BYTES_MAX:
        says = f"{size_text(info.size_bytes)} in {counted(len(info.logs), 'log')}, looked at from outside"
        yield _says.ok(f"{says}; `bsfg verify {path}` reads every byte")
        return
    report = verify(path, progress=progress)
    for problem in report.problems:
        yield _says.problem(f"{problem.code} in {problem.where}: {problem.detail}", ADVICE.get(problem.code, ""))
    if report.ok:
        facts = sum(log.facts for log in report.logs)
        yield _says.ok(f"{counted(facts, 'fact')} in {counted(len(report.logs), 'log')}, every byte verified")


def _fits(subject: Subject, info: FolderInfo) -> Iterator[Finding]:
    streams = subject.config.streams
    for stream in sorted({log.stream for log in info.logs} - set(streams)):
        do = f"Add [streams.{stream}] again, or remove its folder when nobody needs it any more."
        yield _says.warning(f"the stream {stream!r} is on disk but not configured, so nobody is served from it", do)
    for consumer in info.consumers:
        if not consumer.same_history and consumer.retired_reason is None:
            do = "The folder was restored or mixed: reconcile this consumer, or retire it with a reason."
            yield _says.problem(f"the consumer {consumer.name} belongs to another history of the log", do)
    quarantined = sum(len(log.quarantine) for log in info.logs)
    if quarantined:
        yield _says.warning(f"{counted(quarantined, 'fact')} in quarantine", "bsfg quarantine list")
