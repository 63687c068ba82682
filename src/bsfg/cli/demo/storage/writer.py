"""The demo's writer: takes facts as lines of JSON over a local socket and answers each when it is durable.

Run as `python -m bsfg.cli.demo.storage.writer FOLDER SOCKET`. It is meant to be killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from functools import partial

import orjson

from bsfg.batch import FactBatch
from bsfg.cli.demo.storage.script import STREAM, end_with_parent
from bsfg.jsonform import message_from_json
from bsfg.ports import Result
from bsfg.sealing import seal
from bsfg.stores.log.buffer import LogStoreBuffer
from bsfg.stores.log.storage import LogStorage


def address(socket: str) -> str:
    """Give the address for a socket's path; one that is too long for the system becomes an abstract name."""
    if len(socket.encode()) < 100:
        return socket
    return "\0bsfg-demo-" + hashlib.blake2b(socket.encode(), digest_size=16).hexdigest()


async def serve(folder: str, socket: str) -> None:
    """Open the folder and serve producers until killed."""
    started = time.perf_counter()
    store = await (await LogStorage.open(folder)).store(STREAM)
    opened_ms = 1000 * (time.perf_counter() - started)
    server = await asyncio.start_unix_server(partial(_converse, store), address(socket))
    print(orjson.dumps({"opened_ms": opened_ms, "end": store.end}).decode(), flush=True)
    await server.serve_forever()


async def _converse(store: LogStoreBuffer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take every line of one producer at once; the log makes those that wait together durable with one sync."""
    under_way: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            task = asyncio.create_task(_append(store, line, writer))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
    except ConnectionError:
        pass  # the producer is gone; what it sent is stored all the same
    finally:
        writer.close()


async def _append(store: LogStoreBuffer, line: bytes, writer: asyncio.StreamWriter) -> None:
    message = message_from_json(line)
    receipt = await store.append(seal(FactBatch.from_messages([message])))
    answer = {
        "id": message.envelope.message_id,
        "offset": int(receipt.offsets[0]),
        "result": Result(int(receipt.results[0])).name.lower(),
    }
    writer.write(orjson.dumps(answer, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
