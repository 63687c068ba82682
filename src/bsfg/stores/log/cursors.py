"""The positions of consumers in a folder: a journal of what was created, confirmed and retired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bsfg.frontier import Frontier
from bsfg.ports import Buffer, Clock, ConsumerSpec, StartAt
from bsfg.stores.log.files import Files
from bsfg.stores.log.journal import Journal, Record
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.shared.committer import MakeWorkers, Workers
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors, Resolve

CURSORS = "cursors/cursors.journal"


def cursor_record(cursor: ConsumerCursor) -> Record:
    """Give the record from which a cursor can be read again."""
    head: dict[str, Any] = {
        "kind": "cursor",
        "name": cursor.spec.name,
        "stream": cursor.spec.stream,
        "buffer": cursor.spec.buffer,
        "start": cursor.spec.start,
        "start_value": cursor.spec.start_value,
        "required": cursor.spec.required,
        "committed": cursor.frontier.committed,
        "ranges": cursor.frontier.ranges,
        "log_id": cursor.log_id,
        "created_unix_ms": cursor.created_unix_ms,
        "retired_reason": cursor.retired_reason,
        "peer_head": cursor.peer_head.hex() if cursor.peer_head else None,
    }
    return Record(head)


def cursor_from(record: Record) -> ConsumerCursor:
    """Read a cursor from its record."""
    head = record.head
    spec = ConsumerSpec(
        head["name"],
        head["stream"],
        Buffer(head["buffer"]),
        StartAt(head["start"]),
        head["start_value"],
        head["required"],
    )
    frontier = Frontier(head["committed"], [(first, last) for first, last in head["ranges"]])
    peer_head = bytes.fromhex(head["peer_head"]) if head["peer_head"] else None
    return ConsumerCursor(
        spec, frontier, head["log_id"], head["created_unix_ms"], head["retired_reason"], peer_head,
        frontier.committed + 1,
    )  # fmt: skip


class LogCursors(Cursors):
    """The cursor tracker of the embedded log; concurrent commits share a sync."""

    def __init__(
        self, files: Files, clock: Clock, resolve: Resolve, reserve: Reserve, workers: MakeWorkers = Workers
    ) -> None:
        super().__init__(clock, resolve, workers)
        self._reserve = reserve
        self._journal = Journal(files, CURSORS, self._snapshot, begins=True)
        self._unread: list[Record] = []

    def open(self, *, expected: bool = False, begun: bool = False) -> None:
        """Read all positions and begin to accept changes; see `Journal.open` for what is known of them."""
        found: list[ConsumerCursor] = []
        for record in self._journal.open(expected=expected, begun=begun):
            try:
                found.append(cursor_from(record))
            except (KeyError, ValueError, TypeError, AttributeError):
                self._unread.append(record)
                self._journal.problems.append(f"a record of {str(record.head.get('name'))[:80]!r} cannot be read")
        self.are_lost = self._journal.is_damaged or bool(self._unread)
        self.begin(found)

    @property
    def problems(self) -> list[str]:
        """What was wrong with the journal when it was opened."""
        return [f"{CURSORS}: {text}" for text in self._journal.problems]

    def keep(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write cursors to the journal."""
        records = [cursor_record(cursor) for cursor in cursors]
        self._reserve.with_room(lambda: self._journal.append(records))

    def kept(self) -> None:
        """Write the journal anew when most of it is old."""
        if self._journal.wants_compaction:
            self._journal.compact()

    async def close(self) -> None:
        """Finish what is under way."""
        if await self.end():
            self._journal.close()

    def _snapshot(self) -> Iterator[Record]:
        yield from self._unread
        for name in sorted(self._cursors):
            yield cursor_record(self._cursors[name])
