"""The node watches itself: links that nobody moves, and records that somebody must hear of, whoever made them.

An engine says what it does; one that is dead says nothing, and its last word was good. So the node looks at what is
missing: a lease that nobody holds, a holder that does nothing, a peer that does not come.

Facts are quarantined and gap records written by both engines, by producers, by retention and by recovery. So the
buffers themselves are looked at, and not those who write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from bsfg.config import Engine, Link, Serve
from bsfg.errors import StreamUnavailable
from bsfg.gate import RECEIVER, SENDER, Event, Mode
from bsfg.journey.receive import HASH_COLLISION
from bsfg.node.alerts import AlertBoard
from bsfg.node.links import LinkRegistry
from bsfg.node.metrics import Metrics
from bsfg.node.parts import NodeContext
from bsfg.ports import Buffer, BufferStats
from bsfg.retention import GapReason
from bsfg.stores.log.damage import is_torn_end

NORMAL_BACKLOG = 100
ALL_EVERY = 60
"""Every so many looks the records are read although their number is the same: ranges may have grown together."""

LISTED_MAX = 1_000
"""A quarantine with more is not read at every change, but with the rest."""

MEANT = frozenset({GapReason.SKIPPED, GapReason.RETIRED, GapReason.TRUNCATED})
"""What a link leaves out by its configuration, and what an operator gave up, is no news to anybody."""

NAMED_MAX = 3
"""How many consumers of one peer an alert names."""


@dataclass(slots=True)
class _Watched:
    """Since when a link should move, and who moved it last and when."""

    begun_ms: int
    holder: str | None = None
    held_ms: int = 0


class LinkWatch:
    """Looks at the receiver's side of every link, and at every peer that is served."""

    def __init__(self, registry: LinkRegistry, alerts: AlertBoard, metrics: Metrics) -> None:
        self._registry, self._alerts, self._metrics = registry, alerts, metrics
        self._watched: dict[str, _Watched] = {}
        self._served_since_ms: dict[str, int] = {}

    def keep(self, links: Collection[str], zones: Collection[str]) -> None:
        """Forget all others: one that comes back is new, and is not missed since it was last here."""
        self._watched = {name: seen for name, seen in self._watched.items() if name in links}
        self._served_since_ms = {zone: since for zone, since in self._served_since_ms.items() if zone in zones}

    # The receiver's side.

    def look_at(self, link: Link) -> None:
        """Turn the gate of a link that nobody moves, and say so; whoever moves it again turns it back."""
        registry, name = self._registry, link.name
        now_ms = registry.clock.monotonic_ms()
        watched = self._watched.setdefault(name, _Watched(now_ms))
        holder = registry.leases.holder(name)
        if holder is not None:
            watched.holder, watched.held_ms = holder, now_ms
        trouble = None
        if registry.gate(name).gate.mode == Mode.HELD:
            # Nobody is to move it now; the patience begins again with its release.
            watched.begun_ms = now_ms
        else:
            trouble = self._trouble(link, watched, now_ms)
        if trouble is not None:
            registry.on(name, RECEIVER, Event.PEER_LOST, trouble)
        self._say(name, RECEIVER, "link_dead", trouble)
        self._metrics.link_dead.labels(name).set(trouble is not None)

    def _trouble(self, link: Link, watched: _Watched, now_ms: int) -> str | None:
        """Say that nobody moves a link, and what to do about it."""
        absent_ms = now_ms - max(watched.begun_ms, watched.held_ms)
        if absent_ms > 1000 * link.lost_after_seconds:
            if watched.holder is None:
                return f"nobody moves {link.name}, nobody has since the node started: {_remedy(link)}"
            return f"nobody moves {link.name}, {watched.holder} let go of it: {_remedy(link)}"
        silent_ms = now_ms - max(watched.begun_ms, self._registry.spoke_ms.get(link.name, 0))
        if silent_ms > 1000 * link.stalled_after_seconds:
            return f"{watched.holder} holds {link.name} and does not move it: look at its log, restart it"
        return None

    # The sender's side.

    def look_at_peer(self, serve: Serve, consumers: Mapping[str, str], retired: Collection[str] = ()) -> None:
        """Turn the gate to a peer: closed by its silence, opened by its fetches; a required one is missed aloud.

        ``consumers`` are the streams of its consumers by name.
        """
        registry, zone = self._registry, serve.zone
        now_ms = registry.clock.monotonic_ms()
        since_ms = self._served_since_ms.setdefault(zone, now_ms)
        if registry.gate(zone, SENDER).gate.mode == Mode.HELD:
            self._served_since_ms[zone] = now_ms
            self._say(zone, SENDER, "peer_absent", None)
            return
        patience_ms = 1000 * serve.lost_after_seconds
        taken_ms = registry.downloaded_ms.get(zone)
        came_ms = {name: _later(registry.came_ms(name), taken_ms) for name in consumers}
        last_ms = max((came for came in came_ms.values() if came is not None), default=None)
        if last_ms is None or now_ms - last_ms > patience_ms:
            since = "no fetch" if last_ms is None else f"no fetch for {(now_ms - last_ms) // 1000} s"
            registry.on(zone, SENDER, Event.PEER_LOST, since)
        else:
            self._found(zone, sum((registry.last_fetch(name) or (0, 0))[1] for name in consumers))
        absent = [
            stream
            for name, stream in consumers.items()
            if serve.required and name not in retired and now_ms - max(since_ms, came_ms[name] or 0) > patience_ms
        ]
        self._say(zone, SENDER, "peer_absent", _absent(serve, absent))
        places = [found for name in consumers if (found := registry.instances.doubled(name, now_ms)) is not None]
        self._alerts.update("certificate_shared", f"{zone}/{SENDER}", _shared(zone, places))

    def _found(self, zone: str, backlog: int) -> None:
        self._registry.on(zone, SENDER, Event.PEER_FOUND)
        if backlog <= NORMAL_BACKLOG:
            self._registry.on(zone, SENDER, Event.BACKLOG_CLEARED, f"backlog {backlog}")

    def _say(self, link: str, side: str, alert: str, trouble: str | None) -> None:
        self._registry.say(link, side, trouble)
        self._alerts.update(alert, f"{link}/{side}", trouble)


def _later(one_ms: int | None, other_ms: int | None) -> int | None:
    return max((each for each in (one_ms, other_ms) if each is not None), default=None)


def _remedy(link: Link) -> str:
    if link.engine == Engine.NATIVE:
        return "its own engine does not run; restart the node"
    return 'start `bsfg pipeline replicate`, or set engine = "native"'


def _absent(serve: Serve, streams: list[str]) -> str | None:
    if not streams:
        return None
    names = ", ".join(streams[:NAMED_MAX]) + (f" and {len(streams) - NAMED_MAX} more" if streams[NAMED_MAX:] else "")
    return f"{serve.zone} has not come for {names} for {serve.lost_after_seconds:g} s or more; facts are kept for it"


def _shared(zone: str, places: list[tuple[str, str]]) -> str | None:
    if not places:
        return None
    one, other = places[0]
    where = f"both from {one}" if one == other else f"from {one} and from {other}"
    return (
        f"two nodes fetch with the certificate of {zone}, {where}: what one confirms the other never gets; "
        "stop the one that is a copy"
    )


class RecordWatch:
    """Looks at what every buffer keeps aside, and at what it lacks."""

    def __init__(self, parts: NodeContext, alerts: AlertBoard) -> None:
        self._parts, self._alerts = parts, alerts
        self._looks = 0
        self._aside: dict[str, tuple[int, int]] = {}
        self._ranges: dict[str, int] = {}
        self._missing: dict[str, dict[str, int]] = {}

    async def look(self, stats: list[BufferStats]) -> None:
        """Look once at all buffers."""
        thorough = self._looks % ALL_EVERY == 0
        self._looks += 1
        for each in stats:
            about = f"{each.stream}/{each.buffer}"
            await self._look_aside(each, about, thorough)
            if thorough or self._ranges.get(about) != each.gaps:
                self._ranges[about] = each.gaps
                await self._look_for_gaps(each, about)

    async def _look_aside(self, stats: BufferStats, about: str, thorough: bool) -> None:
        """Raise an alert as long as anything waits in quarantine, another one for bodies that share a digest."""
        known, collisions = self._aside.get(about, (0, 0))
        changed = known != stats.quarantined and stats.quarantined <= LISTED_MAX
        if changed or (thorough and stats.quarantined):
            buffer = await self._parts.buffer(stats.stream, stats.buffer)
            collisions = sum(each.reason == HASH_COLLISION for each in await buffer.quarantine())
        self._aside[about] = stats.quarantined, collisions
        text = f"{stats.quarantined:,} in quarantine of {about}, waiting for a decision: see `bsfg quarantine`"
        self._alerts.update("quarantine", about, text if stats.quarantined else None)
        text = f"{collisions:,} in quarantine of {about} with the digest of another body: see `bsfg quarantine`"
        self._alerts.update(HASH_COLLISION, about, text if collisions else None)

    async def _look_for_gaps(self, stats: BufferStats, about: str) -> None:
        """Tell of facts that are newly recorded as missing; what was there at the start was told then."""
        missing: dict[str, int] = {}
        for gap in await (await self._parts.buffer(stats.stream, stats.buffer)).gap_sets():
            if gap.reason not in MEANT:
                reason = str(gap.reason) if gap.origin_zone is None else f"{gap.reason} in {gap.origin_zone}"
                missing[reason] = missing.get(reason, 0) + gap.ranges.offsets
        known = self._missing.get(about)
        self._missing[about] = missing
        news = {reason: count - (known or {}).get(reason, 0) for reason, count in missing.items()}
        told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(news.items()) if count > 0)
        if told and known is not None:
            self._alerts.event("gap", about, f"{about} lacks more facts, recorded as gaps: {told}")


class DamageWatch:
    """Tells of everything that storage found wrong, at the start and later, whoever came across it.

    Damage is an alert until the next start, because nobody else remembers that it needs a person. A torn end, as every
    crash leaves it, was never acknowledged: it is told and no more.
    """

    def __init__(self, parts: NodeContext, alerts: AlertBoard, note: Callable[..., object]) -> None:
        self._parts, self._alerts, self._note = parts, alerts, note
        self._told: dict[str, set[str]] = {}
        self._damage: dict[str, list[str]] = {}

    async def look(self) -> None:
        """Look once at the folder, at every buffer in service and at the artifacts."""
        self.tell(self._parts.settings.zone, getattr(self._parts.storage, "problems", ()))
        for stream in self._parts.settings.streams:
            for kind in Buffer:
                try:
                    buffer = await self._parts.buffer(stream, kind)
                except StreamUnavailable:
                    continue
                self.tell(f"{stream}/{kind}", getattr(buffer, "problems", ()), stream=stream, buffer=str(kind))
        self.tell("artifacts", getattr(self._parts.artifacts, "problems", ()))
        for about, found in self._damage.items():
            more = f" ({len(found) - 1:,} more: see `storage_problem` in the log)" if found[1:] else ""
            self._alerts.update("damage", about, f"{found[0]}{more}")

    def tell(self, about: str, problems: Sequence[str], **where: str) -> None:
        """Write down what was not told yet; what is damage becomes an alert with the next look."""
        told = self._told.setdefault(about, set())
        for problem in problems:
            if problem in told:
                continue
            told.add(problem)
            self._note("storage_problem", **where, problem=problem)
            if is_torn_end(problem):
                self._alerts.event("storage_problem", about, problem)
            else:
                self._damage.setdefault(about, []).append(problem)
