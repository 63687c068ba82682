"""Whatever needs a person is told through log, metric, webhook and command, whoever caused it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.test_damage import poison
from tests.e2e.test_upkeep import Webhook
from tests.e2e.zones import Zone, pair, until

from bsfg.batch import FactBatch
from bsfg.config import load
from bsfg.errors import BsfgError
from bsfg.node.node import Node
from bsfg.node.status import HealthLevel, findings
from bsfg.ports import Buffer, GapRecord, OriginSpan
from bsfg.retention import GapReason
from bsfg.testing.facts import WeakHasher, altered, batch, message, messages, sealed

STREAM = "operational"


class Told:
    """A node in this process whose alerts go everywhere."""

    def __init__(self, node: Node, zone: Zone, webhook: Webhook) -> None:
        self.node, self.zone, self._webhook = node, zone, webhook

    async def alert(self, name: str) -> dict[str, Any]:
        """Wait until webhook and command were given an alert, and the metric counts it; give it."""
        await until(lambda: self._posted(name) and self._given(name), f"the alert {name}")
        text = self.node.parts.metrics.text().decode()
        assert f'bsfg_alerts_total{{alert="{name}"}}' in text
        assert self._posted(name)[0] == self._given(name)[0]
        return self._posted(name)[0]

    def _posted(self, name: str) -> list[dict[str, Any]]:
        return [each for each in self._webhook.alerts if each["alert"] == name and not each.get("cleared")]

    def _given(self, name: str) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            lines = (self.zone.folder / "alerts.txt").read_text().splitlines()
            found = [orjson.loads(line) for line in lines if line.strip()]
            return [each for each in found if each["alert"] == name and not each.get("cleared")]
        return []

    def lasts(self, name: str) -> bool:
        """Tell whether an alert lasts."""
        return any(each["alert"] == name for each in self.node.alerts.active())


@pytest.fixture
def zone(tmp_path: Path, cleanup: Cleanup) -> Zone:
    """Give a zone that is not started."""
    return cleanup.zone(pair(tmp_path)[0])


async def told(zone: Zone, work: Any) -> None:
    """Run some work with a node whose alerts go everywhere."""
    async with Webhook() as webhook:
        zone.more = f"""
[alerts]
webhook = "http://127.0.0.1:{webhook.port}/alerts"
command = ["/bin/sh", "-c", "printf '%s\\\\n' \\"$(cat)\\" >> {zone.folder}/alerts.txt"]
timeout = "20s"
"""
        zone.write()
        async with Node(load(zone.folder / "zone.toml")) as node:
            await work(Told(node, zone, webhook))


async def put(node: Node, facts: FactBatch, first: int = 0) -> None:
    """Put facts of the peer into the forward buffer, as any engine does."""
    span = OriginSpan("enterprise", np.arange(first, first + len(facts)), np.full(len(facts), 1_700_000_000_000))
    await (await node.parts.forward(STREAM)).put_if_absent(facts, span)


async def settle(zone: Zone) -> None:
    """Decide about everything that waits in quarantine."""
    async with zone.admin() as operator:
        for view in await operator.quarantine():
            await operator.drop_quarantined(STREAM, view.quarantined.id, "the producer was wrong", Buffer.FORWARD)


async def test_a_quarantined_fact_is_an_alert_until_it_is_settled(zone: Zone) -> None:
    """A conflict is told whoever put it, and lasts until an operator has decided."""

    async def work(here: Told) -> None:
        facts = messages(1, from_zone="enterprise")
        await put(here.node, sealed(facts))
        await put(here.node, sealed(altered(facts)))
        alert = await here.alert("quarantine")
        assert (alert["severity"], alert["about"]) == ("alert", f"{STREAM}/forward")
        assert not here.lasts("hash_collision")
        await settle(zone)
        await until(lambda: not here.lasts("quarantine"))

    await told(zone, work)


async def test_a_hash_collision_is_an_alert_of_its_own_until_it_is_settled(zone: Zone) -> None:
    """Two bodies with one digest are told apart from other conflicts."""

    async def work(here: Told) -> None:
        for value in (11, 12):
            await put(here.node, sealed([message("a", value, from_zone="enterprise")], hasher=WeakHasher()))
        alert = await here.alert("hash_collision")
        assert (alert["severity"], alert["about"]) == ("alert", f"{STREAM}/forward")
        await settle(zone)
        await until(lambda: not here.lasts("hash_collision"))

    await told(zone, work)


async def test_new_gap_records_are_told_and_meant_ones_are_not(zone: Zone) -> None:
    """What expired, was dropped, damaged or lost is told with how much; what was left out on purpose is not."""

    async def work(here: Told) -> None:
        forward = await here.node.parts.forward(STREAM)
        await forward.record_gaps([GapRecord(0, 9, GapReason.SKIPPED, 1, "not carried", "enterprise")])
        await forward.record_gaps([GapRecord(20, 29, GapReason.EXPIRED, 1, "too old", "enterprise")])
        alert = await here.alert("gap")
        assert alert["text"].endswith(": 10 expired in enterprise")

    await told(zone, work)


async def test_damage_that_is_met_while_running_is_an_alert_until_the_next_start(zone: Zone) -> None:
    """A frame that rots under a running node is told with file and byte as soon as somebody reads it, and in status."""

    async def work(here: Told) -> None:
        store = await here.node.parts.store(STREAM)
        for first in (0, 300, 600):
            await store.append(batch(300, first=first, from_zone="plant-a"))
        for first in range(1_000, 1_100):  # so that the first frames are not at hand any more
            await store.append(batch(1, first=first, from_zone="plant-a"))
        [path] = (zone.data / f"streams/{STREAM}/store").glob("*.seg")
        at = poison(path)
        assert not here.lasts("damage")
        assert [frame.gap.first async for frame in store.replay(0) if frame.gap] == [300]
        alert = await here.alert("damage")
        assert (alert["severity"], alert["about"]) == ("alert", f"{STREAM}/store")
        assert f"{path.name} at byte {at}" in alert["text"]
        await until(lambda: here.lasts("damage"))
        async with zone.admin("viewer") as viewer:
            found = findings(await viewer.status())
        assert [each.level for each in found if each.alert == "damage"] == [HealthLevel.ALERT]

    await told(zone, work)


async def test_damage_to_the_journals_of_node_and_cursors_is_an_alert(zone: Zone) -> None:
    """What the start finds wrong beside the buffers is told as what it finds in them."""
    zone.write()
    async with Node(load(zone.folder / "zone.toml")):
        pass
    for name in ("node/state.journal", "cursors/cursors.journal"):
        (zone.data / name).write_bytes(b"no journal at all")

    async def work(here: Told) -> None:
        alert = await here.alert("damage")
        assert alert["about"] == "plant-a"
        assert "node/state.journal" in alert["text"]
        assert "more" in alert["text"]
        assert here.lasts("damage")
        await until(lambda: here.lasts("gate_held"))

    await told(zone, work)


async def test_a_refused_identity_is_told_once_and_counted(zone: Zone) -> None:
    """A caller who may not is an alert at once; that it goes on asking does not flood anybody."""

    async def work(here: Told) -> None:
        async with zone.client("viewer") as viewer:
            for _ in range(5):
                with pytest.raises(BsfgError):
                    await viewer.append(STREAM, batch(1, from_zone="plant-a"))
        alert = await here.alert("identity_refused")
        assert alert["about"] == "plant-a-viewer"
        assert "role_allows_action" in alert["text"]
        value = here.node.parts.metrics.registry.get_sample_value("bsfg_alerts_total", {"alert": "identity_refused"})
        assert value is not None
        assert value >= 5

    await told(zone, work)
