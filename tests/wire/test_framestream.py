"""Streams that a node ends because it needs the room: what was on its way goes into another call, in its order."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.e2e.zones import until
from tests.wire.conftest import Sites
from tests.wire.site import STREAM
from tests.wire.test_conversation import Opened

from bsfg.batch import FactBatch
from bsfg.errors import PeerUnreachable
from bsfg.testing.facts import messages
from bsfg.wire import limits
from bsfg.wire.client import BoundaryClient
from bsfg.wire.connection import CALLS_IN_VAIN, Connection
from bsfg.wire.limits import Awaited, WireLimits
from bsfg.wire.streams import PAUSE_SECONDS

PRODUCERS, FRAMES = 60, 12


def frame(producer: int, number: int) -> FactBatch:
    """Make the frame with a number that a producer sends."""
    return FactBatch.from_messages(messages(3, first=3 * (producer * FRAMES + number)))


async def test_more_streams_than_there_is_room_for(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty streams where three may be awaited: no frame fails, none is stored twice, each stream is in order."""
    monkeypatch.setattr(WireLimits, "awaited_messages", 3)
    # Nobody's messages are given a moment to come, so that many are on their way to a call that ends.
    monkeypatch.setattr(limits, "MOMENT_SECONDS", 0.0)
    site = await sites()
    clients = [site.client() for _ in range(PRODUCERS)]
    opened = [Opened(client) for client in clients]
    streams = [client.append_stream(STREAM) for client in clients]

    async def produce(producer: int) -> list[int]:
        offsets: list[int] = []
        for number in range(0, FRAMES, 3):
            sent = [await streams[producer].send(frame(producer, number + more)) for more in range(3)]
            for answer in await asyncio.gather(*sent):
                offsets.extend(int(each) for each in answer.receipt.offsets)
        await streams[producer].close()
        return offsets

    offsets = await asyncio.gather(*(produce(producer) for producer in range(PRODUCERS)))
    assert all(each == sorted(each) for each in offsets)
    assert sorted(each for one in offsets for each in one) == list(range(PRODUCERS * FRAMES * 3))
    assert sum(map(len, opened)) > PRODUCERS, "no stream was ended while frames were on their way"


async def test_a_node_that_takes_nothing_is_given_up(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that ends call after call in peace is unreachable: nobody tries for ever, nor without a pause."""

    def no_room(awaited: Awaited, owner: str, key: object, give_up: Callable[[], None]) -> bool:
        asyncio.get_running_loop().call_soon(give_up)
        return True

    monkeypatch.setattr(Awaited, "is_begun", no_room)
    site = await sites()
    client = site.client()
    opened = Opened(client)
    stream = client.append_stream(STREAM)
    begun = time.monotonic()
    with pytest.raises(PeerUnreachable, match="ended the stream"):
        await stream.append(frame(0, 0))
    assert len(opened) == 1 + CALLS_IN_VAIN
    assert time.monotonic() - begun > sum(PAUSE_SECONDS * 2**number / 2 for number in range(1, CALLS_IN_VAIN - 1))
    assert not stream.is_open
    await stream.close()


@pytest.mark.parametrize("what", ["send", "close"])
async def test_nobody_waits_for_a_stream_whose_connection_is_closed_in_a_pause(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Between two calls that took nothing the line is kept; when no other call can be begun it is given back."""

    def no_room(awaited: Awaited, owner: str, key: object, give_up: Callable[[], None]) -> bool:
        asyncio.get_running_loop().call_soon(give_up)
        return True

    monkeypatch.setattr(Awaited, "is_begun", no_room)
    client = (await sites()).client()
    stream = client.append_stream(STREAM)
    first = await stream.send(frame(0, 0))
    await until(lambda: stream._in_vain.failures > 3)
    waiting = asyncio.ensure_future(stream.send(frame(0, 1)) if what == "send" else stream.close())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await client.connection.close()
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(first, 10)
    with suppress(PeerUnreachable):
        await asyncio.wait_for(waiting, 10)


async def test_a_connection_that_is_closed_here_cancels_nobody() -> None:
    """Whoever is sending when the connection is closed here is told so, and does not take it for his own end."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = BoundaryClient(Connection(f"127.0.0.1:{silent.getsockname()[1]}"))
        sending = asyncio.ensure_future(client.append_stream(STREAM).append(frame(0, 0)))
        await asyncio.sleep(0.1)
        await client.connection.close()
        with pytest.raises(PeerUnreachable, match="closed here"):
            await sending


async def test_the_first_of_several_addresses_that_serves_is_found(sites: Sites) -> None:
    """Nobody listens at the first address: what is sent again soon arrives at the second."""
    site = await sites()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody.getsockname()[1]},{site.client().connection.address}"
        async with BoundaryClient(Connection(where)) as client:
            for _ in range(300):
                with suppress(PeerUnreachable):
                    assert (await client.append(STREAM, frame(0, 0))).receipt.offsets.tolist() == [0, 1, 2]
                    break
                await asyncio.sleep(0.1)
            assert client.connection.address == where.split(",")[1]
