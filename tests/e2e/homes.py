"""The servers of which each keeps the facts of one zone, held to the same list of faults."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
from tests.e2e.cleanup import Cleanup
from tests.e2e.proxy import Proxy
from tests.e2e.zones import Zone

from bsfg.errors import BsfgError
from bsfg.gapbook import GapBook
from bsfg.gaps import GapSet, RangeSet, listed
from bsfg.ports import Buffer, Frame
from bsfg.retention import GapReason
from bsfg.stores.jetstream.frames import JetStreamFrames
from bsfg.stores.jetstream.server import JetStreamServer, JetStreamSettings
from bsfg.stores.jetstream.storage import reading
from bsfg.stores.jetstream.zone import ZoneNames
from bsfg.stores.shared.keeper import FrameRow
from bsfg.stores.shared.reading import PAGE_FRAMES, entries_in
from bsfg.testing.nats import PackagedNats
from bsfg.testing.postgres import PackagedServer


def _noted(gaps: Any) -> Any:
    """Give gap records as the notes of a log have them."""
    book = GapBook()
    for gap in gaps:
        book.add(gap)
    return SimpleNamespace(gaps=listed(book.sets()))


@dataclass
class TableLog:
    """One buffer of a zone, read from its tables."""

    dsn: str
    stream: str
    buffer: Buffer

    def frames(self) -> Iterator[Frame]:
        """Give everything that it holds."""
        with psycopg.connect(self.dsn) as connection:
            (id_, log_id) = self._row(connection, "id, log_id")
            asked = (
                "SELECT base, count, appended_at_unix_ms, chain_before, content FROM bsfg.frame WHERE buffer_id = %s"
            )
            for row in connection.execute(f"{asked} ORDER BY base", (id_,), binary=True):
                frame = FrameRow(*row)
                yield Frame(frame.base, frame.end - 1, entries_in(frame, bytes(log_id), self.buffer))

    def view(self) -> Any:
        """Give its extent."""
        with psycopg.connect(self.dsn) as connection:
            start, end = self._row(connection, "start_offset, end_offset")
        return SimpleNamespace(start=start, end=end)

    def notes(self) -> Any:
        """Give its gap records."""
        with psycopg.connect(self.dsn) as connection:
            (id_,) = self._row(connection, "id")
            asked = "SELECT reason, ranges, detail, origin_zone, since_unix_ms FROM bsfg.gap WHERE buffer_id = %s"
            rows = connection.execute(f"{asked} ORDER BY id", (id_,)).fetchall()
        return _noted(GapSet(GapReason(reason), RangeSet.decode(ranges), *more) for reason, ranges, *more in rows)

    def _row(self, connection: psycopg.Connection[Any], columns: str) -> tuple[Any, ...]:
        asked = f"SELECT {columns} FROM bsfg.buffer WHERE stream = %s AND kind = %s"
        row = connection.execute(asked, (self.stream, str(self.buffer))).fetchone()
        assert row is not None
        return tuple(row)


@dataclass
class StreamLog:
    """One buffer of a zone, read from its stream."""

    url: str
    zone: str
    stream: str
    buffer: Buffer

    @contextlib.contextmanager
    def _reading(self) -> Iterator[JetStreamFrames]:
        server = JetStreamServer(JetStreamSettings([self.url], patience_seconds=0))
        try:
            server.open()
            yield reading(server, ZoneNames("bsfg", self.zone), self.stream, self.buffer)
        finally:
            server.close()

    def frames(self) -> Iterator[Frame]:
        """Give everything that it holds."""
        with self._reading() as frames:
            found, at = frames.found(), 0
            while page := frames.frames(at, found.head.end, PAGE_FRAMES):
                for frame in page:
                    yield Frame(frame.base, frame.end - 1, entries_in(frame, found.log_id, self.buffer))
                at = page[-1].end

    def view(self) -> Any:
        """Give its extent."""
        with self._reading() as frames:
            head = frames.found().head
        return SimpleNamespace(start=head.start, end=head.end)

    def notes(self) -> Any:
        """Give its gap records."""
        with self._reading() as frames:
            return _noted(frames.found().gaps)


class Home(ABC):
    """A server of a zone's own."""

    server: Any
    backend: str

    @abstractmethod
    def way(self) -> Proxy:
        """Give a line to it that can be cut."""

    @abstractmethod
    def table(self, port: int | None, takeover_after: str) -> str:
        """Configure a storage there, by a line if there is one."""

    @abstractmethod
    def log(self, zone: str, stream: str, buffer: Buffer) -> TableLog | StreamLog:
        """Give a buffer of a zone to read."""


class InDatabase(Home):
    """A zone's facts are in PostgreSQL."""

    backend = "postgres"

    def __init__(self) -> None:
        self.server = PackagedServer()

    def way(self) -> Proxy:
        """Give a line to its socket."""
        (path,) = [each for each in self.server.folder.glob(".s.PGSQL.*") if each.suffix != ".lock"]
        return Proxy(Path(path))

    def table(self, port: int | None, takeover_after: str) -> str:
        """Configure a storage there."""
        by_line = f"host=127.0.0.1 port={port} user=postgres dbname=postgres sslmode=disable"
        dsn = self.server.dsn if port is None else by_line
        table = f'dsn = "{dsn}"\npatience = "1s"\ntakeover_after = "{takeover_after}"\n'
        return f'backend = "postgres"\n[storage.postgres]\n{table}'

    def log(self, zone: str, stream: str, buffer: Buffer) -> TableLog:
        """Give a buffer to read."""
        return TableLog(self.server.dsn, stream, buffer)


class InStreams(Home):
    """A zone's facts are in JetStream."""

    backend = "jetstream"

    def __init__(self) -> None:
        self.server = PackagedNats().start()

    def way(self) -> Proxy:
        """Give a line to its port."""
        return Proxy(self.server.port)

    def table(self, port: int | None, takeover_after: str) -> str:
        """Configure a storage there; when another node takes over is not for anybody to say."""
        url = self.server.url if port is None else f"nats://127.0.0.1:{port}"
        table = f'servers = ["{url}"]\nmonitor_url = "{self.server.monitor_url}"\npatience = "1s"\n'
        return f'backend = "jetstream"\n[storage.jetstream]\n{table}'

    def log(self, zone: str, stream: str, buffer: Buffer) -> StreamLog:
        """Give a buffer to read."""
        return StreamLog(self.server.url, zone, stream, buffer)


HOMES: dict[str, type[Home]] = {"postgres": InDatabase, "jetstream": InStreams}


@dataclass
class ServerZone(Zone):
    """A zone whose facts are in a server of its own."""

    home: Home = field(default_factory=InDatabase)
    way: Any = None
    takeover_after: str = "3s"

    @classmethod
    def of(cls, plain: Zone, home: Home, cleanup: Cleanup) -> ServerZone:
        """Give a zone as it is, with its facts at home."""
        zone = cls(plain.name, plain.root, plain.certs, port=plain.port, http_port=plain.http_port, home=home)
        zone.links, zone.identities, zone.serve = plain.links, plain.identities, plain.serve
        zone.write()
        cleanup.closing(SimpleNamespace(close=home.server.stop))
        cleanup.zone(zone)
        return zone

    @property
    def server(self) -> Any:
        """The server that keeps its facts."""
        return self.home.server

    def write(self) -> None:
        """Write its configuration."""
        self.storage = self.home.table(self.way.port if self.way is not None else None, self.takeover_after)
        super().write()

    def log(self, buffer: Buffer, stream: str = "operational") -> Any:
        """Open one of its buffers for reading."""
        return self.home.log(self.name, stream, buffer)

    def end(self, buffer: Buffer, stream: str = "operational") -> int:
        """Give where a buffer ends; while the server is away nobody knows."""
        with contextlib.suppress(psycopg.OperationalError, BsfgError):
            return int(self.log(buffer, stream).view().end)
        return 0
