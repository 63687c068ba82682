"""The verdict of the demo: what was sent, what arrived, and how long it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bsfg.cli.demo.referee import Lag, Way


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the demo proved, or failed to.

    ``append_ms`` are sorted: how long producers waited until their facts were on disk, in the outbox beside them or at
    the node. ``answer_ms_max`` is the longest time until the zone's node had a fact, its restart included.
    """

    engine: str
    ways: list[Way]
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
                {name: getattr(way, name) for name in Way.__slots__ if name not in ("sent_at_ms", "lag_ms")}
                for way in self.ways
            ],
            "audits": self.audits,
            "seconds": round(self.seconds, 1),
        }
