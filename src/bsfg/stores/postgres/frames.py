"""What a zone keeps, in its tables: the port of frames in SQL; see `bsfg.stores.shared.keeper`.

The row of a buffer is its head. An append moves its end from where the writer knows it to be, under the epoch that
it claimed the zone with, in one statement that is its own transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from psycopg.types.numeric import Int8

from bsfg.digest import KeptRange
from bsfg.errors import StorageTaken
from bsfg.frontier import Frontier
from bsfg.gaps import GapSet, RangeSet
from bsfg.ports import Buffer, ConsumerSpec, StartAt
from bsfg.retention import GapReason
from bsfg.stores.postgres.database import Connection, Database, Int8Array
from bsfg.stores.shared.cursors import ConsumerCursor
from bsfg.stores.shared.frame import Damaged, genesis
from bsfg.stores.shared.keeper import (
    PAGE_BYTES,
    AsideRow,
    BufferFound,
    BufferHead,
    BufferKeeper,
    Change,
    DepartedRange,
    ForgottenKeys,
    FrameInfo,
    FrameRow,
    KeptKeys,
    NewBuffer,
    NewFrame,
    ZoneKeeper,
    touched,
)
from bsfg.stores.shared.reading import PAGE_FRAMES, chain_behind, entries_in

_HEAD = "start_offset, end_offset, used_bytes, keys, newest_unix_ms, chain"
_FRAME = "base, count, appended_at_unix_ms, chain_before, content"

_APPEND = """
WITH taken AS MATERIALIZED (
    SELECT hash, at FROM key WHERE %(unsure)s AND buffer_id = %(buffer)s AND hash = ANY(%(hashes)s)
), moved AS (
    UPDATE buffer SET end_offset = end_offset + %(count)s, used_bytes = used_bytes + %(size)s,
        keys = keys + %(count)s, newest_unix_ms = %(now)s, chain = %(chain)s
    WHERE id = %(buffer)s AND end_offset = %(base)s AND epoch = %(epoch)s AND NOT EXISTS (SELECT FROM taken)
    RETURNING id
), stored AS (
    INSERT INTO frame
    SELECT id, %(base)s, %(count)s::integer, %(now)s, %(before)s, %(size)s::integer, %(content)s FROM moved
), known AS (
    INSERT INTO key SELECT moved.id, fresh.hash, fresh.at
    FROM moved, unnest(%(hashes)s::bigint[], %(offsets)s::bigint[]) AS fresh(hash, at)
)
SELECT hash, at FROM taken UNION ALL SELECT NULL, id FROM moved
"""
_MOVE = f"""
UPDATE buffer SET ({_HEAD}) = (%s, %s, %s, %s, %s, %s)
WHERE id = %s AND epoch = %s AND start_offset = %s AND end_offset = %s AND keys = %s
"""
_FOUND = """
SELECT count(*), coalesce(sum(size_bytes), 0)::bigint,
    greatest(max(id), (SELECT max(id) FROM released WHERE buffer_id = %s), 0)
FROM aside WHERE buffer_id = %s
"""
_SINCE = "base >= coalesce((SELECT max(base) FROM frame WHERE buffer_id = %(buffer)s AND base <= %(at)s), %(at)s)"
_INFOS = f"""
SELECT base, count, size_bytes, appended_at_unix_ms FROM frame
WHERE buffer_id = %(buffer)s AND {_SINCE} AND base + count > %(at)s ORDER BY base LIMIT %(most)s
"""
_PAGE = f"""
SELECT {_FRAME} FROM (
    SELECT *, sum(size_bytes) OVER (ORDER BY base) - size_bytes AS before_bytes FROM (
        SELECT {_FRAME}, size_bytes FROM frame
        WHERE buffer_id = %(buffer)s AND base < %(until)s AND {_SINCE} AND base + count > %(at)s
        ORDER BY base LIMIT %(most)s) AS following
) AS page WHERE before_bytes < %(bytes)s ORDER BY base
"""
_HOLDING = """
SELECT DISTINCT f.base, f.size_bytes FROM unnest(%s::bigint[]) AS wanted(at),
LATERAL (SELECT base, count, size_bytes FROM frame WHERE buffer_id = %s AND base <= wanted.at
         ORDER BY base DESC LIMIT 1) AS f
WHERE wanted.at < f.base + f.count ORDER BY f.base
"""
_CONTENT = f"SELECT {_FRAME} FROM frame WHERE buffer_id = %s AND base = ANY(%s) ORDER BY base"
_KEYS = """
SELECT first, last, keys FROM (
    SELECT first, last, keys, sum(octet_length(keys)) OVER (ORDER BY first) - octet_length(keys) AS before_bytes
    FROM departed WHERE buffer_id = %(buffer)s AND keys IS NOT NULL AND first IN (
        SELECT d.first FROM unnest(%(offsets)s::bigint[]) AS wanted(at),
        LATERAL (SELECT first, last FROM departed WHERE buffer_id = %(buffer)s AND first <= wanted.at
                 ORDER BY first DESC LIMIT 1) AS d
        WHERE wanted.at <= d.last)
) AS page WHERE before_bytes < %(bytes)s ORDER BY first
"""
_CONSUMER = (
    "name, stream, buffer, start, start_value, required, committed, ranges, log_id, created_unix_ms, retired_reason, "
    "peer_head"
)
_KEEP = f"""
INSERT INTO consumer ({_CONSUMER}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (name) DO UPDATE SET committed = excluded.committed, ranges = excluded.ranges, log_id = excluded.log_id,
    retired_reason = excluded.retired_reason, peer_head = excluded.peer_head
"""


class PostgresZone(ZoneKeeper):
    """The tables of one zone."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, zone: str, hasher: str) -> list[tuple[str, Buffer]]:
        """Open the tables as the zone's one writer, making them when there are none."""
        self._database.open(zone, hasher)
        rows = self._database.rows("listing buffers", "SELECT stream, kind FROM buffer")
        return [(stream, Buffer(kind)) for stream, kind in rows]

    def buffer(self, stream: str, kind: Buffer, new: NewBuffer) -> PostgresFrames:
        """Give one buffer, made when there is none."""
        row = (stream, str(kind), new.log_id, new.secret, self._database.epoch, new.chain)

        def change(connection: Connection) -> int:
            connection.execute(
                "INSERT INTO buffer (stream, kind, log_id, secret, epoch, chain) VALUES (%s, %s, %s, %s, %s, %s) "
                "ON CONFLICT DO NOTHING",
                row,
            )
            asked = "SELECT id FROM buffer WHERE stream = %s AND kind = %s"
            ((found,),) = connection.execute(asked, row[:2]).fetchall()
            return int(found)

        place = f"{stream}/{kind}"
        return PostgresFrames(self._database, self._database.change(f"opening {place}", change), place)

    def consumers(self) -> list[ConsumerCursor]:
        """Read all consumers."""
        return [_cursor(row) for row in self._database.rows("reading consumers", f"SELECT {_CONSUMER} FROM consumer")]

    def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write consumers in one transaction."""
        rows = [_row(cursor) for cursor in cursors]

        def change(connection: Connection) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(_KEEP, rows)

        self._database.change("keeping consumers", change)

    def close(self) -> None:
        """End all connections."""
        self._database.close()


def _row(cursor: ConsumerCursor) -> tuple[object, ...]:
    spec, frontier = cursor.spec, cursor.frontier
    ranges = [edge for pair in frontier.ranges for edge in pair]
    return (
        spec.name, spec.stream, str(spec.buffer), str(spec.start), spec.start_value, spec.required,
        frontier.committed, ranges, cursor.log_id, cursor.created_unix_ms, cursor.retired_reason, cursor.peer_head,
    )  # fmt: skip


def _cursor(row: tuple[Any, ...]) -> ConsumerCursor:
    name, stream, buffer, start, start_value, required, committed, ranges, log_id, created_unix_ms, retired, head = row
    spec = ConsumerSpec(name, stream, Buffer(buffer), StartAt(start), start_value, required)
    frontier = Frontier(committed, list(zip(ranges[0::2], ranges[1::2], strict=True)))
    return ConsumerCursor(spec, frontier, log_id, created_unix_ms, retired, head, committed + 1)


class PostgresFrames(BufferKeeper):
    """The rows of one buffer."""

    def __init__(self, database: Database, buffer_id: int, place: str) -> None:
        self._database, self._id, self._place = database, buffer_id, place

    def _rows(self, asked: str, values: Sequence[object] | Mapping[str, object]) -> list[tuple[Any, ...]]:
        return self._database.rows(f"reading {self._place}", asked, values)

    def found(self) -> BufferFound:
        """Read the row of the buffer, behind whoever changes it now, and what is counted beside it.

        The lock of the row is written to the server's log: where commits wait for a standby, so does this.
        """
        return self._database.run(f"opening {self._place}", self._found)

    def _found(self, connection: Connection, again: bool) -> BufferFound:
        asked = "SELECT log_id, secret FROM buffer WHERE id = %s FOR SHARE"
        ((log_id, secret),) = connection.execute(asked, (self._id,)).fetchall()
        asked = "SELECT reason, ranges, detail, origin_zone, since_unix_ms FROM gap WHERE buffer_id = %s ORDER BY id"
        gaps = [
            GapSet(GapReason(reason), RangeSet.decode(ranges), *more)
            for reason, ranges, *more in connection.execute(asked, (self._id,))
        ]
        ((count, size, last),) = connection.execute(_FOUND, (self._id, self._id)).fetchall()
        return BufferFound(bytes(log_id), bytes(secret), self._head(connection), gaps, count, size, last)

    def _head(self, connection: Connection) -> BufferHead:
        """Read the row of the buffer, while it is ours."""
        row = connection.execute(f"SELECT epoch, {_HEAD} FROM buffer WHERE id = %s", (self._id,)).fetchone()
        if row is None or row[0] != self._database.epoch:
            raise StorageTaken(f"another node has taken over {self._place}")
        start, end, used_bytes, keys, newest_unix_ms, chain = row[1:]
        return BufferHead(start, end, used_bytes, keys, newest_unix_ms, bytes(chain))

    # Changing.

    def commit(self, change: Change) -> bool:
        """Make a change in one transaction; an append alone is one statement."""
        return self._database.run(
            f"writing {self._place}",
            lambda connection, again: self._committed(connection, again, change),
            changes=True,
        )

    def _committed(self, connection: Connection, again: bool, change: Change) -> bool:
        if change.frame is not None and not change.aside and not again:
            return self._appended(connection, change, change.frame)
        with connection.transaction():
            self._database.check_epoch(connection)
            if again and self._was_made(connection, change):
                return True
            self._keep_beside(connection, change)
            if change.frame is not None:
                return self._appended(connection, change, change.frame)
            if change.after != change.before:
                self._move(connection, change)
        return True

    def _was_made(self, connection: Connection, change: Change) -> bool:
        """Tell whether the commit was the last thing that a lost connection did, behind it if it is still under way.

        Its wait for a synchronous standby may have been cut short. The locks that are taken here are written to the
        server's log: the commit of this transaction waits for the standby, with all that was committed before.
        """
        connection.execute("SELECT FROM buffer WHERE id = %s FOR UPDATE", (self._id,))
        return change.after != change.before and self._head(connection) == change.after

    def _appended(self, connection: Connection, change: Change, new: NewFrame) -> bool:
        frame = new.row
        values = {
            "buffer": self._id, "epoch": self._database.epoch, "base": Int8(frame.base), "count": Int8(frame.count),
            "now": Int8(frame.appended_at_unix_ms), "before": frame.chain_before, "chain": change.after.chain,
            "size": Int8(len(frame.content)), "content": frame.content, "unsure": new.only_if_new,
            "hashes": Int8Array(new.hashes), "offsets": Int8Array(new.offsets),
        }  # fmt: skip
        rows = connection.execute(_APPEND, values, binary=True).fetchall()
        if not rows:
            raise touched(self._place, self._head(connection), change.before)
        return rows[0][0] is None

    def _move(self, connection: Connection, change: Change) -> None:
        before = change.before
        values = (*change.after, self._id, self._database.epoch, before.start, before.end, before.keys)
        if connection.execute(_MOVE, values).rowcount != 1:
            raise touched(self._place, self._head(connection), before)

    def _keep_beside(self, connection: Connection, change: Change) -> None:
        with connection.cursor() as cursor:
            rows = [(self._id, row.id, row.same, row.size_bytes, row.head, row.fact) for row in change.aside]
            cursor.executemany("INSERT INTO aside VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING", rows)
        if (released := change.released) is not None:
            connection.execute("DELETE FROM aside WHERE buffer_id = %s AND id = %s", (self._id, released.id))
            row = (self._id, released.id, released.reason, released.at_unix_ms)
            connection.execute("INSERT INTO released VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING", row)
        if change.gaps_anew:
            connection.execute("DELETE FROM gap WHERE buffer_id = %s", (self._id,))
        for gap in change.gaps:
            connection.execute(
                "INSERT INTO gap (buffer_id, reason, detail, origin_zone, since_unix_ms, ranges) "
                "VALUES (%s, %s, %s, %s, %s, %s)",
                (self._id, str(gap.reason), gap.detail, gap.origin_zone, gap.since_unix_ms, gap.ranges.encode()),
            )
        if change.departed is not None:
            self._depart(connection, change.departed)
        if change.latest is not None:
            connection.execute(
                "INSERT INTO latest VALUES (%s, %s) ON CONFLICT (buffer_id) DO UPDATE SET entries = excluded.entries",
                (self._id, change.latest),
            )
        if change.forgotten is not None:
            self._forget(connection, change.forgotten)

    def _depart(self, connection: Connection, going: DepartedRange) -> None:
        kept = going.kept
        row = (
            self._id, kept.first, kept.last, going.newest_unix_ms, kept.chain_before, kept.chain_after,
            kept.range_digest, going.keys,
        )  # fmt: skip
        connection.execute("INSERT INTO departed VALUES (%s, %s, %s, %s, %s, %s, %s, %s)", row)
        asked = "DELETE FROM frame WHERE buffer_id = %s AND base BETWEEN %s AND %s"
        connection.execute(asked, (self._id, kept.first, kept.last))

    def _forget(self, connection: Connection, keys: ForgottenKeys) -> None:
        connection.execute(
            "DELETE FROM key USING unnest(%s::bigint[], %s::bigint[]) AS old(hash, at) "
            "WHERE key.buffer_id = %s AND key.hash = old.hash AND key.at = old.at",
            (Int8Array(keys.hashes), Int8Array(keys.offsets), self._id),
        )
        connection.execute(
            "UPDATE departed SET keys = NULL WHERE buffer_id = %s AND first = %s", (self._id, keys.first)
        )

    # Reading.

    def known(self, hashes: np.ndarray) -> np.ndarray:
        """Look hashes up in the table of keys."""
        rows = self._rows(
            "SELECT hash, at FROM key WHERE buffer_id = %s AND hash = ANY(%s)", (self._id, Int8Array(hashes))
        )
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    def infos(self, at: int, most: int) -> list[FrameInfo]:
        """Read what the rows of frames say beside their content."""
        return [FrameInfo(*row) for row in self._rows(_INFOS, {"buffer": self._id, "at": at, "most": most})]

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Read frames that follow each other."""
        asked = {"buffer": self._id, "at": at, "until": until, "most": most, "bytes": PAGE_BYTES}
        return [FrameRow(*row) for row in self._rows(_PAGE, asked)]

    def holding(self, offsets: np.ndarray) -> list[FrameRow]:
        """Read the frames that hold offsets: first which they are, then as many as may be read at once."""
        bases: list[int] = []
        size = 0
        for base, size_bytes in self._rows(_HOLDING, (Int8Array(offsets), self._id)):
            if bases and size + size_bytes > PAGE_BYTES:
                break
            bases.append(base)
            size += size_bytes
        wanted = Int8Array(np.array(bases, dtype=np.int64))
        return [FrameRow(*row) for row in self._rows(_CONTENT, (self._id, wanted))] if bases else []

    def keys_holding(self, offsets: np.ndarray) -> list[KeptKeys]:
        """Read the keys of ranges that left."""
        asked = {"buffer": self._id, "offsets": Int8Array(offsets), "bytes": PAGE_BYTES}
        return [KeptKeys(*row) for row in self._rows(_KEYS, asked)]

    def oldest_keys(self, before_unix_ms: int) -> KeptKeys | None:
        """Read the keys that are to be forgotten next; who was overtaken is told so, also when there are none."""
        asked = (
            "SELECT first, last, keys FROM departed WHERE buffer_id = %s AND keys IS NOT NULL AND newest_unix_ms < %s "
            "ORDER BY first LIMIT 1"
        )
        row = self._database.change(
            f"reading {self._place}",
            lambda connection: connection.execute(asked, (self._id, before_unix_ms), binary=True).fetchone(),
        )
        return KeptKeys(*row) if row is not None else None

    def history(self, heads: Sequence[bytes]) -> tuple[list[KeptRange], Mapping[bytes, int]]:
        """Read what stays of what left, and where chain values are."""
        asked = (
            "SELECT first, last, range_digest, chain_before, chain_after FROM departed WHERE buffer_id = %s "
            "ORDER BY first"
        )
        kept = [KeptRange(*row) for row in self._rows(asked, (self._id,))]
        asked = "SELECT chain_before, base FROM frame WHERE buffer_id = %s AND chain_before = ANY(%s)"
        return kept, dict(self._rows(asked, (self._id, list(heads)))) if heads else {}

    def latest(self) -> bytes | None:
        """Read the newest entries of what left."""
        rows = self._rows("SELECT entries FROM latest WHERE buffer_id = %s", (self._id,))
        return bytes(rows[0][0]) if rows else None

    def aside(
        self, after: int | None, limit: int, *, newest_first: bool = False, same: Sequence[int] | None = None
    ) -> list[AsideRow]:
        """Read refused facts."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        only = "" if same is None else "AND same = ANY(%(same)s)"
        asked = f"""
        SELECT id, same, head, fact FROM aside
        WHERE buffer_id = %(buffer)s AND (%(after)s::bigint IS NULL OR id {sign} %(after)s::bigint) {only}
        ORDER BY id {order} LIMIT %(limit)s
        """
        hashes = Int8Array(np.array(same or [], dtype=np.int64))
        values = {"buffer": self._id, "after": after, "limit": limit, "same": hashes}
        return [AsideRow(*row) for row in self._rows(asked, values)]


def chain_breaks(connection: Connection) -> Iterator[str]:
    """Read every frame of a zone, and say where one is not what was written, or does not follow the one before it."""
    asked = "SELECT id, stream, kind, log_id, chain, end_offset FROM buffer ORDER BY stream, kind"
    for id_, stream, kind, log_id, head, end in connection.execute(asked, binary=True).fetchall():
        before = connection.execute(
            "SELECT last + 1, chain_after FROM departed WHERE buffer_id = %s ORDER BY first DESC LIMIT 1", (id_,)
        ).fetchone()
        at, chain = (int(before[0]), bytes(before[1])) if before is not None else (0, genesis(log_id))
        page = {"buffer": id_, "until": end, "most": PAGE_FRAMES, "bytes": PAGE_BYTES}
        while frames := [FrameRow(*row) for row in connection.execute(_PAGE, {**page, "at": at}, binary=True)]:
            for frame in frames:
                if (frame.base, frame.chain_before) != (at, chain):
                    yield f"{stream}/{kind}: the frame at {frame.base} does not follow what is before offset {at}"
                try:
                    entries_in(frame, log_id, Buffer(kind))
                except Damaged as damage:
                    yield f"{stream}/{kind}: the frame at {frame.base}: {damage}"
                at, chain = frame.end, chain_behind(frame)
        if (at, chain) != (end, head):
            yield f"{stream}/{kind}: the last frame is not the one that the row of the buffer names"
