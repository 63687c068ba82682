"""What the jobs on Spark share: the options that say where Spark runs, and how it is started and stopped."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp
from types import FrameType
from typing import IO, TYPE_CHECKING, Annotated

from bsfg.cli.common import handled, option
from bsfg.cli.output import console
from bsfg.errors import InvalidArgument, SparkFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PANEL = "Spark"

Master = Annotated[
    str,
    option(
        "URL",
        "Where Spark runs: local[*] is this process, or a cluster such as spark://host:7077.",
        "--master",
        envvar="BSFG_SPARK_MASTER",
        panel=PANEL,
    ),
]
Conf = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE", "A setting of Spark, which overrides ours. Repeatable.", "--conf", panel=PANEL, show_default=False
    ),
]


def settings_of(conf: Sequence[str] | None) -> dict[str, str]:
    """Read the settings that were given as NAME=VALUE."""
    result = {}
    for text in conf or ():
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            hint = "For example: --conf spark.driver.memory=2g"
            raise InvalidArgument(f"--conf {text!r} is not of the form spark.name=value", hint=hint)
        result[name] = value
    return result


def size_of(text: str, option: str) -> int:
    """Read the size that an option gives."""
    from bsfg.config.kinds import SIZE, WrongValue

    try:
        return SIZE.read(text)
    except WrongValue as problem:
        raise InvalidArgument(f"{option} {problem}") from None


@contextmanager
def spark_session(
    app: str, master: str, conf: dict[str, str], log: Path | None = None, *, brief: bool = False
) -> Iterator[SparkSession]:
    """Run a block with a Spark session, which is stopped at the end.

    ``log`` takes what Java and Spark themselves print; without one that is a passing file. ``brief`` says that no
    facts will pass through Java.
    """
    from bsfg.spark.session import end, started, without_tracebacks

    without_tracebacks()
    waiting = console(stderr=True).status("Starting Spark …") if sys.stderr.isatty() else nullcontext()
    with nullcontext(log) if log is not None else passing_log(app) as place:
        with waiting:
            spark = started(app, master, conf, place, brief=brief)
        try:
            yield spark
        finally:
            end(spark)


@contextmanager
def passing_log(name: str) -> Iterator[Path | None]:
    """Give a file for what Java and Spark print, which stays when Spark fails; none for those who want to see it."""
    if os.environ.get("BSFG_DEBUG") == "1":
        yield None
        return
    handle, text = mkstemp(prefix=f"{name}-", suffix=".log")
    os.close(handle)
    kept = False
    try:
        yield Path(text)
    except SparkFailed:
        kept = True
        raise
    finally:
        if not kept:
            Path(text).unlink(missing_ok=True)


RUNS, LOCK = "runs", "lock"


@contextmanager
def run_folder(work: Path) -> Iterator[Path]:
    """Give a new folder under ``work`` to a block, and remove it afterwards, with those of runs that are dead."""
    runs = work / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    # Nobody looks for dead runs while one is being born: its folder is there before its lock is.
    with (runs / LOCK).open("ab") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        remove_dead(runs)
        folder = runs / f"{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir()
        lock = _locked(folder)
    assert lock is not None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def remove_dead(runs: Path) -> None:
    """Remove the folders of runs whose process is gone."""
    for folder in runs.iterdir():
        if folder.is_dir():
            with suppress(OSError):
                lock = _locked(folder)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.close()


def _locked(folder: Path) -> IO[bytes] | None:
    """Lock a folder, None when another process has it."""
    file = (folder / LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        file.close()
        raise
    return file


FOLLOW_SECONDS = 1.0
"""How often it is looked whether the configuration has changed."""


class FollowedFiles:
    """Files that a run goes by: tells when they have changed, and are no longer being written."""

    def __init__(self, *paths: Path) -> None:
        self.paths = list(paths)
        self._taken = self._seen = b""
        self._next = 0.0

    def take(self) -> None:
        """Note that the files are taken as they are now."""
        self._taken = self._seen = self._digest()

    def have_changed(self) -> bool:
        """Tell, once for each change and now and then, whether the files are others than those that were taken."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + FOLLOW_SECONDS
        before, self._seen = self._seen, self._digest()
        if self._seen in (self._taken, b"") or self._seen != before:
            return False
        self._taken = self._seen
        return True

    def _digest(self) -> bytes:
        """Give the digest of all files, nothing while they cannot be read."""
        try:
            return sha256(b"\0".join(path.read_bytes() for path in self.paths)).digest()
        except OSError:
            return b""


class Stopped(KeyboardInterrupt):
    """Somebody asked the command to end, by Ctrl-C or SIGTERM."""


def ends_on_signals() -> AbstractContextManager[None]:
    """Have SIGTERM end a block as Ctrl-C does, so that what it began is cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped

    return handled(end, signal.SIGTERM)
