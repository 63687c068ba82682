"""What one buffer writes: facts, removals, records and refused facts, each as a change that is there whole or not.

The row of the buffer orders all of it. An append moves its end from where this writer knows it to be, under the epoch
that it opened the zone with; a row that says otherwise is somebody else's, and then nothing is written.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg.types.numeric import Int8

from bsfg.batch import EntryBatch, FactBatch
from bsfg.clock import JumpGuardedClock
from bsfg.digest import KeptRange, KeyHash, RangeDigest
from bsfg.errors import BufferFull, StorageTaken
from bsfg.gaps import Gap, GapBook, GapRecord, GapSet, RangeSet
from bsfg.latest import LatestEntries
from bsfg.ports import Buffer, Clock, Quarantined, Receipt, Result
from bsfg.retention import ConsumerStanding, GapReason, Piece, Policy, Removal, make_room
from bsfg.stores.postgres.database import Connection, Database, Int8Array
from bsfg.stores.postgres.frames import FrameReader, StoredFrame, read_keys
from bsfg.stores.postgres.quarantine import AsideRow, PostgresQuarantine
from bsfg.stores.shared.frame import encode_frame, genesis
from bsfg.stores.shared.judging import (
    KEY_SCHEMA,
    AppendItem,
    BatchJudgement,
    as_facts,
    judge,
    lost_among,
    payload_of,
    receipts_of,
    refused_of,
)

_INSERTED = int(Result.INSERTED)
_COMPACT_ROWS = 256
_HEAD = "start_offset, end_offset, used_bytes, keys, newest_unix_ms, chain"

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


@dataclass(frozen=True, slots=True)
class AppendGroup:
    """What several callers append together, and whom to ask when room is short."""

    items: Sequence[AppendItem]
    batch: FactBatch
    hashes: np.ndarray
    now_unix_ms: int
    standing: Callable[[], ConsumerStanding]


@dataclass(slots=True)
class BufferRow:
    """What the row of a buffer says: its extent, size, keys, newest time and chain."""

    start: int
    end: int
    used_bytes: int
    keys: int
    newest_unix_ms: int
    chain: bytes


class PostgresWriter:
    """The state and the steps of one buffer; one thread at a time runs the steps, any may read the state."""

    def __init__(self, database: Database, stream: str, kind: Buffer, policy: Policy, clock: Clock) -> None:
        self._database, self.stream, self.kind, self.policy, self.clock = database, stream, kind, policy, clock
        self.place = f"{stream}/{kind}"
        self.steady = JumpGuardedClock.begun(clock)
        self.book = GapBook()
        self.problems: list[str] = []
        self.id, self.log_id, secret = database.change(f"opening {self.place}", self._made)
        self._key_hash = KeyHash(secret)
        self.reader = FrameReader(self.id, self.log_id, kind, self._damaged)
        self._seen: list[GapRecord] = []
        self.quarantine = PostgresQuarantine(database, self.id, self.place, policy.quarantine_bytes, clock)
        self.head: BufferRow
        self._database.run(f"opening {self.place}", self._loaded)

    # Opening.

    def _made(self, connection: Connection) -> tuple[int, bytes, bytes]:
        log_id, secret = secrets.token_bytes(16), secrets.token_bytes(32)
        row = (self.stream, str(self.kind), log_id, secret, self._database.epoch, genesis(log_id))
        connection.execute(
            "INSERT INTO buffer (stream, kind, log_id, secret, epoch, chain) VALUES (%s, %s, %s, %s, %s, %s) "
            "ON CONFLICT DO NOTHING",
            row,
        )
        asked = "SELECT id, log_id, secret FROM buffer WHERE stream = %s AND kind = %s"
        found = connection.execute(asked, row[:2]).fetchone()
        assert found is not None
        return int(found[0]), bytes(found[1]), bytes(found[2])

    def _loaded(self, connection: Connection, again: bool) -> None:
        self.head = self._row(connection)
        rows = connection.execute(
            "SELECT reason, detail, origin_zone, since_unix_ms, ranges FROM gap WHERE buffer_id = %s ORDER BY id",
            (self.id,),
        ).fetchall()
        for reason, detail, zone, since_unix_ms, ranges in rows:
            self._take_gaps([GapSet(GapReason(reason), RangeSet.decode(ranges), detail, zone, since_unix_ms)])
        if len(rows) > _COMPACT_ROWS + 4 * len(self.book.sets()):
            self._compact_gaps(connection)

    def _row(self, connection: Connection) -> BufferRow:
        """Read the row of the buffer, while it is ours."""
        asked = f"SELECT epoch, {_HEAD} FROM buffer WHERE id = %s"
        row = connection.execute(asked, (self.id,)).fetchone()
        if row is None or row[0] != self._database.epoch:
            raise StorageTaken(f"another node has taken over {self.place}")
        start, end, used_bytes, keys, newest, chain = row[1:]
        return BufferRow(start, end, used_bytes, keys, newest, bytes(chain))

    def rows(self, asked: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        """Read rows of the tables."""
        return self._database.rows(f"reading {self.place}", asked, values)

    def hash_of(self, zone: str, message_id: str) -> int:
        """Hash a key as the table of keys has it."""
        return int(np.uint64(self._key_hash.of_one(zone, message_id)).astype(np.int64))

    # Appending.

    def append_group(self, items: Sequence[AppendItem], standing: Callable[[], ConsumerStanding]) -> list[Receipt]:
        """Store the batches of several callers with one frame and one commit; ``standing`` is asked if room is short.

        Most batches are new throughout: they are written at once, unless a key of theirs may be known.
        """
        batch = FactBatch.concat([item.batch for item in items])
        hashes = self._key_hash.of_batch(batch)
        order = np.argsort(hashes, kind="stable")
        ranked = hashes[order]
        now = max(self.steady.now_unix_ms(), self.head.newest_unix_ms)
        group = AppendGroup(items, batch, hashes, now, standing)
        verdict = BatchJudgement(np.zeros(len(batch), dtype=np.int8), np.full(len(batch), -1, dtype=np.int64))
        if len(batch) and not (ranked[1:] == ranked[:-1]).any() and self._store(group, order, verdict, unsure=True):
            return receipts_of(items, verdict, self.head.chain, now)
        verdict = self._database.run(
            f"looking for keys in {self.place}",
            lambda connection, again: self._judged(connection, group, order),
        )
        fresh = order[verdict.results[order] == _INSERTED]
        verdict.offsets[np.sort(fresh)] = np.arange(self.head.end, self.head.end + len(fresh))
        for row, earlier in verdict.repeats_of.items():
            verdict.offsets[row] = verdict.offsets[earlier]
        refused = refused_of(batch, verdict, now, items, forward=self.kind == Buffer.FORWARD)
        if len(fresh) or refused:
            self._store(group, fresh, verdict, refused=refused)
        return receipts_of(items, verdict, self.head.chain, now)

    def _judged(self, connection: Connection, group: AppendGroup, order: np.ndarray) -> BatchJudgement:
        def candidates(ranked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            asked = "SELECT hash, at FROM key WHERE buffer_id = %s AND hash = ANY(%s)"
            unique = Int8Array(np.unique(ranked.astype(np.int64)))
            known = np.array(connection.execute(asked, (self.id, unique)).fetchall(), dtype=np.int64).reshape(-1, 2)
            firsts = np.searchsorted(ranked, known[:, 0].astype(np.uint64))
            counts = np.searchsorted(ranked, known[:, 0].astype(np.uint64), side="right") - firsts
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            return np.repeat(firsts, counts) + within, np.repeat(known[:, 1], counts)

        return judge(group.batch, group.hashes, order, candidates, self.reader.fetch(connection), self._gone)

    def _gone(self, offsets: np.ndarray) -> np.ndarray:
        """Tell which offsets, whose facts were just looked for in vain, are on record as lost: on record they are."""
        self.record_seen()
        return lost_among(offsets, self.book.own())

    def _store(
        self,
        group: AppendGroup,
        order: np.ndarray,
        verdict: BatchJudgement,
        *,
        unsure: bool = False,
        refused: Sequence[Quarantined] = (),
    ) -> bool:
        """Write the rows of a batch that ``order`` names, and what is refused with them, in one transaction.

        ``unsure`` says that no key of them may be known: else nothing is written, nor is room made for what may be a
        repeat. Tells whether it was.
        """
        fresh, head = np.sort(order) if len(order) > 1 else order, self.head
        verdict.offsets[fresh] = np.arange(head.end, head.end + len(fresh))
        parameters: dict[str, Any] = {}
        if len(fresh):
            content, chain = self._frame(group, fresh)
            if unsure and head.used_bytes + len(content) > self.policy.capacity_bytes:
                return False
            self._make_room(len(content), group.standing)
            head = self.head
            parameters = {
                "buffer": self.id, "epoch": self._database.epoch, "base": Int8(head.end), "count": Int8(len(fresh)),
                "now": Int8(group.now_unix_ms), "before": head.chain, "chain": chain, "size": Int8(len(content)),
                "content": content, "unsure": unsure,
                "hashes": Int8Array(group.hashes[order].astype(np.int64)), "offsets": Int8Array(verdict.offsets[order]),
            }  # fmt: skip
        aside = self.quarantine.rows_of(refused)
        done = self._database.run(
            f"writing {self.place}",
            lambda connection, again: self._written(connection, again, parameters, aside),
            changes=True,
        )
        if not done:
            return False
        self.quarantine.added(aside)
        if len(fresh):
            used, keys = head.used_bytes + len(content), head.keys + len(fresh)
            self.head = BufferRow(head.start, head.end + len(fresh), used, keys, group.now_unix_ms, chain)
        return True

    def _frame(self, group: AppendGroup, fresh: np.ndarray) -> tuple[bytes, bytes]:
        """Write some rows of a batch as the next frame; give its bytes, and the chain value after it."""
        chosen = group.batch if len(fresh) == len(group.batch) else group.batch.take(fresh)
        form, payload = payload_of(chosen, fresh, group.items, forward=self.kind == Buffer.FORWARD)
        parts, chain = encode_frame(
            payload,
            base=self.head.end,
            count=len(fresh),
            appended_at_unix_ms=group.now_unix_ms,
            log_id=self.log_id,
            chain_before=self.head.chain,
            form=form,
        )
        return b"".join(parts[:2]), chain

    def _written(
        self, connection: Connection, again: bool, parameters: dict[str, Any], aside: Sequence[AsideRow]
    ) -> bool:
        """Write a frame, and what is refused; tell whether it was, since no key that was in doubt is known."""
        # The commit may have been the last thing that a lost connection did.
        if again and parameters and self._row(connection).chain == parameters["chain"]:
            return True
        if not aside:
            return not parameters or self._moved(connection, parameters)
        with connection.transaction():
            self._database.check_epoch(connection)
            self.quarantine.insert(connection, aside)
            return not parameters or self._moved(connection, parameters)

    def _moved(self, connection: Connection, parameters: dict[str, Any]) -> bool:
        rows = connection.execute(_APPEND, parameters, binary=True).fetchall()
        if not rows:
            there = self._row(connection)
            if there.chain == parameters["chain"]:
                # A connection that was lost had its commit under way, and this one has just waited for it.
                return True
            # What is known here is not taken from there: offsets that were given once must not be given again.
            raise StorageTaken(
                f"the row of {self.place} ends at {there.end}, not at {self.head.end}: somebody changed it",
                hint="The tables were restored or touched while the node ran: restart it, and reconcile its links.",
            )
        return rows[0][0] is None

    # Room.

    def _make_room(self, incoming_bytes: int, standing: Callable[[], ConsumerStanding]) -> None:
        used, capacity = self.head.used_bytes, self.policy.capacity_bytes
        if used + incoming_bytes <= capacity:
            return
        pieces = self._pieces(enough_bytes=used + incoming_bytes - capacity)
        removal = make_room(pieces, self.policy, standing(), used_bytes=used, incoming_bytes=incoming_bytes)
        if removal is None:
            raise BufferFull(f"{self.place} holds {used} of {capacity} bytes", used_bytes=used, capacity_bytes=capacity)
        while self.depart(removal):
            pass

    def _pieces(self, *, enough_bytes: int | None = None, most: int = 512) -> list[Piece]:
        """List the oldest frames: so many, or as many as make up some bytes."""
        pieces: list[Piece] = []
        asked = (
            "SELECT base, count, size_bytes, appended_at_unix_ms FROM frame WHERE buffer_id = %s AND base > %s "
            "ORDER BY base LIMIT %s"
        )
        at, size = -1, 0
        while True:
            rows = self.rows(asked, (self.id, at, most))
            for base, count, size_bytes, newest in rows:
                at, size = base, size + size_bytes
                pieces.append(Piece(max(base, self.head.start), base + count - 1, size_bytes, newest))
            if enough_bytes is None or len(rows) < most or size >= enough_bytes:
                return pieces

    def oldest(self) -> list[Piece]:
        """List the oldest frames, as many as are judged at once."""
        return self._pieces()

    def depart(self, removal: Removal) -> bool:
        """Let a bounded part of what a removal allows go; tell whether there is more of it."""
        if removal.before <= self.head.start and not removal.gaps:
            return False
        frames = self._database.run(
            f"reading {self.place}",
            lambda connection, again: self.reader.page(connection, 0, removal.before),
        )
        going = [frame for frame in frames if frame.end <= removal.before]
        # A page that was full, or ended at a bound of bytes, may not be all of it.
        more = bool(going) and self._next_last(going[-1].end) < removal.before
        if more:
            removal = removal.up_to(going[-1].end)
        self._depart(removal, going)
        return more

    def _next_last(self, offset: int) -> int:
        """Give the last offset of the frame that follows, the end when there is none."""
        asked = "SELECT base + count - 1 FROM frame WHERE buffer_id = %s AND base >= %s ORDER BY base LIMIT 1"
        rows = self.rows(asked, (self.id, offset))
        return int(rows[0][0]) if rows else self.head.end

    def _depart(self, removal: Removal, going: Sequence[StoredFrame]) -> None:
        now = self.clock.now_unix_ms()
        entries = [(frame, self.reader.decoded(frame)) for frame in going]
        gaps: list[Gap] = [GapRecord(gap.first, gap.last, gap.reason, now) for gap in removal.gaps]
        fresh = self.book.missing([*gaps, *self._seen])
        readable = [each for _, each in entries if each is not None]
        row = _departed_row(self.id, entries) if going else None
        latest = self._latest(readable) if self._latest_most and readable else None
        size = sum(len(frame.content) for frame in going)
        start = max(removal.before, self.head.start)

        def change(connection: Connection) -> None:
            connection.execute(
                "UPDATE buffer SET start_offset = %s, used_bytes = used_bytes - %s WHERE id = %s",
                (start, size, self.id),
            )
            self._insert_gaps(connection, fresh)
            if row is not None:
                connection.execute("INSERT INTO departed VALUES (%s, %s, %s, %s, %s, %s, %s, %s)", row)
                asked = (self.id, going[0].base, going[-1].base)
                connection.execute("DELETE FROM frame WHERE buffer_id = %s AND base BETWEEN %s AND %s", asked)
            if latest is not None:
                connection.execute(
                    "INSERT INTO latest VALUES (%s, %s) ON CONFLICT (buffer_id) DO UPDATE SET entries = %s",
                    (self.id, latest, latest),
                )

        self._change_once(f"removing from {self.place}", change, start)
        self._take_gaps(fresh)
        self._seen = []
        self.head = replace(self.head, start=start, used_bytes=self.head.used_bytes - size)

    def _change_once(self, doing: str, change: Callable[[Connection], None], start: int) -> None:
        """Make a removal that must not be made twice: it is done when the row says so."""

        def work(connection: Connection, again: bool) -> None:
            with connection.transaction():
                self._database.check_epoch(connection)
                row = connection.execute("SELECT start_offset FROM buffer WHERE id = %s FOR UPDATE", (self.id,))
                there = row.fetchone()
                if not again or there is None or there[0] < start:
                    change(connection)

        self._database.run(doing, work, changes=True)

    @property
    def _latest_most(self) -> int:
        """How many subjects and predicates keep their newest entry when it leaves; 0 when none do."""
        return self.policy.latest_most if self.policy.keep_latest and self.kind == Buffer.FORWARD else 0

    def _latest(self, entries: Sequence[EntryBatch]) -> bytes:
        latest = LatestEntries(self.kept_latest(), self._latest_most)
        for each in entries:
            latest.add(each)
        return bytes(latest.result().to_ipc())

    def kept_latest(self) -> EntryBatch:
        """Read the newest entries of what has left."""
        rows = self.rows("SELECT entries FROM latest WHERE buffer_id = %s", (self.id,))
        return EntryBatch(EntryBatch.from_ipc(rows[0][0]).record_batch, sealed=True) if rows else EntryBatch.empty()

    def forget_keys(self, as_of_unix_ms: int) -> bool:
        """Forget the keys of one part of what left that is beyond the horizon; tell whether there may be more."""
        limit = as_of_unix_ms - 1000 * self.policy.key_horizon_seconds
        asked = (
            "SELECT first, keys FROM departed WHERE buffer_id = %s AND keys IS NOT NULL AND newest_unix_ms < %s "
            "ORDER BY first LIMIT 1"
        )

        def change(connection: Connection) -> int | None:
            row = connection.execute(asked, (self.id, limit), binary=True).fetchone()
            if row is None:
                return None
            keys = read_keys(row[1])
            facts, offsets = as_facts(keys), keys.column("offset").to_numpy()
            hashes = self._key_hash.of(facts.column("from_zone"), facts.column("message_id")).astype(np.int64)
            connection.execute(
                "DELETE FROM key USING unnest(%s::bigint[], %s::bigint[]) AS old(hash, at) "
                "WHERE key.buffer_id = %s AND key.hash = old.hash AND key.at = old.at",
                (Int8Array(hashes), Int8Array(offsets), self.id),
            )
            connection.execute("UPDATE departed SET keys = NULL WHERE buffer_id = %s AND first = %s", (self.id, row[0]))
            counted = "UPDATE buffer SET keys = keys - %s WHERE id = %s RETURNING keys"
            left = connection.execute(counted, (len(offsets), self.id)).fetchone()
            return int(left[0]) if left is not None else None

        left = self._database.change(f"forgetting keys of {self.place}", change)
        if left is not None:
            self.head = replace(self.head, keys=left)
        return left is not None

    def kept_ranges(self) -> list[KeptRange]:
        """Give what was kept of what left."""
        asked = (
            "SELECT first, last, range_digest, chain_before, chain_after FROM departed WHERE buffer_id = %s "
            "ORDER BY first"
        )
        return [KeptRange(*row) for row in self.rows(asked, (self.id,))]

    # Records.

    def _damaged(self, first: int, last: int, why: str, reason: GapReason) -> GapRecord:
        """Take note of what cannot be read; it is recorded as soon as the writer has its turn."""
        gap = GapRecord(first, last, reason, self.clock.now_unix_ms(), why)
        if self.book.missing([gap]) and all((each.first, each.last) != (first, last) for each in self._seen):
            self._seen.append(gap)
            self.problems.append(f"{self.place}: entries {first} to {last}: {why}")
        return gap

    @property
    def has_seen(self) -> bool:
        """Whether damage waits to be recorded."""
        return bool(self._seen)

    def record_seen(self) -> None:
        """Record the damage that was come across."""
        seen, self._seen = self._seen, []
        # As far as no record accounts for it: another time the same damage has another time and words.
        known = [(gap.first, gap.last) for gap in self.book.own() if gap.reason in (GapReason.DAMAGED, GapReason.LOST)]
        news = [gap for gap in seen if not any(first <= gap.first and gap.last <= last for first, last in known)]
        if news:
            self.add_gaps(news)

    def add_gaps(self, gaps: Sequence[Gap]) -> None:
        """Record gaps durably; those already known are left out."""
        fresh = self.book.missing(gaps)
        if fresh:
            self._database.change(
                f"recording gaps of {self.place}", lambda connection: self._insert_gaps(connection, fresh)
            )
            self._take_gaps(fresh)

    def _insert_gaps(self, connection: Connection, gaps: Sequence[GapSet]) -> None:
        for gap in gaps:
            row = (self.id, str(gap.reason), gap.detail, gap.origin_zone, gap.since_unix_ms, gap.ranges.encode())
            connection.execute(
                "INSERT INTO gap (buffer_id, reason, detail, origin_zone, since_unix_ms, ranges) "
                "VALUES (%s, %s, %s, %s, %s, %s)",
                row,
            )

    def _take_gaps(self, gaps: Sequence[GapSet]) -> None:
        for gap in self.book.missing(gaps):
            self.book.add(gap)

    def _compact_gaps(self, connection: Connection) -> None:
        """Write one row per kind in the place of many."""
        with connection.transaction():
            self._database.check_epoch(connection)
            connection.execute("DELETE FROM gap WHERE buffer_id = %s", (self.id,))
            self._insert_gaps(connection, self.book.sets())


def _departed_row(buffer_id: int, frames: Sequence[tuple[StoredFrame, EntryBatch | None]]) -> tuple[object, ...]:
    """Give what stays of frames that leave together: the digest over their entries, the chain, and their keys."""
    digest = RangeDigest()
    parts = [pa.RecordBatch.from_pylist([], schema=KEY_SCHEMA)]
    for _, entries in frames:
        if entries is not None:
            digest.add(entries)
            parts.append(entries.record_batch.select(KEY_SCHEMA.names))
    first, last = frames[0][0], frames[-1][0]
    return (
        buffer_id,
        first.base,
        last.end - 1,
        last.appended_at_unix_ms,
        first.chain_before,
        last.chain_after,
        digest.hexdigest(),
        pa.concat_batches(parts).serialize().to_pybytes(),
    )
