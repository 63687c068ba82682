"""A producer of the benchmark, as a process of its own: it prepares, says that it is ready, and goes when it is told.

Started as a module with a `BenchJob` as JSON; what it measured is one line of JSON. Times are of the monotonic clock,
which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bsfg.cli.bench.workload import OBJECT_BYTES, batch_of, batches_of
from bsfg.errors import BsfgError, PeerUnreachable, StorageFailed, TruncateRefused
from bsfg.fact import Message
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, Result
from bsfg.sdk.endpoint import Endpoint

if TYPE_CHECKING:
    from bsfg.sdk.producer import AsyncProducer
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.client import BoundaryClient

LIVE_STEP_SECONDS = 0.004
IN_FLIGHT_FACTS = 20_000
"""How many single facts an application keeps waiting for; more would only fill memory."""

LARGE_BYTES = 1 << 20
LARGE_IN_FLIGHT = 4
RANGES = 8_000
PAUSE_SECONDS = 0.1
CONFIRMED_SECONDS_MAX = 60.0

PROBE_BYTES = 1500
"""What one fact takes in a log of its own frames; the bare fdatasync writes as much."""


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What a producer does: which kind of work, on which facts, against which node."""

    kind: str
    address: str
    certs: str
    identity: str
    server_name: str
    stream: str
    first: int
    count: int
    object_bytes: int = OBJECT_BYTES
    rate: float = 0.0
    seconds: float = 0.0

    @property
    def endpoint(self) -> Endpoint:
        """Give the node and the certificate by which it knows the producer."""
        folder = Path(self.certs)
        files = (folder / "ca.crt", folder / f"{self.identity}.crt", folder / f"{self.identity}.key")
        return Endpoint(self.address, *files, self.server_name)


class BenchProcess:
    """A process of a benchmark, told by lines of JSON what to do; it answers with such lines."""

    def __init__(self, module: str, *args: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def tell(self, words: Any) -> None:
        """Tell it what to do."""
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(words) + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for its next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            last = self._errors.read()[-1000:].decode(errors="replace")
            raise PeerUnreachable("a process of the benchmark ended by itself", hint=f"Its last words: {last}")
        return orjson.loads(line)

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def measured(jobs: Sequence[BenchJob]) -> list[dict[str, Any]]:
    """Run jobs at the same time and give what each measured."""
    with ExitStack() as ending:
        clients: list[BenchProcess] = []
        for job in jobs:
            clients.append(BenchProcess("bsfg.cli.bench.node_client", orjson.dumps(asdict(job)).decode()))
            ending.callback(clients[-1].close)
        for client in clients:
            client.answer()
        for client in clients:
            client.tell("go")
        found = [client.answer() for client in clients]
    for each in found:
        if "error" in each:
            raise BsfgError.from_dict(each["error"])
    return found


# What happens in the process.


def _ready() -> tuple[float, float]:
    """Tell that everything is prepared, wait for the word, and give the time and the processor time by then."""
    print("true", flush=True)
    if not sys.stdin.readline():
        sys.exit(1)
    return time.monotonic(), time.process_time()


def _done(began: tuple[float, float], **more: Any) -> dict[str, Any]:
    return {"started": began[0], "ended": time.monotonic(), "cpu_seconds": time.process_time() - began[1], **more}


async def append_batches(job: BenchJob) -> dict[str, Any]:
    """Append prebuilt batches, as many in flight as the window allows, and wait for all receipts."""
    batches = list(batches_of(job.first, job.count, job.object_bytes))
    async with job.endpoint.connect() as client, client.append_stream(job.stream) as stream:
        await client.connection.check_health()
        began = _ready()
        answers = [await stream.send(batch) for batch in batches]
        for answer in answers:
            # Refuse to publish the speed of a wrong answer.
            receipt = (await answer).receipt
            if receipt.count(Result.INSERTED) != len(receipt.results):
                raise StorageFailed("some facts were not inserted")
        return _done(began)


@asynccontextmanager
async def _producing(job: BenchJob) -> AsyncIterator[tuple[AsyncProducer, list[Message]]]:
    """Open the connection of a producer with one fact, and give it with the facts of the job."""
    from bsfg.sdk.producer import AsyncProducer

    messages = batch_of(job.first, job.count + 1, job.object_bytes).to_messages()
    async with AsyncProducer(job.endpoint, stream=job.stream) as producer:
        await producer.append(messages.pop())
        yield producer, messages


async def append_facts(job: BenchJob) -> dict[str, Any]:
    """Give single facts to a producer and wait for the future of each."""
    async with _producing(job) as (producer, messages):
        began = _ready()
        futures: deque[Any] = deque()
        for message in messages:
            futures.append(await producer.send(message))
            if len(futures) > IN_FLIGHT_FACTS:
                await futures.popleft()
        for future in futures:
            _expect_one(await future)
        return _done(began)


async def append_singles(job: BenchJob) -> dict[str, Any]:
    """Append one fact after the other, each beside a call that does nothing and a bare fdatasync on the same disk."""
    probe = os.open(Path(job.certs) / "probe", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    append_ms: list[float] = []
    floor_ms: list[float] = []
    fdatasync_ms: list[float] = []
    async with job.endpoint.connect() as client, _producing(job) as (producer, messages):
        await client.connection.check_health()
        began = _ready()
        for message in messages:
            times = [time.perf_counter()]
            _expect_one(await producer.append(message))
            times.append(time.perf_counter())
            await client.connection.check_health()
            times.append(time.perf_counter())
            os.write(probe, bytes(PROBE_BYTES))
            os.fdatasync(probe)
            times.append(time.perf_counter())
            for samples, (before, after) in zip((append_ms, floor_ms, fdatasync_ms), pairwise(times), strict=True):
                samples.append(1000 * (after - before))
    os.close(probe)
    return _done(began, append_ms=append_ms, floor_ms=floor_ms, fdatasync_ms=fdatasync_ms)


async def append_live(job: BenchJob) -> dict[str, Any]:
    """Give facts to a producer at a steady rate, late ones at once, as machines do that do not wait for an answer."""
    async with _producing(job) as (producer, messages):
        began = _ready()
        futures: list[Any] = []
        while len(futures) < len(messages):
            due = min(len(messages), int((time.monotonic() - began[0]) * job.rate) + 1)
            for message in messages[len(futures) : due]:
                futures.append(await producer.send(message))
            await asyncio.sleep(LIVE_STEP_SECONDS)
        for future in futures:
            _expect_one(await future)
        return _done(began)


async def append_beside(job: BenchJob) -> dict[str, Any]:
    """Append one fact after the other for a time, while others keep the node busy, and note how long each took."""
    append_ms: list[float] = []
    async with _producing(job) as (producer, messages):
        began = _ready()
        while messages and time.monotonic() < began[0] + job.seconds:
            before = time.perf_counter()
            _expect_one(await producer.append(messages.pop()))
            append_ms.append(1000 * (time.perf_counter() - before))
            await asyncio.sleep(LIVE_STEP_SECONDS)
    return _done(began, append_ms=append_ms)


async def crowd(job: BenchJob) -> dict[str, Any]:
    """Keep a node busy for a time with large facts, confirmations of many ranges, and a removal of ``count`` facts."""
    from bsfg.wire.adminclient import AdminClient

    async with job.endpoint.connect() as client:
        admin = AdminClient(client.connection)
        await admin.create_consumer(ConsumerSpec(job.identity, job.stream, Buffer.STORE, required=False))
        began = _ready()
        ends = began[0] + job.seconds
        removal = asyncio.create_task(_removal(admin, job, ends))
        senders = [_large_facts(client, job, number, ends) for number in range(LARGE_IN_FLIGHT)]
        *large, confirmations = await asyncio.gather(*senders, _confirmations(client, job, ends))
        await removal
        return _done(began, large=sum(large), confirmations=confirmations)


async def _large_facts(client: BoundaryClient, job: BenchJob, number: int, ends: float) -> int:
    """Append the largest facts that are allowed, one after the other; tell how many."""
    sent = 0
    while not sent or time.monotonic() < ends:
        [first] = batch_of(job.first, 1).to_messages()
        envelope = replace(first.envelope, message_id=f"large-{number}-{sent}")
        fact = replace(first.fact, object=b'"%b"' % (b"x" * (LARGE_BYTES - 2)))
        await client.append_fact(job.stream, Message(envelope, fact))
        sent += 1
    return sent


async def _confirmations(client: BoundaryClient, job: BenchJob, ends: float) -> int:
    """Confirm a stretch of facts one by one in one call, then the next stretch; tell how often."""
    ranges, sent = min(RANGES, job.count), 0
    while not sent or time.monotonic() < ends:
        start = ranges * (sent % (job.count // ranges))
        offsets = range(start, start + ranges)
        await client.confirm(job.identity, Confirmation(ranges=[(offset, offset) for offset in offsets]))
        sent += 1
        await asyncio.sleep(PAUSE_SECONDS)
    return sent


async def _removal(admin: AdminClient, job: BenchJob, ends: float) -> None:
    """Remove the facts of all phases before, as soon as the other zone has confirmed them."""
    while True:
        try:
            await admin.truncate_before(job.stream, job.count, "a removal beside others")
        except TruncateRefused:
            if time.monotonic() > ends + CONFIRMED_SECONDS_MAX:
                raise
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            return


JOBS = {
    "batches": append_batches,
    "facts": append_facts,
    "singles": append_singles,
    "live": append_live,
    "beside": append_beside,
    "crowd": crowd,
}


def _expect_one(appended: Any) -> None:
    if appended.result != Result.INSERTED:
        raise StorageFailed("a fact was not inserted")


def main() -> None:
    """Do the job of the command line."""
    job = BenchJob(**orjson.loads(sys.argv[1]))
    try:
        result = asyncio.run(JOBS[job.kind](job))
    except BsfgError as error:
        result = {"error": error.to_dict()}
    sys.stdout.buffer.write(orjson.dumps(result) + b"\n")


if __name__ == "__main__":
    main()
