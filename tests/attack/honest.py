"""An honest producer in a process of its own: 20 single facts per second, whatever else goes on.

It starts each append when its time has come, not when the one before was answered, so that a node that falls silent
shows as what it is. On standard input it is told which phase begins; at the end it prints what each phase was like.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

if __name__ == "__main__":  # run as a script, it finds the others where pytest does
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.zones import Zone

from bsfg.errors import BsfgError
from bsfg.testing.facts import message
from bsfg.wire.client import BoundaryClient

PER_SECOND = 20
END = "end"


@dataclass
class Phase:
    """What one phase was like: how long each append took, and what was refused."""

    latencies_ms: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def p99_ms(self) -> float:
        """The 99th percentile of the latency."""
        return statistics.quantiles(self.latencies_ms, n=100, method="inclusive")[98]

    def __str__(self) -> str:
        median = statistics.median(self.latencies_ms)
        return f"{len(self.latencies_ms)} appends, p50 {median:.1f}, p99 {self.p99_ms:.1f} ms, {dict(self.refused)}"


class Honest:
    """The process, as a test sees it."""

    def __init__(self, zone: Zone) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, place_of(zone)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def begin(self, phase: str) -> None:
        """Begin another phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{phase}\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Phase]:
        """End it and give all phases."""
        out, _ = self._process.communicate(f"{END}\n", timeout=120)
        return {
            name: Phase(found["latencies_ms"], Counter(found["refused"])) for name, found in json.loads(out).items()
        }

    def __exit__(self, *exc_info: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def place_of(zone: Zone) -> str:
    """Write down where a zone is, for a process that calls it."""
    return json.dumps(
        {
            "name": zone.name,
            "root": str(zone.root),
            "certs": str(zone.certs),
            "port": zone.port,
            "http_port": zone.http_port,
        }
    )


def zone_at(place: str) -> Zone:
    """Read what `place_of` wrote."""
    found: dict[str, Any] = json.loads(place)
    return Zone(found["name"], Path(found["root"]), Path(found["certs"]), found["port"], found["http_port"])


async def produce(zone: Zone) -> dict[str, Phase]:
    """Append until told to end."""
    loop, said = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(said), sys.stdin)
    phases: dict[str, Phase] = {}
    tasks: set[asyncio.Task[None]] = set()
    number = 0

    async def append(phase: Phase, name: str) -> None:
        started = time.perf_counter()
        try:
            await client.append_fact("operational", message(name, from_zone=zone.name))
        except BsfgError as error:
            phase.refused[error.code] += 1
        phase.latencies_ms.append(1000 * (time.perf_counter() - started))

    async with BoundaryClient(zone.connection("producer")) as client:
        await append(Phase(), "the first")
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        current = (await said.readline()).decode().strip()
        told = asyncio.ensure_future(said.readline())
        due = loop.time()
        while current != END:
            phase = phases.setdefault(current, Phase())
            task = asyncio.create_task(append(phase, f"honest-{number}"))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number, due = number + 1, due + 1 / PER_SECOND
            await asyncio.sleep(max(0.0, due - loop.time()))
            if told.done():
                current = told.result().decode().strip() or END
                told = asyncio.ensure_future(said.readline())
        await asyncio.gather(*tasks)
        told.cancel()
    return phases


def main() -> None:
    """Produce at the zone that the argument describes."""
    phases = asyncio.run(produce(zone_at(sys.argv[1])))
    sys.stdout.write(
        json.dumps({name: {"latencies_ms": p.latencies_ms, "refused": p.refused} for name, p in phases.items()})
    )


if __name__ == "__main__":
    main()
