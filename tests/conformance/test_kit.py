"""The conformance kit notices what it is for: each broken storage fails the test that is named beside it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bsfg.frontier import Frontier
from bsfg.ports import Storage
from bsfg.retention import ConsumerStanding
from bsfg.stores.memory import MemoryStorage
from bsfg.stores.memory.buffers import MemoryBuffer, MemoryForwardBuffer
from bsfg.stores.memory.state import BufferState, Medium
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
    remove = BufferState.remove_before

    def remove_before(state: BufferState, offset: int, now_unix_ms: int) -> None:
        remove(state, offset, now_unix_ms)
        state.keys = {key: known for key, known in state.keys.items() if known.offset >= offset}

    patch.setattr(BufferState, "remove_before", remove_before)


def reuse_offsets_of_an_empty_buffer(patch: pytest.MonkeyPatch) -> None:
    opened = MemoryStorage.__init__

    def reopen(storage: MemoryStorage, **settings: Any) -> None:
        opened(storage, **settings)
        for state in storage.medium.buffers.values():
            if not state.blocks:
                state.start = state.end = 0

    patch.setattr(MemoryStorage, "__init__", reopen)


def show_before_durable(patch: pytest.MonkeyPatch) -> None:
    write = Medium.write

    async def early(medium: Medium, writer: Any, change: Callable[[], None]) -> None:
        change()
        await write(medium, writer, lambda: None)

    patch.setattr(Medium, "write", early)


def write_without_a_lock(patch: pytest.MonkeyPatch) -> None:
    class NoLock:
        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...

    patch.setattr("bsfg.stores.memory.storage.asyncio", SimpleNamespace(Lock=NoLock))


def truncate_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryBuffer, "_standing", lambda buffer: ConsumerStanding(buffer._state.end - 1))


def keep_silent_about_truncation(patch: pytest.MonkeyPatch) -> None:
    frame = BufferState.frame
    patch.setattr(BufferState, "frame", lambda state, at, stop, most: frame(state, max(at, state.start), stop, most))


def jump_over_missing_confirmations(patch: pytest.MonkeyPatch) -> None:
    def confirm(frontier: Frontier, ranges: Any) -> bool:
        return frontier.confirm_through(max([-1, *(last for _, last in ranges)]))

    patch.setattr(Frontier, "confirm", confirm)


def drop_conflicts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryForwardBuffer, "quarantines_conflicts", False)


def sleep_through_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("bsfg.testing.conformance.storage.LONG_SECONDS", 0.05)
    patch.setattr(MemoryBuffer, "wake", lambda buffer: None)


BROKEN: list[tuple[type[StorageCase], str, Break]] = [
    (Store, "test_repeats_after_truncation", forget_truncated_keys),
    (RandomRun, "test_random_operations_agree_with_a_naive_model", forget_truncated_keys),
    (Store, "test_offsets_are_never_reused", reuse_offsets_of_an_empty_buffer),
    (Held, "test_nothing_is_visible_before_it_is_durable", show_before_durable),
    (Held, "test_nothing_is_visible_before_it_is_durable", write_without_a_lock),
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
