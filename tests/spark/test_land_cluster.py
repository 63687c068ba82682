"""Landing on a standalone cluster: tasks in other processes than the driver's, one folder for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from tests.spark.clusters import Cluster
from tests.spark.landing import check_same, table
from tests.spark.nodes import SparkZone, facts
from tests.spark.test_cluster import cluster

from bsfg.ports import Buffer

__all__ = ["cluster"]

pytestmark = [pytest.mark.campaign, pytest.mark.long, pytest.mark.xdist_group("cluster")]


def test_a_landing_on_a_cluster(plant: SparkZone, cluster: Cluster, tmp_path: Path) -> None:
    """Executors get the certificates with their work, stage into the shared folder, and the driver commits."""
    plant.produce(facts(500))
    given, out = plant.options(), tmp_path / "lake"
    arguments = ["--stream", "operational", "--out", str(out), "--once", "--json", "--max-facts-per-batch", "100"]
    arguments += cluster.recipe()
    arguments += [part for name in ("address", "ca", "cert", "key") for part in (f"--{name}", given[name])]
    done = subprocess.run(
        [sys.executable, "-m", "bsfg", "pipeline", "land", *arguments, "--server-name", given["serverName"]],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    found = orjson.loads(done.stdout)
    assert (found["facts"], found["batches"]) == (500, 5)
    check_same(table(out).to_pylist(), plant.entries(Buffer.STORE), by="appended_at")
