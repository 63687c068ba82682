"""What the jobs on Spark share: the options that say where Spark runs, and how it is started and stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from bsfg.cli.output import console
from bsfg.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PANEL = "Spark"

Master = Annotated[
    str,
    typer.Option(
        "--master",
        metavar="URL",
        envvar="BSFG_SPARK_MASTER",
        help="Where Spark runs: local[*] is this process, or a cluster such as spark://host:7077.",
        rich_help_panel=PANEL,
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(
        "--conf",
        metavar="NAME=VALUE",
        help="A setting of Spark, which overrides ours. Repeatable.",
        rich_help_panel=PANEL,
        show_default=False,
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


@contextmanager
def spark_session(app: str, master: str, conf: dict[str, str], log: Path | None = None) -> Iterator[SparkSession]:
    """Run a block with a Spark session, which is stopped at the end; ``log`` takes what Spark itself prints."""
    from bsfg.spark.session import end, started, without_tracebacks

    without_tracebacks()
    waiting = console(stderr=True).status("Starting Spark …") if sys.stderr.isatty() else _nothing()
    with waiting, _stderr_into(log) if log is not None else _nothing():
        spark = started(app, master, conf, log)
    try:
        yield spark
    finally:
        end(spark)


class Stopped(KeyboardInterrupt):
    """Somebody asked the command to end, by Ctrl-C or SIGTERM."""


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Have SIGTERM end a block as Ctrl-C does, so that what it began is cleaned up."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """Have processes that are started in a block print their errors to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
