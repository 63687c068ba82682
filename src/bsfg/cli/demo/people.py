"""A producer of the demo: machines that report, or somebody who writes work orders, each with its PDF."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bsfg.fact import Fact
from bsfg.retry import Retry
from bsfg.sdk.endpoint import Endpoint
from bsfg.sdk.futures import FactFuture
from bsfg.sdk.producer import AsyncProducer


def page(lines: Sequence[str]) -> bytes:
    """Write lines of Latin text as a PDF of one page; the first is the title."""
    texts = [_shown(line, 20 if not number else 12) for number, line in enumerate(lines)]
    content = b"BT 72 770 Td 24 TL\n" + b"\n".join(texts) + b"\nET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    return _file(objects)


def _shown(line: str, points: int) -> bytes:
    text = line.encode("cp1252", "replace")
    for special in (b"\\", b"(", b")"):
        text = text.replace(special, b"\\" + special)
    return b"/F1 %d Tf (%s) Tj T*" % (points, text)


def _file(objects: Sequence[bytes]) -> bytes:
    result, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(result))
        result += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(result))
    return result + b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (len(objects) + 1, table, trailer)


REPORT_SECONDS = 0.1
TRY_AGAIN_SECONDS = 0.1

MACHINES = ("FILLER-07", "CAPPER-02", "LABELLER-01", "PALLETISER-03")
PRODUCTS = ("Apple juice 1 l", "Orange juice 1 l", "Water 0.5 l")

Said = tuple[str, Fact]
"""A message id and the fact."""


class Machines:
    """Four machines, each of which completes a cycle forty times a second."""

    pause_seconds = 0.05

    async def next(self, producer: AsyncProducer, number: int) -> Sequence[Said]:
        """Give what the machines say now; the ids follow from which machine it is and which cycle."""
        return [
            (f"{machine}/cycle/{cycle:07d}", Fact.of(f"asset:PlantA/{machine}", "cycle_completed", _cycle(cycle, at)))
            for cycle in (2 * number, 2 * number + 1)
            for at, machine in enumerate(MACHINES)
        ]


class Orders:
    """Somebody who releases a work order every other moment, and attaches a PDF to each."""

    pause_seconds = 0.4

    async def next(self, producer: AsyncProducer, number: int) -> Sequence[Said]:
        """Upload the next PDF, for as long as that takes, and give the order that names it."""
        order, product, amount = f"WO-{4711 + number}", PRODUCTS[number % len(PRODUCTS)], 1_000 + 37 * number % 900
        content = page([f"Work order {order}", f"Product: {product}", f"Amount: {amount}", "Line: FILLER-07"])
        artifact = await Retry(TRY_AGAIN_SECONDS, TRY_AGAIN_SECONDS, None).insist(
            lambda: producer.upload("document-files", f"{order}.pdf", content, media_type="application/pdf")
        )
        value = {"product": product, "amount": amount, "line": "FILLER-07"}
        return [(f"{order}/released", Fact.of(f"order:{order}", "order_released", value, artifact))]


def _cycle(number: int, machine: int) -> dict[str, Any]:
    return {"cycle": number, "weight_g": 1_000 + (37 * number + 11 * machine) % 17, "ok": (number + machine) % 97 != 0}


@dataclass(slots=True)
class Speaker:
    """One producer at work: what it has sent, and what it will report next."""

    producer: AsyncProducer
    words: Machines | Orders
    speaking: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    answered: int = 0
    news: list[tuple[str, int]] = field(default_factory=list)
    append_ms: list[float] = field(default_factory=list)
    answer_ms_max: float = 0.0
    silent: bool = False

    async def speak(self, group: asyncio.TaskGroup) -> None:
        """Send at a steady pace, and never wait for an answer."""
        due = time.perf_counter()
        for number in itertools.count():
            if not self.speaking.is_set():
                self.silent = True
                await self.speaking.wait()
                self.silent, due = False, time.perf_counter()
            said = await self.words.next(self.producer, number)
            started = time.perf_counter()
            futures = [await self.producer.send(fact, message_id=id_) for id_, fact in said]
            self.sent += len(said)
            group.create_task(self._follow(said, futures, started))
            due += self.words.pause_seconds
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _follow(self, said: Sequence[Said], futures: Sequence[FactFuture], started: float) -> None:
        for future in futures:
            await future.accepted()
        self.append_ms.append(1000 * (time.perf_counter() - started))
        for (id_, _), future in zip(said, futures, strict=True):
            self.news.append((id_, (await future).offset))
            self.answered += 1
        self.answer_ms_max = max(self.answer_ms_max, 1000 * (time.perf_counter() - started))

    async def report(self) -> None:
        """Tell every so often what is new."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            report = {
                "sent": self.sent,
                "answered": self.answered,
                "news": self.news,
                "append_ms": [round(value, 2) for value in self.append_ms],
                "answer_ms_max": self.answer_ms_max,
                "silent": self.silent and self.answered == self.sent,
            }
            sys.stdout.write(orjson.dumps(report).decode() + "\n")
            sys.stdout.flush()
            self.news, self.append_ms = [], []


async def _orders_of_the_director() -> AsyncIterator[str]:
    """Give the lines that come in; when they end, so does this process."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()
    os._exit(0)


async def _obey(speaker: Speaker) -> None:
    async for order in _orders_of_the_director():
        if order == "pause":
            speaker.speaking.clear()
        elif order == "resume":
            speaker.speaking.set()


async def main(kind: str, settings: dict[str, Any]) -> None:
    """Produce until told otherwise."""
    endpoint = Endpoint(**settings["endpoint"])
    words = Machines() if kind == "machines" else Orders()
    async with AsyncProducer(
        endpoint,
        stream=settings["stream"],
        from_zone=settings["from_zone"],
        to_zone=settings["to_zone"],
        outbox=settings["outbox"],
    ) as producer:
        speaker = Speaker(producer, words)
        speaker.speaking.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(_obey(speaker))
            group.create_task(speaker.report())
            group.create_task(speaker.speak(group))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], orjson.loads(sys.argv[2])))
