"""Facts as rows of PostgreSQL, each once: rows and the position behind them are committed together.

A batch is one transaction. It locks the row of its log in ``positions``, leaves out what that says is written, adds the
rest and moves the position. So whatever ends in between, sink, server or node, and however many sinks write at once,
every fact is written once and in order. A key that is there already is left as it is: facts do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import psycopg
from psycopg import sql

from bsfg.errors import (
    BsfgError,
    ForeignLog,
    InvalidArgument,
    SinkBehind,
    SinkChanged,
    StorageFailed,
    StorageUnavailable,
    StorageUnreadable,
)
from bsfg.fact import Entry, is_json
from bsfg.jsonform import artifact_to_dict
from bsfg.model import LATEST_UNIX_MS
from bsfg.retention import GapRecord
from bsfg.sinks.flow import SinkBatch, last_offset, place
from bsfg.stores.postgres.database import Connection, connected, migrate, translated
from bsfg.wording import one_line

SILENT_SECONDS = 30
LOCK_SECONDS = 30
NOT_TAKEN = "before_the_sink"
"""The reason of the gap before the place where a sink found its consumer when it first wrote."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AS_MADE_NOT = ("0A", "22", "23", "42", "P0")
"""States that no fact causes in tables as they were made: values, constraints, names, somebody's trigger."""

_AWAY = ("08", "57P")
"""States of a server that is ending, or ended the connection."""

Row = dict[str, Any]


def _moment(unix_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=unix_ms)


def _json(value: Any) -> str | None:
    return orjson.dumps(value).decode() if value else None


COLUMNS: Mapping[str, tuple[str, Callable[[Entry, SinkBatch], Any]]] = {
    "from_zone": ("text", lambda entry, batch: entry.key.from_zone),
    "stream": ("text", lambda entry, batch: batch.stream),
    "message_id": ("text", lambda entry, batch: entry.key.message_id),
    "to_zone": ("text", lambda entry, batch: entry.message.envelope.to_zone),
    "subject": ("text", lambda entry, batch: entry.message.fact.subject),
    "predicate": ("text", lambda entry, batch: entry.message.fact.predicate),
    "object": ("json", lambda entry, batch: entry.message.fact.object.decode() if _is_text(entry) else None),
    "object_bytes": ("bytea", lambda entry, batch: None if _is_text(entry) else entry.message.fact.object),
    "object_media_type": ("text", lambda entry, batch: entry.message.envelope.object_media_type),
    "object_schema": ("text", lambda entry, batch: entry.message.envelope.object_schema),
    "produced_at": ("timestamptz", lambda entry, batch: _moment(entry.message.envelope.produced_at_unix_ms)),
    "correlation_id": ("text", lambda entry, batch: entry.message.envelope.correlation_id),
    "causation_id": ("text", lambda entry, batch: entry.message.envelope.causation_id),
    "labels": ("json", lambda entry, batch: _json(dict(entry.message.envelope.labels))),
    "signature": ("text", lambda entry, batch: entry.message.envelope.signature),
    "artifact": ("json", lambda entry, batch: _json(_artifact(entry))),
    "digest": ("text", lambda entry, batch: entry.digest_text),
    "log_id": ("text", lambda entry, batch: batch.log_id),
    "offset": ("bigint", lambda entry, batch: entry.offset),
    "appended_at": ("timestamptz", lambda entry, batch: _moment(entry.appended_at_unix_ms)),
    "origin_zone": ("text", lambda entry, batch: None if entry.origin is None else entry.origin.zone),
    "origin_offset": ("bigint", lambda entry, batch: None if entry.origin is None else entry.origin.offset),
}
"""Every column of a fact: its type, and what stands in it."""

GAP_COLUMNS = {
    "log_id": "text",
    "stream": "text",
    "origin_zone": "text",
    "first": "bigint",
    "last": "bigint",
    "offsets": "bigint",
    "reason": "text",
    "detail": "text",
    "at": "timestamptz",
}
_FACT_TYPES = {name: type for name, (type, _) in COLUMNS.items()}
_KEY = ("from_zone", "stream", "message_id")


def _is_text(entry: Entry) -> bool:
    return is_json(entry.message.envelope.object_media_type)


def _artifact(entry: Entry) -> dict[str, Any] | None:
    artifact = entry.message.fact.artifact
    return None if artifact is None else artifact_to_dict(artifact)


def _row(entry: Entry, batch: SinkBatch) -> Row:
    return {name: value(entry, batch) for name, (_, value) in COLUMNS.items()}


@dataclass(frozen=True, slots=True)
class SqlSettings:
    """Which server, and which schema of it; ``latest`` makes a table of the newest facts if there is none."""

    dsn: str
    schema: str = "bsfg_facts"
    latest: bool = False


@dataclass(frozen=True, slots=True)
class SqlPosition:
    """How far a log is written, and the last fact that was."""

    next: int
    tail_offset: int | None = None
    tail_digest: str | None = None


class SqlTarget:
    """The tables of one schema."""

    def __init__(self, settings: SqlSettings) -> None:
        self._settings = settings
        self._connection: Connection | None = None
        self._unproven: dict[str, SqlPosition] = {}
        """How far logs were written when the sink began; each until the node has shown that its log is the same."""
        self._conflicts = 0

    def open(self) -> None:
        """Connect, and bring the tables to the version of this program; raises what keeps it from writing."""
        with self._working("opening the tables"):
            rows = self._connected().execute("SELECT log_id, next, tail_offset, tail_digest FROM positions").fetchall()
            self._unproven = {log_id: SqlPosition(*rest) for log_id, *rest in rows}

    def write(self, batch: SinkBatch) -> int | None:
        """Write what is not written yet and move the position, in one transaction."""
        self._check_history(batch)
        with self._working("writing facts"):
            connection = self._connected()
            with connection.transaction():
                position = self._locked(connection, batch)
                fresh = self._fresh(batch, position)
                facts = [_row(item, batch) for item in fresh if isinstance(item, Entry)]
                _add_gaps(connection, [_told_gap(item, batch) for item in fresh if isinstance(item, GapRecord)])
                conflicts = self._add_facts(connection, facts)
                self._move(connection, batch, facts, last_offset(fresh))
            self._conflicts += conflicts
        # What comes again is not confirmed before the last of it has shown that this is the log which was written.
        return None if batch.log_id in self._unproven else last_offset(batch.items)

    def finish(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def noted(self) -> dict[str, int]:
        """Count what has gone into the table of conflicts."""
        return {"conflicts": self._conflicts}

    # Connections.

    @contextmanager
    def _working(self, doing: str) -> Iterator[None]:
        """Turn errors of the driver into ours; after any error the connection is made anew."""
        try:
            yield
        except psycopg.Error as error:
            self.close()
            raise self._translated(error, doing) from None
        except BaseException:
            self.close()
            raise

    def _translated(self, error: psycopg.Error, doing: str) -> BsfgError:
        schema, found, state = self._settings.schema, translated(error, doing), error.sqlstate or ""
        if state in ("42501", "3F000"):
            hint = f"Let the role of --dsn own the schema {schema}, or give it all rights there."
            return StorageUnreadable(found.message, hint=hint)
        if state.startswith(_AS_MADE_NOT):
            return SinkChanged(f"the schema {schema} is not as it was made: {found.message}")
        if state.startswith(_AWAY):
            return StorageUnavailable(found.message)
        if isinstance(found, StorageFailed):
            return StorageFailed(found.message, hint="Look at the server's own log; the sink goes on where it was.")
        return found

    def _connected(self) -> Connection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        settings, name = self._settings, sql.Identifier(self._settings.schema)
        connection = connected(settings.dsn, "bsfg sink", SILENT_SECONDS, who="the sink", where="--dsn")
        self._connection = connection
        [encoding] = connection.execute("SELECT current_setting('server_encoding')").fetchone() or ("",)
        if encoding != "UTF8":
            hint = "Facts are Unicode: make a database with ENCODING 'UTF8'."
            raise InvalidArgument(f"the database is encoded in {encoding}", hint=hint)
        connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{LOCK_SECONDS}s",))
        connection.execute("SELECT set_config('client_min_messages', 'warning', false)")
        # A fact is confirmed when it is on the server's disk: a role may prefer to be answered before.
        durable = (
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        connection.execute(durable)
        with connection.transaction():
            # Two sinks may begin at once.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"bsfg sink {settings.schema}",))
            asked = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
            if connection.execute(asked, (settings.schema,)).fetchone() is None:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
            connection.execute(sql.SQL("SET search_path TO {}").format(name))
            migrate(connection, __package__)
            if settings.latest:
                _make_latest(connection)
        return connection

    # One transaction.

    def _check_history(self, batch: SinkBatch) -> None:
        """Raise unless the node's log holds what was written of it; its offsets may mean other facts by now."""
        known, last = self._unproven.get(batch.log_id), last_offset(batch.items)
        if known is None or last is None:
            return
        if batch.end < known.next:
            raise self._foreign(f"the node's log ends at {batch.end}, facts up to {known.next} are written")
        for item in batch.items:
            if isinstance(item, Entry) and item.offset == known.tail_offset and item.digest_text != known.tail_digest:
                raise self._foreign(f"the fact at offset {item.offset} is another one than was written")
        if last >= known.next - 1:
            del self._unproven[batch.log_id]

    def _locked(self, connection: Connection, batch: SinkBatch) -> SqlPosition | None:
        """Give how far the log is written, and let no other sink write it until the end of the transaction."""
        first = next((found[0] for found in map(place, batch.items) if found is not None), None)
        if first is not None:
            begun = connection.execute(
                "INSERT INTO positions (log_id, stream, next, written_at) VALUES (%s, %s, %s, now()) "
                "ON CONFLICT (log_id) DO NOTHING",
                (batch.log_id, batch.stream, first),
            )
            if begun.rowcount and first:
                detail = "the consumer had been confirmed up to here when the sink first wrote to these tables"
                _add_gaps(connection, [_gap_row(batch, "", 0, first - 1, first, NOT_TAKEN, detail, datetime.now(UTC))])
        asked = "SELECT next, tail_offset, tail_digest FROM positions WHERE log_id = %s FOR UPDATE"
        row = connection.execute(asked, (batch.log_id,)).fetchone()
        return None if row is None else SqlPosition(*row)

    def _fresh(self, batch: SinkBatch, position: SqlPosition | None) -> list[Entry | GapRecord]:
        """Give what is not written yet; raise when that does not follow what is."""
        if position is None:
            return list(batch.items)
        fresh, expected = [], position.next
        for item in batch.items:
            found = place(item)
            if found is None:
                fresh.append(item)
                continue
            first, last = found
            if first > expected:
                hint = f"Add a consumer with --start offset:{expected} (bsfg consumers add), and run the sink with it."
                says = f"the tables end before offset {expected}, the consumer goes on at {first}"
                raise SinkBehind(says, hint=hint, next=expected, first=first)
            if last >= expected:
                fresh.append(_rest(item, expected) if isinstance(item, GapRecord) else item)
                expected = last + 1
        return fresh

    def _foreign(self, says: str) -> ForeignLog:
        hint = "The node's folder was put back to an older copy: use `bsfg restore`, which begins a log of its own, or "
        return ForeignLog(says, hint=f"{hint}let the sink write to another schema than {self._settings.schema}.")

    def _add_facts(self, connection: Connection, facts: Sequence[Row]) -> int:
        """Add facts; give how many have the key of another fact, which go into a table of their own."""
        tail = f'ON CONFLICT ({", ".join(_KEY)}) DO NOTHING RETURNING "offset"'
        added = {offset for (offset,) in _insert(connection, "facts", _FACT_TYPES, facts, tail)}
        repeated = [row for row in facts if row["offset"] not in added]
        there = self._digests(connection, repeated)
        if None in there.values():
            raise SinkChanged(f"the schema {self._settings.schema} takes rows of facts and does not keep them")
        conflicts = [row for row in repeated if there[row["offset"]] != row["digest"]]
        _insert(connection, "conflicts", _FACT_TYPES, conflicts)
        if connection.execute("SELECT to_regclass('latest')").fetchone() != (None,):
            newest = {(row["subject"], row["predicate"]): row for row in facts if row["offset"] in added}
            changed = ", ".join(f'"{name}" = excluded."{name}"' for name in _FACT_TYPES)
            # What another log brings later may be older.
            newer = "latest.log_id = excluded.log_id OR latest.appended_at <= excluded.appended_at"
            tail = f"ON CONFLICT (stream, subject, predicate) DO UPDATE SET {changed} WHERE {newer}"
            _insert(connection, "latest", _FACT_TYPES, list(newest.values()), tail)
        return len(conflicts)

    def _digests(self, connection: Connection, rows: Sequence[Row]) -> dict[int, str | None]:
        """Give the digests of the facts that have the keys of rows, by the offsets of the rows."""
        if not rows:
            return {}
        given, values = _given({**dict.fromkeys(_KEY, "text"), "offset": "bigint"}, rows)
        joined = f"LEFT JOIN facts AS f USING ({', '.join(_KEY)})"
        return dict(connection.execute(f'SELECT given."offset", f.digest FROM {given} {joined}', values).fetchall())

    def _move(self, connection: Connection, batch: SinkBatch, facts: Sequence[Row], last: int | None) -> None:
        if last is None:
            return
        tail = (facts[-1]["offset"], facts[-1]["digest"]) if facts else (None, None)
        connection.execute(
            "UPDATE positions SET next = %s, tail_offset = coalesce(%s, tail_offset), "
            "tail_digest = coalesce(%s, tail_digest), written_at = now() WHERE log_id = %s",
            (last + 1, *tail, batch.log_id),
        )


def _rest(gap: GapRecord, first: int) -> GapRecord:
    """Give the part of a gap from an offset on: what is before was there, and is written."""
    first = max(first, gap.first)
    return replace(gap, first=first, count=None if gap.count is None else min(gap.count, gap.last - first + 1))


def _gap_row(
    batch: SinkBatch, zone: str, first: int, last: int, offsets: int, reason: str, detail: str, at: datetime
) -> Row:
    values = (batch.log_id, batch.stream, zone, first, last, offsets, reason, detail, at)
    return dict(zip(GAP_COLUMNS, values, strict=True))


def _told_gap(gap: GapRecord, batch: SinkBatch) -> Row:
    told = (gap.origin_zone or "", gap.first, gap.last, gap.offsets, str(gap.reason), one_line(gap.detail))
    return _gap_row(batch, *told, _moment(min(max(0, gap.at_unix_ms), LATEST_UNIX_MS)))


def _add_gaps(connection: Connection, rows: Sequence[Row]) -> None:
    key = "log_id, origin_zone, first, last, reason"
    _insert(connection, "gaps", GAP_COLUMNS, rows, f"ON CONFLICT ({key}) DO NOTHING")


def _make_latest(connection: Connection) -> None:
    """Make the table of the newest facts of what is written already, unless there is one."""
    if connection.execute("SELECT to_regclass('latest')").fetchone() != (None,):
        return
    connection.execute("LOCK TABLE positions IN EXCLUSIVE MODE")
    connection.execute("CREATE TABLE latest (LIKE facts, PRIMARY KEY (stream, subject, predicate))")
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    order = 'stream, subject, predicate, appended_at DESC, "offset" DESC'
    chosen = f"SELECT DISTINCT ON (stream, subject, predicate) {names} FROM facts ORDER BY {order}"
    connection.execute(f"INSERT INTO latest ({names}) {chosen}")


def _insert(
    connection: Connection, table: str, types: Mapping[str, str], rows: Sequence[Row], tail: str = ""
) -> list[tuple[Any, ...]]:
    """Add rows in one statement, and give what its end returns."""
    if not rows:
        return []
    given, values = _given(types, rows)
    names = ", ".join(f'"{name}"' for name in types)
    chosen = ", ".join(f'given."{name}"::{type}' for name, type in types.items())
    done = connection.execute(f"INSERT INTO {table} ({names}) SELECT {chosen} FROM {given} {tail}", values)
    return done.fetchall() if done.description else []


def _given(types: Mapping[str, str], rows: Sequence[Row]) -> tuple[str, list[list[Any]]]:
    """Give rows as a table of a statement, with the values for it: an array for each column."""
    # An array of JSON would be written as an array of something else; text becomes JSON where it is put.
    arrays = ", ".join(f"%s::{'text' if type == 'json' else type}[]" for type in types.values())
    names = ", ".join(f'"{name}"' for name in types)
    return f"unnest({arrays}) AS given ({names})", [[row[name] for row in rows] for name in types]
