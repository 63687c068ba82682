"""Questions over one open call: each gets its own answer, whatever became of the one before it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, until

from bsfg.errors import BsfgError, FrameInvalid, GateHeld, IdentityUnknown, TimedOut, UnknownConsumer
from bsfg.gate import SENDER
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.node.listeners import Listeners
from bsfg.ports import Confirmation
from bsfg.testing.facts import batch, message
from bsfg.wire import connection
from bsfg.wire.client import BoundaryClient
from bsfg.wire.messages import BOUNDARY


class Opened(list[str]):
    """Which calls with many requests a client has opened."""

    def __init__(self, client: BoundaryClient) -> None:
        super().__init__()
        stream = client.connection.stream

        def noted(name: str, *requests: Any) -> Any:
            self.append(name)
            return stream(name, *requests)

        client.connection.stream = noted  # type: ignore[method-assign]


async def filled(sites: Sites, **options: Any) -> tuple[Site, BoundaryClient]:
    """Open a site with ten facts and a consumer."""
    site = await sites(**options)
    client = site.client("app")
    await client.append(STREAM, batch(10))
    await site.consumer()
    return site, client


async def confirmed(client: BoundaryClient, through: int) -> int:
    """Confirm as a link does."""
    return await client.confirm("historian", Confirmation(through), again_and_again=True)


def ranges(fetched: Fetched) -> list[tuple[int, int]]:
    """Give which offsets an answer holds."""
    return [(frame.first, frame.last) for frame in fetched.frames]


async def test_all_questions_go_over_one_call(sites: Sites) -> None:
    """Fetching and confirming again and again opens one call for each of the two."""
    _, client = await filled(sites)
    opened = Opened(client)
    for number in range(10):
        fetched = await client.fetch("historian", FetchRequest(max_facts=1))
        assert ranges(fetched) == [(number, number)]
        assert await confirmed(client, number) == number
    assert sorted(opened) == ["ConfirmReceipts", "FollowFacts"]


async def test_who_confirms_now_and_then_takes_no_place(sites: Sites) -> None:
    """Applications with many consumers confirm in calls of their own: an open call would count as a request."""
    _, client = await filled(sites)
    opened = Opened(client)
    assert await client.confirm("historian", Confirmation(3)) == 3
    assert opened == []


async def test_the_answer_to_an_abandoned_question_is_nobodys(sites: Sites) -> None:
    """Who stops waiting for facts and asks for something else gets that, and not what came late."""
    _, client = await filled(sites)
    waiting = asyncio.create_task(client.fetch("historian", FetchRequest(after=9, wait_seconds=30.0)))
    await asyncio.sleep(0.1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.append_fact(STREAM, message("late"))
    assert ranges(await client.fetch("historian", FetchRequest(max_facts=3))) == [(0, 2)]
    assert ranges(await client.fetch("historian", FetchRequest(after=9))) == [(10, 10)]


async def test_a_question_is_asked_beside_one_that_waits(sites: Sites) -> None:
    """A second question for the same consumer does not wait for the first one, which is answered in its time."""
    _, client = await filled(sites)
    waiting = asyncio.create_task(client.fetch("historian", FetchRequest(after=9, wait_seconds=30.0)))
    await asyncio.sleep(0.05)
    assert ranges(await client.fetch("historian", FetchRequest(max_facts=3))) == [(0, 2)]
    assert not waiting.done()
    await client.append_fact(STREAM, message("new"))
    assert ranges(await waiting) == [(10, 10)]


async def test_a_refusal_is_told_and_harms_no_later_question(sites: Sites) -> None:
    """The node's own error arrives, as it would from a call of its own; the next question is answered."""
    site, client = await filled(sites)
    site.parts.links.hold("enterprise", SENDER, by="op", reason="maintenance")
    await client.fetch("historian", FetchRequest())
    with pytest.raises(UnknownConsumer):
        await client.fetch("app-nobody", FetchRequest())
    with pytest.raises(BsfgError, match="99"):
        await confirmed(client, 99)
    assert await confirmed(client, 4) == 4
    assert ranges(await client.fetch("historian", FetchRequest())) == [(5, 9)]
    site.act_as("enterprise-bsfg")
    await site.consumer("link-enterprise-1")
    with pytest.raises(BsfgError) as caught:
        await client.fetch("link-enterprise-1", FetchRequest())
    assert isinstance(caught.value, GateHeld) or caught.value.code == "permission_denied"


async def test_silence_ends_the_call_and_not_the_conversation(sites: Sites) -> None:
    """A node lets go of a call that says nothing; whoever asks again later is answered over another one."""
    site, client = await filled(sites, idle_timeout_seconds=0.1)
    opened = Opened(client)
    await client.fetch("historian", FetchRequest(max_facts=1))
    await until(lambda: site.listeners.grpc.admission.serving == 0)
    for _ in range(3):
        assert ranges(await client.fetch("historian", FetchRequest(max_facts=2))) == [(0, 1)]
    assert opened == ["FollowFacts", "FollowFacts"]


async def test_the_moment_at_which_a_call_ends_is_no_error(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that crosses with the end of its call is asked again."""
    site, client = await filled(sites, idle_timeout_seconds=0.1)
    await client.fetch("historian", FetchRequest(max_facts=1))
    await until(lambda: site.listeners.grpc.admission.serving == 0)
    # It has ended, but the conversation has not noticed.
    monkeypatch.setattr("bsfg.wire.streams.Conversation._is_open", lambda self: self._call is not None)
    assert ranges(await client.fetch("historian", FetchRequest(max_facts=2))) == [(0, 1)]


async def test_a_node_that_does_not_answer_is_not_waited_for(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question has its time; the one after it is asked anew."""
    site, client = await filled(sites)
    client.connection.request_timeout_seconds = 0.05
    monkeypatch.setattr("bsfg.wire.client.WAIT_MARGIN_SECONDS", 0.0)
    fetch, asked = site.boundary.fetch, asyncio.Event()

    async def silent(*args: Any) -> Any:
        if asked.is_set():
            return await fetch(*args)
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(site.boundary, "fetch", silent)
    with pytest.raises(TimedOut):
        await client.fetch("historian", FetchRequest())
    client.connection.request_timeout_seconds = 30.0
    assert ranges(await client.fetch("historian", FetchRequest())) == [(0, 9)]


async def test_an_older_node_is_asked_in_calls(sites: Sites) -> None:
    """A node that does not know conversations is asked in calls of their own, and only once for the other."""
    _, client = await filled(sites)
    opened = Opened(client)
    client.connection.method("FetchFacts")
    unknown = replace(BOUNDARY["FollowFacts"], name="WhatIsThat").callable(client.connection._channel)
    client.connection._callables["FollowFacts"] = unknown
    for _ in range(3):
        assert ranges(await client.fetch("historian", FetchRequest())) == [(0, 9)]
    assert opened == ["FollowFacts"]


async def test_a_revoked_caller_is_cut_off_in_mid_conversation(sites: Sites) -> None:
    """A row that is withdrawn counts from the next question on, though the call was opened before."""
    site, client = await filled(sites, tls=True)
    await client.fetch("historian", FetchRequest())
    rows = dict(site.parts.guard.matrix.identities)
    del rows["app"]
    site.parts.guard = replace(site.parts.guard, matrix=replace(site.parts.guard.matrix, identities=rows))
    with pytest.raises(IdentityUnknown):
        await client.fetch("historian", FetchRequest())


async def test_a_new_certificate_means_a_new_call(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the connection is made anew the conversation moves to it, instead of breaking when the old one is closed."""
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.0)
    _, client = await filled(sites, tls=True)
    opened = Opened(client)
    await client.fetch("historian", FetchRequest())
    client.connection.reconnect()
    for _ in range(2):
        await client.fetch("historian", FetchRequest())
    assert opened == ["FollowFacts", "FollowFacts"]


async def test_an_answer_that_cannot_be_read_is_refused(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no answer is an error of the node, and the conversation goes on."""
    _, client = await filled(sites)
    monkeypatch.setattr("bsfg.node.server.frames_response", lambda *given: b"\xff\xff\xff")
    with pytest.raises(FrameInvalid, match="cannot be read"):
        await client.fetch("historian", FetchRequest())
    monkeypatch.undo()
    assert ranges(await client.fetch("historian", FetchRequest())) == [(0, 9)]


async def test_messages_that_cannot_be_read_are_refused_everywhere(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sends garbage in any stream is told from one that is not there."""
    _, client = await filled(sites)
    monkeypatch.setattr("bsfg.node.server.ack_message", lambda *args, **options: b"\xff\xff\xff")
    monkeypatch.setattr("bsfg.node.server.head_message", lambda fetched: b"\xff\xff\xff")
    with pytest.raises(FrameInvalid, match="cannot be read"):
        await client.append(STREAM, batch(1, seed=3))
    with pytest.raises(FrameInvalid, match="cannot be read"):
        _ = [frame async for frame in client.read_offsets(STREAM, 0)]


async def test_a_node_that_stops_does_not_wait_for_talkers(sites: Sites) -> None:
    """Conversations end when the node stops, the silent and the lively; without that each stop would take its grace."""
    site, client = await filled(sites)
    lively = site.client("app")
    await client.fetch("historian", FetchRequest())

    async def talk() -> None:
        while True:
            await lively.fetch("historian", FetchRequest(max_facts=1))

    talking = asyncio.create_task(talk())
    await until(lambda: site.listeners.grpc.admission.serving == 2)
    async with asyncio.timeout(20):
        await site.listeners.grpc.stop(grace_seconds=3600)
        with pytest.raises(BsfgError):
            await talking


async def test_a_node_that_came_back_is_asked_again(sites: Sites) -> None:
    """A conversation with a node that was restarted goes on with the next question, as calls of their own would."""
    site, client = await filled(sites, storage="log")
    await client.fetch("historian", FetchRequest(max_facts=1))
    await site.listeners.stop(0)
    listeners = Listeners(site.boundary, site.admin, site.parts.settings.limits, zone="plant")
    await listeners.start(("127.0.0.1", site.listeners.grpc.port), ("127.0.0.1", 0))
    site.listeners = listeners
    assert ranges(await client.fetch("historian", FetchRequest(max_facts=2))) == [(0, 1)]
    assert await confirmed(client, 1) == 1
