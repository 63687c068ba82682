"""An archive of the classes that Spark loads at every start, which Java maps instead of reading and checking them.

It is made once for a Java and a Spark, by a process of its own beside or behind the first command, and lies in the
user's cache. Whoever finds none, or one that Java refuses, starts as before: more slowly, and without a word.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from bsfg.spark.session import BRIEF, DEFAULTS, JAVA_OPTIONS, Java, end, home_in_use, in_cache, java_in_use, launched

ARCHIVE, FAILED, LOCK, OF = "classes.jsa", "failed", "lock", "of"
AGAIN_SECONDS = 86_400.0
"""After a failure no new archive is tried for so long; a disk may have been full."""

DUMP_SECONDS = 600.0
NICENESS, FIRST_TO_GO = 19, "1000"
"""Whoever makes an archive has the processor when nobody else wants it, and is ended first when memory is short."""

SWITCH = "BSFG_JAVA_ARCHIVE"
"""With ``no`` in this variable no archive is made; one that is there is used all the same."""

AOT_WORDS_FROM = 25
"""From this Java on there are warnings of a second name about archives."""


def place(java: Java, home: Path) -> Path | None:
    """Give the folder for the archive of a Java and the Spark in a folder; None when there is no place for it."""
    content = [str(java.home), str(home)]
    try:
        content.append((java.home / "release").read_text(errors="replace"))
        with os.scandir(home / "jars") as found:
            jars = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in found)
    except OSError:
        return None
    return in_cache(os.environ, "classes", repr((content, jars)), partial(_noted, f"{home}\n{java.home}"))


def _noted(text: str, folder: Path) -> None:
    if not (folder / OF).exists():
        (folder / OF).write_text(text)


def options(java: Java, folder: Path | None) -> str:
    """Give Java the archive in a folder, if there is one.

    Java checks that it fits, and the sums of what is in it; its words about that are for nobody.
    """
    if folder is None or not os.access(folder / ARCHIVE, os.R_OK):
        return ""
    quiet = "-Xlog:cds*=off" + (" -Xlog:aot*=off" if java.version >= AOT_WORDS_FROM else "")
    return f"-Xshare:auto -XX:SharedArchiveFile={folder / ARCHIVE} -XX:+VerifySharedSpaces {quiet}"


def is_wanted(folder: Path) -> bool:
    """Tell whether an archive is to be made: there is none, and the last attempt did not fail a short while ago."""
    if os.environ.get(SWITCH) == "no" or (folder / ARCHIVE).exists():
        return False
    try:
        return time.time() - (folder / FAILED).stat().st_mtime > AGAIN_SECONDS
    except OSError:
        return True


def make_beside() -> None:
    """Have a process of its own make the archive, if one is wanted; it goes on when this process ends."""
    with java_in_use() as java, home_in_use() as home:
        folder = None if home is None else place(java, home)
    if folder is None or not is_wanted(folder):
        return
    # Not from the folder that this was started in: what lies there may be anybody's.
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main(beside=True)"]
    silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with suppress(OSError):
        made = subprocess.Popen(command, start_new_session=True, **silent)
        threading.Thread(target=made.wait, daemon=True).start()


def main(*, beside: bool = False) -> None:
    """Make the archive, unless there is one or another process is at it; ``beside`` others, it gives way to them."""
    if beside:
        os.nice(NICENESS)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    with java_in_use() as java, home_in_use() as home:
        folder = None if home is None else place(java, home)
    if folder is None or not is_wanted(folder):
        return
    with (folder / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        if is_wanted(folder):
            # Noted first: who is killed for want of memory cannot do it any more.
            (folder / FAILED).write_text("it did not end\n")
            try:
                make(java, folder)
            except Exception as error:
                (folder / FAILED).write_text(f"{type(error).__name__}: {error}\n")
                raise SystemExit(1) from None
            (folder / FAILED).unlink()


def make(java: Java, folder: Path) -> None:
    """Start a Spark that does a little of everything, note which classes that takes, and archive them."""
    for left in folder.glob("making-*"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(dir=folder, prefix="making-") as passing:
        classes, made = Path(passing) / "classes", Path(passing) / ARCHIVE
        given = f"{DEFAULTS[JAVA_OPTIONS]} {BRIEF} -XX:DumpLoadedClassList={classes}"
        spark = launched("bsfg-archive", "local[2]", {JAVA_OPTIONS: given}, Path(passing) / "log", BRIEF)
        try:
            _a_little_of_everything(spark, Path(passing) / "checkpoint")
            jvm: Any = spark._jvm
            class_path = jvm.java.lang.System.getProperty("java.class.path")
        finally:
            end(spark)
        subprocess.run(
            [
                java.home / "bin" / "java",
                "-Xshare:dump",
                "-XX:+UseG1GC",
                BRIEF,
                f"-XX:SharedClassListFile={classes}",
                f"-XX:SharedArchiveFile={made}",
            ],
            env=os.environ | {"CLASSPATH": class_path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DUMP_SECONDS,
            check=True,
        )
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(folder / ARCHIVE)
    _remove_older(folder)


def _remove_older(folder: Path) -> None:
    """Remove the archives of what this one takes the place of, and of Sparks that are not there any more."""
    for other in folder.parent.glob("classes-*"):
        with suppress(OSError):
            of = (other / OF).read_text()
            home = Path(of.partition("\n")[0])
            if other != folder and (of == (folder / OF).read_text() or not (home / "jars").exists()):
                shutil.rmtree(other)


class _ThreeTurns(DataSourceStreamReader):
    """A stream of three rows."""

    def initialOffset(self) -> dict[str, Any]:
        return {"turn": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:
        return {"turn": min(3, int(start["turn"]) + 1)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(end["turn"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"turn": pa.array([partition.value], pa.int64())})


class _Turns(DataSource):
    """Gives such a stream, as those that move links do."""

    @classmethod
    def name(cls) -> str:
        return "bsfg-turns"

    def schema(self) -> str:
        return "turn long"

    def streamReader(self, schema: Any) -> _ThreeTurns:
        return _ThreeTurns()


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _a_little_of_everything(spark: Any, checkpoint: Path) -> None:
    """Do what the jobs do: a live stream, a bulk read and write, tasks with and without a shuffle."""
    from bsfg.spark.ceiling import FORMAT, CeilingSource

    spark.dataSource.register(_Turns)
    spark.dataSource.register(CeilingSource)
    writing = spark.readStream.format("bsfg-turns").load().writeStream.format("noop")
    query = writing.option("checkpointLocation", str(checkpoint)).start()
    deadline = time.monotonic() + 60
    while (query.lastProgress or {"batchId": 0})["batchId"] < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    query.stop()
    frames = {"frames": 2, "facts": 10, "bytes": 1000}
    spark.read.format(FORMAT).options(**frames).load().write.format(FORMAT).mode("append").save()
    tasks = spark.range(0, 2, 1, 2).mapInArrow(_same, "id long")
    tasks.repartition(1, "id").mapInArrow(_same, "id long").collect()
    spark.sparkContext.parallelize(range(2), 2).mapPartitions(list).collect()
