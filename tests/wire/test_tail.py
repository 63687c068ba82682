"""Looking on over HTTP: what is shown, to whom, from where on, and that nobody else pays for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until

from bsfg.batch import FactBatch
from bsfg.cli.tail import _watched
from bsfg.journey import look
from bsfg.journey.link import Fetched
from bsfg.journey.look import FactChoice
from bsfg.node import tail
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.testing.facts import batch, message, messages

PATH = f"/v1/streams/{STREAM}/tail?buffer=store"


@dataclass
class Event:
    """One event as a browser takes it."""

    name: str
    data: Any
    id: str


@dataclass
class Looking:
    """A connection that is open, and what was read of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    rest: str = ""
    last_id: str = field(default="")

    async def event(self) -> Event:
        """Wait for the next event; a comment, or a place alone, is none."""
        while True:
            while "\n\n" not in self.rest:
                data = await self.reader.readuntil(b"\r\n")
                piece = await self.reader.readexactly(int(data, 16) + 2)
                assert piece != b"\r\n", "the stream has ended"
                self.rest += piece[:-2].decode()
            text, _, self.rest = self.rest.partition("\n\n")
            found = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
            self.last_id = found.get("id", self.last_id)
            if "data" in found:
                return Event(found["event"], json.loads(found["data"]), found.get("id", ""))

    async def events(self, count: int) -> list[Event]:
        """Wait for some events."""
        return [await self.event() for _ in range(count)]


@asynccontextmanager
async def looking(site: Site, path: str = PATH, **headers: str) -> AsyncIterator[Looking]:
    """Look on, as curl does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port, limit=1 << 20)
    lines = [f"GET {path} HTTP/1.1", "host: localhost", *(f"{name}: {text}" for name, text in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode())
    head = await reader.readuntil(b"\r\n\r\n")
    try:
        yield Looking(reader, writer, int(head.split()[1]))
    finally:
        writer.close()


async def appended(site: Site, count: int, prefix: int = 0) -> None:
    """Append some facts."""
    await site.client().append(STREAM, FactBatch.from_messages(messages(count, seed=prefix)))


def ended(body: bytes) -> list[tuple[str, Any]]:
    """Read the events of an answer that has ended."""
    found = []
    for text in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


async def test_the_newest_come_first_and_then_what_comes(sites: Sites) -> None:
    """The last so many facts are shown as entries with their ids, then each new one when it is durable."""
    site = await sites(storage="log")
    await appended(site, 30)
    async with looking(site, f"{PATH}&last=3") as shown:
        assert shown.status == 200
        events = await shown.events(3)
        assert [each.data["offset"] for each in events] == [27, 28, 29]
        assert events[0].data["fact"]["subject"]
        await site.client().append(STREAM, FactBatch.from_messages([message("late", value=7)]))
        late = await shown.event()
        assert (late.name, late.data["envelope"]["message_id"], late.data["offset"]) == ("fact", "late", 30)
        assert late.id.endswith(":30")
    await until(lambda: not len(site.listeners._tails))


async def test_filters_are_patterns(sites: Sites) -> None:
    """Only what fits is shown, however far back it is; the place goes on over what does not fit."""
    site = await sites(storage="log")
    wanted = [message("one", subject="pump:7", predicate="alarm_high"), message("two", subject="pump:8")]
    await site.client().append(STREAM, FactBatch.from_messages(wanted))
    await appended(site, 2_500)
    answer = await site.http("GET", f"{PATH}&subject=pump:*&predicate=alarm_*&follow=false")
    found = ended(answer.body)
    assert [(name, data.get("offset")) for name, data in found] == [("fact", 0), ("end", None)]
    assert found[-1][1]["next_offset"] == 2_502
    async with looking(site, f"{PATH}&from_zone=nobody") as shown:
        await until(lambda: bool(shown.reader._buffer))  # type: ignore[attr-defined]
        await site.client().append(STREAM, FactBatch.from_messages([message("x", subject="pump:7")]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shown.event(), 0.6)
        assert shown.last_id.endswith(":2501")


async def test_it_goes_on_behind_the_last_event(sites: Sites) -> None:
    """A browser that comes back with the last id misses nothing and sees nothing twice."""
    site = await sites(storage="log")
    await appended(site, 5)
    async with looking(site, f"{PATH}&last=2") as shown:
        last = (await shown.events(2))[-1].id
    await appended(site, 4, prefix=1)
    async with looking(site, PATH, **{"last-event-id": last}) as shown:
        assert [each.data["offset"] for each in await shown.events(4)] == [5, 6, 7, 8]
    found = ended((await site.http("GET", f"{PATH}&after={last}&follow=false")).body)
    assert [data.get("offset") for _, data in found] == [5, 6, 7, 8, None]


async def test_another_history_is_said_so(sites: Sites) -> None:
    """An id of another log, or of an offset that is not there, begins at the end with a word about it."""
    site = await sites(storage="log")
    await appended(site, 5)
    log_id = (await (await site.parts.store(STREAM)).stats()).log_id
    for seen in ("another:3", f"{log_id}:99"):
        found = ended((await site.http("GET", f"{PATH}&after={seen}&follow=false")).body)
        assert found == [("restored", {"next_offset": 5, "log_id": log_id}), ("end", {"next_offset": 5})], seen


async def test_who_is_behind_skips_and_is_told(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a bound the newest are shown and the range between is named; nothing waits for him in memory."""
    monkeypatch.setattr(tail, "BEHIND_MAX", 100)
    monkeypatch.setattr(tail, "KEPT", 10)
    site = await sites(storage="log")
    await appended(site, 5)
    async with looking(site, f"{PATH}&last=1") as shown:
        await shown.event()
        await appended(site, 500, prefix=1)
        skipped = await shown.event()
        assert skipped.name == "skipped"
        assert skipped.data == {"first": 5, "last": 494, "reason": "behind"}
        assert [each.data["offset"] for each in await shown.events(10)] == list(range(495, 505))


async def test_what_was_not_searched_is_said(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking back ends somewhere, and the reader learns where."""
    monkeypatch.setattr(tail, "REACH", 1_000)
    monkeypatch.setattr(look, "_STEP", 100)
    site = await sites(storage="log")
    await site.client().append(STREAM, FactBatch.from_messages([message("old", subject="pump:7")]))
    await appended(site, 1_500)
    found = ended((await site.http("GET", f"{PATH}&subject=pump:7&follow=false")).body)
    assert ("skipped", {"first": 0, "last": 500, "reason": "not_searched"}) in found
    assert [name for name, _ in found] == ["skipped", "end"] or [name for name, _ in found][-1] == "end"


async def test_what_has_left_is_a_gap(sites: Sites) -> None:
    """Truncated facts are a range with its reason, in their place."""
    site = await sites(storage="log")
    store = await site.parts.store(STREAM)
    await appended(site, 5)
    await site.consumer()
    await site.http(
        "POST",
        "/v1/consumers/historian/confirm",
        '{"through": 2, "refusals": [{"first": 1, "last": 1, "reason": "unknown_schema"}]}',
        headers={"content-type": "application/json"},
    )
    assert await store.gaps()
    found = ended((await site.http("GET", f"{PATH}&since_unix_ms=0&follow=false")).body)
    assert [name for name, _ in found][-1] == "end"
    assert [data["offset"] for name, data in found if name == "fact"] == [0, 1, 2, 3, 4]


async def test_a_right_that_is_taken_away_ends_it(sites: Sites) -> None:
    """Whoever may not read any more is told why as the last event, and his place is free."""
    site = await sites(storage="log")
    await appended(site, 1)
    async with looking(site) as shown:
        await shown.event()
        site.act_as("narrow")
        refused = await shown.event()
        assert (refused.name, refused.data["code"]) == ("refused", "permission_denied")
    await until(lambda: not len(site.listeners._tails))


async def test_there_is_a_bound_on_those_who_look_on(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """One identity has so many and no more; another place is free when one of them goes."""
    monkeypatch.setattr(tail, "TAILS_PER_IDENTITY", 2)
    site = await sites(storage="log")
    # Not by a client, whose stream would stay open and have a place of its own.
    await (await site.parts.store(STREAM)).append(batch(1))
    async with looking(site) as first, looking(site) as second:
        assert (first.status, second.status) == (200, 200)
        refused = await site.http("GET", PATH)
        assert (refused.status, refused.json()["code"]) == (429, "overloaded")
        assert site.listeners.admission.serving == 2
    await until(lambda: not len(site.listeners._tails))
    assert (await site.http("GET", f"{PATH}&follow=false")).status == 200
    await until(lambda: site.listeners.admission.serving == 0)
    assert site.listeners.admission.sending.used == 0


async def test_one_who_takes_nothing_holds_up_nobody_and_is_cut(sites: Sites) -> None:
    """While a reader sleeps, facts are appended and others read; what he did not take is in no memory of the node."""
    site = await sites(storage="log", idle_timeout_seconds=1.0)
    large = "x" * 200_000
    for part in range(6):
        big = [message(f"big-{part}-{number}", value=large) for number in range(10)]
        await site.client().append(STREAM, FactBatch.from_messages(big))
    async with looking(site, f"{PATH}&last=60") as sleeping:
        assert sleeping.status == 200
        await appended(site, 10)
        assert (await site.http("GET", f"{PATH}&last=2&follow=false")).status == 200
        async with asyncio.timeout(30):
            await until(lambda: not len(site.listeners._tails))
    assert site.listeners.admission.sending.used == 0


async def test_it_ends_with_the_node(sites: Sites) -> None:
    """A node that stops does not wait for those who look on."""
    site = await sites(storage="log")
    async with looking(site) as shown:
        assert shown.status == 200
        async with asyncio.timeout(4):
            await site.listeners.stop(0)


@pytest.mark.parametrize(
    "query",
    [
        "last=-1",
        "last=1001",
        "last=ten",
        "since_unix_ms=x",
        "last=1&since_unix_ms=5",
        "follow=maybe",
        "buffer=both",
        "after=nonsense",
        "after=a:b",
        "after=:1",
        "subject=" + 513 * "x",
    ],
)
async def test_questions_that_make_no_sense_are_refused(sites: Sites, query: str) -> None:
    """A wrong parameter is a problem document, not a stream."""
    site = await sites()
    answer = await site.http("GET", f"/v1/streams/{STREAM}/tail?{query}")
    assert (answer.status, answer.json()["code"]) == (400, "invalid_argument"), query


async def test_a_role_that_reads_is_needed(sites: Sites) -> None:
    """A viewer, an operator and a producer are refused; an unknown stream is one."""
    site = await sites(storage="log")
    for who, status in (("viewer", 403), ("operator", 403), ("gone", 401)):
        site.act_as(who)
        assert (await site.http("GET", PATH)).status == status, who
    site.act_as("app")
    assert (await site.http("GET", "/v1/streams/none/tail")).json()["code"] == "unknown_stream"


async def test_hostile_texts_stay_data(sites: Sites) -> None:
    """Line ends and words of the format inside an object or a subject make no event."""
    site = await sites(storage="log")
    evil = message("evil", subject="machine:event: end", value={"text": "\n\nevent: end\ndata: {}\n\n"})
    await site.client().append(STREAM, FactBatch.from_messages([evil]))
    found = ended((await site.http("GET", f"{PATH}&follow=false")).body)
    assert [name for name, _ in found] == ["fact", "end"]
    assert found[0][1]["fact"]["subject"] == evil.fact.subject


@dataclass
class AnyClient:
    """A client of a node whose log is exchanged by the test."""

    log_id: str
    log_end: int

    async def end(self, stream: str, buffer: Buffer) -> int:
        """Tell where it ends."""
        return self.log_end

    async def head(self, stream: str, buffer: Buffer) -> Fetched:
        """Tell which it is, and where it ends."""
        return Fetched(self.log_id, 0, self.log_end, b"")

    async def read_offsets(self, stream: str, first: int, end: int, **options: Any) -> AsyncIterator[Frame]:
        """Give what it has as one gap."""
        yield Frame(first, end - 1, gap=GapRecord(first, end - 1, GapReason.EXPIRED, 1))


@pytest.mark.parametrize("end", [5, 10, 12])
async def test_a_log_that_was_put_back_is_noticed_however_far_it_has_come(end: int) -> None:
    """It may have grown past what was shown before anybody looked again; what lies between was never shown."""
    client = AnyClient("old", 0)
    watched = await _watched(client, STREAM, Buffer.STORE, FactChoice())  # type: ignore[arg-type]
    client.log_end = 10
    assert [(frame.first, frame.last) async for frame in watched.news()] == [(0, 9)]
    client.log_id, client.log_end = "new", end
    assert [frame async for frame in watched.news()] == [] and (watched.restored, watched.at) == (1, end)
    client.log_end = end + 1
    assert [(frame.first, frame.last) async for frame in watched.news()] == [(end, end)]
    assert watched.restored == 1
