"""A Java that aborts before it has begun: it is started again, and one that always does is told of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bsfg.spark.session import ABORTS_MAX, find_java

pytestmark = pytest.mark.campaign

PROGRAM = """
import sys
from bsfg.errors import SparkFailed
from bsfg.spark.session import started
try:
    print(started("test", "local[1]", {}).range(7).count())
except SparkFailed as error:
    print(error.code, error.details, error.message)
"""


def started_with(folder: Path, aborts: int) -> str:
    """Start Spark on a Java that aborts so many times first; give what a program saw of it."""
    (folder / "bin").mkdir(parents=True)
    count = folder / "starts"
    java = folder / "bin" / "java"
    real = find_java().home / "bin" / "java"
    java.write_text(
        "#!/bin/bash\n"
        f'case "$*" in *version* | *launcher.Main*) exec {real} "$@";; *SparkSubmit*) echo x >> {count};; esac\n'
        f'case "$*" in *SparkSubmit*) if [ $(wc -l < {count}) -le {aborts} ]; then kill -ABRT $$; fi;; esac\n'
        f'exec {real} "$@"\n'
    )
    java.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "JAVA_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return f"{done.stdout}{done.stderr if not done.stdout else ''}"


def test_a_java_that_aborts_is_started_again(tmp_path: Path) -> None:
    """Spark starts in spite of it."""
    assert started_with(tmp_path, ABORTS_MAX).strip().endswith("7")


def test_a_java_that_always_aborts_is_told_of(tmp_path: Path) -> None:
    """After a few times it is an error that names the signal."""
    said = started_with(tmp_path, 100)
    assert "spark_failed" in said and "killed by signal 6" in said
