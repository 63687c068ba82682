"""What crosses between the processes of a cluster: keys, never in clear; and new ones, soon after they are renewed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.spark.clusters import HIDDEN_HOST, SECRET, Listener, standalone
from tests.spark.nodes import SparkZone
from tests.spark.replicating import Pipeline
from tests.spark.test_replicate import CONSUMER, arrived, sent

from bsfg.cli.bench.workload import batch_of
from bsfg.testing.ports import free_port

pytestmark = [pytest.mark.campaign, pytest.mark.xdist_group("cluster")]


def keys_of(zone: SparkZone) -> list[bytes]:
    """Give a line of each private key that the tasks of a zone need: its pipeline's and its node's."""
    return [zone.files(f"{zone.name}-{who}").key.read_bytes().splitlines()[1] for who in ("pipeline", "bsfg")]


@pytest.mark.parametrize("sealed", [True, False])
def test_keys_are_not_heard_between_driver_and_executors(
    zones: tuple[SparkZone, SparkZone], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """Whoever stands between them hears the keys when the calls were allowed to be in clear, and not otherwise.

    The secret itself is on no command line, in no event log, and in nothing that the run has written.
    """
    plant, enterprise = zones
    plant.produce(batch_of(0, 500).to_messages())
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    port, blocks, events = free_port(), free_port(), tmp_path / "events"
    events.mkdir()
    listener = Listener(port, blocks)
    conf = {
        "spark.pyspark.python": sys.executable,
        "spark.driver.host": listener.HOST,
        "spark.driver.bindAddress": HIDDEN_HOST,
        "spark.driver.port": port,
        "spark.driver.blockManager.port": blocks,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
    }
    with standalone(tmp_path / "cluster", sealed=sealed) as cluster:
        more = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
        pipeline = Pipeline(enterprise, cluster.recipe(*more))
        try:
            pipeline.until_moving()
            pipeline.until(lambda: plant.committed(CONSUMER) == 499, "the facts")
            assert arrived(enterprise) == sent(plant)
            shown = command_lines()
            written = b"".join(path.read_bytes() for path in files(enterprise.folder / "pipeline", events))
            assert pipeline.stop() == 0
        finally:
            pipeline.kill()
            listener.close()
    assert listener.calls > 1, "somebody calls the driver past the listener"
    assert b"from-plant-a" in listener.heard or sealed, "the listener has not heard any task"
    assert [key in listener.heard for key in keys_of(enterprise)] == [not sealed, not sealed]
    assert SECRET.encode() not in shown
    assert SECRET.encode() not in written


def command_lines() -> bytes:
    """Give the command lines of all processes of this machine."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return b"\n".join(found)


def files(*folders: Path) -> list[Path]:
    """List all files below some folders."""
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]
