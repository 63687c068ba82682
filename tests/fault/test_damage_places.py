"""Whatever stands in the place of a file or folder of a node, and whatever is lost of its journals, the node starts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from bsfg.gate import Gate, Mode
from bsfg.node.state import NodeState
from bsfg.ports import Confirmation, ConsumerSpec
from bsfg.stores.log.storage import CURSORS, LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.facts import batch

STREAM = "operational"
STATE = "node/state.journal"
OPTIONS = LogOptions(segment_bytes=16_384, index_run_keys=500, reserve_bytes=1 << 16)
COUNT = 1_000


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run one coroutine to its end."""
    return asyncio.run(work)


async def _fill(folder: Path) -> None:
    storage = await LogStorage.open(folder, options=OPTIONS)
    state = NodeState(folder, storage.reserve)
    store = await storage.store(STREAM)
    for first in range(0, COUNT, 100):
        await store.append(batch(100, first=first))
    await storage.cursors.create(ConsumerSpec("peer", STREAM))
    await storage.cursors.commit("peer", Confirmation(through=499))
    await store.truncate_before(300)
    state.keep_gate("link", "receiver", Gate(Mode.HELD, 1, "an operator said so", held_by="anna"))
    state.close()
    await storage.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything a node keeps, artifacts aside."""
    folder = tmp_path_factory.mktemp("places") / "data"
    run(_fill(folder))
    return folder


PLACES = [
    "LOCK", "bsfg.json", "reserve", "streams", "cursors", "node", CURSORS, STATE, f"{CURSORS}.new", f"{STATE}.new",
    "bsfg.json.new", f"streams/{STREAM}/store/keys", f"streams/{STREAM}/store/index", f"streams/{STREAM}/store/aside",
    f"streams/{STREAM}/store/quarantine", f"streams/{STREAM}/store/log.json", f"streams/{STREAM}/store/log.json.new",
    f"streams/{STREAM}/store/notes.journal", f"streams/{STREAM}/store/durable",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_something_else_in_the_place_of_a_file_or_folder_is_survived(whole: Path, tmp_path: Path, place: str) -> None:
    """A folder instead of a file, a file instead of a folder: it is moved away, and no offset is used again."""
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    path = folder / place
    if path.is_dir() or path.name in ("aside", "quarantine"):
        shutil.rmtree(path, ignore_errors=True)
        path.write_bytes(b"no folder")
    else:
        path.unlink(missing_ok=True)
        (path / "something").mkdir(parents=True)

    async def look() -> None:
        storage = await LogStorage.open(folder, options=OPTIONS)
        state = NodeState(folder, storage.reserve)
        store = await storage.store(STREAM)
        floor = 500 if place == "streams" else COUNT
        floor = 0 if place == "streams" and storage.cursors.are_lost else floor
        assert store.end >= floor
        assert (await store.append(batch(10, seed=7))).offsets.min() >= floor
        assert not storage.reserve.short
        if place != "streams":
            there = [offset async for frame in store.replay(300) if frame.entries for offset in frame.entries.offsets]
            assert set(range(300, COUNT)) <= set(there)
        problems = [*storage.problems, *state.problems, *store.problems]
        if path.name not in ("LOCK", "reserve", "durable") and path.suffix != ".new":  # which hold nothing
            assert any(place in text for text in problems), problems
        state.close()
        await storage.close()

    run(look())


def cut_to(count: int) -> Any:
    """Keep so many bytes."""
    return lambda path: path.write_bytes(path.read_bytes()[:count])


LOSSES = {
    "deleted": lambda path: path.unlink(),
    "cut to nothing": cut_to(0),
    "cut to a few bytes": cut_to(10),
    "garbage": lambda path: path.write_bytes(b"\x07garbage\xff" * 40),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("had", ["nothing", "something"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("journal", [CURSORS, STATE])
def test_a_journal_that_is_lost_is_noticed_however_it_was_lost(
    whole: Path, tmp_path: Path, journal: str, loss: str, had: str
) -> None:
    """Cursors and the state of the node are known to be lost, also where they held nothing, and only at that start."""
    folder = tmp_path / "data"

    async def look() -> tuple[bool, bool, list[str]]:
        storage = await LogStorage.open(folder, options=OPTIONS)
        state = NodeState(folder, storage.reserve)
        store = await storage.store(STREAM)
        await store.append(batch(1, seed=9))
        found = storage.cursors.are_lost, state.is_lost, [*storage.problems, *state.problems]
        if found[0]:
            with pytest.raises(Exception, match="confirmed"):
                await store.truncate_before(store.end)
        state.close()
        await storage.close()
        return found

    if had == "something":
        shutil.copytree(whole, folder)
    else:
        assert run(look()) == (False, False, [])
    LOSSES[loss](folder / journal)
    cursors, state, problems = run(look())
    assert (cursors, state) == (journal == CURSORS, journal == STATE)
    assert any(text.startswith(journal) for text in problems)
    assert run(look())[:2] == (False, False)


@pytest.mark.parametrize("journal", [CURSORS, STATE])
def test_an_empty_journal_of_an_earlier_version_is_a_beginning(tmp_path: Path, journal: str) -> None:
    """Folders that were made before journals had a beginning may have empty ones, and nothing is lost."""

    async def look() -> tuple[bool, bool]:
        storage = await LogStorage.open(tmp_path, options=OPTIONS)
        state = NodeState(tmp_path, storage.reserve)
        await (await storage.store(STREAM)).append(batch(1))
        found = storage.cursors.are_lost, state.is_lost
        state.close()
        await storage.close()
        return found

    assert run(look()) == (False, False)
    (tmp_path / journal).write_bytes(b"")
    (tmp_path / "bsfg.json").write_text('{"format": 1, "hasher": "sha256"}')
    assert run(look()) == (False, False)
    assert (tmp_path / journal).stat().st_size > 0
    (tmp_path / journal).write_bytes(b"")
    assert run(look()) == (journal == CURSORS, journal == STATE)
