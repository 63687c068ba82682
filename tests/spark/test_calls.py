"""Calls from Spark's Python processes: whoever iterates is always told how it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.wire.site import CONFIG

from bsfg.config import parse
from bsfg.errors import FrameInvalid, PeerUnreachable, TimedOut
from bsfg.journey.link import Fetched
from bsfg.ports import Confirmation, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.spark import calls as module
from bsfg.spark.calls import BufferSource, NodeAccess, NodeCalls
from bsfg.spark.replicate.plan import plan_of
from bsfg.wire.client import BoundaryClient
from bsfg.wire.messages import BOUNDARY_SERVICE


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


@pytest.mark.parametrize(("first", "last"), [(10, 9), (10, 3), (10, 30), (10, 1 << 60), (9, 12)])
def test_frames_go_forward_and_not_beyond_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    """A node that gives frames of nothing would be read for ever, one of too much would tell of what is not there."""

    async def answers(*asked: object) -> AsyncIterator[Fetched | Frame]:
        yield Fetched("log", 10, 100, b"")
        for _ in range(3):
            yield Frame(first, last, gap=GapRecord(first, last, GapReason.EXPIRED, 1))

    monkeypatch.setattr(module, "_messages", answers)
    source = BufferSource(NodeAccess("127.0.0.1:1"), "operational", "store", 0.0)
    frames = source.frames(10, 30, "log")
    with pytest.raises(FrameInvalid, match="10 is expected next"):
        next(frames)


@pytest.mark.parametrize("is_peer", [True, False])
async def test_answers_of_another_zone_are_read_with_care(tmp_path: Path, is_peer: bool) -> None:
    """A sender that answers with far more fields than there are is not taken at its word by the live tasks either."""

    async def answered(request: bytes, context: object) -> bytes:
        return b"\x08\x01" * 100_000

    method = grpc.unary_unary_rpc_method_handler(answered)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(BOUNDARY_SERVICE, {"ConfirmReceipt": method})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    text = CONFIG.format(stream="").replace("127.0.0.1:9", f"127.0.0.1:{port}")
    plan = plan_of(parse(text, tmp_path / "zone.toml"), "from-enterprise", NodeAccess(f"127.0.0.1:{port}"), "me")
    connection = (plan.peer if is_peer else plan.own).connect()
    try:
        confirming = BoundaryClient(connection).confirm("plant.operational", Confirmation(through=1))
        if is_peer:
            with pytest.raises(FrameInvalid):
                await confirming
        else:
            assert await confirming == 1
    finally:
        await connection.close()
        await server.stop(None)
