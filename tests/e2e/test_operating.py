"""What operators do while nodes run: hold and release gates, exchange certificates, and leave links in peace."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, datetime

from tests.e2e.producing import Insistent, calm, expected, history
from tests.e2e.zones import Zone, settled, until

from bsfg.ports import Buffer
from bsfg.testing.facts import batch, messages
from bsfg.wire.certs import issue, load_certificates
from bsfg.wire.probe import probe

LINK = "from-plant-a"


async def test_hold_survives_kills_and_release_ends_it(zones: tuple[Zone, Zone]) -> None:
    """A held link pulls nothing, before and after a kill, until it is released with a reason."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await enterprise.mode(LINK, "normal")
    async with enterprise.admin() as operator:
        await operator.hold_gate(LINK, "the line is being rebuilt")
    async with plant.client() as producer:
        await producer.append("operational", batch(10, from_zone="plant-a"))
    # A fetch that was waiting then brought them, but nothing passes a held gate.
    await plant.mode("enterprise", "autonomous", "sender")
    assert enterprise.end(Buffer.FORWARD) == 0
    for _ in range(2):
        enterprise.kill()
        enterprise.start()
        await enterprise.seen("alert_raised", count=enterprise.starts, alert="gate_held")
        async with enterprise.admin("viewer") as viewer:
            [gate] = [view.gate for view in await viewer.gates() if view.link == LINK]
        assert (gate.mode, gate.held_by, gate.reason) == ("held", "enterprise-operator", "the line is being rebuilt")
    assert enterprise.end(Buffer.FORWARD) == 0
    async with enterprise.admin() as operator:
        await operator.release_gate(LINK, "the line runs again")
    await calm(plant, enterprise)
    assert enterprise.modes(LINK)[-3:] == ["autonomous", "reconciliation", "normal"]
    enterprise.kill()
    enterprise.start()
    await enterprise.mode(LINK, "normal")
    assert enterprise.modes(LINK).count("held") == 1


async def test_hold_of_the_sender_ends_by_itself(zones: tuple[Zone, Zone]) -> None:
    """A sender that holds its gate serves nothing; the receiver waits, and goes on when the hold has ended."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await enterprise.mode(LINK, "normal")
    async with plant.admin() as operator:
        until_unix_ms = int(time.time() * 1000) + 4_000
        await operator.hold_gate("enterprise", "maintenance", side="sender", until_unix_ms=until_unix_ms)
    async with plant.client() as producer:
        await producer.append("operational", batch(10, from_zone="plant-a"))
    await enterprise.seen("fetch_failed", code="gate_held")
    await enterprise.mode(LINK, "autonomous")
    assert enterprise.end(Buffer.FORWARD) == 0
    await calm(plant, enterprise)
    await enterprise.mode(LINK, "normal")
    await plant.mode("enterprise", "normal", "sender")
    stored_at = enterprise.entries(Buffer.FORWARD)[0].appended_at_unix_ms
    assert stored_at >= until_unix_ms
    assert not enterprise.events("link_held")


async def test_certificates_are_exchanged_without_a_restart(zones: tuple[Zone, Zone]) -> None:
    """New files are used from the next handshake on, by both listeners and by links; unusable ones change nothing."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await enterprise.mode(LINK, "normal")
    before = _serials(plant)
    assert len(set(before)) == 1
    # A key that does not belong to the certificate, as in the middle of a copy.
    key = plant.files().key
    own = key.read_bytes()
    key.write_bytes((plant.certs / "plant-a-producer.key").read_bytes())
    assert _serials(plant) == before
    await plant.seen("certificate_unusable")
    key.write_bytes(own)
    for zone in (plant, enterprise):
        issue(zone.certs, f"{zone.name}-bsfg", days=70, now=datetime.now(UTC), hosts=["127.0.0.1"], force=True)
    expected = load_certificates(plant.files().certificate)[0].serial_number
    assert _serials(plant) == (expected, expected) != before
    for zone in (plant, enterprise):
        await zone.seen("certificate_reloaded")
    async with plant.client() as at_plant, enterprise.client() as at_enterprise:
        await at_plant.append("operational", batch(20, from_zone="plant-a"))
        await at_enterprise.append("operational", batch(20, seed=1, from_zone="enterprise"))
    await settled(plant, enterprise)
    await settled(enterprise, plant)
    # An authority that signs nothing any more: the old node certificates are refused, as are those who call.
    assert enterprise.modes(LINK)[-1] == "normal"
    assert enterprise.messages(Buffer.FORWARD) == messages(20, from_zone="plant-a")


def _serials(zone: Zone) -> tuple[int, int]:
    """Shake hands with both listeners and give the numbers of the certificates that they show."""
    from cryptography import x509

    seen = (probe("127.0.0.1", port, zone.files(f"{zone.name}-viewer")) for port in (zone.port, zone.http_port))
    first, second = (x509.load_der_x509_certificate(each.certificate_der).serial_number for each in seen)
    return first, second


async def test_second_node_on_the_same_folder(zones: tuple[Zone, Zone]) -> None:
    """A folder has one writer: a second node says so and ends, and the first one does not notice."""
    plant, _ = zones
    plant.start()
    command = [sys.executable, "-m", "bsfg.cli", "node", "-c", "zone.toml"]
    second = await asyncio.create_subprocess_exec(*command, cwd=plant.folder, stderr=asyncio.subprocess.PIPE)
    _, says = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode == 1
    assert b"folder_locked" in says and b"Traceback" not in says
    async with plant.client() as producer:
        await producer.append("operational", batch(10, from_zone="plant-a"))


async def test_stop_in_the_middle_of_everything(zones: tuple[Zone, Zone]) -> None:
    """A node that is told to stop under load ends well, has kept all it acknowledged, and goes on after a start."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    producers = Insistent(plant, 5), Insistent(enterprise, 6)
    tasks = [asyncio.create_task(producer.run()) for producer in producers]
    await until(lambda: sum(producer.count for producer in producers) > 500)
    await asyncio.to_thread(plant.stop)
    await asyncio.to_thread(plant.start)
    for producer in producers:
        producer.stop()
    await asyncio.gather(*tasks)
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    assert history(enterprise, Buffer.FORWARD) == expected(producers[0])
    assert history(plant, Buffer.FORWARD) == expected(producers[1])
