"""The node's log: one JSON object per line on standard error, with event names that stay; what repeats is counted."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO

import orjson
import structlog

from bsfg.clock import SystemClock
from bsfg.ports import Clock
from bsfg.wording import one_line, printable, printable_json, printable_values

FREE = 5
"""So many lines of one kind are written in a minute."""

QUIET_MS = 60_000
KINDS_MAX = 128
"""So many kinds are told apart; the rest is one kind."""

OTHERS = ("others",)


@dataclass(slots=True)
class _Kind:
    """A kind of line: since when it is counted, and how many came."""

    since_ms: int
    count: int = 0


class Repeats:
    """Decides which lines are written, and how many were not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, ...], _Kind] = {}

    def tell(self, kind: tuple[str, ...], write: Callable[[int], None]) -> None:
        """Write a line of a kind, or only count it; ``write`` is given how many were left out before it."""
        now_ms = self._clock.monotonic_ms()
        if kind not in self._kinds and len(self._kinds) >= KINDS_MAX:
            self._forget(now_ms)
            kind = kind if len(self._kinds) < KINDS_MAX else OTHERS
        found = self._kinds.get(kind)
        left_out = 0
        if found is None or now_ms - found.since_ms >= QUIET_MS:
            left_out = max(0, found.count - FREE) if found is not None else 0
            found = self._kinds[kind] = _Kind(now_ms)
        found.count += 1
        if found.count <= FREE:
            write(left_out)

    def _forget(self, now_ms: int) -> None:
        """Forget kinds of which nothing is left to tell."""
        for kind, found in list(self._kinds.items()):
            if now_ms - found.since_ms >= QUIET_MS and found.count <= FREE:
                del self._kinds[kind]


EVENTS: dict[str, str] = {
    "access_not_reloaded": "A changed file cannot be used; the node goes on with what it had.",
    "access_reloaded": "What changed in zone.toml, or in revocation lists, counts; what waits for a restart is named.",
    "alert_cleared": "What an alert was about is over.",
    "alert_not_delivered": "An alert could not be given to the webhook or command; it is in this log all the same.",
    "alert_raised": "Something needs a person: `alert` says what, with its details.",
    "buffer_opening": "A buffer takes long to open; said every two seconds until it is, with the seconds so far.",
    "buffer_truncated": "An operator removed what everybody had confirmed: who, of which buffer, before what and why.",
    "certificate_reloaded": "Changed certificate files are in use.",
    "certificate_unusable": "Changed certificate files cannot be used; the old ones stay in use.",
    "configuration_doubtful": "The configuration is correct and hardly meant: `key` and `problem` say what.",
    "consumer_created": "An operator or the node itself created a durable consumer.",
    "consumer_retired": "An operator ended a durable consumer; what it had not confirmed became gap records.",
    "dashboard_failed": "A look at the node for the dashboard failed; the next one tries again.",
    "facts_refused": "A link brought facts that were quarantined; their sender is told.",
    "fetch_failed": "A link's peer could not be asked; it is tried again.",
    "gate_held": "An operator closed a gate: who, which one and why.",
    "gate_moved": "The gate of one side of a link changed its mode.",
    "gate_released": "An operator opened a gate: who, which one and why.",
    "lease_granted": "A pipeline took the lease of a link.",
    "lease_lost": "The node's own engine no longer holds the lease of a link and stands still.",
    "lease_taken": "The node's own engine took the lease of a link.",
    "lease_waited_for": "A pipeline moves a link, or is about to; the node's own engine stands back until it is gone.",
    "library": "A library that the node uses said something.",
    "link_failed": "A turn of a link failed for a reason that nobody expected; this is a defect.",
    "link_held": "A link was held because of what its peer sent; an operator must look.",
    "link_paused": "A link pauses because its forward buffer is full.",
    "link_read_again": "A receiver that was restored from an older copy has read again what it lacked.",
    "listening": "A listener is open.",
    "node_started": "The node serves.",
    "node_stopped": "The node has stopped and released its storage.",
    "orphans_collected": "Artifacts that no fact names were removed.",
    "overtaken": "Another node of the zone is active, or may be; this one ends its work and stands by.",
    "quarantine_dropped": "An operator gave up a quarantined fact.",
    "quarantine_retried": "An operator had a quarantined fact put again.",
    "request_failed": "A request failed for a reason that nobody expected; this is a defect.",
    "request_refused": "A caller asked for what it may not; five of a kind in a minute, `left_out` counts the rest.",
    "scrub_failed": "Old files could not be re-read for a reason that is no damage; it is tried again.",
    "sessions_not_kept": "Who is signed in to the dashboard cannot be written or read; a restart signs them out.",
    "signed_in": "Somebody signed in to the dashboard with a token.",
    "signed_out": "Somebody signed out of the dashboard.",
    "standing_by": "Another node of the zone is active; this one answers nobody and takes over when that one is gone.",
    "storage_not_waited_for": "The node stops, and what its storage's servers had not answered has an unknown outcome.",
    "storage_not_watched": "A node that stands by cannot reach the storage; it tries again.",
    "storage_problem": "Something is damaged, lost or out of place; found at the start, or later by whoever read it.",
    "storage_recovered": "The storage is open; the record says what it holds.",
    "stream_unavailable": "A buffer cannot be opened and is out of service; the others work.",
    "upkeep_failed": "A round of retention, alerts or collection failed; the next one tries again.",
}

KIND_CHARACTERS = 40

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_USED_UP = frozenset({errno.EMFILE, errno.ENFILE})
_OF_CALLERS = frozenset({"ExecuteBatchError", "UnicodeDecodeError"})
"""What gRPC has errors of when a caller went before his answer, or sent headers that are no text: no defect of ours."""

_SHARED: list[Any] = [
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


def configure(level: str = "info", form: str = "json", stream: TextIO | None = None) -> None:
    """Send the node's own records and those of libraries to one stream, in one form."""
    out = stream or sys.stderr
    render: list[Any] = [_json] if form == "json" else [_clean, structlog.dev.ConsoleRenderer(colors=out.isatty())]
    structlog.configure(
        processors=[*_SHARED, *render],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.addFilter(_Rarely())
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_as_library, *_SHARED],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(LEVELS[level], logging.WARNING))


class _Rarely(logging.Filter):
    """Lets a few lines of a library through, and counts the rest of a minute: callers can make it say many.

    A kind of line is how it begins; how many were left out stands in the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats(SystemClock())

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is written."""
        written: list[int] = []
        self._repeats.tell((record.name, record.levelname, str(record.msg)[:KIND_CHARACTERS]), written.append)
        if written and written[0]:
            record.left_out = written[0]
        return bool(written)


def _as_library(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record = event.get("_record")
    event["message"] = event.pop("event", "")
    event["event"] = "library"
    event["library"] = record.name if record is not None else name
    error = record.exc_info[1] if record is not None and record.exc_info else None
    if isinstance(error, OSError) and error.errno in _USED_UP:
        # Where the node was when the system had no descriptor left tells nothing; that it had none is all there is.
        event.pop("exc_info", None)
        event["reason"] = error.strerror
    elif record is not None and record.name.startswith("grpc") and type(error).__name__ in _OF_CALLERS:
        event.pop("exc_info", None)
        event["reason"] = type(error).__name__
    if left_out := getattr(record, "left_out", 0):
        event["left_out"] = left_out
    return event


def _clean(logger: Any, name: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Keep what others said within the line and away from the terminal; a traceback has lines of its own."""
    trace = {"exception": printable(str(event["exception"]))} if "exception" in event else {}
    return {one_line(key): printable_values(value) for key, value in event.items()} | trace


def _json(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    """Write a record with event, level and time first, so that people can read it too."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return printable_json(orjson.dumps({**first, **event}, default=str)).decode()
