"""How old a fact is: each zone on its way counts by its own clock alone, and what they count adds up."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.journey.zones import BACKENDS, Inbound, Zone, connect

from bsfg.batch import EntryBatch
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.ports import Buffer
from bsfg.testing.facts import messages, sealed

DAY_SECONDS = 86_400.0
MakeZone = Callable[[str], Zone]


async def chain(zones: Sequence[Zone], max_age_seconds: float | None = None) -> list[Inbound]:
    """Connect zones one behind the other; the first one's facts travel through all of them."""
    links = []
    for at, (sender, receiver) in enumerate(pairwise(zones)):
        buffer = Buffer.FORWARD if at else Buffer.STORE
        relayed = [zone.name for zone in zones[:at]]
        links.append(await connect(sender, receiver, relayed=relayed, buffer=buffer, max_age_seconds=max_age_seconds))
    return links


def let_pass(zones: Sequence[Zone], seconds: float) -> None:
    """Let time pass everywhere."""
    for zone in zones:
        zone.clock.advance(seconds)


@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize("skew_days", [-8, 8])
async def test_a_sender_with_a_wrong_clock_loses_nothing(make_zone: MakeZone, skew_days: int, count: int) -> None:
    """However wrong the sender's clock is, fresh facts are fresh and old ones are old."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    plant.clock.jump(skew_days * DAY_SECONDS)
    [inbound] = await chain([plant, enterprise], max_age_seconds=7 * DAY_SECONDS)
    await plant.append(messages(count))
    let_pass([plant, enterprise], 6 * DAY_SECONDS)
    progress = await inbound.pull()
    assert (progress.inserted, progress.refused) == (count, ())
    await plant.append(messages(count, first=1_000))
    let_pass([plant, enterprise], 8 * DAY_SECONDS)
    progress = await inbound.pull()
    assert (progress.inserted, [each.reason for each in progress.refused]) == (0, ["expired"])


@pytest.mark.parametrize("count", [1, 300])
async def test_age_is_not_lost_on_a_long_way(make_zone: MakeZone, count: int) -> None:
    """A fact that waited at each of four hops is as old as all the waiting together."""
    zones = [make_zone(name) for name in ("plant", "site", "idmz", "enterprise", "cloud")]
    for at, zone in enumerate(zones):
        zone.clock.jump((2 - at) * 20 * DAY_SECONDS)
    links = await chain(zones)
    await zones[0].append(messages(count))
    waits = (3 * DAY_SECONDS, 2 * DAY_SECONDS, 4 * DAY_SECONDS, 2 * DAY_SECONDS)
    for wait, link in zip(waits[:-1], links[:-1], strict=True):
        let_pass(zones, wait)
        assert (await link.pull()).inserted == count
    let_pass(zones, waits[-1])
    links[-1].rules = replace(links[-1].rules, max_age_seconds=7 * DAY_SECONDS)
    progress = await links[-1].pull()
    assert (progress.inserted, [each.reason for each in progress.refused]) == (0, ["expired"])
    for at, zone in enumerate(zones[1:-1]):
        ages = {entry.origin.age_ms for entry in await zone.received() if entry.origin}
        assert ages == {round(1000 * sum(waits[: at + 1]))}


@settings(max_examples=25, deadline=None)
@given(
    hops=st.lists(st.tuples(st.integers(0, 10**9), st.integers(-(10**9), 10**9)), min_size=1, max_size=4),
    count=st.sampled_from([1, 2, 80]),
)
def test_whatever_the_clocks_say(hops: list[tuple[int, int]], count: int) -> None:
    """The age at the end of any way is the time that has passed, whatever the skew of each clock on it."""

    async def run() -> set[tuple[int, int]]:
        names = ["plant", *(f"hop-{at}" for at in range(len(hops)))]
        zones = [Zone(name, BACKENDS["memory"](Path())) for name in names]
        for zone, (_, skew_ms) in zip(zones[1:], hops, strict=True):
            zone.clock.jump(skew_ms / 1000)
        links = await chain(zones)
        await zones[0].append(messages(count))
        for (wait_ms, _), link in zip(hops, links, strict=True):
            let_pass(zones, wait_ms / 1000)
            await link.pull()
        let_pass(zones, 1000)
        now_unix_ms, received = zones[-1].clock.now_unix_ms(), await zones[-1].received()
        return {
            (each.origin.age_ms or 0, round(1000 * each.age_seconds(now_unix_ms))) for each in received if each.origin
        }

    waited_ms = sum(wait_ms for wait_ms, _ in hops)
    assert asyncio.run(run()) == {(waited_ms, waited_ms + 1_000_000)}


async def test_lag_needs_no_common_clock(make_zone: MakeZone) -> None:
    """The lag of a link is what its sender's clock counted, with clocks an hour apart."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    enterprise.clock.jump(3600)
    [inbound] = await chain([plant, enterprise])
    assert (await inbound.pull()).lag_seconds is None
    await plant.append(messages(2))
    let_pass([plant, enterprise], 2.5)
    assert (await inbound.pull()).lag_seconds == 2.5


class Old:
    """A link to a sender of an earlier version, which tells neither its time nor the ages of what it relays."""

    def __init__(self, inbound: Inbound) -> None:
        self._link, self.zone, self.confirm = inbound.link, inbound.link.zone, inbound.link.confirm

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Leave out what such a sender would not say."""
        return replace(await self._link.fetch(request), served_at_unix_ms=None)


async def test_an_older_sender_is_judged_by_the_clock_of_here(make_zone: MakeZone) -> None:
    """Without the sender's word the receiver counts by its own clock from the sender's times; lag is not known."""
    plant, enterprise = make_zone("plant"), make_zone("enterprise")
    [inbound] = await chain([plant, enterprise], max_age_seconds=3600)
    inbound.link = Old(inbound)  # type: ignore[assignment]
    await plant.append(messages(1))
    let_pass([plant, enterprise], 1000)
    await plant.append(messages(1, first=1))
    let_pass([plant, enterprise], 3000)
    progress = await inbound.pull()
    assert (progress.inserted, progress.lag_seconds) == (1, None)
    assert [(each.first, each.reason) for each in progress.refused] == [(0, "expired")]
    [entry] = await enterprise.received()
    assert entry.origin is not None and entry.origin.age_ms == 3_000_000


NUMBERS = st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(0, 10**13)


@given(st.lists(st.tuples(NUMBERS.filter(lambda at: at is not None), NUMBERS, NUMBERS), min_size=1, max_size=80))
def test_an_age_never_wraps(claims: list[tuple[int, int | None, int | None]]) -> None:
    """Whatever times and ages a sender claims, rows and columns count the same, as plain numbers would."""
    facts = sealed(messages(len(claims)))
    appended, pulled, ages = (list(column) for column in zip(*claims, strict=True))
    batch = EntryBatch.of(facts.record_batch, np.arange(len(claims)), np.array(appended))
    origins = {"origin_appended_at_unix_ms": pulled, "origin_age_ms": ages}
    columns = batch.with_columns(**{name: pa.array(values, pa.int64()) for name, values in origins.items()})
    now, most = 1_800_000_000_000, 1 << 60
    expected = []
    for at, from_, age in claims:
        here = now - max(-most, min(at, most))
        told = here if from_ in (None, -(2**63)) else now - max(-most, min(from_, most))
        count = told if age in (None, -(2**63)) else here + max(0, min(age, most))
        expected.append(max(0, min(count, most)))
    assert columns.ages_ms(now).tolist() == expected
    if len(claims) <= 64:
        assert EntryBatch.of_rows(columns.rows()).ages_ms(now).tolist() == expected


@given(st.lists(st.tuples(*[st.integers(0, 2**42)] * 2, st.none() | st.integers(-5, 2**42)), min_size=1, max_size=80))
def test_an_entry_is_as_old_as_its_row(claims: list[tuple[int, int, int | None]]) -> None:
    """What a reader of single entries is told is what the batch says."""
    appended, pulled, ages = (list(column) for column in zip(*claims, strict=True))
    batch = EntryBatch.of(sealed(messages(len(claims))).record_batch, np.arange(len(claims)), np.array(appended))
    columns = batch.with_columns(
        origin_zone=pa.array(["plant"] * len(claims)),
        origin_offset=pa.array(range(len(claims)), pa.int64()),
        origin_appended_at_unix_ms=pa.array(pulled, pa.int64()),
        origin_age_ms=pa.array(ages, pa.int64()),
    )
    now = 1_800_000_000_000
    told = [round(1000 * entry.age_seconds(now)) for entry in columns.to_entries()]
    assert told == columns.ages_ms(now).tolist()
