"""What may leave a buffer, when, and with which record: pure decisions over segment summaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bsfg.errors import PolicyInvalid, TruncateRefused

DAY_SECONDS = 86_400
QUARANTINE_BYTES = 256 << 20


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
class GapRecord:
    """A durable note that a range was not or is no longer there, and why; it travels like a fact does.

    ``count`` says for how many of its offsets a folded range stands, and is None when it stands for all.
    """

    first: int
    last: int
    reason: GapReason
    at_unix_ms: int
    detail: str = ""
    origin_zone: str | None = None
    count: int | None = None

    @property
    def offsets(self) -> int:
        """For how many offsets it stands."""
        return self.last - self.first + 1 if self.count is None else self.count


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
    quarantine_bytes: int = QUARANTINE_BYTES
    keep_latest: bool = False
    """Whether a forward buffer keeps the newest fact of each subject and predicate beyond all ages."""
    latest_most: int = 100_000
    """Of how many subjects and predicates, so that names without end do not fill a disk; the latest count."""

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
        if self.latest_most < 1:
            raise PolicyInvalid("latest_most must be positive")
        if self.capacity_bytes <= 0:
            raise PolicyInvalid("capacity_bytes must be positive")
        if self.quarantine_bytes <= 0:
            raise PolicyInvalid("quarantine_bytes must be positive")
        if not 0 < self.warning_fill_percent <= self.alert_fill_percent <= 100:
            raise PolicyInvalid("0 < warning_fill_percent <= alert_fill_percent <= 100 does not hold")
        return self

    def fill(self, used_bytes: int) -> tuple[float, Fill]:
        """Give the fill in percent and its verdict."""
        percent = 100.0 * used_bytes / self.capacity_bytes
        return percent, self.verdict(percent)

    def verdict(self, percent: float) -> Fill:
        """Judge a fill in percent."""
        if percent > self.alert_fill_percent:
            return Fill.ALERT
        return Fill.WARNING if percent >= self.warning_fill_percent else Fill.HEALTHY


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

    def up_to(self, offset: int) -> Removal:
        """Give the part of it that lies below an offset: the first step of several."""
        gaps = [replace(gap, last=min(gap.last, offset - 1)) for gap in self.gaps if gap.first < offset]
        return Removal(min(self.before, offset), tuple(gaps))


@dataclass(frozen=True, slots=True)
class ConsumerStanding:
    """How far the required consumers of a buffer are.

    ``committed`` is the lowest of their frontiers, inclusive, -1 when nothing is confirmed. ``awaited`` tells whether
    somebody still has a right to what lies above it. In a store buffer that is always so, because a peer may yet be
    configured; in a forward buffer only when a required consumer reads it.
    """

    committed: int = -1
    awaited: bool = True

    @staticmethod
    def of_store(frontier: int | None) -> ConsumerStanding:
        """Describe a store buffer; the frontier is None without a required consumer."""
        return ConsumerStanding(-1 if frontier is None else frontier)

    @staticmethod
    def of_forward(frontier: int | None) -> ConsumerStanding:
        """Describe a forward buffer, likewise."""
        return ConsumerStanding(awaited=False) if frontier is None else ConsumerStanding(frontier)


@dataclass(frozen=True, slots=True)
class Age:
    """Something leaves because it is old: the time, whether the links are open, and whether the clock is believed."""

    now_unix_ms: int
    link_open: bool
    clock_trusted: bool


class Cause(StrEnum):
    """Something leaves because its place in the buffer or on the disk is needed, or because an operator says so."""

    ROOM = "room"
    DISK = "disk"
    ORDER = "order"


STAYS, GOES = False, True


def departure(
    piece: Piece, policy: Policy, standing: ConsumerStanding, cause: Age | Cause
) -> tuple[bool, GapReason | None]:
    """Decide whether a piece may leave, and with which record: the one rule behind every removal.

    - What every required consumer has confirmed leaves for room, on a full disk or by order at any time, and by age
      once retention has passed, but by age never while a link stands still: after an outage its receiver may ask again.
    - What somebody still waits for leaves only when it is older than max age (never on a `sil` stream), or for room
      under ``drop_oldest``; it is recorded. No order removes it, nor does a full disk.
    - What nobody must read leaves by age once retention has passed, for room (never on a `sil` stream) or by order.
      What makes room is recorded, and on a `sil` stream everything is.
    """
    confirmed = piece.last <= standing.committed
    if isinstance(cause, Age):
        return _by_age(piece, policy, standing, cause, confirmed)
    if confirmed:
        return GOES, None
    if cause == Cause.DISK:
        return STAYS, None
    if cause == Cause.ORDER:
        return (STAYS, None) if standing.awaited else (GOES, GapReason.TRUNCATED if policy.is_sil else None)
    if policy.overflow == Overflow.REJECT_NEW and (standing.awaited or policy.is_sil):
        return STAYS, None
    return GOES, GapReason.EVICTED


def _by_age(
    piece: Piece, policy: Policy, standing: ConsumerStanding, cause: Age, confirmed: bool
) -> tuple[bool, GapReason | None]:
    age_seconds = (cause.now_unix_ms - piece.newest_unix_ms) / 1000
    if not cause.clock_trusted or (piece.first <= standing.committed and not cause.link_open):
        return STAYS, None
    if confirmed:
        return age_seconds >= policy.retention_seconds, None
    if standing.awaited:
        return not policy.is_sil and age_seconds > policy.max_age_seconds, GapReason.EXPIRED
    return age_seconds >= policy.retention_seconds, GapReason.EXPIRED if policy.is_sil else None


def removable_before(pieces: Sequence[Piece], policy: Policy, standing: ConsumerStanding, age: Age) -> Removal:
    """Decide what retention and expiry remove.

    Nothing goes while the clock is in doubt. A buffer loses its oldest first and nothing from its middle, so what
    stands behind a piece that stays, stays too.
    """
    before = pieces[0].first if pieces else 0
    gaps: list[Gap] = []
    for piece in pieces:
        goes, reason = departure(piece, policy, standing, age)
        if not goes:
            break
        before = piece.last + 1
        gaps += _gap(piece, standing, reason)
    return Removal(before, tuple(_merged(gaps)))


def make_room(
    pieces: Sequence[Piece], policy: Policy, standing: ConsumerStanding, *, used_bytes: int, incoming_bytes: int
) -> Removal | None:
    """Decide how an append of ``incoming_bytes`` fits; None means that it must be rejected."""
    before = pieces[0].first if pieces else 0
    gaps: list[Gap] = []
    if incoming_bytes > policy.capacity_bytes:
        return None
    for piece in pieces:
        if used_bytes + incoming_bytes <= policy.capacity_bytes:
            break
        goes, reason = departure(piece, policy, standing, Cause.ROOM)
        if not goes:
            return None
        gaps += _gap(piece, standing, reason)
        used_bytes -= piece.size_bytes
        before = piece.last + 1
    if used_bytes + incoming_bytes > policy.capacity_bytes:
        return None
    return Removal(before, tuple(_merged(gaps)))


def ordered_before(offset: int, policy: Policy, standing: ConsumerStanding, *, start: int, end: int) -> Removal:
    """Decide what an order to remove everything below ``offset`` removes, or raise `TruncateRefused`."""
    piece = Piece(start, offset - 1, 0, 0)
    if offset <= start:
        return Removal(start)
    goes, reason = departure(piece, policy, standing, Cause.ORDER)
    if not goes or offset > end:
        raise TruncateRefused(
            f"entries below {offset} are not all confirmed: the frontier is {standing.committed}, the end {end}",
            committed=standing.committed,
            end=end,
        )
    return Removal(offset, tuple(_gap(piece, standing, reason)))


def _gap(piece: Piece, standing: ConsumerStanding, reason: GapReason | None) -> list[Gap]:
    """Give the record of what nobody confirmed of a piece, if one is due."""
    return [] if reason is None else [Gap(max(piece.first, standing.committed + 1), piece.last, reason)]


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
