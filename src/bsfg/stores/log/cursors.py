"""The positions of consumers in a folder: a journal of what was created, confirmed and retired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bsfg.ports import Clock
from bsfg.stores.log.files import Files
from bsfg.stores.log.journal import Journal, Record
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.shared.committer import MakeWorkers, Workers
from bsfg.stores.shared.cursors import ConsumerCursor, Cursors, Resolve, as_document, from_document

CURSORS = "cursors/cursors.journal"


def cursor_record(cursor: ConsumerCursor) -> Record:
    """Give the record from which a cursor can be read again."""
    return Record({"kind": "cursor", **as_document(cursor)})


def cursor_from(record: Record) -> ConsumerCursor:
    """Read a cursor from its record."""
    return from_document(record.head)


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
