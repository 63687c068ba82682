"""The service `bsfg.v1.Admin`: status, consumers, gates, leases, reports, gap records and quarantine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson

from bsfg.errors import BsfgError, InvalidArgument
from bsfg.gate import Event
from bsfg.node.administration import Administration
from bsfg.ports import Buffer, ConsumerSpec, StartAt
from bsfg.wire import admin_pb2 as pb
from bsfg.wire.convert import (
    buffer_number,
    buffer_of,
    gap_message,
    gap_set_message,
    listed_gaps,
    position_message,
    position_of,
    release_of,
)
from bsfg.wire.frames import encode
from bsfg.wire.grpc_calls import GrpcHandlers, Unary
from bsfg.wire.messages import ADMIN, ADMIN_SERVICE, snake
from bsfg.wire.service import (
    Caller,
    ConsumerView,
    FrontierView,
    GateView,
    KeptLease,
    LeasesView,
    LinkReport,
    PeerMemo,
    PipelineReport,
    PipelineState,
    QuarantinedView,
)
from bsfg.wire.status import error_message
from bsfg.wording import one_line

LEASE_WAIT_SECONDS_MAX, LEASES_WAIT_SECONDS_MAX = 10.0, 3.0


class AdminServicer:
    """Answers the methods of the administration."""

    def __init__(self, service: Administration, calls: GrpcHandlers) -> None:
        self._service, self._calls = service, calls

    def handlers(self) -> tuple[str, dict[str, Any]]:
        """Give the name of the service and the handlers to be added to a gRPC server."""
        behaviours: Mapping[str, Unary] = {name: self._timed(getattr(self, snake(name))) for name in ADMIN}
        return self._calls.handlers(ADMIN_SERVICE, ADMIN, behaviours)

    def _timed(self, behaviour: Unary) -> Unary:
        async def call(request: Any, caller: Caller) -> Any:
            async with self._calls.timeout():
                return await behaviour(request, caller)

        return call

    async def status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusResponse:
        """Describe the node."""
        return pb.StatusResponse(status_json=orjson.dumps(await self._service.status(caller)))

    async def list_consumers(self, request: pb.ListConsumersRequest, caller: Caller) -> pb.ListConsumersResponse:
        """List all durable consumers."""
        views = await self._service.consumers(caller)
        return pb.ListConsumersResponse(consumers=[consumer_message(view) for view in views])

    async def create_consumer(self, request: pb.CreateConsumerRequest, caller: Caller) -> pb.Consumer:
        """Create a durable consumer."""
        spec = ConsumerSpec(
            name=request.name,
            stream=request.stream,
            buffer=buffer_of(request.buffer, Buffer.FORWARD),
            start=_start(request.start),
            start_value=request.start_value,
            required=request.required,
        )
        return consumer_message(await self._service.create_consumer(caller, spec))

    async def retire_consumer(self, request: pb.RetireConsumerRequest, caller: Caller) -> pb.RetireConsumerResponse:
        """End a consumer for good."""
        gaps = await self._service.retire_consumer(caller, request.name, request.reason)
        return pb.RetireConsumerResponse(gaps=[gap_message(gap) for gap in gaps])

    async def get_frontier(self, request: pb.GetFrontierRequest, caller: Caller) -> pb.FrontierView:
        """Tell how far all required consumers of a buffer have confirmed it."""
        return frontier_message(
            await self._service.frontier(caller, request.stream, buffer_of(request.buffer, Buffer.STORE))
        )

    async def truncate_before(self, request: pb.TruncateBeforeRequest, caller: Caller) -> pb.FrontierView:
        """Remove everything below an offset at once."""
        buffer = buffer_of(request.buffer, Buffer.STORE)
        return frontier_message(
            await self._service.truncate_before(caller, request.stream, buffer, request.before, request.reason)
        )

    async def list_gates(self, request: pb.ListGatesRequest, caller: Caller) -> pb.ListGatesResponse:
        """List the gates of all links."""
        return pb.ListGatesResponse(gates=[gate_message(view) for view in await self._service.gates(caller)])

    async def hold_gate(self, request: pb.HoldGateRequest, caller: Caller) -> pb.Gate:
        """Close a gate."""
        until = request.until_unix_ms if request.HasField("until_unix_ms") else None
        side = request.side or "receiver"
        return gate_message(await self._service.hold_gate(caller, request.link, side, request.reason, until))

    async def reload(self, request: pb.ReloadRequest, caller: Caller) -> pb.ReloadResponse:
        """Take up what has changed in the node's file."""
        return pb.ReloadResponse(**await self._service.reload(caller))

    async def release_gate(self, request: pb.ReleaseGateRequest, caller: Caller) -> pb.Gate:
        """Open a held gate."""
        side = request.side or "receiver"
        return gate_message(await self._service.release_gate(caller, request.link, side, request.reason))

    async def acquire_lease(self, request: pb.AcquireLeaseRequest, caller: Caller) -> pb.Lease:
        """Take the lease of a link."""
        lease = await self._service.acquire_lease(
            caller,
            request.link,
            request.holder[:200],
            request.ttl_ms,
            min(request.wait_ms / 1000, LEASE_WAIT_SECONDS_MAX),
            urgent=request.urgent,
        )
        return pb.Lease(**asdict(lease))

    async def renew_lease(self, request: pb.RenewLeaseRequest, caller: Caller) -> pb.Lease:
        """Keep a lease."""
        wait_seconds = min(request.wait_ms / 1000, LEASE_WAIT_SECONDS_MAX)
        lease = await self._service.renew_lease(
            caller, request.link, request.token, request.ttl_ms, wait_seconds, request.seen
        )
        return pb.Lease(**asdict(lease))

    async def release_lease(self, request: pb.ReleaseLeaseRequest, caller: Caller) -> pb.ReleaseLeaseResponse:
        """Give a lease back."""
        await self._service.release_lease(caller, request.link, request.token)
        return pb.ReleaseLeaseResponse()

    async def report_link(self, request: pb.ReportLinkRequest, caller: Caller) -> pb.ReportLinkResponse:
        """Take a report about a link."""
        gate = (await self._service.report_link(caller, link_report(request))).gate
        return pb.ReportLinkResponse(mode=gate.mode, reason=gate.reason)

    async def acquire_leases(self, request: pb.AcquireLeasesRequest, caller: Caller) -> pb.LeasesResponse:
        """Take the leases of many links."""
        wait_seconds = min(request.wait_ms / 1000, LEASES_WAIT_SECONDS_MAX)
        return leases_message(
            await self._service.acquire_leases(
                caller, list(request.links), request.holder[:200], request.ttl_ms, wait_seconds, request.plan
            )
        )

    async def renew_leases(self, request: pb.RenewLeasesRequest, caller: Caller) -> pb.LeasesResponse:
        """Keep many leases."""
        wait_seconds = min(request.wait_ms / 1000, LEASES_WAIT_SECONDS_MAX)
        kept = [KeptLease(each.link, each.token, each.seen, each.mode) for each in request.leases]
        return leases_message(
            await self._service.renew_leases(
                caller, kept, request.holder[:200], request.ttl_ms, wait_seconds, request.plan
            )
        )

    async def report_links(self, request: pb.ReportLinksRequest, caller: Caller) -> pb.ReportLinksResponse:
        """Take reports about many links."""
        answers = await self._service.report_links(caller, [link_report(each) for each in request.reports])
        return pb.ReportLinksResponse(answers=map(report_answer, answers))

    async def report_pipelines(self, request: pb.ReportPipelinesRequest, caller: Caller) -> pb.ReportPipelinesResponse:
        """Take a report about the pipelines of a process."""
        reports = list(map(pipeline_report, request.pipelines))
        holder = one_line(request.holder[:200])
        unknown = await self._service.report_pipelines(caller, holder, reports, last=request.last)
        return pb.ReportPipelinesResponse(unknown=unknown)

    async def recall_peer(self, request: pb.RecallPeerRequest, caller: Caller) -> pb.PeerPosition:
        """Give what is remembered of a sender."""
        return position_message(await self._service.recall_peer(caller, request.link, request.stream))

    async def remember_peer(self, request: pb.RememberPeerRequest, caller: Caller) -> pb.RememberPeerResponse:
        """Keep what a pipeline knows of a sender."""
        await self._service.remember_peer(caller, peer_memo(request))
        return pb.RememberPeerResponse()

    async def remember_peers(self, request: pb.RememberPeersRequest, caller: Caller) -> pb.RememberPeersResponse:
        """Keep what a pipeline knows of many senders."""
        found = await self._service.remember_peers(caller, list(map(peer_memo, request.peers)))
        answers = [pb.RememberAnswer(error=None if each is None else error_message(each)) for each in found]
        return pb.RememberPeersResponse(answers=answers)

    async def list_gaps(self, request: pb.ListGapsRequest, caller: Caller) -> pb.ListGapsResponse | bytes:
        """List the gap records of a buffer."""
        gaps = await self._service.gaps(caller, request.stream, buffer_of(request.buffer, Buffer.STORE))
        if request.sets:
            return pb.ListGapsResponse(gap_sets=[gap_set_message(each) for each in gaps])
        return b"".join(await self._calls.admission.turns.of(listed_gaps(gaps, pb.ListGapsResponse)))

    async def list_quarantine(self, request: pb.ListQuarantineRequest, caller: Caller) -> pb.ListQuarantineResponse:
        """List what is in quarantine."""
        stream = request.stream if request.HasField("stream") else None
        page = await self._service.quarantine(
            caller, stream, request.after, request.limit, newest_first=request.newest_first
        )
        found = [quarantined_message(view) for view in page.views]
        return pb.ListQuarantineResponse(quarantined=found, next=page.following, total=page.total)

    async def show_quarantined(self, request: pb.ShowQuarantinedRequest, caller: Caller) -> pb.Quarantined:
        """Give one quarantined fact with its bytes."""
        buffer = buffer_of(request.buffer, Buffer.FORWARD)
        view = await self._service.quarantined(caller, request.stream, buffer, request.id)
        message = quarantined_message(view)
        message.facts = encode(view.quarantined.facts)
        return message

    async def retry_quarantined(
        self, request: pb.SettleQuarantinedRequest, caller: Caller
    ) -> pb.SettleQuarantinedResponse:
        """Put a quarantined fact again."""
        buffer = buffer_of(request.buffer, Buffer.FORWARD)
        settled, result = await self._service.retry_quarantined(
            caller, request.stream, buffer, request.id, request.reason
        )
        return pb.SettleQuarantinedResponse(settled=settled, result=int(result))  # type: ignore[arg-type]

    async def drop_quarantined(
        self, request: pb.SettleQuarantinedRequest, caller: Caller
    ) -> pb.SettleQuarantinedResponse:
        """Give up a quarantined fact."""
        buffer = buffer_of(request.buffer, Buffer.FORWARD)
        await self._service.drop_quarantined(caller, request.stream, buffer, request.id, request.reason)
        return pb.SettleQuarantinedResponse(settled=True)


def consumer_message(view: ConsumerView) -> pb.Consumer:
    """Write a consumer."""
    state = view.state
    spec = state.spec
    return pb.Consumer(
        name=spec.name,
        stream=spec.stream,
        buffer=buffer_number(spec.buffer),
        required=spec.required,
        committed=state.checkpoint.committed,
        next_to_send=state.checkpoint.next_to_send,
        ranges=[{"first": first, "last": last} for first, last in state.ranges],
        log_id=state.log_id,
        created_unix_ms=state.created_unix_ms,
        retired_reason=state.retired_reason,
        backlog=view.backlog,
        start=spec.start,
        start_value=spec.start_value,
    )


def frontier_message(view: FrontierView) -> pb.FrontierView:
    """Write where a buffer stands."""
    return pb.FrontierView(**{**asdict(view), "buffer": buffer_number(view.buffer)})


def gate_message(view: GateView) -> pb.Gate:
    """Write a gate."""
    gate = view.gate
    return pb.Gate(
        link=view.link,
        side=view.side,
        mode=gate.mode,
        since_unix_ms=gate.since_unix_ms,
        reason=gate.reason,
        held_by=gate.held_by,
        held_until_unix_ms=gate.held_until_unix_ms,
    )


def leases_message(view: LeasesView) -> pb.LeasesResponse:
    """Write what became of the leases of many links."""
    leases = [pb.LeaseAnswer(link=link, lease=pb.Lease(**asdict(lease))) for link, lease in view.leases.items()]
    refused = [pb.LeaseAnswer(link=link, error=error_message(error)) for link, error in view.refused.items()]
    return pb.LeasesResponse(leases=[*leases, *refused], plan=view.plan)


def report_answer(answer: GateView | BsfgError) -> pb.ReportAnswer:
    """Write what became of one report of many."""
    if isinstance(answer, BsfgError):
        return pb.ReportAnswer(error=error_message(answer))
    return pb.ReportAnswer(gate=pb.ReportLinkResponse(mode=answer.gate.mode, reason=answer.gate.reason))


def peer_memo(found: pb.RememberPeerRequest) -> PeerMemo:
    """Read what is known of a sender."""
    lease = found.lease if found.HasField("lease") else None
    settles = release_of(found.settles) if found.HasField("settles") else None
    return PeerMemo(found.link, found.stream, position_of(found.position), lease, settles)


def link_report(found: pb.ReportLinkRequest) -> LinkReport:
    """Read a report."""
    try:
        event = Event(found.event) if found.event else None
    except ValueError:
        raise InvalidArgument(f"{found.event[:80]!r} is no event of a gate") from None
    return LinkReport(
        link=found.link,
        stream=found.stream,
        event=event,
        backlog=found.backlog,
        inserted=found.inserted,
        repeated=found.repeated,
        refused=found.refused,
        lag_seconds=found.lag_seconds if found.lag_seconds >= 0 else None,
        hold_code=found.hold_code[:80],
        hold_detail=found.hold_detail[:500],
        lease=found.lease if found.HasField("lease") else None,
        reason=found.reason[:500],
        failure_code=found.failure_code[:80],
        hold_stream=found.hold_stream[:80],
        hold_log_id=found.hold_log_id[:80],
    )


def pipeline_report(found: pb.PipelineReport) -> PipelineReport:
    """Read a report about a pipeline."""
    try:
        state = PipelineState(found.state)
    except ValueError:
        raise InvalidArgument(f"{found.state[:80]!r} is no state of a pipeline") from None
    return PipelineReport(
        name=found.name[:80],
        state=state,
        progress=one_line(found.progress[:500]),
        runs=found.runs,
        failures=found.failures,
        failures_in_a_row=found.failures_in_a_row,
        facts=found.facts,
        backlog=found.backlog if found.backlog >= 0 else None,
        batches=found.batches,
        batch_seconds=found.batch_seconds if math.isfinite(found.batch_seconds) else 0.0,
        last_error=one_line(found.last_error[:500]),
        last_error_unix_ms=found.last_error_unix_ms,
        last_good_unix_ms=found.last_good_unix_ms,
        next_unix_ms=found.next_unix_ms,
        finding=one_line(found.finding[:500]),
    )


def quarantined_message(view: QuarantinedView) -> pb.Quarantined:
    """Write a quarantined fact without its bytes."""
    found = view.quarantined
    return pb.Quarantined(
        stream=view.stream,
        buffer=buffer_number(view.buffer),
        id=found.id,
        at_unix_ms=found.at_unix_ms,
        reason=found.reason,
        from_zone=found.key.from_zone,
        message_id=found.key.message_id,
        existing_offset=found.existing_offset,
        detail=found.detail,
    )


def _start(word: str) -> StartAt:
    try:
        return StartAt(word or StartAt.EARLIEST)
    except ValueError:
        raise InvalidArgument(f"a consumer starts at earliest, latest, offset or time, not {word[:80]!r}") from None
