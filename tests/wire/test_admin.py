"""Operators, viewers and pipelines over gRPC: every operation of the administration against a real server."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.journey.zones import spoil_keys
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site

from bsfg.batch import FactBatch
from bsfg.errors import (
    BsfgError,
    ConsumerExists,
    ConsumerRetired,
    InvalidArgument,
    InvalidTransition,
    LeaseHeld,
    LeaseLost,
    PermissionRefused,
    TruncateRefused,
    UnknownConsumer,
    UnknownLink,
    UnknownStream,
)
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.link import PeerPosition, Release, SessionMemory
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, OriginSpan, Result, StartAt
from bsfg.retention import GapReason
from bsfg.testing.facts import altered, messages, sealed
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.service import LinkReport, PeerMemo

LINK = "from-enterprise"


async def operated(sites: Sites, **settings: object) -> tuple[Site, AdminClient]:
    """Open a site and call it as its operator."""
    site = await sites(**settings)
    site.act_as("operator")
    return site, site.admin_client()


async def append(site: Site, count: int) -> None:
    """Append facts at the site itself."""
    await (await site.parts.store(STREAM)).append(sealed(messages(count)))


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_consumers_are_created_listed_and_retired(sites: Sites, storage: str) -> None:
    """A consumer begins where it is told to, shows its backlog, and leaves gap records when it is retired."""
    site, admin = await operated(sites, storage=storage)
    await append(site, 10)
    spec = ConsumerSpec("mes", STREAM, Buffer.STORE, StartAt.OFFSET, 4, required=False)
    created = await admin.create_consumer(spec)
    assert (created.state.spec, created.backlog, created.state.checkpoint.committed) == (spec, 6, 3)
    assert await admin.create_consumer(spec) == created
    assert await admin.consumers() == [created]
    with pytest.raises(ConsumerExists):
        await admin.create_consumer(ConsumerSpec("mes", STREAM, Buffer.FORWARD))
    [gap] = await admin.retire_consumer("mes", "line was scrapped")
    assert (gap.first, gap.last, gap.reason) == (4, 9, GapReason.RETIRED)
    assert await admin.gaps(STREAM) == [gap]
    [listed] = await admin.consumers()
    assert listed.state.retired_reason == "line was scrapped"
    with pytest.raises(ConsumerRetired):
        await admin.retire_consumer("mes", "again")


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_operators_see_the_frontier_and_truncate_up_to_it(sites: Sites, storage: str) -> None:
    """What everybody has confirmed may be removed by order: not beyond the frontier, nor while a link stands still."""
    site, admin = await operated(sites, storage=storage)
    await append(site, 10)
    view = await admin.frontier(STREAM)
    assert (view.start, view.end, view.frontier, view.slowest, view.held_by) == (0, 10, -1, (), ())
    with pytest.raises(TruncateRefused):
        await admin.truncate_before(STREAM, 1, "the disk is needed")
    cursors = site.parts.storage.cursors
    for name, through in (("mes", 7), ("enterprise.operational", 5)):
        await cursors.create(ConsumerSpec(name, STREAM))
        await cursors.commit(name, Confirmation(through=through))
    held = await admin.frontier(STREAM)
    assert (held.frontier, held.slowest) == (5, ("enterprise.operational",))
    assert held.held_by == ("enterprise.operational",)
    with pytest.raises(TruncateRefused, match="not open"):
        await admin.truncate_before(STREAM, 3, "the disk is needed")
    site.parts.links.on("enterprise", "sender", Event.PEER_FOUND)
    with pytest.raises(TruncateRefused, match=r"enterprise\.operational confirmed only up to 5"):
        await admin.truncate_before(STREAM, 7, "the disk is needed")
    with pytest.raises(InvalidArgument):
        await admin.truncate_before(STREAM, 6, " ")
    with pytest.raises(InvalidArgument):
        await admin.truncate_before(STREAM, -1, "because")
    assert (await admin.frontier(STREAM)).start == 0
    assert (await admin.truncate_before(STREAM, 6, "the disk is needed")).start == 6
    with pytest.raises(UnknownStream):
        await admin.truncate_before("nowhere", 1, "because")


async def test_impossible_consumers_are_refused(sites: Sites) -> None:
    """Bad names, unknown streams and consumers, and a missing reason have their own errors."""
    _, admin = await operated(sites)
    calls: list[tuple[type[BsfgError], Callable[[], Awaitable[object]]]] = [
        (InvalidArgument, lambda: admin.create_consumer(ConsumerSpec("Bad Name", STREAM))),
        (UnknownStream, lambda: admin.create_consumer(ConsumerSpec("x", "nowhere"))),
        (UnknownConsumer, lambda: admin.retire_consumer("nobody", "because")),
        (InvalidArgument, lambda: admin.gaps("nowhere", Buffer.STORE)),
    ]
    for error, call in calls[:3]:
        with pytest.raises(error):
            await call()
    with pytest.raises(UnknownStream):
        await calls[3][1]()
    await admin.create_consumer(ConsumerSpec("x", STREAM))
    with pytest.raises(InvalidArgument, match="needs a reason"):
        await admin.retire_consumer("x", " ")


async def test_gates_are_held_and_released_with_reasons(sites: Sites) -> None:
    """A gate shows who holds it, why and until when; without a reason or out of turn nothing moves."""
    site, admin = await operated(sites)
    assert [(view.link, view.side, view.gate.mode) for view in await admin.gates()] == [
        ("enterprise", "sender", Mode.AUTONOMOUS),
        (LINK, "receiver", Mode.AUTONOMOUS),
    ]
    until = site.parts.clock.now_unix_ms() + 60_000
    held = await admin.hold_gate(LINK, "drill", until_unix_ms=until)
    assert (held.gate.mode, held.gate.held_by, held.gate.reason) == (Mode.HELD, "operator", "drill")
    assert held.gate.held_until_unix_ms == until
    assert (await admin.gates())[1] == held
    released = await admin.release_gate(LINK, "drill is over")
    assert (released.gate.mode, released.gate.reason) == (Mode.AUTONOMOUS, "released by operator: drill is over")
    with pytest.raises(InvalidTransition):
        await admin.release_gate(LINK, "again")
    with pytest.raises(InvalidArgument):
        await admin.hold_gate(LINK, "")
    with pytest.raises(InvalidArgument, match="control characters"):
        await admin.hold_gate(LINK, "a drill\x00")
    with pytest.raises(UnknownLink):
        await admin.hold_gate("nowhere", "x")
    with pytest.raises(UnknownLink):
        await admin.hold_gate("enterprise", "x", side="receiver")


async def test_one_pipeline_at_a_time_has_the_lease(sites: Sites) -> None:
    """A second pipeline is told who has the lease; it gets it when the first gives it back."""
    site = await sites()
    site.act_as("pipeline")
    admin = site.admin_client()
    lease = await admin.acquire_lease(LINK, "spark-1", 5_000)
    assert (lease.holder, lease.ttl_ms, lease.mode) == ("spark-1", 5_000, "autonomous")
    with pytest.raises(LeaseHeld, match="spark-1") as caught:
        await admin.acquire_lease(LINK, "spark-2", 5_000)
    assert 0 < caught.value.details["left_ms"] <= 5_000
    assert (await admin.renew_lease(LINK, lease.token, 9_000)).ttl_ms == 9_000
    with pytest.raises(LeaseLost):
        await admin.renew_lease(LINK, "another token", 5_000)
    with pytest.raises(InvalidArgument):
        await admin.acquire_lease(LINK, "spark-2", 1)
    with pytest.raises(UnknownLink):
        await admin.acquire_lease("nowhere", "spark-2", 5_000)
    await admin.release_lease(LINK, "another token")
    with pytest.raises(LeaseHeld):
        await admin.acquire_lease(LINK, "spark-2", 5_000)
    await admin.release_lease(LINK, lease.token)
    await admin.release_lease(LINK, lease.token)
    assert (await admin.acquire_lease(LINK, "spark-2", 5_000)).token != lease.token


async def test_parts_of_one_pipeline_take_turns(sites: Sites) -> None:
    """A second part waits for the lease and the first learns of it; an urgent one comes before those that wait."""
    site = await sites()
    site.act_as("pipeline")
    admin = site.admin_client()
    first = await admin.acquire_lease(LINK, "spark", 5_000)
    keeping = asyncio.create_task(admin.renew_lease(LINK, first.token, 5_000, wait_seconds=2))
    second = asyncio.create_task(admin.acquire_lease(LINK, "spark", 5_000, wait_seconds=10))
    assert (await keeping).wanted == 1
    keeping = asyncio.create_task(admin.renew_lease(LINK, first.token, 5_000, wait_seconds=2, seen=1))
    urgent = asyncio.create_task(admin.acquire_lease(LINK, "spark", 5_000, wait_seconds=10, urgent=True))
    assert (await keeping).wanted == 2
    await admin.release_lease(LINK, first.token)
    driver = await urgent
    assert not second.done() and driver.wanted == 1
    await admin.release_lease(LINK, driver.token)
    assert (await second).token not in (first.token, driver.token)
    with pytest.raises(LeaseHeld):
        await admin.acquire_lease(LINK, "another", 5_000, wait_seconds=10)


async def test_who_hangs_up_loses_the_lease_soon(sites: Sites) -> None:
    """A part that dies while it keeps the lease leaves it to the next one long before it would end."""
    site = await sites()
    site.act_as("pipeline")
    dying, admin = site.admin_client(), site.admin_client()
    first = await dying.acquire_lease(LINK, "spark", 100_000)
    keeping = asyncio.create_task(dying.renew_lease(LINK, first.token, 100_000, wait_seconds=10))
    second = asyncio.create_task(admin.acquire_lease(LINK, "spark", 5_000, wait_seconds=10))
    assert (await keeping).wanted == 1

    def ends_ms() -> int:
        lease = site.parts.links.leases.live(LINK)
        assert lease is not None
        return lease.ends_ms

    before = ends_ms()
    keeping = asyncio.create_task(dying.renew_lease(LINK, first.token, 300_000, wait_seconds=10, seen=1))
    while ends_ms() == before:  # noqa: ASYNC110 - nothing tells that a call has come
        await asyncio.sleep(0.01)
    keeping.cancel()
    assert (await second).holder == "spark"


async def test_what_is_known_of_a_sender_is_kept_for_every_engine(sites: Sites) -> None:
    """A position comes back as it was told, but only from whoever holds the lease."""
    site = await sites()
    site.act_as("pipeline")
    admin, memory = site.admin_client(), SessionMemory()
    site.parts.memory = lambda link, stream: memory
    assert await admin.recall_peer(LINK, STREAM) == PeerPosition()
    position = PeerPosition("a" * 32, 17, 16, 20, b"head", None, "token")
    await admin.remember_peer(PeerMemo(LINK, STREAM, position))
    assert await admin.recall_peer(LINK, STREAM) == position == memory.position
    lease = await admin.acquire_lease(LINK, "spark", 5_000)
    with pytest.raises(LeaseLost):
        await admin.remember_peer(PeerMemo(LINK, STREAM, PeerPosition()))
    await admin.remember_peer(PeerMemo(LINK, STREAM, PeerPosition(), lease.token))
    with pytest.raises(UnknownStream):
        await admin.recall_peer(LINK, "nowhere")


async def test_a_release_stays_until_it_is_settled_by_name(sites: Sites) -> None:
    """An engine that writes its position, or settles another release, does not take an operator's word away."""
    site = await sites()
    site.act_as("pipeline")
    released = Release("foreign_log", "b" * 32)
    admin, memory = site.admin_client(), SessionMemory(PeerPosition("a" * 32, 17, released=released))
    site.parts.memory = lambda link, stream: memory
    assert (await admin.recall_peer(LINK, STREAM)).released == released
    position = PeerPosition("a" * 32, 18)
    await admin.remember_peer(PeerMemo(LINK, STREAM, position))
    await admin.remember_peer(PeerMemo(LINK, STREAM, position, settles=Release("frame_invalid", "b" * 32)))
    assert await admin.recall_peer(LINK, STREAM) == PeerPosition("a" * 32, 18, released=released)
    await admin.remember_peer(PeerMemo(LINK, STREAM, position, settles=released))
    assert await admin.recall_peer(LINK, STREAM) == position


async def test_a_release_is_a_durable_value_of_each_stream(tmp_path: Path) -> None:
    """The stream in which another history was found accepts that one, the others the next; all outlive a restart."""
    state = NodeState(tmp_path)
    for stream in ("audit", "operational"):
        await state.peer(LINK, stream).remember(PeerPosition("a" * 32, 17))
    reason, found = "foreign_log: the sender's log is another", "b" * 32
    state.accept(LINK, Gate(Mode.HELD, 0, reason, "bsfg", None, "operational", found))
    state.close()
    state = NodeState(tmp_path)
    expected = {"audit": Release("foreign_log"), "operational": Release("foreign_log", found)}
    for stream, released in expected.items():
        memory = state.peer(LINK, stream)
        await memory.remember(PeerPosition("a" * 32, 18))
        assert await memory.recall() == PeerPosition("a" * 32, 18, released=released)
        await memory.remember(PeerPosition(found), settles=released)
        assert await memory.recall() == PeerPosition(found)
    state.close()


async def test_reports_move_the_gate(sites: Sites) -> None:
    """What a pipeline reports turns the gate, shows in the status, and a fault holds the link."""
    site = await sites()
    site.act_as("pipeline")
    admin = site.admin_client()
    report = LinkReport(LINK, STREAM, Event.PEER_FOUND, backlog=500, inserted=10, lag_seconds=0.25)
    assert (await admin.report_link(report)).mode == "reconciliation"
    assert (await admin.report_link(LinkReport(LINK, STREAM, Event.BACKLOG_CLEARED))).mode == "normal"
    assert (await admin.report_link(LinkReport(LINK, STREAM, backlog=3, lag_seconds=0.5))).mode == "normal"
    status = await admin.status()
    [receiver] = [link for link in status["links"] if link["side"] == "receiver"]
    assert receiver["reports"][0]["lag_seconds"] == 0.5
    held = LinkReport(LINK, STREAM, hold_code="foreign_log", hold_detail="it was another log")
    assert (await admin.report_link(held)).mode == "held"
    [gate] = [view.gate for view in await admin.gates() if view.side == "receiver"]
    assert gate.reason == "foreign_log: it was another log"
    lease = await admin.acquire_lease(LINK, "spark-1", 5_000)
    with pytest.raises(LeaseLost):
        await admin.report_link(report)
    assert (await admin.report_link(LinkReport(LINK, lease=lease.token))).mode == "held"
    with pytest.raises(UnknownStream):
        await admin.report_link(LinkReport(LINK, "nowhere", lease=lease.token))


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_quarantine_is_listed_in_pages(sites: Sites, storage: str) -> None:
    """Pages of any size go through all buffers once, in one order; the newest of each come first when asked for."""
    site, admin = await operated(sites, storage=storage)
    buffers = [await site.parts.store(STREAM), await site.parts.forward(STREAM), await site.parts.forward("audit")]
    for number, buffer in enumerate(buffers):
        await buffer.set_aside(sealed(messages(5, seed=number, from_zone="enterprise")), "expired")
    everything = [(view.stream, view.buffer, view.quarantined.id) for view in await admin.quarantine()]
    assert len(set(everything)) == len(everything) == 15
    for limit in (1, 4, 5, 7, 15, 100):
        found, page = [], await admin.quarantine_page(limit=limit)
        while True:
            assert (page.total, len(page.views) <= limit) == (15, True)
            found += [(view.stream, view.buffer, view.quarantined.id) for view in page.views]
            if not page.following:
                break
            page = await admin.quarantine_page(after=page.following, limit=limit)
        assert found == everything
    newest = await admin.quarantine_page(STREAM, limit=3, newest_first=True)
    assert [view.quarantined.id for view in newest.views] == sorted(id for *_, id in everything[-3:])[::-1]
    # The last two are more than a storage, or Python, takes for a number.
    for nowhere in ("nowhere", f"{STREAM}/forward/x", f"{STREAM}/forward/{10**19}", f"{STREAM}/forward/{5_000 * '9'}"):
        with pytest.raises(InvalidArgument, match="no place in quarantine"):
            await admin.quarantine_page(after=nowhere)


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_quarantine_is_listed_shown_retried_and_dropped(sites: Sites, storage: str) -> None:
    """A conflict stays in quarantine when it is retried, leaves it when it is dropped; what expired can be taken."""
    site, admin = await operated(sites, storage=storage)
    forward = await site.parts.forward(STREAM)
    facts = messages(3, from_zone="enterprise")
    origin = OriginSpan("enterprise", np.arange(1), np.full(1, 1_700_000_000_000))
    await forward.put_if_absent(sealed(facts[:1]), origin)
    await forward.put_if_absent(sealed(altered(facts[:1])), origin)
    late = OriginSpan("idmz", np.array([41]), np.array([1_600_000_000_000]), np.array([8 * 86_400_000]))
    await forward.set_aside(sealed(facts[1:2]), "expired", "too old", late)
    await forward.set_aside(sealed(facts[2:3]), "expired", "too old")
    conflict, expired, older = await admin.quarantine()
    assert (conflict.quarantined.reason, expired.quarantined.reason) == ("conflict", "expired")
    assert conflict.quarantined.key.message_id == "0-000000"
    assert await admin.quarantine("audit") == []
    shown = await admin.quarantined(STREAM, conflict.quarantined.id)
    assert shown.quarantined.facts == FactBatch(sealed(altered(facts[:1])).record_batch)
    settled = await admin.retry_quarantined(STREAM, conflict.quarantined.id, "try")
    assert settled == (False, Result.CONFLICT)
    assert await admin.retry_quarantined(STREAM, expired.quarantined.id, "late but wanted") == (True, Result.INSERTED)
    entry = await forward.get(expired.quarantined.key)
    assert entry is not None and entry.origin is not None and entry.origin.age_ms is not None
    assert entry.origin == replace(late.at(0), age_ms=entry.origin.age_ms)
    assert 0 <= entry.origin.age_ms - 8 * 86_400_000 < 86_400_000, "it is as old as it was, and as long as it waited"
    # What was set aside by a version that did not keep the origin.
    assert await admin.retry_quarantined(STREAM, older.quarantined.id, "wanted") == (True, Result.INSERTED)
    entry = await forward.get(older.quarantined.key)
    assert entry is not None and entry.origin is not None and entry.origin.offset == -1
    with pytest.raises(InvalidArgument, match="reason"):
        await admin.drop_quarantined(STREAM, conflict.quarantined.id, "")
    await admin.drop_quarantined(STREAM, conflict.quarantined.id, "looked at it")
    assert await admin.quarantine() == []
    with pytest.raises(InvalidArgument):
        await admin.quarantined(STREAM, 99)


@pytest.mark.parametrize("buffer", list(Buffer))
async def test_what_cannot_be_compared_stays_in_quarantine(sites: Sites, buffer: Buffer) -> None:
    """The key of what left cannot be read, and may be of another fact: a retry lets nothing go."""
    site, admin = await operated(sites, storage="log")
    found = await site.parts.buffer(STREAM, buffer)
    facts = messages(2, from_zone="enterprise")
    origin = OriginSpan("enterprise", np.arange(2), np.full(2, 1_700_000_000_000))

    async def put() -> None:
        batch = sealed(facts)
        if buffer == Buffer.STORE:
            await (await site.parts.store(STREAM)).append(batch)
        else:
            await (await site.parts.forward(STREAM)).put_if_absent(batch, origin)

    await put()
    await spoil_keys(found)
    await put()
    for view in (aside := await admin.quarantine()):
        assert view.quarantined.reason == "undecided"
        again = await admin.retry_quarantined(STREAM, view.quarantined.id, "try", buffer)
        assert again == (False, Result.ALREADY_EXISTS)
    assert len(aside) == 2
    assert await admin.quarantine() == aside
    await admin.drop_quarantined(STREAM, aside[0].quarantined.id, "looked at it", buffer)
    assert await admin.quarantine() == aside[1:]


async def test_the_status_tells_what_matters(sites: Sites) -> None:
    """The status has streams with fill, consumers with backlog and links with modes."""
    site, admin = await operated(sites, storage="log")
    await append(site, 10)
    await site.consumer()
    status = await admin.status()
    assert status["zone"] == "plant"
    store = next(each for each in status["buffers"] if (each["stream"], each["buffer"]) == (STREAM, "store"))
    assert (store["end"], store["fill"]) == (10, "healthy")
    assert store["used_bytes"] > 0
    [consumer] = status["consumers"]
    assert (consumer["name"], consumer["backlog"], consumer["committed"]) == ("historian", 10, -1)
    assert {link["mode"] for link in status["links"]} == {"autonomous"}


async def test_a_viewer_sees_and_does_not_act(sites: Sites) -> None:
    """A viewer gets every list and is refused every decision; a producer gets neither."""
    site = await sites()
    await site.consumer()
    admin = site.admin_client()
    views: list[Callable[[], Awaitable[object]]] = [
        admin.status,
        admin.consumers,
        admin.gates,
        admin.quarantine,
        lambda: admin.gaps(STREAM),
        lambda: admin.frontier(STREAM),
    ]
    decisions: list[Callable[[], Awaitable[object]]] = [
        lambda: admin.create_consumer(ConsumerSpec("x", STREAM)),
        lambda: admin.retire_consumer("historian", "because"),
        lambda: admin.truncate_before(STREAM, 0, "because"),
        lambda: admin.hold_gate(LINK, "because"),
        lambda: admin.release_gate(LINK, "because"),
        lambda: admin.retry_quarantined(STREAM, 1, "because"),
        lambda: admin.drop_quarantined(STREAM, 1, "because"),
        lambda: admin.acquire_lease(LINK, "me", 5_000),
        lambda: admin.renew_lease(LINK, "token", 5_000),
        lambda: admin.release_lease(LINK, "token"),
        lambda: admin.report_link(LinkReport(LINK)),
        lambda: admin.recall_peer(LINK, STREAM),
        lambda: admin.remember_peer(PeerMemo(LINK, STREAM, PeerPosition())),
    ]
    site.act_as("viewer")
    for view in views:
        await view()
    for decision in decisions:
        with pytest.raises(PermissionRefused):
            await decision()
    site.act_as("app")
    for call in views + decisions:
        with pytest.raises(PermissionRefused):
            await call()
    assert len(site.refusals) == len(decisions) + len(views + decisions)
    assert (await site.parts.storage.cursors.consumer("historian")).retired_reason is None
