"""Refused facts in a table, kept until an operator decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import orjson

from bsfg.errors import InvalidArgument, QuarantineFull
from bsfg.ports import Clock, Quarantined
from bsfg.stores.postgres.database import Connection, Database, Int8Array
from bsfg.stores.shared.judging import check_reason, identity_hash, identity_of, read_aside, told

AsideRow = tuple[int, int, int, int, str, bytes]
"""Buffer, id, hash, size, what is known of a fact, and the fact."""


class PostgresQuarantine:
    """The refused facts of one buffer; how many there are, and how large, is known without asking."""

    def __init__(self, database: Database, buffer_id: int, place: str, capacity_bytes: int, clock: Clock) -> None:
        self._database, self._id, self._place, self._clock = database, buffer_id, place, clock
        self.capacity_bytes = capacity_bytes
        self.full = False
        self._count: int
        asked = """
        SELECT count(*), coalesce(sum(size_bytes), 0)::bigint,
            greatest(max(id), (SELECT max(id) FROM released WHERE buffer_id = %s), 0)
        FROM aside WHERE buffer_id = %s
        """
        ((self._count, self.used_bytes, last),) = database.rows(f"reading {place}", asked, (buffer_id, buffer_id))
        self._next_id = last + 1

    def __len__(self) -> int:
        return self._count

    def add(self, items: Sequence[Quarantined]) -> None:
        """Keep refused facts durably, those already there left out; raises `QuarantineFull` when they do not fit."""
        rows = self.rows_of(items)
        if rows:
            self._database.change(f"setting aside in {self._place}", lambda connection: self.insert(connection, rows))
            self.added(rows)

    def rows_of(self, items: Sequence[Quarantined]) -> list[AsideRow]:
        """Give the rows of refused facts that are not there yet, and refuse more than fits."""
        identities = {identity_of(item): item for item in reversed(items)}
        if not identities:
            return []
        hashed = {identity: _signed(identity_hash(identity)) for identity in identities}
        there = self._database.rows(
            f"reading {self._place}",
            "SELECT head, fact FROM aside WHERE buffer_id = %s AND same = ANY(%s)",
            (self._id, Int8Array(np.array(list(hashed.values()), dtype=np.int64))),
        )
        known = {identity_of(read_aside(orjson.loads(head), fact)) for head, fact in there}
        rows: list[AsideRow] = []
        for identity in reversed(identities):
            if identity not in known:
                item = replace(identities[identity], id=self._next_id + len(rows))
                head, fact = told(item, identity_hash(identity))
                text = orjson.dumps(head).decode()
                rows.append((self._id, item.id, hashed[identity], len(text) + len(fact), text, fact))
        size = sum(row[3] for row in rows)
        self.full = bool(rows) and self.used_bytes + size > self.capacity_bytes
        if self.full:
            raise QuarantineFull(
                f"{len(rows)} refused facts of {size} bytes do not fit into quarantine, which holds "
                f"{self.used_bytes} of {self.capacity_bytes} bytes",
                used_bytes=self.used_bytes,
                capacity_bytes=self.capacity_bytes,
            )
        return rows

    def insert(self, connection: Connection, rows: Sequence[AsideRow]) -> None:
        """Write rows as a part of what the connection does; `added` follows when that is durable."""
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO aside VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING", rows)

    def added(self, rows: Sequence[AsideRow]) -> None:
        """Count rows that are durable."""
        self._count += len(rows)
        self.used_bytes += sum(row[3] for row in rows)
        self._next_id += len(rows)

    def page(self, after: int | None, limit: int, newest_first: bool = False) -> list[Quarantined]:
        """Read the facts that follow an id, in the order in which they came or the other way round."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        asked = f"""
        SELECT head, fact FROM aside WHERE buffer_id = %s AND (%s::bigint IS NULL OR id {sign} %s::bigint)
        ORDER BY id {order} LIMIT %s
        """
        rows = self._database.rows(f"reading {self._place}", asked, (self._id, after, after, limit))
        return [read_aside(orjson.loads(head), fact) for head, fact in rows]

    def get(self, id_: int) -> Quarantined | None:
        """Read one fact; None when it is not there."""
        found = self.page(id_ - 1, 1)
        return found[0] if found and found[0].id == id_ else None

    def release(self, id_: int, reason: str) -> None:
        """Drop a refused fact, leaving a durable note of it."""
        check_reason(reason)
        now = self._clock.now_unix_ms()

        def change(connection: Connection) -> int | None:
            asked = "DELETE FROM aside WHERE buffer_id = %s AND id = %s RETURNING size_bytes"
            row = connection.execute(asked, (self._id, id_)).fetchone()
            if row is not None:
                connection.execute("INSERT INTO released VALUES (%s, %s, %s, %s)", (self._id, id_, reason, now))
            return int(row[0]) if row is not None else None

        size = self._database.change(f"releasing from {self._place}", change)
        if size is None:
            raise InvalidArgument(f"nothing is quarantined under id {id_}", id=id_)
        self._count -= 1
        self.used_bytes -= size
        self.full = False


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
