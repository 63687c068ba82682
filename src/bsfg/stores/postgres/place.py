"""The place of a zone's active node: taken, kept by signs of life, lost; and watched by those who stand by.

A lock of a session says at once that the node which held it has died. A node that is paused, or cut off while the
server notices nothing, keeps its session. So the active one also gives a sign of life, and who stands by takes over
when there is none: by its own clock, so that no two clocks need to agree. Neither is what keeps facts sound: the epoch
is, which whoever takes the place counts up, and without which nothing is written.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql

from bsfg.errors import BsfgError, StorageTaken, StorageUnavailable
from bsfg.stores.shared.keeper import ZoneNode

Connection = psycopg.Connection[tuple[Any, ...]]

_QUOTED = re.compile("[\"'].*[\"']")
TAKEOVER_SECONDS = 5.0
SIGNS = 5
"""How many signs of life the active node gives in the time after which another one takes over."""

_LOCK_SPACE = 0x62736667
_PAUSE_SECONDS = 0.1
_TAKEN_SECONDS = 1.0
"""The server may need a moment to notice that the node before this one is dead."""

_END_MS = 2_000
_SIGN = "UPDATE node SET seen = clock_timestamp() WHERE token = %s AND epoch = (SELECT epoch FROM zone) RETURNING true"
_STAND = "INSERT INTO node (token, name) VALUES (%s, %s) ON CONFLICT (token) DO UPDATE SET seen = clock_timestamp()"
_ACTIVE = "SELECT token, name, seen FROM node WHERE epoch = (SELECT epoch FROM zone)"
_SEEN = """
SELECT name, epoch IS NOT NULL, extract(epoch FROM clock_timestamp() - seen)::float8 FROM node
WHERE seen > clock_timestamp() - make_interval(secs => %s) ORDER BY 2 DESC, 1
"""
_END = (
    "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity "
    "WHERE application_name = %s AND usename = current_user AND pid <> pg_backend_pid()"
)


def said_by(error: psycopg.Error) -> str:
    """Give in one line what the driver says, without what it quotes: that may be a piece of a password."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return _QUOTED.sub("…", line.rpartition(" failed: ")[2].strip())


def label(token: str) -> str:
    """Give the name under which the server knows the sessions of a node."""
    return f"bsfg {token}"


class _Seat:
    """The lock that only the active node holds."""

    def __init__(self, schema: str) -> None:
        self._schema = schema

    def tried(self, connection: Connection) -> bool:
        """Take the lock, if it is free."""
        return self._ask(connection, "pg_try_advisory_lock")

    def given_back(self, connection: Connection) -> None:
        """Let go of the lock."""
        self._ask(connection, "pg_advisory_unlock")

    def _ask(self, connection: Connection, function: str) -> bool:
        asked = f"SELECT {function}(%s, to_regnamespace(%s)::oid::bigint::bit(32)::integer)"
        quoted = sql.Identifier(self._schema).as_string(connection)
        row = connection.execute(asked, (_LOCK_SPACE, quoted)).fetchone()
        return row is not None and bool(row[0])


def hang_up(connection: Connection) -> None:
    """Have whoever waits for an answer over a connection wait no longer; any thread may."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def _has_nodes(connection: Connection) -> bool:
    return connection.execute("SELECT to_regclass('node')").fetchone() != (None,)


class Place:
    """The place of the active node, as that node has it; any thread may ask whether it still does."""

    def __init__(self, connect: Callable[[], Connection], schema: str, name: str, takeover_seconds: float) -> None:
        self._connect, self._schema, self._name = connect, schema, name
        self.takeover_seconds = takeover_seconds
        self.token = secrets.token_hex(8)
        self.epoch = 0
        self.nodes: list[ZoneNode] = []
        self._seat = _Seat(schema)
        self._guard: Connection | None = None
        self._guard_pid = 0
        self._guarding = threading.Lock()
        self._doubted = False
        self._ending = threading.Event()
        self._keeper: threading.Thread | None = None
        self._seen = 0.0

    # Taking it.

    def take(self, connection: Connection) -> None:
        """Take the lock on a connection, which stays the guard's, or raise `StorageTaken`; end who had it before."""
        deadline = time.monotonic() + _TAKEN_SECONDS
        while not self._seat.tried(connection):
            if time.monotonic() >= deadline:
                raise StorageTaken(f"another node has the schema {self._schema} open", active=_active(connection))
            time.sleep(_PAUSE_SECONDS)
        self._guard, self._guard_pid = connection, connection.info.backend_pid
        if _has_nodes(connection):
            # Whoever was paused in mid-transaction still has rows locked.
            for (token,) in connection.execute("SELECT token FROM node WHERE epoch IS NOT NULL").fetchall():
                connection.execute(_END, (_END_MS, label(token)))

    def enter(self, connection: Connection, epoch: int) -> None:
        """Be the active node of an epoch, within the transaction that has begun it."""
        self.epoch = epoch
        connection.execute("DELETE FROM node WHERE epoch IS NOT NULL OR seen < now() - interval '1 hour'")
        connection.execute("INSERT INTO node (token, name, epoch) VALUES (%s, %s, %s)", (self.token, self._name, epoch))

    def keep(self, on_lost: Callable[[], None]) -> None:
        """Begin to give signs of life; ``on_lost`` is called once, by another thread, when the place is lost."""
        assert self._guard is not None
        # A sign of life that a crash takes back is no loss.
        self._guard.execute("SET synchronous_commit TO off", prepare=False)
        self._seen = time.monotonic()
        self._keeper = threading.Thread(target=self._keep, args=(on_lost,), name="bsfg-place", daemon=True)
        self._keeper.start()

    # Having it.

    def hold(self) -> None:
        """Make sure of the lock: after a lost connection it is free, and may be another's."""
        with self._guarding:
            if self._ending.is_set():
                raise StorageUnavailable("the storage is closed")
            if self._guard is not None and self._doubted:
                try:
                    self._guard.execute("SELECT 1")
                except psycopg.Error:
                    self._drop()
            self._doubted = False
            if self._guard is None:
                self._guard = self._retaken()

    def doubt(self) -> None:
        """Have the lock looked after before the next use, since a connection was lost."""
        self._doubted = True

    @property
    def is_silent(self) -> bool:
        """Whether another node may take over, since no sign of life came through for so long.

        Where nobody stands by there is nothing to be gained by leaving.
        """
        return len(self.nodes) > 1 and time.monotonic() - self._seen >= self.takeover_seconds

    def give_up(self) -> None:
        """Give no more signs of life."""
        self._ending.set()

    def leave(self) -> None:
        """Give the place back; repeats are harmless."""
        self._ending.set()
        if self._keeper is not None:
            self._keeper.join()
        with self._guarding:
            if self._guard is not None:
                with suppress(psycopg.Error):
                    self._guard.execute("DELETE FROM node WHERE token = %s", (self.token,))
            self._drop()

    def _keep(self, on_lost: Callable[[], None]) -> None:
        while not self._ending.wait(self.takeover_seconds / SIGNS):
            try:
                self.hold()
                self._sign()
                self._seen = time.monotonic()
            except StorageTaken:
                on_lost()
            except (BsfgError, psycopg.Error):
                self.doubt()

    def _sign(self) -> None:
        with self._guarding:
            if self._guard is None:
                return
            if not self._guard.execute(_SIGN, (self.token,)).fetchall():
                raise self._overtaken()
            asked = (max(3 * self.takeover_seconds, 10.0),)
            self.nodes = [ZoneNode(*row) for row in self._guard.execute(_SEEN, asked).fetchall()]

    def _retaken(self) -> Connection:
        connection = self._connect()
        try:
            deadline = time.monotonic() + _TAKEN_SECONDS
            while not self._seat.tried(connection):
                self._check_epoch(connection)
                # The server may still take a session for alive whose connection was lost here.
                connection.execute(f"{_END} AND pid = %s", (_END_MS, label(self.token), self._guard_pid))
                if time.monotonic() >= deadline:
                    raise StorageUnavailable(f"somebody else holds the lock of the schema {self._schema}")
                time.sleep(_PAUSE_SECONDS)
            self._check_epoch(connection)
            connection.execute("SET synchronous_commit TO off", prepare=False)
        except psycopg.Error as error:
            connection.close()
            raise StorageUnavailable(said_by(error)) from None
        except BsfgError:
            connection.close()
            raise
        self._guard_pid = connection.info.backend_pid
        return connection

    def _check_epoch(self, connection: Connection) -> None:
        if connection.execute("SELECT epoch FROM zone").fetchone() != (self.epoch,):
            raise self._overtaken()

    def _overtaken(self) -> StorageTaken:
        return StorageTaken(f"another node has taken over the schema {self._schema}")

    def _drop(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()


def _active(connection: Connection) -> str:
    """Give the name of the active node, as far as that is known."""
    if not _has_nodes(connection):
        return ""
    row = connection.execute(_ACTIVE).fetchone()
    return str(row[1]) if row is not None else ""


class PlaceWatch:
    """Watches the place of the active node for one that stands by; ``interrupt`` ends a look that has no end."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        interrupt: Callable[[], None],
        schema: str,
        name: str,
        takeover_seconds: float,
    ) -> None:
        self._connect, self._name, self._takeover_seconds = connect, name, takeover_seconds
        self.interrupt = interrupt
        self._seat, self._token = _Seat(schema), secrets.token_hex(8)
        self._connection: Connection | None = None
        self._last: tuple[Any, ...] | None = None
        self._since = 0.0

    @property
    def interval_seconds(self) -> float:
        """How often to look."""
        return self._takeover_seconds / SIGNS

    def look(self) -> str | None:
        """Give the name of the active node, None when its place is free; raises `StorageUnavailable`."""
        try:
            if self._connection is None:
                self._connection = self._connect()
                # To stand by is no commit that a standby of the server must have.
                self._connection.execute("SET synchronous_commit TO off", prepare=False)
            return self._looked(self._connection)
        except psycopg.Error as error:
            self._forget()
            raise StorageUnavailable(f"the server ended the connection: {said_by(error)}") from None

    def close(self) -> None:
        """Stand by no more."""
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.execute("DELETE FROM node WHERE token = %s", (self._token,))
        self._forget()

    def _looked(self, connection: Connection) -> str | None:
        if self._seat.tried(connection):
            # Whoever opens the tables takes it again, on the connection that shall keep it.
            self._seat.given_back(connection)
            return None
        if not _has_nodes(connection):
            return ""
        connection.execute(_STAND, (self._token, self._name))
        row = connection.execute(_ACTIVE).fetchone()
        now = time.monotonic()
        if row != self._last:
            self._last, self._since = row, now
        elif row is not None and now - self._since >= self._takeover_seconds:
            connection.execute(_END, (_END_MS, label(row[0])))
            self._since = now
            return None
        return str(row[1]) if row is not None else ""

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        # What was not watched counts for nothing.
        self._last = None
        if connection is not None:
            connection.close()
