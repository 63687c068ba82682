"""The administration of a node as a service: what operators and viewers see and decide, and pipelines report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from bsfg.config.access import Identity
from bsfg.config.kinds import ANY, Action
from bsfg.errors import BsfgError, InvalidArgument, NotReady, RemoteError, StorageFailed
from bsfg.fact import Origin
from bsfg.gate import RECEIVER
from bsfg.journey.link import PeerPosition
from bsfg.journey.truncate import decide, truncate_before
from bsfg.model import check_name
from bsfg.node.authorize import Request
from bsfg.node.links import Leases
from bsfg.node.parts import NodeContext
from bsfg.node.status import Rates, SeenMetrics, VisibleStreams, all_stats, backlog_of, consumer_views, document
from bsfg.ports import (
    QUARANTINE_PAGE,
    UNREADABLE,
    Buffer,
    ConsumerSpec,
    ForwardBuffer,
    GapRecord,
    GapSet,
    OriginSpan,
    Quarantined,
    Receipt,
    Result,
    StartAt,
    StoreBuffer,
)
from bsfg.sealing import reseal
from bsfg.wire.service import (
    Caller,
    ConsumerView,
    FrontierView,
    GateView,
    KeptLease,
    LeasesView,
    LeaseView,
    LinkReport,
    PeerMemo,
    PipelineReport,
    QuarantinedView,
    QuarantinePage,
)
from bsfg.wire.status import STATUSES
from bsfg.wording import check_reason

log = structlog.get_logger("bsfg.node")

UNKNOWN_OFFSET = -1
"""The origin offset of a fact that was put into quarantine by a version that did not keep it."""


Documents = Callable[[], Sequence[Mapping[str, Any]]]

CLOCKS_DIFFER_MS = 60_000
"""A caller's present moment may lie so far ahead of the node's."""


class Administration:
    """The operations of operators, viewers and pipelines.

    Every call names its caller, and whether he may is decided here.
    ``rates`` are those that the node's upkeep observes all the time, ``alerts`` gives those that last.
    """

    def __init__(
        self, parts: NodeContext, rates: Rates | None = None, alerts: Documents = tuple, certificates: Documents = tuple
    ) -> None:
        self._parts = parts
        self._rates, self._alerts, self._certificates = rates or Rates(), alerts, certificates
        self._started_unix_ms = parts.clock.now_unix_ms()
        self._lease_holders: dict[str, str] = {}

    # What viewers see.

    async def status(self, caller: Caller) -> Mapping[str, Any]:
        """Describe the node, as far as the caller may see it."""
        return (await self._seen(caller))[1]

    async def _seen(self, caller: Caller) -> tuple[VisibleStreams, dict[str, Any]]:
        scope = VisibleStreams.of(self._check(caller, Action.VIEW))
        return scope, scope.document(await self.describe(), self._parts.guard.matrix)

    async def describe(self) -> dict[str, Any]:
        """Describe the node to somebody who was let in already."""
        found = (self._alerts(), self._certificates())
        return await document(self._parts, self._rates, self._started_unix_ms, *found)

    async def metrics(self, caller: Caller) -> bytes:
        """Give the metrics as text, buffers and consumers looked at anew, as far as the caller may see them."""
        scope, seen = await self._seen(caller)
        metrics = self._parts.metrics
        return metrics.text(None if scope.streams is None else SeenMetrics(metrics.registry, seen))

    async def ready(self) -> None:
        """Raise `NotReady` unless the storage answers; a stream alone out of service is an alert. Anybody may ask."""
        try:
            await all_stats(self._parts)
        except BsfgError as error:
            raise NotReady(f"the storage does not answer: {error.message}") from None

    async def consumers(self, caller: Caller) -> list[ConsumerView]:
        """List the durable consumers of the streams that the caller may see."""
        scope = VisibleStreams.of(self._check(caller, Action.VIEW))
        views = await consumer_views(self._parts, await all_stats(self._parts))
        return [view for view in views if scope.sees([view.state.spec.stream])]

    async def gates(self, caller: Caller) -> list[GateView]:
        """List the gates that a stream passes which the caller may see."""
        scope, matrix = VisibleStreams.of(self._check(caller, Action.VIEW)), self._parts.guard.matrix
        return [view for view in self._parts.links.gates() if scope.sees(matrix.gate_streams(view.link, view.side))]

    async def gaps(self, caller: Caller, stream: str, buffer: Buffer) -> list[GapSet]:
        """Give the gap records of a buffer as sets."""
        self._check(caller, Action.VIEW, stream)
        return await (await self._parts.buffer(stream, buffer)).gap_sets()

    async def quarantine(
        self, caller: Caller, stream: str | None, after: str = "", limit: int = 0, *, newest_first: bool = False
    ) -> QuarantinePage:
        """List what is in quarantine, in one stream or in all that the caller may see, a page at a time."""
        row = self._check(caller, Action.VIEW, stream)
        visible = [name for name in self._parts.settings.streams if ANY in row.streams or name in row.streams]
        limit = min(limit or QUARANTINE_PAGE, QUARANTINE_PAGE)
        begun, after_id = _place_after(after)
        views: list[QuarantinedView] = []
        following, total = "", 0
        for name, buffer in sorted(await self._parts.storage.streams(), key="/".join):
            if name not in visible or stream not in (None, name) or (name, buffer) in self._parts.unavailable:
                continue
            found, place = await self._parts.buffer(name, buffer), f"{name}/{buffer}"
            total += (await found.stats()).quarantined
            if place < begun or following:
                continue
            room = limit - len(views)
            last = after_id if place == begun else None
            page = await found.quarantine(last, room + 1, newest_first=newest_first)
            views += [QuarantinedView(name, buffer, each) for each in page[:room]]
            if len(page) > room:
                last = page[room - 1].id if room else last
                following = f"{place}/{'' if last is None else last}"
        return QuarantinePage(views, following, total)

    async def quarantined(self, caller: Caller, stream: str, buffer: Buffer, id: int) -> QuarantinedView:
        """Give one quarantined fact."""
        self._check(caller, Action.VIEW, stream)
        found = await _find(await self._parts.buffer(stream, buffer), id)
        return QuarantinedView(stream, buffer, found)

    # What operators decide.

    async def create_consumer(self, caller: Caller, spec: ConsumerSpec) -> ConsumerView:
        """Create a durable consumer."""
        row = self._check(caller, Action.ACT, spec.stream)
        check_name("consumer", spec.name)
        if spec.start == StartAt.TIME and spec.start_value > self._parts.clock.now_unix_ms() + CLOCKS_DIFFER_MS:
            raise InvalidArgument(
                "the time to start at is yet to come here",
                hint="Give a time that has passed, or `latest` for whatever comes from now on.",
                start_value=spec.start_value,
            )
        buffer = await self._parts.buffer(spec.stream, spec.buffer)
        async with self._act(row, caller, "consumer_created", f"consumer {spec.name}") as details:
            details |= {"stream": spec.stream, "buffer": str(spec.buffer), "required": spec.required}
            state = await self._parts.storage.cursors.create(spec)
        log.info("consumer_created", consumer=spec.name, stream=spec.stream, buffer=str(spec.buffer), by=row.name)
        return ConsumerView(state, backlog_of(state, await buffer.stats()))

    async def retire_consumer(self, caller: Caller, name: str, reason: str) -> list[GapRecord]:
        """End a consumer for good."""
        row = self._check(caller, Action.ACT)
        state = await self._parts.storage.cursors.consumer(name)
        self._check(caller, Action.ACT, state.spec.stream)
        async with self._act(row, caller, "consumer_retired", f"consumer {name}", reason) as details:
            gaps = await self._parts.storage.cursors.retire(name, reason)
            missed = details["missed"] = sum(gap.last - gap.first + 1 for gap in gaps)
        log.warning("consumer_retired", consumer=name, reason=reason, missed=missed, by=row.name)
        return gaps

    async def frontier(self, caller: Caller, stream: str, buffer: Buffer) -> FrontierView:
        """Tell how far all required consumers of a buffer have confirmed it."""
        self._check(caller, Action.VIEW, stream)
        return await self._frontier(stream, buffer)

    async def truncate_before(
        self, caller: Caller, stream: str, buffer: Buffer, before: int, reason: str
    ) -> FrontierView:
        """Remove everything below an offset at once, if nobody who must have it still needs it."""
        row = self._check(caller, Action.ACT, stream)
        why, found = _given(reason), await self._parts.buffer(stream, buffer)
        start, modes = (await found.stats()).start, self._parts.links.modes(stream, buffer)
        async with self._act(row, caller, "buffer_truncated", f"{stream}/{buffer}", why) as details:
            details["before"] = before
            await truncate_before(found, self._parts.storage.cursors, modes, before)
            view = await self._frontier(stream, buffer)
            details["removed"] = view.start - start
        done = {"stream": stream, "buffer": str(buffer), "before": before, "removed": view.start - start}
        log.warning("buffer_truncated", **done, reason=why, by=row.name, caller=caller.address)
        return view

    async def _frontier(self, stream: str, buffer: Buffer) -> FrontierView:
        stats = await (await self._parts.buffer(stream, buffer)).stats()
        consumers = await self._parts.storage.cursors.consumers()
        found = decide(consumers, stream, buffer, self._parts.links.modes(stream, buffer))
        return FrontierView(stream, buffer, stats.start, stats.end, found.frontier, found.slowest, found.held_by)

    async def hold_gate(
        self, caller: Caller, link: str, side: str, reason: str, until_unix_ms: int | None = None
    ) -> GateView:
        """Close a gate."""
        row = self._check_gate(caller, link, side)
        until = {} if until_unix_ms is None else {"until_unix_ms": until_unix_ms}
        async with self._act(row, caller, "gate_held", f"{link}/{side}", reason) as details:
            details |= until
            view = self._parts.links.hold(link, side, by=row.name, reason=reason, until_unix_ms=until_unix_ms)
        log.warning("gate_held", link=link, side=side, reason=reason, by=row.name, caller=caller.address, **until)
        return view

    async def reload(self, caller: Caller) -> dict[str, Any]:
        """Take up what has changed in the node's file."""
        row = self._check(caller, Action.ACT)
        if self._parts.reload is None or self._parts.configuration is None:
            raise NotReady("the node does not follow its file yet")
        changed = await self._parts.reload(row.name)
        found = self._parts.configuration()
        names = ("digest", "waiting_for_restart")
        return {**{name: found[name] for name in names}, "changed": changed}

    async def release_gate(self, caller: Caller, link: str, side: str, reason: str) -> GateView:
        """Open a held gate."""
        row = self._check_gate(caller, link, side)
        async with self._act(row, caller, "gate_released", f"{link}/{side}", reason):
            view = self._parts.links.release(link, side, by=row.name, reason=reason)
        log.warning("gate_released", link=link, side=side, reason=reason, by=row.name, caller=caller.address)
        return view

    async def retry_quarantined(
        self, caller: Caller, stream: str, buffer: Buffer, id: int, reason: str
    ) -> tuple[bool, Result]:
        """Put a quarantined fact again; what is taken, or is certainly there already, leaves quarantine."""
        row = self._check(caller, Action.ACT, stream)
        note = f"put again by {row.name}: {_given(reason)}"
        found = await self._parts.buffer(stream, buffer)
        quarantined = await _find(found, id)
        # An operator may accept an old fact; whose it is only its signature can say.
        signing = self._parts.settings.signing
        async with self._act(row, caller, "quarantine_retried", f"{stream}/{buffer}/{id}", reason) as details:
            if signing.concern({quarantined.key.from_zone}):
                await asyncio.to_thread(signing.check, quarantined.facts, stream)
            receipt = await _put_again(found, quarantined, self._parts.steady.now_unix_ms())
            result = Result(int(receipt.results.max())) if len(receipt.results) else Result.ALREADY_EXISTS
            settled = result != Result.CONFLICT and not receipt.undecided
            if settled:
                await found.release_quarantined(id, note)
            details |= {"message_id": quarantined.key.message_id[:200], "result": result.name.lower()}
        done = {"stream": stream, "buffer": str(buffer), "id": id, "result": result.name.lower()}
        log.warning("quarantine_retried", **done, reason=reason, by=row.name, caller=caller.address)
        return settled, result

    async def drop_quarantined(self, caller: Caller, stream: str, buffer: Buffer, id: int, reason: str) -> None:
        """Give up a quarantined fact."""
        row = self._check(caller, Action.ACT, stream)
        found = await self._parts.buffer(stream, buffer)
        note = f"dropped by {row.name}: {_given(reason)}"
        async with self._act(row, caller, "quarantine_dropped", f"{stream}/{buffer}/{id}", reason):
            await found.release_quarantined(id, note)
        done = {"stream": stream, "buffer": str(buffer), "id": id}
        log.warning("quarantine_dropped", **done, reason=reason, by=row.name, caller=caller.address)

    # What pipelines tell.

    async def acquire_lease(
        self, caller: Caller, link: str, holder: str, ttl_ms: int, wait_seconds: float = 0.0, *, urgent: bool = False
    ) -> LeaseView:
        """Take the lease of a link."""
        row = self._check_link(caller, link)
        leases, holder = self._leases_of(link), holder or row.name
        lease = await leases.acquire_in_line(link, holder, ttl_ms, wait_seconds, urgent=urgent)
        view = self._parts.links.leased(link, lease, ttl_ms)
        self._granted(view, row)
        return view

    def _granted(self, lease: LeaseView, row: Identity) -> None:
        """Say who has a lease now; the parts of one holder take turns every few seconds, which is no news."""
        if self._lease_holders.get(lease.link) != lease.holder:
            self._lease_holders[lease.link] = lease.holder
            log.info("lease_granted", link=lease.link, holder=lease.holder, by=row.name)

    async def renew_lease(
        self, caller: Caller, link: str, token: str, ttl_ms: int, wait_seconds: float = 0.0, seen: int = 0
    ) -> LeaseView:
        """Keep a lease."""
        self._check_link(caller, link)
        lease = await self._leases_of(link).keep(link, token, ttl_ms, wait_seconds, seen)
        return self._parts.links.leased(link, lease, ttl_ms)

    def _leases_of(self, link: str) -> Leases:
        self._parts.links.gate(link)
        return self._parts.links.leases

    async def release_lease(self, caller: Caller, link: str, token: str) -> None:
        """Give a lease back."""
        self._check_link(caller, link)
        self._parts.links.leases.give_back(link, token)

    async def report_link(self, caller: Caller, report: LinkReport) -> GateView:
        """Take a report about one stream of a link and give its gate."""
        self._check_link(caller, report.link, report.stream)
        view = self._parts.links.report(report)
        metrics = self._parts.metrics
        if report.failure_code:
            code = report.failure_code if report.failure_code in STATUSES else RemoteError.code
            metrics.link_failures.labels(report.link, code).inc()
        if report.stream:
            metrics.link_backlog.labels(report.link, report.stream).set(report.backlog)
            if report.lag_seconds is not None:
                metrics.lagged(report.link, report.stream, report.lag_seconds)
        return view

    async def acquire_leases(
        self, caller: Caller, links: Sequence[str], holder: str, ttl_ms: int, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Take the leases of many links, as many as there are to be had; wait until there is one."""
        row = self._check(caller, Action.REPORT)
        allowed, refused = self._allowed_links(caller, links)
        found = await self._parts.links.acquire_many(allowed, holder or row.name, ttl_ms, wait_seconds, plan)
        for lease in found.leases.values():
            self._granted(lease, row)
        return replace(found, refused={**refused, **found.refused})

    async def renew_leases(
        self, caller: Caller, leases: Sequence[KeptLease], holder: str, ttl_ms: int, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Keep many leases; answer early when there is something new about one of them."""
        row = self._check(caller, Action.REPORT)
        allowed, refused = self._allowed_links(caller, [each.link for each in leases])
        kept = [each for each in leases if each.link in allowed]
        found = await self._parts.links.keep_many(kept, holder or row.name, ttl_ms, wait_seconds, plan)
        return replace(found, refused={**refused, **found.refused})

    def _allowed_links(self, caller: Caller, links: Sequence[str]) -> tuple[list[str], dict[str, BsfgError]]:
        """Part the links that a pipeline may move from those that it may not."""
        allowed, refused = [], dict[str, BsfgError]()
        for link in links:
            try:
                self._check_link(caller, link)
            except BsfgError as error:
                refused[link] = error
            else:
                allowed.append(link)
        return allowed, refused

    async def report_links(self, caller: Caller, reports: Sequence[LinkReport]) -> list[GateView | BsfgError]:
        """Take reports about many links; each is taken or refused by itself."""
        answers: list[GateView | BsfgError] = []
        for report in reports:
            try:
                answers.append(await self.report_link(caller, report))
            except BsfgError as error:
                answers.append(error)
        return answers

    async def report_pipelines(
        self, caller: Caller, holder: str, reports: Sequence[PipelineReport], *, last: bool
    ) -> list[str]:
        """Take what a process tells of its pipelines; give the names of those that the configuration does not have."""
        row = self._check(caller, Action.REPORT)
        return self._parts.pipelines.take(holder or row.name, reports, last=last)

    async def recall_peer(self, caller: Caller, link: str, stream: str) -> PeerPosition:
        """Give what is remembered of the sender of a link."""
        self._check_link(caller, link, stream)
        return await self._parts.memory(link, stream).recall()

    async def remember_peer(self, caller: Caller, memo: PeerMemo) -> None:
        """Keep what a pipeline knows of the sender of a link, and that it has acted upon a release."""
        self._check_link(caller, memo.link, memo.stream)
        self._parts.links.leases.check(memo.link, memo.lease)
        await self._parts.memory(memo.link, memo.stream).remember(memo.position, memo.settles)

    async def remember_peers(self, caller: Caller, memos: Sequence[PeerMemo]) -> list[BsfgError | None]:
        """Keep what a pipeline knows of many senders; each is kept or refused by itself."""

        async def one(memo: PeerMemo) -> BsfgError | None:
            try:
                await self.remember_peer(caller, memo)
            except BsfgError as error:
                return error
            return None

        # Side by side, so that one sync is for all of them.
        return await asyncio.gather(*map(one, memos))

    def _check_gate(self, caller: Caller, link: str, side: str) -> Identity:
        """Check that somebody may act upon a gate: it concerns every stream that passes it."""
        row = self._check(caller, Action.ACT)
        self._parts.links.gate(link, side)
        for stream in sorted(self._parts.guard.matrix.gate_streams(link, side)):
            self._check(caller, Action.ACT, stream)
        return row

    def _check_link(self, caller: Caller, link: str, stream: str = "") -> Identity:
        """Check that a pipeline may move a stream of a link: the one that it names, else at least one."""
        row, guard = self._check(caller, Action.REPORT, stream or None), self._parts.guard
        streams = sorted(guard.matrix.gate_streams(link, RECEIVER))
        if stream:
            self._parts.settings.stream(stream)
            self._parts.links.gate(link)
            if stream not in streams:
                raise InvalidArgument(f"the link {link!r} does not carry the stream {stream!r}", link=link)
        elif streams and not any(guard.allows(caller, Request(Action.REPORT, stream)) for stream in streams):
            self._check(caller, Action.REPORT, streams[0])
        return row

    def _act(
        self, row: Identity, caller: Caller, action: str, about: str, reason: str = ""
    ) -> AbstractAsyncContextManager[dict[str, Any]]:
        """Record in the audit trail what an operator does, and how it ended."""
        if reason:
            check_reason(reason, action)
        return self._parts.trail.act(row.name, caller, action, about, reason)

    def _check(self, caller: Caller, action: Action, stream: str | None = None) -> Identity:
        return self._parts.guard.check(caller, Request(action, stream))


_DIGITS_MAX = 18
"""Of the number of a quarantined fact, which is one of 64 bits wherever it is kept."""


def _place_after(token: str) -> tuple[str, int | None]:
    """Read where a page begins: a buffer, and the number in it that those given follow."""
    place, _, number = token.rpartition("/")
    if token and (not place or not (number or "0").isdecimal() or len(number) > _DIGITS_MAX):
        raise InvalidArgument(f"{token[:80]!r} is no place in quarantine", hint="Give the `next` of the page before.")
    return place, int(number) if number else None


async def _find(buffer: StoreBuffer | ForwardBuffer, id: int) -> Quarantined:
    found = await buffer.quarantined(id)
    if found is None:
        raise InvalidArgument(f"nothing in the quarantine of {buffer.stream} has the number {id}", id=id)
    return found


async def _put_again(buffer: StoreBuffer | ForwardBuffer, quarantined: Quarantined, now_unix_ms: int) -> Receipt:
    if quarantined.reason == UNREADABLE:
        raise StorageFailed(f"the fact {quarantined.id} cannot be read: {quarantined.detail}", id=quarantined.id)
    facts = reseal(quarantined.facts)
    if buffer.buffer == Buffer.STORE:
        return await buffer.append(facts)  # type: ignore[union-attr]
    origin = quarantined.origin or Origin(quarantined.key.from_zone, UNKNOWN_OFFSET, quarantined.at_unix_ms)
    count = len(facts)
    # It goes on ageing in quarantine, by the clock of here.
    waited_ms = max(0, now_unix_ms - quarantined.at_unix_ms)
    ages_ms = None if origin.age_ms is None else np.full(count, origin.age_ms + waited_ms)
    span = OriginSpan(origin.zone, np.full(count, origin.offset), np.full(count, origin.appended_at_unix_ms), ages_ms)
    return await buffer.put_if_absent(facts, span)  # type: ignore[union-attr]


def _given(reason: str) -> str:
    check_reason(reason, "a decision that cannot be undone")
    return reason
