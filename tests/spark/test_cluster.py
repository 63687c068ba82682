"""A standalone cluster of two workers: the same pipeline, its tasks in other processes than its driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
from tests.spark.nodes import SparkZone
from tests.spark.replicating import Pipeline, wait_until
from tests.spark.test_replicate import CONSUMER, arrived, sent

from bsfg.cli.bench.workload import batch_of
from bsfg.ports import Buffer
from bsfg.spark.session import java_in_use
from bsfg.testing.ports import free_port

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("cluster")]

CLASSES = "org.apache.spark.deploy"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Start a master and two workers on loopback, and give the master's address."""
    port, processes = free_port(), list[subprocess.Popen[bytes]]()
    home = Path(pyspark.__file__).parent
    with java_in_use():
        environment = os.environ | {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}

    def start(name: str, *arguments: str) -> None:
        command = [str(home / "bin" / "spark-class"), f"{CLASSES}.{name}", *arguments]
        with (tmp_path / f"{name}-{len(processes)}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    start("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
    url = f"spark://127.0.0.1:{port}"
    try:
        for number in range(2):
            folder = str(tmp_path / f"worker-{number}")
            start("worker.Worker", url, "--cores", "2", "--memory", "1g", "--webui-port", "0", "--work-dir", folder)
        log = tmp_path / "master.Master-0.log"
        # One that is slow to be answered registers again.
        known = re.compile(r"Registering worker (\S+)")
        wait_until(lambda: len(set(known.findall(log.read_text()))) == 2, "the workers to register")
        yield url
    finally:
        for process in reversed(processes):
            os.killpg(process.pid, 9)
            process.wait()


def test_replication_on_a_cluster(
    zones: tuple[SparkZone, SparkZone], cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts cross by tasks in executors, which get the certificates with their plan; a backlog is replayed there."""
    plant, enterprise = zones
    plant.produce(batch_of(0, 2_000).to_messages())
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    pipeline = Pipeline(enterprise, recipe(cluster, sys.executable))
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


def recipe(master: str, python: str) -> list[str]:
    """Give the options that the guide names for a standalone cluster, and what a small machine on loopback needs."""
    small = ["--conf", "spark.executor.memory=512m", "--conf", "spark.driver.host=127.0.0.1"]
    return ["--master", master, "--conf", f"spark.pyspark.python={python}", *small]


@pytest.mark.parametrize("lacking", ["package", "interpreter"])
def test_machines_that_cannot_work_end_the_command(
    zones: tuple[SparkZone, SparkZone], cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
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
    pipeline = Pipeline(enterprise, recipe(cluster, str(python)))
    try:
        pipeline.process.wait(280)
        said = pipeline.log_path.read_text()
        assert pipeline.process.returncode != 0
        assert "workers_unfit" in said, said
        assert "spark.pyspark.python" in said
    finally:
        pipeline.kill()
