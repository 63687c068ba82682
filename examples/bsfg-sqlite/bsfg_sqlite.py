"""The facts of a zone in one SQLite file: the port of frames in another database, as a package of its own.

`[storage] backend = "sqlite"` chooses it. The option ``file`` of ``[storage.options]`` names the file inside the data
folder. SQLite syncs its log at every commit (WAL, synchronous = FULL), and what does not let it is refused.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from bsfg.digest import KeptRange, Sha256
from bsfg.errors import (
    BsfgError,
    DiskFull,
    HasherMismatch,
    OutcomeUnknown,
    StorageBusy,
    StorageClosed,
    StorageFailed,
    StorageForeign,
    StorageReadOnly,
    StorageTaken,
    StorageUnsafe,
)
from bsfg.gaps import GapSet, RangeSet
from bsfg.ports import Buffer, Capabilities, Storage, StorageRequest
from bsfg.retention import GapReason
from bsfg.stores.shared.cursors import ConsumerCursor, as_document, from_document
from bsfg.stores.shared.keeper import (
    PAGE_BYTES,
    AsideRow,
    BufferFound,
    BufferHead,
    BufferKeeper,
    Change,
    FrameInfo,
    FrameRow,
    KeptKeys,
    NewBuffer,
    ZoneKeeper,
    touched,
)
from bsfg.stores.shared.storage import FramedStorage

PATIENCE_SECONDS = 20.0

TABLES = """
CREATE TABLE IF NOT EXISTS zone (name TEXT NOT NULL, hasher TEXT NOT NULL, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS buffer (
    id INTEGER PRIMARY KEY, stream TEXT NOT NULL, kind TEXT NOT NULL, log_id BLOB NOT NULL, secret BLOB NOT NULL,
    start INTEGER NOT NULL, end INTEGER NOT NULL, used_bytes INTEGER NOT NULL, keys INTEGER NOT NULL,
    newest_unix_ms INTEGER NOT NULL, chain BLOB NOT NULL, latest BLOB, aside_last_id INTEGER NOT NULL DEFAULT 0,
    UNIQUE (stream, kind));
CREATE TABLE IF NOT EXISTS frame (
    buffer INTEGER NOT NULL, base INTEGER NOT NULL, count INTEGER NOT NULL, appended_at_unix_ms INTEGER NOT NULL,
    chain_before BLOB NOT NULL, size_bytes INTEGER NOT NULL, content BLOB NOT NULL, UNIQUE (buffer, base));
CREATE TABLE IF NOT EXISTS key (
    buffer INTEGER NOT NULL, hash INTEGER NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (buffer, hash, at)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS departed (
    buffer INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, newest_unix_ms INTEGER NOT NULL,
    range_digest TEXT NOT NULL, chain_before BLOB NOT NULL, chain_after BLOB NOT NULL, keys BLOB,
    UNIQUE (buffer, first));
CREATE TABLE IF NOT EXISTS gap (
    id INTEGER PRIMARY KEY, buffer INTEGER NOT NULL, reason TEXT NOT NULL, ranges BLOB NOT NULL, detail TEXT NOT NULL,
    origin_zone TEXT, since_unix_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS aside (
    buffer INTEGER NOT NULL, id INTEGER NOT NULL, same INTEGER NOT NULL, head TEXT NOT NULL, fact BLOB NOT NULL,
    UNIQUE (buffer, id));
CREATE INDEX IF NOT EXISTS aside_by_identity ON aside (buffer, same);
CREATE TABLE IF NOT EXISTS released (
    buffer INTEGER NOT NULL, id INTEGER NOT NULL, reason TEXT NOT NULL, at_unix_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS consumer (name TEXT PRIMARY KEY, document TEXT NOT NULL);
"""
HEAD = "start, end, used_bytes, keys, newest_unix_ms, chain"
FRAME = "base, count, appended_at_unix_ms, chain_before, content"
KNOWN = "SELECT hash, at FROM key WHERE buffer = ? AND hash IN (SELECT value FROM json_each(?))"
SINCE = "buffer = ?1 AND base >= coalesce((SELECT max(base) FROM frame WHERE buffer = ?1 AND base <= ?2), ?2)"


def translated(error: sqlite3.Error, doing: str) -> BsfgError:
    """Give an error of SQLite as one of ours."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    says = f"{doing}: {error}"
    kinds = {
        sqlite3.SQLITE_FULL: DiskFull,
        sqlite3.SQLITE_BUSY: StorageBusy,
        sqlite3.SQLITE_LOCKED: StorageBusy,
        sqlite3.SQLITE_NOMEM: StorageBusy,
        sqlite3.SQLITE_READONLY: StorageReadOnly,
    }
    return kinds.get(code, StorageFailed)(says)


class SqliteZone(ZoneKeeper):
    """One file; one connection writes, and each reader has one for as long as it reads."""

    def __init__(self, path: Path, on_sync: Callable[[float], None] = lambda seconds: None) -> None:
        self.path, self._on_sync = path, on_sync
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._epoch = 0

    def connect(self) -> sqlite3.Connection:
        """Open a connection, and make sure that a commit is one."""
        connection = sqlite3.connect(
            self.path, timeout=PATIENCE_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "fullfsync = ON"):
            connection.execute(f"PRAGMA {pragma}")
        for name, wanted in (("journal_mode", "wal"), ("synchronous", 2)):
            (found,) = connection.execute(f"PRAGMA {name}").fetchone()
            if found != wanted:
                connection.close()
                raise StorageUnsafe(f"{name} of {self.path} is {found!r}", hint="Keep the file on a local disk.")
        return connection

    def claim(self, zone: str, hasher: str) -> list[tuple[str, Buffer]]:
        """Open the file, making its tables when there are none, and count up its epoch."""
        try:
            connection = self._writer = self.connect()
            connection.executescript(f"BEGIN IMMEDIATE; {TABLES} COMMIT;")
        except sqlite3.Error as error:
            raise translated(error, f"opening {self.path}") from None
        with self.writing("claiming the zone", claimed=False) as written:
            if written.execute("SELECT 1 FROM zone").fetchone() is None:
                written.execute("INSERT INTO zone VALUES (?, ?, 0)", (zone, hasher))
            asked = "UPDATE zone SET epoch = epoch + 1 RETURNING name, hasher, epoch"
            ((name, function, self._epoch),) = written.execute(asked).fetchall()
            if name != zone:
                raise StorageForeign(f"{self.path} belongs to the zone {name}, this is {zone}", zone=name)
            if function != hasher:
                raise HasherMismatch(f"{self.path} was written with {function}, not {hasher}")
            return [(stream, Buffer(kind)) for stream, kind in written.execute("SELECT stream, kind FROM buffer")]

    @contextmanager
    def writing(self, doing: str, *, claimed: bool = True) -> Iterator[sqlite3.Connection]:
        """Give the connection for a change that is there whole or not, while the zone is ours."""
        with self._lock:
            connection = self._writer
            if connection is None:
                raise StorageClosed(f"{self.path} is closed")
            try:
                connection.execute("BEGIN IMMEDIATE")
                if claimed and connection.execute("SELECT epoch FROM zone").fetchone() != (self._epoch,):
                    raise StorageTaken(f"another node has taken over {self.path}")
                yield connection
                self._commit(connection, doing)
            except sqlite3.Error as error:
                raise translated(error, doing) from None
            finally:
                with suppress(sqlite3.Error):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")

    def _commit(self, connection: sqlite3.Connection, doing: str) -> None:
        begun = time.perf_counter()
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            failure = translated(error, doing)
            if isinstance(failure, DiskFull | StorageBusy | StorageReadOnly):
                raise failure from None
            # What a sync that failed left behind nobody knows; whoever opens the file again finds out.
            self._writer = None
            connection.close()
            raise OutcomeUnknown(f"{failure.message}; the file is closed until it is opened again") from None
        self._on_sync(time.perf_counter() - begun)

    def rows(self, doing: str, asked: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Read rows beside whoever writes."""
        if self._writer is None:
            raise StorageClosed(f"{self.path} is closed")
        try:
            connection = self._idle.pop() if self._idle else self.connect()
            try:
                return connection.execute(asked, values).fetchall()
            finally:
                self._idle.append(connection)
        except sqlite3.Error as error:
            raise translated(error, doing) from None

    def buffer(self, stream: str, kind: Buffer, new: NewBuffer) -> SqliteFrames:
        """Give one buffer, made when there is none."""
        asked = f"INSERT INTO buffer (stream, kind, log_id, secret, {HEAD}) VALUES (?, ?, ?, ?, 0, 0, 0, 0, 0, ?)"
        with self.writing(f"opening {stream}/{kind}") as written:
            written.execute(f"{asked} ON CONFLICT DO NOTHING", (stream, kind, new.log_id, new.secret, new.chain))
            ((id_,),) = written.execute("SELECT id FROM buffer WHERE stream = ? AND kind = ?", (stream, kind))
        return SqliteFrames(self, id_, f"{stream}/{kind}")

    def consumers(self) -> list[ConsumerCursor]:
        """Read all consumers."""
        rows = self.rows("reading consumers", "SELECT document FROM consumer")
        return [from_document(json.loads(document)) for (document,) in rows]

    def keep_consumers(self, cursors: Sequence[ConsumerCursor]) -> None:
        """Write consumers together."""
        rows = [(cursor.spec.name, json.dumps(as_document(cursor))) for cursor in cursors]
        with self.writing("keeping consumers") as written:
            written.executemany("INSERT OR REPLACE INTO consumer VALUES (?, ?)", rows)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            writer, self._writer = self._writer, None
            for connection in (*self._idle, *([writer] if writer is not None else [])):
                connection.close()
            self._idle = []


class SqliteFrames(BufferKeeper):
    """The rows of one buffer."""

    def __init__(self, zone: SqliteZone, buffer_id: int, place: str) -> None:
        self._zone, self._id, self._place = zone, buffer_id, place

    def _rows(self, asked: str, *values: object) -> list[tuple[Any, ...]]:
        return self._zone.rows(f"reading {self._place}", asked, (self._id, *values))

    def found(self) -> BufferFound:
        """Read the row of the buffer, and what is counted beside it."""
        asked = f"SELECT log_id, secret, aside_last_id, {HEAD} FROM buffer WHERE id = ?"
        ((log_id, secret, last, *head),) = self._rows(asked)
        asked = "SELECT reason, ranges, detail, origin_zone, since_unix_ms FROM gap WHERE buffer = ? ORDER BY id"
        gaps = [GapSet(GapReason(row[0]), RangeSet.decode(row[1]), *row[2:]) for row in self._rows(asked)]
        asked = "SELECT count(*), coalesce(sum(length(head) + length(fact)), 0) FROM aside WHERE buffer = ?"
        ((count, size),) = self._rows(asked)
        return BufferFound(log_id, secret, BufferHead(*head), gaps, count, size, last)

    def commit(self, change: Change) -> bool:
        """Make a change in one transaction."""
        with self._zone.writing(f"writing {self._place}") as written:
            (head,) = written.execute(f"SELECT {HEAD} FROM buffer WHERE id = ?", (self._id,)).fetchall()
            if BufferHead(*head) != change.before:
                raise touched(self._place, BufferHead(*head), change.before)
            if (new := change.frame) is not None:
                hashes, row = new.hashes.tolist(), new.row
                if new.only_if_new and written.execute(KNOWN, (self._id, json.dumps(hashes))).fetchone():
                    return False
                frame = (row.base, row.count, row.appended_at_unix_ms, row.chain_before, len(row.content), row.content)
                written.execute("INSERT INTO frame VALUES (?, ?, ?, ?, ?, ?, ?)", (self._id, *frame))
                keys = zip(hashes, new.offsets.tolist(), strict=True)
                written.executemany("INSERT INTO key VALUES (?, ?, ?)", [(self._id, *key) for key in keys])
            self._keep_records(written, change)
            self._keep_departed(written, change)
            moved = f"UPDATE buffer SET ({HEAD}) = (?, ?, ?, ?, ?, ?) WHERE id = ?"
            written.execute(moved, (*change.after, self._id))
        return True

    def _keep_records(self, written: sqlite3.Connection, change: Change) -> None:
        for row in change.aside:
            written.execute("INSERT OR IGNORE INTO aside VALUES (?, ?, ?, ?, ?)", (self._id, *row))
            written.execute("UPDATE buffer SET aside_last_id = ? WHERE id = ?", (row.id, self._id))
        if (released := change.released) is not None:
            written.execute("DELETE FROM aside WHERE buffer = ? AND id = ?", (self._id, released.id))
            values = (self._id, released.id, released.reason, released.at_unix_ms)
            written.execute("INSERT INTO released VALUES (?, ?, ?, ?)", values)
        if change.gaps_anew:
            written.execute("DELETE FROM gap WHERE buffer = ?", (self._id,))
        for gap in change.gaps:
            record = (self._id, gap.reason, gap.ranges.encode(), gap.detail, gap.origin_zone, gap.since_unix_ms)
            written.execute("INSERT INTO gap VALUES (NULL, ?, ?, ?, ?, ?, ?)", record)

    def _keep_departed(self, written: sqlite3.Connection, change: Change) -> None:
        if (going := change.departed) is not None:
            kept = going.kept
            values = (going.newest_unix_ms, kept.range_digest, kept.chain_before, kept.chain_after, going.keys)
            row = (self._id, kept.first, kept.last, *values)
            written.execute("INSERT INTO departed VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            written.execute("DELETE FROM frame WHERE buffer = ? AND base BETWEEN ? AND ?", row[:3])
        if change.latest is not None:
            written.execute("UPDATE buffer SET latest = ? WHERE id = ?", (change.latest, self._id))
        if (old := change.forgotten) is not None:
            keys = [(self._id, *key) for key in zip(old.hashes.tolist(), old.offsets.tolist(), strict=True)]
            written.executemany("DELETE FROM key WHERE buffer = ? AND hash = ? AND at = ?", keys)
            written.execute("UPDATE departed SET keys = NULL WHERE buffer = ? AND first = ?", (self._id, old.first))

    def _known(self, connection: sqlite3.Connection | None, hashes: np.ndarray) -> list[tuple[Any, ...]]:
        asked = "SELECT hash, at FROM key WHERE buffer = ? AND hash IN (SELECT value FROM json_each(?))"
        values = json.dumps(hashes.tolist())
        return (
            self._rows(asked, values)
            if connection is None
            else connection.execute(asked, (self._id, values)).fetchall()
        )

    def known(self, hashes: np.ndarray) -> np.ndarray:
        """Look hashes up."""
        return np.array(self._known(None, hashes), dtype=np.int64).reshape(-1, 2)

    def infos(self, at: int, most: int) -> list[FrameInfo]:
        """Read what the rows of frames say beside their content."""
        asked = f"SELECT base, count, size_bytes, appended_at_unix_ms FROM frame WHERE {SINCE}"
        rows = self._rows(f"{asked} AND base + count > ?2 ORDER BY base LIMIT ?3", at, most)
        return [FrameInfo(*row) for row in rows]

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Read frames that follow each other."""
        within = [info for info in self.infos(at, most) if info.base < until]
        bases = _within_page([(info.base, info.size_bytes) for info in within])
        return self._frames(bases)

    def _frames(self, bases: Sequence[int]) -> list[FrameRow]:
        asked = f"SELECT {FRAME} FROM frame WHERE buffer = ? AND base IN (SELECT value FROM json_each(?)) ORDER BY base"
        return [FrameRow(*row) for row in self._rows(asked, json.dumps(list(bases)))] if bases else []

    def holding(self, offsets: np.ndarray) -> list[FrameRow]:
        """Read the frames that hold offsets."""
        asked = """
        SELECT DISTINCT frame.base, frame.size_bytes FROM json_each(?2) AS wanted JOIN frame ON frame.buffer = ?1
        AND frame.base = (SELECT max(base) FROM frame WHERE buffer = ?1 AND base <= wanted.value)
        WHERE wanted.value < frame.base + frame.count ORDER BY frame.base
        """
        return self._frames(_within_page(self._rows(asked, json.dumps(offsets.tolist()))))

    def keys_holding(self, offsets: np.ndarray) -> list[KeptKeys]:
        """Read the keys of ranges that left."""
        asked = """
        SELECT DISTINCT first, length(keys) FROM json_each(?2) AS wanted JOIN departed ON buffer = ?1
        AND first = (SELECT max(first) FROM departed WHERE buffer = ?1 AND first <= wanted.value)
        WHERE wanted.value <= last AND keys IS NOT NULL ORDER BY first
        """
        firsts = _within_page(self._rows(asked, json.dumps(offsets.tolist())))
        asked = "SELECT first, last, keys FROM departed WHERE buffer = ? AND keys IS NOT NULL"
        rows = self._rows(f"{asked} AND first IN (SELECT value FROM json_each(?)) ORDER BY first", json.dumps(firsts))
        return [KeptKeys(*row) for row in rows]

    def oldest_keys(self, before_unix_ms: int) -> KeptKeys | None:
        """Read the keys that are to be forgotten next."""
        asked = "SELECT first, last, keys FROM departed WHERE buffer = ? AND keys IS NOT NULL AND newest_unix_ms < ?"
        return next((KeptKeys(*row) for row in self._rows(f"{asked} ORDER BY first LIMIT 1", before_unix_ms)), None)

    def history(self, heads: Sequence[bytes]) -> tuple[list[KeptRange], Mapping[bytes, int]]:
        """Read what stays of what left, and where chain values are."""
        asked = "SELECT first, last, range_digest, chain_before, chain_after FROM departed WHERE buffer = ?"
        kept = [KeptRange(*row) for row in self._rows(f"{asked} ORDER BY first")]
        asked = "SELECT base FROM frame WHERE buffer = ? AND chain_before = ?"
        return kept, {head: base for head in heads for (base,) in self._rows(asked, head)}

    def latest(self) -> bytes | None:
        """Read the newest entries of what left."""
        ((found,),) = self._rows("SELECT latest FROM buffer WHERE id = ?")
        return bytes(found) if found is not None else None

    def aside(
        self, after: int | None, limit: int, *, newest_first: bool = False, same: Sequence[int] | None = None
    ) -> list[AsideRow]:
        """Read refused facts."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        only = "" if same is None else "AND same IN (SELECT value FROM json_each(?4))"
        asked = f"""
        SELECT id, same, head, fact FROM aside WHERE buffer = ?1 AND (?2 IS NULL OR id {sign} ?2) {only}
        ORDER BY id {order} LIMIT ?3
        """
        values = (after, limit) if same is None else (after, limit, json.dumps(list(same)))
        return [AsideRow(*row) for row in self._rows(asked, *values)]


def _within_page(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Give the first of what has these sizes: at least one, and about what is read at once."""
    chosen: list[int] = []
    total = 0
    for name, size_bytes in sizes:
        if chosen and total + size_bytes > PAGE_BYTES:
            break
        chosen.append(name)
        total += size_bytes
    return chosen


class SqliteStorage(FramedStorage):
    """The storage of a zone in a SQLite file."""

    capabilities = Capabilities("sqlite", hash_chain=True)


async def open_sqlite(request: StorageRequest) -> Storage:
    """Open the storage that the configuration of a zone asks for."""
    path = request.folder / str(request.options.get("file", "facts.sqlite"))
    storage = SqliteStorage(SqliteZone(path, request.on_sync), request.clock, Sha256())
    return await storage.begin(request.zone)
