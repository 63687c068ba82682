"""Connections to one schema of a server: opened, checked, lost and opened again; and the server's errors as ours.

A call that meets a lost connection is made again on another one, for as long as patience lasts. Who changes something
is told that it is made again, and looks first at what became of the first attempt.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import psycopg
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format

from bsfg.errors import (
    BsfgError,
    ConfigInvalid,
    DiskFull,
    FormatUnsupported,
    HasherMismatch,
    OutcomeUnknown,
    StorageBusy,
    StorageFailed,
    StorageForeign,
    StorageReadOnly,
    StorageTaken,
    StorageUnavailable,
    StorageUnreadable,
    StorageUnsafe,
)
from bsfg.stores.postgres.place import TAKEOVER_SECONDS, Place, PlaceWatch, hang_up, label, said_by
from bsfg.stores.shared.keeper import ZoneNode

Connection = psycopg.Connection[tuple[Any, ...]]
Found = TypeVar("Found")

OLDEST_SERVER = 140_000
PATIENCE_SECONDS = 20.0
CONNECT_SECONDS = 5
_PAUSE_SECONDS = 0.1

_SETTINGS = {
    # Tables that were empty when a statement was planned grow: every statement of ours has an index to go by.
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "client_min_messages": "warning",
    "timezone": "UTC",
}
_AWAY = frozenset({"57P01", "57P02", "57P03"})
_DENIED = ("28", "3D")


@dataclass(frozen=True, slots=True)
class PostgresSettings:
    """Where a zone's tables are, and how long a server may be away before callers are told."""

    dsn: str
    schema: str = "bsfg"
    allow_unsafe: bool = False
    patience_seconds: float = PATIENCE_SECONDS
    takeover_seconds: float = TAKEOVER_SECONDS
    node_name: str = ""


class Int8Array:
    """Whole numbers for one parameter of a statement, written without an object for each."""

    __slots__ = ("values",)

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class _Int8ArrayDumper(Dumper):
    format = Format.BINARY
    oid = 1016  # int8[]

    def dump(self, obj: Int8Array) -> bytes:
        """Write the array as the server reads it: a head, and before each number its length."""
        values = obj.values
        rows = np.empty(len(values), dtype=[("size", ">i4"), ("value", ">i8")])
        rows["size"], rows["value"] = 8, values
        return struct.pack(">iiIii", 1, 0, 20, len(values), 1) + rows.tobytes()


def _denied(error: psycopg.Error) -> bool:
    text = str(error)
    return (error.sqlstate or "").startswith(_DENIED) or any(
        word in text for word in ("authentication failed", "does not exist", "is not permitted to log in", "pg_hba")
    )


def connected(
    dsn: str, application: str, silent_seconds: int, *, who: str = "the node", where: str = "dsn in [storage.postgres]"
) -> Connection:
    """Connect to a server, one that is silent for so long being away; ``where`` is what the string is called.

    No part of the string, which may hold a password, is in the error.
    """
    noticing = {"tcp_user_timeout": 1000 * silent_seconds, "keepalives_idle": silent_seconds, "keepalives_interval": 1,
                "keepalives_count": 3, "connect_timeout": CONNECT_SECONDS}  # fmt: skip
    try:
        ours = {"application_name": application, "client_encoding": "UTF8"}  # facts are Unicode, whatever others like
        given: dict[str, Any] = {**noticing, **conninfo_to_dict(dsn), **ours}
        return psycopg.connect(autocommit=True, **given)
    except psycopg.Error as error:
        if not isinstance(error, psycopg.OperationalError) or str(error).startswith("connection is bad: invalid"):
            hint = 'Write it as "host=... dbname=... user=..." or as an address, in which % is written %25 and @ %40.'
            raise ConfigInvalid(f"{where} is no connection string of PostgreSQL", hint=hint) from None
        if _denied(error):
            hint = f"Check {where}: role, password, database, and pg_hba.conf of the server."
            raise StorageUnreadable(f"the server refuses {who}: {said_by(error)}", hint=hint) from None
        # Those who are told of it while the node runs get another hint: it goes on by itself.
        hint = f"Start {who} again when the server answers; check host and port of {where}."
        raise StorageUnavailable(f"the server cannot be reached: {said_by(error)}", hint=hint) from None


def translated(error: psycopg.Error, doing: str) -> BsfgError:
    """Give an error of the driver as one of ours."""
    state, text = error.sqlstate or "", str(error).strip().splitlines()[:1]
    says = f"{doing}: {text[0] if text else type(error).__name__}"
    if state in ("53100", "54000"):
        return DiskFull(says, hint="Free space on the server's volume; facts stored so far are intact.")
    if state in ("25006",):
        hint = "The server takes no writes: it is a standby, or default_transaction_read_only is on."
        return StorageReadOnly(says, hint=hint)
    if state.startswith("53") or state in ("40001", "40P01", "55P03", "57014"):
        return StorageBusy(says, hint="Retry; the server lacks connections, memory or a lock for a moment.")
    if state == "42501":
        return StorageUnreadable(says, hint="Grant the node's role all rights on its schema.")
    if isinstance(error, psycopg.OperationalError) and not state:
        return StorageUnavailable(says)
    return StorageFailed(says, hint="Look at the server's own log; then restart the node.")


class Database:
    """Connections to the tables of one zone; any thread may ask for one."""

    def __init__(self, settings: PostgresSettings, on_sync: Callable[[float], None] = lambda seconds: None) -> None:
        self.settings, self._on_sync = settings, on_sync
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._made: WeakSet[Connection] = WeakSet()
        self._losses = 0
        self._given_up = False
        self._is_open = self._closed = self._lost_place = False
        node = (settings.schema, settings.node_name, settings.takeover_seconds)
        self._place = Place(self._connect, *node)
        self.on_lost: Callable[[], None] = lambda: None
        """Is called, by another thread, when somebody else has become the zone's one writer."""

    @property
    def epoch(self) -> int:
        """The epoch that this node has begun; whoever knows a lower one writes nothing."""
        return self._place.epoch

    @property
    def nodes(self) -> Sequence[ZoneNode]:
        """The nodes of the zone that run, as the active one last saw them."""
        return self._place.nodes

    # Opening.

    def open(self, zone: str, hasher: str) -> None:
        """Be the zone's one writer: check the server, bring the tables up to date, and count up the epoch."""
        connection = self._connect()
        try:
            self._check_server(connection)
            asked = "SELECT 1 FROM pg_namespace WHERE nspname = %s"
            if connection.execute(asked, (self.settings.schema,)).fetchone() is None:
                schema = sql.Identifier(self.settings.schema)
                connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(schema), prepare=False)
            self._place.take(connection)
            with connection.transaction():
                migrate(connection)
                self._place.enter(connection, _begin(connection, zone, hasher, self.settings.schema))
            self._place.keep(self._overtaken)
            self._is_open = True
        except psycopg.Error as error:
            connection.close()
            raise translated(error, "opening the tables") from None
        except BaseException:
            connection.close()
            raise

    def look(self, zone: str, further: Callable[[Connection], None] = lambda connection: None) -> tuple[str, int]:
        """Say what is found at the server and how many buffers, changing nothing; raises what a start would.

        ``further`` looks at the tables as they are, when there are any.
        """
        connection = self._connect()
        try:
            self._check_server(connection)
            server = f"PostgreSQL {connection.info.server_version // 10_000}, schema {self.settings.schema}"
            if connection.execute("SELECT to_regclass('migration')").fetchone() == (None,):
                return f"{server}: no tables yet; the node makes them when it first starts", 0
            version = _version(connection)
            row = connection.execute("SELECT name FROM zone").fetchone()
            if row is not None and row[0] != zone:
                raise _foreign(self.settings.schema, row[0], zone)
            asked = "SELECT count(*), coalesce(sum(end_offset - start_offset), 0)::bigint FROM buffer"
            buffers, facts = connection.execute(asked).fetchone() or (0, 0)
            further(connection)
            return f"{server}: tables of version {version}, {buffers} buffers, {facts} facts", buffers
        except psycopg.Error as error:
            raise translated(error, "looking at the tables") from None
        finally:
            connection.close()

    def _connect(self) -> Connection:
        # A server behind a line that swallows everything must be known as away before another node takes over.
        seconds = max(1, int(self.settings.takeover_seconds))
        connection = connected(self.settings.dsn, label(self._place.token), seconds)
        self._made.add(connection)
        if self._closed:
            # Nobody will hang up for whoever waits for its first answer.
            hang_up(connection)
        try:
            connection.adapters.register_dumper(Int8Array, _Int8ArrayDumper)
            connection.prepare_threshold = 0
            for name, value in _SETTINGS.items():
                connection.execute("SELECT set_config(%s, %s, false)", (name, value), prepare=False)
            schema = sql.Identifier(self.settings.schema)
            connection.execute(sql.SQL("SET search_path TO {}").format(schema), prepare=False)
        except psycopg.Error as error:
            connection.close()
            raise StorageUnavailable(f"the server ended the connection: {said_by(error)}") from None
        return connection

    def watch(self) -> PlaceWatch:
        """Give what watches the place of the active node, for one that stands by."""
        node = (self.settings.schema, self.settings.node_name, self.settings.takeover_seconds)
        return PlaceWatch(self._connect, self._hang_up, *node)

    def _check_server(self, connection: Connection) -> None:
        version = connection.info.server_version
        if version < OLDEST_SERVER:
            hint = f"Use PostgreSQL {OLDEST_SERVER // 10_000} or newer."
            raise FormatUnsupported(f"the server is PostgreSQL {version // 10_000}", hint=hint)
        names = ("fsync", "synchronous_commit", "full_page_writes")
        off = [name for name in names if _setting(connection, name) == "off"]
        if off and not self.settings.allow_unsafe:
            raise StorageUnsafe(f"{' and '.join(off)} of the server {'is' if len(off) == 1 else 'are'} off", off=off)

    # Use.

    def run(
        self,
        doing: str,
        work: Callable[[Connection, bool], Found],
        *,
        changes: bool = False,
        patience_seconds: float | None = None,
    ) -> Found:
        """Do some work on a connection, and once more when that is lost; ``work`` is told whether it is made again.

        What changes something and cannot be made again, or not in time, has an unknown outcome.
        """
        deadline, again = 0.0, False
        patience_seconds = self.settings.patience_seconds if patience_seconds is None else patience_seconds
        while True:
            losses = self._losses
            try:
                connection = self._taken()
            except (StorageUnavailable, StorageUnreadable) as away:
                if self._closed:
                    raise self._ended(doing, unknown=again and changes) from None
                # A role that was let in before and is not now is as good as a server that is away.
                deadline = deadline or time.monotonic() + (0.0 if self._given_up else patience_seconds)
                if time.monotonic() < deadline:
                    time.sleep(_PAUSE_SECONDS)
                    continue
                # Who has less patience than others does not end theirs.
                self._given_up = self._given_up or patience_seconds >= self.settings.patience_seconds
                if again and changes:
                    raise OutcomeUnknown(f"{doing}: the server went away meanwhile: {away.message}") from None
                raise StorageUnavailable(f"{doing}: {away.message}") from None
            begun = time.perf_counter()
            try:
                found = work(connection, again)
            except psycopg.Error as error:
                if self._given_back(connection) and error.sqlstate not in _AWAY:
                    refusal = translated(error, doing)
                    if again and changes:
                        # That says nothing of the attempt before, which may still be made.
                        raise OutcomeUnknown(refusal.message) from None
                    raise refusal from None
                self._lost(losses)
                again = True
                continue
            except BaseException:
                self._given_back(connection)
                raise
            if changes:
                self._on_sync(time.perf_counter() - begun)
            self._given_up = False
            self._given_back(connection)
            return found

    def rows(
        self, doing: str, asked: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> list[tuple[Any, ...]]:
        """Read the rows of a query."""
        return self.run(doing, lambda connection, again: connection.execute(asked, values, binary=True).fetchall())

    def change(
        self, doing: str, work: Callable[[Connection], Found], *, patience_seconds: float | None = None
    ) -> Found:
        """Do some work in a transaction that only the zone's present writer can commit; made again it does no harm."""

        def fenced(connection: Connection, again: bool) -> Found:
            with connection.transaction():
                self.check_epoch(connection)
                return work(connection)

        return self.run(doing, fenced, changes=True, patience_seconds=patience_seconds)

    def check_epoch(self, connection: Connection) -> None:
        """Raise unless the zone is still ours, and keep it so until the transaction ends."""
        if connection.execute("SELECT 1 FROM zone WHERE epoch = %s FOR SHARE", (self.epoch,)).fetchone() is None:
            raise StorageTaken(f"another node has taken over the schema {self.settings.schema}")

    def close(self) -> None:
        """End all connections, and with them the lock; whoever still waits for the server waits no longer."""
        self._closed = True
        if not self._is_open:
            # Who opens the tables has the lock's connection, and may wait for an answer as long as the server likes.
            self._hang_up()
        self._place.leave()
        self._forget_all()
        self._hang_up()

    @property
    def is_silent(self) -> bool:
        """Whether the server was not reached for so long that another node may have taken over."""
        return self._place.is_silent

    def end_waiting(self) -> None:
        """End all work at once: whoever waits for the server is told that what it makes of his change is not known."""
        self._closed = True
        self._place.give_up()
        self._hang_up()

    def give_up(self) -> None:
        """End all work at once: whoever waits for the server is told that the place may be another's."""
        self._lost_place = True
        self.end_waiting()

    def _hang_up(self) -> None:
        for connection in list(self._made):
            hang_up(connection)

    def _overtaken(self) -> None:
        self.give_up()
        self.on_lost()

    def _ended(self, doing: str, *, unknown: bool) -> BsfgError:
        if unknown:
            return OutcomeUnknown(f"{doing}: the storage was closed meanwhile")
        if self._lost_place:
            return StorageTaken(f"{doing}: another node may have taken over the schema {self.settings.schema}")
        return StorageUnavailable(f"{doing}: the storage is closed")

    def _taken(self) -> Connection:
        if self._closed:
            raise StorageUnavailable("the storage is closed")
        self._place.hold()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _given_back(self, connection: Connection) -> bool:
        """Take a connection back; tell whether it can still be used."""
        if connection.closed or connection.broken or self._closed:
            connection.close()
            return False
        with suppress(psycopg.Error):
            if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                connection.rollback()
            with self._lock:
                self._idle.append(connection)
            return True
        connection.close()
        return False

    def _lost(self, losses: int) -> None:
        """End all connections, since one was lost; those who lose theirs by the same event do it once."""
        with self._lock:
            if losses != self._losses:
                return
            self._losses += 1
        self._place.doubt()
        self._forget_all()

    def _forget_all(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _setting(connection: Connection, name: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    return str(row[0]) if row is not None else ""


def versions(package: str = __package__) -> list[tuple[int, str]]:
    """List the versions of the tables that a package brings, each with what makes it of the one before."""
    files = [each for each in resources.files(package).iterdir() if each.name.endswith(".sql")]
    return sorted((int(each.name.removesuffix(".sql")), each.read_text(encoding="utf-8")) for each in files)


def migrate(connection: Connection, package: str = __package__) -> None:
    """Bring the tables of a package to the version of this program; refuse those of a newer one."""
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migration (version integer PRIMARY KEY, applied_at timestamptz NOT NULL)",
        prepare=False,
    )
    there = _version(connection, package)
    for version, text in versions(package):
        if version > there:
            connection.execute(text, prepare=False)
            connection.execute("INSERT INTO migration VALUES (%s, now())", (version,))


def _version(connection: Connection, package: str = __package__) -> int:
    """Give the version of the tables; raise when this program is too old for them."""
    row = connection.execute("SELECT coalesce(max(version), 0) FROM migration").fetchone()
    there, known = int(row[0]) if row is not None else 0, versions(package)[-1][0]
    if there > known:
        hint = "Use a version of BSFG at least as new as the one that last opened the schema."
        raise FormatUnsupported(f"the tables have version {there}, this program knows up to {known}", hint=hint)
    return there


def _foreign(schema: str, owner: str, zone: str) -> StorageForeign:
    return StorageForeign(f"the schema {schema} belongs to the zone {owner}, this is {zone}", zone=owner)


def _begin(connection: Connection, zone: str, hasher: str, schema: str) -> int:
    """Count up the epoch of the zone, whose tables these must be, and fence every buffer with it."""
    connection.execute("INSERT INTO zone (name, hasher) VALUES (%s, %s) ON CONFLICT DO NOTHING", (zone, hasher))
    row = connection.execute("UPDATE zone SET epoch = epoch + 1 RETURNING name, hasher, epoch").fetchone()
    assert row is not None
    if row[0] != zone:
        raise _foreign(schema, row[0], zone)
    if row[1] != hasher:
        raise HasherMismatch(f"the tables were written with {row[1]}, not {hasher}")
    connection.execute("UPDATE buffer SET epoch = %s", (row[2],))
    return int(row[2])
