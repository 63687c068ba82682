"""The board of the links: gates move by its rules, leases end by the clock, reports show what happened last."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import GateHeld, InvalidArgument, LeaseHeld, LeaseLost, UnknownLink
from bsfg.gate import RECEIVER, SENDER, Event, Gate, Mode
from bsfg.node.links import LinkRegistry
from bsfg.testing.clock import FakeClock
from bsfg.wire.service import GateView, LinkReport


def board() -> tuple[LinkRegistry, FakeClock, list[tuple[GateView, Gate]]]:
    """Make a board with one link on each side, its clock, and the list of its moves."""
    clock, moves = FakeClock(), []
    made = LinkRegistry(clock, lambda view, before: moves.append((view, before)))
    made.add("from-a", RECEIVER)
    made.add("b", SENDER)
    return made, clock, moves


def test_gates_move_and_tell() -> None:
    """Every change of mode is told once, with what was before; what changes nothing is not."""
    links, _, moves = board()
    links.on("from-a", RECEIVER, Event.PEER_FOUND)
    links.on("from-a", RECEIVER, Event.PEER_FOUND)
    links.on("from-a", RECEIVER, Event.BACKLOG_CLEARED)
    assert [(before.mode, view.gate.mode) for view, before in moves] == [
        (Mode.AUTONOMOUS, Mode.RECONCILIATION),
        (Mode.RECONCILIATION, Mode.NORMAL),
    ]
    with pytest.raises(UnknownLink):
        links.on("from-a", SENDER, Event.PEER_FOUND)


def test_a_hold_ends_by_itself() -> None:
    """A hold with an end is over when somebody looks after that time, and the end is told like any move."""
    links, clock, moves = board()
    until = clock.now_unix_ms() + 1_000
    links.hold("from-a", RECEIVER, by="operator", reason="drill", until_unix_ms=until)
    with pytest.raises(GateHeld, match="drill"):
        links.check_open("from-a")
    clock.advance(1.0)
    links.check_open("from-a")
    assert links.gate("from-a").gate.mode == Mode.AUTONOMOUS
    assert len(moves) == 2


def test_a_held_sender_serves_nobody_of_that_zone() -> None:
    """The gate to a zone stops its fetches; zones without a gate are local and always served."""
    links, _, _ = board()
    links.check_serving("b")
    links.hold("b", SENDER, by="operator", reason="drill")
    with pytest.raises(GateHeld):
        links.check_serving("b")
    links.check_serving("here")


@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "renew", "give_back", "wait", "foreign"]), st.integers(0, 2)), max_size=40
    )
)
def test_nobody_shares_a_lease(steps: list[tuple[str, int]]) -> None:
    """Whatever pipelines do, at each moment at most one of them passes the check of the lease."""
    links, clock, _ = board()
    tokens: dict[int, str] = {}
    for step, who in steps:
        try:
            if step == "acquire":
                tokens[who] = links.leases.acquire("from-a", f"p{who}", 1_000).token
            elif step == "renew" and who in tokens:
                links.leases.renew("from-a", tokens[who], 1_000)
            elif step == "give_back" and who in tokens:
                links.leases.give_back("from-a", tokens[who])
            elif step == "foreign":
                links.leases.renew("from-a", "guess", 1_000)
            elif step == "wait":
                clock.advance(0.4)
        except (LeaseHeld, LeaseLost):
            pass
        if links.leases.holder("from-a") is None:
            continue
        passing = [token for token in {*tokens.values(), "guess"} if _passes(links, token)]
        assert len(passing) == 1


def _passes(links: LinkRegistry, token: str) -> bool:
    try:
        links.leases.check("from-a", token)
    except LeaseLost:
        return False
    return True


def test_leases_end_by_the_monotonic_clock() -> None:
    """A lease ends after its time; the late holder keeps it if nobody else took it."""
    links, clock, _ = board()
    first = links.leases.acquire("from-a", "p1", 1_000)
    clock.advance(1.5)
    assert links.leases.holder("from-a") is None
    assert links.leases.renew("from-a", first.token, 1_000).token == first.token
    clock.advance(1.5)
    second = links.leases.acquire("from-a", "p2", 1_000)
    with pytest.raises(LeaseLost, match="p2"):
        links.leases.renew("from-a", first.token, 1_000)
    with pytest.raises(LeaseLost):
        links.report(LinkReport("from-a", "s", lease=first.token))
    links.report(LinkReport("from-a", "s", lease=second.token))
    for ttl_ms in (0, 999, 300_001):
        with pytest.raises(InvalidArgument):
            links.leases.acquire("from-a", "p3", ttl_ms)


def test_an_urgent_waiter_comes_first() -> None:
    """Whoever waits urgently has the lease next, also before one of its own who waited longer."""
    asyncio.run(_urgent_first())


async def _urgent_first() -> None:
    links, _, _ = board()
    held = links.leases.acquire("from-a", "spark", 60_000)
    task = asyncio.create_task(links.leases.acquire_in_line("from-a", "spark", 60_000, 60))
    await asyncio.sleep(0)
    driver = asyncio.create_task(links.leases.acquire_in_line("from-a", "spark", 60_000, 60, urgent=True))
    await asyncio.sleep(0)
    links.leases.give_back("from-a", held.token)
    await asyncio.wait([task, driver], return_when=asyncio.FIRST_COMPLETED)
    assert driver.done() and not task.done()
    links.leases.give_back("from-a", driver.result().token)
    assert (await task).holder == "spark"


def test_reports_are_kept_by_stream() -> None:
    """The last report of each stream is shown; a report of a fault holds the link in the pipeline's name."""
    links, _, _ = board()
    links.report(LinkReport("from-a", "s", Event.PEER_FOUND, backlog=5))
    links.report(LinkReport("from-a", "s", backlog=3))
    links.report(LinkReport("from-a", "t", backlog=9))
    assert [(report.stream, report.backlog) for _, report in links.reports()] == [("s", 3), ("t", 9)]
    view = links.report(LinkReport("from-a", "s", hold_code="foreign_log"))
    assert (view.gate.mode, view.gate.held_by, view.gate.reason) == (Mode.HELD, "pipeline", "foreign_log")
    links.fetched("historian", 7)
    last = links.last_fetch("historian")
    assert last is not None
    assert last[1] == 7
    assert links.last_fetch("nobody") is None


def test_a_long_wait_is_no_silence() -> None:
    """A consumer that is being served is in touch, however long it waits for new facts."""
    clock = FakeClock()
    links = LinkRegistry(clock)
    with links.fetching("historian"):
        clock.advance(60_000)
        assert links.last_fetch("historian") == (clock.now_unix_ms(), 0)
        links.fetched("historian", 7)
    ended_unix_ms = clock.now_unix_ms()
    clock.advance(5_000)
    assert links.last_fetch("historian") == (ended_unix_ms, 7)


def test_the_lag_of_what_came_stands_for_a_minute() -> None:
    """A turn that brought nothing says nothing of the lag; after a minute without anything new there is none."""
    links, clock, _ = board()
    assert links.lag_seconds("from-a", "s") is None
    links.report(LinkReport("from-a", "s", lag_seconds=0.25))
    links.report(LinkReport("from-a", "s"))
    clock.advance(60.0)
    assert (links.lag_seconds("from-a", "s"), links.lag_seconds("from-a", "t")) == (0.25, None)
    clock.advance(0.001)
    assert links.lag_seconds("from-a", "s") is None
