"""The status of a node as one document: what operators look at first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import bsfg
from bsfg.errors import StorageClosed, StreamUnavailable
from bsfg.journey.recover import RecoveredBuffer, look_at
from bsfg.node.board import RECEIVER
from bsfg.node.oldest import Unconfirmed
from bsfg.node.parts import Parts
from bsfg.ports import BufferStats, ConsumerState
from bsfg.wire.service import ConsumerView, GateView

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


async def all_stats(parts: Parts) -> list[BufferStats]:
    """Look at every buffer of a configured stream that exists and is in service.

    A buffer that closed itself, say after a failed sync, is from then on alone out of service.
    """
    found = []
    for stream, buffer in await parts.storage.streams():
        if stream in parts.settings.lanes:
            with suppress(StreamUnavailable):
                opened = await parts.buffer(stream, buffer)
                try:
                    found.append(await opened.stats())
                except StorageClosed as closed:
                    parts.out_of_service(stream, buffer, closed)
    return found


async def consumer_views(parts: Parts, stats: list[BufferStats]) -> list[ConsumerView]:
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
    parts: Parts, stats: Sequence[BufferStats], views: Sequence[ConsumerView]
) -> list[Unconfirmed]:
    """Look at the oldest unconfirmed entry of every buffer, and note its age in the metrics."""
    states = [view.state for view in views]
    found = [await parts.oldest.of(each, states) for each in stats]
    for each, oldest in zip(stats, found, strict=True):
        parts.metrics.unconfirmed_seen(each, oldest)
    return found


async def document(
    parts: Parts,
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
            _buffer(each, rates.facts_per_second(each, now_ms), oldest)
            for each, oldest in zip(stats, unconfirmed, strict=True)
        ],
        "consumers": [_consumer(parts, view) for view in views],
        "links": _links(parts),
        "artifacts": asdict(await parts.artifacts.stats()) if parts.artifacts is not None else None,
        "scrub": dict(parts.scrub()) if parts.scrub is not None else None,
        "alerts": list(alerts),
        "certificates": list(certificates),
    }


def _buffer(stats: BufferStats, facts_per_second: float | None, unconfirmed: Unconfirmed) -> dict[str, Any]:
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
        "chain_head": stats.chain_head.hex(),
        "facts_per_second": None if facts_per_second is None else round(facts_per_second, 3),
        "hours_left": hours_left(stats, facts_per_second),
        "first_unconfirmed": unconfirmed.offset,
        "oldest_unconfirmed_seconds": unconfirmed.age_seconds,
        "max_age_seconds": unconfirmed.max_age_seconds,
        "expiry_near": unconfirmed.near,
    }


def _consumer(parts: Parts, view: ConsumerView) -> dict[str, Any]:
    state = view.state
    last_fetch = parts.board.last_fetch(state.spec.name)
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


def _links(parts: Parts) -> list[dict[str, Any]]:
    board = parts.board
    reports: dict[str, list[dict[str, Any]]] = {}
    for at_unix_ms, report in board.reports():
        reports.setdefault(report.link, []).append(
            {
                "stream": report.stream,
                "at_unix_ms": at_unix_ms,
                "holder": board.reporter(report.link, report.stream),
                "backlog": report.backlog,
                "lag_seconds": board.lag_seconds(report.link, report.stream),
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
            "lease": board.holder(view.link) if view.side == RECEIVER else None,
            "trouble": board.trouble(view.link, view.side),
            "reports": reports.get(view.link, []) if view.side == RECEIVER else [],
        }
        for view in board.gates()
    ]


def _engine_of(parts: Parts, view: GateView) -> str | None:
    """Give what is meant to move a link; the other side decides that where this one serves."""
    link = parts.settings.links.get(view.link) if view.side == RECEIVER else None
    return str(link.engine) if link is not None else None


def _zone_of(parts: Parts, view: GateView) -> str:
    """Give the zone at the other end; the sender's gates are named after it."""
    link = parts.settings.links.get(view.link) if view.side == RECEIVER else None
    return link.zone if link is not None else view.link
