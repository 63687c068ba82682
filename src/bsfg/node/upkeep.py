"""Upkeep: what a node looks after by itself, once a second and once a minute.

Links that nobody moves, fill levels and their alerts, hours of autonomy, retention, certificates, orphans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict

from bsfg.config import ZoneConfig, consumer_name
from bsfg.errors import BsfgError, StorageClosed, StreamUnavailable
from bsfg.journey.artifacts import all_buffers, collect_orphans
from bsfg.journey.truncate import InStep, truncate
from bsfg.node.ages import LatestWatch
from bsfg.node.alerts import AlertBoard, Note, alert_gate
from bsfg.node.backends import WithReserve
from bsfg.node.certificates import Certificates
from bsfg.node.parts import NodeContext
from bsfg.node.pipelines import PipelineWatch
from bsfg.node.status import Rates, all_stats, consumer_views, hours_left, unconfirmed_of
from bsfg.node.watching import DamageWatch, LinkWatch, RecordWatch
from bsfg.ports import Buffer, BufferStats
from bsfg.retention import Fill

LOOK_SECONDS = 1.0
RETENTION_EVERY = 60
ORPHANS_EVERY = 3600
BACKLOG_ALERT = 10_000


class Upkeep:
    """The housekeeping of one node."""

    def __init__(
        self,
        config: ZoneConfig,
        parts: NodeContext,
        alerts: AlertBoard,
        note: Note,
        rates: Rates | None = None,
        damage: DamageWatch | None = None,
    ) -> None:
        self._config, self._parts, self._alerts, self._note = config, parts, alerts, note
        self._rates = rates or Rates()
        self._watch = LinkWatch(parts.links, alerts, parts.metrics)
        self._pipelines = PipelineWatch(parts.pipelines, alerts, parts.metrics)
        self._records = RecordWatch(parts, alerts)
        self._damage = damage or DamageWatch(parts, alerts, note)
        self._certificates = Certificates(config, parts.clock)
        self._in_step = InStep()
        self._trimmed_early = 0
        self._latest: dict[str, LatestWatch] = {}
        self.take(config)
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def take(self, config: ZoneConfig) -> None:
        """Go by another configuration from now on."""
        before, self._config = self._config.streams, config
        self._watch.keep(config.links, config.serve)
        self._latest = {
            name: self._latest.get(name, LatestWatch(stream.latest_max_age_seconds))
            if name in before and before[name].latest_max_age_seconds == stream.latest_max_age_seconds
            else LatestWatch(stream.latest_max_age_seconds)
            for name, stream in config.streams.items()
            if stream.latest_max_age_seconds is not None
        }

    async def start(self) -> None:
        """Begin to look after things."""
        with suppress(BsfgError):
            # Before anybody can change something: what is there now is no news.
            await self._records.look(await all_stats(self._parts))
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        turn, failures = 0, dict[str, str | None]()
        while not self._stopping.is_set():
            # What fails must not keep the rest from being done: gates and alarms go on, and buffers are emptied.
            failures["look"] = await self._failure_of(self.look)
            if turn % RETENTION_EVERY == 0:
                failures["certificates"] = await self._failure_of(self._look_at_certificates)
                failures["retention"] = await self._failure_of(self.enforce_retention)
            if turn % ORPHANS_EVERY == ORPHANS_EVERY - 1:
                failures["orphans"] = await self._failure_of(self.collect_orphans)
            # Mostly it means that the storage has failed. It stands until the same step has gone well.
            failed = next((text for text in failures.values() if text is not None), None)
            self._alerts.update("upkeep_failed", self._parts.settings.zone, failed)
            turn += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._stopping.wait()

    async def _failure_of(self, step: Callable[[], Awaitable[None]]) -> str | None:
        """Do something and give what went wrong, whatever it was."""
        try:
            await step()
        except BsfgError as error:
            self._note("upkeep_failed", **error.to_dict())
            return f"{error.code}: {error.message}"
        except Exception as error:
            self._note("upkeep_failed", code=BsfgError.code, exc_info=error)
            return f"{BsfgError.code}: {type(error).__name__}: {error}"
        return None

    async def look(self) -> None:
        """Look once at gates, buffers and consumers."""
        await self._look_at_reserve()
        await self._look_at_links()
        await self._look_at_senders()
        await self._look_at_latest()
        self._pipelines.look()
        text = None
        if not self._parts.steady.trusted:
            text = "the clock of this machine has jumped forward; nothing expires until it is right, or a restart"
        self._alerts.update("clock_jumped", self._parts.settings.zone, text)
        self._look_at_trail()
        now_ms = self._parts.clock.monotonic_ms()
        stats = await all_stats(self._parts)
        # Raise an alert as long as a buffer cannot be opened.
        for stream in self._parts.settings.streams:
            for kind in Buffer:
                failure = self._parts.unavailable.get((stream, kind))
                self._alerts.update(StreamUnavailable.code, f"{stream}/{kind}", failure.message if failure else None)
        for each in stats:
            self._rates.observe(each, now_ms)
            self._parts.metrics.buffer_seen(each)
            self._look_at_fill(each)
            if each.buffer == Buffer.STORE:
                hours = hours_left(each, self._rates.facts_per_second(each, now_ms))
                self._parts.metrics.autonomy.labels(each.stream).set(float("inf") if hours is None else hours)
        await self._look_at_consumers(stats)
        await self._records.look(stats)
        await self._damage.look()
        self._alerts.tick()

    async def _look_at_links(self) -> None:
        """Look whether every link is moved, and whether every peer comes."""
        for link in self._config.links.values():
            self._watch.look_at(link)
        states = await self._parts.storage.cursors.consumers()
        retired = {state.spec.name for state in states if state.retired_reason is not None}
        for zone, serve in self._config.serve.items():
            streams = self._config.streams_of(serve)
            names = {consumer_name(zone, stream, buffer): stream for stream in streams for buffer in serve.buffers}
            self._watch.look_at_peer(serve, names, retired)
        for view in self._parts.links.gates():
            alert_gate(self._alerts, view)

    async def _look_at_reserve(self) -> None:
        """Empty a full disk of what is confirmed, and say that producers are refused meanwhile."""
        storage = self._parts.storage
        if not isinstance(storage, WithReserve):
            return
        await storage.relieve()
        text = None
        if storage.reserve.short:
            used = "its reserve is in use, " if storage.reserve.spent else ""
            text = f"the disk of {self._config.data_folder} is full: {used}new facts are refused until there is room"
        self._alerts.update("disk_full", self._parts.settings.zone, text)

    def _look_at_trail(self) -> None:
        """Say as long as the audit trail cannot be written, and when records had to leave before their time."""
        trail, zone = self._parts.trail, self._parts.settings.zone
        failed = trail.failure
        text = None if failed is None else f"the audit trail cannot be written: {failed}; the node goes on without it"
        self._alerts.update("audit_trail_failed", zone, text)
        if trail.trimmed_early > self._trimmed_early:
            self._trimmed_early = trail.trimmed_early
            text = "the audit trail has reached its max_size: records leave before their time; export them"
            self._alerts.event("audit_trail_full", zone, text)

    def _look_at_fill(self, stats: BufferStats) -> None:
        about = f"{stats.stream}/{stats.buffer}"
        text = None
        if stats.fill != Fill.HEALTHY:
            text = f"{about} is {stats.fill_percent:.1f} % full ({stats.used_bytes} of {stats.capacity_bytes} bytes)"
        self._alerts.update("buffer_fill", about, text, severity=str(stats.fill))
        full = None
        if stats.quarantine_full:
            held = f"{stats.quarantine_bytes} of {stats.quarantine_capacity_bytes} bytes"
            full = f"the quarantine of {about} is full ({held}): links that bring more refused facts pause"
        self._alerts.update("quarantine_full", about, full)
        text = f"{about} has no room for more gap records of other zones: links that bring them pause"
        self._alerts.update("gaps_full", about, text if stats.gaps_full else None)

    async def _look_at_consumers(self, stats: list[BufferStats]) -> None:
        views = await consumer_views(self._parts, stats)
        for each, unconfirmed in zip(stats, await unconfirmed_of(self._parts, stats, views), strict=True):
            about = f"{each.stream}/{each.buffer}"
            self._alerts.update("expiry_near", about, unconfirmed.alert(about))
        for view in views:
            name, state = view.state.spec.name, view.state
            if state.retired_reason is not None:
                continue
            self._parts.metrics.frontier.labels(name).set(state.checkpoint.committed)
            self._parts.metrics.backlog.labels(name).set(view.backlog)
            text = f"{name} has {view.backlog:,} facts to confirm" if view.backlog > BACKLOG_ALERT else None
            self._alerts.update("consumer_backlog", name, text)

    async def _look_at_certificates(self) -> None:
        """Warn before a certificate ends, and as soon as it has."""
        for seen in self._certificates.own():
            self._parts.metrics.certificate_expiry.labels(seen.file).set(seen.life.left_seconds)
            self._alerts.update("certificate_expiry", seen.file, seen.alert)

    async def enforce_retention(self) -> None:
        """Let go what age and the consumers allow."""
        self._parts.unavailable.clear()  # whoever repaired one finds it in service again
        failures: list[BsfgError] = []
        for stream in self._parts.settings.streams:
            for kind in Buffer:
                modes, as_of = self._parts.links.modes(stream, kind), self._keys_as_of(stream, kind)
                try:
                    buffer = await self._parts.buffer(stream, kind)
                    await truncate(buffer, self._parts.storage.cursors, modes, as_of)
                except StreamUnavailable:
                    continue
                except StorageClosed as closed:
                    self._parts.out_of_service(stream, kind, closed)
                except BsfgError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    async def _look_at_senders(self) -> None:
        """Take note of which links are in step, for the keys of streams that never expire."""
        parts, now_unix_ms = self._parts, self._parts.clock.now_unix_ms()
        for name, link in self._config.links.items():
            if name not in self._config.links:
                continue  # it was taken out while another one was looked at
            mode = parts.links.gate(name).gate.mode
            for stream in self._config.streams_of(link):
                self._in_step.observe(name, stream, mode, await parts.memory(name, stream).recall(), now_unix_ms)

    async def _look_at_latest(self) -> None:
        """Tell when the newest fact of a subject is older than its stream allows."""
        now_unix_ms = self._parts.steady.now_unix_ms()
        for stream, watch in self._latest.items():
            try:
                await watch.look(await self._parts.forward(stream), now_unix_ms)
                text = watch.alert(now_unix_ms)
            except BsfgError as error:
                text = f"the last known states of {stream} cannot be read: {error.code}: {error.message}"
            self._alerts.update("latest_stale", stream, text)

    def _keys_as_of(self, stream: str, kind: Buffer) -> int | None:
        """Give the moment that the key horizon counts back from, None for now: what expires is not offered again."""
        if kind == Buffer.STORE or not self._parts.settings.stream(stream).forward_policy.is_sil:
            return None
        links = [name for name, link in self._config.links.items() if stream in self._config.streams_of(link)]
        return self._in_step.since(links, stream)

    async def collect_orphans(self) -> None:
        """Remove artifacts that no retained fact names, after their grace period."""
        store = self._parts.artifacts
        if store is None or self._parts.unavailable:
            return  # what a buffer that cannot be opened names would be taken for an orphan
        lanes = self._parts.settings.streams
        policies = {
            (name, kind): lane.store_policy if kind == Buffer.STORE else lane.forward_policy
            for name, lane in lanes.items()
            for kind in Buffer
        }
        buffers = await all_buffers(self._parts.storage, policies)
        for references in list(self._parts.served_references.values()):
            await references.scan(buffers)  # which forgets what has left
        referenced = await self._parts.references.scan(buffers)
        grace_seconds = self._config.artifacts.orphan_grace_seconds
        collected = await collect_orphans(store, referenced, self._parts.clock.now_unix_ms(), grace_seconds)
        self._note("orphans_collected", **asdict(collected))
