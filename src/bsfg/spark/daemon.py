"""The process that Spark forks its Python workers from, with the slow libraries already loaded.

Spark starts it as ``python -m bsfg.spark.daemon``. A worker that is killed is then replaced in about 50 ms instead of
a second. gRPC must never be loaded here: it starts threads, and a fork of a process with gRPC's threads hangs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

FORBIDDEN = "grpc"
DAEMON_PID = "BSFG_SPARK_DAEMON_PID"
"""Where workers find whose children they are, also when their parent is gone already."""

NO_PANDAS = "BSFG_SPARK_NO_PANDAS"
"""Set where no task makes use of pandas, as in the commands of this package."""

PRELOADED = ("pyspark.worker", "bsfg.spark.mapping", "bsfg.spark.replicate.shift")


def preload() -> None:
    """Load what nearly every task needs and what survives a fork."""
    # As the command line does; a session of the user's own has not been begun by it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from bsfg.columns import leave_pandas_out

    if os.environ.get(NO_PANDAS):
        leave_pandas_out()
    else:
        import_module("pandas")
    for name in PRELOADED:
        import_module(name)
    if FORBIDDEN in sys.modules:
        raise SystemExit(f"{FORBIDDEN} was loaded before the fork of a Python worker")
    # No worker looks through it for garbage, which would copy its memory and hold up all links of a task meanwhile.
    gc.freeze()


def quietly(worker: Callable[..., int]) -> Callable[..., int]:
    """Have a worker end without a traceback when Spark wants no more of its rows, as after a ``limit``."""

    def work(*args: Any) -> int:
        try:
            return worker(*args)
        except BrokenPipeError:
            return 1

    return work


def main() -> None:
    """Preload, then do what Spark's own daemon does."""
    preload()
    os.environ[DAEMON_PID] = str(os.getpid())
    import pyspark.daemon

    pyspark.daemon.worker = quietly(pyspark.daemon.worker)
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
