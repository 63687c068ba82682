"""A standalone cluster of two workers: the same pipeline, its tasks in other processes than its driver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.spark.clusters import Cluster, standalone
from tests.spark.nodes import SparkZone
from tests.spark.replicating import Pipeline
from tests.spark.test_replicate import CONSUMER, arrived, sent

from bsfg.cli.bench.workload import batch_of
from bsfg.ports import Buffer

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("cluster")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Give a cluster whose calls are sealed."""
    with standalone(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.long  # tests/spark/test_packed_cluster.py does the same with less on the machines
def test_replication_on_a_cluster(
    zones: tuple[SparkZone, SparkZone], cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts cross by tasks in executors, which get the certificates with their plan; a backlog is replayed there."""
    plant, enterprise = zones
    plant.produce(batch_of(0, 2_000).to_messages())
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    pipeline = Pipeline(enterprise, with_python(cluster, sys.executable))
    try:
        pipeline.until_moving()
        pipeline.until(lambda: plant.committed(CONSUMER) == 1_999, "the facts")
        assert arrived(enterprise) == sent(plant)
        assert not pipeline.workers(), "the tasks run in the driver's own process tree"
        plant.produce(batch_of(2_000, 10).to_messages())
        pipeline.until(lambda: enterprise.end(Buffer.FORWARD) == 2_010, "live facts")
        assert pipeline.stop() == 0
    finally:
        pipeline.kill()


def with_python(cluster: Cluster, python: str) -> list[str]:
    """Give the options for a cluster on whose machines the package is installed."""
    return cluster.recipe("--conf", f"spark.pyspark.python={python}")


@pytest.mark.parametrize("lacking", [pytest.param("package", marks=pytest.mark.long), "interpreter"])
def test_machines_that_cannot_work_end_the_command(
    zones: tuple[SparkZone, SparkZone], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """Where the machines of the cluster lack the package, or the interpreter that was named, the command says so."""
    _, enterprise = zones
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    python = tmp_path / "python"
    if lacking == "package":
        # It is this environment for the driver, and a bare one in the folders of the workers.
        bare = f"{sys.base_prefix}/bin/python3"
        script = f'case "$PWD" in */worker-*) exec {bare} "$@";; esac\nexec {sys.executable} "$@"\n'
        python.write_text(f"#!/bin/sh\n{script}")
        python.chmod(0o755)
    pipeline = Pipeline(enterprise, with_python(cluster, str(python)))
    try:
        pipeline.process.wait(280)
        said = pipeline.log_path.read_text()
        assert pipeline.process.returncode != 0
        assert "workers_unfit" in said, said
        assert "spark.pyspark.python" in said
    finally:
        pipeline.kill()
