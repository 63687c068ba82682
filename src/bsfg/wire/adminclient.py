"""The caller's side of the administration: for operators' tools, dashboards and pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, FrameInvalid
from bsfg.fact import Key
from bsfg.gaps import listed
from bsfg.gate import Gate, Mode
from bsfg.journey.link import PeerPosition
from bsfg.ports import Buffer, Checkpoint, ConsumerSpec, ConsumerState, GapRecord, Quarantined, Result, StartAt
from bsfg.wire import admin_pb2 as pb
from bsfg.wire.connection import Connection
from bsfg.wire.convert import (
    as_value,
    buffer_number,
    buffer_of,
    gap_of,
    gap_set_of,
    position_message,
    position_of,
    release_message,
)
from bsfg.wire.service import (
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
from bsfg.wire.status import error_of


@dataclass(frozen=True, slots=True)
class AdminClient:
    """What operators, viewers and pipelines call on a node; every method raises only `BsfgError`."""

    connection: Connection

    async def status(self) -> dict[str, Any]:
        """Describe the node in a document of JSON values."""
        answer = await self.connection.call("Status", pb.StatusRequest())
        try:
            found = orjson.loads(answer.status_json)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise FrameInvalid("the status is not a JSON object")
        return found

    async def consumers(self) -> list[ConsumerView]:
        """List all durable consumers."""
        answer = await self.connection.call("ListConsumers", pb.ListConsumersRequest())
        return [_consumer(each) for each in answer.consumers]

    async def create_consumer(self, spec: ConsumerSpec) -> ConsumerView:
        """Create a durable consumer; the same again gives what is there."""
        request = pb.CreateConsumerRequest(**{**asdict(spec), "buffer": buffer_number(spec.buffer)})
        return _consumer(await self.connection.call("CreateConsumer", request))

    async def retire_consumer(self, name: str, reason: str) -> list[GapRecord]:
        """End a consumer for good; give the gap records of what it had not confirmed."""
        answer = await self.connection.call("RetireConsumer", pb.RetireConsumerRequest(name=name, reason=reason))
        return [gap_of(gap) for gap in answer.gaps]

    async def frontier(self, stream: str, buffer: Buffer = Buffer.STORE) -> FrontierView:
        """Tell how far all required consumers of a buffer have confirmed it."""
        request = pb.GetFrontierRequest(stream=stream, buffer=buffer_number(buffer))
        return _frontier(await self.connection.call("GetFrontier", request))

    async def truncate_before(
        self, stream: str, before: int, reason: str, *, buffer: Buffer = Buffer.STORE
    ) -> FrontierView:
        """Remove everything below an offset at once; `TruncateRefused` when somebody still needs it."""
        request = pb.TruncateBeforeRequest(stream=stream, buffer=buffer_number(buffer), before=before, reason=reason)
        return _frontier(await self.connection.call("TruncateBefore", request))

    async def gates(self) -> list[GateView]:
        """List the gates of all links."""
        answer = await self.connection.call("ListGates", pb.ListGatesRequest())
        return [_gate(each) for each in answer.gates]

    async def hold_gate(
        self, link: str, reason: str, *, side: str = "receiver", until_unix_ms: int | None = None
    ) -> GateView:
        """Close a gate, until it is released or until a time."""
        request = pb.HoldGateRequest(link=link, side=side, reason=reason, until_unix_ms=until_unix_ms)
        return _gate(await self.connection.call("HoldGate", request))

    async def reload(self) -> dict[str, Any]:
        """Have the node take up what has changed in its file; gives its digest, what changed and what waits."""
        found = await self.connection.call("Reload", pb.ReloadRequest())
        changed, waiting = list(found.changed), list(found.waiting_for_restart)
        return {"digest": found.digest, "changed": changed, "waiting_for_restart": waiting}

    async def release_gate(self, link: str, reason: str, *, side: str = "receiver") -> GateView:
        """Open a held gate."""
        request = pb.ReleaseGateRequest(link=link, side=side, reason=reason)
        return _gate(await self.connection.call("ReleaseGate", request))

    async def acquire_lease(
        self, link: str, holder: str, ttl_ms: int, *, wait_seconds: float = 0.0, urgent: bool = False
    ) -> LeaseView:
        """Take the lease of a link, waiting for a turn among one's own; `LeaseHeld` when somebody has it."""
        wait_ms = int(wait_seconds * 1000)
        request = pb.AcquireLeaseRequest(link=link, holder=holder, ttl_ms=ttl_ms, wait_ms=wait_ms, urgent=urgent)
        return as_value(await self.connection.call("AcquireLease", request), LeaseView)

    async def renew_lease(
        self, link: str, token: str, ttl_ms: int, *, wait_seconds: float = 0.0, seen: int = 0
    ) -> LeaseView:
        """Keep a lease; `LeaseLost` when it is somebody else's by now.

        With ``wait_seconds`` the answer comes when it is wanted more than ``seen``, or after that time.
        """
        wait_ms = int(wait_seconds * 1000)
        request = pb.RenewLeaseRequest(link=link, token=token, ttl_ms=ttl_ms, wait_ms=wait_ms, seen=seen)
        return as_value(await self.connection.call("RenewLease", request), LeaseView)

    async def release_lease(self, link: str, token: str) -> None:
        """Give a lease back."""
        await self.connection.call("ReleaseLease", pb.ReleaseLeaseRequest(link=link, token=token))

    async def report_link(self, report: LinkReport) -> Gate:
        """Tell how a link is doing and learn the mode of its gate, and the reason for it."""
        answer = await self.connection.call("ReportLink", _report(report))
        return _gate_after(answer)

    async def acquire_leases(
        self, links: Sequence[str], holder: str, ttl_ms: int, *, wait_seconds: float = 0.0, plan: int = 0
    ) -> LeasesView:
        """Take the leases of many links, as many as there are to be had; wait until there is one."""
        wait_ms = int(wait_seconds * 1000)
        request = pb.AcquireLeasesRequest(links=links, holder=holder, ttl_ms=ttl_ms, wait_ms=wait_ms, plan=plan)
        return _leases(await self.connection.call("AcquireLeases", request))

    async def renew_leases(
        self, leases: Sequence[KeptLease], holder: str, ttl_ms: int, *, wait_seconds: float = 0.0, plan: int = 0
    ) -> LeasesView:
        """Keep many leases; the answer comes early when there is something new about one of them."""
        kept = [pb.KeptLease(**asdict(each)) for each in leases]
        wait_ms = int(wait_seconds * 1000)
        request = pb.RenewLeasesRequest(leases=kept, holder=holder, ttl_ms=ttl_ms, wait_ms=wait_ms, plan=plan)
        return _leases(await self.connection.call("RenewLeases", request))

    async def report_links(self, reports: Sequence[LinkReport]) -> list[Gate | BsfgError]:
        """Tell how many links are doing; learn for each the mode of its gate, or why the report was not taken."""
        request = pb.ReportLinksRequest(reports=map(_report, reports))
        answers = (await self.connection.call("ReportLinks", request)).answers
        if len(answers) != len(reports):
            raise FrameInvalid(f"the node answered {len(answers)} of {len(reports)} reports")
        return [error_of(each.error) if each.HasField("error") else _gate_after(each.gate) for each in answers]

    async def report_pipelines(
        self, holder: str, reports: Sequence[PipelineReport], *, last: bool = False
    ) -> list[str]:
        """Tell how the pipelines of a process are doing; learn which of them the node's configuration does not have."""
        rows = [
            pb.PipelineReport(**{**asdict(each), "backlog": -1 if each.backlog is None else each.backlog})
            for each in reports
        ]
        request = pb.ReportPipelinesRequest(holder=holder, pipelines=rows, last=last)
        return list((await self.connection.call("ReportPipelines", request)).unknown)

    async def recall_peer(self, link: str, stream: str) -> PeerPosition:
        """Give what is remembered of the sender of a link."""
        return position_of(await self.connection.call("RecallPeer", pb.RecallPeerRequest(link=link, stream=stream)))

    async def remember_peer(self, memo: PeerMemo) -> None:
        """Keep what is known of the sender of a link, and that a release has been acted upon."""
        await self.connection.call("RememberPeer", _memo(memo))

    async def remember_peers(self, memos: Sequence[PeerMemo]) -> list[BsfgError | None]:
        """Keep what is known of the senders of many links; learn for each why it was not kept, None when it was."""
        request = pb.RememberPeersRequest(peers=map(_memo, memos))
        answers = (await self.connection.call("RememberPeers", request)).answers
        if len(answers) != len(memos):
            raise FrameInvalid(f"the node answered {len(answers)} of {len(memos)} positions")
        return [error_of(each.error) if each.HasField("error") else None for each in answers]

    async def gaps(self, stream: str, buffer: Buffer = Buffer.STORE) -> list[GapRecord]:
        """List the gap records of a buffer."""
        request = pb.ListGapsRequest(stream=stream, buffer=buffer_number(buffer), sets=True)
        answer = await self.connection.call("ListGaps", request)
        return [*map(gap_of, answer.gaps), *listed(map(gap_set_of, answer.gap_sets))]

    async def quarantine(self, stream: str | None = None) -> list[QuarantinedView]:
        """List all that is in quarantine, without the facts themselves, page by page."""
        page = await self.quarantine_page(stream)
        views = list(page.views)
        while page.following:
            page = await self.quarantine_page(stream, page.following)
            views += page.views
        return views

    async def quarantine_page(
        self, stream: str | None = None, after: str = "", limit: int = 0, *, newest_first: bool = False
    ) -> QuarantinePage:
        """List a part of what is in quarantine, without the facts themselves."""
        request = pb.ListQuarantineRequest(stream=stream, after=after, limit=limit, newest_first=newest_first)
        answer = await self.connection.call("ListQuarantine", request)
        views = [_quarantined(each) for each in answer.quarantined]
        # A node of an earlier version gives everything at once and does not count.
        return QuarantinePage(views, answer.next, answer.total or len(views))

    async def quarantined(self, stream: str, id: int, buffer: Buffer = Buffer.FORWARD) -> QuarantinedView:
        """Give one quarantined fact, bytes included."""
        request = pb.ShowQuarantinedRequest(stream=stream, buffer=buffer_number(buffer), id=id)
        return _quarantined(await self.connection.call("ShowQuarantined", request))

    async def retry_quarantined(
        self, stream: str, id: int, reason: str, buffer: Buffer = Buffer.FORWARD
    ) -> tuple[bool, Result]:
        """Have a quarantined fact put again; tell whether it left quarantine, and the result."""
        request = pb.SettleQuarantinedRequest(stream=stream, buffer=buffer_number(buffer), id=id, reason=reason)
        answer = await self.connection.call("RetryQuarantined", request)
        return answer.settled, Result(answer.result)

    async def drop_quarantined(self, stream: str, id: int, reason: str, buffer: Buffer = Buffer.FORWARD) -> None:
        """Give up a quarantined fact, which is recorded."""
        request = pb.SettleQuarantinedRequest(stream=stream, buffer=buffer_number(buffer), id=id, reason=reason)
        await self.connection.call("DropQuarantined", request)

    async def close(self) -> None:
        """End the connection."""
        await self.connection.close()

    async def __aenter__(self) -> AdminClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _consumer(found: pb.Consumer) -> ConsumerView:
    buffer, start = buffer_of(found.buffer, Buffer.STORE), _word(StartAt, found.start)
    spec, checkpoint = as_value(found, ConsumerSpec, buffer=buffer, start=start), as_value(found, Checkpoint)
    ranges = tuple((each.first, each.last) for each in found.ranges)
    return ConsumerView(as_value(found, ConsumerState, spec=spec, checkpoint=checkpoint, ranges=ranges), found.backlog)


def _frontier(found: pb.FrontierView) -> FrontierView:
    names = {"slowest": tuple(found.slowest), "held_by": tuple(found.held_by)}
    return as_value(found, FrontierView, buffer=buffer_of(found.buffer, Buffer.STORE), **names)


def _gate(found: pb.Gate) -> GateView:
    return GateView(found.link, found.side, as_value(found, Gate, mode=_word(Mode, found.mode)))


def _memo(memo: PeerMemo) -> pb.RememberPeerRequest:
    settles = None if memo.settles is None else release_message(memo.settles)
    return pb.RememberPeerRequest(
        link=memo.link, stream=memo.stream, position=position_message(memo.position), lease=memo.lease, settles=settles
    )


def _report(report: LinkReport) -> pb.ReportLinkRequest:
    lag_seconds = -1.0 if report.lag_seconds is None else report.lag_seconds
    return pb.ReportLinkRequest(**{**asdict(report), "event": report.event or "", "lag_seconds": lag_seconds})


def _leases(found: pb.LeasesResponse) -> LeasesView:
    leases = {each.link: as_value(each.lease, LeaseView) for each in found.leases if not each.HasField("error")}
    refused = {each.link: error_of(each.error) for each in found.leases if each.HasField("error")}
    return LeasesView(leases, refused, found.plan)


def _gate_after(found: pb.ReportLinkResponse) -> Gate:
    return Gate(_word(Mode, found.mode), reason=found.reason)


def _quarantined(found: pb.Quarantined) -> QuarantinedView:
    facts = FactBatch.from_ipc(found.facts) if found.facts else FactBatch.empty()
    quarantined = as_value(found, Quarantined, key=Key(found.from_zone, found.message_id), facts=facts)
    return QuarantinedView(found.stream, buffer_of(found.buffer, Buffer.STORE), quarantined)


def _word(kind: Any, word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise FrameInvalid(f"the node answered with {word[:80]!r}, which is not known here") from None
