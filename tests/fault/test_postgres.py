"""What goes wrong with a database: killed while it writes, away, read-only, unsafe, another's, or touched by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psycopg
import pytest
from tests.servers import postgres, wait_for_standby, waiting_for_standby

from bsfg.errors import (
    BsfgError,
    ConfigInvalid,
    FormatUnsupported,
    OutcomeUnknown,
    StorageForeign,
    StorageReadOnly,
    StorageTaken,
    StorageUnavailable,
    StorageUnreadable,
    StorageUnsafe,
)
from bsfg.ports import Confirmation, ConsumerSpec, GapRecord, OriginSpan, Result
from bsfg.retention import GapReason
from bsfg.stores.postgres.database import Database, PostgresSettings
from bsfg.stores.postgres.frames import chain_breaks
from bsfg.stores.postgres.storage import PostgresStorage
from bsfg.stores.shared.frame import encode_frame
from bsfg.testing.facts import batch, messages
from bsfg.testing.postgres import PackagedServer

ZONE, STREAM = "plant", "operational"
_numbers = itertools.count(1)


@pytest.fixture
def settings() -> PostgresSettings:
    """Give a role with a schema of its own."""
    name = f"f{os.getpid()}_{next(_numbers)}"
    return PostgresSettings(postgres().role(name), name, patience_seconds=20)


@pytest.fixture
def own_server() -> Iterator[PackagedServer]:
    """Give a server that a test may kill."""
    server = PackagedServer()
    yield server
    server.stop()


async def opened(settings: PostgresSettings, zone: str = ZONE) -> PostgresStorage:
    return await PostgresStorage.open(settings, zone=zone)


async def test_a_killed_server_loses_and_doubles_nothing(own_server: PackagedServer) -> None:
    """The server is killed while many append and is started again: all goes on, each fact is there once."""
    storage = await opened(PostgresSettings(own_server.dsn, patience_seconds=60))
    stores = [await storage.store(STREAM), await storage.store("audit")]
    acked: list[set[str]] = [set(), set()]
    stopping = asyncio.Event()

    async def producer(number: int) -> None:
        at, facts = number % 2, itertools.count()
        while not stopping.is_set():
            first = 3 * next(facts)
            receipt = await stores[at].append(batch(3, seed=number, first=first))
            assert receipt.count(Result.INSERTED) == 3
            acked[at] |= {str(each.envelope.message_id) for each in messages(3, seed=number, first=first)}

    producers = [asyncio.create_task(producer(number)) for number in range(6)]
    random = Random(5)
    for _ in range(4):
        await asyncio.sleep(0.3 + random.random() / 3)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start)
    await asyncio.sleep(0.3)
    stopping.set()
    await asyncio.gather(*producers)
    for store, known in zip(stores, acked, strict=True):
        frames = [frame async for frame in store.replay(0)]
        found = [str(each) for frame in frames if frame.entries for each in frame.entries.values("message_id")]
        assert len(found) == len(set(found)) == (await store.stats()).end
        assert set(found) == known
        assert len(known) > 100
    await storage.close()


async def test_a_commit_that_a_lost_connection_had_under_way_is_recognised(
    settings: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on with it; the next connection waits behind it, and finds by the chain that it is its own."""
    made = recorded_connections(monkeypatch)
    storage = await opened(settings)
    store = await storage.store(STREAM)
    await store.append(batch(3))
    with psycopg.connect(settings.dsn) as other:
        other.execute(f"SELECT FROM {settings.schema}.buffer FOR UPDATE")
        appending = asyncio.ensure_future(store.append(batch(2, first=3)))
        [first] = await waiting(settings, 1)
        break_off(made, first)
        await waiting(settings, 2)
    receipt = await appending
    assert (receipt.count(Result.INSERTED), receipt.offsets.tolist()) == (2, [3, 4])
    assert (await store.append(batch(1, first=5))).offsets.tolist() == [5]
    await storage.close()


async def test_an_unknown_outcome_is_looked_up_before_the_next_append(
    settings: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that went on when nobody could ask for it is found later: the buffer goes on behind it, not anew."""
    made = recorded_connections(monkeypatch)
    storage = await opened(replace(settings, patience_seconds=0.2))
    store = await storage.store(STREAM)
    await store.append(batch(3))
    with psycopg.connect(settings.dsn) as other:
        other.execute(f"SELECT FROM {settings.schema}.buffer FOR UPDATE")
        appending = asyncio.ensure_future(store.append(batch(2, first=3)))
        [pid] = await waiting(settings, 1)
        postgres().execute(f"ALTER ROLE {settings.schema} NOLOGIN")
        break_off(made, pid)
        with pytest.raises(OutcomeUnknown):
            await appending
    postgres().execute(f"ALTER ROLE {settings.schema} LOGIN")
    assert (await store.append(batch(6))).offsets.tolist() == [0, 1, 2, 3, 4, 5]
    assert (await store.stats()).end == 6
    await storage.close()


async def test_a_refusal_does_not_settle_what_an_earlier_attempt_did(
    settings: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A definite error of the second attempt says nothing of the first, which may still land: that is looked up."""
    made = recorded_connections(monkeypatch)
    storage = await opened(settings)
    store = await storage.store(STREAM)
    await store.append(batch(3))
    with psycopg.connect(settings.dsn) as other:
        other.execute(f"SELECT FROM {settings.schema}.buffer FOR UPDATE")
        appending = asyncio.ensure_future(store.append(batch(2, first=3)))
        [pid] = await waiting(settings, 1)
        postgres().execute(f"ALTER ROLE {settings.schema} SET default_transaction_read_only = on")
        break_off(made, pid)
        with pytest.raises(OutcomeUnknown, match="read-only"):
            await appending
    postgres().execute(f"ALTER ROLE {settings.schema} RESET default_transaction_read_only")
    _end_connections(settings)
    assert (await store.append(batch(6))).offsets.tolist() == [0, 1, 2, 3, 4, 5]
    await storage.close()


async def test_a_removal_that_is_still_committing_is_waited_for(
    own_server: PackagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again behind its own commit, which waits for a standby, it is recognised, not refused as made twice."""
    made = recorded_connections(monkeypatch)
    storage = await opened(PostgresSettings(own_server.dsn))
    store = await storage.store(STREAM)
    await store.append(batch(3))
    await storage.cursors.create(ConsumerSpec("reader", STREAM))
    await storage.cursors.commit("reader", Confirmation(through=2))
    await wait_for_standby(own_server, "nobody")
    removing = asyncio.ensure_future(store.truncate_before(3))
    [first] = await waiting_for_standby(own_server)
    break_off(made, first)
    await waiting(PostgresSettings(own_server.dsn), 1)
    await wait_for_standby(own_server, "")
    await removing
    assert (await store.append(batch(1, first=3))).offsets.tolist() == [3]
    assert not await store.gaps()
    await storage.close()


async def test_nothing_is_acknowledged_before_the_standby_has_it(own_server: PackagedServer) -> None:
    """A commit whose wait for the standby was cut short is seen; who finds it there waits for the standby as well."""
    storage = await opened(PostgresSettings(own_server.dsn))
    store = await storage.store(STREAM)
    await store.append(batch(3))
    await wait_for_standby(own_server, "nobody")
    appending = asyncio.ensure_future(store.append(batch(2, first=3)))
    [first] = await waiting_for_standby(own_server)
    own_server.execute("SELECT pg_terminate_backend(%s, 5000)", first)
    assert await waiting_for_standby(own_server) != [first]
    assert not appending.done()
    assert own_server.execute("SELECT end_offset FROM bsfg.buffer") == [(5,)]
    await wait_for_standby(own_server, "")
    assert (await appending).offsets.tolist() == [3, 4]
    # So does who looks up what became of a change.
    await wait_for_standby(own_server, "nobody")
    looking = asyncio.ensure_future(asyncio.to_thread(store._writer._keeper.found))
    await waiting_for_standby(own_server)
    await wait_for_standby(own_server, "")
    assert (await looking).head.end == 5
    await storage.close()


async def test_who_waits_for_a_standby_that_never_comes_can_be_left(own_server: PackagedServer) -> None:
    """Whoever stands by watches on meanwhile; a storage that is told to wait no longer closes with an unknown outcome.

    What was queued behind it is not begun, and one that opens the tables ends as well.
    """
    settings = PostgresSettings(own_server.dsn, node_name="one")
    storage = await opened(settings)
    store = await storage.store(STREAM)
    await store.append(batch(3))
    await wait_for_standby(own_server, "nobody")
    appending = asyncio.ensure_future(store.append(batch(2, first=3)))
    await waiting_for_standby(own_server)
    behind = asyncio.ensure_future(store.append(batch(2, first=5)))
    watch = Database(replace(settings, node_name="two")).watch()
    assert [await asyncio.to_thread(watch.look) for _ in range(2)] == ["one", "one"]
    await asyncio.to_thread(watch.close)
    closing = asyncio.ensure_future(storage.close())
    assert not (await asyncio.wait([closing], timeout=0.2))[0]
    await storage.end_waiting()
    with pytest.raises(OutcomeUnknown):
        await appending
    with pytest.raises(StorageUnavailable, match="closed"):
        await behind
    await closing
    opening = asyncio.ensure_future(opened(settings))
    await asyncio.sleep(0.1)
    await waiting_for_standby(own_server)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await wait_for_standby(own_server, "")
    storage = await opened(settings)
    assert (await (await storage.store(STREAM)).append(batch(7))).offsets.tolist() == list(range(7))
    await storage.close()


def recorded_connections(monkeypatch: pytest.MonkeyPatch) -> list[psycopg.Connection[Any]]:
    """Give all connections that are made from now on."""
    made: list[psycopg.Connection[Any]] = []
    connect = Database._connect

    def recorded(self: Database) -> psycopg.Connection[Any]:
        made.append(connect(self))
        return made[-1]

    monkeypatch.setattr(Database, "_connect", recorded)
    return made


def break_off(made: list[psycopg.Connection[Any]], pid: int) -> None:
    """End a connection on this side alone: the server goes on with what it was told."""
    [lost] = [each for each in made if not each.closed and each.info.backend_pid == pid]
    with socket.socket(fileno=os.dup(lost.fileno())) as broken:
        broken.shutdown(socket.SHUT_RDWR)


async def waiting(settings: PostgresSettings, count: int) -> list[int]:
    """Wait until so many connections of a role wait for a lock, and give their numbers."""
    asked = "SELECT pid FROM pg_stat_activity WHERE usename = current_user AND wait_event_type = 'Lock'"
    with psycopg.connect(settings.dsn, autocommit=True) as looking:
        for _ in range(1_000):
            found = looking.execute(asked).fetchall()
            if len(found) >= count:
                return [pid for (pid,) in found]
            await asyncio.sleep(0.02)
    raise AssertionError(f"{len(found)} of {count} wait for a lock")


async def test_a_server_that_stays_away_is_told_of_and_comes_back(own_server: PackagedServer) -> None:
    """Beyond its patience the storage says that the server is away; without being opened again it goes on later."""
    storage = await opened(PostgresSettings(own_server.dsn, patience_seconds=0.2))
    store = await storage.store(STREAM)
    await store.append(batch(2))
    await storage.cursors.create(ConsumerSpec("reader", STREAM))
    own_server.kill()
    with pytest.raises((OutcomeUnknown, StorageUnavailable)) as caught:
        await store.append(batch(2, first=2))
    assert caught.value.retryable
    with pytest.raises(StorageUnavailable):
        await store.append(batch(2, first=2))
    with pytest.raises(StorageUnavailable):
        await storage.cursors.commit("reader", Confirmation(through=1))
    with pytest.raises(StorageUnavailable):
        _ = [frame async for frame in store.replay(0)]
    own_server.start()
    assert (await store.append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
    assert (await storage.cursors.commit("reader", Confirmation(through=3))).committed == 3
    await storage.close()


async def test_who_has_less_patience_takes_none_from_others(own_server: PackagedServer) -> None:
    """A value of the node is waited for briefly; when that is over an append still has all of its time."""
    storage = await opened(PostgresSettings(own_server.dsn, patience_seconds=120))
    store = await storage.store(STREAM)
    await store.append(batch(2))
    own_server.kill()
    with pytest.raises(BsfgError) as caught:
        await asyncio.to_thread(storage.state().keep, {("gate", "a/receiver"): {"mode": "held"}})
    assert isinstance(caught.value, OutcomeUnknown | StorageUnavailable)
    appending = asyncio.ensure_future(store.append(batch(2, first=2)))
    await asyncio.to_thread(own_server.start)
    assert (await appending).offsets.tolist() == [2, 3]
    await storage.close()


async def test_no_server_at_the_start(tmp_path: Path, settings: PostgresSettings) -> None:
    """A server that is not there, a role that is not let in and a string that is none each have their error."""
    for dsn, kind in (
        (f"host={tmp_path} user=postgres", StorageUnavailable),
        (settings.dsn.replace(f"user={settings.schema}", "user=nobody"), StorageUnreadable),
        ("no such thing", ConfigInvalid),
        ("postgresql://postgres:SECRET%PW@127.0.0.1/plant", ConfigInvalid),
        ("host=127.0.0.1 port=SECRET", ConfigInvalid),
        ("postgresql://postgres:half@SECRET@127.0.0.1:1/plant", StorageUnavailable),
        ("host=127.0.0.1,localhost port=1 connect_timeout=2", StorageUnavailable),
    ):
        with pytest.raises(kind) as caught:
            await opened(PostgresSettings(dsn))
        said = f"{caught.value} {caught.value.hint}"
        assert "dsn in [storage.postgres]" in said
        assert "SECRET" not in said and "\n" not in said and "by itself" not in said
    assert StorageUnavailable.retryable and not StorageUnreadable.retryable


async def test_a_read_only_server_stores_nothing(settings: PostgresSettings) -> None:
    """A server that takes no writes says so, at the start and later, and what was stored stays readable."""
    storage = await opened(settings)
    store = await storage.store(STREAM)
    await store.append(batch(2))
    postgres().execute(f"ALTER ROLE {settings.schema} SET default_transaction_read_only = on")
    _end_connections(settings)
    # What became of an attempt over a connection that was lost nobody knows, until it was looked up.
    with pytest.raises(OutcomeUnknown):
        await store.append(batch(2, first=2))
    with pytest.raises(StorageReadOnly):
        await store.append(batch(2, first=2))
    assert [frame.last async for frame in store.replay(0)] == [1]
    await storage.close()
    with pytest.raises(StorageReadOnly):
        await opened(settings)
    postgres().execute(f"ALTER ROLE {settings.schema} RESET default_transaction_read_only")
    storage = await opened(settings)
    assert (await (await storage.store(STREAM)).append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
    await storage.close()


async def test_tables_of_a_newer_version_are_refused(settings: PostgresSettings) -> None:
    """A program does not touch tables that a newer one has made."""
    await (await opened(settings)).close()
    postgres().execute(f"INSERT INTO {settings.schema}.migration VALUES (999, now())")
    with pytest.raises(FormatUnsupported):
        await opened(settings)


async def test_two_zones_do_not_share_a_schema(settings: PostgresSettings) -> None:
    """The tables of a zone are refused to another one, and a second node of the zone finds them taken."""
    storage = await opened(settings)
    with pytest.raises(StorageTaken):
        await opened(settings)
    await storage.close()
    with pytest.raises(StorageForeign):
        await opened(settings, "enterprise")
    await (await opened(settings)).close()


async def test_no_write_passes_the_epoch(settings: PostgresSettings) -> None:
    """A node that has noticed nothing and has all its connections changes no row of any table, once it is overtaken."""
    old = await opened(replace(settings, takeover_seconds=600))
    store, forward = await old.store(STREAM), await old.forward(STREAM)
    await store.append(batch(6))
    await old.cursors.create(ConsumerSpec("reader", STREAM, required=True))
    await old.cursors.commit("reader", Confirmation(through=3))
    await store.set_aside(batch(1, first=90), "fact_expired")
    (aside,) = await store.quarantine()
    artifacts, state = old.artifacts(max_artifact_bytes=None, capacity_bytes=None), old.state()
    kept = await artifacts.put("reports", "a", _pieces(b"kept"))
    origin = OriginSpan("enterprise", np.zeros(1, np.int64), np.zeros(1, np.int64))
    gap = GapRecord(0, 0, GapReason.SKIPPED, 1, origin_zone="enterprise")
    postgres().execute(f"UPDATE {settings.schema}.zone SET epoch = epoch + 1")
    postgres().execute(f"UPDATE {settings.schema}.buffer SET epoch = epoch + 1")
    before = _content(settings)
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: store.append(batch(1, first=6)),
        lambda: store.append(batch(7)),
        lambda: forward.put_if_absent(batch(1, first=7), origin),
        lambda: store.truncate_before(2),
        lambda: store.record_gaps([gap]),
        lambda: store.set_aside(batch(1, first=91), "fact_expired"),
        lambda: store.release_quarantined(aside.id, "settled"),
        lambda: old.store("another"),
        lambda: old.cursors.create(ConsumerSpec("late", STREAM)),
        lambda: old.cursors.commit("reader", Confirmation(through=4)),
        lambda: old.cursors.retire("reader", "gone"),
        lambda: asyncio.to_thread(state.keep, {("gate", "a/receiver"): {"mode": "held"}}),
        lambda: artifacts.put("reports", "b", _pieces(b"new")),
        lambda: artifacts.link("reports", "c", kept.digest),
        lambda: artifacts.collect(set(), now_unix_ms=1 << 50, grace_seconds=0),
        lambda: artifacts.references.remember(b"all"),
    ]
    for number, write in enumerate(writes):
        with pytest.raises(StorageTaken):
            await write()
        assert _content(settings) == before, number
    await old.close()


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _content(settings: PostgresSettings) -> dict[str, object]:
    """Give a digest of each table, but for the signs of life."""
    asked = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) AND relkind = 'r'"
    tables = [name for (name,) in postgres().execute(asked, settings.schema) if name != "node"]
    digest = "SELECT md5(coalesce(string_agg(row::text, ',' ORDER BY row::text), '')) FROM {}.{} AS row"
    return {name: postgres().execute(digest.format(settings.schema, name)) for name in tables}


async def test_a_node_that_is_paused_in_mid_transaction_holds_nobody_up(
    settings: PostgresSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without signs of life its sessions are ended, with the rows they had locked; what it does then is void."""
    settings = replace(settings, takeover_seconds=1)
    old = await opened(settings)
    store = await old.store(STREAM)
    await store.append(batch(3))
    pausing, resumed = threading.Event(), threading.Event()

    def paused(connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT FROM buffer FOR UPDATE")
        pausing.set()
        resumed.wait(60)
        connection.execute("DELETE FROM frame")

    monkeypatch.setattr(old.database._place, "_sign", lambda: None)
    changing = asyncio.ensure_future(asyncio.to_thread(old.database.change, "pausing", paused))
    await asyncio.to_thread(pausing.wait, 60)
    watch = Database(settings).watch()
    for _ in range(100):
        if await asyncio.to_thread(watch.look) is None:
            break
        await asyncio.sleep(watch.interval_seconds)
    await asyncio.to_thread(watch.close)
    new = await opened(settings)
    resumed.set()
    with pytest.raises(StorageTaken):
        await changing
    assert (await (await new.store(STREAM)).append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
    await new.close()
    await old.close()


async def test_a_node_that_was_overtaken_writes_nothing(settings: PostgresSettings) -> None:
    """Whoever lost the lock, and with it the zone, can neither append, confirm, record nor remove any more."""
    # It must not be back for the lock before another one has it.
    settings = replace(settings, takeover_seconds=600)
    old = await opened(settings)
    store = await old.store(STREAM)
    await store.append(batch(3))
    await old.cursors.create(ConsumerSpec("reader", STREAM))
    asked = "SELECT pid FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND usename = %s"
    for (pid,) in postgres().execute(asked, settings.schema):
        postgres().execute("SELECT pg_terminate_backend(%s, 5000)", pid)
    new = await opened(settings)
    for write in (
        lambda: store.append(batch(3, first=3)),
        lambda: old.cursors.commit("reader", Confirmation(through=1)),
        lambda: store.set_aside(batch(1), "fact_expired"),
        lambda: store.enforce_retention(link_open=True),
    ):
        with pytest.raises(StorageTaken):
            await write()
    after = await new.store(STREAM)
    assert (await after.append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
    assert (await new.cursors.checkpoint("reader")).committed == -1
    await old.close()
    await new.close()


@pytest.mark.parametrize("setting", ["synchronous_commit", "fsync"])
def test_what_is_not_durable_is_refused(setting: str) -> None:
    """A server that acknowledges what it may lose is refused, unless that is accepted."""
    server = PackagedServer(f"{setting} = off")

    async def run() -> None:
        with pytest.raises(StorageUnsafe) as caught:
            await opened(PostgresSettings(server.dsn))
        assert setting in caught.value.message and "allow_unsafe" in caught.value.hint
        await (await opened(PostgresSettings(server.dsn, allow_unsafe=True))).close()

    try:
        asyncio.run(run())
    finally:
        server.stop()


def test_a_table_touched_by_hand_is_damage(settings: PostgresSettings) -> None:
    """A frame that was changed or removed is a recorded gap, found by reading; the other facts are given."""

    async def run() -> None:
        storage = await opened(settings)
        store = await storage.store(STREAM)
        for first in range(0, 12, 3):
            await store.append(batch(3, first=first))
        touched = f"UPDATE {settings.schema}.frame SET content = overlay(content placing 'x' from 150) WHERE base = 3"
        postgres().execute(touched)
        postgres().execute(f"DELETE FROM {settings.schema}.frame WHERE base = 9")
        for _ in range(2):
            frames = [frame async for frame in store.replay(0)]
            reasons = [(frame.first, frame.last, frame.gap and frame.gap.reason) for frame in frames]
            assert reasons == [(0, 2, None), (3, 5, GapReason.DAMAGED), (6, 8, None), (9, 11, GapReason.LOST)]
            gaps = [(gap.first, gap.last, gap.reason) for gap in await store.gaps()]
            assert sorted(gaps) == [(3, 5, GapReason.DAMAGED), (9, 11, GapReason.LOST)]
            assert len(store.problems) in (0, 2)
            await storage.close()
            storage = await opened(settings)
            store = await storage.store(STREAM)
        # What is on record as lost has no key: who sends it again mends the harm.
        assert (await store.append(batch(12))).offsets.tolist() == [0, 1, 2, 12, 13, 14, 6, 7, 8, 15, 16, 17]
        await storage.close()

    asyncio.run(run())


async def test_the_chain_shows_what_a_hand_has_made_consistent(settings: PostgresSettings) -> None:
    """A frame that was forged with sound checksums, or put in another's place, does not follow the one before it."""
    storage = await opened(settings)
    store = await storage.store(STREAM)
    for first in range(0, 12, 3):
        await store.append(batch(3, first=first))
    await storage.cursors.create(ConsumerSpec("reader", STREAM))
    await storage.cursors.commit("reader", Confirmation(through=4))
    await store.truncate_before(5)
    await storage.close()
    database = Database(settings)

    def breaks() -> list[str]:
        found: list[str] = []
        database.look(ZONE, lambda connection: found.extend(chain_breaks(connection)))
        return found

    assert breaks() == []
    tables = f"{settings.schema}.frame JOIN {settings.schema}.buffer ON id = buffer_id"
    ((log_id, before),) = postgres().execute(f"SELECT log_id, chain_before FROM {tables} WHERE base = 6")
    other = batch(3, first=600)
    parts, _ = encode_frame(
        other.to_message(), base=6, count=3, appended_at_unix_ms=1, log_id=log_id, chain_before=before
    )
    forged = f"UPDATE {settings.schema}.frame SET content = %s WHERE base = 6"
    postgres().execute(forged, b"".join(map(bytes, parts[:2])))
    assert breaks() == ["operational/store: the frame at 9 does not follow what is before offset 9"]
    postgres().execute(f"DELETE FROM {settings.schema}.frame WHERE base = 9")
    assert breaks() == ["operational/store: the last frame is not the one that the row of the buffer names"]


async def test_offsets_are_not_given_again_after_a_restore_underneath(settings: PostgresSettings) -> None:
    """A row that somebody set back while the node runs stops its buffer, until it is opened anew."""
    storage = await opened(settings)
    store = await storage.store(STREAM)
    await store.append(batch(3))
    postgres().execute(f"UPDATE {settings.schema}.buffer SET end_offset = 1")
    for _ in range(2):
        with pytest.raises(StorageTaken) as caught:
            await store.append(batch(3, first=3))
        assert "restart" in caught.value.hint
    assert (await store.stats()).end == 3
    await storage.close()


def _end_connections(settings: PostgresSettings) -> None:
    asked = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s"
    postgres().execute(asked, settings.schema)


async def test_errors_of_the_server_are_ours(settings: PostgresSettings) -> None:
    """Whatever the server says, callers get an error with a code and a hint."""
    storage = await opened(settings)
    store = await storage.store(STREAM)
    await store.append(batch(1))
    with psycopg.connect(postgres().dsn, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {settings.schema}.key RENAME TO elsewhere")
    with pytest.raises(BsfgError) as caught:
        await store.append(batch(2, first=1))
    assert caught.value.code != "internal" and caught.value.hint
    await storage.close()
