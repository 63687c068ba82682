"""What the tests with real zones share: no node that outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, pair


@pytest.fixture
def cleanup() -> Iterator[Cleanup]:
    """Give what ends zones and other things behind a test."""
    cleanup = Cleanup()
    yield cleanup
    cleanup.run()


@pytest.fixture
def zones(tmp_path: Path, cleanup: Cleanup) -> tuple[Zone, Zone]:
    """Give two zones that pull from each other, not started."""
    plant, enterprise = pair(tmp_path)
    return cleanup.zone(plant), cleanup.zone(enterprise)
