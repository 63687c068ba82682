"""The last hour of a node in numbers, so that charts are not empty when a page is opened.

Every value is a *series* such as ``("end", "operational", "store")``. All series share one ring of times, so memory
is bounded by the number of series, and that is bounded too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

POINTS = 720
EVERY_SECONDS = 5
SERIES_MAX = 500

Series = tuple[str, ...]


class History:
    """A ring of points in time with the values of many series."""

    def __init__(self, points: int = POINTS, series_max: int = SERIES_MAX) -> None:
        self._points, self._series_max = points, series_max
        self._times = np.zeros(points, dtype=np.int64)
        self._values: dict[Series, np.ndarray] = {}
        self._count = 0

    def add(self, at_unix_ms: int, values: Mapping[Series, float]) -> None:
        """Note the values of one moment; the oldest moment leaves when the ring is full."""
        place = self._count % self._points
        self._times[place] = at_unix_ms
        for known in self._values.values():
            known[place] = np.nan
        self._forget_empty()
        for series, value in values.items():
            if series not in self._values:
                if len(self._values) >= self._series_max:
                    continue
                self._values[series] = np.full(self._points, np.nan)
            self._values[series][place] = value
        self._count += 1

    def to_dict(self) -> dict[str, Any]:
        """Give all points, the oldest first; a value that was not known is None."""
        order = self._order()
        return {
            "times": self._times[order].tolist(),
            "series": [
                {"of": list(series), "values": _plain(values[order])} for series, values in self._values.items()
            ],
        }

    def _order(self) -> np.ndarray:
        if self._count <= self._points:
            return np.arange(self._count)
        return (np.arange(self._points) + self._count) % self._points

    def _forget_empty(self) -> None:
        for series in [series for series, values in self._values.items() if np.isnan(values).all()]:
            del self._values[series]


def _plain(values: np.ndarray) -> list[float | None]:
    """Write values for JSON: whole numbers without a point, others with six digits, unknown ones as None."""
    return [_number(value) if isfinite(value) else None for value in values.tolist()]


def _number(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def values_of(document: Mapping[str, Any], lags: Mapping[tuple[str, str], float]) -> dict[Series, float]:
    """Take from a status document what is kept; ``lags`` are the worst since the last look, by link and stream."""
    values: dict[Series, float] = {}
    for buffer in document["buffers"]:
        of = (str(buffer["stream"]), str(buffer["buffer"]))
        values["end", *of] = buffer["end"]
        values["fill", *of] = buffer["fill_percent"]
    for consumer in document["consumers"]:
        if consumer["retired_reason"] is None:
            values["frontier", str(consumer["name"])] = consumer["committed"]
            values["backlog", str(consumer["name"])] = consumer["backlog"]
    for link in document["links"]:
        for report in link["reports"]:
            values["left", str(link["link"]), str(report["stream"])] = report["backlog"]
    for (name, stream), seconds in lags.items():
        values["lag", name, stream] = seconds
    return values
