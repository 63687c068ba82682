"""A zone that is backed up while it runs, destroyed, and restored: its peers notice, and nothing is mistaken."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.producing import calm, check_sound, history
from tests.e2e.test_artifacts import download, naming, reference, upload
from tests.e2e.test_relay import Chain
from tests.e2e.zones import Zone, bsfg, link_to, pair, settled, until

from bsfg import Endpoint, Producer
from bsfg.errors import ForeignLog
from bsfg.journey.link import FetchRequest
from bsfg.ports import Buffer, Confirmation
from bsfg.testing.facts import batch, messages, sealed

pytestmark = pytest.mark.campaign

STREAM = "operational"
REPORT = b"report of batch 7" * 1000


def back_up(zone: Zone, name: str = "backup", *more: str) -> tuple[Path, dict[str, int]]:
    """Back a zone up with the command; give the backup and where its logs end."""
    target = zone.root / f"{zone.name}-{name}"
    made = json.loads(bsfg("backup", str(target), "--config", str(zone.folder / "zone.toml"), "--json", *more))
    assert made["sound"] and made["zone"] == zone.name
    return target, {log["buffer"]: log["end"] for log in made["logs"] if log["stream"] == STREAM}


def destroy(zone: Zone) -> None:
    """Lose the disk of a zone."""
    zone.kill()
    shutil.rmtree(zone.data)


def restore(zone: Zone, backup: Path, *more: str) -> dict[str, object]:
    """Restore a zone with the command."""
    result: dict[str, object] = json.loads(bsfg("restore", str(backup), str(zone.folder), "--json", *more))
    return result


async def release(zone: Zone, link: str) -> None:
    """Let a held link go on."""
    async with zone.admin() as operator:
        await operator.release_gate(link, "the other side was restored from last night's backup")


async def append(zone: Zone, first: int, count: int) -> None:
    """Append numbered facts of a zone."""
    async with zone.client() as producer:
        await producer.append(STREAM, batch(count, first=first, from_zone=zone.name))


class Busy:
    """Appends to a zone for as long as it is told to."""

    def __init__(self, zone: Zone) -> None:
        self.zone, self.count, self._stopping = zone, 0, False

    async def run(self) -> None:
        """Append until told to stop."""
        async with self.zone.client() as producer:
            while not self._stopping:
                await producer.append(STREAM, batch(20, first=self.count, from_zone=self.zone.name))
                self.count += 20

    def stop(self) -> None:
        """Append nothing more."""
        self._stopping = True


async def backed_up_while_busy(zone: Zone, *others: Zone) -> tuple[Path, dict[str, int], list[int]]:
    """Back a zone up while it and others append; give backup, ends, and how much each appended in all."""
    busy = [Busy(each) for each in (zone, *others)]
    tasks = [asyncio.create_task(each.run()) for each in busy]
    await until(lambda: all(each.count > 100 for each in busy))
    before = busy[0].count
    backup, ends = await asyncio.to_thread(back_up, zone)
    assert before <= ends["store"]
    for each in busy:
        each.stop()
    await asyncio.gather(*tasks)
    return backup, ends, [each.count for each in busy]


def fetch_back(receiver: Zone, sender: Zone) -> dict[str, int]:
    """Give a restored zone what another one has of it, as the guide says."""
    exported = bsfg(
        *("inspect", str(receiver.data), "--stream", STREAM, "--buffer", "forward"),
        *("--from-zone", sender.name, "--export", "--facts"),
    )
    file = sender.folder / "fetched-back.jsonl"
    file.write_bytes(exported)
    told: dict[str, int] = json.loads(
        bsfg("append", str(file), "--config", str(sender.folder / "zone.toml"), "--stream", STREAM, "--json")
    )
    return told


async def test_a_destroyed_zone_comes_back(zones: tuple[Zone, Zone]) -> None:
    """Backed up under load, destroyed, restored: links are held and released, and both directions agree again.

    What was acknowledged after the backup and pulled by nobody is lost; all else is there, once.
    """
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    report = reference(REPORT)
    async with plant.client() as producer:
        await upload(producer, REPORT)
        await producer.append(STREAM, sealed([naming(report)]))
    backup, ends, (said, answered) = await backed_up_while_busy(plant, enterprise)
    await append(plant, said, 100)
    await append(enterprise, answered, 50)
    await calm(plant, enterprise)
    await calm(enterprise, plant)
    assert ends["store"] < plant.end(Buffer.STORE)
    enterprise.stop()
    await append(plant, said + 100, 30)  # nobody will ever have pulled these
    destroy(plant)
    where = Endpoint(f"127.0.0.1:{plant.port}", *_files(plant))
    with Producer(where, stream=STREAM, outbox=plant.root / "outbox") as producer:
        for fact in messages(40, first=said + 130, from_zone="plant-a"):
            producer.send(fact)
        restored = restore(plant, backup)
        assert {log["end"] for log in restored["logs"] if log["buffer"] == "store"} == {ends["store"]}  # type: ignore[attr-defined]
        plant.start()
        producer.drain(60)
    assert await download(plant, report) == REPORT
    enterprise.start()
    assert (await enterprise.seen("link_held"))["code"] == "foreign_log"
    assert (await plant.seen("link_held"))["code"] == "frame_invalid"
    told = fetch_back(enterprise, plant)
    assert told["inserted"] == said + 101 - ends["store"] and told["already_exists"] == ends["store"]
    await release(plant, "from-enterprise")
    await release(enterprise, "from-plant-a")
    await append(plant, said + 170, 10)
    await until(lambda: sorted(history(plant, Buffer.STORE)) == sorted(history(enterprise, Buffer.FORWARD)))
    await until(lambda: history(enterprise, Buffer.STORE) == history(plant, Buffer.FORWARD))
    expected = {fact.envelope.message_id for fact in messages(said + 180, from_zone="plant-a")}
    lost = {fact.envelope.message_id for fact in messages(30, first=said + 100, from_zone="plant-a")}
    ids = [message_id for _, message_id, _ in history(enterprise, Buffer.FORWARD)]
    assert len(ids) == len(set(ids)) and set(ids) == expected - lost | {"with-artifact"}
    assert history(enterprise, Buffer.STORE) == _expected(enterprise, answered + 50)
    check_sound(plant, enterprise)
    await calm(plant, enterprise)


def _files(zone: Zone) -> tuple[Path, Path, Path, str]:
    files = zone.files(f"{zone.name}-producer")
    return files.ca, files.certificate, files.key, f"{zone.name}-bsfg"


def _expected(zone: Zone, count: int) -> list[tuple[str, str, bytes]]:
    facts = batch(count, from_zone=zone.name)
    return list(zip(facts.values("from_zone"), facts.values("message_id"), facts.digests(), strict=True))


async def test_a_restored_sender_is_noticed_however_far_it_has_grown(zones: tuple[Zone, Zone]) -> None:
    """A peer that comes back after the restored zone has passed its old end still notices, by the id of the log."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await append(plant, 0, 50)
    await calm(plant, enterprise)
    backup, _ = back_up(plant)
    await append(plant, 50, 50)
    await calm(plant, enterprise)
    enterprise.stop()
    destroy(plant)
    restore(plant, backup)
    plant.start()
    await append(plant, 1_000, 500)
    enterprise.start()
    held = await enterprise.seen("link_held")
    assert held["code"] == "foreign_log" and "everything before 100 came" in held["detail"]
    assert enterprise.end(Buffer.FORWARD) == 100
    await release(enterprise, "from-plant-a")
    await until(lambda: enterprise.end(Buffer.FORWARD) == 600)
    expected = [*messages(100, from_zone="plant-a"), *messages(500, first=1_000, from_zone="plant-a")]
    assert enterprise.messages(Buffer.FORWARD) == expected


async def test_positions_of_the_lost_history_are_refused(zones: tuple[Zone, Zone]) -> None:
    """A consumer that confirms what it got before the loss is told that this was another history."""
    plant, _ = zones
    plant.start()
    await append(plant, 0, 20)
    backup, _ = back_up(plant)
    lost = plant.log(Buffer.STORE).view().segments[-1].header.log_id.hex()
    await append(plant, 20, 20)
    destroy(plant)
    restore(plant, backup)
    plant.start()
    await append(plant, 100, 40)
    async with plant.client("enterprise-bsfg") as peer:
        with pytest.raises(ForeignLog):
            await peer.confirm(f"enterprise.{STREAM}", Confirmation(39, log_id=lost))
        fetched = await peer.fetch(f"enterprise.{STREAM}", FetchRequest())
    assert (fetched.start, fetched.end) == (0, 60) and fetched.log_id != lost


async def test_a_receiver_whose_backup_is_older_than_its_link(tmp_path: Path, cleanup: Cleanup) -> None:
    """A link that the backup knows nothing of is held and read from the beginning: nothing is skipped in silence."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    enterprise.links = ""
    enterprise.write()
    enterprise.start()
    backup, _ = back_up(enterprise)
    enterprise.stop()
    enterprise.links = link_to(plant)
    enterprise.write()
    plant.start()
    enterprise.start()
    await append(plant, 0, 100)
    await calm(plant, enterprise)
    destroy(enterprise)
    restore(enterprise, backup)
    enterprise.start()
    await append(plant, 100, 10)
    assert (await enterprise.seen("link_held"))["code"] == "frame_invalid"
    await release(enterprise, "from-plant-a")
    await settled(plant, enterprise)
    assert enterprise.messages(Buffer.FORWARD) == messages(110, from_zone="plant-a")


async def test_a_restored_relay(tmp_path: Path, cleanup: Cleanup) -> None:
    """A zone in the middle is noticed on both sides; released, facts go through it again, each once and in order."""
    chain = Chain(tmp_path, cleanup)
    plant, idmz, enterprise = chain.zones
    await append(plant, 0, 100)
    await until(lambda: enterprise.end(Buffer.FORWARD) == 100)
    backup, ends = back_up(idmz)
    assert ends["forward"] == 100
    await append(plant, 100, 50)
    await until(lambda: enterprise.end(Buffer.FORWARD) == 150)
    await calm(plant, idmz)  # else the plant knows of nothing that is missing, and rightly goes on without a word
    destroy(idmz)
    restore(idmz, backup)
    idmz.start()
    await append(plant, 150, 10)
    assert (await idmz.seen("link_held", link="from-plant-a"))["code"] == "frame_invalid"
    assert (await enterprise.seen("link_held", link="over-idmz"))["code"] == "foreign_log"
    await release(enterprise, "over-idmz")
    await release(idmz, "from-plant-a")
    await until(lambda: enterprise.end(Buffer.FORWARD) == 160)
    assert enterprise.messages(Buffer.FORWARD) == messages(160, from_zone="plant-a")
    assert idmz.messages(Buffer.FORWARD) == messages(160, from_zone="plant-a")
    check_sound(plant, idmz, enterprise)


async def test_a_moved_zone_goes_on(zones: tuple[Zone, Zone]) -> None:
    """A zone that was stopped, backed up and restored as moved has the same history: no link is held."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    await append(plant, 0, 50)
    await calm(plant, enterprise)
    plant.stop()
    backup, _ = back_up(plant)
    shutil.rmtree(plant.data)
    assert restore(plant, backup, "--moved")["logs"] == []
    plant.start()
    await append(plant, 50, 50)
    await calm(plant, enterprise)
    assert enterprise.messages(Buffer.FORWARD) == messages(100, from_zone="plant-a")
    assert not enterprise.events("link_held") and not plant.events("link_held")


async def test_backups_one_after_the_other_under_load(zones: tuple[Zone, Zone]) -> None:
    """Backup upon backup of a busy zone, each on the base of the one before, are sound and each a longer beginning."""
    plant, enterprise = zones
    plant.start()
    enterprise.start()
    busy = Busy(plant)
    task = asyncio.create_task(busy.run())
    base: tuple[str, ...] = ()
    ends = [0]
    for number in range(4):
        target, now = await asyncio.to_thread(back_up, plant, f"number-{number}", *base)
        base = ("--base", str(target))
        ends.append(now["store"])
    busy.stop()
    await task
    assert ends == sorted(ends) and ends[-1] <= busy.count
    destroy(plant)
    restore(plant, target)
    assert history(plant, Buffer.STORE) == _expected(plant, ends[-1])
