"""`bsfg migrate` as an operator sees it: a plan, what was moved, what to do next, and refusals that say why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.conformance.migrating import fill, opened, zone_file

from bsfg.config import load
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.trailfile import told
from bsfg.testing.clock import FakeClock


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Give the file of a zone on the log, which holds something of everything, and one for a database."""
    return filled(zone_file(tmp_path, "zone", "log")), zone_file(tmp_path, "zone-new", "postgres")


def filled(path: Path) -> Path:
    """Put something of everything into a zone, and give its file."""

    async def run() -> None:
        clock = FakeClock()
        async with opened(load(path), clock) as zone:
            await fill(zone, clock)

    asyncio.run(run())
    return path


def test_a_plan_then_the_move_then_nothing_more(bsfg: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    """A dry run changes nothing; the move tells what came along and what to do next; a second one has nothing to do."""
    old, new = files
    plan = bsfg("migrate", "-c", old, "--to", new, "--dry-run")
    assert plan.code == 0 and "nothing was moved" in plan.out and "no tables yet" in plan.out, plan
    assert "operational/store" in plan.out and "3 consumers, 2 artifacts" in plan.out
    told_json = bsfg("migrate", "-c", old, "--to", new, "--dry-run", "--json").json()
    assert told_json["dry_run"] and (told_json["from"], told_json["to"]) == ("log", "postgres")
    ends = {(each["stream"], each["buffer"]): (each["start"], each["end"]) for each in told_json["buffers"]}
    assert not load(new).data_folder.exists()
    moved = bsfg("migrate", "-c", old, "--to", new, "--json")
    assert moved.code == 0, moved
    document = moved.json()
    assert ends == {(each["stream"], each["buffer"]): (each["start"], each["end"]) for each in document["buffers"]}
    assert document["consumers"] == 3 and document["artifacts"] == 2 and str(new) in document["next"][0]
    assert all(len(each["digest"]) == 64 for each in document["buffers"])
    for config in (load(old), load(new)):
        actions = [event.action for _, event in told(DiskFiles(config.data_folder)) if event is not None]
        assert "migrated" in actions
    another = bsfg("migrate", "-c", filled(zone_file(tmp_path, "another", "log")), "--to", new, "--dry-run")
    assert another.code == 0 and "it would be refused" in another.out, another
    again = bsfg("migrate", "-c", old, "--to", new)
    assert again.code == 0 and "moved before" in again.out and "bsfg node --config" in again.out, again
    refused = bsfg("node", "-c", old)
    assert refused.code == 1 and "error[storage_moved]" in refused.err, refused


def test_refusals_have_codes_and_hints(bsfg: Run, files: tuple[Path, Path], tmp_path: Path) -> None:
    """What cannot be moved, or not there, ends with code 1, a stable code and what to do."""
    old, new = files
    for target, code, hint in (
        (zone_file(tmp_path, "second", "log"), "storage_unable", "data_folder"),
        (zone_file(tmp_path, "memory", "memory"), "storage_unable", "lasts"),
        (old, "storage_unable", "data_folder"),
        (tmp_path / "none.toml", "config_invalid", "right path"),
    ):
        outcome = bsfg("migrate", "-c", old, "--to", target)
        assert outcome.code == 1 and f"error[{code}]" in outcome.err and hint in outcome.err, outcome
    missing = bsfg("migrate", "-c", new, "--to", old)
    assert missing.code == 1 and "error[invalid_argument]" in missing.err and "nothing of the zone" in missing.err
