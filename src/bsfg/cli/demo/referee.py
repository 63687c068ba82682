"""The proof: what producers were told is held against what the folders of the zones hold, fact by fact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bsfg.cli.demo.site import EVENTS, ORDERS, DemoSite, DemoZone
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
class DirectionTally:
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


def judge(source: DemoZone, target: DemoZone, stream: str, told: dict[str, int]) -> DirectionTally:
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
    return DirectionTally(
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
    def of(ways: Iterable[DirectionTally], span_unix_ms: tuple[int, int] | None = None) -> Lag | None:
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


def ways_of(site: DemoSite, told: dict[str, dict[str, int]]) -> list[DirectionTally]:
    """Judge both directions."""
    plant, enterprise = site.plant, site.enterprise
    return [
        judge(plant, enterprise, EVENTS, told[plant.name]),
        judge(enterprise, plant, ORDERS, told[enterprise.name]),
    ]


def modes_of(site: DemoSite) -> dict[str, list[str]]:
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


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """What the demo proved, or failed to.

    ``append_ms`` are sorted: how long producers waited until their facts were on disk, in the outbox beside them or at
    the node. ``answer_ms_max`` is the longest time until the zone's node had a fact, its restart included.
    """

    engine: str
    ways: list[DirectionTally]
    audits: list[dict[str, Any]]
    modes: dict[str, list[str]]
    before: Lag | None
    after: Lag | None
    overall: Lag | None
    append_ms: list[float]
    answer_ms_max: float
    seconds: float

    @property
    def sent(self) -> int:
        """All facts of both directions."""
        return sum(way.sent for way in self.ways)

    @property
    def received(self) -> int:
        """Those that are where they were meant for."""
        return sum(way.received for way in self.ways)

    @property
    def lost(self) -> int:
        """Those that are not."""
        return sum(way.lost for way in self.ways)

    @property
    def twice(self) -> int:
        """Those that are there again."""
        return sum(way.twice for way in self.ways)

    @property
    def altered(self) -> int:
        """Those that are not what was said, artifacts included."""
        return sum(way.altered + way.artifacts_bad for way in self.ways)

    @property
    def out_of_order(self) -> int:
        """How often a fact came before one that was said earlier."""
        return sum(way.out_of_order for way in self.ways)

    @property
    def artifacts(self) -> int:
        """The files that travelled with facts."""
        return sum(way.artifacts for way in self.ways)

    @property
    def modes_seen(self) -> list[str]:
        """All modes that a gate was in."""
        return sorted({mode for modes in self.modes.values() for mode in modes})

    @property
    def append_ms_max(self) -> float:
        """The longest append."""
        return self.append_ms[-1] if self.append_ms else 0.0

    @property
    def append_ms_p50(self) -> float:
        """The append in the middle."""
        return self.append_ms[len(self.append_ms) // 2] if self.append_ms else 0.0

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        whole = all(way.ok for way in self.ways) and all(each["clean"] for each in self.audits)
        return whole and self.sent == self.received > 0

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON form."""
        return {
            "ok": self.ok,
            "engine": self.engine,
            "sent": self.sent,
            "received": self.received,
            "lost": self.lost,
            "twice": self.twice,
            "altered": self.altered,
            "out_of_order": self.out_of_order,
            "artifacts": self.artifacts,
            "append_ms_p50": self.append_ms_p50,
            "append_ms_max": self.append_ms_max,
            "answer_ms_max": round(self.answer_ms_max, 1),
            "lag_ms_p50": self.before.p50 if self.before is not None else None,
            "lag_ms": {
                "before": asdict(self.before) if self.before is not None else None,
                "after": asdict(self.after) if self.after is not None else None,
                "overall": asdict(self.overall) if self.overall is not None else None,
            },
            "modes": self.modes,
            "modes_seen": self.modes_seen,
            "ways": [
                {name: getattr(way, name) for name in DirectionTally.__slots__ if name not in ("sent_at_ms", "lag_ms")}
                for way in self.ways
            ],
            "audits": self.audits,
            "seconds": round(self.seconds, 1),
        }
