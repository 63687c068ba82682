"""The status of a node as one document, what of it somebody sees, and which of its values need somebody."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from prometheus_client import Metric

import bsfg
from bsfg.config.access import Identity
from bsfg.config.kinds import ANY
from bsfg.errors import StorageClosed, StreamUnavailable
from bsfg.gate import RECEIVER, SENDER, Mode
from bsfg.journey.recover import RecoveredBuffer, look_at
from bsfg.node.ages import Unconfirmed
from bsfg.node.authorize import Matrix
from bsfg.node.backends import SharedStorage
from bsfg.node.parts import NodeContext
from bsfg.ports import Buffer, BufferStats, ConsumerState
from bsfg.wire.service import ConsumerView, GateView
from bsfg.wording import count_text, counted, duration_text, hours_text, percent_text, shown_seconds

LAG_WARNING_SECONDS, LAG_ALERT_SECONDS = 0.1, 1.0
BACKLOG_WARNING, BACKLOG_ALERT = 100, 10_000
REPORT_FRESH_MS = 60_000
AUTONOMY_WARNING_HOURS = 24.0

Document = Mapping[str, Any]


class HealthLevel(StrEnum):
    """How a value counts; `worst` gives the highest."""

    OK = "ok"
    WARNING = "warning"
    ALERT = "alert"


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """Something that needs attention: what kind, about what, and in words."""

    level: HealthLevel
    alert: str
    about: str
    says: str


@dataclass(frozen=True, slots=True)
class LinkNow:
    """What is known of a link at present: the lag of what came in the last minute, and what the sender has left.

    A lag is None where nothing came; both are None where nobody can know: what a link said before it stood still is not
    so any more. ``told_unix_ms`` is when it last said something, None when it did not since the start.
    """

    lag_seconds: float | None
    lag: HealthLevel | None
    to_come: int | None
    told_unix_ms: int | None


def findings(document: Document) -> list[HealthFinding]:
    """List what is not as it should be, the worst first: what the node itself raised, and what its values show."""
    raised = list(_raised(document))
    away = {each.about for each in raised if each.alert in ("link_dead", "peer_absent")}
    found = {
        (each.alert, each.about): each
        for each in _seen(document)
        if not (each.alert == f"link_{Mode.AUTONOMOUS}" and each.about in away)
    }
    # The node knows the thresholds of its configuration, so its word stands.
    found |= {(each.alert, each.about): each for each in raised}
    return sorted(found.values(), key=lambda each: (each.level != HealthLevel.ALERT, each.alert, each.about))


def worst(found: list[HealthFinding]) -> HealthLevel:
    """Give the highest level among findings."""
    levels = {each.level for each in found}
    return next((level for level in (HealthLevel.ALERT, HealthLevel.WARNING) if level in levels), HealthLevel.OK)


def autonomy(document: Document) -> tuple[str, float] | None:
    """Give the stream whose store buffer is full first, and in how many hours at the rate of the last minute."""
    left = [
        (float(buffer["hours_left"]), str(buffer["stream"]))
        for buffer in document["buffers"]
        if buffer["buffer"] == Buffer.STORE and buffer["hours_left"] is not None
    ]
    if not left:
        return None
    hours, stream = min(left)
    return stream, hours


def as_json(document: Document) -> dict[str, Any]:
    """Give the document with what it means."""
    found, soonest = findings(document), autonomy(document)
    return {
        **document,
        "links": [{**link, **asdict(link_now(link, document))} for link in document["links"]],
        "health": str(worst(found)),
        "findings": [asdict(each) for each in found],
        "autonomy_hours": None if soonest is None else soonest[1],
    }


def lag_level(seconds: float) -> HealthLevel:
    """Judge the time from the sender's append to here."""
    if seconds > LAG_ALERT_SECONDS:
        return HealthLevel.ALERT
    return HealthLevel.WARNING if seconds >= LAG_WARNING_SECONDS else HealthLevel.OK


def backlog_level(count: int) -> HealthLevel:
    """Judge how much a consumer has not confirmed."""
    if count > BACKLOG_ALERT:
        return HealthLevel.ALERT
    return HealthLevel.WARNING if count > BACKLOG_WARNING else HealthLevel.OK


def mode_level(mode: str) -> HealthLevel:
    """Judge the mode of a gate: a held one waits for an operator, an autonomous one for the other side."""
    if mode == Mode.HELD:
        return HealthLevel.ALERT
    return HealthLevel.OK if mode == Mode.NORMAL else HealthLevel.WARNING


def pipeline_level(state: str) -> HealthLevel:
    """Judge what a pipeline is doing: nobody may take one for healthy that is not known to work."""
    if state in ("starting", "running", "waiting", "off"):
        return HealthLevel.OK
    return HealthLevel.ALERT if state == "dead" else HealthLevel.WARNING


def link_now(link: Document, document: Document) -> LinkNow:
    """Tell what is known of a link at present; the lag that is given is the one that is judged and shown."""
    told = _told(link, document)
    lags = [shown_seconds(report["lag_seconds"]) for report in told if report["lag_seconds"] is not None]
    return LinkNow(
        lag_seconds=max(lags, default=None),
        lag=lag_level(max(lags)) if lags else None,
        to_come=sum(report["backlog"] for report in told) if told else None,
        told_unix_ms=max((report["at_unix_ms"] for report in link["reports"]), default=None),
    )


def _told(link: Document, document: Document) -> list[Document]:
    """Give the reports of a link that speak of the present: it must be moved, and they must be new."""
    stands = link["mode"] in (Mode.HELD, Mode.AUTONOMOUS) or link.get("trouble") or link["lease"] is None
    if link["side"] != RECEIVER or stands:
        return []
    return [each for each in link["reports"] if document["now_unix_ms"] - each["at_unix_ms"] <= REPORT_FRESH_MS]


def _raised(document: Document) -> Iterator[HealthFinding]:
    for alert in document.get("alerts", ()):
        level = HealthLevel.WARNING if alert["severity"] == HealthLevel.WARNING else HealthLevel.ALERT
        yield HealthFinding(level, str(alert["alert"]), str(alert["about"]), str(alert["text"]))


def _seen(document: Document) -> Iterator[HealthFinding]:
    for buffer in document["buffers"]:
        yield from _buffer(buffer)
    for consumer in document["consumers"]:
        level = backlog_level(consumer["backlog"])
        if level != HealthLevel.OK and consumer["retired_reason"] is None:
            says = f"{consumer['name']} has {count_text(consumer['backlog'])} facts to confirm"
            yield HealthFinding(level, "consumer_backlog", consumer["name"], says)
    for link in document["links"]:
        yield from _link(link, document)
    yield from _autonomy(document)


def _buffer(buffer: Document) -> Iterator[HealthFinding]:
    about = f"{buffer['stream']}/{buffer['buffer']}"
    if buffer["fill"] != "healthy":
        level = HealthLevel.WARNING if buffer["fill"] == "warning" else HealthLevel.ALERT
        yield HealthFinding(level, "buffer_fill", about, f"{about} is {percent_text(buffer['fill_percent'])} full")
    if buffer.get("expiry_near"):
        says = f"the oldest unconfirmed fact of {about} expires soon"
        yield HealthFinding(HealthLevel.ALERT, "expiry_near", about, says)
    if buffer.get("gaps_full"):
        says = f"{about} has no room for more gap records of other zones: links that bring them pause"
        yield HealthFinding(HealthLevel.ALERT, "gaps_full", about, says)
    if buffer.get("quarantine_full"):
        says = f"the quarantine of {about} is full: links that bring more refused facts pause"
        yield HealthFinding(HealthLevel.ALERT, "quarantine_full", about, says)
    elif buffer["quarantined"]:
        number = buffer["quarantined"]
        waiting = f"{counted(number, 'fact')} wait{'s' if number == 1 else ''}"
        says = f"{waiting} in quarantine for a decision, in {about}"
        yield HealthFinding(HealthLevel.ALERT, "quarantine", about, says)


def _link(link: Document, document: Document) -> Iterator[HealthFinding]:
    about, mode = f"{link['link']}/{link['side']}", link["mode"]
    if mode == Mode.HELD:
        yield HealthFinding(
            HealthLevel.ALERT, "gate_held", about, f"{link['link']} is held by {link['held_by']}: {link['reason']}"
        )
    elif mode != Mode.NORMAL:
        reason = f": {link['reason']}" if link["reason"] else ""
        is_so = "is autonomous" if mode == Mode.AUTONOMOUS else f"is in {mode}"
        yield HealthFinding(HealthLevel.WARNING, f"link_{mode}", about, f"{link['link']} {is_so}{reason}")
    for report in _told(link, document):
        lag_seconds = report["lag_seconds"]
        if lag_seconds is None or (level := lag_level(shown_seconds(lag_seconds))) == HealthLevel.OK:
            continue
        says = f"{report['stream']} over {link['link']} lags {duration_text(lag_seconds)}"
        yield HealthFinding(level, "replication_lag", f"{link['link']}/{report['stream']}", says)


def _autonomy(document: Document) -> Iterator[HealthFinding]:
    """The end of autonomy is news only while somebody who should pull is away."""
    away = any(link["side"] == SENDER and link["mode"] in (Mode.AUTONOMOUS, Mode.HELD) for link in document["links"])
    soonest = autonomy(document)
    if away and soonest is not None and soonest[1] < AUTONOMY_WARNING_HOURS:
        stream, hours = soonest
        says = f"the store buffer of {stream} is full in {hours_text(hours)} at the rate of the last minute"
        yield HealthFinding(HealthLevel.WARNING, "autonomy", stream, says)


_OF_THE_NODE = ("certificate_expiry", "crl_stale")
"""Alerts about files that have nothing to do with streams."""


@dataclass(frozen=True, slots=True)
class VisibleStreams:
    """The streams that somebody may see; None means all, and everything of the node besides."""

    streams: frozenset[str] | None = None

    @staticmethod
    def of(row: Identity) -> VisibleStreams:
        """Give what a row may see."""
        return VisibleStreams(None if ANY in row.streams else frozenset(row.streams))

    def sees(self, streams: Iterable[str]) -> bool:
        """Tell whether one of some streams may be seen."""
        return self.streams is None or not self.streams.isdisjoint(streams)

    def document(self, whole: Document, matrix: Matrix) -> dict[str, Any]:
        """Give the part of a status document that may be seen."""
        if self.streams is None:
            return dict(whole)
        consumers = [each for each in whole["consumers"] if each["stream"] in self.streams]
        links = [
            {**each, "reports": [report for report in each["reports"] if report["stream"] in self.streams]}
            for each in whole["links"]
            if self.sees(matrix.gate_streams(each["link"], each["side"]))
        ]
        seen = {
            **whole,
            "buffers": [each for each in whole["buffers"] if each["stream"] in self.streams],
            "consumers": consumers,
            "links": links,
            "pipelines": [],
            "artifacts": None,
            "scrub": None,
        }
        return {**seen, "alerts": [each for each in whole["alerts"] if self.sees_alert(each, seen)]}

    def sees_alert(self, alert: Document, seen: Document) -> bool:
        """Tell whether an alert is about something of a document that may be seen; what is not known is not shown."""
        if self.streams is None:
            return True
        known = {str(each["name"]) for each in seen["consumers"]} | {str(each["link"]) for each in seen["links"]}
        known.add(str(seen["zone"]))
        about = str(alert["about"])
        name, _, tail = about.rpartition("/")
        of_a_stream = name if tail in tuple(map(str, Buffer)) else about
        is_seen = of_a_stream in self.streams or about in known or name in known
        return is_seen or alert["alert"] in _OF_THE_NODE

    def series(self, series: tuple[str, ...], seen: Document) -> bool:
        """Tell whether a series of the dashboard's history belongs to a document that may be seen."""
        if self.streams is None:
            return True
        match series:
            case ("end" | "fill", stream, _):
                return stream in self.streams
            case ("left" | "lag", _, stream):
                return stream in self.streams
            case ("frontier" | "backlog", consumer):
                return any(each["name"] == consumer for each in seen["consumers"])
        return False


EVERYTHING = VisibleStreams()


@dataclass(frozen=True, slots=True)
class SeenMetrics:
    """The metrics of a registry without the samples about streams, consumers and links that may not be seen."""

    registry: Any
    seen: Document

    def collect(self) -> Iterator[Metric]:
        """Give the metrics with what is left of their samples."""
        names = {
            "stream": {str(each["stream"]) for each in self.seen["buffers"]},
            "consumer": {str(each["name"]) for each in self.seen["consumers"]},
            "link": {str(each["link"]) for each in self.seen["links"]},
            "pipeline": {str(each["pipeline"]) for each in self.seen.get("pipelines", ())},
        }
        for metric in self.registry.collect():
            samples = [
                sample
                for sample in metric.samples
                if all(sample.labels[label] in known for label, known in names.items() if label in sample.labels)
            ]
            left = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            left.samples = samples
            yield left


RATE_WINDOW_MS = 60_000
RATE_MINIMUM_MS = 1_000


class Rates:
    """How fast buffers grow, from what was seen of them in the last minute."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[tuple[int, int]]] = {}

    def observe(self, stats: BufferStats, monotonic_ms: int) -> None:
        """Note where a buffer ends now."""
        seen = self._seen.setdefault((stats.stream, str(stats.buffer)), deque())
        if not seen or monotonic_ms - seen[-1][0] >= RATE_MINIMUM_MS:
            seen.append((monotonic_ms, stats.end))
        while monotonic_ms - seen[0][0] > RATE_WINDOW_MS:
            seen.popleft()

    def facts_per_second(self, stats: BufferStats, monotonic_ms: int) -> float | None:
        """Give the mean rate of new entries over the window; None when it is not known yet."""
        seen = self._seen.get((stats.stream, str(stats.buffer)))
        if not seen or monotonic_ms - seen[0][0] < RATE_MINIMUM_MS:
            return None
        return (stats.end - seen[0][1]) * 1000 / (monotonic_ms - seen[0][0])


def hours_left(stats: BufferStats, facts_per_second: float | None) -> float | None:
    """Give how long a buffer lasts at a rate if nothing leaves it; None when it does not grow, as far as is known."""
    retained = stats.end - stats.start
    if facts_per_second is None or facts_per_second <= 0 or retained <= 0:
        return None
    bytes_per_second = facts_per_second * stats.used_bytes / retained
    return max(0, stats.capacity_bytes - stats.used_bytes) / bytes_per_second / 3600


async def all_stats(parts: NodeContext) -> list[BufferStats]:
    """Look at every buffer of a configured stream that exists and is in service.

    A buffer that closed itself, say after a failed sync, is from then on alone out of service.
    """
    found = []
    for stream, buffer in await parts.storage.streams():
        if stream in parts.settings.streams:
            with suppress(StreamUnavailable):
                opened = await parts.buffer(stream, buffer)
                try:
                    found.append(_judged(parts, await opened.stats()))
                except StorageClosed as closed:
                    parts.out_of_service(stream, buffer, closed)
    return found


def _judged(parts: NodeContext, stats: BufferStats) -> BufferStats:
    """Judge a fill by the thresholds that count now; the buffer knows those that it was opened with."""
    lane = parts.settings.streams[stats.stream]
    policy = lane.store_policy if stats.buffer == Buffer.STORE else lane.forward_policy
    return replace(stats, fill=policy.verdict(stats.fill_percent))


async def consumer_views(parts: NodeContext, stats: list[BufferStats]) -> list[ConsumerView]:
    """Give all consumers with their backlogs."""
    by_name = {(each.stream, each.buffer): each for each in stats}
    states = await parts.storage.cursors.consumers()
    return [
        ConsumerView(state, backlog_of(state, by_name.get((state.spec.stream, state.spec.buffer)))) for state in states
    ]


def backlog_of(state: ConsumerState, stats: BufferStats | None) -> int:
    """Count what a consumer has not confirmed."""
    return look_at(state, RecoveredBuffer(stats, {}) if stats is not None else None).backlog


async def unconfirmed_of(
    parts: NodeContext, stats: Sequence[BufferStats], views: Sequence[ConsumerView]
) -> list[Unconfirmed]:
    """Look at the oldest unconfirmed entry of every buffer, and note its age in the metrics."""
    states = [view.state for view in views]
    found = [await parts.oldest.of(each, states) for each in stats]
    for each, oldest in zip(stats, found, strict=True):
        parts.metrics.unconfirmed_seen(each, oldest)
    return found


async def document(
    parts: NodeContext,
    rates: Rates,
    started_unix_ms: int,
    alerts: Sequence[Mapping[str, Any]] = (),
    certificates: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Describe the node at this moment."""
    stats = await all_stats(parts)
    now_ms = parts.clock.monotonic_ms()
    for each in stats:
        rates.observe(each, now_ms)
        parts.metrics.buffer_seen(each)
    views = await consumer_views(parts, stats)
    unconfirmed = await unconfirmed_of(parts, stats, views)
    return {
        "zone": parts.settings.zone,
        "version": bsfg.__version__,
        "now_unix_ms": parts.clock.now_unix_ms(),
        "started_unix_ms": started_unix_ms,
        "buffers": [
            _buffer_document(each, rates.facts_per_second(each, now_ms), oldest)
            for each, oldest in zip(stats, unconfirmed, strict=True)
        ],
        "consumers": [_consumer(parts, view) for view in views],
        "links": _links(parts),
        "pipelines": parts.pipelines.documents(),
        "storage": asdict(parts.storage.capabilities),
        "nodes": [asdict(each) for each in parts.storage.nodes()] if isinstance(parts.storage, SharedStorage) else [],
        "artifacts": asdict(await parts.artifacts.stats()) if parts.artifacts is not None else None,
        "scrub": dict(parts.scrub()) if parts.scrub is not None else None,
        "configuration": dict(parts.configuration()) if parts.configuration is not None else None,
        "alerts": list(alerts),
        "certificates": list(certificates),
    }


def _buffer_document(stats: BufferStats, facts_per_second: float | None, unconfirmed: Unconfirmed) -> dict[str, Any]:
    return {
        "stream": stats.stream,
        "buffer": str(stats.buffer),
        "log_id": stats.log_id,
        "start": stats.start,
        "end": stats.end,
        "used_bytes": stats.used_bytes,
        "capacity_bytes": stats.capacity_bytes,
        "fill_percent": round(stats.fill_percent, 3),
        "fill": str(stats.fill),
        "oldest_unix_ms": stats.oldest_unix_ms,
        "newest_unix_ms": stats.newest_unix_ms,
        "gaps": stats.gaps,
        "quarantined": stats.quarantined,
        "quarantine_bytes": stats.quarantine_bytes,
        "quarantine_capacity_bytes": stats.quarantine_capacity_bytes,
        "quarantine_full": stats.quarantine_full,
        "gaps_full": stats.gaps_full,
        "chain_head": stats.chain_head.hex(),
        "facts_per_second": None if facts_per_second is None else round(facts_per_second, 3),
        "hours_left": hours_left(stats, facts_per_second),
        "first_unconfirmed": unconfirmed.offset,
        "oldest_unconfirmed_seconds": unconfirmed.age_seconds,
        "max_age_seconds": unconfirmed.max_age_seconds,
        "expiry_near": unconfirmed.near,
    }


def _consumer(parts: NodeContext, view: ConsumerView) -> dict[str, Any]:
    state = view.state
    last_fetch = parts.links.last_fetch(state.spec.name)
    parts.metrics.backlog.labels(state.spec.name).set(view.backlog)
    parts.metrics.frontier.labels(state.spec.name).set(state.checkpoint.committed)
    return {
        "name": state.spec.name,
        "stream": state.spec.stream,
        "buffer": str(state.spec.buffer),
        "required": state.spec.required,
        "committed": state.checkpoint.committed,
        "backlog": view.backlog,
        "retired_reason": state.retired_reason,
        "last_fetch_unix_ms": last_fetch[0] if last_fetch else None,
    }


def _links(parts: NodeContext) -> list[dict[str, Any]]:
    registry = parts.links
    reports: dict[str, list[dict[str, Any]]] = {}
    for at_unix_ms, report in registry.reports():
        reports.setdefault(report.link, []).append(
            {
                "stream": report.stream,
                "at_unix_ms": at_unix_ms,
                "holder": registry.reporters.get((report.link, report.stream)),
                "backlog": report.backlog,
                "lag_seconds": registry.lag_seconds(report.link, report.stream),
                "inserted": report.inserted,
                "repeated": report.repeated,
                "refused": report.refused,
            }
        )
    return [
        {
            "link": view.link,
            "side": view.side,
            "zone": _zone_of(parts, view),
            "mode": str(view.gate.mode),
            "since_unix_ms": view.gate.since_unix_ms,
            "reason": view.gate.reason,
            "held_by": view.gate.held_by,
            "held_until_unix_ms": view.gate.held_until_unix_ms,
            "engine": _engine_of(parts, view),
            "lease": registry.leases.holder(view.link) if view.side == RECEIVER else None,
            "trouble": registry.trouble(view.link, view.side),
            "reports": reports.get(view.link, []) if view.side == RECEIVER else [],
        }
        for view in registry.gates()
    ]


def _engine_of(parts: NodeContext, view: GateView) -> str | None:
    """Give what is meant to move a link; the other side decides that where this one serves."""
    link = parts.settings.links.get(view.link) if view.side == RECEIVER else None
    return str(link.engine) if link is not None else None


def _zone_of(parts: NodeContext, view: GateView) -> str:
    """Give the zone at the other end; the sender's gates are named after it."""
    link = parts.settings.links.get(view.link) if view.side == RECEIVER else None
    return link.zone if link is not None else view.link
