"""Connections are bounded on both listeners, from the moment they are accepted, and below what the system allows."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until

from bsfg.errors import PeerUnreachable
from bsfg.ports import Result
from bsfg.testing.facts import message
from bsfg.wire.connections import Listening, connections_allowed
from bsfg.wire.limits import WireLimits

PORTS: dict[str, Callable[[Site], int]] = {
    "grpc": lambda site: site.listeners.grpc.port,
    "http": lambda site: site.listeners.http.port,
}


@pytest.mark.parametrize(
    ("descriptors", "allowed"), [(1 << 20, 1_000), (4_096, 1_000), (1_024, 384), (256, 64), (16, 4), (1, 1)]
)
def test_descriptors_are_kept_back(descriptors: int, allowed: int) -> None:
    """Both listeners together leave a quarter of all descriptors, or 256, or half, to the rest of the node."""
    assert connections_allowed(WireLimits(), descriptors) == allowed


def is_closed(connection: socket.socket) -> bool:
    """Tell whether the other side has ended a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("listener", PORTS)
@pytest.mark.parametrize("tls", [False, True])
async def test_silent_connections_too_many_are_closed(sites: Sites, listener: str, tls: bool) -> None:
    """Beyond the limit a connection is closed at once; whoever was there before works on, later comers find room."""
    site = await sites(tls=tls, connections=8)
    client = site.client()
    assert (await client.append_fact(STREAM, message("before"))).result == Result.INSERTED
    port = PORTS[listener](site)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        # One address may have half of all HTTP connections; gRPC knows no addresses, and one place is the client's.
        kept = 4 if listener == "http" else 8 - 1
        await until(lambda: sum(is_closed(each) for each in silent) >= 40 - kept)
        assert (await client.append_fact(STREAM, message("during"))).result == Result.INSERTED
    finally:
        for each in silent:
            each.close()

    await client.close()
    found: set[object] = set()
    # The node hears of closed connections in its own time.
    while not {200, Result.INSERTED} <= found:
        with suppress(OSError, PeerUnreachable):
            found.add((await site.http("GET", "/healthz")).status)
            found.add((await site.client().append_fact(STREAM, message("after"))).result)


def test_a_connection_counts_until_it_is_closed() -> None:
    """Places are given back once, however often somebody closes."""
    listening = Listening(socket.create_server(("127.0.0.1", 0)), 4)
    address = listening.getsockname()
    callers = [socket.create_connection(address) for _ in range(3)]
    first, _ = listening.accept()
    second, _ = listening.accept()
    listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        listening.accept()
    assert (listening.open, is_closed(callers[2])) == (2, True)
    first.close()
    first.close()
    assert listening.open == 1
    callers.append(socket.create_connection(address))
    third, _ = listening.accept()
    assert listening.open == 2
    for each in (second, third, listening, *callers):
        each.close()


def test_no_descriptor_is_said_once_and_then_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener without a descriptor fails once in a while, and not as often as somebody tries."""
    listening = Listening(socket.create_server(("127.0.0.1", 0)), 4)
    listening.setblocking(False)
    caller = socket.create_connection(listening.getsockname())

    def no_more(self: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            listening.accept()
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                listening.accept()
    listening._pause_ends = 0.0
    accepted, _ = listening.accept()
    for each in (accepted, listening, caller):
        each.close()


async def test_calls_beyond_those_of_a_connection_wait(sites: Sites) -> None:
    """A hundred appends at once, where a connection may have eight, are all taken; nobody is told of a node gone."""
    site = await sites(concurrent_per_identity=8)
    client = site.client()
    answers = await asyncio.gather(*(client.append_fact(STREAM, message(f"at-once-{n}")) for n in range(100)))
    assert {answer.result for answer in answers} == {Result.INSERTED}
    assert len({answer.offset for answer in answers}) == 100
