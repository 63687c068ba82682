"""Starts Spark with the settings that fit facts: quiet, on loopback when it is local, and quick in small batches."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsfg.errors import BsfgError, SparkFailed
from bsfg.spark.home import home_in_use
from bsfg.spark.java import QUICK_FORKS, java_in_use

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL_MASTER = "local[*]"
END_SECONDS = 4.0
TASK_ATTEMPTS = 4
"""How often a task is tried; Spark's own local mode would give up after the first failure."""

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
SECRET_OPTIONS = r"(?i)url|^(confirm)?(ca|cert|key|lease)$"
"""The names of options whose values Spark must not show."""

DEFAULTS: Mapping[str, str] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.redaction.options.regex": SECRET_OPTIONS,
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.streaming.pollingDelay": "1ms",
    "spark.locality.wait": "0",
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "bsfg.spark.daemon",
    "spark.driver.defaultJavaOptions": (
        f"{QUICK_FORKS} -XX:+UseParallelGC -Dlog4j2.configurationFile=file:{LOG_SETTINGS}"
    ),
}
"""What every session starts with unless told otherwise; docs/guides/spark.md says why."""

LOCAL_DEFAULTS: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
"""What a session on this machine alone adds: nobody else can reach it."""


ABORTS_MAX = 2

_KNOWN = (
    ("OutOfMemoryError", "Java has no memory left", "Give it more, for example --conf spark.driver.memory=4g."),
    ("No space left on device", "the disk is full", "Make room where Spark works: --conf spark.local.dir, or /tmp."),
)
"""What Spark says of things that an operator can change."""


@dataclass
class Words:
    """Where the words of Java and Spark are written, None where they are printed."""

    log: Path | None = None


WORDS = Words()
"""Those of this process: Spark has one session in it."""


def session(app: str, master: str = LOCAL_MASTER, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Give a Spark session that can read and write ``format("bsfg")``, starting Spark if it does not run yet.

    ``conf`` overrides every default. Java is found or brought along, so nothing needs to be installed. With a local
    master Spark listens on loopback only, and its Python workers run in this environment.
    """
    prepare_environment(master, conf)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).master(with_attempts(master))
    for name, value in settings(master, conf).items():
        builder = builder.config(name, value)
    with java_in_use(), home_in_use() if is_local(master) else nullcontext():
        return builder.getOrCreate()


def started(app: str, master: str, conf: Mapping[str, str], log: Path | None = None) -> SparkSession:
    """Give a session as `session` does, or raise `SparkFailed` with what is known of why Java did not start.

    ``log`` is where its words go, and later those of `failed`; without one they go where this process prints. A Java
    that aborts before it has begun is started again: several that start at once on a busy machine sometimes do, and
    hardly ever twice.
    """
    WORDS.log = log
    for _ in range(ABORTS_MAX):
        try:
            return _launched(app, master, conf, log)
        except SparkFailed as error:
            if error.details.get("signal") != signal.SIGABRT:
                raise
    return _launched(app, master, conf, log)


def _launched(app: str, master: str, conf: Mapping[str, str], log: Path | None) -> SparkSession:
    gateways: Any = import_module("pyspark.java_gateway")
    launched: list[subprocess.Popen[bytes]] = []

    def launch(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if log is None:
            launched.append(subprocess.Popen(*args, **options))
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                # Java warns of some things on the one, of others on the other; the Python workers inherit both.
                launched.append(subprocess.Popen(*args, **{"stdout": file, "stderr": file, **options}))
        return launched[-1]

    before, gateways.Popen = gateways.Popen, launch
    try:
        return session(app, master, conf)
    except BsfgError:
        raise
    except Exception as error:
        noted = _note(str(error))
        hint = f"Java has said why, {f'in {log}' if noted else 'above'}; --master and --conf go to Spark as they are."
        killed_by, says = _ended(launched)
        details = {"signal": killed_by} if killed_by else {}
        raise SparkFailed(f"Spark did not start with the master {master}.{says}", hint=hint, **details) from error
    finally:
        gateways.Popen = before


def failed(says: str, words: object = "") -> SparkFailed:
    """Give an error in a sentence of ours; Spark's own words go to the log of the session, which the hint names."""
    text = str(words)
    noted = _note(text)
    for known, sentence, hint in _KNOWN:
        if known in text:
            return SparkFailed(f"{says}: {sentence}", hint=hint)
    hint = f"What Spark says is in {WORDS.log}. Start the command again: it goes on where it was."
    return SparkFailed(says, hint=hint) if noted else SparkFailed(says)


def _note(text: str) -> bool:
    """Add words of Spark to its log; False when there is none."""
    if WORDS.log is None:
        return False
    with suppress(OSError), WORDS.log.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n" if text else "")
    return True


def _ended(launched: list[subprocess.Popen[bytes]]) -> tuple[int | None, str]:
    """Say how Java ended, and by which signal: one that was killed has no words of its own."""
    code = launched[-1].poll() if launched else None
    if code is None:
        return None, ""
    # A shell stands between: it tells of a signal by a number above 128.
    killed_by = -code if code < 0 else code - 128 if code > 128 else None
    return killed_by, f" Java was killed by signal {killed_by}." if killed_by else f" Java ended with exit code {code}."


def activate(spark: SparkSession) -> None:
    """Have this thread use a session: without one, Spark does not find Python sources when it writes."""
    sessions = type(spark)._get_j_spark_session_class(spark._jvm)
    sessions.setActiveSession(spark._jsparkSession)


def without_tracebacks() -> None:
    """Keep PySpark from printing tracebacks when the JVM ends or a call is cut off: a command says it in a sentence."""
    if os.environ.get("BSFG_DEBUG") == "1":
        return
    from pyspark import accumulators

    logging.disable(logging.CRITICAL)
    for name in ("AccumulatorTCPServer", "AccumulatorUnixServer"):
        if hasattr(accumulators, name):
            getattr(accumulators, name).handle_error = lambda *given: None


def hush(spark: SparkSession) -> None:
    """Have Spark log nothing any more."""
    with suppress(Exception):
        spark.sparkContext.setLogLevel("OFF")


def end(spark: SparkSession) -> None:
    """Stop Spark and wait until its processes are gone; what it says about tasks that it ends is of no use."""
    gateway: Any = spark.sparkContext._gateway
    hush(spark)
    with suppress(Exception):
        spark.stop()
    process = getattr(gateway, "proc", None)
    if process is None:
        return
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def settings(master: str = LOCAL_MASTER, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give the settings of a session: the defaults, overridden by ``conf``."""
    return {**DEFAULTS, **(LOCAL_DEFAULTS if is_local(master) else {}), **(conf or {})}


def prepare_environment(master: str = LOCAL_MASTER, conf: Mapping[str, str] | None = None) -> None:
    """Set what Spark reads from the environment when it starts; what is set already stays, unless ``conf`` says else.

    PySpark itself takes the interpreter of its workers from the environment alone, whatever its settings say.
    """
    python = (conf or {}).get("spark.pyspark.python")
    if python:
        os.environ["PYSPARK_PYTHON"] = python
    if is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def is_local(master: str) -> bool:
    """Tell whether a master means this process alone."""
    return master == "local" or master.startswith("local[")


def with_attempts(master: str) -> str:
    """Have a local master try a failed task again, as a cluster does."""
    found = re.fullmatch(r"local(?:\[\s*(\*|\d+)\s*\])?", master)
    return f"local[{found[1] or 1},{TASK_ATTEMPTS}]" if found else master
