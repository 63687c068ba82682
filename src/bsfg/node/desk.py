"""Where the loops of a link report, and learn whether they may go on: the board of the receiving node."""

from __future__ import annotations

from contextlib import suppress

from bsfg.errors import LeaseLost
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.receive import Progress
from bsfg.node.alerts import AlertBoard
from bsfg.node.board import RECEIVER
from bsfg.node.parts import Parts
from bsfg.ports import Buffer
from bsfg.wire.service import LinkReport


class BoardDesk:
    """The desk of the native engine, in the same process as the board; ``lease`` is set while the engine holds it."""

    def __init__(self, link: str, parts: Parts, alerts: AlertBoard | None = None) -> None:
        self._link, self._parts, self._alerts = link, parts, alerts
        self.lease: str | None = None

    def may_move(self) -> bool:
        """Tell whether the engine holds the lease."""
        return self.lease is not None

    def gate(self) -> Gate:
        """Give the receiver's gate."""
        return self._parts.board.gate(self._link).gate

    def tell(self, event: Event, reason: str = "") -> None:
        """Tell what happened to the gate."""
        self._parts.board.on(self._link, RECEIVER, event, reason)

    def hold(self, reason: str, stream: str = "", log_id: str = "") -> None:
        """Close the gate; an operator's own hold keeps his reason, and what is wrong shows again at its release."""
        if self.gate().mode != Mode.HELD:
            self._parts.board.hold(self._link, RECEIVER, by="bsfg", reason=reason, stream=stream, log_id=log_id)

    def report(self, stream: str, progress: Progress) -> None:
        """Count what a turn achieved and show it on the board."""
        metrics = self._parts.metrics
        metrics.put(stream, Buffer.FORWARD, inserted=progress.inserted, repeated=progress.repeated)
        metrics.link_backlog.labels(self._link, stream).set(progress.backlog)
        if progress.lag_seconds is not None:
            metrics.lagged(self._link, stream, progress.lag_seconds)
        report = LinkReport(
            link=self._link,
            stream=stream,
            backlog=progress.backlog,
            inserted=progress.inserted,
            repeated=progress.repeated,
            refused=progress.refused_facts,
            lag_seconds=progress.lag_seconds,
            lease=self.lease,
        )
        with suppress(LeaseLost):
            self._parts.board.report(report)

    def failed(self, code: str) -> None:
        """Count a turn that failed."""
        self._parts.board.spoke(self._link)
        self._parts.metrics.link_failures.labels(self._link, code).inc()

    def distrust(self, text: str | None) -> None:
        """Raise or clear the alert."""
        if self._alerts is not None:
            self._alerts.update("peer_certificate", self._link, text)
