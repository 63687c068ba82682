"""The gate of one side of one link: a pure table of modes, events and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bsfg.errors import InvalidArgument, InvalidTransition

RECEIVER, SENDER = "receiver", "sender"
"""The two sides of a link; each has a gate of its own."""


class Mode(StrEnum):
    """What a gate allows: the handoff runs, stands still, catches up, or is held by an operator."""

    NORMAL = "normal"
    AUTONOMOUS = "autonomous"
    RECONCILIATION = "reconciliation"
    HELD = "held"


class Event(StrEnum):
    """What can happen to a gate."""

    PEER_LOST = "peer_lost"
    PEER_FOUND = "peer_found"
    BACKLOG_CLEARED = "backlog_cleared"
    BACKLOG_GREW = "backlog_grew"
    HOLD = "hold"
    RELEASE = "release"
    HOLD_ENDED = "hold_ended"


TABLE: dict[tuple[Mode, Event], Mode] = {
    (Mode.NORMAL, Event.PEER_LOST): Mode.AUTONOMOUS,
    (Mode.NORMAL, Event.PEER_FOUND): Mode.NORMAL,
    (Mode.NORMAL, Event.BACKLOG_CLEARED): Mode.NORMAL,
    (Mode.NORMAL, Event.BACKLOG_GREW): Mode.RECONCILIATION,
    (Mode.NORMAL, Event.HOLD): Mode.HELD,
    (Mode.AUTONOMOUS, Event.PEER_LOST): Mode.AUTONOMOUS,
    (Mode.AUTONOMOUS, Event.PEER_FOUND): Mode.RECONCILIATION,
    (Mode.AUTONOMOUS, Event.BACKLOG_CLEARED): Mode.AUTONOMOUS,
    (Mode.AUTONOMOUS, Event.BACKLOG_GREW): Mode.AUTONOMOUS,
    (Mode.AUTONOMOUS, Event.HOLD): Mode.HELD,
    (Mode.RECONCILIATION, Event.PEER_LOST): Mode.AUTONOMOUS,
    (Mode.RECONCILIATION, Event.PEER_FOUND): Mode.RECONCILIATION,
    (Mode.RECONCILIATION, Event.BACKLOG_CLEARED): Mode.NORMAL,
    (Mode.RECONCILIATION, Event.BACKLOG_GREW): Mode.RECONCILIATION,
    (Mode.RECONCILIATION, Event.HOLD): Mode.HELD,
    # What the network does while an operator holds the gate changes nothing; a second hold replaces the reason.
    (Mode.HELD, Event.PEER_LOST): Mode.HELD,
    (Mode.HELD, Event.PEER_FOUND): Mode.HELD,
    (Mode.HELD, Event.BACKLOG_CLEARED): Mode.HELD,
    (Mode.HELD, Event.BACKLOG_GREW): Mode.HELD,
    (Mode.HELD, Event.HOLD): Mode.HELD,
    # Nobody knows whether the peer is there, so a released gate assumes that it is not until a fetch succeeds.
    (Mode.HELD, Event.RELEASE): Mode.AUTONOMOUS,
    (Mode.HELD, Event.HOLD_ENDED): Mode.AUTONOMOUS,
}
"""Every move a gate can make; a pair that is not here is refused with `invalid_transition`."""

NETWORK_EVENTS = frozenset({Event.PEER_LOST, Event.PEER_FOUND, Event.BACKLOG_CLEARED, Event.BACKLOG_GREW})


@dataclass(frozen=True, slots=True)
class Gate:
    """The state of a gate: its mode, since when, and for a held gate who holds it, why and until when.

    A gate that a finding about the sender has closed also knows in which stream and history it was made: that is what
    an operator accepts who releases it.
    """

    mode: Mode = Mode.AUTONOMOUS
    since_unix_ms: int = 0
    reason: str = ""
    held_by: str = ""
    held_until_unix_ms: int | None = None
    held_stream: str = ""
    held_log_id: str = ""

    def on(self, event: Event, now_unix_ms: int, reason: str = "") -> Gate:
        """Give the gate after a network event; `hold` and `release` are an operator's, `tick` ends a hold."""
        target = TABLE.get((self.mode, event))
        if target is None or event not in NETWORK_EVENTS:
            raise InvalidTransition(f"a gate in mode {self.mode} cannot follow {event}", mode=self.mode, event=event)
        if target == self.mode:
            return self
        return Gate(target, now_unix_ms, reason or event.replace("_", " "))

    def hold(
        self,
        now_unix_ms: int,
        *,
        by: str,
        reason: str,
        until_unix_ms: int | None = None,
        stream: str = "",
        log_id: str = "",
    ) -> Gate:
        """Close the gate by an operator's decision or for a finding about a sender; needs a name and a reason."""
        if not reason.strip() or not by.strip():
            raise InvalidArgument("a hold needs an operator and a reason")
        if until_unix_ms is not None and until_unix_ms <= now_unix_ms:
            raise InvalidArgument("the end of a hold lies in the future")
        since = self.since_unix_ms if self.mode == Mode.HELD else now_unix_ms
        return Gate(Mode.HELD, since, reason, by, until_unix_ms, stream, log_id)

    def release(self, now_unix_ms: int, *, by: str, reason: str) -> Gate:
        """Open a held gate again; the next successful fetch starts reconciliation."""
        if self.mode != Mode.HELD:
            raise InvalidTransition(f"the gate is not held, it is {self.mode}", mode=self.mode, event=Event.RELEASE)
        if not reason.strip() or not by.strip():
            raise InvalidArgument("a release needs an operator and a reason")
        return Gate(TABLE[Mode.HELD, Event.RELEASE], now_unix_ms, f"released by {by}: {reason}")

    def tick(self, now_unix_ms: int) -> Gate:
        """End a hold whose time has come; otherwise give the same gate."""
        if self.mode == Mode.HELD and self.held_until_unix_ms is not None and now_unix_ms >= self.held_until_unix_ms:
            return Gate(TABLE[Mode.HELD, Event.HOLD_ENDED], now_unix_ms, f"hold ended: {self.reason}")
        return self

    @property
    def is_open(self) -> bool:
        """Whether the handoff may run."""
        return self.mode in (Mode.NORMAL, Mode.RECONCILIATION)

    @property
    def allows_fetch(self) -> bool:
        """Whether the receiver may try to fetch: always, unless an operator holds the gate."""
        return self.mode != Mode.HELD

    @property
    def allows_truncation(self) -> bool:
        """Whether the sender may truncate: not while the link is autonomous or held."""
        return self.is_open
