"""What the status of a node means: which of its values are as they should be, and which need somebody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from bsfg.figures import count_text, duration_text, hours_text, percent_text, shown_seconds
from bsfg.gate import Mode
from bsfg.ports import Buffer

LAG_WARNING_SECONDS, LAG_ALERT_SECONDS = 0.1, 1.0
BACKLOG_WARNING, BACKLOG_ALERT = 100, 10_000
REPORT_FRESH_MS = 60_000
AUTONOMY_WARNING_HOURS = 24.0
RECEIVER, SENDER = "receiver", "sender"

Document = Mapping[str, Any]


class Level(StrEnum):
    """How a value counts; `worst` gives the highest."""

    OK = "ok"
    WARNING = "warning"
    ALERT = "alert"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that needs attention: what kind, about what, and in words."""

    level: Level
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
    lag: Level | None
    to_come: int | None
    told_unix_ms: int | None


def findings(document: Document) -> list[Finding]:
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
    return sorted(found.values(), key=lambda each: (each.level != Level.ALERT, each.alert, each.about))


def worst(found: list[Finding]) -> Level:
    """Give the highest level among findings."""
    levels = {each.level for each in found}
    return next((level for level in (Level.ALERT, Level.WARNING) if level in levels), Level.OK)


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


def lag_level(seconds: float) -> Level:
    """Judge the time from the sender's append to here."""
    if seconds > LAG_ALERT_SECONDS:
        return Level.ALERT
    return Level.WARNING if seconds >= LAG_WARNING_SECONDS else Level.OK


def backlog_level(count: int) -> Level:
    """Judge how much a consumer has not confirmed."""
    if count > BACKLOG_ALERT:
        return Level.ALERT
    return Level.WARNING if count > BACKLOG_WARNING else Level.OK


def mode_level(mode: str) -> Level:
    """Judge the mode of a gate: a held one waits for an operator, an autonomous one for the other side."""
    if mode == Mode.HELD:
        return Level.ALERT
    return Level.OK if mode == Mode.NORMAL else Level.WARNING


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


def _raised(document: Document) -> Iterator[Finding]:
    for alert in document.get("alerts", ()):
        level = Level.WARNING if alert["severity"] == Level.WARNING else Level.ALERT
        yield Finding(level, str(alert["alert"]), str(alert["about"]), str(alert["text"]))


def _seen(document: Document) -> Iterator[Finding]:
    for buffer in document["buffers"]:
        yield from _buffer(buffer)
    for consumer in document["consumers"]:
        level = backlog_level(consumer["backlog"])
        if level != Level.OK and consumer["retired_reason"] is None:
            says = f"{consumer['name']} has {count_text(consumer['backlog'])} facts to confirm"
            yield Finding(level, "consumer_backlog", consumer["name"], says)
    for link in document["links"]:
        yield from _link(link, document)
    yield from _autonomy(document)


def _buffer(buffer: Document) -> Iterator[Finding]:
    about = f"{buffer['stream']}/{buffer['buffer']}"
    if buffer["fill"] != "healthy":
        level = Level.WARNING if buffer["fill"] == "warning" else Level.ALERT
        yield Finding(level, "buffer_fill", about, f"{about} is {percent_text(buffer['fill_percent'])} full")
    if buffer.get("expiry_near"):
        says = f"the oldest unconfirmed fact of {about} expires soon"
        yield Finding(Level.ALERT, "expiry_near", about, says)
    if buffer.get("quarantine_full"):
        says = f"the quarantine of {about} is full: links that bring more refused facts pause"
        yield Finding(Level.ALERT, "quarantine_full", about, says)
    elif buffer["quarantined"]:
        says = f"{count_text(buffer['quarantined'])} facts wait in quarantine for a decision, in {about}"
        yield Finding(Level.ALERT, "quarantine", about, says)


def _link(link: Document, document: Document) -> Iterator[Finding]:
    about, mode = f"{link['link']}/{link['side']}", link["mode"]
    if mode == Mode.HELD:
        yield Finding(Level.ALERT, "gate_held", about, f"{link['link']} is held by {link['held_by']}: {link['reason']}")
    elif mode != Mode.NORMAL:
        reason = f": {link['reason']}" if link["reason"] else ""
        yield Finding(Level.WARNING, f"link_{mode}", about, f"{link['link']} is in {mode}{reason}")
    for report in _told(link, document):
        lag_seconds = report["lag_seconds"]
        if lag_seconds is None or (level := lag_level(shown_seconds(lag_seconds))) == Level.OK:
            continue
        says = f"{report['stream']} over {link['link']} lags {duration_text(lag_seconds)}"
        yield Finding(level, "replication_lag", f"{link['link']}/{report['stream']}", says)


def _autonomy(document: Document) -> Iterator[Finding]:
    """The end of autonomy is news only while somebody who should pull is away."""
    away = any(link["side"] == SENDER and link["mode"] in (Mode.AUTONOMOUS, Mode.HELD) for link in document["links"])
    soonest = autonomy(document)
    if away and soonest is not None and soonest[1] < AUTONOMY_WARNING_HOURS:
        stream, hours = soonest
        says = f"the store buffer of {stream} is full in {hours_text(hours)} at the rate of the last minute"
        yield Finding(Level.WARNING, "autonomy", stream, says)
