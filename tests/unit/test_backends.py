"""A zone's storage is chosen by its configuration, and what it cannot do is refused in words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from bsfg.clock import SystemClock
from bsfg.config import ZoneConfig, load, parse
from bsfg.errors import ConfigInvalid, FolderLocked, StorageUnable
from bsfg.node.backends import lock_folder, open_storage
from bsfg.node.backup import ZonePlace
from bsfg.ports import Storage
from bsfg.testing.facts import batch

FILE = """
[zone]
name = "plant-a"
[listen]
plaintext = true
plaintext_identity = "tester"
grpc = "127.0.0.1:9443"
http = "127.0.0.1:9444"
[identities.tester]
zone = "plant-a"
roles = ["operator"]
streams = ["*"]
[streams.operational]
"""

SHELF = """
from bsfg.ports import Capabilities
from bsfg.stores.memory import MemoryStorage

async def opened(request):
    storage = MemoryStorage(clock=request.clock)
    storage.capabilities = Capabilities("shelf", durable=request.options["shelf"] == "oak")
    return storage
"""


def config_of(folder: Path, more: str) -> ZoneConfig:
    """Give the configuration of a zone in a folder."""
    (folder / "zone.toml").write_text(FILE + more)
    return load(folder / "zone.toml")


def opened(config: ZoneConfig) -> Storage:
    """Open the storage of a zone, use it, and give it closed."""

    async def run() -> Storage:
        storage = await open_storage(config, SystemClock(), lambda seconds: None)
        assert (await (await storage.store("operational")).append(batch(2))).offsets.tolist() == [0, 1]
        await storage.close()
        return storage

    return asyncio.run(run())


def problems(more: str) -> list[str]:
    """Give what is wrong with a file."""
    with pytest.raises(ConfigInvalid) as caught:
        parse(FILE + more)
    return [f"{each['key']}: {each['problem']}" for each in caught.value.details["problems"]]


def test_the_log_is_what_is_chosen_by_nothing(tmp_path: Path) -> None:
    """Without a word about it, and by its name, the embedded log keeps the facts."""
    for more in ("", '[storage]\nbackend = "log"'):
        folder = tmp_path / (more[-5:-1] or "none")
        folder.mkdir()
        found = opened(config_of(folder, more))
        assert found.capabilities.backend == "log" and found.capabilities.folder_backup


def test_memory_says_that_it_forgets(tmp_path: Path) -> None:
    """A zone in memory can be opened, and says what becomes of its facts."""
    assert not opened(config_of(tmp_path, '[storage]\nbackend = "memory"')).capabilities.durable


def test_another_package_brings_a_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that an installed package names is opened with its own options."""
    site = tmp_path / "site"
    (site / "shelf-1.0.dist-info").mkdir(parents=True)
    (site / "shelf-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (site / "shelf-1.0.dist-info" / "entry_points.txt").write_text("[bsfg.backends]\nshelf = bsfg_shelf:opened\n")
    (site / "bsfg_shelf.py").write_text(SHELF)
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    config = config_of(tmp_path, '[storage]\nbackend = "shelf"\n[storage.options]\nshelf = "oak"')
    found = opened(config)
    assert (found.capabilities.backend, found.capabilities.durable) == ("shelf", True)
    with pytest.raises(StorageUnable):
        ZonePlace.of(config)


def test_what_contradicts_itself_is_refused() -> None:
    """An unknown storage, one without its address, and settings that nobody would read are problems of the file."""
    assert problems('[storage]\nbackend = "postgress"')[0].startswith("storage.backend: no package")
    assert problems('[storage]\nbackend = "postgres"') == [
        "storage.postgres: dsn is missing: it says how the server is reached"
    ]
    assert problems('[storage.postgres]\ndsn = "host=db"')[0].startswith("storage.postgres.dsn: has an effect only")
    assert problems('[storage]\nbackend = "jetstream"') == [
        "storage.jetstream: servers is missing: it says how the servers are reached"
    ]
    servers = '[storage.jetstream]\nservers = ["nats://127.0.0.1:4222"]'
    assert problems(servers)[0].startswith("storage.jetstream.servers: has an effect only")
    found = problems('[storage]\nbackend = "jetstream"\n[storage.jetstream]\nservers = ["here"]')
    assert any("NATS address" in each for each in found)
    assert problems("[storage.options]\nx = 1")[0].startswith("storage.options: is for storages of other")
    (unknown,) = problems('[storage]\nbackend = "postgres"\n[storage.postgres]\ndsn = "x"\nschemas = "y"')
    assert unknown.startswith("storage.postgres.schemas: unknown key; did you mean") or "schema" in unknown
    (wrong,) = problems('[storage]\nbackend = "postgres"\n[storage.postgres]\ndsn = "x"\nschema = "A b"')
    assert "schema name" in wrong


def test_a_log_is_not_left_behind(tmp_path: Path) -> None:
    """A zone whose folder holds an embedded log does not begin anew elsewhere without a word."""
    opened(config_of(tmp_path, ""))
    with pytest.raises(ConfigInvalid) as caught:
        opened(config_of(tmp_path, '[storage]\nbackend = "memory"'))
    assert "data_folder" in caught.value.hint


def test_one_node_has_the_folder(tmp_path: Path) -> None:
    """The folder of a zone whose facts are elsewhere has one node as well."""
    release = lock_folder(tmp_path / "data")
    with pytest.raises(FolderLocked):
        lock_folder(tmp_path / "data")
    release()
    lock_folder(tmp_path / "data")()
