"""A cluster whose machines have a bare Python: tasks run out of one archive, and go on when a machine is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.spark import replicating
from tests.spark.clusters import Cluster, standalone
from tests.spark.nodes import SparkZone
from tests.spark.replicating import Pipeline
from tests.spark.test_replicate import CONSUMER, arrived, sent
from tests.wire.test_authorities import revoke

from bsfg.cli.bench.workload import batch_of
from bsfg.spark.pack import pack
from bsfg.wire.certs import renew

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(1800)]

BARE = Path(f"{sys.base_prefix}/bin")
EAGER = {
    "spark.speculation": "true",
    "spark.speculation.interval": "1s",
    "spark.speculation.task.duration.threshold": "5s",
}
"""A task that lasts longer than some seconds gets a second copy."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an archive."""
    return pack(tmp_path_factory.mktemp("pack") / "bsfg-pack.tar.gz").path


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Cluster]:
    """Give a cluster whose workers know of nothing but a bare Python."""
    environment = {"PATH": f"{BARE}:/usr/bin:/bin", "HOME": str(tmp_path)}
    asked = subprocess.run(
        [BARE / "python3", "-c", "import pyarrow"], env=environment, capture_output=True, check=False
    )
    assert b"No module named 'pyarrow'" in asked.stderr
    with standalone(tmp_path / "cluster", environment=environment) as cluster:
        yield cluster


def test_tasks_out_of_an_archive(
    zones: tuple[SparkZone, SparkZone], bare: Cluster, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All facts come once and in order, while certificates are renewed, copies of tasks run, and a machine is killed.

    The old certificates are revoked at the sender once they are renewed, and the files of the new ones hidden: whoever
    goes on moving facts was given them.
    """
    plant, enterprise = zones
    plant.produce(batch_of(0, 2_000).to_messages())
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    # Two executors unpack the archive beside everything else that a small machine has to do.
    monkeypatch.setattr(replicating, "WAIT_SECONDS", 900.0)
    more = [part for name, value in EAGER.items() for part in ("--conf", f"{name}={value}")]
    pipeline = Pipeline(enterprise, bare.recipe("--pack", str(packed), *more))
    try:
        pipeline.until_moving()
        pipeline.until(lambda: plant.committed(CONSUMER) == 1_999, "the facts")
        assert not pipeline.workers(), "the tasks run in the driver's own process tree"
        _renew(plant, enterprise, pipeline)
        plant.produce(batch_of(2_000, 500).to_messages())
        pipeline.until(lambda: plant.committed(CONSUMER) == 2_499, "facts by the new certificates")
        bare.kill_worker()
        plant.produce(batch_of(2_500, 500).to_messages())
        pipeline.until(lambda: plant.committed(CONSUMER) == 2_999, "facts by the worker that is left")
        assert arrived(enterprise) == sent(plant)
        assert len(sent(plant)) == 3_000
        assert pipeline.stop() == 0
    finally:
        pipeline.kill()


def _renew(plant: SparkZone, enterprise: SparkZone, pipeline: Pipeline) -> None:
    """Renew what the tasks call with; when the driver has taken it up, let nobody else have it, and revoke the old."""
    certs, names = enterprise.certs, ("enterprise-bsfg", "enterprise-pipeline")
    lists = revoke(certs, *names)
    for name in names:
        renew(certs, name, days=10, now=datetime.now(UTC))
    pipeline.until(lambda: "from-plant-a: changed" in pipeline.log_path.read_text(), "the new certificates")
    for name in names:
        for kind in ("crt", "key"):
            os.rename(certs / f"{name}.{kind}", certs / f"hidden-{name}.{kind}")
    text = (plant.folder / "zone.toml").read_text()
    (plant.folder / "zone.toml").write_text(text.replace("[tls]\n", f'[tls]\ncrl = "{lists}"\n'))


@pytest.mark.long
def test_a_machine_without_a_fitting_python_ends_the_command(
    zones: tuple[SparkZone, SparkZone], tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sentence that names the machine and the kind of Python that it lacks."""
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    other = tmp_path / "bin"
    other.mkdir()
    for name in ("python3", "python", f"python{sys.version_info[0]}.{sys.version_info[1]}"):
        (other / name).write_text("#!/bin/sh\nexit 1\n")
        (other / name).chmod(0o755)
    with standalone(tmp_path / "cluster", environment={"PATH": f"{other}:/usr/bin:/bin"}) as cluster:
        pipeline = Pipeline(zones[1], cluster.recipe("--pack", str(packed)))
        try:
            pipeline.process.wait(600)
            said = pipeline.log_path.read_text()
            assert pipeline.process.returncode == 1
            assert "workers_unfit" in said, said
            assert "has no Python of the kind" in said, said
        finally:
            pipeline.kill()
