"""A live task of the Spark engine as a process of its own: it takes a link from the node's engine and gives it back.

The loops, the desk, the courier and the keeping of the lease are those of `bsfg.spark.replicate`; the calls to both
nodes go by the simulated network. What a node grants to a task while its own engine holds the link is a broken promise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from tests.simulated.checks import expect
from tests.simulated.clockwork import LIFE, Incarnation
from tests.simulated.world import STREAM, Machine, SimulatedClient, SimulatedNode, caller

from bsfg.config import consumer_name, parse
from bsfg.errors import BsfgError, PeerUnreachable
from bsfg.gate import Gate
from bsfg.journey.handoff import Handoff
from bsfg.journey.link import PeerPosition
from bsfg.ports import Frame, Gap, GapRecord, GapSet
from bsfg.spark.calls import NodeAccess
from bsfg.spark.replicate import shift
from bsfg.spark.replicate.carrying import TaskPull
from bsfg.spark.replicate.group import RemoteReporter
from bsfg.spark.replicate.plan import BundlePlan, StreamTaskPlan
from bsfg.spark.replicate.shift import BundleShift
from bsfg.wire.service import KeptLease, LeasesView, LeaseView, LinkReport, PeerMemo, PutCall, PutOutcome

T = TypeVar("T")
HOLDER = "a task"
ME = caller("pipeline")


def check_alone(node: SimulatedNode, link: str, what: str) -> None:
    """A task may do nothing that needs the lease while the node's own engine holds it."""
    expect(not node.handoffs[link]._desk.may_move(), f"{what} of {link} although the node's own engine holds its lease")


@dataclass
class SimulatedAdmin:
    """Calls a node's administration as the pipeline, in place of `bsfg.wire.adminclient.AdminClient`."""

    machine: Machine
    life: Incarnation

    async def acquire_leases(
        self, links: Sequence[str], holder: str, ttl_ms: int, *, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Take the leases."""

        async def acquire(node: SimulatedNode) -> LeasesView:
            view = await node.administration.acquire_leases(ME, links, holder, ttl_ms, wait_seconds, plan)
            for link in view.leases:
                check_alone(node, link, "a task was given the lease")
            return view

        return await self._call(acquire)

    async def renew_leases(
        self, leases: Sequence[KeptLease], holder: str, ttl_ms: int, *, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Keep the leases."""

        async def renew(node: SimulatedNode) -> LeasesView:
            view = await node.administration.renew_leases(ME, leases, holder, ttl_ms, wait_seconds, plan)
            for link in view.leases:
                check_alone(node, link, "a task kept the lease")
            return view

        return await self._call(renew)

    async def release_lease(self, link: str, token: str) -> None:
        """Give the lease back."""
        await self._call(lambda node: node.administration.release_lease(ME, link, token))

    async def report_links(self, reports: Sequence[LinkReport]) -> list[Gate | BsfgError]:
        """Report."""
        answers = await self._call(lambda node: node.administration.report_links(ME, reports))
        return [answer if isinstance(answer, BsfgError) else answer.gate for answer in answers]

    async def recall_peer(self, link: str, stream: str) -> PeerPosition:
        """Give what is remembered of the sender."""
        return await self._call(lambda node: node.administration.recall_peer(ME, link, stream))

    async def remember_peers(self, memos: Sequence[PeerMemo]) -> list[BsfgError | None]:
        """Remember it."""
        return await self._call(lambda node: node.administration.remember_peers(ME, memos))

    async def put(self, call: PutCall) -> PutOutcome:
        """Put a frame; a connection brings it once."""

        async def put(node: SimulatedNode) -> PutOutcome:
            alone = not node.handoffs[call.link]._desk.may_move()
            outcome = await node.service.put(ME, call)
            expect(alone, f"a task put facts of {call.link} although the node's own engine holds its lease")
            return outcome

        return await self._call(put, repeats=False)

    async def _call(self, work: Callable[[SimulatedNode], Awaitable[T]], *, repeats: bool = True) -> T:
        if not self.life.alive:
            await asyncio.sleep(1)
            raise PeerUnreachable("this process is dead")
        machine = self.machine
        return await machine.network.call(f"pipeline of {machine.name}", machine, work, repeats=repeats)


class SimulatedPuts:
    """Frames in one call, put one after the other; after one that failed no other is taken."""

    def __init__(self, admin: SimulatedAdmin, link: str, stream: str, log_id: str, lease: str | None) -> None:
        self._admin, self._fixed = admin, {"link": link, "stream": stream, "log_id": log_id, "lease": lease}
        self._last: asyncio.Task[PutOutcome] | None = None
        self.is_open = True

    async def send(
        self, frame: Frame, gaps: Sequence[Gap] = (), *, served_at_unix_ms: int | None = None
    ) -> asyncio.Future[PutOutcome]:
        """Send a frame and give its outcome to wait for."""
        call = PutCall(
            **self._fixed,  # type: ignore[arg-type]
            first=frame.first,
            last=frame.last,
            entries=frame.entries.to_ipc() if frame.entries is not None else b"",
            gap=frame.gap,
            gaps=[each for each in gaps if isinstance(each, GapRecord | GapSet)],
            skips=frame.skips,
            served_at_unix_ms=served_at_unix_ms,
        )
        self._last = asyncio.ensure_future(self._after(self._last, call))
        self._last.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._last

    async def _after(self, before: asyncio.Task[PutOutcome] | None, call: PutCall) -> PutOutcome:
        if before is not None:
            await asyncio.wait({before})
            if before.cancelled() or before.exception() is not None or before.result().held_code:
                raise PeerUnreachable("the frame before it was not taken")
        if not self.is_open:
            raise PeerUnreachable("the call has ended")
        return await self._admin.put(call)

    def abandon(self) -> None:
        """End the call at once."""
        self.is_open = False

    async def close(self) -> None:
        """Wait for what was sent, and end the call."""
        if self._last is not None:
            await asyncio.wait({self._last})
        self.is_open = False


@dataclass
class Pipeline:
    """One process that moves a link for a while; ``gone`` is set when nobody wants its work any more."""

    machine: Machine
    peer: str
    rng: Random
    life: Incarnation = field(default_factory=lambda: Incarnation("pipeline"))
    gone: bool = False

    def start(self) -> asyncio.Task[None]:
        """Begin."""
        context = copy_context()
        context.run(LIFE.set, self.life)
        return asyncio.get_running_loop().create_task(self._run(), context=context)

    async def _run(self) -> None:
        config = parse(self.machine.config)
        link = config.links[f"from-{self.peer}"]
        plan: Any = SimpleNamespace(name=link.name, link=link, holder=HOLDER)
        admin: Any = SimulatedAdmin(self.machine, self.life)
        bundle = BundlePlan(1, NodeAccess("127.0.0.1:1"), HOLDER, (plan,))
        await BundleShift(bundle, admin, lambda: self.gone, self._move).run()

    async def _move(self, task: BundleShift, plan: Any, lease: LeaseView) -> RemoteReporter:
        machine, link = self.machine, plan.link
        admin: Any = task.admin
        capacity_bytes = parse(machine.config).streams[STREAM].forward_capacity_bytes
        peer: Any = SimulatedClient(machine.network, machine.name, machine.others[self.peer])
        own: Any = SimpleNamespace(
            put_lane=lambda link, stream, log_id, *, lease: SimulatedPuts(admin, link, stream, log_id, lease),
            put_stream=lambda link, stream, log_id, *, lease, window_frames: SimulatedPuts(
                admin, link, stream, log_id, lease
            ),
        )
        desk = RemoteReporter(task.reports, link.name, lease.token, lease.mode)
        stream = StreamTaskPlan(STREAM, consumer_name(machine.name, STREAM, link.buffer), capacity_bytes)
        pull = TaskPull(plan, stream, peer, own, admin, lease.token, keep=task.positions.ask)
        handoff = Handoff(link, desk, [pull], note=lambda event, **fields: None, rng=self.rng)
        await handoff.start()
        try:
            await task.leases.keep(lease, desk)
            await shift._settle([pull])
        finally:
            await handoff.stop()
            with suppress(BsfgError):
                await pull.close()
            with suppress(BsfgError):
                await task.reports.remove(desk)
            with suppress(BsfgError):
                await admin.release_lease(link.name, lease.token)
        return desk
