"""Writes down what a node can be observed by: its metrics and the events of its log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bsfg.node.logs import EVENTS
from bsfg.node.metrics import Metrics

_INTRODUCTION = """\
# Metrics and log events

The names on this page stay: alarms and dashboards can be built on them. Metrics are at `/metrics` of the HTTP listener,
for callers who may view. The log is one JSON object per line on standard error, with `timestamp`, `level` and `event`
first; an error has its `code` as everywhere.

## Metrics

| Metric | Type | Labels | Meaning |
|---|---|---|---|
"""


def _metrics() -> Iterator[str]:
    collectors: dict[Any, Any] = Metrics().registry._collector_to_names
    for collector in sorted(collectors, key=lambda each: str(each._name)):
        suffix = "_total" if collector._type == "counter" else ""
        labels = ", ".join(f"`{name}`" for name in collector._labelnames)
        yield f"| `{collector._name}{suffix}` | {collector._type} | {labels} | {collector._documentation} |\n"


def page() -> str:
    """Write the whole page."""
    events = "".join(f"| `{name}` | {says} |\n" for name, says in sorted(EVENTS.items()))
    return f"{_INTRODUCTION}{''.join(_metrics())}\n## Log events\n\n| Event | Meaning |\n|---|---|\n{events}"
