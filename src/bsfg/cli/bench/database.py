"""What `bsfg bench store --backend postgres` measures: our storage beside the same server, used as one would by hand.

By hand means: binary COPY into a temporary table, INSERT … SELECT … ON CONFLICT from there, one commit per batch. Both
take turns, a part of the facts each, so that a busy machine is as busy for the one as for the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql

from bsfg.batch import FactBatch
from bsfg.cli.bench.measure import SINGLES, SINGLES_FROM, expect, prebuilt, singles_of, timed
from bsfg.cli.bench.results import Aim, finished, percentile
from bsfg.cli.bench.workload import BATCH_FACTS, batches_of
from bsfg.ports import Result, StoreBuffer
from bsfg.sealing import seal
from bsfg.stores.postgres.database import PostgresSettings
from bsfg.stores.postgres.storage import PostgresStorage

ROUNDS = 4
MAX_REPEATS = 40_000
_TABLE = "CREATE TABLE by_hand (from_zone text, message_id text, body bytea, PRIMARY KEY (from_zone, message_id))"
_STAGING = "CREATE TEMPORARY TABLE staged (LIKE by_hand) ON COMMIT DELETE ROWS"

Row = tuple[str, str, bytes]
Step = Callable[[str, int], None]


@dataclass(slots=True)
class DatabaseSamples:
    """What was measured, before it is summed up."""

    facts: int
    append_seconds: float = 0.0
    direct_seconds: float = 0.0
    repeat_rate: float = 0.0
    replay_rate: float = 0.0
    single_ms: list[float] = field(default_factory=list)
    direct_single_ms: list[float] = field(default_factory=list)


async def run(dsn: str, samples: DatabaseSamples, step: Step) -> None:
    """Measure in a schema of our own, which is removed in the end."""
    schema = f"bsfg_bench_{uuid4().hex[:12]}"
    storage = await PostgresStorage.open(PostgresSettings(dsn, schema), zone="bench")
    try:
        store = await storage.store("bench")
        with psycopg.connect(dsn) as connection:
            connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(schema)))
            connection.execute(_TABLE)
            connection.execute(_STAGING)
            connection.commit()
            await _bulk(store, connection, samples, step)
            await _single(store, connection, samples, step)
        await _repeats_and_replay(store, samples, step)
    finally:
        await storage.close()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


async def _bulk(store: StoreBuffer, connection: psycopg.Connection[Any], samples: DatabaseSamples, step: Step) -> None:
    async def one(batch: FactBatch) -> None:
        expect(await store.append(seal(batch)), Result.INSERTED)

    part = max(1, samples.facts // ROUNDS)
    for first in range(0, samples.facts, part):
        prepared = prebuilt(batches_of(first, min(part, samples.facts - first)), step)
        rows = [_rows(batch) for batch in prepared]
        samples.append_seconds += await timed(prepared, one, "append", step)
        started = time.perf_counter()
        for batch in rows:
            _by_hand(connection, batch)
        samples.direct_seconds += time.perf_counter() - started
        step("by hand", sum(map(len, rows)))


def _rows(batch: FactBatch) -> list[Row]:
    return list(zip(batch.values("from_zone"), batch.values("message_id"), batch.values("object"), strict=True))


def _by_hand(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> None:
    with connection.cursor() as cursor:
        with cursor.copy("COPY staged FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types(["text", "text", "bytea"])
            for row in rows:
                copy.write_row(row)
        cursor.execute("INSERT INTO by_hand SELECT * FROM staged ON CONFLICT DO NOTHING")
    connection.commit()


async def _single(
    store: StoreBuffer, connection: psycopg.Connection[Any], samples: DatabaseSamples, step: Step
) -> None:
    """Append one fact at a time, each beside an insert of one row by hand."""
    for fact in singles_of(SINGLES_FROM, SINGLES):
        (row,) = _rows(fact)
        started = time.perf_counter()
        expect(await store.append(seal(fact)), Result.INSERTED)
        between = time.perf_counter()
        connection.execute("INSERT INTO by_hand VALUES (%s, %s, %s) ON CONFLICT DO NOTHING", row)
        connection.commit()
        samples.single_ms.append(1000 * (between - started))
        samples.direct_single_ms.append(1000 * (time.perf_counter() - between))
        step("single", 1)


async def _repeats_and_replay(store: StoreBuffer, samples: DatabaseSamples, step: Step) -> None:
    async def again(batch: FactBatch) -> None:
        expect(await store.append(seal(batch)), Result.ALREADY_EXISTS)

    prepared = list(batches_of(0, min(samples.facts, MAX_REPEATS) // BATCH_FACTS * BATCH_FACTS or samples.facts))
    samples.repeat_rate = sum(map(len, prepared)) / await timed(prepared, again, "duplicates", step)
    started, seen = time.perf_counter(), 0
    async for frame in store.replay(0, end=samples.facts):
        assert frame.entries is not None
        seen += len(frame.entries)
    samples.replay_rate = seen / (time.perf_counter() - started)


def results(samples: DatabaseSamples, folder: Path, seconds: float) -> dict[str, Any]:
    """Give every number of one run by its stable name."""
    append, direct = samples.facts / samples.append_seconds, samples.facts / samples.direct_seconds
    single, direct_single = percentile(samples.single_ms, 50), percentile(samples.direct_single_ms, 50)
    numbers = {
        "backend": "postgres",
        "facts": samples.facts,
        "append_per_second": append,
        "direct_per_second": direct,
        "duplicates_per_second": samples.repeat_rate,
        "replay_per_second": samples.replay_rate,
        "single_append_ms_p50": single,
        "single_append_ms_p99": percentile(samples.single_ms, 99),
        "direct_single_ms_p50": direct_single,
        "append_ratio": append / direct,
        "single_append_ratio": single / direct_single,
    }
    return finished(numbers, aims_of, folder, seconds)


def aims_of(numbers: dict[str, Any]) -> list[Aim]:
    """Hold the numbers against what is hoped for."""
    return [
        Aim("append_per_second", numbers["append_per_second"], 50_000, "facts/s"),
        Aim("append_ratio", numbers["append_ratio"], 0.8, "of by hand"),
        Aim("single_append_ratio", numbers["single_append_ratio"], 1.5, "of by hand", at_least=False),
    ]


def planned(facts: int) -> int:
    """Count the facts that all phases handle, for the progress bar."""
    return 3 * facts + min(facts, MAX_REPEATS) + SINGLES
