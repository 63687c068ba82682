"""Calls from Spark's Python processes: whoever iterates is always told how it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from bsfg.errors import PeerUnreachable, TimedOut
from bsfg.spark import calls as module
from bsfg.spark.calls import NodeAccess, NodeCalls


async def numbers(end: BaseException | None = None) -> AsyncIterator[int]:
    """Give two numbers, and then end in some way."""
    yield 1
    yield 2
    if end is not None:
        raise end


@pytest.mark.parametrize(
    ("end", "told"),
    [(TimedOut("late"), TimedOut), (asyncio.CancelledError(), PeerUnreachable)],
    ids=["error", "cancelled"],
)
def test_an_iteration_ends_as_its_items_do(end: BaseException, told: type[BaseException]) -> None:
    """gRPC cancels the calls of a connection that is closed; a task would wait for ever for what comes next."""
    calls, answers = NodeCalls(), list[object]()

    def work() -> None:
        try:
            for each in calls.iterate(numbers(end)):
                answers.append(each)
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert [type(each) for each in answers] == [int, int, told]
    assert list(calls.iterate(numbers())) == [1, 2]


def test_whoever_stops_early_leaves_nothing_behind() -> None:
    """The items are closed when nobody asks for them any more."""
    calls, closed = NodeCalls(), threading.Event()

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    for _ in calls.iterate(endless()):
        break
    assert closed.wait(60)


def test_all_threads_of_a_process_have_the_same_calls_and_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that come first at the same moment share one loop, and one connection to a node."""
    made: list[object] = []

    class Slow(NodeCalls):
        """Takes a while to be made."""

        def __init__(self) -> None:
            time.sleep(0.05)
            super().__init__()
            made.append(self)

    def connect(access: NodeAccess) -> object:
        time.sleep(0.05)
        made.append(access)
        return object()

    monkeypatch.setattr(module, "NodeCalls", Slow)
    monkeypatch.setattr(module, "_of_process", {})
    monkeypatch.setattr(NodeAccess, "connect", connect)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(module.calls().connection(NodeAccess("127.0.0.1:1"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(made) == 2, "one loop, one connection"
    assert len({id(each) for each in found}) == 1
