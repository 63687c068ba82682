"""A node whose folder was restored from an older copy: its links notice, and after an operator's word nothing lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import calm
from tests.e2e.zones import Zone, pair, settled, until

from bsfg.node.salvage import salvage
from bsfg.ports import Buffer
from bsfg.retention import GapReason
from bsfg.testing.facts import batch, messages

LINK = "from-plant-a"
SMALL = """
[streams.operational]
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
"""


def backup(zone: Zone) -> Path:
    """Copy the folder of a node that does not run."""
    return Path(shutil.copytree(zone.data, zone.folder / "backup"))


def restore(zone: Zone) -> None:
    """Put the copy in the place of the folder."""
    shutil.rmtree(zone.data)
    shutil.copytree(zone.folder / "backup", zone.data)


async def append(plant: Zone, first: int, count: int) -> None:
    """Append facts of the plant."""
    async with plant.client() as producer:
        await producer.append("operational", batch(count, first=first, from_zone="plant-a"))


async def release(zone: Zone) -> None:
    """Let a held link go on."""
    async with zone.admin() as operator:
        await operator.release_gate(LINK, "the folder was restored from last night's copy")


async def test_restored_sender(zones: tuple[Zone, Zone]) -> None:
    """A sender that forgot what it had said is held; released, it is believed from where it stands."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    plant.stop()
    backup(plant)
    plant.start()
    await append(plant, 100, 50)
    await calm(plant, enterprise)
    plant.kill()
    restore(plant)
    plant.start()
    assert (await enterprise.seen("link_held"))["code"] == "foreign_log"
    # Its producers kept what they were not sure of and send it again, and then something new.
    await append(plant, 120, 60)
    await release(enterprise)
    await until(lambda: enterprise.end(Buffer.FORWARD) == 180)
    assert enterprise.messages(Buffer.FORWARD) == messages(180, from_zone="plant-a")


async def test_salvaged_sender(zones: tuple[Zone, Zone]) -> None:
    """A sender whose folder was salvaged is held as a new history; released, it goes on and nothing comes twice."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    plant.kill()
    damaged = plant.data.rename(plant.folder / "damaged")
    saved = salvage(damaged, plant.data, None, 0, lambda doing, done, total: None)
    assert saved.missing == []
    plant.start()
    assert (await enterprise.seen("link_held"))["code"] == "foreign_log"
    await append(plant, 50, 100)
    await release(enterprise)
    await until(lambda: enterprise.end(Buffer.FORWARD) == 150)
    assert enterprise.messages(Buffer.FORWARD) == messages(150, from_zone="plant-a")


async def test_restored_receiver(zones: tuple[Zone, Zone]) -> None:
    """A receiver that forgot what it had confirmed is held; released, it reads again what it lacks, in order."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    enterprise.stop()
    backup(enterprise)
    enterprise.start()
    await append(plant, 100, 50)
    await calm(plant, enterprise)
    enterprise.kill()
    restore(enterprise)
    enterprise.start()
    await append(plant, 150, 30)
    held = await enterprise.seen("link_held")
    assert held["code"] == "frame_invalid"
    assert enterprise.end(Buffer.FORWARD) == 100
    await release(enterprise)
    await settled(plant, enterprise)
    assert enterprise.messages(Buffer.FORWARD) == messages(180, from_zone="plant-a")
    assert not enterprise.gaps(Buffer.FORWARD)


async def test_restored_receiver_whose_sender_has_let_go(tmp_path: Path, cleanup: Cleanup) -> None:
    """What the sender no longer retains is a gap record in the restored receiver; everything else is read again."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path, streams=SMALL))
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    enterprise.stop()
    backup(enterprise)
    enterprise.start()
    for first in range(100, 4_100, 200):
        await append(plant, first, 200)
        await calm(plant, enterprise)
    enterprise.kill()
    restore(enterprise)
    enterprise.start()
    await enterprise.seen("link_held", code="frame_invalid")
    await release(enterprise)
    retained = plant.log(Buffer.STORE).view().start
    assert 100 < retained < 4_100
    await until(lambda: enterprise.end(Buffer.FORWARD) == 100 + 4_100 - retained)
    expected = messages(4_100, from_zone="plant-a")
    assert enterprise.messages(Buffer.FORWARD) == expected[:100] + expected[retained:]
    [gap] = enterprise.gaps(Buffer.FORWARD)
    assert (gap.first, gap.last, gap.reason) == (100, retained - 1, GapReason.TRUNCATED)
    assert gap.origin_zone == "plant-a"
    await append(plant, 4_100, 10)
    await until(lambda: enterprise.messages(Buffer.FORWARD)[-10:] == messages(10, first=4_100, from_zone="plant-a"))


async def test_a_release_outlives_the_engine(zones: tuple[Zone, Zone]) -> None:
    """A link that is released while its sender is away, and whose node then dies, goes on without a second word."""
    plant, enterprise = zones
    await held_receiver(plant, enterprise)
    plant.stop()
    await release(enterprise)
    enterprise.kill()
    enterprise.start()
    plant.start()
    await settled(plant, enterprise)
    assert enterprise.messages(Buffer.FORWARD) == messages(180, from_zone="plant-a")
    assert [each["code"] for each in enterprise.events("link_held")] == ["frame_invalid"]


async def held_receiver(plant: Zone, enterprise: Zone) -> None:
    """Bring a link to where its receiver is held, because it was restored and lacks 50 facts and the 30 after them."""
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    enterprise.stop()
    backup(enterprise)
    enterprise.start()
    await append(plant, 100, 50)
    await calm(plant, enterprise)
    enterprise.kill()
    restore(enterprise)
    enterprise.start()
    await append(plant, 150, 30)
    assert (await enterprise.seen("link_held"))["code"] == "frame_invalid"


async def test_a_release_is_for_the_history_that_was_seen(zones: tuple[Zone, Zone]) -> None:
    """An operator who accepts another history of a sender has not accepted a third one, which is held again."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    for first in (1_000, 2_000):
        plant.kill()
        shutil.rmtree(plant.data)
        plant.start()
        await append(plant, first, 10)
        await enterprise.mode(LINK, "held")
        plant.kill()
        if first == 1_000:
            await release(enterprise)
            await enterprise.mode(LINK, "autonomous")
    plant.start()
    await release(enterprise)
    await until(lambda: enterprise.end(Buffer.FORWARD) == 110)
    expected = messages(100, from_zone="plant-a") + messages(10, first=2_000, from_zone="plant-a")
    assert enterprise.messages(Buffer.FORWARD) == expected
    assert [each["code"] for each in enterprise.events("link_held")] == ["foreign_log", "foreign_log"]
