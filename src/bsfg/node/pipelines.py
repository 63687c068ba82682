"""What the node knows of the zone's pipelines: what their process tells, and that it tells nothing any more.

`bsfg pipeline run` keeps what the tables `pipelines` say alive in another process, perhaps on another machine, and
tells every two seconds how each of them does. A process that is dead says nothing, and its last word was good. So what
was not told again for some seconds counts as dead, whatever it was, and after some more is an alert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bsfg.config import PipelineKind, PipelineTable
from bsfg.node.alerts import AlertBoard
from bsfg.node.metrics import Metrics
from bsfg.ports import Clock
from bsfg.wire.service import PipelineReport, PipelineState

STALE_MS = 10_000
"""A report that is older says nothing of the present; the process tells every two seconds."""

ABSENT_MS = 60_000
"""How long nobody may run a pipeline before that is an alert: Spark is started again in less."""

FAILURES_ALERT = 3
"""From so many failures in a row on one is an alert; before it is a warning, since the next try often goes well."""

DEAD, OFF, UNKNOWN = "dead", "off", "unknown"
"""States that no process tells: nobody runs it, it is not to run, and nobody has had the time to say so."""

GOOD = frozenset({PipelineState.STARTING, PipelineState.RUNNING, PipelineState.WAITING})
REMEDY = "start `bsfg pipeline run`"


@dataclass(frozen=True, slots=True)
class ToldPipeline:
    """What was last told of a pipeline, by whom and when."""

    holder: str
    report: PipelineReport
    at_ms: int
    at_unix_ms: int
    is_last: bool = False


class PipelineBoard:
    """The pipelines that the configuration has, and what was last told of each."""

    def __init__(self, clock: Clock, metrics: Metrics, tables: Mapping[str, PipelineTable]) -> None:
        self._clock, self._metrics = clock, metrics
        self._told: dict[str, ToldPipeline] = {}
        self._missed_since_ms: dict[str, int] = {}
        self.tables: Mapping[str, PipelineTable] = {}
        self.configure(tables)

    def configure(self, tables: Mapping[str, PipelineTable]) -> None:
        """Go on with other tables; what is no longer there is forgotten."""
        self.tables = tables
        self._told = {name: told for name, told in self._told.items() if name in tables}
        now_ms = self._clock.monotonic_ms()
        self._missed_since_ms = {name: self._missed_since_ms.get(name, now_ms) for name in tables}

    def take(self, holder: str, reports: Sequence[PipelineReport], *, last: bool = False) -> list[str]:
        """Take what a process tells; give the names of those that are not here."""
        for report in reports:
            if report.name in self.tables and self._is_taken(holder, report):
                before = self._told.get(report.name)
                same = before is not None and before.holder == holder
                self._count(report, before.report if before is not None and same else None)
                now_ms, now_unix_ms = self._clock.monotonic_ms(), self._clock.now_unix_ms()
                if before is not None and not report.last_good_unix_ms:
                    # A process that has not looked yet, and remembers none that has, has shown nothing.
                    report = replace(report, finding=report.finding or before.report.finding)
                self._told[report.name] = ToldPipeline(holder, report, now_ms, now_unix_ms, last)
                self._missed_since_ms[report.name] = now_ms
        return [report.name for report in reports if report.name not in self.tables]

    def _is_taken(self, holder: str, report: PipelineReport) -> bool:
        """Tell whether a process speaks for a pipeline: a second one does when the first is gone, or fails."""
        told = self.fresh(report.name)
        if told is None or told.holder == holder:
            return True
        return told.report.state not in GOOD and report.state in GOOD

    def fresh(self, name: str) -> ToldPipeline | None:
        """Give what was told of a pipeline, None when it is too old to mean anything."""
        told = self._told.get(name)
        stale = told is None or told.is_last or self._clock.monotonic_ms() - told.at_ms > STALE_MS
        return None if stale else told

    def state(self, name: str) -> str:
        """Give what a pipeline is doing; one of which nobody tells is dead, whatever was told last."""
        if not self.tables[name].enabled:
            return OFF
        told = self.fresh(name)
        if told is not None:
            return str(told.report.state)
        return UNKNOWN if name not in self._told and self.missed_ms(name) <= ABSENT_MS else DEAD

    def missed_ms(self, name: str) -> int:
        """Give for how long nothing was told of a pipeline."""
        return self._clock.monotonic_ms() - self._missed_since_ms[name]

    def last_holder(self, name: str) -> str | None:
        """Give the process that told of a pipeline last."""
        told = self._told.get(name)
        return None if told is None else told.holder

    def finding(self, name: str) -> str:
        """Give what the last audit found wrong, also when its process is gone: nobody has shown that it is mended."""
        told = self._told.get(name)
        return "" if told is None else told.report.finding

    def documents(self) -> list[dict[str, Any]]:
        """Describe all pipelines for the status of the node."""
        return [self._document(name, table) for name, table in self.tables.items()]

    def _document(self, name: str, table: PipelineTable) -> dict[str, Any]:
        told, state = self._told.get(name), self.state(name)
        report = PipelineReport(name, PipelineState.STARTING) if told is None else told.report
        found = {key: value for key, value in asdict(report).items() if key not in ("name", "state")}
        # What is no longer so: nobody does it any more, and nobody will do it at that time.
        gone = {"progress": "", "backlog": None, "next_unix_ms": 0} if state in (DEAD, OFF, UNKNOWN) else {}
        return {
            "pipeline": name,
            "kind": str(table.kind),
            "state": state,
            "run": None if told is None else told.holder,
            "told_unix_ms": None if told is None else told.at_unix_ms,
            **found,
            **gone,
        }

    def _count(self, now: PipelineReport, before: PipelineReport | None) -> None:
        """Add to the metrics what has happened since the last report of the same process."""
        metrics, known = self._metrics.pipelines, before or PipelineReport(now.name, now.state)
        for metric, new, old in (
            (metrics.runs, now.runs, known.runs),
            (metrics.failures, now.failures, known.failures),
            (metrics.facts, now.facts, known.facts),
            (metrics.batches, now.batches, known.batches),
        ):
            metric.labels(now.name).inc(max(0, new - old))
        if not self.tables[now.name].enabled:
            return  # it is about to end, and is shown no more
        metrics.batch_seconds.labels(now.name).set(now.batch_seconds)
        metrics.last_good.labels(now.name).set(now.last_good_unix_ms / 1000)
        metrics.backlog.labels(now.name).set(float("nan") if now.backlog is None else now.backlog)
        if self.tables[now.name].kind == PipelineKind.AUDIT and now.last_good_unix_ms:
            metrics.clean.labels(now.name).set(not now.finding)


class PipelineWatch:
    """Raises the alerts about pipelines: nobody runs one, one fails, or an audit was not clean."""

    def __init__(self, board: PipelineBoard, alerts: AlertBoard, metrics: Metrics) -> None:
        self._board, self._alerts, self._metrics = board, alerts, metrics
        self._known: set[str] = set()

    def look(self) -> None:
        """Look once at all pipelines."""
        board = self._board
        for name in self._known - set(board.tables):
            self._say(name)
            self._up(name, None)
        self._known = set(board.tables)
        for name, table in board.tables.items():
            state = board.state(name)
            self._up(name, state in GOOD if table.enabled else None)
            told = board.fresh(name)
            self._say(
                name,
                dead=self._dead(name) if table.enabled else None,
                failing=None if told is None or state != PipelineState.FAILED else told.report,
                # Nobody who is dead has shown that the ends agree by now.
                finding=board.finding(name) if table.enabled else "",
            )

    def _up(self, name: str, up: bool | None) -> None:
        """Show whether a pipeline works, None for one that is not to."""
        if up is not None:
            self._metrics.pipelines.up.labels(name).set(up)
        else:
            self._metrics.pipelines.forget(name)

    def _dead(self, name: str) -> str | None:
        board = self._board
        if board.fresh(name) is not None or board.missed_ms(name) <= ABSENT_MS:
            return None
        holder = board.last_holder(name)
        who = "nobody has since the node started" if holder is None else f"{holder} tells nothing any more"
        return f"nobody runs the pipeline {name}, {who}: {REMEDY}"

    def _say(
        self, name: str, dead: str | None = None, failing: PipelineReport | None = None, finding: str = ""
    ) -> None:
        self._alerts.update("pipeline_dead", name, dead)
        severity = "warning"
        text = None
        if failing is not None:
            severity = "alert" if failing.failures_in_a_row >= FAILURES_ALERT else "warning"
            text = f"the pipeline {name} fails, and is tried again: {failing.last_error}"
        self._alerts.update("pipeline_failing", name, text, severity=severity)
        self._alerts.update("audit_not_clean", name, f"the audit {name} is not clean: {finding}" if finding else None)
