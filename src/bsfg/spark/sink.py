"""Writes DataFrames into a buffer, in order and once, whatever Spark does to its tasks.

The first partition goes to the node at once. The others are written to files, side by side, and the commit sends
them afterwards, one after the other. So facts get their offsets in the order of partitions and rows, and a DataFrame
of one partition is sent while it is still being computed. docs/adr/0011-ordered-writes.md says why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BsfgError, FrameInvalid, InvalidArgument
from bsfg.ports import Confirmation, Frame
from bsfg.spark.calls import Patience, calls
from bsfg.spark.lane import WINDOW_FRAMES, Lane, Sums, pieces, take_append, take_put
from bsfg.spark.mapping import to_facts, to_frames
from bsfg.spark.options import Options
from bsfg.spark.spool import PartWriter, read_part, remove_part, spool_folder
from bsfg.spark.told import told

if TYPE_CHECKING:
    from bsfg.spark.lane import Stream

Item = FactBatch | Frame


@dataclass(slots=True)
class Part(WriterCommitMessage):
    """What one task did: its sums if it sent its rows itself, else the file where they wait."""

    partition: int
    sums: Sums = field(default_factory=Sums)
    path: str | None = None


class FactsWriting:
    """What both writers have in common; picklable, connects in the process that writes."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def puts(self) -> bool:
        """Whether a link's entries are put, and not facts of this zone appended."""
        return bool(self.options["mode"] == "put")

    @told
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write one partition: to the node when it is the first or order does not matter, else to a file."""
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        sums = Sums()
        items = self._items(iterator, sums)
        if partition == 0 or not self.options["ordered"]:
            return Part(partition, self._send(items, sums))
        with PartWriter(spool_folder(self.options["spool"])) as part:
            for item in items:
                part.write(item)
        return Part(partition, sums, str(part.path))

    def _items(self, batches: Iterator[pa.RecordBatch], sums: Sums) -> Iterator[Item]:
        """Make of Spark's rows what is sent, in order."""
        for batch in batches:
            if self.puts:
                _note_log(batch, sums, self.options["logId"])
                for frame in to_frames(batch):
                    _note_range(frame, sums)
                    yield from _frame_pieces(frame)
            else:
                yield from pieces(to_facts(batch))

    def _send(self, items: Iterator[Item], sums: Sums) -> Sums:
        """Send items over a lane of their own, and add up what became of them."""
        lane: Lane | None = None
        try:
            for item in items:
                lane = lane or self._lane(sums)
                if isinstance(item, Frame) and item.entries is not None:
                    self._bring_artifacts(item.entries)
                calls().run(lane.send(item))
            if lane is not None:
                calls().run(lane.finish())
        except BaseException:
            if lane is not None:
                calls().run(lane.close())
            raise
        return sums

    def _bring_artifacts(self, entries: EntryBatch) -> None:
        """Copy from the sender what facts of a link name: they are put only when it is there."""
        access = self.options.confirm_access
        if access is None or entries.column("artifact").null_count == len(entries):
            return
        from bsfg.spark.replicate.carrying import Artifacts
        from bsfg.wire.client import BoundaryClient

        async def work() -> None:
            sender, own = (BoundaryClient(calls().connection(each)) for each in (access, self.options.access))
            await Artifacts(sender, own, self.options["link"]).bring(entries)

        Patience(self.options["retrySeconds"]).insist(lambda: calls().run(work()))

    def _lane(self, sums: Sums) -> Lane:
        from bsfg.wire.client import BoundaryClient

        options = self.options
        client = BoundaryClient(calls().connection(options.access))

        def opening() -> Stream:
            if not self.puts:
                return client.append_stream(options["stream"], window_frames=WINDOW_FRAMES)
            return client.put_stream(
                options["link"],
                options["stream"],
                sums.log_id or "",
                lease=options["lease"],
                window_frames=WINDOW_FRAMES,
                sender_ahead_ms=options["senderAheadMs"],
            )

        take = take_put(sums) if self.puts else take_append(sums, options["conflicts"] == "fail")
        # A node refuses the rest of a put when it refuses a frame of it; appends are each for itself.
        one_by_one = options["ordered"] and not self.puts
        return Lane(opening, take, options["retrySeconds"], one_by_one=one_by_one)

    # What the driver does when all tasks are done.

    def publish(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> Sums:
        """Send the parts that wait, in order, confirm to the sender where that is asked for, and tell the sums."""
        parts = sorted((part for part in messages if isinstance(part, Part)), key=lambda part: part.partition)
        if self.puts:
            _check_whole(parts)
        for part in parts:
            if part.path is not None:
                fresh = Sums(first=part.sums.first, last=part.sums.last, log_id=part.sums.log_id)
                part.sums = self._send(read_part(Path(part.path)), fresh)
                remove_part(Path(part.path))
        whole = Sums.of(part.sums for part in parts)
        self._confirm(whole)
        self._tell(whole, batch_id)
        return whole

    def discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove the parts of a write that failed; what the node has got it keeps, and will know again."""
        for part in messages:
            if isinstance(part, Part) and part.path is not None:
                remove_part(Path(part.path))

    def _confirm(self, sums: Sums) -> None:
        access = self.options.confirm_access
        if access is None or sums.last is None:
            return
        from bsfg.spark.replicate.carrying import RemoteMemory
        from bsfg.wire.adminclient import AdminClient
        from bsfg.wire.client import BoundaryClient

        options, through = self.options, sums.last
        confirmation = Confirmation(through=through, log_id=sums.log_id, peer_head=sums.chain_head or None)

        async def work() -> None:
            admin = AdminClient(calls().connection(options.access))
            memory = RemoteMemory(admin, options["link"], options["stream"], options["lease"])
            known = await memory.recall()
            # What a confirmation can lead to is remembered before it is sent: the sender may then start behind it.
            known = replace(known, log_id=sums.log_id, latest_start=max(through + 1, known.latest_start or 0))
            await memory.remember(known)
            sender = BoundaryClient(calls().connection(access))
            advanced_to = await sender.confirm(options["confirmConsumer"], confirmation, sums.refusals)
            await memory.remember(replace(known, acknowledged=min(advanced_to, through)))

        Patience(options["retrySeconds"]).insist(lambda: calls().run(work()))

    def _tell(self, sums: Sums, batch_id: int | None) -> None:
        if self.options["results"] is None:
            return
        record: dict[str, Any] = {"at_unix_ms": time.time_ns() // 1_000_000, "batch_id": batch_id, **sums.to_dict()}
        descriptor = os.open(self.options["results"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        finally:
            os.close(descriptor)


class FactsWriter(FactsWriting, DataSourceArrowWriter):
    """Writes a DataFrame once."""

    @told
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what the tasks wrote."""
        self.publish(messages, None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what the tasks wrote to files."""
        self.discard(messages)


class FactsStreamWriter(FactsWriting, DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream."""

    @told
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Publish what the tasks of a micro-batch wrote."""
        self.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Remove what the tasks of a micro-batch wrote to files."""
        self.discard(messages)


def _frame_pieces(frame: Frame) -> Iterator[Frame]:
    if frame.entries is None:
        yield frame
        return
    for piece in pieces(frame.entries):
        offsets = piece.offsets
        yield Frame(int(offsets[0]), int(offsets[-1]), piece)


def _note_range(frame: Frame, sums: Sums) -> None:
    """Note how far the rows of a task reach; rows that do not follow each other are refused."""
    if sums.first is None:
        sums.first = frame.first
    elif sums.last is not None and frame.first != sums.last + 1:
        raise _hole(sums.last, frame.first)
    sums.last = frame.last


def _note_log(batch: pa.RecordBatch, sums: Sums, given: str | None) -> None:
    """Note which log of the sender the rows are of; there can be only one."""
    found = {given} if given is not None else set()
    if "log_id" in batch.schema.names:
        found |= set(batch.column("log_id").unique().to_pylist())
    found.discard(None)
    if sums.log_id is not None:
        found.add(sums.log_id)
    if len(found) != 1:
        raise InvalidArgument(f"the rows are of {len(found)} logs: {', '.join(sorted(map(str, found)))}"[:300])
    sums.log_id = found.pop()


def _check_whole(parts: Sequence[Part]) -> None:
    """Refuse parts that do not follow each other, before any of them is sent."""
    last: int | None = None
    logs = {part.sums.log_id for part in parts if part.sums.log_id is not None}
    if len(logs) > 1:
        raise FrameInvalid(f"the parts are of {len(logs)} logs")
    for part in parts:
        if part.sums.first is None:
            continue
        if last is not None and part.sums.first != last + 1:
            raise _hole(last, part.sums.first)
        last = part.sums.last


def _hole(before: int, after: int) -> BsfgError:
    return FrameInvalid(
        f"offset {after} follows {before}: what a link brings must be whole and in order",
        hint="Write all rows that were read, in the order they were read in: no filter, no sort, no repartition.",
    )
