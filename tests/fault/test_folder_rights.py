"""What a node stores is made for its own account, and for its group only where that is wanted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bsfg.disk import ACCESS
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import batch


@pytest.fixture(autouse=True)
def loose_umask() -> Iterator[None]:
    """Let the process be careless: what counts is what the storage itself asks for."""
    before, modes = os.umask(0), vars(ACCESS).copy()
    yield
    os.umask(before)
    vars(ACCESS).update(modes)


async def _filled(folder: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"content"

    storage = await LogStorage.open(folder / "zone" / "data")
    await (await storage.store("operational")).append(batch(3))
    artifacts = await ArtifactFolder.open(folder / "zone" / "data" / "artifacts")
    await artifacts.put("b", "k", pieces())
    await artifacts.close()
    await storage.close()


def _modes(folder: Path) -> tuple[set[int], set[int]]:
    """Give the rights of all folders and of all files, without the right of the owner to write."""
    found = [folder, *folder.rglob("*")]
    folders = {each.stat().st_mode & 0o577 for each in found if each.is_dir()}
    files = {each.stat().st_mode & 0o577 for each in found if not each.is_dir()}
    return folders, files


@pytest.mark.parametrize(("group", "folder_mode", "file_mode"), [(False, 0o500, 0o400), (True, 0o550, 0o440)])
def test_the_rights_of_what_is_stored(tmp_path: Path, group: bool, folder_mode: int, file_mode: int) -> None:
    """Every folder and every file has the rights that are configured, whatever the process would give."""
    if group:
        ACCESS.let_group_read()
    asyncio.run(_filled(tmp_path))
    assert _modes(tmp_path / "zone") == ({folder_mode}, {file_mode})


def test_a_folder_that_is_there_keeps_its_rights(tmp_path: Path) -> None:
    """An administrator who made the folder has decided who may look into it."""
    data = tmp_path / "zone" / "data"
    data.mkdir(parents=True)
    data.chmod(0o755)
    asyncio.run(_filled(tmp_path))
    assert data.stat().st_mode & 0o777 == 0o755
