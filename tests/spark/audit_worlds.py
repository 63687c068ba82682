"""Both ends of a link for audits: made by the real journey on the real storage, and harmed by hand."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tests.journey.zones import STREAM, DirectLink, Inbound, Zone, connect

from bsfg.errors import FrameInvalid
from bsfg.fact import Message
from bsfg.journey.link import Fetched, FetchRequest
from bsfg.journey.serve import sum_up
from bsfg.journey.sums import AuditScope, Summation
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Clock, Frame, Storage
from bsfg.spark.audit import AuditedLink, AuditedStream, StreamVerdict, Verdict, audit_with
from bsfg.spark.audit.ends import FolderEnd
from bsfg.spark.audit.runner import LocalRunner
from bsfg.spark.audit.scope import Span, Summed
from bsfg.spark.audit.verdict import AuditFinding
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.segments import segment_bases, segment_name
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.stores.shared.frame import SegmentHeader, encode_frame, encode_segment_header, genesis
from bsfg.testing.facts import messages
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import SumCall, SumOutcome, sum_call_of, sum_request, sums_of, sums_response

OPTIONS = LogOptions(segment_bytes=32_768, index_run_keys=500)
RANGE_FACTS = 64
PER_FRAME = 50

Change = Callable[[pa.RecordBatch], pa.RecordBatch]


class FolderZone(Zone):
    """A zone whose storage is a folder, with small segments so that there are many."""

    def __init__(self, name: str, root: Path) -> None:
        self.folder = root / name

        async def opener(clock: Clock) -> Storage:
            return await LogStorage.open(self.folder, clock=clock, options=OPTIONS)

        super().__init__(name, opener)

    async def say(self, count: int, *, first: int = 0, facts: Sequence[Message] = ()) -> None:
        """Append numbered facts of this zone, or given ones, in frames of some size."""
        said = list(facts) or messages(count, first=first, from_zone=self.name)
        for at in range(0, len(said), PER_FRAME):
            self.clock.advance(1)
            await self.append(said[at : at + PER_FRAME])


async def linked(
    sender: Zone, receiver: FolderZone, *, relayed: Sequence[str] = (), buffer: Buffer = Buffer.STORE, **more: Any
) -> Inbound:
    """Connect two zones; the receiver remembers the sender as a node does."""
    inbound = await connect(sender, receiver, relayed=relayed, buffer=buffer, **more)
    await receiver.forward()
    state = NodeState(receiver.folder)
    memory = state.peer(link_name(sender, buffer), STREAM)
    return replace(inbound, memory=memory, request=FetchRequest(max_facts=PER_FRAME))


def link_name(sender: Zone, buffer: Buffer = Buffer.STORE) -> str:
    """Name a link after its sender."""
    return f"from-{sender.name}-{buffer}"


def plan(inbound: Inbound, **changes: Any) -> AuditedStream:
    """Plan the audit of a link between two folders."""
    link, receiver = inbound.link, inbound.receiver
    assert isinstance(link, DirectLink) and isinstance(link.sender, FolderZone) and isinstance(receiver, FolderZone)
    sender_end = FolderEnd(str(link.sender.folder), STREAM, link.buffer, consumer=link.consumer)
    receiver_end = FolderEnd(str(receiver.folder), STREAM, Buffer.FORWARD, link=link_name(link.sender, link.buffer))
    found = AuditedStream(
        STREAM,
        sender_end,
        receiver_end,
        link.sender.name,
        receiver.name,
        frozenset(link.carriage.to_zones or ()),
        relayed=link.buffer == Buffer.FORWARD,
        range_facts=RANGE_FACTS,
        asked=link.carriage.asked,
    )
    return replace(found, **changes)


class SummedFolder(FolderEnd):
    """A folder whose log is summed up as its node would do it, some at a time, over messages as they travel."""

    def summed(self, side: str, bounds: Span, log_id: str, scope: AuditScope) -> list[Summed] | None:  # type: ignore[override]
        """Do it in a thread: whoever audits may have an event loop of his own."""
        first, end = bounds
        parts: list[Summed] = []
        with ThreadPoolExecutor(1) as thread:
            while first < end:
                call = SumCall(self.stream, self.buffer, side, first, end, scope)
                try:
                    outcome = thread.submit(asyncio.run, self._sum(call, log_id)).result()
                except FrameInvalid:
                    return None
                parts.append((outcome.found, outcome.keys))
                first = outcome.found.end
        return parts

    async def _sum(self, asked: SumCall, log_id: str) -> SumOutcome:
        call = sum_call_of(pb.SumFactsRequest.FromString(sum_request(asked).SerializeToString()))
        summation = Summation(call.side, call.first, call.end, call.scope)

        async def frames() -> AsyncIterator[Frame]:
            for frame in self.frames(call.first, call.end, log_id):
                yield frame

        await sum_up(frames(), summation)
        head = Fetched(log_id, call.first, call.end, b"")
        return sums_of(pb.SumFactsResponse.FromString(sums_response(head, summation)), asked)


def audited(found: AuditedStream) -> StreamVerdict:
    """Audit one stream in this process, read by the audit and summed up as by nodes; both find the same."""
    verdict = _audited(found)
    if not isinstance(found.sender, FolderEnd):
        return verdict
    other = _audited(_summed(found))
    same = ("findings", "finding_counts", "absences", "ranges", "compared", "by_digest", "receiver_first")
    assert {name: getattr(verdict, name) for name in same} == {name: getattr(other, name) for name in same}
    assert [(check.name, check.state) for check in verdict.checks] == [(each.name, each.state) for each in other.checks]
    return verdict


def _audited(found: AuditedStream) -> StreamVerdict:
    verdict = audit_with(LocalRunner(), AuditedLink("link", found.zone, found.receiver_zone or "", [found]))
    assert isinstance(verdict, Verdict)
    return verdict.streams[0]


def _summed(found: AuditedStream) -> AuditedStream:
    sender, receiver = found.sender, found.receiver
    assert isinstance(sender, FolderEnd) and isinstance(receiver, FolderEnd)
    ends = (SummedFolder(end.path, end.stream, end.buffer, end.link, end.consumer) for end in (sender, receiver))
    return replace(found, sender=next(ends), receiver=next(ends))


def brief(verdict: StreamVerdict) -> list[tuple[str, int | None, str | None, tuple[str, ...]]]:
    """Give the findings by kind, offset, id and fields."""
    return [_brief(finding) for finding in verdict.findings]


def _brief(finding: AuditFinding) -> tuple[str, int | None, str | None, tuple[str, ...]]:
    return str(finding.kind), finding.offset, finding.message_id, finding.fields


# Harm.


def log_of(folder: Path, buffer: Buffer) -> LogFolder:
    """Open one log of a folder for reading."""
    return next(log for log in open_folder(folder) if (log.stream, log.buffer) == (STREAM, buffer))


def copied(folder: Path, to: Path) -> Path:
    """Copy a data folder."""
    shutil.copytree(folder, to)
    return to


def rewrite(folder: Path, buffer: Buffer, change: Change, per_frame: int = PER_FRAME) -> None:
    """Write a log anew with changed rows, as somebody could who knows the format: all checks of the log itself pass."""
    log = log_of(folder, buffer)
    rows = []
    for frame in log.frames():
        assert frame.entries is not None
        rows.append(frame.entries.record_batch)
    changed = change(pa.concat_batches(rows))
    write_log(folder, buffer, changed, per_frame)


def write_log(folder: Path, buffer: Buffer, entries: pa.RecordBatch, per_frame: int = PER_FRAME) -> None:
    """Replace the entries of a log by others, keeping its identity."""
    log = log_of(folder, buffer)
    identity = read_identity(log.files, log.path)
    assert identity is not None
    header = log.view().segments[0].header
    names = header.schema.names
    path = folder / log.path
    for base in segment_bases(log.files, log.path):
        (path / segment_name(base)).unlink()
    (path / "durable").unlink(missing_ok=True)
    shutil.rmtree(path / "index", ignore_errors=True)
    chain = genesis(identity.log_id)
    data = [encode_segment_header(SegmentHeader(identity.log_id, 0, -1, chain, 0, header.schema))]
    for at in range(0, entries.num_rows, per_frame):
        part = entries.slice(at, per_frame)
        parts, chain = encode_frame(
            memoryview(pa.concat_batches([part.select(names)]).serialize()),
            base=at,
            count=part.num_rows,
            appended_at_unix_ms=part.column("appended_at_unix_ms")[0].as_py(),
            log_id=identity.log_id,
            chain_before=chain,
        )
        data += [bytes(each) for each in parts]
    (path / segment_name(0)).write_bytes(b"".join(data))


def with_value(batch: pa.RecordBatch, row: int, **values: Any) -> pa.RecordBatch:
    """Give rows with some fields of one of them replaced."""
    for name, value in values.items():
        column = batch.column(name)
        changed = column.to_pylist()
        changed[row] = value
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, batch.schema.field(at), pa.array(changed, column.type))
    return batch


def without(batch: pa.RecordBatch, *rows: int) -> pa.RecordBatch:
    """Give rows without some."""
    return batch.take(pa.array(np.setdiff1d(np.arange(batch.num_rows), rows)))


def exchanged(batch: pa.RecordBatch, one: int, other: int) -> pa.RecordBatch:
    """Give rows with two of them in each other's place."""
    order = np.arange(batch.num_rows)
    order[[one, other]] = order[[other, one]]
    return batch.take(pa.array(order))


def repeated(batch: pa.RecordBatch, row: int, at: int | None = None) -> pa.RecordBatch:
    """Give rows with one of them a second time, at the end or at a place."""
    place = batch.num_rows if at is None else at
    return batch.take(pa.array(np.insert(np.arange(batch.num_rows), place, row)))
