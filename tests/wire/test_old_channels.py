"""A connection that is renewed or closed ends the calls over the old one with an error that can be tried again."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from tests.wire.conftest import Sites

from bsfg.errors import PeerUnreachable
from bsfg.journey.link import FetchRequest
from bsfg.wire import connection as connections
from bsfg.wire.client import BoundaryClient
from bsfg.wire.service import ObjectInfo

WAITING = FetchRequest(wait_seconds=60)


async def never() -> AsyncIterator[bytes]:
    """Give content that does not come."""
    yield b"the beginning"
    await asyncio.Event().wait()


async def followed(client: BoundaryClient) -> Any:
    """Ask again and again over one call, as links do."""
    return await client.fetch("historian", WAITING)


async def uploaded(client: BoundaryClient) -> Any:
    """Upload what takes long."""
    return await client.put_object(ObjectInfo("b", "k", "text/plain", None), never())


@pytest.mark.parametrize("call", [followed, uploaded])
@pytest.mark.parametrize("end", ["renewed", "closed"])
async def test_a_call_under_way_is_told(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, call: Callable[[BoundaryClient], Coroutine[Any, Any, Any]], end: str
) -> None:
    """It is an error of the connection, and not the cancellation of whoever waits: that would end his loop unheard."""
    monkeypatch.setattr(connections, "OLD_CHANNEL_SECONDS", 0)
    site = await sites()
    await site.consumer("historian")
    client = site.client()
    waiting = asyncio.create_task(call(client))
    await asyncio.wait([waiting], timeout=1)
    assert not waiting.done()
    if end == "renewed":
        client.connection.reconnect()
        assert await client.connection.check_health()
    else:
        await client.connection.close()
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(waiting, 60)
