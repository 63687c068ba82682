"""The contract of `bsfg.ports.CursorTracker`."""

from __future__ import annotations

from bsfg.testing.conformance.commits import CommitContract
from bsfg.testing.conformance.consumers import ConsumerContract


class CursorTrackerContract(ConsumerContract, CommitContract):
    """Everything that a cursor tracker promises."""
