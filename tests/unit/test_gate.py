"""The gate: the whole transition table, holds with an end, and the diagram of the replay model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import InvalidArgument, InvalidTransition
from bsfg.gate import NETWORK_EVENTS, TABLE, Event, Gate, Mode

A, N, R, H = Mode.AUTONOMOUS, Mode.NORMAL, Mode.RECONCILIATION, Mode.HELD
# Rows: from which mode. Columns: peer lost, peer found, backlog cleared, backlog grew, hold, release, hold ended.
EXPECTED: dict[Mode, list[Mode | None]] = {
    N: [A, N, N, R, H, None, None],
    A: [A, R, A, A, H, None, None],
    R: [A, R, N, R, H, None, None],
    H: [H, H, H, H, H, A, A],
}
MOVES = [(mode, event, after) for mode, row in EXPECTED.items() for event, after in zip(Event, row, strict=True)]


@pytest.mark.parametrize(("mode", "event", "after"), MOVES)
def test_the_whole_table(mode: Mode, event: Event, after: Mode | None) -> None:
    """Every pair of mode and event leads where the table here says, or is refused."""
    assert TABLE.get((mode, event)) == after
    gate = Gate(mode, 5, "before", "operator" if mode == H else "", None)
    if event in NETWORK_EVENTS:
        moved = gate.on(event, 10)
        assert moved.mode == after
        assert (moved is gate) == (after == mode)
        return
    with pytest.raises(InvalidTransition) as caught:
        gate.on(event, 10)
    assert caught.value.details == {"mode": mode, "event": event}


@pytest.mark.parametrize("mode", Mode)
def test_hold_and_release_follow_the_table(mode: Mode) -> None:
    """An operator may hold a gate in any mode, and release only a held one."""
    gate = Gate(mode, 5)
    assert gate.hold(10, by="op", reason="work").mode == TABLE[mode, Event.HOLD] == H
    if mode == H:
        assert gate.release(10, by="op", reason="done").mode == TABLE[H, Event.RELEASE]
    else:
        with pytest.raises(InvalidTransition, match="not held"):
            gate.release(10, by="op", reason="done")


def test_the_diagram_of_the_replay_model() -> None:
    """Normal → partition → autonomous → restored → reconciliation → backlog cleared → normal, with times."""
    gate = Gate(N, 0)
    assert (gate.is_open, gate.allows_truncation, gate.allows_fetch) == (True, True, True)
    gate = gate.on(Event.PEER_LOST, 10, "network partition")
    assert gate == Gate(A, 10, "network partition")
    assert (gate.is_open, gate.allows_truncation, gate.allows_fetch) == (False, False, True)
    gate = gate.on(Event.PEER_FOUND, 20, "connectivity restored")
    assert gate == Gate(R, 20, "connectivity restored")
    assert (gate.is_open, gate.allows_truncation, gate.allows_fetch) == (True, True, True)
    gate = gate.on(Event.BACKLOG_CLEARED, 30)
    assert gate == Gate(N, 30, "backlog cleared")


def test_a_new_gate_assumes_nothing() -> None:
    """Before the first fetch nobody knows whether the peer is there: the gate starts autonomous, and may fetch."""
    assert Gate().mode == A
    assert Gate().allows_fetch
    assert not Gate().allows_truncation


def test_what_changes_nothing_keeps_since_and_reason() -> None:
    """A repeated event leaves the gate as it was, so that `since` tells how long an outage lasts."""
    gate = Gate(A, 10, "timeout")
    assert gate.on(Event.PEER_LOST, 99, "another timeout") is gate


def test_a_held_gate_stands_still() -> None:
    """A held gate allows neither fetching nor truncation, and no network event moves it."""
    gate = Gate(N, 0).hold(10, by="anna", reason="audit", until_unix_ms=50)
    assert (gate.held_by, gate.reason, gate.held_until_unix_ms, gate.since_unix_ms) == ("anna", "audit", 50, 10)
    assert (gate.is_open, gate.allows_fetch, gate.allows_truncation) == (False, False, False)
    for event in NETWORK_EVENTS:
        assert gate.on(event, 20) is gate


def test_a_hold_ends_at_its_time() -> None:
    """A hold with an end is over at that moment and not before; one without an end never ends by itself."""
    gate = Gate(N, 0).hold(10, by="anna", reason="audit", until_unix_ms=50)
    assert gate.tick(49) is gate
    assert gate.tick(50) == Gate(A, 50, "hold ended: audit")
    forever = Gate(N, 0).hold(10, by="anna", reason="audit")
    assert forever.tick(1 << 60) is forever
    normal = Gate(N, 0)
    assert normal.tick(1 << 60) is normal


def test_a_second_hold_replaces_the_first() -> None:
    """Holding again changes who, why and until when, but not since when the gate is held."""
    gate = Gate(N, 0).hold(10, by="anna", reason="audit", until_unix_ms=50)
    again = gate.hold(20, by="ben", reason="incident")
    assert again == Gate(H, 10, "incident", "ben", None)
    assert again.tick(60) is again


def test_a_released_gate_finds_its_way_back() -> None:
    """A release names its operator; then the gate is autonomous until a fetch succeeds."""
    gate = Gate(N, 0).hold(10, by="anna", reason="audit").release(20, by="ben", reason="clean")
    assert gate == Gate(A, 20, "released by ben: clean")
    assert gate.on(Event.PEER_FOUND, 30).on(Event.BACKLOG_CLEARED, 40).mode == N


@pytest.mark.parametrize(("by", "reason"), [("", "x"), ("x", ""), (" ", "x"), ("x", "\n")])
def test_an_operator_gives_name_and_reason(by: str, reason: str) -> None:
    """Holding and releasing need both a name and a reason."""
    with pytest.raises(InvalidArgument):
        Gate().hold(1, by=by, reason=reason)
    with pytest.raises(InvalidArgument):
        Gate(H).release(1, by=by, reason=reason)


@pytest.mark.parametrize("until", [9, 10])
def test_a_hold_ends_in_the_future(until: int) -> None:
    """An end that is not in the future is refused."""
    with pytest.raises(InvalidArgument, match="future"):
        Gate().hold(10, by="anna", reason="audit", until_unix_ms=until)


@given(st.lists(st.sampled_from([*NETWORK_EVENTS, "hold", "release", "tick"]), max_size=30))
def test_no_walk_leaves_the_table(walk: list[Event | str]) -> None:
    """Whatever happens in whatever order, truncation never runs while the link is autonomous or held."""
    gate, lost = Gate(), True
    for now, step in enumerate(walk, 1):
        if step == "hold":
            gate = gate.hold(now, by="op", reason="r", until_unix_ms=now + 3)
        elif step == "release":
            gate = gate.release(now, by="op", reason="r") if gate.mode == H else gate
        elif step == "tick":
            gate = gate.tick(now)
        else:
            assert isinstance(step, Event)
            if gate.mode != H:
                lost = step == Event.PEER_LOST or (lost and step != Event.PEER_FOUND)
            gate = gate.on(step, now)
        lost = lost or gate.mode == H
        assert gate.allows_truncation == gate.is_open == (gate.mode in (N, R))
        assert not (lost and gate.allows_truncation)
        assert bool(gate.held_by) == (gate.mode == H)
