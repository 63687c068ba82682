"""What attackers do, each in a process of its own: bounded in count and time, and only against the zone it is given.

Every attack is a function that runs until it is cancelled and counts how it was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__":  # run as a script, it finds the others where pytest does
    sys.path.insert(0, str(Path(__file__).parents[2]))

import grpc
from grpc_health.v1 import health_pb2
from tests.attack.honest import place_of, zone_at
from tests.e2e.zones import Zone

from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.messages import ADMIN, BOUNDARY
from bsfg.wire.status import ERROR_METADATA, from_rpc_error
from bsfg.wire.tls import Watched, grpc_channel_credentials, grpc_channel_options

STRANGER, REVOKED = "stranger", "revoked"
SECONDS_MOST = 600.0
MIB = 1 << 20

Attack = Callable[[Zone, "Counter[str]"], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(work: Attack) -> Attack:
    """Add an attack to the table."""
    ATTACKS[work.__name__] = work
    return work


class Attacker:
    """The process of one attack; ``counts`` tells at the end how it was answered."""

    def __init__(self, zone: Zone, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, name, place_of(zone)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "attacking\n"
        return self

    def __exit__(self, *exc_info: object) -> None:
        out, _ = self._process.communicate(timeout=60)
        self.counts.update(json.loads(out.splitlines()[-1]))


def raw_channel(zone: Zone, identity: str) -> grpc.aio.Channel:
    """Open a connection of its own on which anything can be sent."""
    own = ("grpc.use_local_subchannel_pool", 1)
    options = [*grpc_channel_options(f"{zone.name}-bsfg"), own, ("grpc.max_send_message_length", -1)]
    credentials = grpc_channel_credentials(Watched(zone.files(identity)).material)
    return grpc.aio.secure_channel(f"127.0.0.1:{zone.port}", credentials, options)


def code_of(error: grpc.aio.AioRpcError) -> str:
    """Give the stable code of a refusal, or gRPC's own where the node had no word in it."""
    if any(name == ERROR_METADATA for name, _ in error.trailing_metadata() or ()):
        return str(from_rpc_error(error).code)
    return f"grpc:{error.code().name}"


async def send(
    channel: grpc.aio.Channel, path: str, parts: Iterator[bytes] | list[bytes], counts: Counter[str]
) -> None:
    """Call a method with any bytes, read what comes, and count how it ended."""
    call = channel.stream_stream(path)(iter(parts), timeout=30)
    try:
        async for _ in call:
            counts["answers"] += 1
        counts["ended"] += 1
    except grpc.aio.AioRpcError as error:
        counts[code_of(error)] += 1


async def again(count: int, work: Callable[[], Awaitable[None]], pause_seconds: float = 0.0) -> None:
    """Do the same in many tasks at once, over and over, until cancelled."""

    async def one() -> None:
        while True:
            await work()
            await asyncio.sleep(pause_seconds)

    await asyncio.gather(*(one() for _ in range(count)))


def field_bomb(size_bytes: int) -> bytes:
    """Make a message of very many fields, none of which means anything."""
    return b"\x78\x01" * (size_bytes // 2)


@attack
async def field_bombs_of_strangers(zone: Zone, counts: Counter[str]) -> None:
    """Large messages of a million fields each, at methods that read one message and at those that read many."""
    channels = [raw_channel(zone, STRANGER) for _ in range(4)]
    bomb = field_bomb(15 * MIB)
    methods = [BOUNDARY[name].path for name in ("AppendFact", "AppendFacts", "ConfirmReceipt", "PutFacts")]

    async def one() -> None:
        await send(random.choice(channels), random.choice(methods), [bomb], counts)

    await again(4, one)


@attack
async def field_bombs_of_a_producer(zone: Zone, counts: Counter[str]) -> None:
    """The same by somebody who may append."""
    channel = raw_channel(zone, f"{zone.name}-gadget")
    bomb = field_bomb(3 * MIB)

    async def one() -> None:
        await send(channel, BOUNDARY[random.choice(["AppendFact", "AppendFacts"])].path, [bomb], counts)

    await again(2, one)


@attack
async def bytes_without_end(zone: Zone, counts: Counter[str]) -> None:
    """Strangers and a revoked identity with 64 streams of large frames."""
    channels = [raw_channel(zone, name) for name in (STRANGER, STRANGER, REVOKED, STRANGER)]
    frame = pb.AppendFrame(stream="operational", facts=b"\0" * (2 * MIB)).SerializeToString()

    async def one() -> None:
        await send(random.choice(channels), BOUNDARY["AppendFacts"].path, [frame] * 20, counts)

    await again(64, one)


@attack
async def silent_streams(zone: Zone, counts: Counter[str]) -> None:
    """Streams that are opened and on which nothing is ever said, of strangers and of a producer gone wrong."""
    channels = [raw_channel(zone, name) for name in (STRANGER, REVOKED, f"{zone.name}-gadget")]

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(SECONDS_MOST)
        yield b""

    async def one() -> None:
        method = BOUNDARY[random.choice(["AppendFacts", "PutFacts", "FollowFacts", "ConfirmReceipts", "AppendFact"])]
        call = random.choice(channels).stream_stream(method.path)(nothing(), timeout=60)
        counts["begun"] += 1
        try:
            async for _ in call:
                counts["answers"] += 1
        except grpc.aio.AioRpcError as error:
            counts[code_of(error)] += 1

    await again(400, one, 0.05)


@attack
async def health_and_reflection(zone: Zone, counts: Counter[str]) -> None:
    """A revoked identity that watches the health of the node 1,500 times at once, and asks for its methods."""
    channels = [raw_channel(zone, name) for name in (REVOKED, REVOKED, STRANGER, STRANGER)]
    watch = health_pb2.HealthCheckRequest().SerializeToString()
    paths = [
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ]

    async def one() -> None:
        await send(random.choice(channels), random.choice(paths), [watch], counts)

    await again(1_500, one, 0.05)


@attack
async def silent_connections(zone: Zone, counts: Counter[str]) -> None:
    """1,300 connections on both ports that say nothing, or begin a handshake and leave it there."""
    raise_descriptor_limit()
    held: list[socket.socket] = []
    try:
        for number in range(1_300):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", (zone.port, zone.http_port)[number % 2]), timeout=5)
                held.append(one)
                if number % 3 == 0:
                    one.sendall(b"\x16\x03\x01\x02\x00\x01")
                counts["connections"] += 1
            await asyncio.sleep(0)
        await asyncio.sleep(SECONDS_MOST)
    finally:
        for each in held:
            each.close()


@attack
async def handshakes_without_a_certificate(zone: Zone, counts: Counter[str]) -> None:
    """Handshakes that must fail, again and again, on both ports."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def one() -> None:
        with contextlib.suppress(OSError):
            port = random.choice((zone.port, zone.http_port))
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            await reader.read(100)
            writer.close()
        counts["handshakes"] += 1

    await again(5, one, 0.05)


@attack
async def slow_bodies(zone: Zone, counts: Counter[str]) -> None:
    """Bodies that come byte by byte: facts of strangers and of a producer, and sign-ins without any certificate."""
    raise_descriptor_limit()
    facts, sign_in = "/v1/streams/operational/facts", "/dashboard/sign-in"
    requests = [
        (context, f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())
        for context, path, size in (
            (http_context(zone, STRANGER), facts, 100_000),
            (http_context(zone, f"{zone.name}-gadget"), facts, 100_000),
            (http_context(zone, None), sign_in, 1_000),
        )
    ]

    async def one() -> None:
        context, head = random.choice(requests)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", zone.http_port, ssl=context)
        except OSError:
            counts["refused"] += 1
            await asyncio.sleep(0.1)
            return
        counts["begun"] += 1
        try:
            writer.write(head)
            reading = asyncio.ensure_future(reader.read(12))
            while not reading.done():
                writer.write(b"x")
                await writer.drain()
                await asyncio.wait([reading], timeout=0.5)
            with contextlib.suppress(OSError):
                counts[(await reading)[9:12].decode() or "dropped"] += 1
        except OSError:
            counts["dropped"] += 1
        finally:
            writer.close()

    await again(300, one, 0.1)


@attack
async def handshakes_without_end(zone: Zone, counts: Counter[str]) -> None:
    """Handshakes at the HTTP port that succeed and are made for nothing, as many as it takes, 300 at a time."""
    raise_descriptor_limit()
    contexts = [http_context(zone, STRANGER), http_context(zone, None)]

    async def one() -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", zone.http_port, ssl=random.choice(contexts))
        except OSError:
            counts["refused"] += 1
            return
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        with contextlib.suppress(OSError):
            counts[(await reader.read(12))[9:12].decode() or "dropped"] += 1
        writer.close()

    await again(300, one, 0.1)


def http_context(zone: Zone, identity: str | None) -> ssl.SSLContext:
    """Give the TLS of a caller over HTTP, with the certificate of an identity or without any."""
    context = ssl.create_default_context(cafile=str(zone.files(STRANGER).ca))
    context.check_hostname = False
    if identity is not None:
        context.load_cert_chain(zone.files(identity).certificate, zone.files(identity).key)
    return context


@attack
async def lists_without_end(zone: Zone, counts: Counter[str]) -> None:
    """Confirmations of very many ranges and refusals, labels and zones by the hundred thousand, all with a row."""
    consumer, producer = (raw_channel(zone, f"{zone.name}-{name}") for name in ("consumer", "gadget"))
    ranges = [pb.Range(first=2 * n, last=2 * n) for n in range(100_000)]
    refusals = [pb.Refusal(first=2 * n, last=2 * n, reason="expired") for n in range(50_000)]
    labels = {f"label-{n}": "x" for n in range(50_000)}
    heads = [n.to_bytes(32, "big") for n in range(50_000)]
    bombs: list[tuple[grpc.aio.Channel, str, Any]] = [
        (consumer, "ConfirmReceipt", pb.ConfirmRequest(consumer="app-1", ranges=ranges)),
        (consumer, "ConfirmReceipt", pb.ConfirmRequest(consumer="app-1", refusals=refusals)),
        (consumer, "FetchFacts", pb.FetchRequest(consumer="app-1", carry_only=[f"zone-{n}" for n in range(100_000)])),
        (consumer, "GetEvidence", pb.GetEvidenceRequest(stream="operational", heads=heads)),
        (producer, "AppendFact", pb.AppendRequest(stream="operational", envelope=pb.Envelope(labels=labels))),
    ]
    made = [(channel, BOUNDARY[name].path, message.SerializeToString()) for channel, name, message in bombs]

    async def one() -> None:
        channel, path, data = random.choice(made)
        await send(channel, path, [data], counts)

    await again(4, one)


@attack
async def nonsense_at_every_method(zone: Zone, counts: Counter[str]) -> None:
    """Bytes that are no message, at every method, by callers with a row and by strangers."""
    channels = [raw_channel(zone, name) for name in (f"{zone.name}-gadget", f"{zone.name}-consumer", STRANGER)]
    paths = [method.path for table in (BOUNDARY, ADMIN) for method in table.values()]

    async def one() -> None:
        await send(random.choice(channels), random.choice(paths), [random.randbytes(200)], counts)

    await again(30, one)


@attack
async def fetches_side_by_side(zone: Zone, counts: Counter[str]) -> None:
    """What anybody with a consumer may do: fetch as much as there is, as facts one by one, many times at once."""
    channel = raw_channel(zone, f"{zone.name}-consumer")
    request = pb.FetchRequest(consumer="app-1", limit=100_000, max_bytes=64 * MIB).SerializeToString()

    async def one() -> None:
        # An answer takes its turn among the others, and on a slow machine longer than a short attack does.
        counts["asked"] += 1
        await send(channel, BOUNDARY["FetchFacts"].path, [request], counts)

    await again(8, one)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may: attackers run out of them last."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def run(work: Attack, zone: Zone) -> Counter[str]:
    """Attack until standard input ends."""
    counts: Counter[str] = Counter()
    ended = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    attacking = asyncio.ensure_future(work(zone, counts))
    # What is sent has to be made first, on a slow machine for seconds; the attack begins when it is felt.
    for _ in range(300):
        if counts or attacking.done():
            break
        await asyncio.sleep(0.1)
    sys.stdout.write("attacking\n")
    sys.stdout.flush()
    done, _ = await asyncio.wait(
        [attacking, asyncio.ensure_future(ended.read())], timeout=SECONDS_MOST, return_when=asyncio.FIRST_COMPLETED
    )
    if attacking in done:
        attacking.result()
    attacking.cancel()
    return counts


def main() -> None:
    """Carry out the attack that the first argument names against the zone that the second describes."""
    counts: Any = asyncio.run(run(ATTACKS[sys.argv[1]], zone_at(sys.argv[2])))
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
