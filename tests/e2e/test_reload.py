"""Who may call can be changed while the node runs: all of it at once, checked before, for open connections too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.test_dead_links import metrics
from tests.e2e.zones import Zone, bsfg, pair
from tests.wire.test_authorities import revoke

from bsfg.config import load
from bsfg.errors import ConfigInvalid, IdentityRevoked, IdentityUnknown, PermissionRefused
from bsfg.node.native import NativeHandoff
from bsfg.node.node import Node
from bsfg.testing.facts import message

STREAM = "operational"
LAB = """
[streams.lab-results]
[identities.lab-bsfg]
zone = "lab"
roles = ["peer"]
streams = ["lab-results"]
[links.from-lab]
zone = "lab"
address = "127.0.0.1:9"
engine = "native"
streams = ["lab-results"]
[serve.lab]
streams = ["lab-results"]
"""
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


async def test_a_revocation_does_not_wait_for_a_link_that_ends(
    tmp_path: Path, cleanup: Cleanup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file removes a link and revokes a row: who is revoked is out while the link still ends."""
    zone = cleanup.zone(pair(tmp_path)[0])
    path = zone.folder / "zone.toml"
    text, row = plant_text(zone), "[identities.plant-a-producer]\n"
    path.write_text(text + LAB)
    ending, may_end, stop = asyncio.Event(), asyncio.Event(), NativeHandoff.stop

    async def slow_stop(handoff: NativeHandoff) -> None:
        ending.set()
        await may_end.wait()
        await stop(handoff)

    monkeypatch.setattr(NativeHandoff, "stop", slow_stop)
    async with Node(load(path)), zone.client() as producer:
        await producer.append_fact(STREAM, message("before", from_zone="plant-a"))
        path.write_text(text.replace(row, f'{row}revoked = true\nreason = "laptop lost"\n'))
        try:
            await asyncio.wait_for(ending.wait(), 60)
            with pytest.raises(IdentityRevoked):
                await producer.append_fact(STREAM, message("after", from_zone="plant-a"))
        finally:
            may_end.set()


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


async def test_streams_links_and_thresholds_are_taken_up(plant: Zone) -> None:
    """A new stream serves, a new link and a new peer have gates, thresholds judge anew; the rest waits and is named."""
    good = plant_text(plant)
    path = plant.folder / "zone.toml"
    row = "[streams.operational]\n"
    changed = good.replace(row, f'{row}warning_fill = 0.000001\nretention = "3d"\n')
    assert changed != good
    path.write_text(changed + LAB)
    # The node looks by itself, too; whoever asks afterwards is told what counts.
    taken = await plant.seen("access_reloaded")
    found = json.loads(bsfg("reload", "--config", str(path), "--identity", "plant-a-operator", "--json"))
    assert set(taken["changed"]) == {"identities", "links", "serve", "streams"}
    assert found["waiting_for_restart"] == ["streams"], "how long facts are kept belongs to the files of a stream"
    async with plant.client() as producer, plant.admin() as operator:
        await producer.append_fact("lab-results", message("new", from_zone="plant-a"))
        status = await operator.status()
        assert status["configuration"]["digest"] == found["digest"]
        assert status["configuration"]["waiting_for_restart"] == ["streams"]
        assert {("from-lab", "receiver"), ("lab", "sender")} <= {
            (each["link"], each["side"]) for each in status["links"]
        }
        assert "lab.lab-results" in {each["name"] for each in status["consumers"]}
        await producer.append_fact(STREAM, message("fills", from_zone="plant-a"))
        [store] = [
            each
            for each in (await operator.status())["buffers"]
            if (each["stream"], each["buffer"]) == (STREAM, "store")
        ]
        assert store["fill"] == "warning"
        await operator.hold_gate("from-lab", "works", side="receiver")
    path.write_text(good)
    async with plant.admin() as operator:
        await operator.reload()
        status = await operator.status()
        assert "from-lab" not in {each["link"] for each in status["links"]}
        assert not [each for each in status["alerts"] if each["about"].startswith(("from-lab", "lab/"))]
        assert 'link="from-lab"' not in await asyncio.to_thread(gauges, plant)
        path.write_text(changed + LAB)
        await operator.reload()
        [again] = [each for each in (await operator.status())["links"] if each["link"] == "from-lab"]
        assert again["mode"] == "held", "what an operator has held is held when it comes back"
        shown = await asyncio.to_thread(gauges, plant)
        assert 'bsfg_gate_state{link="from-lab",mode="held",side="receiver"} 1.0' in shown
        path.write_text(changed + LAB + "required = false\n")
        await operator.reload()
        doubtful = await plant.seen("configuration_doubtful", key="serve.lab.required")
        assert "which was made required and stays so" in doubtful["problem"]
    records = bsfg("audit-trail", "--config", str(path), "--action", "config_loaded", "--json")
    assert b"plant-a-operator" in records


def gauges(zone: Zone) -> str:
    """Give the metrics of a node that tell of the present of its links."""
    names = ("bsfg_gate_state{", "bsfg_link_dead{", "bsfg_link_backlog{")
    return "\n".join(line for line in metrics(zone).splitlines() if line.startswith(names))


async def test_what_is_wrong_is_said_to_whoever_asks(plant: Zone) -> None:
    """Whoever asks hears the node's own words, nothing changes, and the status says that the file has a mistake."""
    path = plant.folder / "zone.toml"
    path.write_text(plant_text(plant) + LAB.replace('zone = "lab"\naddress', 'zone = "nobody"\naddress'))
    async with plant.admin() as operator:
        with pytest.raises(ConfigInvalid, match="from-lab"):
            await operator.reload()
        status = await operator.status()
        assert "from-lab" in status["configuration"]["problem"]
        assert "from-lab" not in {each["link"] for each in status["links"]}
    async with plant.admin("plant-a-viewer") as viewer:
        with pytest.raises(PermissionRefused):
            await viewer.reload()
