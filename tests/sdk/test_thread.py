"""The loop thread of blocking programs: nobody waits for ever for one that ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bsfg.errors import StorageClosed
from bsfg.sdk.thread import LoopThread

SOON_SECONDS = 60


def test_a_call_that_comes_while_the_loop_is_told_to_stop_is_answered() -> None:
    """It was queued behind the stop, and would wait for ever."""
    thread, blocked, go_on = LoopThread("test"), threading.Event(), threading.Event()
    answers: list[BaseException] = []

    def block() -> None:
        blocked.set()
        go_on.wait(SOON_SECONDS)

    def call() -> None:
        try:
            thread.run(asyncio.Event().wait())
        except BaseException as error:
            answers.append(error)

    thread.loop.call_soon_threadsafe(block)
    assert blocked.wait(SOON_SECONDS)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    while not thread.loop._ready:  # type: ignore[attr-defined]
        pass
    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    while len(thread.loop._ready) < 2:  # type: ignore[attr-defined]
        pass
    go_on.set()
    calling.join(SOON_SECONDS)
    stopping.join(SOON_SECONDS)
    assert [type(each) for each in answers] == [StorageClosed]
    with pytest.raises(StorageClosed):
        thread.run(asyncio.sleep(0))
