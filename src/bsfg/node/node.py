"""The node of a zone: the one place where its parts are made, connected, started and stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import structlog

import bsfg
from bsfg.clock import JumpGuardedClock, SystemClock
from bsfg.config import Engine, IdentityFrom, Link, ZoneConfig, consumer_name, doubts_of
from bsfg.disk import ACCESS
from bsfg.errors import BsfgError, ForeignLog, FrameInvalid, StreamUnavailable
from bsfg.gate import RECEIVER, SENDER, Gate, Mode
from bsfg.journey.handoff import SenderWay
from bsfg.journey.recover import recover
from bsfg.node.administration import Administration
from bsfg.node.alerts import AlertBoard, alert_gate
from bsfg.node.authorize import Decision, Guard, Matrix
from bsfg.node.backends import (
    KeepsAll,
    SharedStorage,
    lock_folder,
    open_artifacts,
    open_state,
    open_storage,
    reserve_of,
)
from bsfg.node.certificates import Certificates
from bsfg.node.dashboard import Dashboard
from bsfg.node.links import LinkRegistry
from bsfg.node.listeners import Listeners
from bsfg.node.logs import Repeats
from bsfg.node.metrics import Metrics
from bsfg.node.native import NativeHandoff, StreamPull, rules_of
from bsfg.node.objects import ArtifactFetcher
from bsfg.node.parts import NodeContext, NodeSettings
from bsfg.node.reload import Reload, Stamp, digest_of, stamp_of, trust_of
from bsfg.node.scrub import Pace, Scrub
from bsfg.node.service import NodeService
from bsfg.node.state import NodeState, check_ids
from bsfg.node.status import Rates
from bsfg.node.trail import AuditTrail
from bsfg.node.upkeep import Upkeep
from bsfg.node.watching import DamageWatch
from bsfg.ports import ArtifactStore, Buffer, Clock, ConsumerSpec, Frame, StartAt, Storage
from bsfg.stores.log.files import DiskFiles
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.scrub import Log
from bsfg.stores.log.trailfile import FILE_BYTES, Keeping, TrailWriter
from bsfg.throttle import Throttle
from bsfg.trail import NODE, REFUSED, STRANGER, TrailEvent
from bsfg.wire.certcheck import check_signed
from bsfg.wire.client import BoundaryClient, ClientLink
from bsfg.wire.connection import PEER_MESSAGE_BYTES, Connection
from bsfg.wire.peer import PeerNames
from bsfg.wire.probe import ConnectionDiagnosis
from bsfg.wire.service import Caller, GateView
from bsfg.wire.tls import Material, Watched

log = structlog.get_logger("bsfg.node")

FINISH_SECONDS = 4.0
"""How long what is under way may wait for the servers of a storage when the node stops.

A commit can wait for ever there. Its callers are told before the listeners let go of them."""

OPENING_SECONDS = 2.0
"""Every so often the node says that a buffer is still being opened."""

Opened = TypeVar("Opened")

_STATE_LOST = "storage_failed: the state of the node was damaged; whether an operator held this link is not known"


class Node:
    """A running node; use it as an async context manager, or call `start` and `stop`."""

    def __init__(self, config: ZoneConfig, *, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        self.config = config
        self.clock, self._rng = clock or SystemClock(), rng
        self._instance = secrets.token_hex(8)
        self.parts: NodeContext
        self.pages: Dashboard | None = None
        self.grpc_port = self.http_port = 0
        self._reload: Reload | None = None
        self.trail = AuditTrail()
        self._rates = Rates()
        self.handoffs: dict[str, NativeHandoff] = {}
        self._pulls: dict[str, tuple[object, AsyncExitStack]] = {}
        """What each link that is pulled here was begun with, and what ends it."""
        self._stack = AsyncExitStack()
        self._storage: Storage | None = None

    async def __aenter__(self) -> Node:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Open the storage, recover, listen, and begin to pull."""
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise

    async def stop(self) -> None:
        """Stop in the opposite order: no new calls, finish what is under way, release the storage."""
        await self._end()
        log.info("node_stopped", zone=self.config.zone.name)

    async def _end(self) -> None:
        hurry = asyncio.create_task(self._hurry())
        try:
            await self._stack.aclose()
        finally:
            hurry.cancel()

    async def _hurry(self) -> None:
        """Wait a while for what is under way at the servers of a storage, and then no longer."""
        await asyncio.sleep(FINISH_SECONDS)
        if isinstance(self._storage, SharedStorage):
            log.warning("storage_not_waited_for", zone=self.config.zone.name)
            await self._storage.end_waiting()

    async def overtaken(self) -> None:
        """Wait until another node of the zone has its storage; for ever where no other one can."""
        storage = self.parts.storage
        await (storage.overtaken() if isinstance(storage, SharedStorage) else asyncio.Event().wait())

    async def _start(self) -> None:
        config = self.config
        for doubt in doubts_of(config):
            log.warning("configuration_doubtful", key=doubt.key, problem=doubt.says)
        watched = self._watched()
        begun = stamp_of(config, watched.files if watched is not None else None)
        metrics = Metrics()
        if config.storage.group_reads:
            ACCESS.let_group_read()
        storage = self._storage = await self._open_storage(metrics)
        self._stack.push_async_callback(storage.close)
        state = self._state = self._open_state(storage)
        self._stack.callback(state.close)
        state.check_settled()
        trail_problems = self._open_trail(reserve_of(storage, config.data_folder, self.clock))
        self.alerts = AlertBoard(config.zone.name, config.alerts, metrics, self.clock, _note)
        self._stack.push_async_callback(self.alerts.close)
        registry = self._registry(state, metrics)
        matrix = Matrix.of(config, trust_of(config, watched.files if watched is not None else None))
        guard = Guard(matrix, self.clock, self._audit(metrics), config.listen.plaintext_identity)
        artifacts = await self._open_artifacts(storage)
        self._stack.push_async_callback(artifacts.close)
        given = (NodeSettings.of(config), guard, self.clock, registry, metrics, artifacts, state.peer, self.trail)
        self.parts = NodeContext(storage, *given)
        self.damage = DamageWatch(self.parts, self.alerts, log.error)
        await self._recover([*state.problems, *trail_problems])
        await check_ids(self.parts, config.zone.name)
        await self._create_consumers()
        await self._listen(watched)
        upkeep = self._upkeep = Upkeep(config, self.parts, self.alerts, _note, self._rates, self.damage)
        await upkeep.start()
        self._stack.push_async_callback(upkeep.stop)
        # A reload that is under way ends first: it may begin to pull.
        self._stack.push_async_callback(self._stop_pulling)
        self._follow_files(watched, begun)
        self._scrub(state)
        await self._pull_all(watched)
        started = {"version": bsfg.__version__, "grpc_port": self.grpc_port, "digest": digest_of(config)}
        log.info("node_started", zone=config.zone.name, **started)
        started = {"version": bsfg.__version__, "pid": os.getpid()}
        await self.trail.recorded(TrailEvent("node_started", NODE, about=config.zone.name, details=started))

    # The disk.

    async def _open_storage(self, metrics: Metrics) -> Storage:
        if self.config.storage.backend != "log":
            self._stack.callback(lock_folder(self.config.data_folder))
        return await open_storage(self.config, self.clock, metrics.fsync_latency.observe)

    # What a simulated machine opens on its own disk.

    def _open_state(self, storage: Storage) -> NodeState:
        return open_state(self.config, storage, self.clock)

    async def _open_artifacts(self, storage: Storage) -> ArtifactStore:
        return await open_artifacts(self.config, storage, self.clock)

    def _open_trail(self, reserve: Reserve) -> list[str]:
        """Open the audit trail, say what is in force from here on, and give what was wrong with it."""
        config, table = self.config, self.config.audit_trail
        files_bytes = min(FILE_BYTES, max(64 << 10, table.max_size_bytes // 8))
        keeping = Keeping(table.retention_seconds, table.max_size_bytes, files_bytes)
        writer = TrailWriter(DiskFiles(config.data_folder), keeping, reserve)
        steady = JumpGuardedClock.begun(self.clock)
        # A clock that has jumped forward must not make all records look old.
        trail = AuditTrail(writer, self.clock, lambda: steady.now_unix_ms() if steady.trusted else None)
        problems, zone = trail.start(), config.zone.name
        self.trail = trail
        self._stack.push_async_callback(trail.close, TrailEvent("node_stopped", NODE, about=zone))
        loaded = {"digest": digest_of(config)}
        trail.record(TrailEvent("config_loaded", NODE, about=str(config.source), details=loaded))
        return problems

    def _scrub(self, state: NodeState) -> None:
        """Begin to re-read what is sealed, if that is wanted."""
        config, table = self.config, self.config.storage
        if not table.scrub or isinstance(self.parts.storage, KeepsAll):
            return

        async def read(log: Log, first: int, end: int) -> AsyncIterator[Frame]:
            buffer = await self.parts.buffer(*log)
            async for frame in buffer.replay(first, end=end):
                yield frame

        where = DiskFiles(config.data_folder), DiskFiles(config.artifacts_folder)
        pace = Pace(table.scrub_period_seconds, table.scrub_rate_bytes)
        scrub = Scrub(where, pace, state, self.clock, self.alerts, _note, read)
        self.parts.scrub = scrub.status
        scrub.start()
        self._stack.push_async_callback(scrub.stop)

    # Identity.

    def _watched(self) -> Watched | None:
        files = self.config.tls_files
        if self.config.listen.plaintext or files is None:
            return None
        check_signed(files)
        return Watched(files, _certificate_unusable, self._certificate_reloaded)

    def _certificate_reloaded(self, material: Material) -> None:
        log.info("certificate_reloaded")
        self.trail.record(TrailEvent("certificate_reloaded", NODE, about=str(self.config.tls.certificate)))

    def _follow_files(self, watched: Watched | None, begun: Stamp) -> None:
        """Begin to take up changes of who may call."""
        files = watched.files if watched is not None else None
        take_tokens = self.pages.take_tokens if self.pages is not None else lambda rows: not rows

        async def apply(config: ZoneConfig, matrix: Matrix) -> None:
            await self._apply(config, matrix, watched)

        given = (self.config, self.parts, self.alerts, _note, files, take_tokens)
        self._reload = Reload(*given, apply=apply, begun=begun)
        self._reload.start()
        self._stack.push_async_callback(self._reload.stop)

    def reload(self) -> None:
        """Take up changed tables at once; before the node has started they are new anyway."""
        if self._reload is not None:
            self._reload.ask()

    async def _apply(self, config: ZoneConfig, matrix: Matrix, watched: Watched | None) -> None:
        """Let a configuration count. All decisions change in one step of the loop; what has to be opened follows."""
        before, parts = self.config, self.parts
        settings = dataclasses.replace(NodeSettings.of(config), limits=parts.settings.limits)
        self.config, parts.settings = config, settings
        parts.guard = dataclasses.replace(parts.guard, matrix=matrix)
        self.alerts.take(config.alerts)
        parts.pipelines.configure(config.pipelines)
        held = self._state.held_gates()
        for link, side in _sides(config):
            parts.links.add(link, side, held.get((link, side)))
        self._upkeep.take(config)
        # Whoever was revoked is out by now, however long a link that left takes to end.
        for name in set(self._pulls) - set(config.links):
            await self._stop_pull(name)
        for link, side in set(_sides(before)) - set(_sides(config)):
            parts.links.remove(link, side)
            self.alerts.forget(f"{link}/{side}")
            self.alerts.update("peer_certificate", link, None)
        await self._open_buffers([name for name in config.streams if name not in before.streams])
        await self._create_consumers()
        await self._pull_all(watched)

    def _audit(self, metrics: Metrics) -> Callable[[Decision, Caller], None]:
        repeats = Repeats(self.clock)

        def audit(decision: Decision, caller: Caller) -> None:
            known = decision.identity in self.parts.guard.matrix.identities or decision.identity.startswith("token:")
            self.trail.refused(decision, caller, known=known)
            metrics.refusals.labels(str(decision.rule)).inc()
            kind = (decision.identity, str(decision.rule), str(decision.request.action))
            repeats.tell(kind, partial(written, decision, caller))
            text = f"{decision.identity} was refused by the rule {decision.rule}: {decision.request.action}"
            self.alerts.event("identity_refused", decision.identity[:200], f"{text}, from {caller.address}"[:500])

        def written(decision: Decision, caller: Caller, left_out: int) -> None:
            log.warning(
                "request_refused",
                identity=decision.identity,
                zone=decision.zone,
                rule=str(decision.rule),
                action=str(decision.request.action),
                stream=decision.request.stream,
                consumer=decision.request.consumer,
                caller=str(caller.address),
                code=decision.error.code if decision.error else None,
                **({"left_out": left_out} if left_out else {}),
            )

        return audit

    def _handshake_refused(self, listener: str, address: str, reason: str) -> None:
        """Tell of a caller who did not come in: once a minute for each address, with how often."""
        host = address.rpartition(":")[0]
        event = TrailEvent("handshake_refused", STRANGER, address, listener, REFUSED, reason=reason)
        self.trail.counted(event)
        self.alerts.event("handshake_refused", host, f"no handshake with {address} on the {listener} port: {reason}")

    # Gates.

    def _registry(self, state: NodeState, metrics: Metrics) -> LinkRegistry:
        def on_move(view: GateView, before: Gate) -> None:
            if _accepts(view, before):
                state.accept(view.link, before)
            state.keep_gate(view.link, view.side, view.gate)
            alert_gate(self.alerts, view)
            if view.gate.mode != before.mode:
                moved = f"from {before.mode} to {view.gate.mode}: {view.gate.reason}".removesuffix(": ")
                self.alerts.remember("moved", "gate_moved", f"{view.link}/{view.side}", moved)
            metrics.gate_moved(view.link, view.side, view.gate.mode)
            if view.gate.mode == Mode.HELD != before.mode and view.gate.held_by in BY_ITSELF:
                place, why = f"{view.link}/{view.side}", view.gate.reason
                self.trail.counted(TrailEvent("gate_held", NODE, about=place, reason=why))
            log.info(
                "gate_moved",
                link=view.link,
                side=view.side,
                before=str(before.mode),
                mode=str(view.gate.mode),
                reason=view.gate.reason,
            )

        def on_add(view: GateView) -> None:
            metrics.gate_moved(view.link, view.side, view.gate.mode, moved=False)

        registry = LinkRegistry(self.clock, on_move, on_add, metrics.forget_link)
        held = state.held_gates()
        lost = Gate(Mode.HELD, self.clock.now_unix_ms(), _STATE_LOST, held_by="node") if state.is_lost else None
        for link, side in _sides(self.config):
            if lost is not None and (link, side) not in held:
                held[link, side] = lost
                state.keep_gate(link, side, lost)
            registry.add(link, side, held.get((link, side)))
        return registry

    # Storage.

    async def _recover(self, state_problems: Sequence[str] = ()) -> None:
        """Open every buffer before anyone can call, and say what was found."""
        self.damage.tell(self.config.zone.name, state_problems)
        await self._open_buffers(self.parts.settings.streams)
        report = await recover(self.parts.storage, without=await self._not_served())
        await self.damage.look()
        log.info("storage_recovered", buffers=len(report.buffers), consumers=len(report.consumers))

    async def _open_buffers(self, streams: Iterable[str]) -> None:
        for stream in streams:
            for kind in Buffer:
                try:
                    await said_while(self.parts.buffer(stream, kind), stream=stream, buffer=str(kind))
                except StreamUnavailable as failure:
                    _note("stream_unavailable", stream=stream, buffer=str(kind), problem=failure.message)
                    self.alerts.update(failure.code, f"{stream}/{kind}", failure.message)

    async def _not_served(self) -> set[tuple[str, Buffer]]:
        """Give the buffers to leave alone: those out of service, and broken ones of streams no longer configured."""
        found = set(self.parts.unavailable)
        for name, kind in await self.parts.storage.streams():
            if name not in self.parts.settings.streams:
                try:
                    opening = self.parts.storage.store if kind == Buffer.STORE else self.parts.storage.forward
                    buffer = await opening(name)
                    problems = getattr(buffer, "problems", ())
                    self.damage.tell(f"{name}/{kind}", problems, stream=name, buffer=str(kind))
                except Exception as error:
                    _note("stream_unavailable", stream=name, buffer=str(kind), problem=str(error))
                    found.add((name, kind))
        return found

    async def _create_consumers(self) -> None:
        """Create the consumers of the peers that the configuration names; those that exist stay as they are."""
        known = {state.spec.name: state for state in await self.parts.storage.cursors.consumers()}
        for zone, serve in self.config.serve.items():
            for stream in self.config.streams_of(serve):
                for buffer in serve.buffers:
                    name = consumer_name(zone, stream, buffer)
                    if name in known or (stream, buffer) in self.parts.unavailable:
                        if name in known and known[name].spec.required != serve.required:
                            kind = "required" if known[name].spec.required else "optional"
                            says = f"has no effect on the consumer {name}, which was made {kind} and stays so"
                            log.warning("configuration_doubtful", key=f"serve.{zone}.required", problem=says)
                        continue
                    # Where cursors were lost nobody knows how far the peer was; what it has it recognises.
                    lost = getattr(self.parts.storage.cursors, "are_lost", False)
                    start = StartAt.EARLIEST if lost else StartAt(str(serve.start))
                    spec = ConsumerSpec(name, stream, buffer, start, 0, serve.required)
                    await self.parts.storage.cursors.create(spec)
                    log.info("consumer_created", consumer=name, stream=stream, buffer=str(buffer), by="configuration")
                    made = {"stream": stream, "buffer": str(buffer), "required": serve.required}
                    self.trail.record(
                        TrailEvent(
                            "consumer_created", NODE, about=f"consumer {name}", reason="configured", details=made
                        )
                    )

    # Listeners.

    async def _listen(self, watched: Watched | None) -> None:
        service = NodeService(self.parts)
        certificates = Certificates(self.config, self.clock).documents
        administration = Administration(self.parts, self._rates, self.alerts.active, certificates)
        listen, limits = self.config.listen, self.parts.settings.limits
        zone, metrics = self.config.zone.name, self.parts.metrics
        pages = self.pages = self._dashboard(administration)
        names = (listen.http.host, *listen.http_names)
        listeners = Listeners(
            service, administration, limits, zone=zone, watched=watched, observer=metrics, pages=pages, names=names
        )
        listeners.handshakes.tell(self._handshake_refused, metrics.handshake)
        http = (listen.http.host, listen.http.port) if listen.http_enabled else None
        await listeners.start((listen.grpc.host, listen.grpc.port), http)
        self._stack.push_async_callback(listeners.stop)
        if pages is not None:
            pages.start()
            # Before the listeners stop: they would wait for browsers that watch.
            self._stack.push_async_callback(pages.stop)
        self.grpc_port, self.http_port = listeners.grpc.port, listeners.http.port
        log.info("listening", grpc_port=self.grpc_port, http_port=self.http_port, tls=watched is not None)

    def _dashboard(self, administration: Administration) -> Dashboard | None:
        if not (self.config.dashboard.enabled and self.config.listen.http_enabled):
            return None
        return Dashboard(self.config, self.parts, administration, self.alerts.history)

    # Pulling.

    async def _pull_all(self, watched: Watched | None) -> None:
        """Pull every link that the node moves itself; one that is as it was goes on undisturbed."""
        config = self.config
        wanted = {
            name: (link, config.streams_of(link), config.identities[link.expected_server])
            for name, link in config.links.items()
            if link.engine == Engine.NATIVE
        }
        for name in [name for name, (terms, _) in self._pulls.items() if wanted.get(name) != terms]:
            await self._stop_pull(name)
        for name, terms in wanted.items():
            if name not in self._pulls:
                held = AsyncExitStack()
                self._pulls[name] = terms, held
                await self._pull(config.links[name], watched, held)

    async def _stop_pulling(self) -> None:
        for name in list(self._pulls):
            await self._stop_pull(name)

    async def _stop_pull(self, name: str) -> None:
        _, held = self._pulls.pop(name)
        self.handoffs.pop(name, None)
        await held.aclose()

    async def _pull(self, link: Link, watched: Watched | None, held: AsyncExitStack) -> None:
        client, way = self._connect(link, watched, held)
        pulls = [self._stream_pull(link, stream, client, self._state) for stream in self.config.streams_of(link)]
        handoff = NativeHandoff(link, self.parts, pulls, note=_note, alerts=self.alerts, way=way, rng=self._rng)
        self.handoffs[link.name] = handoff
        held.push_async_callback(handoff.stop)
        await handoff.start()

    def _connect(
        self, link: Link, watched: Watched | None, held: AsyncExitStack
    ) -> tuple[BoundaryClient, SenderWay | None]:
        """Give what calls the sender of a link, and what finds out why it does not answer."""
        connection = Connection(
            str(link.address),
            watched=watched,
            server_name=link.expected_server if watched is not None else None,
            # A peer that allows larger facts than this zone does is told so by the rules of the link.
            message_bytes=PEER_MESSAGE_BYTES + self.parts.settings.limits.message_bytes,
            to_peer=True,
            request_timeout_seconds=link.request_timeout_seconds,
        )
        # Nodes that share a storage take turns, and may come back; that there is one at a time is seen to elsewhere.
        shared = isinstance(self.parts.storage, SharedStorage)
        urgent = [consumer_name(self.config.zone.name, stream, link.buffer) for stream in link.priority]
        throttle = Throttle(link.bandwidth, self.clock.now_unix_ms, urgent) if link.bandwidth else None
        instance = "" if shared else self._instance
        client = BoundaryClient(connection, instance=instance, throttle=throttle, packs=link.compression)
        held.push_async_callback(client.close)
        by_alternative_name = self.config.tls.identity == IdentityFrom.SAN

        def vouch(names: PeerNames) -> None:
            matrix = self.parts.guard.matrix
            matrix.vouching.check_server(names, matrix.identities[link.expected_server], self.clock.now_unix_ms())

        reach = ConnectionDiagnosis(
            link.expected_server,
            watched,
            connection,
            by_alternative_name=by_alternative_name,
            vouch=vouch,
        )
        held.callback(reach.close)
        return client, reach

    def _stream_pull(self, link: Link, stream: str, client: BoundaryClient, state: NodeState) -> StreamPull:
        consumer = consumer_name(self.config.zone.name, stream, link.buffer)
        peer = ClientLink(link.zone, consumer, client, link.carry_only, link.filter)
        bringing = ArtifactFetcher(self.parts, link.name, stream, client)

        def read(first: int, end: int) -> AsyncIterator[Frame]:
            choice: dict[str, Any] = {"carry_only": link.carry_only, "filter": link.filter}
            return client.read_offsets(stream, first, end, buffer=link.buffer, **choice)

        rules = rules_of(link, self.parts, stream)
        return StreamPull(stream, peer, state.peer(link.name, stream), rules, bringing, self.parts, read)


def _sides(config: ZoneConfig) -> list[tuple[str, str]]:
    """List the gates of a configuration: of the links that are pulled, and to the zones that are served."""
    return [(name, RECEIVER) for name in config.links] + [(zone, SENDER) for zone in config.serve]


def _accepts(view: GateView, before: Gate) -> bool:
    """Tell whether a link is released that a finding about its sender's history had closed, which is then accepted."""
    released = before.mode == Mode.HELD and view.gate.mode != Mode.HELD
    return released and view.side == RECEIVER and before.reason.startswith(ACCEPTABLE)


async def said_while(opening: Awaitable[Opened], **what: str) -> Opened:
    """Wait until a buffer is open, and say now and then that it takes its time."""
    task, begun = asyncio.ensure_future(opening), time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=OPENING_SECONDS))[0]:
            log.info("buffer_opening", **what, seconds=round(time.monotonic() - begun, 1))
        return await task
    finally:
        task.cancel()


def _note(event: str, **fields: Any) -> None:
    level = log.info if event in QUIET else log.warning
    level(event, **fields)


ACCEPTABLE = (f"{ForeignLog.code}:", f"{FrameInvalid.code}:")
"""How the reason of a hold begins that an operator can accept; after others the engine simply tries again."""

BY_ITSELF = ("bsfg", "node", "pipeline")
"""Who holds a gate that no operator has closed."""

QUIET = frozenset({"access_reloaded", "lease_taken", "alert_cleared", "orphans_collected"})


def _certificate_unusable(error: BsfgError) -> None:
    log.error("certificate_unusable", **error.to_dict())
