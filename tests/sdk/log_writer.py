"""A writer process for tests of local reads: it puts facts into a forward buffer until it is killed."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from bsfg.ports import OriginSpan
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.facts import message, sealed

SUBJECTS = 10


async def main() -> None:
    """Put facts one batch at a time, from a number on; print the number after the last durable one."""
    folder, first, count, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    storage = await LogStorage.open(folder, options=LogOptions(segment_bytes=65_536))
    forward = await storage.forward("operational")
    number = first
    while True:
        numbers = range(number, number + count)
        facts = [message(str(each), each, subject=f"machine:m{each % SUBJECTS}") for each in numbers]
        offsets = np.array(numbers, dtype=np.int64)
        await forward.put_if_absent(sealed(facts), OriginSpan("plant", offsets, offsets))
        number += count
        print(number, flush=True)
        await asyncio.sleep(pause)


if __name__ == "__main__":
    asyncio.run(main())
