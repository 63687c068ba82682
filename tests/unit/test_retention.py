"""What may leave a buffer: policies, decisions against a model offset by offset, and clocks that jump."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import PolicyInvalid, TruncateRefused
from bsfg.retention import (
    DAY_SECONDS,
    Age,
    Cause,
    ClockGuard,
    ConsumerStanding,
    Fill,
    Gap,
    GapReason,
    Overflow,
    Piece,
    Policy,
    Removal,
    departure,
    make_room,
    ordered_before,
    removable_before,
)

POLICY = Policy(capacity_bytes=100, retention_seconds=10, max_age_seconds=20, key_horizon_seconds=40)
NOW_MS = 1_000_000


@st.composite
def buffers(draw: st.DrawFn) -> list[Piece]:
    """Draw pieces that follow each other, oldest first."""
    pieces, first, age = [], draw(st.integers(0, 5)), draw(st.integers(-5, 40))
    for length, size, younger in draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(0, 12)))):
        pieces.append(Piece(first, first + length - 1, size, NOW_MS - 1000 * age))
        first, age = first + length, age - younger
    return pieces


POLICIES = st.builds(
    lambda overflow, sil: replace(POLICY, overflow=Overflow.REJECT_NEW if sil else overflow, safety="sil" * sil),
    st.sampled_from(Overflow),
    st.booleans(),
)


def offsets(pieces: list[Piece]) -> set[int]:
    return {offset for piece in pieces for offset in range(piece.first, piece.last + 1)}


def recorded(removal: Removal) -> list[int]:
    return [offset for gap in removal.gaps for offset in range(gap.first, gap.last + 1)]


def check_removal(removal: Removal, pieces: list[Piece], leaving: list[Piece], committed: int, why: GapReason) -> None:
    """Check that exactly these pieces leave, and that what nobody confirmed among them is recorded, once."""
    start = pieces[0].first if pieces else 0
    assert removal.before == (leaving[-1].last + 1 if leaving else start)
    assert recorded(removal) == sorted(offset for offset in offsets(leaving) if offset > committed)
    assert len(removal.gaps) <= 1
    assert all(gap.reason == why for gap in removal.gaps)


@given(buffers(), POLICIES, st.integers(-1, 30), st.booleans(), st.booleans())
def test_age_decides_as_the_model_does(
    pieces: list[Piece], policy: Policy, committed: int, link_open: bool, clock_trusted: bool
) -> None:
    """A piece leaves when every offset in it may, and every piece before it left."""

    def may_leave(offset: int, piece: Piece) -> bool:
        age = (NOW_MS - piece.newest_unix_ms) / 1000
        if not clock_trusted:
            return False
        if offset <= committed:
            return link_open and age >= policy.retention_seconds
        return not policy.is_sil and age > policy.max_age_seconds

    leaving = []
    for piece in pieces:
        if not all(may_leave(offset, piece) for offset in offsets([piece])):
            break
        leaving.append(piece)
    removal = removable_before(pieces, policy, ConsumerStanding(committed), Age(NOW_MS, link_open, clock_trusted))
    check_removal(removal, pieces, leaving, committed, GapReason.EXPIRED)
    if policy.is_sil or not clock_trusted:
        assert removal.gaps == ()
    if not link_open:
        assert all(offset > committed for offset in offsets(leaving))


@given(buffers(), POLICIES, st.integers(-1, 30), st.integers(0, 120), st.integers(0, 30))
def test_space_decides_as_the_model_does(
    pieces: list[Piece], policy: Policy, committed: int, incoming: int, beside: int
) -> None:
    """As few pieces leave as make room; unconfirmed ones only under `drop_oldest`; else the append is rejected."""
    used = sum(piece.size_bytes for piece in pieces) + beside
    expected: list[Piece] | None = None
    for count in range(len(pieces) + 1):
        freed = sum(piece.size_bytes for piece in pieces[:count])
        if used - freed + incoming <= policy.capacity_bytes:
            expected = pieces[:count]
            break
    if expected and policy.overflow == Overflow.REJECT_NEW and expected[-1].last > committed:
        expected = None
    removal = make_room(pieces, policy, ConsumerStanding(committed), used_bytes=used, incoming_bytes=incoming)
    if expected is None:
        assert removal is None
        return
    assert removal is not None
    check_removal(removal, pieces, expected, committed, GapReason.EVICTED)
    if policy.is_sil:
        assert removal.gaps == ()


def aged(*ages_seconds: int) -> list[Piece]:
    """Make pieces of ten offsets and ten bytes with these ages."""
    return [Piece(10 * n, 10 * n + 9, 10, NOW_MS - 1000 * age) for n, age in enumerate(ages_seconds)]


def decide(pieces: list[Piece], committed: int, policy: Policy = POLICY, **also: bool) -> Removal:
    """Decide by age with an open link and a good clock, unless said otherwise."""
    flags = {"link_open": True, "clock_trusted": True, **also}
    return removable_before(pieces, policy, ConsumerStanding(committed), Age(NOW_MS, **flags))


def test_the_frontier_of_the_specification() -> None:
    """With the frontier at 199 the facts 0-199 may go, with 100 the facts 0-99; later ones are retained."""
    pieces = [Piece(100 * n, 100 * n + 99, 10, 0) for n in range(4)]
    policy = replace(POLICY, max_age_seconds=10_000, key_horizon_seconds=10_000)
    assert decide(pieces, 199, policy) == Removal(200)
    assert decide(pieces, 100, policy) == Removal(100)
    assert decide(pieces, 99, policy) == Removal(100)
    assert decide(pieces, 98, policy) == Removal(0)
    assert decide(pieces, -1, policy) == Removal(0)


def test_confirmed_facts_stay_for_the_retention() -> None:
    """Confirmed facts leave when they are as old as the retention, not a moment before."""
    assert decide(aged(10, 9), 19) == Removal(10)
    assert decide(aged(10, 10), 19) == Removal(20)


def test_a_closed_link_keeps_what_is_confirmed() -> None:
    """While the link is autonomous nothing confirmed leaves by age, nor what stands behind or beside it."""
    assert decide(aged(99, 99, 99), 9, link_open=False) == Removal(0)
    assert decide(aged(99, 99, 99), 4, link_open=False) == Removal(0)
    assert decide(aged(99, 21, 20), -1, link_open=False) == Removal(20, (Gap(0, 19, GapReason.EXPIRED),))


def test_what_expires_is_recorded_from_the_frontier_on() -> None:
    """Only what was not confirmed becomes a gap, as one range over all pieces that expired."""
    assert decide(aged(50, 50, 50, 5), 4) == Removal(30, (Gap(5, 29, GapReason.EXPIRED),))


def test_safety_streams_never_expire() -> None:
    """On a `sil` stream confirmed facts leave by age, unconfirmed ones never."""
    policy = replace(POLICY, safety="sil")
    assert decide(aged(99, 99, 99), 9, policy) == Removal(10)
    assert decide(aged(99, 99, 99), -1, policy) == Removal(0)


def test_a_clock_in_doubt_removes_nothing() -> None:
    """While the clock is in doubt nothing leaves by age, confirmed or not."""
    assert decide(aged(99, 99), 9, clock_trusted=False) == Removal(0)


def test_an_empty_buffer_loses_nothing() -> None:
    """Nothing to remove is no trouble."""
    assert decide([], -1) == Removal(0)
    assert make_room([], POLICY, ConsumerStanding(-1), used_bytes=0, incoming_bytes=100) == Removal(0)
    assert make_room([], POLICY, ConsumerStanding(-1), used_bytes=1, incoming_bytes=100) is None


def test_confirmed_facts_make_room_early() -> None:
    """When space is needed, confirmed facts leave before their time, even under `reject_new`, without a gap."""
    assert make_room(aged(0, 0, 0), POLICY, ConsumerStanding(19), used_bytes=95, incoming_bytes=10) == Removal(10)
    assert make_room(aged(0, 0, 0), POLICY, ConsumerStanding(9), used_bytes=95, incoming_bytes=20) is None


def test_drop_oldest_records_what_it_drops() -> None:
    """Under `drop_oldest` the oldest leave and are recorded; an append larger than everything drops nothing."""
    policy = replace(POLICY, overflow=Overflow.DROP_OLDEST)
    dropped = make_room(aged(0, 0, 0), policy, ConsumerStanding(4), used_bytes=95, incoming_bytes=20)
    assert dropped == Removal(20, (Gap(5, 19, GapReason.EVICTED),))
    assert make_room(aged(0, 0, 0), policy, ConsumerStanding(4), used_bytes=95, incoming_bytes=101) is None


UNREAD = ConsumerStanding.of_forward(None)


def test_what_nobody_must_read_leaves_with_a_record_where_that_is_a_loss() -> None:
    """Unread facts leave by age, which is recorded on a `sil` stream, and make room with a record, or never there."""
    sil, open_ = replace(POLICY, safety="sil"), Age(NOW_MS, link_open=True, clock_trusted=True)
    assert removable_before(aged(99, 10, 9), POLICY, UNREAD, open_) == Removal(20)
    assert removable_before(aged(99, 10, 9), sil, UNREAD, open_) == Removal(20, (Gap(0, 19, GapReason.EXPIRED),))
    evicted = Removal(10, (Gap(0, 9, GapReason.EVICTED),))
    assert make_room(aged(0, 0, 0), POLICY, UNREAD, used_bytes=95, incoming_bytes=10) == evicted
    assert make_room(aged(0, 0, 0), sil, UNREAD, used_bytes=95, incoming_bytes=10) is None


def test_an_order_removes_only_what_nobody_waits_for() -> None:
    """An operator removes what is confirmed or what nobody must read; on a `sil` stream the latter is recorded."""
    sil = replace(POLICY, safety="sil")
    assert ordered_before(6, POLICY, ConsumerStanding(5), start=2, end=9) == Removal(6)
    assert ordered_before(1, POLICY, ConsumerStanding(5), start=2, end=9) == Removal(2)
    assert ordered_before(9, POLICY, UNREAD, start=2, end=9) == Removal(9)
    assert ordered_before(9, sil, UNREAD, start=2, end=9) == Removal(9, (Gap(2, 8, GapReason.TRUNCATED),))
    for offset, standing in (
        (7, ConsumerStanding(5)),
        (3, ConsumerStanding.of_store(None)),
        (10, ConsumerStanding(9)),
        (10, UNREAD),
    ):
        with pytest.raises(TruncateRefused):
            ordered_before(offset, POLICY, standing, start=2, end=9)


@pytest.mark.parametrize("overflow", Overflow)
@given(pieces=buffers(), committed=st.integers(-1, 20), awaited=st.booleans())
def test_a_full_disk_takes_what_is_confirmed_alone(
    overflow: Overflow, pieces: list[Piece], committed: int, awaited: bool
) -> None:
    """Room on the disk is never made of what somebody waits for, nor of what nobody must read."""
    policy, standing = replace(POLICY, overflow=overflow), ConsumerStanding(committed, awaited)
    for piece in pieces:
        assert departure(piece, policy, standing, Cause.DISK) == (piece.last <= committed, None)


def test_the_default_policy() -> None:
    """By default facts are kept for 7 days, new ones rejected when full, and keys outlive bytes."""
    policy = Policy().checked()
    assert policy.retention_seconds == policy.max_age_seconds == 7 * DAY_SECONDS
    assert policy.key_horizon_seconds > policy.max_age_seconds
    assert policy.overflow == Overflow.REJECT_NEW


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"safety": "SIL"}, "not known"),
        ({"safety": "sil", "overflow": Overflow.DROP_OLDEST}, "reject_new"),
        ({"retention_seconds": 21}, "max age"),
        ({"max_age_seconds": 41}, "key horizon"),
        ({"retention_seconds": -1}, "retention"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"warning_fill_percent": 0}, "warning_fill_percent"),
        ({"warning_fill_percent": 81}, "alert_fill_percent"),
        ({"alert_fill_percent": 101}, "alert_fill_percent"),
        ({"alert_fill_percent": float("nan")}, "alert_fill_percent"),
    ],
)
def test_contradicting_settings_are_refused(changes: dict[str, object], says: str) -> None:
    """A policy whose settings contradict each other is refused, naming them."""
    with pytest.raises(PolicyInvalid, match=says):
        replace(POLICY, **changes).checked()  # type: ignore[arg-type]


def test_equal_ages_are_allowed() -> None:
    """Retention, max age and key horizon may be the same, also zero."""
    replace(POLICY, retention_seconds=0, max_age_seconds=0, key_horizon_seconds=0).checked()
    replace(POLICY, safety="sil").checked()


@pytest.mark.parametrize(
    ("used", "fill"), [(0, Fill.HEALTHY), (49, Fill.HEALTHY), (50, Fill.WARNING), (80, Fill.WARNING), (81, Fill.ALERT)]
)
def test_fill(used: int, fill: Fill) -> None:
    """A buffer warns from half full and alerts beyond four fifths, unless told otherwise."""
    assert POLICY.fill(used) == (float(used), fill)


MINUTE_MS = 60_000


def test_a_steady_clock_is_trusted() -> None:
    """As long as both clocks run alike, ages can be trusted."""
    guard = ClockGuard()
    assert all(guard.observe(1_000_000 + at, at) for at in range(0, 100 * MINUTE_MS, MINUTE_MS))


def test_a_jump_forward_suspends_trust_until_it_is_undone() -> None:
    """A clock that jumped ahead is in doubt for as long as it stays ahead, and trusted once it is back."""
    guard = ClockGuard()
    assert guard.observe(0, 0)
    assert not guard.observe(10 * MINUTE_MS, 1_000)
    assert not guard.observe(20 * MINUTE_MS, 10 * MINUTE_MS)
    assert not guard.trusted
    assert guard.observe(11 * MINUTE_MS, 11 * MINUTE_MS)
    assert guard.trusted


def test_an_operator_accepts_the_new_time() -> None:
    """After a jump an operator may declare the new time right."""
    guard = ClockGuard()
    guard.observe(0, 0)
    assert not guard.observe(10 * MINUTE_MS, 0)
    guard.accept(10 * MINUTE_MS, 0)
    assert guard.trusted
    assert guard.observe(11 * MINUTE_MS, MINUTE_MS)


def test_a_jump_back_is_believed_and_the_leap_after_it_is_not() -> None:
    """A clock set back makes facts look younger: it is believed. Leaping forward again is a jump like any other."""
    guard = ClockGuard()
    assert guard.observe(100 * MINUTE_MS, 0)
    assert guard.observe(50 * MINUTE_MS, 1_000)
    assert guard.observe(51 * MINUTE_MS, MINUTE_MS)
    assert not guard.observe(102 * MINUTE_MS, 2 * MINUTE_MS)


def test_small_corrections_do_not_add_up() -> None:
    """A clock that is corrected by seconds every hour stays trusted for years; one step beyond the tolerance is not."""
    guard = ClockGuard()
    wall = 0
    for hour in range(10_000):
        wall += 60 * MINUTE_MS + 5_000
        assert guard.observe(wall, (hour + 1) * 60 * MINUTE_MS)
    monotonic = 10_000 * 60 * MINUTE_MS
    assert guard.observe(wall + MINUTE_MS, monotonic)
    assert not guard.observe(wall + 2 * MINUTE_MS + 1, monotonic)


@given(st.lists(st.tuples(st.integers(0, 600_000), st.integers(-10_000_000, 10_000_000)), max_size=30))
def test_no_age_is_trusted_after_a_leap(steps: list[tuple[int, int]]) -> None:
    """While the guard trusts, the wall clock has not run ahead of the monotonic one since the last trusted reading."""
    guard, wall, monotonic = ClockGuard(), 10**9, 0
    guard.observe(wall, monotonic)
    last = wall, monotonic
    for elapsed, jump in steps:
        wall, monotonic = wall + elapsed + jump, monotonic + elapsed
        ahead = (wall - last[0]) - (monotonic - last[1])
        assert guard.observe(wall, monotonic) == (ahead <= guard.tolerance_ms)
        last = (wall, monotonic) if guard.trusted else last
