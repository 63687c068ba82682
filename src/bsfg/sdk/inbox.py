"""The inbox: entries are brought from the node to the consumer's own disk, and handled from there.

The node is told that an entry is confirmed as soon as it is durable in the inbox: *durable here*, not *handled*. From
then on the inbox answers for it, and the node may let it go. What the application has handled is kept in the inbox. So
the consumer reads on while the node is away, and a lost inbox loses what was not handled. What cannot be read any more
of an inbox is a gap record in its place.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, ForeignLog, unforeseen
from bsfg.journey.link import Fetched, FetchRequest, Refusal
from bsfg.ports import Confirmation, Frame, GapRecord
from bsfg.retention import GapReason
from bsfg.sdk.consuming import ConsumerFeed
from bsfg.sdk.intake import LOOSE
from bsfg.sdk.spool import Spool, Spooled, segment_size
from bsfg.stores.log.journal import Record

_FETCH_BYTES = 8 << 20
_FULL_PAUSE_SECONDS = 0.5


class InboxFeed:
    """A feed that reads from a folder, while a task of its own fills it from another feed."""

    def __init__(
        self,
        node: ConsumerFeed,
        consumer: str,
        folder: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        max_facts: int,
        wait_seconds: float,
    ) -> None:
        self._node, self._consumer, self._folder = node, consumer, folder
        self._capacity_bytes, self._max_facts, self._wait_seconds = capacity_bytes, max_facts, wait_seconds
        self._spool: Spool
        self._note: dict[str, Any] = {}
        self._read_number = 0
        self._taken: deque[tuple[int, int]] = deque()
        self._filler: asyncio.Task[None] | None = None
        self._failure: BsfgError | None = None
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Open the folder and begin to fill it."""
        spool = await asyncio.to_thread(
            lambda: Spool.open(
                self._folder, "inbox", capacity_bytes=1 << 62, segment_bytes=segment_size(self._capacity_bytes)
            )
        )
        note: dict[str, Any] = {
            "consumer": self._consumer,
            "next": None,
            "committed": None,
            "refusals": [],
            "token": "",
        }
        self._spool, self._note = spool, {**note, **spool.note}
        if self._note["consumer"] != self._consumer:
            await asyncio.to_thread(spool.close)
            raise ForeignLog(
                f"{self._folder} is the inbox of {self._note['consumer']}, not of {self._consumer}",
                hint="Give every consumer an inbox of its own.",
            )
        # Find out what the inbox holds that its position does not say yet.
        for record in (*self._spool.read(self._spool.done, max_bytes=1), *self._spool.read(self._spool.end - 1)):
            self._remember(record.head)
        self._read_number = spool.done
        self._filler = asyncio.create_task(self._fill())

    def _remember(self, head: dict[str, Any]) -> None:
        self._note["log_id"] = head["log_id"]
        self._note["token"] = head["token"]
        self._note["stream"] = head.get("stream")
        if "last" in head:
            if self._note["committed"] is None:
                self._note["committed"] = head["first"] - 1
            self._note["next"] = head["last"] + 1

    # Filling.

    async def _fill(self) -> None:
        try:
            while True:
                if self._spool.used_bytes >= self._capacity_bytes:
                    await asyncio.sleep(_FULL_PAUSE_SECONDS)
                    continue
                await self._bring()
        except Exception as error:
            # What is in the inbox is still given; then whoever reads is told.
            self._failure = unforeseen(error, "filling the inbox")
            self._changed.set()

    async def _bring(self) -> None:
        """Fetch once, make it durable here, and confirm it at the node."""
        request = FetchRequest(self._max_facts, _FETCH_BYTES, self._wait_seconds, self._note["token"])
        fetched = await self._node.take(request)
        if self._note.get("log_id") not in (None, fetched.log_id):
            raise ForeignLog(f"the node's log is now {fetched.log_id}, the inbox is of {self._note['log_id']}")
        records = _records(fetched, self._note["next"])
        if records:
            await asyncio.to_thread(self._spool.put, records)
            for record in records:
                self._remember(record.head)
            self._changed.set()
        await self._confirm_at_node(fetched)

    async def _confirm_at_node(self, fetched: Fetched) -> None:
        refusals = [Refusal(*row) for row in self._note["refusals"]]
        behind = self._note["next"] is not None and fetched.frames
        if not behind and not refusals:
            return
        through = self._note["next"] - 1 if self._note["next"] else None
        await self._node.confirm(Confirmation(through, (), fetched.log_id), refusals)
        del self._note["refusals"][: len(refusals)]

    # Reading.

    def rewind(self) -> None:
        """Give everything again that is not confirmed."""
        self._read_number = self._spool.done
        self._taken.clear()

    async def take(self, request: FetchRequest) -> Fetched:
        """Give what is here and was not given yet, waiting as the request says."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + request.wait_seconds
        while True:
            self._changed.clear()
            records = await asyncio.to_thread(self._spool.read, self._read_number, max_bytes=request.max_bytes)
            if records:
                return self._fetched(records)
            if self._failure is not None:
                raise self._failure
            left = ends - loop.time()
            if left <= 0:
                return self._fetched([])
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _fetched(self, records: Sequence[Spooled]) -> Fetched:
        frames: list[Frame] = []
        gaps: list[GapRecord] = []
        for record in records:
            frame, given = _frame(record), self._given
            if frame is None:
                gaps += [_gap(row) for row in record.head["gaps"]]
            else:
                if given is not None and frame.first > given + 1:
                    frames.append(_lost(given + 1, frame.first - 1))
                    self._taken.append((record.number - 1, frame.first - 1))
                frames.append(frame)
            last = record.head.get("last", self._taken[-1][1] if self._taken else -1)
            self._taken.append((record.number, last))
            self._read_number = record.number + 1
        committed = self._note["committed"]
        start = committed + 1 if committed is not None else 0
        end = self._note["next"] if self._note["next"] is not None else start
        stream = self._note.get("stream")
        return Fetched(self._note.get("log_id", ""), start, end, b"", frames, gaps, stream=stream)

    @property
    def _given(self) -> int | None:
        """The last offset that was given, or confirmed; None when nobody knows."""
        committed: int | None = self._note["committed"]
        taken = self._taken[-1][1] if self._taken else -1
        return committed if committed is None else max(committed, taken)

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal]) -> None:
        """Keep what was handled; entries that were leave the folder."""
        note = self._note
        committed = -1 if note["committed"] is None else note["committed"]
        if confirmation.through is not None:
            note["committed"] = committed = max(committed, confirmation.through)
        note["refusals"] += [[each.first, each.last, each.reason, each.detail] for each in refusals]
        done = self._spool.done
        while self._taken and self._taken[0][1] <= committed:
            done = self._taken.popleft()[0] + 1
        await asyncio.to_thread(lambda: self._spool.advance(done, dict(note), durably=True))

    async def close(self) -> None:
        """Stop filling and give the folder back."""
        if self._filler is not None:
            self._filler.cancel()
            await asyncio.gather(self._filler, return_exceptions=True)
            await asyncio.to_thread(self._spool.close)
        await self._node.close()


def _records(fetched: Fetched, expected: int | None) -> list[Record]:
    """Write what is new in an answer as records; gap records of other zones have no offsets and go first."""
    common = {"log_id": fetched.log_id, "token": fetched.gaps_token, "stream": fetched.stream}
    result = []
    if fetched.gaps:
        result.append(Record({**common, "gaps": [_gap_row(gap) for gap in fetched.gaps]}))
    for frame in fetched.frames:
        first = frame.first if expected is None else max(frame.first, expected)
        if first > frame.last:
            continue
        head: dict[str, Any] = {**common, "first": first, "last": frame.last}
        if frame.entries is None:
            assert frame.gap is not None
            result.append(Record({**head, "gap": _gap_row(frame.gap)}))
        else:
            result.append(Record(head, frame.entries.slice(first - frame.first).to_ipc().to_pybytes()))
    return result


def _frame(record: Spooled) -> Frame | None:
    head = record.head
    if "gaps" in head:
        return None
    if "gap" in head:
        return Frame(head["first"], head["last"], gap=_gap(head["gap"]))
    return Frame(head["first"], head["last"], EntryBatch.from_ipc(record.blob, LOOSE))


def _lost(first: int, last: int) -> Frame:
    """Say of entries that were in the inbox, and confirmed to the node by that, that they are gone."""
    at_unix_ms = time.time_ns() // 1_000_000
    return Frame(first, last, gap=GapRecord(first, last, GapReason.DAMAGED, at_unix_ms, "the inbox was damaged"))


def _gap_row(gap: GapRecord) -> list[Any]:
    return [gap.first, gap.last, str(gap.reason), gap.at_unix_ms, gap.detail, gap.origin_zone, gap.count]


def _gap(row: list[Any]) -> GapRecord:
    return GapRecord(row[0], row[1], GapReason(row[2]), *row[3:])
