"""What may leave a buffer, when, and with which record: pure decisions over segment summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bsfg.errors import PolicyInvalid

DAY_SECONDS = 86_400


class Overflow(StrEnum):
    """What happens when a buffer is full."""

    REJECT_NEW = "reject_new"
    DROP_OLDEST = "drop_oldest"


class Fill(StrEnum):
    """How full a buffer is, in the words of the alarm list."""

    HEALTHY = "healthy"
    WARNING = "warning"
    ALERT = "alert"


class GapReason(StrEnum):
    """Why a range of offsets was not delivered."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    RETIRED = "consumer_retired"
    DAMAGED = "damaged"
    LOST = "lost"
    TORN = "torn"
    QUARANTINED = "quarantined"
    SKIPPED = "skipped"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of one buffer: size, age, overflow, and how long keys outlive bytes."""

    capacity_bytes: int = 1 << 40
    overflow: Overflow = Overflow.REJECT_NEW
    safety: str = ""
    retention_seconds: int = 7 * DAY_SECONDS
    max_age_seconds: int = 7 * DAY_SECONDS
    key_horizon_seconds: int = 30 * DAY_SECONDS
    warning_fill_percent: float = 50.0
    alert_fill_percent: float = 80.0

    @property
    def is_sil(self) -> bool:
        """Whether the stream serves a safety function: nothing unconfirmed is ever dropped from it."""
        return self.safety == "sil"

    def checked(self) -> Policy:
        """Give the policy if it is consistent, or say which settings contradict each other."""
        if self.safety not in ("", "sil"):
            raise PolicyInvalid(f"safety = {self.safety!r} is not known; the one safety class is 'sil'")
        if self.is_sil and self.overflow != Overflow.REJECT_NEW:
            raise PolicyInvalid("a stream with safety = 'sil' must use overflow = 'reject_new'")
        if not 0 <= self.retention_seconds <= self.max_age_seconds <= self.key_horizon_seconds:
            raise PolicyInvalid(
                f"retention {self.retention_seconds} s <= max age {self.max_age_seconds} s "
                f"<= key horizon {self.key_horizon_seconds} s does not hold"
            )
        if self.capacity_bytes <= 0:
            raise PolicyInvalid("capacity_bytes must be positive")
        if not 0 < self.warning_fill_percent <= self.alert_fill_percent <= 100:
            raise PolicyInvalid("0 < warning_fill_percent <= alert_fill_percent <= 100 does not hold")
        return self

    def fill(self, used_bytes: int) -> tuple[float, Fill]:
        """Give the fill in percent and its verdict."""
        percent = 100.0 * used_bytes / self.capacity_bytes
        if percent > self.alert_fill_percent:
            return percent, Fill.ALERT
        return percent, Fill.WARNING if percent >= self.warning_fill_percent else Fill.HEALTHY


@dataclass(frozen=True, slots=True)
class Piece:
    """A removable unit of a buffer, oldest first: its offsets, size and newest time."""

    first: int
    last: int
    size_bytes: int
    newest_unix_ms: int


@dataclass(frozen=True, slots=True)
class Gap:
    """A range that leaves undelivered, and why."""

    first: int
    last: int
    reason: GapReason


@dataclass(frozen=True, slots=True)
class Removal:
    """The decision: everything below ``before`` goes, and ``gaps`` are recorded for what was not confirmed."""

    before: int
    gaps: tuple[Gap, ...] = ()


def removable_before(
    pieces: Sequence[Piece],
    policy: Policy,
    *,
    committed: int,
    now_unix_ms: int,
    link_open: bool,
    clock_trusted: bool,
) -> Removal:
    """Decide what retention and expiry remove.

    ``committed`` is the lowest frontier of the required consumers (-1 when nothing is confirmed). What is confirmed
    goes once retention allows and while the link is open. What is not goes only when it is older than max age, never
    on a `sil` stream. Nothing goes while the clock is in doubt. A buffer loses its oldest first and nothing from
    its middle, so what stands behind a piece that stays, stays too.
    """
    before = pieces[0].first if pieces else 0
    gaps: list[Gap] = []
    for piece in pieces:
        age_seconds = (now_unix_ms - piece.newest_unix_ms) / 1000
        confirmed = piece.last <= committed
        old = age_seconds >= policy.retention_seconds if confirmed else age_seconds > policy.max_age_seconds
        if not old or not clock_trusted:
            break
        if (piece.first <= committed and not link_open) or (not confirmed and policy.is_sil):
            break
        before = piece.last + 1
        if not confirmed:
            gaps.append(Gap(max(piece.first, committed + 1), piece.last, GapReason.EXPIRED))
    return Removal(before, tuple(_merged(gaps)))


def make_room(
    pieces: Sequence[Piece], policy: Policy, *, used_bytes: int, incoming_bytes: int, committed: int
) -> Removal | None:
    """Decide how an append of ``incoming_bytes`` fits; None means that it must be rejected.

    Confirmed pieces may leave early when space is needed, because nobody waits for them. What is unconfirmed leaves
    only under ``drop_oldest``, and is recorded.
    """
    before = pieces[0].first if pieces else 0
    gaps: list[Gap] = []
    if incoming_bytes > policy.capacity_bytes:
        return None
    for piece in pieces:
        if used_bytes + incoming_bytes <= policy.capacity_bytes:
            break
        confirmed = piece.last <= committed
        if not confirmed and policy.overflow == Overflow.REJECT_NEW:
            return None
        if not confirmed:
            gaps.append(Gap(max(piece.first, committed + 1), piece.last, GapReason.EVICTED))
        used_bytes -= piece.size_bytes
        before = piece.last + 1
    if used_bytes + incoming_bytes > policy.capacity_bytes:
        return None
    return Removal(before, tuple(_merged(gaps)))


def _merged(gaps: Sequence[Gap]) -> list[Gap]:
    result: list[Gap] = []
    for gap in gaps:
        if result and result[-1].last + 1 == gap.first and result[-1].reason == gap.reason:
            result[-1] = Gap(result[-1].first, gap.last, gap.reason)
        else:
            result.append(gap)
    return result


@dataclass(slots=True)
class ClockGuard:
    """Notices a wall clock that jumps forward, by holding it against the monotonic clock.

    Such a clock would make everything look expired, so expiry is suspended until the clock is back where the
    monotonic one says it should be, or an operator accepts the new time. A clock that goes back makes things look
    younger, which is harmless: it is believed at once, and a later leap forward counts from there. Small steps are
    corrections; each is judged by itself, so that a year of them does not add up to a jump.

    A guard knows nothing of the time before its first reading: what a wrong clock says at start-up is believed.
    """

    tolerance_ms: int = 60_000
    _wall_ms: int | None = None
    _monotonic_ms: int = 0
    trusted: bool = True

    def observe(self, wall_unix_ms: int, monotonic_ms: int) -> bool:
        """Take a reading of both clocks and tell whether ages can be trusted."""
        elapsed_ms = monotonic_ms - self._monotonic_ms
        if self._wall_ms is None or wall_unix_ms - (self._wall_ms + elapsed_ms) <= self.tolerance_ms:
            self.accept(wall_unix_ms, monotonic_ms)
        else:
            self.trusted = False
        return self.trusted

    def accept(self, wall_unix_ms: int, monotonic_ms: int) -> None:
        """Take the present wall time as right, by an operator's decision."""
        self._wall_ms, self._monotonic_ms, self.trusted = wall_unix_ms, monotonic_ms, True
