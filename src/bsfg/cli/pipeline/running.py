"""What jobs share: where Spark runs, how it is started and stopped, how work is watched, and how a sink is run."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import mkstemp
from types import FrameType
from typing import IO, TYPE_CHECKING, Annotated, Any

from bsfg.cli.common import consumers as known_consumers
from bsfg.cli.common import flag, handled, option
from bsfg.cli.output import console, count_text, json_line, print_json, say
from bsfg.errors import CertificateInvalid, InvalidArgument, PeerUnreachable, SparkFailed
from bsfg.wording import counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.table import Table

    from bsfg.cli.connection import Target
    from bsfg.sinks.flow import Sink

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
SparkMaster = Annotated[
    str | None,
    option(
        "URL",
        "Where Spark runs: this process when left out, or a cluster such as spark://host:7077.",
        "--master",
        envvar="BSFG_SPARK_MASTER",
        panel=PANEL,
    ),
]
ZoneFile = Annotated[Path, option("FILE", "The zone's configuration.", "--config", "-c", envvar="BSFG_CONFIG")]
AsIdentity = Annotated[
    str | None, option("NAME", "Call the zone's node as this identity.", "--identity", envvar="BSFG_IDENTITY")
]
AtAddress = Annotated[
    str | None, option("HOST:PORT", "Where the zone's node listens.", "--address", envvar="BSFG_ADDRESS")
]
Conf = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE", "A setting of Spark, which overrides ours. Repeatable.", "--conf", panel=PANEL, show_default=False
    ),
]
SecretFile = Annotated[
    Path | None,
    option(
        "FILE",
        "The secret that the machines of a standalone cluster share; Spark's calls are authenticated and encrypted.",
        "--secret-file",
        envvar="BSFG_SPARK_SECRET_FILE",
        panel=PANEL,
        show_default=False,
    ),
]
AllowClearRpc = Annotated[
    bool,
    flag(
        "--allow-clear-rpc",
        "Let a cluster's calls go unencrypted, with the keys of the certificates in them.",
        panel=PANEL,
    ),
]
Pack = Annotated[
    Path | None,
    option(
        "FILE",
        "Have a cluster run the tasks out of this archive, which `bsfg pipeline pack` makes.",
        "--pack",
        envvar="BSFG_SPARK_PACK",
        panel=PANEL,
        show_default=False,
    ),
]


def settings_of(
    conf: Sequence[str] | None,
    pack: Path | None = None,
    secret_file: Path | None = None,
    allow_clear_rpc: bool = False,
) -> dict[str, str]:
    """Read the settings that were given as NAME=VALUE, and add what other options say to them."""
    from bsfg.spark.cluster import ALLOW_CLEAR, SECRET_FILE
    from bsfg.spark.pack import packed_settings

    result = {} if pack is None else packed_settings(pack)
    if secret_file is not None:
        result[SECRET_FILE] = str(secret_file)
    if allow_clear_rpc:
        result[ALLOW_CLEAR] = "true"
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


JSON_SECONDS = 1.0


def json_lines(document: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """Give what writes the document of a moment as a line of JSON, every second."""
    due = 0.0

    def show(*found: Any) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + JSON_SECONDS
            sys.stdout.buffer.write(json_line(document(*found)))
            sys.stdout.buffer.flush()

    return show


@contextmanager
def staying(drawn: Callable[..., Table], otherwise: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Give what shows a table that stays in place; where there is no terminal, what does it otherwise."""
    if not sys.stderr.isatty():
        yield otherwise
        return
    from rich.live import Live

    with Live(console=console(stderr=True), refresh_per_second=2, transient=False) as live:
        yield lambda *found: live.update(drawn(*found))


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


LOOK_SECONDS = 0.25
LINE_SECONDS = 10.0
"""How often a line is written where there is no terminal to keep one up to date."""

RATE_SECONDS = 20.0
END_SECONDS = 9.0
"""After this time work that was asked to end is left as it is, which harms nothing."""


class WorkProgress:
    """How far work is: facts, rate over the last seconds, what is left, and how long that will take."""

    def __init__(self, verb: str, now: Callable[[], float] = time.monotonic) -> None:
        self._verb, self._now = verb, now
        self._seen: deque[tuple[float, int]] = deque()

    def text(self, done: int, backlog: int) -> str:
        """Describe the moment in one line; the calls of the last seconds give the rate."""
        now = self._now()
        self._seen.append((now, done))
        while now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = (done - before) / (now - since) if now > since else 0.0
        parts = [f"{counted(done, 'fact')} {self._verb}"]
        if rate >= 1:
            parts.append(f"{count_text(round(rate))}/s")
        parts.append(f"{count_text(backlog)} waiting" if backlog else "nothing waiting")
        if backlog and rate >= 1:
            parts.append(f"{_clock_text(backlog / rate)} left")
        return " · ".join(parts)


def _clock_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def watched(
    work: Callable[[], None],
    end: Callable[[], None],
    text: Callable[[], str],
    is_over: Callable[[], bool] = lambda: False,
    *,
    shown: bool,
) -> tuple[bool, BaseException | None]:
    """Do some work in a thread of its own; tell whether a signal ended it, and what it has failed with.

    ``end`` has the work end, when somebody asks for it or it ``is_over``; ``text`` says how far it is.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="bsfg-work", daemon=True)
    with _asked_to_end() as asked, _line(shown) as show:
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            if asked.is_set() or is_over():
                end()
            elif shown:
                show(text())
    return asked.is_set(), failures[0] if failures else None


@contextmanager
def _line(shown: bool) -> Iterator[Callable[[str], None]]:
    """Give what keeps a text on stderr: as a line that stays in place, or as a line of its own every few seconds."""
    if shown and sys.stderr.isatty():
        with console(stderr=True).status("Looking at the node …") as status:
            yield status.update
        return
    due, last = time.monotonic() + LINE_SECONDS, ""

    def show(text: str) -> None:
        nonlocal due, last
        if time.monotonic() >= due and text != last:
            due, last = time.monotonic() + LINE_SECONDS, text
            say(text)

    yield show


@contextmanager
def _asked_to_end() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set; whatever hangs then, the process ends some seconds later."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if not asked.is_set():
            asked.set()
            timer = threading.Timer(END_SECONDS, os._exit, [128 + number])
            timer.daemon = True
            timer.start()

    with handled(ask, signal.SIGINT, signal.SIGTERM):
        yield asked


# What the sinks share.

SinkConsumer = Annotated[
    str,
    option(
        "NAME",
        "The durable consumer whose facts are given on; `bsfg consumers add` makes one.",
        "--consumer",
        autocompletion=known_consumers,
        show_default=False,
    ),
]
SinkOnce = Annotated[bool, flag("--once", "Give on what is there now and leave.")]
SinkMaxFacts = Annotated[int, option("N", "At most so many facts at once.", "--max-facts-per-batch", min=1)]


def run_sink(sink: Sink, node: Target, target: str, *, once: bool, json: bool) -> None:
    """Run a sink until it is done, fails or is asked to end, and tell what it has done."""
    progress = WorkProgress("written")
    asked, failure = watched(
        lambda: sink.run(once=once), sink.end, lambda: progress.text(sink.done.facts, sink.done.backlog), shown=not json
    )
    done, noted = sink.done, sink.target.noted()
    if json and failure is None:
        print_json({"target": target, **done.to_dict(), **noted})
    elif failure is None:
        gaps = f" and {counted(done.gaps, 'gap record')}" if done.gaps else ""
        upto = f", up to offset {done.next}" if done.batches else ""
        console().print(f"Wrote {counted(done.facts, 'fact')}{gaps} to {target}{upto}.", soft_wrap=True)
    for name, count in noted.items():
        if count:
            say(f"warning: {count_text(count)} {name}")
    if isinstance(failure, PeerUnreachable | CertificateInvalid):
        raise node.explained(failure) from None
    if failure is not None:
        raise failure
    if asked and once:
        raise KeyboardInterrupt
