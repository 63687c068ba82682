"""Writes DataFrames into a buffer, in order and once, whatever Spark does to its tasks."""

from __future__ import annotations

import os
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import orjson
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BsfgError, FrameInvalid, InvalidArgument, SpoolNotShared
from bsfg.ports import Confirmation, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.spark.calls import CallRetry, calls
from bsfg.spark.errors import told
from bsfg.spark.lane import WINDOW_FRAMES, OrderedSender, WriteSums, take_append, take_put
from bsfg.spark.mapping import to_facts, to_frames
from bsfg.spark.options import SourceOptions

if TYPE_CHECKING:
    from bsfg.spark.lane import SentStream


SUFFIX = ".part"
FORGOTTEN_SECONDS = 24 * 3600.0
"""After this time a part belongs to nobody any more: its task was killed."""

_HEADER = struct.Struct("<cqqqq")
_FACTS, _ENTRIES, _GAP = b"F", b"E", b"G"


def spool_folder(given: str | None) -> Path:
    """Give the folder for parts, made if need be; nobody else may read it."""
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"bsfg-spool-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if given is None and ((found := folder.lstat()).st_uid != os.getuid() or found.st_mode & 0o077):
        raise PermissionError(f"{folder} is not a private folder of this user")
    return folder


class PartWriter:
    """Writes one part; a part that is not finished is removed."""

    def __init__(self, folder: Path) -> None:
        remove_forgotten(folder)
        self.path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        self._file: IO[bytes] = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    def write(self, item: FactBatch | Frame) -> None:
        """Add facts, or a frame of a link."""
        if isinstance(item, FactBatch):
            self._add(_FACTS, 0, 0, item.to_ipc())
        elif item.entries is not None:
            self._add(_ENTRIES, item.first, item.last, item.entries.to_ipc())
        elif (gap := item.gap) is not None:
            payload = f"{gap.reason}\n{gap.detail}".encode()
            self._add(_GAP, item.first, item.last, payload, gap.at_unix_ms)

    def _add(self, kind: bytes, first: int, last: int, payload: bytes | pa.Buffer, at_unix_ms: int = 0) -> None:
        view = memoryview(payload)
        self._file.write(_HEADER.pack(kind, first, last, at_unix_ms, view.nbytes))
        self._file.write(view)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)


def read_part(path: Path) -> Iterator[FactBatch | Frame]:
    """Give what a part holds, in order; raises `SpoolNotShared` when it is not there."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise SpoolNotShared(f"the part {path} cannot be read here: {error.strerror}") from None
    with file:
        while header := file.read(_HEADER.size):
            kind, first, last, at_unix_ms, size = _HEADER.unpack(header)
            yield _item(kind, first, last, at_unix_ms, file.read(size))


def _item(kind: bytes, first: int, last: int, at_unix_ms: int, payload: bytes) -> FactBatch | Frame:
    if kind == _FACTS:
        return FactBatch.from_ipc(payload)
    if kind == _ENTRIES:
        return Frame(first, last, EntryBatch.from_ipc(payload))
    reason, _, detail = payload.decode().partition("\n")
    return Frame(first, last, gap=GapRecord(first, last, GapReason(reason), at_unix_ms, detail))


def remove_part(path: Path) -> None:
    """Remove a part that is published or not wanted; one that is gone already does no harm."""
    with suppress(OSError):
        path.unlink()


def remove_forgotten(folder: Path) -> None:
    """Remove the parts of tasks that were killed long ago."""
    oldest = time.time() - FORGOTTEN_SECONDS
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


Item = FactBatch | Frame


@dataclass(slots=True)
class WrittenPart(WriterCommitMessage):
    """What one task did: its sums if it sent its rows itself, else the file where they wait."""

    partition: int
    sums: WriteSums = field(default_factory=WriteSums)
    path: str | None = None


class FactsWriting:
    """What both writers have in common; picklable, connects in the process that writes."""

    def __init__(self, options: SourceOptions) -> None:
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
        sums = WriteSums()
        items = self._items(iterator, sums)
        if partition == 0 or not self.options["ordered"]:
            return WrittenPart(partition, self._send(items, sums))
        with PartWriter(spool_folder(self.options["spool"])) as part:
            for item in items:
                part.write(item)
        return WrittenPart(partition, sums, str(part.path))

    def _items(self, batches: Iterator[pa.RecordBatch], sums: WriteSums) -> Iterator[Item]:
        """Make of Spark's rows what is sent, in order."""
        for batch in batches:
            if self.puts:
                _note_log(batch, sums, self.options["logId"])
                for frame in to_frames(batch):
                    # Note how far the rows of a task reach; rows that do not follow each other are refused.
                    if sums.first is None:
                        sums.first = frame.first
                    elif sums.last is not None and frame.first != sums.last + 1:
                        raise _hole(sums.last, frame.first)
                    sums.last = frame.last
                    yield from _frame_pieces(frame)
            else:
                yield from to_facts(batch).pieces()

    def _send(self, items: Iterator[Item], sums: WriteSums) -> WriteSums:
        """Send items over a lane of their own, and add up what became of them."""
        lane: OrderedSender | None = None
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
        from bsfg.spark.replicate.carrying import ArtifactCourier
        from bsfg.wire.client import BoundaryClient

        async def work() -> None:
            sender, own = (BoundaryClient(calls().connection(each)) for each in (access, self.options.access))
            await ArtifactCourier(sender, own, self.options["link"]).bring(entries)

        CallRetry(self.options["retrySeconds"]).made(work)

    def _lane(self, sums: WriteSums) -> OrderedSender:
        from bsfg.wire.client import BoundaryClient

        options = self.options
        client = BoundaryClient(calls().connection(options.access))

        def opening() -> SentStream:
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
        return OrderedSender(opening, take, options["retrySeconds"], one_by_one=one_by_one)

    # What the driver does when all tasks are done.

    def publish(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> WriteSums:
        """Send the parts that wait, in order, confirm to the sender where that is asked for, and tell the sums."""
        parts = sorted((part for part in messages if isinstance(part, WrittenPart)), key=lambda part: part.partition)
        if self.puts:
            _check_whole(parts)
        for part in parts:
            if part.path is not None:
                fresh = WriteSums(first=part.sums.first, last=part.sums.last, log_id=part.sums.log_id)
                part.sums = self._send(read_part(Path(part.path)), fresh)
                remove_part(Path(part.path))
        whole = WriteSums.of(part.sums for part in parts)
        self._confirm(whole)
        self._tell(whole, batch_id)
        return whole

    def discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove the parts of a write that failed; what the node has got it keeps, and will know again."""
        for part in messages:
            if isinstance(part, WrittenPart) and part.path is not None:
                remove_part(Path(part.path))

    def _confirm(self, sums: WriteSums) -> None:
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

        CallRetry(options["retrySeconds"]).made(work)

    def _tell(self, sums: WriteSums, batch_id: int | None) -> None:
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
    for piece in frame.entries.pieces():
        offsets = piece.offsets
        yield Frame(int(offsets[0]), int(offsets[-1]), piece)


def _note_log(batch: pa.RecordBatch, sums: WriteSums, given: str | None) -> None:
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


def _check_whole(parts: Sequence[WrittenPart]) -> None:
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
