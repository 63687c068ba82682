"""What a storage in memory keeps, and the one door through which it changes; tests can hold or break it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from uuid import uuid4

from bsfg.errors import DiskFull, OutcomeUnknown, StorageClosed, StorageFailed
from bsfg.frontier import Frontier
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.stores.memory.state import BufferState


class Fault(StrEnum):
    """How a medium can fail."""

    NO_SPACE = "no_space"
    SYNC_FAILS = "sync_fails"
    IO_ERROR = "io_error"


@dataclass(slots=True)
class ConsumerRecord:
    """What is kept of a consumer."""

    spec: ConsumerSpec
    frontier: Frontier
    log_id: str
    created_unix_ms: int
    retired_reason: str | None = None
    peer_head: bytes | None = None


class Writer(Protocol):
    """A storage that writes to a medium."""

    def abandon(self) -> None:
        """Stop, because another storage writes now."""
        ...


class Medium:
    """The retained state of a storage, as a disk is: it stays when the storage is closed or abandoned.

    One storage writes to it at a time; a new one takes it over, as after a crash. Every change goes through `write`,
    so that nothing can be seen before it is kept.
    """

    def __init__(self, *, new_log_id: Callable[[], str] = lambda: uuid4().hex) -> None:
        self.new_log_id = new_log_id
        self.hasher_name: str | None = None
        self.buffers: dict[tuple[str, Buffer], BufferState] = {}
        self.consumers: dict[str, ConsumerRecord] = {}
        self._writer: Writer | None = None
        self._fault: Fault | None = None
        self._kept = False
        self._released: asyncio.Event | None = None

    def take_over(self, writer: Writer) -> None:
        """Make a storage the one writer, in place of the one before."""
        if self._writer is not None:
            self._writer.abandon()
        self._writer = writer

    def fail_next(self, fault: Fault | str, *, kept: bool = False) -> None:
        """Make the next write fail; after a failed sync ``kept`` decides whether the change is there all the same."""
        self._fault, self._kept = Fault(fault), kept

    def hold(self) -> Callable[[], None]:
        """Make writes wait until the function that this gives is called."""
        self._released = released = asyncio.Event()

        def release() -> None:
            self._released = None
            released.set()

        return release

    async def write(self, writer: Writer, change: Callable[[], None]) -> None:
        """Make a change, or raise what the medium fails with."""
        while self._released is not None:
            await self._released.wait()
        if self._writer is not writer:
            raise StorageClosed("the storage was opened anew")
        fault, self._fault = self._fault, None
        if fault == Fault.NO_SPACE:
            raise DiskFull("the medium has no space left")
        if fault == Fault.IO_ERROR:
            raise StorageFailed("the medium reported an input/output error")
        if fault == Fault.SYNC_FAILS:
            if self._kept:
                change()
            raise OutcomeUnknown("syncing failed; the change may or may not be there")
        change()
