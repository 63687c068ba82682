"""Callers that mean no good: some never finish what they begin, others send nothing but nonsense, as fast as they can.

Run as a script it is a flood in a process of its own, so that a test can measure what a good producer feels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

if __name__ == "__main__":  # run as a script, it finds the others where pytest does
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.zones import Zone
from tests.wire.entries import fetch_entries

from bsfg.errors import BsfgError
from bsfg.ports import Confirmation
from bsfg.testing.facts import message
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.client import BoundaryClient

CLIENTS_EACH = 5
HANDSHAKE_PAUSE_SECONDS = 0.02
IDENTITIES = ("stranger", "plant-a-viewer", "plant-a-producer", "plant-a-consumer", "enterprise-bsfg")


class Loris:
    """Connections that begin a handshake or a request and never end it."""

    def __init__(self, zone: Zone, count: int) -> None:
        self._sockets: list[socket.socket] = []
        context = _context(zone)
        for number in range(count):
            port = (zone.port, zone.http_port)[number % 2]
            raw = socket.create_connection(("127.0.0.1", port), timeout=20)
            self._sockets.append(raw)
            if number % 4 == 0:
                raw.sendall(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of a ClientHello
            elif number % 4 == 3:
                # The whole handshake, then the head of a request, byte by byte and never to its end.
                secured = context.wrap_socket(raw)
                self._sockets[-1] = secured
                secured.sendall(b"POST /v1/facts HTTP/1.1\r\nHost: x\r\nX-Slow: ")

    def close(self) -> None:
        """Let go of all connections."""
        for each in self._sockets:
            each.close()

    def dropped(self) -> int:
        """Count the connections that the node has ended."""
        return sum(_is_closed(each) for each in self._sockets)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True
    return True


def _context(zone: Zone) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    files = zone.files(f"{zone.name}-producer")
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.certificate, files.key)
    return context


class Flood:
    """A process that sends invalid requests until it is stopped; ``counts`` then tells how they were answered."""

    def __init__(self, zone: Zone) -> None:
        place = json.dumps({"name": zone.name, "root": str(zone.root), "certs": str(zone.certs), "port": zone.port})
        self._process = subprocess.Popen(
            [sys.executable, __file__, place], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"flooding\n"
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        out, _ = self._process.communicate(timeout=30)
        self.counts.update(json.loads(out))


async def nonsense(client: BoundaryClient, chance: random.Random) -> None:
    """Ask for something that cannot be or may not be."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.append_fact("operational", message("x", subject="nonsense", from_zone="plant-a")),
        lambda: client.append_fact("nowhere", message("x", from_zone="plant-a")),
        lambda: client.append_fact("operational", message("x", from_zone="elsewhere")),
        lambda: fetch_entries(client, "nobody"),
        lambda: client.confirm("enterprise.operational", Confirmation(through=1 << 50)),
        lambda: AdminClient(client.connection).hold_gate("no-such-link", "because I can"),
    ]
    await chance.choice(calls)()


async def flood(zone: Zone) -> Counter[str]:
    """Send nonsense as several identities at once, until SIGTERM."""
    counts: Counter[str] = Counter()
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)

    async def one(identity: str, seed: int) -> None:
        chance = random.Random(seed)
        async with BoundaryClient(zone.connection(identity)) as client:
            while not stopping.is_set():
                try:
                    await nonsense(client, chance)
                    counts["taken"] += 1
                except BsfgError as error:
                    counts[error.code] += 1

    async def handshakes() -> None:
        """Shake hands without a certificate, again and again; a firewall stops those who do it faster."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        while not stopping.is_set():
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", zone.port, ssl=context)
                await reader.read(100)
                writer.close()
            counts["handshakes"] += 1
            await asyncio.sleep(HANDSHAKE_PAUSE_SECONDS)

    clients = [one(identity, seed) for seed in range(CLIENTS_EACH) for identity in IDENTITIES]
    tasks = [asyncio.create_task(each) for each in (*clients, handshakes())]
    sys.stdout.write("flooding\n")
    sys.stdout.flush()
    await stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def main() -> None:
    """Flood the node that the argument describes."""
    place = json.loads(sys.argv[1])
    zone = Zone(place["name"], Path(place["root"]), Path(place["certs"]), port=place["port"])
    started = time.monotonic()
    counts = asyncio.run(flood(zone))
    counts["milliseconds"] = int(1000 * (time.monotonic() - started))
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
