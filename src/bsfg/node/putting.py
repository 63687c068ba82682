"""What a pipeline brings of a link, put by the rules of that link.

It is the step that the native engine takes with what it fetched (`bsfg.journey.receive`); what may be confirmed is told
to the pipeline, which tells the sender.
"""

from __future__ import annotations

import structlog

from bsfg.batch import EntryBatch
from bsfg.config.kinds import Action
from bsfg.errors import BufferFull, ForeignLog, ZoneNotAllowed
from bsfg.journey.link import Fetched, PeerPosition
from bsfg.journey.receive import LinkRules, PullProgress, receive
from bsfg.node.authorize import Request
from bsfg.node.objects import Objects
from bsfg.node.parts import NodeContext
from bsfg.offload import by_size
from bsfg.ports import Buffer, Frame, GapRecord, GapSet
from bsfg.wire.service import Caller, PutCall, PutOutcome

log = structlog.get_logger("bsfg.node")


class Putting:
    """Puts frames for pipelines."""

    def __init__(self, parts: NodeContext) -> None:
        self._parts = parts
        self._objects = Objects(parts)

    async def put(self, caller: Caller, call: PutCall) -> PutOutcome:
        """Put one frame; what holds the link is part of the outcome, a full buffer an error."""
        parts = self._parts
        parts.guard.check(caller, Request(Action.PUT, call.stream, Buffer.FORWARD, link=call.link))
        lane = parts.settings.stream(call.stream)
        parts.links.leases.check(call.link, call.lease)
        parts.links.check_open(call.link)
        parts.links.spoke(call.link)
        history = await self._foreign(call)
        if history is not None:
            return PutOutcome(call.first - 1, held_code=ForeignLog.code, held_detail=history)
        entries = None
        if call.entries:
            entries = await by_size(len(call.entries), EntryBatch.from_ipc, call.entries, lane.link_limits)
        frame = Frame(call.first, call.last, entries, call.gap, call.skips)
        refused = self._zones_refused(call, frame.entries)
        if refused is not None:
            return PutOutcome(call.first - 1, held_code=ZoneNotAllowed.code, held_detail=refused)
        progress = await receive(
            _brought(call, frame),
            PeerPosition(log_id=call.log_id),
            self._rules(call, frame.entries),
            self._peer_zone(call.link),
            await parts.forward(call.stream),
            clock=parts.steady,
            clock_trusted=parts.steady.trusted,
            before_put=self._objects.claim,
        )
        return self._outcome(call, progress)

    async def _foreign(self, call: PutCall) -> str | None:
        """Say that these facts are of another log than the one that is known of the sender."""
        known = await self._parts.memory(call.link, call.stream).recall()
        if known.log_id in (None, call.log_id):
            return None
        if known.released is not None and known.released.covers(ForeignLog.code, call.log_id):
            return None
        return f"the sender's log is {call.log_id}, it was {known.log_id}"

    def _outcome(self, call: PutCall, progress: PullProgress) -> PutOutcome:
        if isinstance(progress.paused, BufferFull):
            raise progress.paused
        if progress.held is not None:
            return PutOutcome(call.first - 1, held_code=progress.held.code, held_detail=progress.held.detail)
        if progress.refused:
            refusals = [str(refusal) for refusal in progress.refused[:10]]
            log.warning("facts_refused", link=call.link, stream=call.stream, refusals=refusals)
        metrics = self._parts.metrics
        metrics.put(call.stream, Buffer.FORWARD, inserted=progress.inserted, repeated=progress.repeated)
        return PutOutcome(
            through=progress.through if progress.through is not None else call.first - 1,
            inserted=progress.inserted,
            repeated=progress.repeated,
            refusals=progress.refused,
            chain_head=progress.chain_head if progress.moved else b"",
            refetch_at=progress.refetch_at,
        )

    def _peer_zone(self, link: str) -> str:
        matrix = self._parts.guard.matrix
        return matrix.identities[matrix.link_servers[link]].zone

    def _zones_refused(self, call: PutCall, entries: EntryBatch | None) -> str | None:
        """Say which zone the link's peer may not bring, None when it may bring all."""
        parts = self._parts
        from_zones = _zones(call, entries) - {parts.settings.zone}
        to_zones = frozenset(entries.distinct("to_zone")) if entries is not None else frozenset()
        decision = parts.guard.matrix.decide_link(
            call.link, call.stream, from_zones, to_zones, parts.clock.now_unix_ms()
        )
        if decision.error is None:
            return None
        parts.guard.audit(decision, Caller(address=f"link {call.link}"))
        return decision.error.message

    def _rules(self, call: PutCall, entries: EntryBatch | None) -> LinkRules:
        parts, lane = self._parts, self._parts.settings.stream(call.stream)
        max_age_seconds = lane.max_age_seconds
        link = parts.settings.links.get(call.link)
        if max_age_seconds is not None and link is not None and link.max_age_seconds is not None:
            max_age_seconds = link.max_age_seconds
        # These were allowed one by one before; the step itself only needs to know them.
        zones = _zones(call, entries) | {self._peer_zone(call.link)}
        name, signing, stream = parts.settings.zone, parts.settings.signing, call.stream
        return LinkRules(name, zones, max_age_seconds, limits=lane.link_limits, signing=signing, stream=stream)


def _zones(call: PutCall, entries: EntryBatch | None) -> frozenset[str]:
    """Give the zones that a call brings facts or gap records of."""
    relayed = frozenset(gap.origin_zone for gap in call.gaps if gap.origin_zone is not None)
    return relayed | (frozenset(entries.distinct("from_zone")) if entries is not None else frozenset())


def _brought(call: PutCall, frame: Frame) -> Fetched:
    frames = [frame] if call.last >= call.first else []
    return Fetched(
        call.log_id,
        call.first,
        call.last + 1,
        b"",
        frames,
        [gap for gap in call.gaps if isinstance(gap, GapRecord)],
        served_at_unix_ms=call.served_at_unix_ms,
        gap_sets=[gap for gap in call.gaps if isinstance(gap, GapSet)],
    )
