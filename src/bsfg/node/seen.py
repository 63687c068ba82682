"""What of a node somebody sees whose row names only some streams: those streams, and what carries or consumes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric

from bsfg.config.access import Identity
from bsfg.config.kinds import ANY
from bsfg.node.authorize import Matrix
from bsfg.ports import Buffer

Document = Mapping[str, Any]

_OF_THE_NODE = ("certificate_expiry", "crl_stale")
"""Alerts about files that have nothing to do with streams."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The streams that somebody may see; None means all, and everything of the node besides."""

    streams: frozenset[str] | None = None

    @staticmethod
    def of(row: Identity) -> Scope:
        """Give what a row may see."""
        return Scope(None if ANY in row.streams else frozenset(row.streams))

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
        known = {str(each["name"]) for each in consumers} | {str(each["link"]) for each in links}
        alerts = [each for each in whole["alerts"] if self._sees_alert(each, known | {whole["zone"]})]
        return {
            **whole,
            "buffers": [each for each in whole["buffers"] if each["stream"] in self.streams],
            "consumers": consumers,
            "links": links,
            "alerts": alerts,
            "artifacts": None,
            "scrub": None,
        }

    def _sees_alert(self, alert: Document, known: set[str]) -> bool:
        """Tell whether an alert is about something that may be seen; what nobody can tell is not shown."""
        about = str(alert["about"])
        name, _, tail = about.rpartition("/")
        of_a_stream = name if tail in tuple(map(str, Buffer)) else about
        seen = of_a_stream in (self.streams or ()) or about in known or name in known
        return seen or alert["alert"] in _OF_THE_NODE

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


EVERYTHING = Scope()


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
