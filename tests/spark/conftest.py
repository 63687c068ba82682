"""What the tests with Spark share: one session per test process, since a start costs many seconds, and real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.e2e.cleanup import Cleanup
from tests.spark.nodes import SparkZone, zone_pair

from bsfg.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Give the one session of this test process."""
    started = session("bsfg-tests", "local[2]", {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"})
    yield started
    started.stop()


@pytest.fixture
def cleanup() -> Iterator[Cleanup]:
    """Give what ends nodes behind a test."""
    cleanup = Cleanup()
    yield cleanup
    cleanup.run()


@pytest.fixture
def zones(tmp_path: Path, cleanup: Cleanup) -> tuple[SparkZone, SparkZone]:
    """Give a plant and an enterprise that run, the second with a link from the first that nobody moves yet."""
    plant, enterprise = zone_pair(tmp_path)
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    return plant, enterprise


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> SparkZone:
    """Give a plant that runs."""
    plant, _ = zone_pair(tmp_path)
    cleanup.zone(plant)
    plant.start()
    return plant
