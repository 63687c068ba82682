"""`bsfg backup` and `bsfg restore`: what is copied and what is not, and that nothing is overwritten or left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from tests.cli import folders
from tests.cli.conftest import Run, environment, launcher
from tests.e2e.zones import Zone, pair

from bsfg.batch import EntryBatch
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.journal import BEGINNING, Record, encode
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.view import write_latest
from bsfg.testing.facts import batch

CONTENT = b"certificate of analysis" * 500


def files_of(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entries_of(folder: Path) -> list[object]:
    """Read all entries of all logs of a data folder."""
    frames = [frame for log in open_folder(folder) for frame in log.frames()]
    return [entry for frame in frames if frame.entries is not None for entry in frame.entries.to_entries()]


async def fill(zone: Zone) -> None:
    """Give a zone that does not run a few facts and an artifact."""
    storage = await LogStorage.open(zone.data)
    await (await storage.store("operational")).append(batch(30, from_zone=zone.name))
    await storage.cursors.create(ConsumerSpec("enterprise.operational", "operational"))
    await storage.close()

    async def content() -> AsyncIterator[bytes]:
        yield CONTENT

    artifacts = await ArtifactFolder.open(zone.data / "artifacts")
    await artifacts.put("reports", "7.pdf", content())
    await artifacts.close()


async def grown(data: Path) -> None:
    """Give a folder so many facts that copying and checking them takes a while."""
    storage = await LogStorage.open(data)
    store = await storage.store("operational")
    for number in range(10):
        await store.append(batch(20_000, seed=77, first=20_000 * number))
    await storage.close()


@pytest.fixture
def zone(tmp_path: Path) -> Zone:
    """A zone with its own certificates, facts and an artifact."""
    plant = pair(tmp_path)[0]
    shutil.copytree(plant.certs, plant.folder / "certs")
    plant.certs = Path("certs")
    plant.write()
    asyncio.run(fill(plant))
    return plant


def authority_of(zone: Zone) -> Path:
    """Keep a copy of the authority where no restore reaches it."""
    return Path(shutil.copy(zone.folder / "certs" / "ca.crt", zone.folder.parent / "known-ca.crt"))


def config_of(zone: Zone) -> Path:
    """Give the zone's file."""
    return zone.folder / "zone.toml"


def test_a_data_folder_is_backed_up_and_restored(quick: Run, data: Path, tmp_path: Path) -> None:
    """Everything in a folder comes back: entries, gaps, quarantine, consumers and keys; only its history is new."""
    made = quick("backup", tmp_path / "copy", "--data", data, "--json").json()
    assert made["sound"] and made["problems"] == [] and made["format"] == 1
    assert [(log["stream"], log["buffer"], log["start"], log["end"]) for log in made["logs"]] == [
        ("audit", "forward", 0, 300),
        ("operational", "store", 650, 2_000),
    ]
    restored = quick("restore", tmp_path / "copy", tmp_path / "new", "--accept-unsigned", "--json").json()
    assert restored["data"] == str(tmp_path / "new") and restored["next"] == [f"bsfg verify {tmp_path / 'new'}"]
    assert entries_of(tmp_path / "new") == entries_of(data)
    before, after = (quick("inspect", folder, "--json").json() for folder in (data, tmp_path / "new"))
    for name in ("name", "committed", "ranges", "required", "retired_reason"):
        assert [each[name] for each in after["consumers"]] == [each[name] for each in before["consumers"]]
    assert all(each["same_history"] for each in after["consumers"])
    for old, new in zip(before["logs"], after["logs"], strict=True):
        assert new["log_id"] != old["log_id"]
        for name in ("gaps", "quarantine", "key_segments", "removed"):
            assert new[name] == old[name]
    asyncio.run(folders.append_more(tmp_path / "new"))
    report = quick("verify", tmp_path / "new", "--json").json()
    assert report["ok"] and report["notes"] == []


def test_the_lineage_of_a_restored_log_is_kept(quick: Run, data: Path, tmp_path: Path) -> None:
    """A restored log names the history it went on from, where and when."""
    quick("backup", tmp_path / "copy", "--data", data)
    quick("restore", tmp_path / "copy", tmp_path / "new", "--accept-unsigned")
    [old] = [log for log in open_folder(data) if log.buffer == Buffer.STORE]
    [new] = [log for log in open_folder(tmp_path / "new") if log.buffer == Buffer.STORE]
    before, after = read_identity(old.files, old.path), read_identity(new.files, new.path)
    assert before is not None and after is not None
    [ancestor] = after.lineage
    assert (ancestor.log_id, ancestor.end) == (before.log_id, folders.FACTS) and ancestor.restored_unix_ms > 0
    shown = quick("inspect", tmp_path / "new", "--stream", folders.STREAM)
    assert "restored from earlier histories" in shown.out and before.log_id.hex() in shown.out


def test_a_zone_comes_back_whole(quick: Run, zone: Zone, tmp_path: Path) -> None:
    """Facts, artifacts, configuration and certificates are in a backup, and come back into an empty folder."""
    made = quick("backup", tmp_path / "b", "--config", config_of(zone), "--json").json()
    assert (made["zone"], made["artifacts"], made["config"]) == ("plant-a", 1, "zone.toml")
    assert {"zone.toml", "certs/ca.crt", "certs/plant-a-bsfg.crt"} <= set(made["files"])
    before, entries, authority = files_of(zone.folder), entries_of(zone.data), authority_of(zone)
    shutil.rmtree(zone.folder)
    restored = quick("restore", tmp_path / "b", zone.folder, "--ca", authority, "--take-config", "--json").json()
    assert restored["signed_by"] == "plant-a-bsfg"
    assert entries_of(zone.data) == entries
    content = [data for name, data in files_of(zone.data / "artifacts").items() if name.startswith("content/")]
    assert content == [CONTENT]
    after = files_of(zone.folder)
    for name in made["files"]:
        assert after[name] == before[name]
    assert sorted(restored["lacking"]) == [str(zone.folder / "certs/plant-a-bsfg.key")]
    steps = restored["next"]
    assert steps[0] == f"put back {zone.folder / 'certs/plant-a-bsfg.key'}"
    assert any("bsfg gate release from-plant-a" in step for step in steps)
    words = quick("restore", tmp_path / "b", tmp_path / "elsewhere", "--ca", authority, "--take-config")
    assert "Next:" in words.out and "bsfg node" in words.out


def test_keys_stay_where_they_are_unless_asked_for(quick: Run, zone: Zone, tmp_path: Path) -> None:
    """No private key is in a backup; with --with-keys the node's own is, as unreadable for others as it was."""
    hidden = zone.folder / "certs" / "spare.pem"
    shutil.copy(zone.folder / "certs" / "plant-a-bsfg.key", hidden)
    plain = quick("backup", tmp_path / "plain", "--config", config_of(zone))
    assert plain.code == 0 and "Private keys are not in it" in plain.out
    held = files_of(tmp_path / "plain")
    assert not [name for name, content in held.items() if name.endswith(".key") or b"PRIVATE KEY" in content]
    made = quick("backup", tmp_path / "full", "--config", config_of(zone), "--with-keys", "--json").json()
    assert made["with_keys"] and made["signed"]
    held = files_of(tmp_path / "full")
    assert [name for name, content in held.items() if b"PRIVATE KEY" in content] == ["zone/certs/plant-a-bsfg.key"]
    assert {Path(path).name for path in made["left_out"]} >= {"ca.key", "spare.pem"}
    key = tmp_path / "full" / "zone" / "certs" / "plant-a-bsfg.key"
    assert key.read_bytes() == (zone.folder / "certs" / "plant-a-bsfg.key").read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    authority = authority_of(zone)
    shutil.rmtree(zone.folder)
    taken = quick("restore", tmp_path / "full", zone.folder, "--ca", authority, "--take-config", "--json").json()
    assert taken["lacking"] == []
    assert (zone.folder / "certs" / "plant-a-bsfg.key").stat().st_mode & 0o777 == 0o600


def test_files_of_a_zone_that_are_there_stay(quick: Run, zone: Zone, tmp_path: Path) -> None:
    """A zone.toml in the folder counts, and is not overwritten by the one in the backup."""
    quick("backup", tmp_path / "b", "--config", config_of(zone))
    shutil.rmtree(zone.data)
    text = config_of(zone).read_text().replace('name = "plant-a"', 'name = "plant-a"\ndata_folder = "elsewhere"')
    config_of(zone).write_text(text)
    restored = quick("restore", tmp_path / "b", zone.folder, "--json").json()
    assert restored["data"] == str(zone.folder / "elsewhere") and restored["files"] == []
    assert config_of(zone).read_text() == text
    assert len(entries_of(zone.folder / "elsewhere")) == 30


def test_another_zone_is_not_restored_into(quick: Run, zone: Zone, tmp_path: Path) -> None:
    """The backup of one zone is refused by the folder of another."""
    quick("backup", tmp_path / "b", "--config", config_of(zone))
    other = tmp_path / "enterprise"
    outcome = quick("restore", tmp_path / "b", other)
    assert outcome.code == 1 and "the backup is of the zone plant-a" in outcome.err
    assert not (other / "data").exists()


def test_nothing_is_overwritten(quick: Run, data: Path, tmp_path: Path) -> None:
    """A backup wants a new place, inside no data folder; a restore too, and says what to do with the old one."""
    (tmp_path / "empty").mkdir()
    assert quick("backup", tmp_path / "empty", "--data", data).code == 0
    again = quick("backup", tmp_path / "empty", "--data", data)
    assert (again.code, again.err.split(":")[0]) == (1, "error[file_exists]")
    inside = quick("backup", data / "b", "--data", data)
    assert inside.code == 1 and "lies inside" in inside.err
    (tmp_path / "next.partial").mkdir()
    busy = quick("backup", tmp_path / "next", "--data", data)
    assert busy.code == 1 and "interrupted" in busy.err
    before = files_of(data)
    over = quick("restore", tmp_path / "empty", data, "--accept-unsigned")
    assert over.code == 1 and f"mv {data} {data}.lost" in over.err
    assert files_of(data) == before
    (tmp_path / "new.restoring").mkdir()
    assert "interrupted" in quick("restore", tmp_path / "empty", tmp_path / "new", "--accept-unsigned").err


def test_what_is_ended_leaves_nothing_behind(data: Path, tmp_path: Path) -> None:
    """A backup that the system ends in the middle removes its half."""
    asyncio.run(grown(data))
    with subprocess.Popen(
        [sys.executable, "-m", "bsfg", "backup", str(tmp_path / "b"), "--data", str(data)], env=environment()
    ) as process:
        while not (tmp_path / "b.partial").exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == ["data"]


def test_a_full_disk_leaves_nothing_behind(bsfg: Run, data: Path, tmp_path: Path) -> None:
    """A backup that cannot be finished says why, and its half is removed; so is the half of a restore."""

    small_files = launcher("resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))")
    for command in (
        ("backup", tmp_path / "b", "--data", data),
        ("restore", tmp_path / "good", tmp_path / "new", "--accept-unsigned"),
    ):
        bsfg("backup", tmp_path / "good", "--data", data)
        outcome = bsfg(*command, launcher=small_files)
        assert outcome.code == 1 and outcome.err.startswith("error[storage_failed]")
    assert sorted(os.listdir(tmp_path)) == ["data", "good"]


def test_damage_is_told_and_restored_only_on_demand(quick: Run, data: Path, tmp_path: Path) -> None:
    """The backup of a damaged folder is made and says so; restoring it takes a decision, and names what is lost."""
    folders.flipped_bit(data)
    made = quick("backup", tmp_path / "b", "--data", data, "--json")
    assert made.code == 1 and not made.json()["sound"]
    assert {each["code"] for each in made.json()["problems"]} == {"log_damaged"}
    assert "damaged, as the zone is" in quick("backup", tmp_path / "c", "--data", data).out
    refused = quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned", "--json")
    assert refused.code == 1 and refused.json()["code"] == "log_damaged"
    assert not (tmp_path / "new").exists()
    restored = quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned", "--accept-damage", "--json")
    assert restored.code == 0 and not restored.json()["sound"]
    assert [each["detail"] in restored.json()["damage"][0] for each in made.json()["problems"]] == [True]
    assert len(entries_of(tmp_path / "new")) == len(entries_of(data)) < 1_650
    said = quick("restore", tmp_path / "c", tmp_path / "other", "--accept-unsigned", "--accept-damage")
    assert said.code == 0 and "It is damaged, as you accepted (1 problem):" in said.out
    assert restored.json()["damage"][0] in " ".join(said.out.split())
    told = quick("audit-trail", "--data", tmp_path / "other", "--json").json()["waiting"][-1]
    assert (told["action"], told["details"]["damage"]) == ("restored", 1)


@pytest.mark.parametrize("arguments", [(), ("--no-verify",)], ids=["verified", "not verified"])
@pytest.mark.parametrize("name", ["quarantine/*.journal", "notes.journal", "cursors.journal"])
def test_what_is_damaged_and_left_out_is_told(
    quick: Run, data: Path, tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    """A record that cannot be read is not in the copy: the backup is not sound, and says which file and where."""
    path = max(data.rglob(name), key=lambda each: each.stat().st_size)
    content, sound = path.read_bytes(), encode(Record({"aside": []})) if "quarantine" in name else BEGINNING
    path.write_bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:] + sound)
    made = quick("backup", tmp_path / "b", "--data", data, "--json", *arguments)
    assert (made.code, made.json()["sound"]) == (1, False)
    [found] = [each for each in made.json()["problems"] if "not in the backup" in each["detail"]]
    assert path.name in found["where"] + found["detail"] and "damaged bytes at" in found["detail"]
    refused = quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned", "--json")
    assert (refused.code, refused.json()["code"]) == (1, "log_damaged") and "not in the backup" in refused.err
    assert quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned", "--accept-damage").code == 0


def test_damaged_state_and_last_known_values_are_told_and_not_restored_unasked(
    quick: Run, data: Path, tmp_path: Path
) -> None:
    """What the node remembers, and the newest fact of each kind, count as much as the facts themselves."""
    (data / "node").mkdir(exist_ok=True)
    record = encode(Record({"gate": "held"}))
    (data / "node" / "state.journal").write_bytes(record[:-1] + bytes([record[-1] ^ 1]) + record)
    log = folders.log_path(data)
    write_latest(DiskFiles(log), ".", EntryBatch.empty())
    folders.flip(next(path for path in log.iterdir() if path.name.startswith("latest")), -20)
    made = quick("backup", tmp_path / "b", "--data", data, "--json")
    lacking = [each["where"] for each in made.json()["problems"] if "not in the backup" in each["detail"]]
    assert (made.code, len(lacking)) == (1, 2)
    assert "node/state.journal" in lacking and "streams/" in max(lacking)
    refused = quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned", "--json")
    assert (refused.code, refused.json()["code"]) == (1, "log_damaged")
    restored = quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned", "--accept-damage", "--json")
    assert restored.code == 0 and not restored.json()["sound"]
    assert sorted(each.partition(": ")[0] for each in restored.json()["damage"]) == sorted(lacking)
    # What was wrong with the source is not wrong with what was made of it: it is there, or it is not.
    assert quick("verify", tmp_path / "new").code == 0
    sound = quick("restore", _sound(quick, tmp_path), tmp_path / "well", "--accept-unsigned", "--json")
    assert (sound.json()["sound"], sound.json()["damage"]) == (True, [])


def _sound(quick: Run, tmp_path: Path) -> Path:
    folders.make(tmp_path / "whole")
    quick("backup", tmp_path / "w", "--data", tmp_path / "whole")
    return tmp_path / "w"


def test_a_backup_that_was_altered_is_noticed(quick: Run, zone: Zone, tmp_path: Path) -> None:
    """A flipped bit, a lost artifact byte, or another log in its place: a restore refuses them all."""
    quick("backup", tmp_path / "good", "--config", config_of(zone))

    def flip(backup: Path) -> None:
        folders.flip(next((backup / "data").rglob("*.seg")), -300)

    def cut(backup: Path) -> None:
        content = next(path for path in (backup / "artifacts" / "content").rglob("*") if path.is_file())
        content.write_bytes(content.read_bytes()[:-1])

    def exchange(backup: Path) -> None:
        shutil.rmtree(backup / "data")
        folders.make(backup / "data")

    for harm, said in ((flip, "the backup is damaged"), (cut, "the backup is damaged"), (exchange, "backup_untrusted")):
        bad = Path(shutil.copytree(tmp_path / "good", tmp_path / harm.__name__))
        harm(bad)
        outcome = quick("restore", bad, tmp_path / "new", "--ca", authority_of(zone), "--take-config")
        assert outcome.code == 1 and said in outcome.err, harm.__name__
    assert not (tmp_path / "new").exists()


def test_without_verifying(quick: Run, data: Path, tmp_path: Path) -> None:
    """--no-verify says that nobody has looked; a restore looks all the same."""
    outcome = quick("backup", tmp_path / "b", "--data", data, "--no-verify")
    assert outcome.code == 0 and "not verified" in outcome.out
    assert quick("restore", tmp_path / "b", tmp_path / "new", "--accept-unsigned").code == 0


def test_what_is_no_backup(quick: Run, data: Path, tmp_path: Path) -> None:
    """A folder without backup.json, a damaged one and one of a later version are told apart."""
    assert "not complete" in quick("restore", data, tmp_path / "new").err
    quick("backup", tmp_path / "b", "--data", data)
    manifest = tmp_path / "b" / "backup.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 9'))
    assert quick("restore", tmp_path / "b", tmp_path / "new").err.startswith("error[format_unsupported]")
    manifest.write_text(text[:100])
    assert "backup.json is damaged" in quick("restore", tmp_path / "b", tmp_path / "new").err
    assert "not complete" in quick("backup", tmp_path / "c", "--data", data, "--base", data).err
    assert quick("backup", tmp_path / "c", "--data", tmp_path).err.startswith("error[not_a_data_folder]")


def test_unchanged_files_are_linked_to_an_earlier_backup(quick: Run, data: Path, tmp_path: Path) -> None:
    """With --base sealed segments take no room again, and the new backup does not need the old one."""
    quick("backup", tmp_path / "one", "--data", data)
    asyncio.run(folders.append_more(data))
    assert quick("backup", tmp_path / "two", "--data", data, "--base", tmp_path / "one").code == 0
    segments = folders.segments(tmp_path / "two" / "data")
    shared = [path for path in segments if path.stat().st_nlink == 2]
    assert len(shared) >= len(folders.segments(tmp_path / "one" / "data")) - 1 > 0
    assert segments[-1] not in shared
    shutil.rmtree(tmp_path / "one")
    assert quick("verify", tmp_path / "two" / "data").code == 0


def test_a_base_of_another_zone_is_no_base(quick: Run, data: Path, tmp_path: Path) -> None:
    """Files of the same names and sizes are not taken from the backup of another log."""
    quick("backup", tmp_path / "one", "--data", data)
    folders.make(tmp_path / "other")
    made = quick("backup", tmp_path / "two", "--data", tmp_path / "other", "--base", tmp_path / "one", "--json")
    assert made.code == 0 and made.json()["sound"]
    assert all(path.stat().st_nlink == 1 for path in folders.segments(tmp_path / "two" / "data"))


def test_which_zone_must_be_said(quick: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zone.toml, --config or --data there is nothing to back up; with both there is too much."""
    monkeypatch.chdir(tmp_path)
    assert "there is no zone.toml here" in quick("backup", tmp_path / "b").err
    both = quick("backup", tmp_path / "b", "--data", data, "--config", "zone.toml")
    assert both.err.startswith("error[invalid_argument]")


def test_a_moved_folder_keeps_its_history(quick: Run, data: Path, tmp_path: Path) -> None:
    """With --moved the ids of the logs stay, and positions of before are still good."""
    quick("backup", tmp_path / "b", "--data", data)
    restored = quick("restore", tmp_path / "b", tmp_path / "new", "--moved", "--accept-unsigned", "--json").json()
    assert restored["logs"] == []
    marks = [orjson.loads(path.read_bytes()) for path in sorted((tmp_path / "new").rglob("log.json"))]
    assert marks == [orjson.loads(path.read_bytes()) for path in sorted(data.rglob("log.json"))]
