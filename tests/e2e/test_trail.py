"""The audit trail of a real node: every kind of event with who, from where, what and why, through kills and floods."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import QUICKLY_REFUSED, Zone, bsfg, pair, until

from bsfg.errors import BsfgError, IdentityUnknown, PermissionRefused, TruncateRefused
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.journal import Record, encode
from bsfg.stores.log.trailfile import file_name, oldest_first, walk
from bsfg.testing.facts import batch, message
from bsfg.trail import TrailEvent, TrailQuery
from bsfg.wire.certs import issue

FACT = message("a", from_zone="plant-a")


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> Zone:
    """Give one zone that runs, and a certificate of somebody who is in no table."""
    plant, _ = pair(tmp_path)
    issue(plant.certs, "stranger", days=60, now=datetime.now(UTC), serves=False)
    cleanup.zone(plant).start()
    return plant


def trail(zone: Zone, action: str = "") -> list[TrailEvent]:
    """Read the trail of a zone, its node alive or dead."""
    return [each.event for each in oldest_first(DiskFiles(zone.data), TrailQuery(action=action))]


def verified(data: Path) -> dict[str, Any]:
    """Run `bsfg verify` and give what it found."""
    done = subprocess.run(
        [sys.executable, "-m", "bsfg.cli", "verify", str(data), "--json"], capture_output=True, timeout=120, check=False
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report


async def test_every_act_is_there_with_who_what_and_why(plant: Zone) -> None:
    """What operators do is in the trail when they have their answer: done or failed, also after a kill at once."""
    async with plant.admin() as operator, plant.client() as producer:
        await producer.append("operational", batch(10, from_zone="plant-a"))
        await operator.hold_gate("from-enterprise", "firewall works")
        await operator.release_gate("from-enterprise", "works are done")
        with pytest.raises(BsfgError, match="not held"):
            await operator.release_gate("from-enterprise", "once more")
        await operator.create_consumer(ConsumerSpec("app-x", "operational", Buffer.STORE, required=False))
        await operator.retire_consumer("enterprise.operational", "the zone was given up")
        with pytest.raises(TruncateRefused):
            await operator.truncate_before("operational", 5, "room")
        await operator.retire_consumer("app-x", "was a trial")
    plant.kill()
    found = [each for each in trail(plant) if each.identity == "plant-a-operator"]
    assert [(each.action, each.about, each.outcome, each.reason) for each in found] == [
        ("gate_held", "from-enterprise/receiver", "done", "firewall works"),
        ("gate_released", "from-enterprise/receiver", "done", "works are done"),
        ("gate_released", "from-enterprise/receiver", "failed", "once more"),
        ("consumer_created", "consumer app-x", "done", ""),
        ("consumer_retired", "consumer enterprise.operational", "done", "the zone was given up"),
        ("buffer_truncated", "operational/store", "failed", "room"),
        ("consumer_retired", "consumer app-x", "done", "was a trial"),
    ]
    assert {each.address.rpartition(":")[0] for each in found} == {"127.0.0.1"}
    assert (found[2].rule, found[5].rule) == ("invalid_transition", "truncate_refused")
    report = verified(plant.data)
    assert (report["ok"], report["trail"]["ok"]) == (True, True)


async def test_starts_stops_configuration_and_backups_are_there(plant: Zone, tmp_path: Path) -> None:
    """The life of the node is in its trail, with the digest of what was in force; so are copies made beside it."""
    bsfg("backup", str(tmp_path / "copy"), "--config", str(plant.folder / "zone.toml"))
    await until(lambda: trail(plant, "backup_made"), "the backup to be in the trail")
    plant.more = '[log]\nlevel = "debug"\n'
    plant.restart()
    plant.kill()
    plant.start()
    plant.stop()
    actions = [each.action for each in trail(plant) if each.action.startswith("node_")]
    assert actions == ["node_started", "node_stopped", "node_started", "node_started", "node_stopped"]
    digests = [each.details["digest"] for each in trail(plant, "config_loaded")]
    assert len(digests) == 3
    assert digests[0] != digests[1] == digests[2]
    [made] = trail(plant, "backup_made")
    assert (made.about, made.identity[:5]) == (str(tmp_path / "copy"), "user:")
    assert verified(plant.data)["ok"]
    assert verified(tmp_path / "copy" / "data")["trail"]["ok"]


async def test_a_restored_folder_says_so(plant: Zone, tmp_path: Path) -> None:
    """The trail comes back with the backup, and goes on with who restored it from where."""
    async with plant.admin() as operator:
        await operator.hold_gate("from-enterprise", "before the backup")
    bsfg("backup", str(tmp_path / "copy"), "--config", str(plant.folder / "zone.toml"))
    plant.stop()
    plant.data.rename(tmp_path / "lost")
    bsfg("restore", str(tmp_path / "copy"), str(plant.folder))
    plant.start()
    await until(lambda: trail(plant, "restored"), "the restore to be in the trail")
    plant.stop()
    actions = [each.action for each in trail(plant)]
    assert actions.index("gate_held") < actions.index("restored")
    assert trail(plant, "restored")[0].details["backup"] == str(tmp_path / "copy")
    assert verified(plant.data)["ok"]


async def test_refusals_are_there_and_a_flood_of_them_is_counted(plant: Zone) -> None:
    """Who is refused is named with the rule; a thousand refusals are a handful of records, and the node serves on."""
    plant.changed = QUICKLY_REFUSED
    plant.restart()

    async def ask(identity: str) -> None:
        async with plant.client(identity) as client:
            for _ in range(250):
                with pytest.raises((IdentityUnknown, PermissionRefused)):
                    await client.append_fact("operational", FACT)

    await asyncio.gather(ask("stranger"), ask("stranger"), ask("viewer"), ask("viewer"))
    async with plant.client() as producer:
        await producer.append_fact("operational", FACT)
    plant.stop()
    found = trail(plant, "request_refused")
    strangers = [each for each in found if each.identity == "stranger"]
    viewers = [each for each in found if each.identity == "plant-a-viewer"]
    for kind, rule, code in (
        (strangers, "identity_in_table", "identity_unknown"),
        (viewers, "role_allows_action", "permission_denied"),
    ):
        assert {(each.rule, each.outcome, each.details["code"]) for each in kind} == {(rule, "refused", code)}
        assert 1 + sum(each.details.get("count", 0) for each in kind) == 500
        assert kind[0].address.startswith("127.0.0.1:")
        # Nothing of their requests was read, so nobody knows of which stream they were.
        assert kind[0].about == "append"
    assert len(found) < 50
    assert strangers[0].details["name"] == "stranger"
    assert sum(path.stat().st_size for path in (plant.data / "audit").glob("*.trail")) < 40_000


async def test_alterations_of_a_real_trail_are_found(plant: Zone) -> None:
    """Somebody who changes, removes or cuts records with all checksums right is found by `bsfg verify`, by number."""
    async with plant.admin() as operator:
        for number in range(3):
            await operator.hold_gate("from-enterprise", f"reason {number}")
            await operator.release_gate("from-enterprise", f"reason {number}")
    plant.stop()
    path = plant.data / file_name(1)
    whole = path.read_bytes()
    heads = [found.head for found in walk(whole) if found.head is not None]
    at = next(index for index, head in enumerate(heads) if head["action"] == "gate_held")
    planted = {
        "trail_altered": [*heads[:at], {**heads[at], "identity": "somebody-else"}, *heads[at + 1 :]],
        "trail_missing": [*heads[:at], *heads[at + 1 :]],
        "trail_reordered": [*heads[:at], heads[at + 1], heads[at], *heads[at + 2 :]],
    }
    for code, changed in planted.items():
        path.write_bytes(b"".join(encode(Record(head)) for head in changed))
        report = verified(plant.data)
        assert [(each["code"], each["first"]) for each in report["problems"]] == [(code, at + 1)]
    path.write_bytes(b"".join(encode(Record(head)) for head in heads[:-1]))
    assert [each["code"] for each in verified(plant.data)["problems"]] == ["trail_missing"]
    plant.start()
    await plant.seen("storage_problem")
    assert trail(plant, "trail_damaged")
    plant.stop()
    path.write_bytes(whole)


async def test_a_trail_that_cannot_be_written_is_an_alarm(plant: Zone, tmp_path: Path) -> None:
    """Where the trail cannot be opened the node starts, serves and alarms; when it can, what waited is written."""
    plant.stop()
    (plant.data / "audit").rename(tmp_path / "away")
    # A file in the place of its folder's parts: neither a slot nor a journal can be made.
    (plant.data / "audit").mkdir()
    (plant.data / "audit" / "head").mkdir()
    plant.start()
    await plant.seen("alert_raised", alert="audit_trail_failed")
    async with plant.admin() as operator, plant.client() as producer:
        await operator.hold_gate("from-enterprise", "no trail")
        await producer.append_fact("operational", FACT)
    (plant.data / "audit" / "head").rmdir()
    await plant.seen("alert_cleared", alert="audit_trail_failed")
    assert [each.reason for each in trail(plant, "gate_held")] == ["no trail"]
