"""What `bsfg bench store` measures of a storage on a server: ours beside the same server, used as one would by hand.

By hand means for PostgreSQL: binary COPY into a temporary table, INSERT … SELECT … ON CONFLICT from there, one commit
per batch. For JetStream: a subject for each key, which must be new, in atomic batches of messages. Both take turns with
our storage, a part of the facts each, so that a busy machine is as busy for the one as for the other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from bsfg.batch import FactBatch
from bsfg.cli.bench.measure import SINGLES, SINGLES_FROM, appending, duplicates, prebuilt, replay, singles_of, timed
from bsfg.cli.bench.store import Aim, percentile
from bsfg.cli.bench.workload import batches_of
from bsfg.errors import StorageFailed
from bsfg.ports import Storage, StoreBuffer

if TYPE_CHECKING:
    import psycopg
    from nats.aio.client import Client

ROUNDS = 4
MAX_REPEATS = 40_000
HOPED_PER_SECOND = {"postgres": 50_000, "jetstream": 20_000}
_TABLE = "CREATE TABLE by_hand (from_zone text, message_id text, body bytea, PRIMARY KEY (from_zone, message_id))"
_STAGING = "CREATE TEMPORARY TABLE staged (LIKE by_hand) ON COMMIT DELETE ROWS"
_ATOMIC = 900
"""A server takes up to a thousand messages in one atomic batch."""

Row = tuple[str, str, bytes]
Step = Callable[[str, int], None]


# PostgreSQL.


async def run_postgres(dsn: str | None, facts: int, step: Step) -> dict[str, Any]:
    """Measure a server, or one of our own, in a schema of our own, which is removed in the end."""
    import psycopg
    from psycopg import sql

    from bsfg.stores.postgres.database import PostgresSettings
    from bsfg.stores.postgres.storage import PostgresStorage
    from bsfg.testing.postgres import PackagedServer

    server = PackagedServer() if dsn is None else None
    reached, schema = dsn or (server.dsn if server else ""), f"bsfg_bench_{uuid4().hex[:12]}"
    try:
        storage = await PostgresStorage.open(PostgresSettings(reached, schema), zone="bench")
        try:
            with psycopg.connect(reached) as connection:
                connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))
                connection.execute(_TABLE)
                connection.execute(_STAGING)
                connection.commit()
                return await _measured(storage, TableByHand(connection), facts, step)
        finally:
            await storage.close()
            with psycopg.connect(reached, autocommit=True) as connection:
                connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
    finally:
        if server is not None:
            server.stop()


class TableByHand:
    """A table with the key of each fact."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    async def store(self, rows: Sequence[Row]) -> None:
        """Copy the rows of a batch, and insert them from there."""
        with self._connection.cursor() as cursor:
            with cursor.copy("COPY staged FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", "text", "bytea"])
                for row in rows:
                    copy.write_row(row)
            cursor.execute("INSERT INTO by_hand SELECT * FROM staged ON CONFLICT DO NOTHING")
        self._connection.commit()

    async def store_one(self, row: Row) -> None:
        """Insert one row."""
        self._connection.execute("INSERT INTO by_hand VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", row)
        self._connection.commit()


# JetStream.


async def run_jetstream(url: str | None, facts: int, step: Step) -> dict[str, Any]:
    """Measure a server, or one of our own, in streams of our own, which are removed in the end."""
    from bsfg.stores.jetstream.server import JetStreamSettings
    from bsfg.stores.jetstream.storage import JetStreamStorage
    from bsfg.testing.nats import PackagedNats

    server = PackagedNats().start() if url is None else None
    reached, prefix = url or (server.url if server else ""), f"bsfg_bench_{uuid4().hex[:12]}"
    try:
        # A server that is given is measured as it is, whether it syncs or not.
        settings = JetStreamSettings([reached], prefix, allow_unsafe=True)
        async with _by_streams(reached, prefix) as by_hand:
            storage = await JetStreamStorage.open(settings, zone="bench")
            try:
                return await _measured(storage, by_hand, facts, step)
            finally:
                await storage.close()
    finally:
        if server is not None:
            server.stop()


@asynccontextmanager
async def _by_streams(url: str, prefix: str) -> AsyncIterator[StreamByHand]:
    import nats

    client = await nats.connect(url)
    by_hand = StreamByHand(client, f"{prefix}_by_hand")
    try:
        config = {"name": prefix, "subjects": [f"{prefix}_by_hand.>"], "allow_atomic": True, "discard": "new"}
        await by_hand.ask(f"$JS.API.STREAM.CREATE.{prefix}", orjson.dumps(config))
        yield by_hand
    finally:
        for subject in (f"{prefix}.>", f"{prefix}_by_hand.>"):
            found = await by_hand.ask("$JS.API.STREAM.NAMES", orjson.dumps({"subject": subject}))
            for name in found["streams"] or ():
                await by_hand.ask(f"$JS.API.STREAM.DELETE.{name}", b"")
        await client.close()


class StreamByHand:
    """A stream with a subject for each key."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client, self._prefix = client, prefix

    async def ask(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Send a message, and give what the server answers."""
        answer: dict[str, Any] = orjson.loads((await self._client.request(subject, data, 30, headers=headers)).data)
        if "error" in answer:
            raise StorageFailed(f"the server refuses what is done by hand: {answer['error']}")
        return answer

    async def store(self, rows: Sequence[Row]) -> None:
        """Publish a batch, as many at once as the server takes."""
        for at in range(0, len(rows), _ATOMIC):
            *first, last = rows[at : at + _ATOMIC]
            id_ = uuid4().hex
            for number, row in enumerate(first, 1):
                await self._client.publish(self._subject(row), row[2], headers=self._headers(id_, number))
            commit = {**self._headers(id_, len(first) + 1), "Nats-Batch-Commit": "1"}
            await self.ask(self._subject(last), last[2], commit)

    async def store_one(self, row: Row) -> None:
        """Publish one message."""
        await self.ask(self._subject(row), row[2], {"Nats-Expected-Last-Subject-Sequence": "0"})

    def _subject(self, row: Row) -> str:
        return f"{self._prefix}.{row[0]}.{row[1]}"

    def _headers(self, id_: str, number: int) -> dict[str, str]:
        new = "Nats-Expected-Last-Subject-Sequence"
        return {new: "0", "Nats-Batch-Id": id_, "Nats-Batch-Sequence": str(number)}


# Both.


async def _measured(storage: Storage, by_hand: TableByHand | StreamByHand, facts: int, step: Step) -> dict[str, Any]:
    store = await storage.store("bench")
    ours, theirs = await _bulk(store, by_hand, facts, step)
    single_ms, direct_ms = await _single(store, by_hand, step)
    single, direct_single = percentile(single_ms, 50), percentile(direct_ms, 50)
    return {
        "facts": facts,
        "append_per_second": facts / ours,
        "direct_per_second": facts / theirs,
        "duplicates_per_second": await duplicates(store, facts, step, MAX_REPEATS),
        "replay_per_second": await replay(store, facts, step),
        "single_append_ms_p50": single,
        "single_append_ms_p99": percentile(single_ms, 99),
        "direct_single_ms_p50": direct_single,
        "append_ratio": theirs / ours,
        "single_append_ratio": single / direct_single,
    }


async def _bulk(store: StoreBuffer, by_hand: TableByHand | StreamByHand, facts: int, step: Step) -> tuple[float, float]:
    """Append all facts, a part by us and a part by hand in turns; give the seconds that each took."""
    ours = theirs = 0.0
    part = max(1, facts // ROUNDS)
    for first in range(0, facts, part):
        prepared = prebuilt(batches_of(first, min(part, facts - first)), step)
        rows = [_rows(batch) for batch in prepared]
        ours += await timed(prepared, appending(store), "append", step)
        started = time.perf_counter()
        for batch in rows:
            await by_hand.store(batch)
        theirs += time.perf_counter() - started
        step("by hand", sum(map(len, rows)))
    return ours, theirs


def _rows(batch: FactBatch) -> list[Row]:
    return list(zip(batch.values("from_zone"), batch.values("message_id"), batch.values("object"), strict=True))


async def _single(
    store: StoreBuffer, by_hand: TableByHand | StreamByHand, step: Step
) -> tuple[list[float], list[float]]:
    """Append one fact at a time, each beside one by hand."""
    append, ours, theirs = appending(store), list[float](), list[float]()
    for fact in singles_of(SINGLES_FROM, SINGLES):
        (row,) = _rows(fact)
        started = time.perf_counter()
        await append(fact)
        between = time.perf_counter()
        await by_hand.store_one(row)
        ours.append(1000 * (between - started))
        theirs.append(1000 * (time.perf_counter() - between))
        step("single", 1)
    return ours, theirs


def aims_of(numbers: dict[str, Any]) -> list[Aim]:
    """Hold the numbers against what is hoped for."""
    return [
        Aim("append_per_second", numbers["append_per_second"], HOPED_PER_SECOND[numbers["backend"]], "facts/s"),
        Aim("append_ratio", numbers["append_ratio"], 0.8, "of by hand"),
        Aim("single_append_ratio", numbers["single_append_ratio"], 1.5, "of by hand", at_least=False),
    ]


def planned(facts: int) -> int:
    """Count the facts that all phases handle, for the progress bar."""
    return 3 * facts + min(facts, MAX_REPEATS) + SINGLES
