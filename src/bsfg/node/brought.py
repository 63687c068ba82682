"""One frame that somebody has already brought, in the form of a link: what is put by the rules of the pull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.ports import Confirmation


@dataclass(slots=True)
class Brought:
    """It is fetched once, and its confirmation is kept for whoever is to tell the sender, if anybody is."""

    zone: str
    fetched: Fetched
    confirmation: Confirmation | None = None
    refusals: Sequence[Refusal] = field(default_factory=list)

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Give the frame."""
        return self.fetched

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Keep what would be confirmed."""
        self.confirmation, self.refusals = confirmation, refusals
        assert confirmation.through is not None
        return confirmation.through
