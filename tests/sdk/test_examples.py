"""The programs in `examples/` run as they stand, against a real node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint

from bsfg.ports import Buffer, ConsumerSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES_MAX = 25


def run(zone: Zone, name: str, *args: object, role: str = "producer") -> str:
    """Run an example with the environment that names the zone's node, and give what it printed."""
    where = endpoint(zone, role)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BSFG_")},
        "BSFG_ADDRESS": where.address,
        "BSFG_CA": str(where.ca),
        "BSFG_CERT": str(where.certificate),
        "BSFG_KEY": str(where.key),
        "BSFG_SERVER_NAME": str(where.server_name),
    }
    command = [sys.executable, str(EXAMPLES / name), *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def consumer(zone: Zone, name: str) -> None:
    """Create a durable consumer of what the zone itself produced."""

    async def create() -> None:
        async with zone.admin() as admin:
            await admin.create_consumer(ConsumerSpec(name, "operational", Buffer.STORE))

    asyncio.run(create())


def test_from_producer_to_consumer(zone: Zone, tmp_path: Path) -> None:
    """Producing, consuming, and both without the node: every example does what it says."""
    first = run(zone, "produce.py", "plant")
    assert "step 100: inserted at offset 99" in first
    assert "step 100: already_exists at offset 99" in run(zone, "produce.py", "plant")
    assert "1000 facts, the last at offset 1099" in run(zone, "produce_async.py", "plant")
    consumer(zone, "app-1")
    consumer(zone, "app-2")
    seen = run(zone, "consume.py", "app-1", role="consumer")
    assert '0: batch:B1042 step_completed {"step":1,"temperature":71.5}' in seen
    assert "1101 handled, 0 left" in seen
    zone.kill()
    waiting = run(zone, "produce_offline.py", "plant", tmp_path / "outbox")
    assert "50 facts are safe" in waiting
    zone.start()
    assert run(zone, "produce_offline.py", "plant", tmp_path / "outbox") == "50 facts are safe\n"
    last = run(zone, "consume_offline.py", "app-2", tmp_path / "inbox", role="consumer")
    assert "handled through offset 1150" in last
    zone.kill()
    state = run(zone, "last_known_state.py", zone.data, "store")
    assert "batch:B1042 step_completed" in state
    assert 'stroke_counted = {"strokes":50000}' in state


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_stay_short(path: Path) -> None:
    """An example is a page at most, begins with what it shows, and is named in the guides."""
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) <= LINES_MAX
    assert lines[0].startswith('"""')
    guides = "".join(guide.read_text() for guide in (EXAMPLES.parent / "docs" / "guides").glob("*.md"))
    assert path.name in guides
