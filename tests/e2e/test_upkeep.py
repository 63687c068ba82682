"""What a node looks after by itself: alerts that reach somebody, facts that may leave, storage that has failed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import orjson
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import calm
from tests.e2e.zones import Zone, pair, until

from bsfg.batch import FactBatch
from bsfg.config import load
from bsfg.node.node import Node
from bsfg.node.upkeep import Upkeep
from bsfg.ports import Buffer
from bsfg.testing.facts import batch
from bsfg.testing.ports import free_port

SMALL = """
[streams.operational]
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
retention = "0s"
"""


class Webhook:
    """A place where alerts are posted to; it may refuse them."""

    def __init__(self) -> None:
        self.port = free_port()
        self.alerts: list[dict[str, object]] = []
        self.status = "200 OK"

    async def __aenter__(self) -> Webhook:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            self.alerts.append(orjson.loads(await reader.readexactly(length)))
            writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
        writer.close()


async def test_alerts_reach_webhook_and_command(tmp_path: Path, cleanup: Cleanup) -> None:
    """An alert and its end are posted and given to a command; a failed delivery is a log record and nothing else."""
    plant, _ = map(cleanup.zone, pair(tmp_path))
    async with Webhook() as webhook:
        plant.more = f"""
[alerts]
webhook = "http://127.0.0.1:{webhook.port}/alerts"
command = ["/bin/sh", "-c", "printf '%s\\\\n' \\"$(cat)\\" >> alerts.txt"]
timeout = "5s"
"""
        plant.write()
        plant.start()
        async with plant.admin() as operator:
            await operator.hold_gate("from-enterprise", "the line is being rebuilt")
            await until(lambda: [each for each in webhook.alerts if each["alert"] == "gate_held"])
            webhook.status = "500 Broken"
            await operator.release_gate("from-enterprise", "done")
        await plant.seen("alert_not_delivered")
        await until(lambda: len(_given(plant)) >= 1)
    raised = next(each for each in webhook.alerts if each["alert"] == "gate_held")
    assert (raised["zone"], raised["about"], raised["severity"]) == ("plant-a", "from-enterprise/receiver", "alert")
    assert raised in _given(plant)
    assert any(each.get("cleared") for each in webhook.alerts)
    async with plant.client() as producer:
        await producer.append("operational", batch(5, from_zone="plant-a"))


def _given(plant: Zone) -> list[dict[str, object]]:
    try:
        return [orjson.loads(line) for line in (plant.folder / "alerts.txt").read_text().splitlines()]
    except FileNotFoundError:
        return []


async def test_facts_leave_while_the_link_is_open_and_stay_while_it_is_not(tmp_path: Path, cleanup: Cleanup) -> None:
    """What is confirmed and old enough leaves, but nothing does while the peer is away."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=SMALL))
    enterprise.start()
    config = load(plant.folder / "zone.toml")
    # In this process, so that the test says when it is time to look.
    async with Node(config) as node, plant.client() as producer:
        upkeep = Upkeep(config, node.parts, node.alerts, lambda event, **fields: None)
        for number in range(5):
            await producer.append("operational", _facts(number))
        await calm(plant, enterprise)
        await until(lambda: node.parts.links.gate("enterprise", "sender").gate.allows_truncation)
        await upkeep.enforce_retention()
        left = plant.log(Buffer.STORE).view().start
        assert 0 < left <= 500
        enterprise.kill()
        await until(lambda: not node.parts.links.gate("enterprise", "sender").gate.allows_truncation)
        for number in range(5, 8):
            await producer.append("operational", _facts(number))
        await upkeep.enforce_retention()
        assert plant.log(Buffer.STORE).view().start == left
        enterprise.start()
        await calm(plant, enterprise)
        await until(lambda: node.parts.links.gate("enterprise", "sender").gate.allows_truncation)
        await upkeep.enforce_retention()
        assert plant.log(Buffer.STORE).view().start > left
        assert not plant.gaps(Buffer.STORE)
    assert enterprise.end(Buffer.FORWARD) == 800


async def test_a_closed_link_keeps_what_is_confirmed_until_room_is_needed(tmp_path: Path, cleanup: Cleanup) -> None:
    """While the peer is away nothing confirmed leaves by age or by order, but it makes room for new facts."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=SMALL))
    enterprise.start()
    config = load(plant.folder / "zone.toml")
    async with Node(config) as node, plant.client() as producer:
        upkeep = Upkeep(config, node.parts, node.alerts, lambda event, **fields: None)
        for number in range(5):
            await producer.append("operational", _facts(number))
        await calm(plant, enterprise)
        enterprise.kill()
        await until(lambda: not node.parts.links.gate("enterprise", "sender").gate.allows_truncation)
        await upkeep.enforce_retention()
        assert plant.log(Buffer.STORE).view().start == 0
        number = 5
        while (left := plant.log(Buffer.STORE).view().start) == 0 and number < 40:
            await producer.append("operational", _facts(number))
            number += 1
        assert 0 < left <= 500
        assert not plant.gaps(Buffer.STORE)
        enterprise.start()
        await calm(plant, enterprise)
    assert enterprise.end(Buffer.FORWARD) == 100 * number


def _facts(number: int) -> FactBatch:
    return batch(100, first=100 * number, from_zone="plant-a", object_bytes=200)


async def test_failed_storage_is_an_alert(tmp_path: Path, cleanup: Cleanup) -> None:
    """A node whose storage has closed itself tells an operator, instead of failing in silence."""
    plant, _ = map(cleanup.zone, pair(tmp_path))
    async with Node(load(plant.folder / "zone.toml")) as node:
        await node.parts.storage.close()
        await until(lambda: [each for each in node.alerts.active() if each["alert"] == "upkeep_failed"])
        [alert] = [each for each in node.alerts.active() if each["alert"] == "upkeep_failed"]
        assert "storage_closed" in alert["text"]
