"""A Spark session that is started when it is first asked for."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsfg.spark.session import end, started, without_tracebacks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkWhenNeeded:
    """A Spark session that is started when it is first asked for: a landing with nothing to do needs none."""

    def __init__(self, app: str, master: str, conf: dict[str, str], log: Path | None = None) -> None:
        self._given = app, master, conf, log
        self._session: SparkSession | None = None
        self.is_starting = False

    @property
    def is_started(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    def has_ended(self, within_seconds: float = 0.0) -> bool:
        """Tell whether Spark runs in a process of its own and that has ended, or ends within some time."""
        if self._session is None:
            return False
        gateway: Any = self._session.sparkContext._gateway
        process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
        if process is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            process.wait(within_seconds)
        return process.poll() is not None

    def __call__(self) -> SparkSession:
        """Give the session."""
        if self._session is None:
            self.is_starting = True
            without_tracebacks()
            try:
                self._session = started(*self._given)
            finally:
                self.is_starting = False
        return self._session

    def __enter__(self) -> SparkWhenNeeded:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._session is not None:
            end(self._session)
