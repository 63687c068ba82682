"""The desk of a task on Spark: what its loops tell reaches the node's board a moment later, and so does its answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bsfg.errors import BsfgError, LeaseLost
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.receive import Progress

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.service import LinkReport

TELL_EVERY_SECONDS = 0.25
SILENT_SECONDS_MAX = 1.0
"""After this time a task asks after the gate although it has nothing to tell."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What the turns of one stream achieved."""

    inserted: int = 0
    repeated: int = 0
    refused: int = 0
    backlog: int = 0
    lag_seconds: float | None = None

    def with_turn(self, progress: Progress) -> Tally:
        """Add a turn."""
        return Tally(
            self.inserted + progress.inserted,
            self.repeated + progress.repeated,
            self.refused + progress.refused_facts,
            progress.backlog,
            self.lag_seconds if progress.lag_seconds is None else progress.lag_seconds,
        )


class RemoteDesk:
    """Gathers what is to be told and tells it every so often, gate events and faults at once."""

    def __init__(self, admin: AdminClient, link: str, lease: str, mode: str) -> None:
        self._admin, self._link, self._lease = admin, link, lease
        self._gate = Gate(Mode(mode))
        self._urgent: list[LinkReport] = []
        self._news: dict[str, Tally] = {}
        self.totals: dict[str, Tally] = {}
        self._something = asyncio.Event()
        self._came_at = float("-inf")
        self.moves = True

    def may_move(self) -> bool:
        """Tell whether the task still has the lease."""
        return self.moves

    def gate(self) -> Gate:
        """Give the gate as it was last heard of, with what was told since."""
        return self._gate

    def tell(self, event: Event, reason: str = "") -> None:
        """Tell what happened to the gate, if it changes anything."""
        moved = self._gate.on(event, 0, reason)
        if moved.mode != self._gate.mode:
            self._gate = moved
            self._add(event=event, reason=reason)

    def hold(self, reason: str, stream: str = "", log_id: str = "") -> None:
        """Close the gate."""
        if self._gate.mode != Mode.HELD:
            code, _, detail = reason.partition(": ")
            self._gate = Gate(Mode.HELD, reason=reason)
            self._add(hold_code=code, hold_detail=detail, hold_stream=stream, hold_log_id=log_id)

    def report(self, stream: str, progress: Progress) -> None:
        """Add what a turn achieved."""
        self._news[stream] = self._news.get(stream, Tally()).with_turn(progress)
        self.totals[stream] = self.totals.get(stream, Tally()).with_turn(progress)

    def failed(self, code: str) -> None:
        """Count a turn that failed."""
        self._add(failure_code=code)

    def came(self) -> None:
        """Tell now and then that the sender gives something, though no turn ends: an artifact may take long."""
        now = time.monotonic()
        if now - self._came_at > SILENT_SECONDS_MAX:
            self._came_at = now
            self._add(event=Event.PEER_FOUND)

    def distrust(self, text: str | None) -> None:
        """The reason of the gate says it already."""

    async def run(self) -> None:
        """Tell what there is, until the task ends."""
        heard_at = time.monotonic()
        while True:
            try:
                if await self.flush() or time.monotonic() - heard_at > SILENT_SECONDS_MAX:
                    heard_at = time.monotonic()
            except LeaseLost:
                self.moves = False
            except BsfgError:
                # The node is away; the next turn finds that out by itself, and what was gathered waits.
                await asyncio.sleep(TELL_EVERY_SECONDS)
            self._something.clear()
            if not self._urgent:
                try:
                    await asyncio.wait_for(self._something.wait(), TELL_EVERY_SECONDS)
                except TimeoutError:
                    if time.monotonic() - heard_at > SILENT_SECONDS_MAX and not self._news:
                        self._news.setdefault("", Tally())

    async def flush(self) -> bool:
        """Tell everything now; False when there was nothing."""
        told = False
        while self._urgent:
            gate = await self._admin.report_link(self._urgent[0])
            self._urgent.pop(0)
            self._heard(gate)
            told = True
        for stream in list(self._news):
            tally = self._news.pop(stream)
            try:
                self._heard(await self._admin.report_link(self._report(stream, tally)))
            except BsfgError:
                self._news.setdefault(stream, tally)
                raise
            told = True
        return told

    def _heard(self, gate: Gate) -> None:
        # What waits to be told will change the gate; until then what was told here counts, unless somebody holds it.
        if not self._urgent or gate.mode == Mode.HELD:
            self._gate = gate

    def _report(self, stream: str, tally: Tally) -> LinkReport:
        from bsfg.wire.service import LinkReport

        return LinkReport(
            link=self._link,
            stream=stream,
            backlog=tally.backlog,
            inserted=tally.inserted,
            repeated=tally.repeated,
            refused=tally.refused,
            lag_seconds=tally.lag_seconds,
            lease=self._lease,
        )

    def _add(self, **fields: object) -> None:
        report = self._report("", Tally())
        self._urgent.append(replace(report, **fields))  # type: ignore[arg-type]
        self._something.set()
