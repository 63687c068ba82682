"""How a link paces itself, and what it makes of failures."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import (
    ArtifactMissing,
    BsfgError,
    BufferFull,
    DigestMismatch,
    ForeignLog,
    IdentityRevoked,
    MessageTooLarge,
    PeerUnreachable,
    ServerIdentityMismatch,
    TimedOut,
)
from bsfg.journey.handoff import (
    APPETITE_BYTES_MIN,
    GROWS_AFTER,
    Appetite,
    FaultConsequence,
    RateLimit,
    verdict,
)
from bsfg.retry import Backoff, Retry


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 1 << 25))
def test_appetite_stays_within_its_bounds(answers: list[bool], most_bytes: int) -> None:
    """However answers come or run out of time, something is asked for and never more than the most."""
    appetite = Appetite(most_bytes)
    for came in answers:
        appetite.came() if came else appetite.ran_out_of_time()
        assert min(most_bytes, APPETITE_BYTES_MIN) <= appetite.max_bytes <= most_bytes


def test_appetite_shrinks_fast_and_grows_slowly() -> None:
    """One answer that ran out of time costs three quarters; several that came bring half of them back."""
    appetite = Appetite(8 << 20)
    appetite.ran_out_of_time()
    assert appetite.max_bytes == 2 << 20
    for _ in range(GROWS_AFTER):
        assert appetite.max_bytes == 2 << 20
        appetite.came()
    assert appetite.max_bytes == 4 << 20


def test_backoff_doubles_up_to_its_limit() -> None:
    """Pauses double with jitter, never exceed the longest, and begin again after a success."""
    backoff = Backoff(0.5, 30.0, Random(1))
    pauses = [backoff.next_seconds() for _ in range(50)]
    for number, pause in enumerate(pauses):
        whole = min(30.0, 0.5 * 2**number)
        assert whole / 2 <= pause <= whole
    backoff.reset()
    assert backoff.next_seconds() <= 0.5


def test_errors_that_may_pass_are_borne_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last try is at the end of the time, a success begins it anew, and what will not pass is raised at once."""
    now = [100.0]
    monkeypatch.setattr("bsfg.retry.time.monotonic", lambda: now[0])
    retry, away = Retry(1.0, 4.0, 10.0), PeerUnreachable("away")
    for _ in range(2):
        began = now[0]
        with pytest.raises(PeerUnreachable):
            while True:
                now[0] += retry.pause_after(away)
        assert now[0] - began == pytest.approx(10.0)
        retry.reset()
    with pytest.raises(ForeignLog):
        retry.pause_after(ForeignLog("another"))
    with pytest.raises(PeerUnreachable):
        Retry(1.0, 4.0, 0.0).pause_after(away)
    assert [Retry(1.0, 4.0, None).pause_after(away) <= 1.0 for _ in range(3)] == [True] * 3


def test_rate_limit_lets_one_second_pass_at_once() -> None:
    """A link that was idle may spend a second's budget at once and then waits for each further fact."""
    waited: list[float] = []

    async def spend() -> None:
        limit = RateLimit(1_000)
        assert limit.batch(10_000) == 100
        loop = asyncio.get_running_loop()
        started = loop.time()
        for _ in range(3):
            await limit.spend(600)
            waited.append(loop.time() - started)

    asyncio.run(spend())
    assert waited[1] >= 0.2
    assert waited[2] >= 0.8
    assert RateLimit(0).batch(10_000) == 10_000


@pytest.mark.parametrize("error", [ForeignLog, MessageTooLarge, IdentityRevoked, ServerIdentityMismatch])
def test_faults_of_history_framing_and_identity_hold_at_once(error: type[BsfgError]) -> None:
    """What more tries cannot mend holds the link the first time."""
    assert verdict(error("x"), 1, 3) == FaultConsequence.HOLD


@pytest.mark.parametrize("error", [DigestMismatch, ArtifactMissing])
def test_faults_beside_the_facts_hold_after_a_few_tries(error: type[BsfgError]) -> None:
    """What may be damage on the way is tried again, a few times."""
    assert [verdict(error("x"), repeats, 3) for repeats in (1, 2, 3)] == [
        FaultConsequence.RETRY,
        FaultConsequence.RETRY,
        FaultConsequence.HOLD,
    ]


def test_absence_is_waited_for_and_a_full_buffer_pauses() -> None:
    """An absent peer never holds a link, and neither does a lack of room here."""
    assert verdict(PeerUnreachable("x"), 1_000, 3) == verdict(TimedOut("x"), 1_000, 3) == FaultConsequence.RETRY
    assert verdict(BufferFull("x"), 1_000, 3) == FaultConsequence.PAUSE
