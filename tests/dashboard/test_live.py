"""The events of the dashboard over a real connection: bounded, quick, and no burden when somebody is slow."""

import asyncio
import json
import ssl
from typing import Any

import pytest
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import Stage

from bsfg.errors import StorageFailed
from bsfg.node.dashboard.feed import WAITING_MAX, event
from bsfg.testing.facts import batch


class Watching:
    """A browser's end of the events, read by hand."""

    def __init__(self, stage: Stage, headers: dict[str, str]) -> None:
        self._stage, self._headers = stage, headers

    async def __aenter__(self) -> "Watching":
        port = self._stage.node.http_port
        context: ssl.SSLContext = self._stage.context(None)
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1 << 24)
        head = ("GET /dashboard/api/events HTTP/1.1", f"host: 127.0.0.1:{port}", f"cookie: {self._headers['cookie']}")
        self.writer.write("\r\n".join((*head, "", "")).encode())
        answer = await self.reader.readuntil(b"\r\n\r\n")
        self.status = int(answer.split()[1])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.writer.transport.abort()

    async def next(self) -> tuple[str, Any]:
        """Give the next event."""
        name = await self._line("event: ")
        return name, json.loads(await self._line("data: "))

    async def _line(self, prefix: str) -> str:
        while True:
            line = (await self.reader.readuntil(b"\n")).decode()
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()


async def test_the_first_event_has_the_history_and_what_follows_is_live(stages: Stages) -> None:
    """Whoever begins to watch gets the last hour at once, and then what happens, in the shape of the status."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    async with Watching(stage, headers) as watching:
        name, hello = await watching.next()
        assert (watching.status, name, hello["state"]["zone"]) == (200, "hello", "plant-a")
        assert len(hello["history"]["times"]) >= 1
        await (await stage.node.parts.store("operational")).append(batch(7, from_zone="plant-a"))
        while True:
            name, seen = await watching.next()
            [store] = [each for each in seen["state"]["buffers"] if each["buffer"] == "store"]
            if store["end"] == 7:
                break
        assert name == "state"
        assert {"health", "findings", "certificates", "alerts", "links", "consumers"} <= set(seen["state"])
        assert {each["use"] for each in seen["state"]["certificates"]} == {"node", "authority", "caller"}


async def test_only_so_many_can_watch(stages: Stages) -> None:
    """One browser more than configured is told to come back; when one leaves there is room again."""
    stage = await stages(more="[dashboard]\nwatchers = 2\n")
    headers = await stage.sign_in("control-room")
    async with Watching(stage, headers) as first, Watching(stage, headers) as second:
        assert (first.status, second.status) == (200, 200)
        answer = await stage.ask("GET", "/dashboard/api/events", headers=headers)
        assert (answer.status, answer.json()["code"]) == (429, "overloaded")
    while True:
        async with Watching(stage, headers) as third:
            if third.status == 200:
                break


async def test_a_browser_that_does_not_read_is_cut_off(stages: Stages) -> None:
    """A connection that takes nothing is ended, without a delay for others and without memory that grows."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    async with Watching(stage, headers) as quick, Watching(stage, headers) as slow:
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        feed = stage.node_feed()
        big = event("state", json.dumps({"state": {"filler": "x" * 4_000_000}}).encode())
        sizes = []
        for _ in range(4 * WAITING_MAX):
            feed.publish(big)
            sizes.append(len(feed))
            while (await quick.next())[1].get("state", {}).get("filler") is None:
                pass
        assert sizes[0] == 2 and sizes[-1] == 1
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            while True:
                await slow.next()


async def test_a_node_whose_storage_fails_still_tells(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong while looking is an event of its own, and the watch goes on."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    async with Watching(stage, headers) as watching:
        await watching.next()

        async def fails() -> None:
            raise StorageFailed("the disk is gone")

        with monkeypatch.context() as broken:
            broken.setattr(stage.node.parts.storage, "streams", fails)
            while "trouble" not in (await watching.next())[1]["state"]:
                pass
        while "trouble" in (await watching.next())[1]["state"]:
            pass


async def test_a_node_stops_although_somebody_watches(stages: Stages) -> None:
    """Browsers that watch do not hold up the end of a node: their events end with it."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    async with Watching(stage, headers) as watching:
        await watching.next()
        async with asyncio.timeout(4):
            await stage.node.stop()
        assert (await watching.reader.read()).rstrip().endswith(b"0")
