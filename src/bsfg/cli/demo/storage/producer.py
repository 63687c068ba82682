"""A producer of the demo: sends its facts, and sends again with the same id whatever was not acknowledged.

Run as `python -m bsfg.cli.demo.storage.producer SOCKET NUMBER FACTS`. It reports on stdout what was acknowledged.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

import orjson

from bsfg.cli.demo.storage.script import end_with_parent, line_of, message_id
from bsfg.cli.demo.storage.writer import address

WINDOW = 32
"""Facts that a producer keeps waiting for at a time."""

REPORT_SECONDS = 0.05
RETRY_SECONDS = 0.02


@dataclass(slots=True)
class Producer:
    """One producer: what it still has to say, what it waits for, and what it will report next."""

    socket: str
    number: int
    facts: int
    next: int = 0
    waiting: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    acknowledged: list[tuple[str, int, str]] = field(default_factory=list)
    retried: int = 0
    longest_ms: float = 0.0
    reported: float = 0.0

    @property
    def done(self) -> bool:
        """Whether every fact is acknowledged."""
        return self.next == self.facts and not self.waiting

    async def run(self) -> None:
        """Connect again for as long as something is not acknowledged."""
        while not self.done:
            try:
                reader, writer = await asyncio.open_unix_connection(address(self.socket))
            except OSError:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                await self._converse(reader, writer)
            except OSError:
                pass  # the writer was killed; nothing that was not answered may be forgotten
            finally:
                writer.close()
            self._report()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.retried += len(self.waiting)
        writer.writelines([line for line, _ in self.waiting.values()])
        self._fill(writer)
        while not self.done:
            await writer.drain()
            answer = await reader.readline()
            if not answer.endswith(b"\n"):
                return
            self._take(orjson.loads(answer))
            self._fill(writer)

    def _fill(self, writer: asyncio.StreamWriter) -> None:
        while self.next < self.facts and len(self.waiting) < WINDOW:
            line = line_of(self.number, self.next)
            self.waiting[message_id(self.number, self.next)] = line, time.perf_counter()
            self.next += 1
            writer.write(line)

    def _take(self, answer: dict[str, object]) -> None:
        id_ = str(answer["id"])
        if id_ not in self.waiting:
            return
        _, sent = self.waiting.pop(id_)
        self.longest_ms = max(self.longest_ms, 1000 * (time.perf_counter() - sent))
        self.acknowledged.append((id_, int(str(answer["offset"])), str(answer["result"])))
        if self.done or time.perf_counter() - self.reported > REPORT_SECONDS:
            self._report()

    def _report(self) -> None:
        report = {
            "sent": self.next,
            "acknowledged": self.acknowledged,
            "retried": self.retried,
            "longest_ms": self.longest_ms,
        }
        print(orjson.dumps(report).decode(), flush=True)
        self.acknowledged, self.reported = [], time.perf_counter()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(Producer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run())
