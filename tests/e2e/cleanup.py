"""What a test leaves behind is ended, however the test ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.e2e.zones import Zone

Closed = TypeVar("Closed")


class Cleanup:
    """Zones and other things that are ended when a test ends, however it ends."""

    def __init__(self) -> None:
        self._endings: list[Callable[[], object]] = []

    def zone(self, zone: Zone) -> Zone:
        """Kill a zone's node in the end."""
        self._endings.append(zone.kill)
        return zone

    def closing(self, thing: Closed) -> Closed:
        """Close something in the end."""
        self._endings.append(thing.close)  # type: ignore[attr-defined]
        return thing

    def run(self) -> None:
        """End everything, the last first."""
        for ending in reversed(self._endings):
            ending()
