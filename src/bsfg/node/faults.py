"""What a failed turn of a link means: stand still until an operator has looked, wait for room, or simply try again."""

from __future__ import annotations

from enum import StrEnum

from bsfg.errors import (
    ArtifactConflict,
    ArtifactMissing,
    ArtifactStoreFull,
    ArtifactTooLarge,
    BsfgError,
    BufferFull,
    ConsumerRetired,
    DigestMismatch,
    DiskFull,
    FactTooLarge,
    IdentityRevoked,
    IdentityUnknown,
    InvalidFact,
    MessageTooLarge,
    PermissionRefused,
    ServerIdentityMismatch,
)
from bsfg.journey.pull import HOLDING


class Verdict(StrEnum):
    """What follows from a failure."""

    RETRY = "retry"
    PAUSE = "pause"
    HOLD = "hold"


AT_ONCE: tuple[type[BsfgError], ...] = (
    *HOLDING,
    FactTooLarge,
    InvalidFact,
    MessageTooLarge,
    IdentityUnknown,
    IdentityRevoked,
    PermissionRefused,
    ServerIdentityMismatch,
    ConsumerRetired,
)
"""Faults of framing, identity, authorisation and history: more tries would not help, and may do harm."""

AFTER_A_FEW: tuple[type[BsfgError], ...] = (DigestMismatch, ArtifactMissing, ArtifactTooLarge, ArtifactConflict)
"""Faults of what the peer sent beside its facts: perhaps damage on the way, but not time after time."""

NO_ROOM: tuple[type[BsfgError], ...] = (BufferFull, ArtifactStoreFull, DiskFull)
"""This zone's own storage is full; the peer has nothing to do with it."""


def verdict(error: BsfgError, repeats: int, few: int) -> Verdict:
    """Decide what a failure means that came so many times in a row; ``few`` is how many are patience enough."""
    if isinstance(error, AT_ONCE) or (isinstance(error, AFTER_A_FEW) and repeats >= few):
        return Verdict.HOLD
    return Verdict.PAUSE if isinstance(error, NO_ROOM) else Verdict.RETRY
