"""Whoever waits or reads for long goes by what counts now, and not by what counted when he began."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until
from tests.wire.test_filtered import brought, left_out

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, IdentityRevoked, IdentityUnknown, PermissionRefused
from bsfg.fact import ArtifactRef
from bsfg.journey.link import NOT_SERVED, Fetched, FetchRequest
from bsfg.node.authorize import Guard
from bsfg.ports import Buffer, Frame
from bsfg.testing.facts import message
from bsfg.wire.peer import PeerNames
from bsfg.wire.service import Caller, ObjectInfo

PEER, APP = (Caller(PeerNames((name,)), "127.0.0.1:1") for name in ("enterprise-bsfg", "app"))
CONSUMER = "enterprise.operational"


async def append(site: Site, *subjects: str) -> None:
    """Append a fact about each subject."""
    facts = [message(subject, subject=subject) for subject in subjects]
    await site.boundary.commit(await site.boundary.prepare(APP, STREAM, FactBatch.from_messages(facts)))


async def waiting(site: Site) -> asyncio.Task[Fetched]:
    """Have the peer wait for facts."""
    await site.consumer(CONSUMER)
    request = FetchRequest(wait_seconds=60, sets=True)
    fetching = asyncio.create_task(site.boundary.fetch(PEER, CONSUMER, request))
    await until(lambda: bool(site.parts.links._waiting[CONSUMER]))
    await asyncio.sleep(0.01)
    return fetching


def narrow(site: Site) -> None:
    """Serve the peer facts about presses alone, as a reload does."""
    serve = replace(site.parts.settings.serve["enterprise"], subjects=("asset:press-*",))
    site.parts.settings = replace(site.parts.settings, serve={"enterprise": serve})


def without_row(guard: Guard) -> Guard:
    """Strike the peer out."""
    rows = {name: row for name, row in guard.matrix.identities.items() if name != "enterprise-bsfg"}
    return replace(guard, matrix=replace(guard.matrix, identities=rows))


def revoked(guard: Guard) -> Guard:
    """Revoke the peer's row."""
    row = replace(guard.matrix.identities["enterprise-bsfg"], revoked=True, reason="stolen")
    return replace(guard, matrix=replace(guard.matrix, identities={**guard.matrix.identities, row.name: row}))


def not_served(guard: Guard) -> Guard:
    """Serve the peer's zone nothing."""
    return replace(guard, matrix=replace(guard.matrix, served={}))


TAKEN = pytest.mark.parametrize(
    ("taken", "error"),
    [(without_row, IdentityUnknown), (revoked, IdentityRevoked), (not_served, PermissionRefused)],
    ids=["row gone", "revoked", "not served"],
)


async def test_a_fact_that_is_no_longer_served_does_not_reach_who_waits(sites: Sites) -> None:
    """The filter is narrowed while a peer waits: what comes then is told as left out, what it may have comes."""
    site = await sites()
    fetching = await waiting(site)
    narrow(site)
    await append(site, "asset:oven-1", "asset:press-1", "asset:oven-2")
    frames = list((await fetching).frames)
    assert brought(frames) == [1]
    assert left_out(frames, NOT_SERVED) == [0, 2]


@TAKEN
async def test_a_right_that_is_taken_away_counts_for_who_waits(
    sites: Sites, taken: Callable[[Guard], Guard], error: type[BsfgError]
) -> None:
    """A peer that waits for facts when its right is taken away gets none of those that come then."""
    site = await sites()
    fetching = await waiting(site)
    site.parts.guard = taken(site.parts.guard)
    await append(site, "asset:press-1")
    with pytest.raises(error):
        await fetching
    assert site.refusals


async def reading(site: Site) -> AsyncIterator[Frame]:
    """Begin to read a range of thirty facts in frames of ten, and take the first."""
    await append(site, *(f"asset:{'press' if number % 2 else 'oven'}-{number}" for number in range(30)))
    found = await site.boundary.read_offsets(PEER, STREAM, Buffer.STORE, 0, 30, FetchRequest(max_facts=10, sets=True))
    assert brought([await anext(found.frames)]) == list(range(10))
    return found.frames


async def test_a_range_is_read_by_the_filter_of_each_moment(sites: Sites) -> None:
    """The frames that a peer has not taken when its filter is narrowed are served by the new one."""
    site = await sites()
    frames = await reading(site)
    narrow(site)
    rest = [frame async for frame in frames]
    assert brought(rest) == list(range(11, 30, 2))
    assert left_out(rest, NOT_SERVED) == list(range(10, 30, 2))


@TAKEN
async def test_a_range_ends_with_the_right_to_read_it(
    sites: Sites, taken: Callable[[Guard], Guard], error: type[BsfgError]
) -> None:
    """However slowly frames are taken, each of them needs the right."""
    site = await sites()
    frames = await reading(site)
    site.parts.guard = taken(site.parts.guard)
    with pytest.raises(error):
        await anext(frames)


@pytest.mark.parametrize(
    ("taken", "error"), [(without_row, IdentityUnknown), (revoked, IdentityRevoked)], ids=["row gone", "revoked"]
)
async def test_a_download_ends_with_the_right_to_it(
    sites: Sites, taken: Callable[[Guard], Guard], error: type[BsfgError]
) -> None:
    """A large artifact is given piece by piece, and the next piece is for those who still may have it."""
    site = await sites()
    content = bytes(range(256)) * 40_000
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"

    async def pieces() -> AsyncIterator[bytes]:
        yield content

    await site.boundary.put_object(APP, ObjectInfo("recipes", "press"), pieces())
    fact = message("recipe", subject="asset:press-1")
    naming = replace(fact, fact=replace(fact.fact, artifact=ArtifactRef(digest=digest)))
    await site.boundary.commit(await site.boundary.prepare(APP, STREAM, FactBatch.from_messages([naming])))
    _, taking = await site.boundary.get_object(PEER, "", "", digest)
    assert len(await anext(taking)) < len(content)
    site.parts.guard = taken(site.parts.guard)
    with pytest.raises(error):
        await anext(taking)
