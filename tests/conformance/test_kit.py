"""The conformance kit notices what it is for: each broken storage fails the test that is named beside it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bsfg.frontier import Frontier
from bsfg.ports import Buffer, Storage
from bsfg.retention import ConsumerStanding
from bsfg.stores import memory
from bsfg.stores.memory import Medium, MemoryStorage, RetainedBuffer
from bsfg.stores.shared.buffer import SharedBuffer
from bsfg.stores.shared.framed import FramedWriter
from bsfg.stores.shared.keeper import Change
from bsfg.testing.conformance import (
    CursorTrackerContract,
    ForwardBufferContract,
    HeldMediumContract,
    RandomOperationsContract,
    StorageCase,
    StorageContract,
    StoreBufferContract,
)

Break = Callable[[pytest.MonkeyPatch], None]


class MemoryCase(StorageCase):
    async def make(self, tmp_path: Path, *, clock: Any, hasher: Any) -> Storage:
        return MemoryStorage(clock=clock, hasher=hasher)

    async def reopen(self, storage: Any) -> Storage:
        return MemoryStorage(clock=storage.clock, hasher=storage.hasher, medium=storage.medium)

    def hold_medium(self, storage: Any) -> Callable[[], None]:
        release: Callable[[], None] = storage.medium.hold()
        return release


class Store(MemoryCase, StoreBufferContract):
    pass


class Forward(MemoryCase, ForwardBufferContract):
    pass


class Cursors(MemoryCase, CursorTrackerContract):
    pass


class Whole(MemoryCase, StorageContract):
    pass


class Held(MemoryCase, HeldMediumContract):
    pass


class RandomRun(MemoryCase, RandomOperationsContract):
    pass


def forget_truncated_keys(patch: pytest.MonkeyPatch) -> None:
    make = memory._make

    def forgetful(kept: RetainedBuffer, change: Change) -> None:
        make(kept, change)
        kept.keys = {hashed: ats for hashed, ats in kept.keys.items() if ats[-1] >= kept.head.start}

    patch.setattr(memory, "_make", forgetful)


def reuse_offsets_of_an_empty_buffer(patch: pytest.MonkeyPatch) -> None:
    claim = memory.MemoryZone.claim

    def begin_anew(zone: memory.MemoryZone, name: str, hasher: str) -> list[tuple[str, Buffer]]:
        for kept in zone.medium.buffers.values():
            if not kept.frames:
                kept.head = kept.head._replace(start=0, end=0)
        return claim(zone, name, hasher)

    patch.setattr(memory.MemoryZone, "claim", begin_anew)


def show_before_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Medium, "later", lambda medium, work: asyncio.get_running_loop().call_soon(work))


def look_for_no_repeats(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FramedWriter, "_candidates", lambda writer, ranked: (np.zeros(0, dtype=int), np.zeros(0, dtype=int)))


def truncate_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedBuffer, "_standing", lambda buffer: ConsumerStanding(buffer.end - 1))


def keep_silent_about_truncation(patch: pytest.MonkeyPatch) -> None:
    page = FramedWriter.page
    silent = lambda writer, at, *given, **how: page(writer, max(at, writer.start), *given, **how)  # noqa: E731
    patch.setattr(FramedWriter, "page", silent)


def jump_over_missing_confirmations(patch: pytest.MonkeyPatch) -> None:
    def confirm(frontier: Frontier, ranges: Any) -> bool:
        return frontier.confirm_through(max([-1, *(last for _, last in ranges)]))

    patch.setattr(Frontier, "confirm", confirm)


def drop_conflicts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("bsfg.stores.shared.framed.refused_of", lambda *found, **how: [])


def sleep_through_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("bsfg.testing.conformance.storage.LONG_SECONDS", 0.05)
    patch.setattr(SharedBuffer, "close", lambda buffer: buffer._committer.close())


BROKEN: list[tuple[type[StorageCase], str, Break]] = [
    (Store, "test_repeats_after_truncation", forget_truncated_keys),
    (RandomRun, "test_random_operations_agree_with_a_naive_model", forget_truncated_keys),
    (Store, "test_offsets_are_never_reused", reuse_offsets_of_an_empty_buffer),
    (Held, "test_nothing_is_visible_before_it_is_durable", show_before_durable),
    (Store, "test_repeats_are_answered_with_the_first_offset", look_for_no_repeats),
    (Store, "test_truncation_past_the_frontier_is_refused", truncate_anything),
    (Store, "test_without_a_required_consumer_nothing_is_truncated", truncate_anything),
    (Store, "test_truncated_ranges_are_gap_records", keep_silent_about_truncation),
    (Cursors, "test_the_frontier_stops_at_the_first_gap", jump_over_missing_confirmations),
    (Forward, "test_conflicts_are_quarantined", drop_conflicts),
    (Whole, "test_closing_wakes_those_who_wait", sleep_through_the_end),
]


@pytest.mark.parametrize(
    ("contract", "test", "broken"), BROKEN, ids=[f"{broken.__name__}-{test}" for _, test, broken in BROKEN]
)
def test_a_broken_storage_fails(
    contract: type[StorageCase], test: str, broken: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that breaks a promise fails the test of that promise."""
    sound, unsound = tmp_path / "sound", tmp_path / "unsound"
    sound.mkdir()
    unsound.mkdir()
    getattr(contract(), test)(sound)
    broken(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(contract(), test)(unsound)
