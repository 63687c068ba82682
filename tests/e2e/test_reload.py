"""Who may call can be changed while the node runs: all of it at once, checked before, for open connections too."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, bsfg, pair
from tests.wire.test_authorities import revoke

from bsfg.errors import IdentityRevoked, IdentityUnknown
from bsfg.testing.facts import message

STREAM = "operational"
NEWCOMER = '[identities.newcomer]\nzone = "plant-a"\nroles = ["viewer"]\n'


@pytest.fixture
def plant(tmp_path: Path, cleanup: Cleanup) -> Zone:
    """Give a zone that runs."""
    zone = cleanup.zone(pair(tmp_path)[0])
    zone.start()
    return zone


async def test_a_row_that_is_revoked_counts_on_an_open_connection(plant: Zone) -> None:
    """A caller is refused from the look at the file on; when the row is in force again, so is he."""
    async with plant.client() as producer:
        await producer.append_fact(STREAM, message("before", from_zone="plant-a"))
        text = plant_text(plant)
        row = "[identities.plant-a-producer]\n"
        (plant.folder / "zone.toml").write_text(text.replace(row, f'{row}revoked = true\nreason = "laptop lost"\n'))
        reloaded = await plant.seen("access_reloaded")
        assert reloaded["digest"].startswith("sha256:")
        with pytest.raises(IdentityRevoked, match="laptop lost"):
            await producer.append_fact(STREAM, message("after", from_zone="plant-a"))
        (plant.folder / "zone.toml").write_text(text)
        again = await plant.seen("access_reloaded", count=2)
        assert again["digest"] != reloaded["digest"]
        await producer.append_fact(STREAM, message("again", from_zone="plant-a"))


async def test_a_file_with_a_mistake_changes_nothing(plant: Zone) -> None:
    """It is an alert until it is corrected, and what was allowed stays allowed; other tables wait and are named."""
    good = plant_text(plant)
    path = plant.folder / "zone.toml"
    path.write_text(good.replace('roles = ["producer"]', 'roles = ["producr"]'))
    alert = await plant.seen("alert_raised", alert="access_not_reloaded")
    assert "roles" in alert["text"]
    async with plant.client() as producer:
        await producer.append_fact(STREAM, message("meanwhile", from_zone="plant-a"))
    path.write_text(good + '\n[log]\nlevel = "debug"\n' + NEWCOMER)
    await plant.seen("alert_cleared", alert="access_not_reloaded")
    assert (await plant.seen("access_reloaded"))["waiting_for_restart"] == ["log"]


async def test_a_revocation_list_is_taken_up(plant: Zone) -> None:
    """A list that is named later, and one that is renewed, count without a restart; SIGHUP asks for it at once."""
    good = plant_text(plant)
    lists = revoke(plant.certs)
    (plant.folder / "zone.toml").write_text(good.replace("[tls]\n", f'[tls]\ncrl = "{lists}"\n'))
    await plant.seen("access_reloaded")
    async with plant.client() as producer:
        await producer.append_fact(STREAM, message("before", from_zone="plant-a"))
        revoke(plant.certs, "plant-a-producer")
        assert plant.pid is not None
        os.kill(plant.pid, signal.SIGHUP)
        await plant.seen("access_reloaded", count=2)
        with pytest.raises(IdentityRevoked, match="was revoked by"):
            await producer.append_fact(STREAM, message("after", from_zone="plant-a"))
    revoke(plant.certs, "plant-a-producer", next_update=-timedelta(hours=1))
    stale = await plant.seen("alert_raised", alert="crl_stale")
    assert "what was revoked since is not known" in stale["text"]
    revoke(plant.certs, "plant-a-producer")
    await plant.seen("alert_cleared", alert="crl_stale")
    lists.write_text("not a list")
    await plant.seen("alert_raised", alert="access_not_reloaded")


async def test_a_row_that_is_taken_out_is_a_stranger(plant: Zone) -> None:
    """Without its row a certificate may do nothing any more."""
    text = plant_text(plant)
    row = '[identities.plant-a-viewer]\nzone = "plant-a"\nroles = ["viewer"]\nstreams = ["*"]\n'
    assert row in text
    async with plant.admin("plant-a-viewer") as viewer:
        await viewer.status()
        (plant.folder / "zone.toml").write_text(text.replace(row, ""))
        await plant.seen("access_reloaded")
        with pytest.raises(IdentityUnknown):
            await viewer.status()


def plant_text(plant: Zone) -> str:
    """Give the configuration as it is."""
    return (plant.folder / "zone.toml").read_text()


async def test_certificates_are_renewed_without_a_gap(plant: Zone) -> None:
    """A node and a producer take renewed files up by themselves; who still shows the old ones goes on."""
    async with plant.client() as before:
        await before.append_fact(STREAM, message("before", from_zone="plant-a"))
        bsfg("certs", "renew", str(plant.certs), "plant-a-bsfg", "plant-a-producer")
        await before.append_fact(STREAM, message("on the old connection", from_zone="plant-a"))
        async with plant.client() as after:
            appended = await after.append_fact(STREAM, message("on a new one", from_zone="plant-a"))
    assert appended.offset == 2
    await plant.seen("certificate_reloaded")
