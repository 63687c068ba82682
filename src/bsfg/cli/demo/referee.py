"""The proof: what producers were told is held against what the storages of the zones hold, fact by fact.

Run as `python -m bsfg.cli.demo.referee ENGINE SETTINGS LINK…` it audits both ends of links, each the JSON that the
director writes, and prints the verdicts as JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bsfg.batch import EntryBatch
from bsfg.cli.demo.site import EVENTS, ORDERS, DemoSite, DemoZone
from bsfg.cli.zones import leash
from bsfg.errors import BsfgError
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


def _stored(zone: DemoZone, stream: str, buffer: Buffer) -> Iterator[EntryBatch]:
    """Read a buffer where the zone keeps it, whether or not a node is alive."""
    if zone.server is not None:
        yield from zone.server.entries(zone.name, stream, buffer)
        return
    for log in open_folder(zone.data):
        if (log.stream, log.buffer) == (stream, buffer):
            yield from (frame.entries for frame in log.frames() if frame.entries is not None)


def read(zone: DemoZone, stream: str, buffer: Buffer, from_zone: str) -> Held:
    """Read what a buffer has of one zone's facts."""
    held = Held()
    for entries in _stored(zone, stream, buffer):
        columns = {
            name: entries.values(name)
            for name in ("from_zone", "message_id", "offset", "digest", "appended_at_unix_ms", "artifact_digest")
        }
        for said_by, id_, offset, digest, at, artifact in zip(*columns.values(), strict=True):
            if said_by == from_zone:
                held.ids.append(id_)
                held.offsets.append(offset)
                held.digests.append(digest)
                held.appended_at_unix_ms.append(at)
                held.artifacts.append(artifact)
    return held


def missing(zone: DemoZone, stream: str, told: dict[str, int]) -> int:
    """Count the facts that a zone has acknowledged and that are not where its producer was told."""
    held = read(zone, stream, Buffer.STORE, zone.name)
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
    said = read(source, stream, Buffer.STORE, source.name)
    has = read(target, stream, Buffer.FORWARD, source.name)
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
        artifacts_bad=sum(not whole for whole in _are_whole(target, artifacts)),
        sent_at_ms=np.array([sent_at[id_] for id_ in crossed], dtype=np.int64),
        lag_ms=np.array([has.appended_at_unix_ms[first[id_]] - sent_at[id_] for id_ in crossed], dtype=np.float64),
    )


def _are_whole(zone: DemoZone, digests: Sequence[str]) -> Iterator[bool]:
    """Tell of each artifact whether it is there with the bytes that its digest stands for."""
    contents = asyncio.run(_downloaded(zone, digests)) if zone.server is not None else _found(zone.data, digests)
    for digest, content in zip(digests, contents, strict=True):
        yield content is not None and f"sha256:{hashlib.sha256(content).hexdigest()}" == digest


def _found(data: Path, digests: Sequence[str]) -> Iterator[bytes | None]:
    for digits in (digest.removeprefix("sha256:") for digest in digests):
        try:
            yield (data / "artifacts" / "content" / digits[:2] / digits).read_bytes()
        except OSError:
            yield None


async def _downloaded(zone: DemoZone, digests: Sequence[str]) -> list[bytes | None]:
    """Ask the zone's active node for artifacts."""
    contents: list[bytes | None] = []
    async with zone.endpoint("pipeline").connect() as client:
        for digest in digests:
            try:
                _, pieces = await client.get_object("", "", digest=digest)
                contents.append(b"".join([piece async for piece in pieces]))
            except BsfgError:
                contents.append(None)
    return contents


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
        moves = [move for node in link.receiver.nodes for move in _moves(node.words)]
        found[link.key] = [each["mode"] for each in moves if (each["link"], each["side"]) == (link.name, "receiver")]
    return found


def _moves(path: Path) -> Sequence[dict[str, Any]]:
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if record.get("event") == "gate_moved":
            records.append(record)
    return records


@dataclass(frozen=True, slots=True)
class Takeover:
    """One time that another node became active: what had happened to the first, and after how long one served."""

    how: str
    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LateFacts:
    """Facts that a paused node was handed, to be written when it was resumed: what it answered, and how many it did."""

    answers: list[str]
    stored: int

    @property
    def ok(self) -> bool:
        """Whether none was written, and none said to be."""
        return bool(self.answers) and not self.stored and STORED not in self.answers


STORED = "stored"
"""What stands in the place of an error where a late fact was acknowledged."""


@dataclass(frozen=True, slots=True)
class DemoVerdict:
    """What the demo proved, or failed to.

    ``append_ms`` are sorted: how long producers waited until their facts were on disk, in the outbox beside them or at
    the node. ``answer_ms_max`` is the longest time until the zone's node had a fact, its restart included.
    ``takeovers`` and ``late`` tell of a zone with two nodes.
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
    takeovers: list[Takeover] = field(default_factory=list)
    late: LateFacts | None = None

    def total(self, *names: str) -> int:
        """Add up some counts of both directions."""
        return sum(getattr(way, name) for way in self.ways for name in names)

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
        return whole and self.total("sent") == self.total("received") > 0 and (self.late is None or self.late.ok)

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON form."""
        return {
            "ok": self.ok,
            "engine": self.engine,
            "sent": self.total("sent"),
            "received": self.total("received"),
            "lost": self.total("lost"),
            "twice": self.total("twice"),
            "altered": self.total("altered", "artifacts_bad"),
            "out_of_order": self.total("out_of_order"),
            "artifacts": self.total("artifacts"),
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
            **({"takeovers": [asdict(each) for each in self.takeovers]} if self.takeovers else {}),
            **({"late": asdict(self.late)} if self.late is not None else {}),
            "seconds": round(self.seconds, 1),
        }


# The audit, in a process of its own.


def verdicts(links: list[dict[str, Any]], spark: Any = None) -> list[dict[str, Any]]:
    """Audit links one after the other, from the data folders, so that the hash chains are verified, too.

    Where a zone's facts are at a server its nodes are asked, and the server's own copy is verified beside that.
    """
    from bsfg.cli.connection import NodeChoice, resolve
    from bsfg.config import load
    from bsfg.node.backends import looked_at
    from bsfg.spark.audit import audit, audit_with
    from bsfg.spark.audit.case import Wish, plan_link
    from bsfg.spark.audit.runner import LocalRunner

    found = []
    for link in links:
        sender, receiver = (Path(link[end]) if link[end] else None for end in ("sender", "receiver"))
        config = Path(link["config"])
        own = NodeChoice(config=config, identity=link["identity"], address=link["address"])
        access = resolve(own, ("pipeline",)).access() if receiver is None else None
        plan = plan_link(load(config), link["name"], access, Wish(sender=sender, receiver=receiver))
        verdict = audit_with(LocalRunner(), plan) if spark is None else audit(spark, plan)
        checks = {each.name: str(each.state) for stream in verdict.streams for each in stream.checks}
        broken: list[str] = []
        if link["at_server"]:
            broken = looked_at(load(Path(link["at_server"])), sys.maxsize).wrong
            checks["chain_at_server"] = "failed" if broken else "passed"
        found.append(
            {
                "link": link["key"],
                "clean": verdict.clean and not broken,
                "facts": verdict.facts,
                "counts": {**verdict.counts, **({"chain_broken": len(broken)} if broken else {})},
                "seconds": round(verdict.seconds, 2),
                "checks": checks,
            }
        )
    return found


def audits(engine: str, settings: dict[str, str], links: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Audit links on a Spark of our own, or without one."""
    if engine != "spark":
        return verdicts(links)
    from bsfg.spark.session import end, session

    spark = session("bsfg-demo-audit", "local[2]", settings)
    try:
        return verdicts(links, spark)
    finally:
        end(spark)


if __name__ == "__main__":
    leash()
    answer = audits(sys.argv[1], orjson.loads(sys.argv[2]), [orjson.loads(link) for link in sys.argv[3:]])
    sys.stdout.write(orjson.dumps(answer).decode() + "\n")
