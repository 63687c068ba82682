"""Step 8, recover: after a start, say where everything stands and whether it fits together.

Recovery itself needs no procedure: buffers are what was durable, every consumer continues after what it confirmed,
and what is offered twice is known by its key. This step only looks, so that a node can tell an operator what it found
and refuse to serve a position that belongs to another history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

from bsfg.errors import ForeignLog, OffsetOutOfRange
from bsfg.frontier import Range
from bsfg.ports import Buffer, BufferStats, ConsumerState, Replayable, Storage
from bsfg.retention import GapReason, Policy

BufferName = tuple[str, Buffer]

NO_BUFFER = "unknown_buffer"


@dataclass(frozen=True, slots=True)
class RecoveredBuffer:
    """What a buffer holds after a start; ``gaps`` counts the offsets it lacks or did not deliver, by reason."""

    stats: BufferStats
    gaps: Mapping[GapReason, int]

    @property
    def name(self) -> BufferName:
        """Stream and buffer."""
        return self.stats.stream, self.stats.buffer

    @property
    def problems(self) -> tuple[str, ...]:
        """What was found damaged or lost, in words."""
        return tuple(
            f"{count} offsets of the {self.stats.buffer} buffer of {self.stats.stream} are {reason}"
            for reason, count in sorted(self.gaps.items())
            if reason in (GapReason.DAMAGED, GapReason.LOST)
        )


@dataclass(frozen=True, slots=True)
class RecoveredConsumer:
    """Where a consumer continues, how much lies before it, and the error code of what is wrong with its position."""

    name: str
    stream: str
    buffer: Buffer
    next_to_send: int
    committed: int
    ranges: tuple[Range, ...]
    backlog: int
    retired: bool = False
    problem: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a start found, buffer by buffer and consumer by consumer."""

    buffers: tuple[RecoveredBuffer, ...]
    consumers: tuple[RecoveredConsumer, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything an operator should look at, in words; empty after a clean start or a plain crash."""
        of_buffers = [problem for buffer in self.buffers for problem in buffer.problems]
        return (*of_buffers, *(f"consumer {each.name}: {each.detail}" for each in self.consumers if each.problem))


async def recover(
    storage: Storage, policies: Mapping[BufferName, Policy] | None = None, *, without: Container[BufferName] = ()
) -> RecoveryReport:
    """Open every buffer under its policy, but for some, and hold every consumer against the log that it reads."""
    policies = policies or {}
    buffers: dict[BufferName, RecoveredBuffer] = {}
    for stream, kind in await storage.streams():
        if (stream, kind) in without:
            continue
        buffer = await _open(storage, stream, kind, policies.get((stream, kind)))
        buffers[stream, kind] = RecoveredBuffer(await buffer.stats(), await _gap_counts(buffer))
    states = await storage.cursors.consumers()
    consumers = [look_at(state, buffers.get((state.spec.stream, state.spec.buffer))) for state in states]
    return RecoveryReport(tuple(buffers.values()), tuple(consumers))


def look_at(state: ConsumerState, buffer: RecoveredBuffer | None) -> RecoveredConsumer:
    """Describe a consumer and say what is wrong with its position, if anything is."""
    committed = state.checkpoint.committed
    problem, detail, backlog = None, "", 0
    highest = max([committed, *(last for _, last in state.ranges)])
    if buffer is None:
        problem, detail = NO_BUFFER, f"the {state.spec.buffer} buffer of {state.spec.stream} does not exist"
    elif state.log_id != buffer.stats.log_id:
        problem = ForeignLog.code
        detail = f"its position belongs to log {state.log_id}, this is {buffer.stats.log_id}"
    elif highest >= buffer.stats.end:
        problem = OffsetOutOfRange.code
        detail = f"it confirmed offset {highest}, the log ends before {buffer.stats.end}"
    else:
        backlog = buffer.stats.end - (committed + 1) - sum(last - first + 1 for first, last in state.ranges)
    return RecoveredConsumer(
        name=state.spec.name,
        stream=state.spec.stream,
        buffer=state.spec.buffer,
        next_to_send=state.checkpoint.next_to_send,
        committed=committed,
        ranges=state.ranges,
        backlog=backlog,
        retired=state.retired_reason is not None,
        problem=problem,
        detail=detail,
    )


async def _open(storage: Storage, stream: str, kind: Buffer, policy: Policy | None) -> Replayable:
    if kind == Buffer.STORE:
        return await storage.store(stream, policy)
    return await storage.forward(stream, policy)


async def _gap_counts(buffer: Replayable) -> Mapping[GapReason, int]:
    """Count the offsets of this buffer that have a gap record, by reason; those of other zones are not its own."""
    counts: Counter[GapReason] = Counter()
    for gaps in await buffer.gap_sets():
        if gaps.origin_zone is None:
            counts[gaps.reason] += gaps.ranges.offsets
    return dict(counts)
