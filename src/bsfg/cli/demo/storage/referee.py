"""The proof: what producers were told is held against what is in the folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bsfg.cli.demo.storage.script import STREAM, message_id, object_of
from bsfg.errors import BsfgError
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.verify import verify


@dataclass(slots=True)
class Stored:
    """What a reader finds in the folder: the place and object of every id, and how often it is there."""

    places: dict[str, int] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    gaps: int = 0


def read(folder: Path) -> Stored:
    """Read everything, whether or not the writer is alive."""
    stored = Stored()
    for log in open_folder(folder):
        if log.stream != STREAM:
            continue
        for frame in log.frames(0):
            if frame.entries is None:
                stored.gaps += 1
                continue
            ids = frame.entries.values("message_id")
            stored.times.update(ids)
            stored.places.update(zip(ids, frame.entries.values("offset"), strict=True))
            stored.objects.update(zip(ids, frame.entries.values("object"), strict=True))
    return stored


def missing(stored: Stored, acknowledged: dict[str, int]) -> list[str]:
    """Name the acknowledged facts that are not at the offset their producer was told."""
    return [id_ for id_, offset in acknowledged.items() if stored.places.get(id_) != offset]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the demo proved, or failed to."""

    sent: int
    acknowledged: int
    stored: int
    lost: int
    twice: int
    altered: int
    never_acknowledged: int
    gaps: int
    chain_verified: bool
    problems: list[dict[str, Any]]

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        broken = self.lost + self.twice + self.altered + self.never_acknowledged
        return not broken and self.stored == self.sent == self.acknowledged and self.chain_verified


def judge(folder: Path, acknowledged: dict[str, int], producers: int, facts: int) -> Verdict:
    """Compare everything with everything, and verify the folder."""
    planned = {message_id(p, n): object_of(p, n) for p in range(1, producers + 1) for n in range(facts)}
    stored = read(folder)
    try:
        found = verify(folder).problems
        problems = [{"code": item.code, "where": item.where, "detail": item.detail} for item in found]
    except BsfgError as error:
        problems = [error.to_dict()]
    return Verdict(
        sent=len(planned),
        acknowledged=len(acknowledged),
        stored=sum(stored.times.values()),
        lost=len(missing(stored, acknowledged)),
        twice=sum(times - 1 for times in stored.times.values()),
        altered=sum(planned.get(id_) != data for id_, data in stored.objects.items()),
        never_acknowledged=len(planned.keys() - acknowledged.keys()),
        gaps=stored.gaps,
        chain_verified=not problems,
        problems=problems,
    )
