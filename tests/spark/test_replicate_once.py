"""`replicate --until-caught-up`: it moves what there is and leaves, or says why it could not."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_verify import WITHOUT_THE_RIGHTS_OF_ROOT
from tests.spark.nodes import SparkZone
from tests.spark.replicating import Pipeline, wait_until
from tests.spark.test_replicate import CONSUMER, LINK, arrived, sent

from bsfg.cli.bench.workload import OBJECT_BYTES, batch_of
from bsfg.ports import Buffer

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900), pytest.mark.xdist_group("replicate-once")]

ENDS_SECONDS = 240
SECOND = "from-plant-a-too"


def once(zone: SparkZone, *arguments: str) -> tuple[int, str]:
    """Run the command until it leaves by itself; give its exit code and what it said."""
    pipeline = Pipeline(zone, ["--until-caught-up", *arguments])
    before = pipeline.log_path.stat().st_size
    try:
        return pipeline.process.wait(ENDS_SECONDS), pipeline.log_path.read_bytes()[before:].decode()
    finally:
        pipeline.kill()


def hold(zone: SparkZone, link: str = LINK) -> None:
    """Hold the gate of a link, as an operator."""

    async def work() -> None:
        async with zone.admin() as admin:
            await admin.hold_gate(link, "works at the firewall")

    asyncio.run(work())


def test_what_waits_is_moved_whatever_an_earlier_run_has_reported(
    zones: tuple[SparkZone, SparkZone], tmp_path: Path
) -> None:
    """The board still shows the first run's "nothing left" when the last one starts, which moves what came since.

    Before that, one that cannot get the lease of the first says who has it: it has moved nothing, whatever the other
    one has reported. The last one runs as in a container that mounts configuration and home read-only: nothing is
    written there.
    """
    plant, enterprise = zones
    plant.produce(batch_of(0, 100).to_messages())
    first = Pipeline(enterprise)
    try:
        first.until(lambda: plant.committed(CONSUMER) == 99, "the facts")
        code, said = once(enterprise, "--patience", "10")
        assert code != 0
        assert "lease_held" in said
        assert first.stop() == 0
    finally:
        first.kill()
    assert not list((enterprise.folder / "pipeline" / "runs").glob("*-*")), "a run has left its folder"
    plant.produce(batch_of(100, 3_000).to_messages())
    closed, passing = tmp_path / "etc", tmp_path / "passing"
    for folder in (closed, passing):
        folder.mkdir()
    shutil.copy(enterprise.folder / "zone.toml", closed)
    closed.chmod(0o555)
    done = read_only(closed, passing)
    assert done.returncode == 0, done.stderr
    assert "working in" in done.stderr and str(passing) in done.stderr
    assert all(line.startswith((LINK, str(closed))) for line in done.stderr.splitlines()), done.stderr
    assert plant.committed(CONSUMER) == 3_099
    assert arrived(enterprise) == sent(plant)
    assert [each.name for each in closed.iterdir()] == ["zone.toml"]


def read_only(configuration: Path, passing: Path) -> subprocess.CompletedProcess[str]:
    """Run the command until it leaves, without root's rights, with a configuration that it cannot write to."""
    command = [*WITHOUT_THE_RIGHTS_OF_ROOT, sys.executable, "-m", "bsfg.cli", "pipeline", "replicate"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG", "STATE_DIRECTORY"))}
    return subprocess.run(
        [*command, "-c", str(configuration / "zone.toml"), "--until-caught-up"],
        env=kept | {"TMPDIR": str(passing), "HOME": str(configuration)},
        capture_output=True,
        text=True,
        timeout=ENDS_SECONDS,
        check=False,
    )


def test_a_held_gate_is_an_error_and_the_other_links_are_moved(zones: tuple[SparkZone, SparkZone]) -> None:
    """With several links, those that can be moved are; the held one is named, with its reason.

    The other one is narrow, and no backlog makes it wider.
    """
    plant, enterprise = zones
    rate, narrow = 20_000, 500
    with_two_links(enterprise, plant.port, f'bandwidth = "{rate // 1000}kB"\nreconciliation_backlog = 100\n')
    plant.produce(batch_of(0, 500).to_messages())
    plant.produce(batch_of(0, narrow).to_messages(), "lossy")
    hold(enterprise)
    code, said = once(enterprise)
    assert code != 0
    assert "gate_held" in said
    assert LINK in said
    assert "works at the firewall" in said
    assert plant.committed(CONSUMER) == -1
    assert plant.committed("enterprise.lossy") == narrow - 1
    times = [entry.appended_at_unix_ms for entry in enterprise.entries(Buffer.FORWARD, "lossy")]
    assert times[-1] - times[0] >= 1000 * (narrow * OBJECT_BYTES / rate - 2)


def test_a_sender_that_does_not_answer_is_an_error_in_time(zones: tuple[SparkZone, SparkZone]) -> None:
    """What is there of the one link is moved, and the absence of the other's sender is told, not waited out."""
    plant, enterprise = zones
    with_two_links(enterprise, 9)
    plant.produce(batch_of(0, 500).to_messages())
    code, said = once(enterprise, "--patience", "10")
    assert code != 0
    assert "peer_unreachable" in said
    assert SECOND in said
    assert plant.committed(CONSUMER) == 499


def with_two_links(enterprise: SparkZone, port: int, more: str = "") -> None:
    """Give the enterprise a link for each stream of the plant, the second to a port of its own."""
    first = enterprise.links + 'streams = ["operational"]\n'
    second = enterprise.links.replace(LINK, SECOND) + 'streams = ["lossy"]\n' + more
    address = next(line for line in second.splitlines() if line.startswith("address"))
    enterprise.links = first + second.replace(address, f'address = "127.0.0.1:{port}"')
    enterprise.restart()
    wait_until(lambda: enterprise.pid is not None, "the enterprise to run")
