"""The turns of live tasks: whose parent is gone has nobody who wants its work."""

import os
import subprocess
import sys
import textwrap

import pytest

from bsfg.spark.daemon import DAEMON_PID
from bsfg.spark.replicate.shift import orphaned


def test_a_worker_whose_parent_lives_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the daemon is that of the parent; without one, as when Spark starts workers itself, it is asked."""
    monkeypatch.setenv(DAEMON_PID, str(os.getppid()))
    assert not orphaned()()
    monkeypatch.delenv(DAEMON_PID)
    assert not orphaned()()


def test_a_worker_whose_parent_was_gone_before_it_asked_knows() -> None:
    """A daemon that is killed between fork and turn leaves a worker that ends its turn at once."""
    script = f"""
        import os, time
        os.environ[{DAEMON_PID!r}] = str(os.getpid())
        daemon = os.getpid()
        if os.fork() == 0:
            while os.getppid() == daemon:
                time.sleep(0.01)
            from bsfg.spark.replicate.shift import orphaned
            print(orphaned()(), flush=True)
            os._exit(0)
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True", done.stderr
