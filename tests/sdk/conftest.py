"""What the tests of the SDK share: sites inside this process, and zones as processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, certificates
from tests.wire.conftest import Sites

from bsfg.sdk.endpoint import Endpoint


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    """Give what opens nodes inside this process; they are closed when the test ends."""
    return Sites(tmp_path)


@pytest.fixture
def zone(tmp_path: Path) -> Iterator[Zone]:
    """Give a zone with a node in a process of its own, under mutual TLS; it runs."""
    cleanup = Cleanup()
    made = Zone("plant", tmp_path, certificates(tmp_path, "plant"))
    made.write()
    cleanup.zone(made)
    made.start()
    yield made
    cleanup.run()


def endpoint(zone: Zone, role: str = "producer") -> Endpoint:
    """Give the way to a zone's node as one of its users."""
    files = zone.files(f"{zone.name}-{role}")
    return Endpoint(f"127.0.0.1:{zone.port}", files.ca, files.certificate, files.key, f"{zone.name}-bsfg")
