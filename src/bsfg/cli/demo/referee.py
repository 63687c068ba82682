"""The proof: what producers were told is held against what the folders of the zones hold, fact by fact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bsfg.cli.demo.site import EVENTS, ORDERS, Site, Zone
from bsfg.ports import Buffer
from bsfg.stores.log.reader import open_folder

SPAN_MARGIN_MS = 1_000
"""What was appended this shortly before the cut may not have crossed any more."""


@dataclass(slots=True)
class Held:
    """What a buffer holds of one zone's facts, in its order."""

    ids: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    appended_at_unix_ms: list[int] = field(default_factory=list)
    artifacts: list[str | None] = field(default_factory=list)


def read(data: Path, stream: str, buffer: Buffer, from_zone: str) -> Held:
    """Read a buffer from its folder, whether or not the node is alive."""
    held = Held()
    for log in open_folder(data):
        if (log.stream, log.buffer) != (stream, buffer):
            continue
        for frame in log.frames():
            if frame.entries is None:
                continue
            columns = {
                name: frame.entries.values(name)
                for name in ("from_zone", "message_id", "offset", "digest", "appended_at_unix_ms", "artifact_digest")
            }
            for zone, id_, offset, digest, at, artifact in zip(*columns.values(), strict=True):
                if zone == from_zone:
                    held.ids.append(id_)
                    held.offsets.append(offset)
                    held.digests.append(digest)
                    held.appended_at_unix_ms.append(at)
                    held.artifacts.append(artifact)
    return held


def missing(data: Path, stream: str, zone: str, told: dict[str, int]) -> int:
    """Count the facts that a zone has acknowledged and that are not where its producer was told."""
    held = read(data, stream, Buffer.STORE, zone)
    there = dict(zip(held.ids, held.offsets, strict=True))
    return sum(there.get(id_) != offset for id_, offset in told.items())


@dataclass(slots=True)
class Way:
    """What became of the facts of one direction, from the zone that said them to the one they are meant for."""

    source: str
    target: str
    stream: str
    sent: int
    received: int
    lost: int
    twice: int
    altered: int
    out_of_order: int
    artifacts: int
    artifacts_bad: int
    sent_at_ms: np.ndarray
    lag_ms: np.ndarray

    @property
    def ok(self) -> bool:
        """Whether everything is there, once, in order and as it was said."""
        return not (self.lost + self.twice + self.altered + self.out_of_order + self.artifacts_bad)


def judge(source: Zone, target: Zone, stream: str, told: dict[str, int]) -> Way:
    """Compare what one zone said with what another has."""
    said = read(source.data, stream, Buffer.STORE, source.name)
    has = read(target.data, stream, Buffer.FORWARD, source.name)
    digests = dict(zip(said.ids, said.digests, strict=True))
    sent_at = dict(zip(said.ids, said.appended_at_unix_ms, strict=True))
    places = {id_: place for place, id_ in enumerate(said.ids)}
    first: dict[str, int] = {}
    for place, id_ in enumerate(has.ids):
        first.setdefault(id_, place)
    # Whatever its node has of it counts as said, also what nobody was told of.
    lost = [id_ for id_ in {*told, *said.ids} if id_ not in first or id_ not in digests]
    order = np.array([places[id_] for id_ in first if id_ in places], dtype=np.int64)
    crossed = [id_ for id_ in first if id_ in sent_at]
    artifacts = [digest for digest in said.artifacts if digest is not None]
    return Way(
        source=source.name,
        target=target.name,
        stream=stream,
        sent=len({*told, *said.ids}),
        received=len(first),
        lost=len(lost),
        twice=len(has.ids) - len(first),
        altered=sum(digests.get(id_) != has.digests[place] for id_, place in first.items()),
        out_of_order=int(np.count_nonzero(np.diff(order) < 0)),
        artifacts=len(artifacts),
        artifacts_bad=sum(not _is_whole(target.data, digest) for digest in artifacts),
        sent_at_ms=np.array([sent_at[id_] for id_ in crossed], dtype=np.int64),
        lag_ms=np.array([has.appended_at_unix_ms[first[id_]] - sent_at[id_] for id_ in crossed], dtype=np.float64),
    )


def _is_whole(data: Path, digest: str) -> bool:
    """Tell whether an artifact is there with the bytes that its digest stands for."""
    digits = digest.removeprefix("sha256:")
    try:
        content = (data / "artifacts" / "content" / digits[:2] / digits).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content).hexdigest() == digits


@dataclass(frozen=True, slots=True)
class Lag:
    """How long facts took from one zone's disk to another's, in the middle, for the slowest hundredth, and at most."""

    p50: float
    p99: float
    most: float

    @staticmethod
    def of(ways: Iterable[Way], span_unix_ms: tuple[int, int] | None = None) -> Lag | None:
        """Measure the facts that were appended in a span of time; None when there are none."""
        found = []
        for way in ways:
            first, end = span_unix_ms if span_unix_ms is not None else (0, np.iinfo(np.int64).max)
            found.append(way.lag_ms[(way.sent_at_ms >= first) & (way.sent_at_ms < end)])
        lags = np.concatenate(found) if found else np.empty(0)
        if not lags.size:
            return None
        p50, p99 = np.percentile(lags, [50, 99])
        return Lag(round(float(p50), 1), round(float(p99), 1), round(float(lags.max()), 1))


def ways_of(site: Site, told: dict[str, dict[str, int]]) -> list[Way]:
    """Judge both directions."""
    plant, enterprise = site.plant, site.enterprise
    return [
        judge(plant, enterprise, EVENTS, told[plant.name]),
        judge(enterprise, plant, ORDERS, told[enterprise.name]),
    ]


def modes_of(site: Site) -> dict[str, list[str]]:
    """Give the modes that every link has gone through at its receiver, as the nodes logged them."""
    found: dict[str, list[str]] = {}
    for link in site.links:
        moves = _logged(link.receiver.root / f"{link.receiver.name}.stderr", "gate_moved")
        found[link.key] = [each["mode"] for each in moves if (each["link"], each["side"]) == (link.name, "receiver")]
    return found


def _logged(path: Path, event: str) -> Sequence[dict[str, Any]]:
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if record.get("event") == event:
            records.append(record)
    return records
