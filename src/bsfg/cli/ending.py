"""Ending in order when the system asks for it: SIGTERM unwinds a command as Ctrl-C does, so that it can clean up."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")
EXIT_TERMINATED = 128 + signal.SIGTERM


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let SIGTERM end a block by an exception, with the exit code that a shell expects."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what a signal does
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine inside `orderly_end`; SIGTERM cancels it, so that it is not torn apart in mid-step."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(EXIT_TERMINATED)
    finally:
        # The loop gave the signal back to the system when it closed.
        signal.signal(signal.SIGTERM, _end)
