"""Gap records of other zones over FetchFacts: given to applications, and never in the way of a wait."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from tests.wire.conftest import Sites
from tests.wire.entries import fetch_entries
from tests.wire.site import STREAM, Site, until

from bsfg.ports import Buffer, Confirmation, GapRecord, OriginSpan
from bsfg.retention import GapReason
from bsfg.testing.facts import batch

PATH = "/v1/consumers/historian"
LINES = {"accept": "application/x-ndjson"}


def gap(first: int, last: int, reason: GapReason = GapReason.EXPIRED) -> GapRecord:
    """Make a gap record of another zone."""
    return GapRecord(first, last, reason, 1_700_000_000_000, "told by idmz", "idmz")


async def note(site: Site, *gaps: GapRecord) -> None:
    """Store gap records in the forward buffer."""
    await (await site.parts.forward(STREAM)).record_gaps(gaps)


async def put(site: Site, count: int = 1, first: int = 0) -> None:
    """Put facts of the peer into the forward buffer."""
    offsets = np.arange(first, first + count)
    span = OriginSpan("enterprise", offsets, np.full(count, 1_700_000_000_000))
    await (await site.parts.forward(STREAM)).put_if_absent(batch(count, first=first, from_zone="enterprise"), span)


class Caller:
    """An application that fetches, over gRPC or over HTTP, in one of the forms."""

    def __init__(self, site: Site, form: str) -> None:
        self._site, self._form, self._client = site, form, site.client()

    async def fetch(self, wait_seconds: float = 0.0, gaps_after: str = "") -> tuple[list[int], list[Any], str]:
        """Fetch and give offsets, gap records as first, last, reason and zone, and the token."""
        if self._form == "grpc":
            answer = await fetch_entries(self._client, "historian", wait_seconds=wait_seconds, gaps_after=gaps_after)
            gaps = [(each.first, each.last, str(each.reason), each.origin_zone) for each in answer.gaps]
            return [entry.offset for entry in answer.entries], gaps, answer.gaps_token
        path = f"{PATH}/facts?wait_ms={int(wait_seconds * 1000)}&gaps_after={gaps_after}"
        if self._form == "http":
            found = (await self._site.http("GET", path)).json()
            return [entry["offset"] for entry in found["entries"]], _brief(found["gaps"]), found["gaps_token"]
        body = (await self._site.http("GET", path, headers=LINES)).body
        lines = [json.loads(line) for line in body.splitlines()]
        told = [line["gap"] for line in lines if "gap" in line]
        return [line["offset"] for line in lines if "gap" not in line], _brief(told), ""

    async def waits(self, first: int) -> tuple[list[int], list[Any], str]:
        """Ask with patience; insist that the answer comes with the fact that is put meanwhile."""
        asked = asyncio.create_task(self.fetch(50))
        await until(lambda: self._site.listeners.admission.serving == 1 or asked.done())
        await put(self._site, first=first)
        return await asked

    async def confirm(self, through: int) -> None:
        """Confirm."""
        await self._client.confirm("historian", Confirmation(through=through))


def _brief(gaps: list[dict[str, Any]]) -> list[Any]:
    return [(each["first"], each["last"], each["reason"], each["origin_zone"]) for each in gaps]


EXPIRED = (3, 7, "expired", "idmz")
DAMAGED = (9, 9, "damaged", "idmz")
FORMS = ["grpc", "http", "lines"]


@pytest.mark.parametrize("form", FORMS)
async def test_gap_records_of_other_zones_are_given_and_the_next_fetch_waits(sites: Sites, form: str) -> None:
    """A new gap record is an answer by itself; the same one again is not worth ending a wait."""
    site = await sites(storage="log")
    await site.consumer(buffer=Buffer.FORWARD)
    caller = Caller(site, form)
    await note(site, gap(3, 7))
    assert (await caller.fetch(50))[:2] == ([], [EXPIRED])
    # Not confirmed yet, so it comes once more, as a fact would, but only beside the fact that was waited for.
    assert (await caller.waits(0))[:2] == ([0], [EXPIRED])
    await caller.confirm(0)
    assert (await caller.waits(1))[:2] == ([1], [])
    await caller.confirm(1)
    await note(site, gap(9, 9, GapReason.DAMAGED))
    assert (await caller.fetch(50))[:2] == ([], [DAMAGED])


@pytest.mark.parametrize("form", FORMS)
async def test_a_consumer_that_crashes_gets_the_records_again(sites: Sites, form: str) -> None:
    """What was given with facts that nobody confirmed comes again with those facts, also to a new connection."""
    site = await sites(storage="log")
    await site.consumer(buffer=Buffer.FORWARD)
    await put(site, 2)
    await note(site, gap(3, 7))
    for _ in range(2):
        assert (await Caller(site, form).fetch())[:2] == ([0, 1], [EXPIRED])
    await Caller(site, form).confirm(0)
    assert (await Caller(site, form).fetch())[:2] == ([1], [EXPIRED])
    await Caller(site, form).confirm(1)
    assert (await Caller(site, form).fetch())[:2] == ([], [])


@pytest.mark.parametrize("form", ["grpc", "http"])
async def test_a_consumer_may_keep_count_itself(sites: Sites, form: str) -> None:
    """Whoever names the token of the last answer gets what follows it, whatever was given to others or confirmed."""
    site = await sites(storage="log")
    await site.consumer(buffer=Buffer.FORWARD)
    caller = Caller(site, form)
    await note(site, gap(3, 7))
    _, gaps, token = await caller.fetch()
    assert gaps == [EXPIRED]
    await note(site, gap(9, 9, GapReason.DAMAGED))
    for _ in range(2):
        _, gaps, later = await caller.fetch(50, token)
        assert gaps == [DAMAGED]
    assert (await caller.fetch(0, later))[1:] == ([], later)


DROPPING = """
overflow = "drop_oldest"
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
"""


@pytest.mark.parametrize("form", FORMS)
async def test_ranges_of_the_buffer_itself_are_given_in_their_place(sites: Sites, form: str) -> None:
    """A range that left the buffer unconfirmed is told in every form."""
    site = await sites(storage="log", stream=DROPPING)
    await site.consumer()
    for number in range(12):
        await site.client().append(STREAM, batch(100, first=100 * number, object_bytes=500))
    offsets, gaps, _ = await Caller(site, form).fetch()
    # One record or several that follow each other: together they reach to the first entry.
    assert {(reason, zone) for _, _, reason, zone in gaps} == {("evicted", None)}
    assert [first for first, *_ in gaps] == [0, *(last + 1 for _, last, *_ in gaps[:-1])]
    assert gaps[-1][1] + 1 == offsets[0]
