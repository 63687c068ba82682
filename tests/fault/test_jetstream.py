"""What goes wrong with JetStream: killed while it writes, away, unsafe, limited, another's, or touched by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.natsproxy import NatsProxy
from tests.servers import jetstream

from bsfg.errors import (
    BsfgError,
    DiskFull,
    ExtraMissing,
    FormatUnsupported,
    HasherMismatch,
    OutcomeUnknown,
    StorageFailed,
    StorageReadOnly,
    StorageTaken,
    StorageUnavailable,
    StorageUnreadable,
    StorageUnsafe,
)
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord, Result
from bsfg.retention import GapReason
from bsfg.stores.jetstream import frames as frames_module
from bsfg.stores.jetstream import server as server_module
from bsfg.stores.jetstream.messages import StoredMessage
from bsfg.stores.jetstream.server import ApiRefusal, Away, JetStreamServer, JetStreamSettings, WrongLastSequence
from bsfg.stores.jetstream.storage import JetStreamStorage, look
from bsfg.stores.jetstream.zone import ClaimWatch
from bsfg.testing.facts import batch, message, messages, sealed
from bsfg.testing.nats import PackagedNats
from bsfg.testing.ports import free_port

ZONE, STREAM = "plant", "operational"
_numbers = itertools.count(1)


def settings_at(server: PackagedNats, **more: Any) -> JetStreamSettings:
    return JetStreamSettings([server.url], monitor_url=server.monitor_url, **more)


@pytest.fixture
def settings() -> JetStreamSettings:
    """Give a prefix of one's own."""
    return settings_at(jetstream(), prefix=f"f{os.getpid()}_{next(_numbers)}")


@pytest.fixture
def own_server() -> Iterator[PackagedNats]:
    """Give a server that a test may kill."""
    server = PackagedNats().start()
    yield server
    server.stop()


@pytest.fixture
def door() -> Iterator[NatsProxy]:
    """Give a door that a test may cut."""
    door = NatsProxy(jetstream().port)
    yield door
    door.close()


async def opened(settings: JetStreamSettings, zone: str = ZONE) -> JetStreamStorage:
    return await JetStreamStorage.open(settings, zone=zone)


async def asked(storage: JetStreamStorage, what: str, document: Any = None) -> dict[str, Any]:
    """Ask the server of a storage about its streams, as an operator would."""
    return await asyncio.to_thread(storage.server.run, "asking", lambda: storage.server.api(what, document))


async def test_a_killed_server_loses_and_doubles_nothing(own_server: PackagedNats) -> None:
    """The server is killed while many append and is started again: all goes on, each fact is there once."""
    storage = await opened(settings_at(own_server, patience_seconds=60))
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
    for _ in range(5):
        await asyncio.sleep(0.3 + random.random() / 3)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start)
    await asyncio.sleep(0.3)
    stopping.set()
    await asyncio.gather(*producers)
    await check_all_there(stores, acked)
    await storage.close()
    storage = await opened(settings_at(own_server))
    await check_all_there([await storage.store(STREAM), await storage.store("audit")], acked)
    await storage.close()
    assert look(settings_at(own_server), ZONE, 1 << 30)[2] == []


async def check_all_there(stores: list[Any], acked: list[set[str]]) -> None:
    """Check that each buffer has what was acknowledged, once and without a hole."""
    for store, known in zip(stores, acked, strict=True):
        frames = [frame async for frame in store.replay(0)]
        found = [str(each) for frame in frames if frame.entries for each in frame.entries.values("message_id")]
        assert len(found) == len(set(found)) == (await store.stats()).end
        assert set(found) == known
        assert len(known) > 50


@pytest.mark.parametrize("patience_seconds", [20.0, 0.0])
def test_a_message_whose_answer_was_lost_is_recognised(
    settings: JetStreamSettings, door: NatsProxy, patience_seconds: float
) -> None:
    """The server has it; the next connection finds by its number that it is ours, at once or when it is asked next."""

    async def run() -> None:
        storage = await opened(replace(settings, servers=[door.url], patience_seconds=patience_seconds))
        store = await storage.store(STREAM)
        await store.append(batch(3))

        went = threading.Event()

        async def before(subject: str) -> bool:
            door.before = None
            went.set()
            return True

        door.before = before
        appending = asyncio.ensure_future(store.append(batch(2, first=3)))
        await asyncio.to_thread(went.wait)
        if patience_seconds:
            door.open()
            receipt = await appending
            assert (receipt.count(Result.INSERTED), receipt.offsets.tolist()) == (2, [3, 4])
        else:
            with pytest.raises(OutcomeUnknown):
                await appending
            door.open()
            receipt = await retried(lambda: store.append(batch(2, first=3)))
            assert receipt.offsets.tolist() == [3, 4]
        assert (await store.append(batch(1, first=5))).offsets.tolist() == [5]
        assert [frame.last async for frame in store.replay(0)][-1] == 5
        await storage.close()

    asyncio.run(run())


@pytest.mark.parametrize("comes_first", [False, True])
def test_an_old_value_does_not_come_late(settings: JetStreamSettings, door: NatsProxy, comes_first: bool) -> None:
    """A value that lay on its way does not take the place of a newer one, nor keep it off when it comes before it."""

    async def run() -> None:
        storage = await opened(replace(settings, servers=[door.url]))
        server, zone = storage.server, storage.zone
        going, released, gone = threading.Event(), asyncio.Event(), threading.Event()

        async def before(subject: str) -> bool:
            door.before = None
            going.set()
            await released.wait()
            door.call(gone.set)
            return False

        async def release() -> None:
            door.call(released.set)
            await asyncio.to_thread(gone.wait)

        def keep(data: bytes) -> int:
            return zone.keep("keeping", "value", data, patience_seconds=0)

        door.before = before
        keeping = asyncio.create_task(asyncio.to_thread(keep, b"old"))
        await asyncio.to_thread(going.wait)
        server._loop.call_soon_threadsafe(server._fail_all, Away("no answer"))
        with pytest.raises(OutcomeUnknown):
            await keeping
        if comes_first:
            await release()
        await asyncio.to_thread(keep, b"new")
        if not comes_first:
            await release()
        await asked(storage, "INFO")
        await storage.close()
        storage = await opened(settings)
        assert storage.zone.values("value") == {"value": b"new"}
        await storage.close()

    asyncio.run(run())


async def retried(write: Callable[[], Any]) -> Any:
    """Repeat a write until the server is back."""
    for _ in range(200):
        try:
            return await write()
        except BsfgError as error:
            assert error.retryable
            await asyncio.sleep(0.05)
    raise AssertionError("the server does not come back")


async def test_a_server_that_stays_away_is_told_of_and_comes_back(own_server: PackagedNats) -> None:
    """Beyond its patience the storage says that the server is away; without being opened again it goes on later."""
    storage = await opened(settings_at(own_server, patience_seconds=0.2))
    store = await storage.store(STREAM)
    await store.append(batch(2))
    await storage.cursors.create(ConsumerSpec("reader", STREAM))
    own_server.kill()
    with pytest.raises((OutcomeUnknown, StorageUnavailable)) as caught:
        await store.append(batch(2, first=2))
    assert caught.value.retryable
    with pytest.raises((OutcomeUnknown, StorageUnavailable)):
        await storage.cursors.commit("reader", Confirmation(through=1))
    with pytest.raises(StorageUnavailable):
        _ = [frame async for frame in store.replay(0)]
    own_server.start()
    assert (await retried(lambda: store.append(batch(4)))).offsets.tolist() == [0, 1, 2, 3]
    assert (await storage.cursors.commit("reader", Confirmation(through=3))).committed == 3
    await storage.close()


async def test_who_does_not_wait_takes_nobody_s_patience(settings: JetStreamSettings, door: NatsProxy) -> None:
    """A look at the claim gives up at once; a write goes on waiting, until the server is back or the storage closes."""
    storage = await opened(replace(settings, servers=[door.url], patience_seconds=60))
    store = await storage.store(STREAM)
    door.cut()
    with pytest.raises(StorageUnavailable):
        await asyncio.to_thread(storage.zone.check_claim)
    appending = asyncio.ensure_future(store.append(batch(2)))
    await asyncio.sleep(0.3)
    door.open()
    assert (await appending).offsets.tolist() == [0, 1]
    door.cut()
    asking = asyncio.create_task(asked(storage, "INFO"))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(storage.server.close)
    with pytest.raises(StorageUnavailable):
        await asking
    await storage.close()


async def test_a_line_that_drops_again_at_once_is_no_end(
    settings: JetStreamSettings, door: NatsProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes back and loses the connection before he answers for his zone tries again."""
    dropped = threading.Event()

    class Dropping(Client):
        async def flush(self, timeout: int = 10) -> None:
            if not dropped.is_set():
                door.cut()
                dropped.set()
            await super().flush(timeout)

    storage = await opened(replace(settings, servers=[door.url], node_name="a:9443"))
    monkeypatch.setattr(server_module, "Client", Dropping)
    door.cut()
    door.open()
    await asyncio.to_thread(dropped.wait)
    door.open()
    assert (await (await storage.store(STREAM)).append(batch(2))).offsets.tolist() == [0, 1]
    watch = ClaimWatch(settings, ZONE)
    assert await asyncio.to_thread(watch.look) == "a:9443"
    watch.close()
    await storage.close()


async def test_a_client_that_closes_without_a_word_is_replaced(settings: JetStreamSettings) -> None:
    """A client whose last bytes do not reach a dying server tells nobody that it is closed; the next call sees it."""
    storage = await opened(settings)
    store, client = await storage.store(STREAM), storage.server._client
    assert client is not None
    await store.append(batch(2))

    async def closed() -> None:
        client._status = Client.CLOSED
        client._transport.close()  # type: ignore[union-attr]

    storage.server.wait(closed())
    assert (await store.append(batch(2, first=2))).offsets.tolist() == [2, 3]
    assert storage.server._client is not client
    await storage.close()


async def test_a_refusal_settles_no_doubt(settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a write is lost, the second attempt is refused: the first one may be there, and is."""
    storage = await opened(settings)
    store, publish_once = await storage.store(STREAM), storage.server.publish_once

    def unheard(*message: Any) -> None:
        publish_once(*message)

    async def refused(*message: Any) -> int:
        raise ApiRefusal({"err_code": 10077, "description": "maximum bytes exceeded"})

    monkeypatch.setattr(storage.server, "publish_once", unheard)
    monkeypatch.setattr(storage.server, "publish", refused)
    with pytest.raises(OutcomeUnknown):
        await store.append(batch(2))
    monkeypatch.undo()
    assert (await store.append(batch(3))).offsets.tolist() == [0, 1, 2]
    await storage.close()


async def test_a_refusal_of_the_first_attempt_is_one(
    settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is refused at once was not made: that is told as it is, and not sent again."""
    storage = await opened(settings)
    store = await storage.store(STREAM)

    def refused(*message: Any) -> None:
        raise ApiRefusal({"err_code": 10077, "description": "maximum bytes exceeded"})

    monkeypatch.setattr(storage.server, "publish_once", refused)
    with pytest.raises(DiskFull):
        await store.append(batch(2))
    monkeypatch.undo()
    assert (await store.append(batch(3))).offsets.tolist() == [0, 1, 2]
    await storage.close()


async def test_sums_and_marks_whose_answers_were_lost_are_ours(
    settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum, and a mark that settles a doubt, are stored but nobody hears of it: the next change follows them."""
    monkeypatch.setattr(frames_module, "SUMMED_FRAMES", 2)
    storage = await opened(replace(settings, patience_seconds=0))
    server, store, sent = storage.server, await storage.store(STREAM), [""]
    publish, api = server.publish, server.api

    async def unheard(subject: str, data: bytes, headers: dict[str, str]) -> int:
        sent[0] = subject
        if subject.endswith("aside"):
            raise WrongLastSequence("another one is on its way")
        seq = await publish(subject, data, headers)
        if not subject.endswith("frame"):
            raise Away("no answer")
        return seq

    async def unasked(*question: Any) -> dict[str, Any]:
        if sent[0].endswith("keys"):
            raise Away("no answer")
        return await api(*question)

    def sent_once(*message: Any) -> int:
        return server.wait(unheard(*message))

    monkeypatch.setattr(server, "publish", unheard)
    monkeypatch.setattr(server, "publish_once", sent_once)
    monkeypatch.setattr(server, "api", unasked)
    for first in range(0, 12, 2):
        sent[0] = ""
        assert (await store.append(batch(2, first=first))).offsets.tolist() == [first, first + 1]
    sent[0] = ""
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await store.set_aside(batch(1), "fact_expired")
    monkeypatch.undo()
    assert (await store.append(batch(14))).offsets.tolist() == list(range(14))
    assert [frame.last async for frame in store.replay(0)][-1] == 13
    await storage.close()
    again = await opened(settings)
    assert [frame.last async for frame in (await again.store(STREAM)).replay(0)][-1] == 13
    await again.close()


async def test_no_server_at_the_start(settings: JetStreamSettings) -> None:
    """A server that is not there is worth another try; one that refuses the node is not, nor one without JetStream."""
    with pytest.raises(StorageUnavailable):
        await opened(replace(settings, servers=["nats://127.0.0.1:1"]))
    guarded = PackagedNats('authorization { user: "bsfg", password: "right" }').start()
    try:
        with pytest.raises(StorageUnreadable):
            await opened(replace(settings_at(guarded), servers=[f"nats://bsfg:wrong@127.0.0.1:{guarded.port}"]))
        right = replace(settings_at(guarded), servers=[f"nats://bsfg:right@127.0.0.1:{guarded.port}"])
        await (await opened(right)).close()
    finally:
        guarded.stop()
    plain = PackagedNats("accounts { A: { users: [ { user: a, password: a } ] } }").start()
    try:
        with pytest.raises(StorageUnreadable) as caught:
            await opened(replace(settings_at(plain), servers=[f"nats://a:a@127.0.0.1:{plain.port}"]))
        assert "JetStream" in caught.value.hint
    finally:
        plain.stop()


async def test_two_nodes_do_not_share_a_zone(settings: JetStreamSettings) -> None:
    """A second node of a zone finds it taken until the first one ends; another zone and digest are told apart."""
    storage = await opened(replace(settings, node_name="a:9443"))
    watch = ClaimWatch(settings, ZONE)
    assert await asyncio.to_thread(watch.look) == "a:9443"
    with pytest.raises(StorageTaken) as caught:
        await opened(settings)
    assert caught.value.details["active"] == "a:9443"
    other = await opened(settings, "plant.b")
    await other.store("audit.raw")
    assert await storage.streams() == []
    await other.close()
    await storage.close()
    assert await asyncio.to_thread(watch.look) is None
    watch.close()
    await asked_to_be_newer(settings)


async def asked_to_be_newer(settings: JetStreamSettings) -> None:
    """Let the zone's claim say that a newer program, and another digest, was at work."""
    for version, hasher, kind in ((999, "sha256", FormatUnsupported), (1, "none", HasherMismatch)):
        storage = await opened(replace(settings, prefix=f"{settings.prefix}_{next(_numbers)}"))
        claim = b'{"epoch":1,"version":%d,"hasher":"%s"}' % (version, hasher.encode())
        storage.zone.keep("touching", "claim", claim)
        await storage.close()
        with pytest.raises(kind):
            await opened(storage.server.settings)


async def test_a_busy_subject_is_waited_for(settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several servers one says that another message is on its way: what is refused so is sent again, not missed."""
    storage = await opened(settings)
    artifacts = await asyncio.to_thread(storage.artifacts, max_artifact_bytes=None, capacity_bytes=None)
    ask, numbers = storage.server.ask, itertools.count()

    async def busy(subject: str, data: bytes = b"", headers: dict[str, str] | None = None, **more: Any) -> list[Msg]:
        if headers and next(numbers) % 2:
            said = b'{"error":{"code":400,"err_code":10164,"description":"wrong last sequence"}}'
            return [Msg(storage.server._connected(), data=said)]
        return await ask(subject, data, headers, **more)

    monkeypatch.setattr(storage.server, "ask", busy)
    content = await artifacts.add(pieces_of(b"one", b"two", b"three"))
    assert b"".join([piece async for piece in artifacts.get(content.digest)]) == b"onetwothree"
    for number in range(3):
        await asyncio.to_thread(storage.state().keep, {("gate", "x"): {"number": number}})
    await storage.close()


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_a_node_that_was_overtaken_collects_no_artifacts(settings: JetStreamSettings) -> None:
    """It does not know what the new one has stored: it removes nothing."""
    old = await opened(settings)
    stale = await asyncio.to_thread(old.artifacts, max_artifact_bytes=None, capacity_bytes=None)
    await asyncio.to_thread(old.server.wait, old.server.answer_no_more())
    new = await opened(settings)
    artifacts = await asyncio.to_thread(new.artifacts, max_artifact_bytes=None, capacity_bytes=None)
    content = await artifacts.add(pieces_of(b"one", b"two"))
    with pytest.raises(StorageTaken):
        await stale.collect(set(), now_unix_ms=0, grace_seconds=0)
    assert b"".join([piece async for piece in artifacts.get(content.digest)]) == b"onetwo"
    await old.close()
    await new.close()


async def test_a_node_that_was_overtaken_writes_nothing(settings: JetStreamSettings) -> None:
    """Who does not answer for its zone loses it, and can neither append, confirm, record nor remove any more."""
    old = await opened(settings)
    store = await old.store(STREAM)
    await store.append(batch(3))
    await old.cursors.create(ConsumerSpec("reader", STREAM))
    await asyncio.to_thread(old.server.wait, old.server.answer_no_more())
    new = await opened(settings)
    for write in (
        lambda: store.append(batch(3, first=3)),
        lambda: old.cursors.commit("reader", Confirmation(through=1)),
        lambda: store.set_aside(batch(1), "fact_expired"),
        lambda: store.enforce_retention(link_open=True),
        lambda: old.store("audit"),
        lambda: asyncio.to_thread(old.state().keep, {("gate", "x"): {}}),
    ):
        with pytest.raises(StorageTaken):
            await write()
    mark = partial(old.zone._mark, *old.zone.names.buffer(STREAM, Buffer.STORE))
    with pytest.raises(StorageTaken):
        await asyncio.to_thread(old.server.run, "marking what the other one has marked", mark)
    after = await new.store(STREAM)
    assert (await after.append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
    assert (await new.cursors.checkpoint("reader")).committed == -1
    await old.close()
    await new.close()


def test_what_is_not_durable_is_refused() -> None:
    """A server that acknowledges what it may lose, or does not say, is refused, unless that is accepted."""
    server = PackagedNats(sync_interval="2m").start()

    async def run() -> None:
        for settings in (settings_at(server), JetStreamSettings([server.url]), settings_at(jetstream())):
            wrong = replace(settings, servers=[server.url])
            with pytest.raises(StorageUnsafe) as caught:
                await opened(wrong)
            assert "allow_unsafe" in caught.value.hint
        await (await opened(settings_at(server, allow_unsafe=True))).close()

    try:
        asyncio.run(run())
    finally:
        server.stop()


def test_a_server_of_a_cluster_alone_is_refused() -> None:
    """Which of the servers keeps a stream, and how that one syncs, is not known: three copies, or none of it."""
    own, other = free_port(), free_port()
    server = PackagedNats(cluster=(own, [other])).start()
    try:
        with pytest.raises(StorageUnsafe) as caught:
            asyncio.run(opened(settings_at(server)))
        assert "replicas = 3" in caught.value.hint
    finally:
        server.stop()


def test_credentials_need_a_package(settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What signs with them is no part of the client."""
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(ExtraMissing) as caught:
        asyncio.run(opened(replace(settings, credentials=Path("plant.creds"))))
    assert "nkeys" in caught.value.hint


async def test_what_was_dropped_does_not_come_back(
    settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is behind gives a value that is gone; what the leader does not list is not taken."""
    storage = await opened(settings)
    await asyncio.to_thread(storage.zone.keep, "keeping", "value", b"there")
    await asyncio.to_thread(storage.zone.keep, "keeping", "other", b"there")
    page = JetStreamServer.page

    async def behind(server: JetStreamServer, stream: str, subject: str, seq: int, *more: int) -> list[StoredMessage]:
        found = await page(server, stream, subject, seq, *more)
        _, base = storage.zone.names.own
        return [StoredMessage(1, f"{base}.value", {}, b"there"), *found] if seq == 1 else found

    await asyncio.to_thread(storage.zone.drop, "dropping", "value")
    await storage.close()
    monkeypatch.setattr(JetStreamServer, "page", behind)
    storage = await opened(settings)
    assert (storage.zone.values("value"), storage.zone.values("other")) == ({}, {"other": b"there"})
    await storage.close()


async def test_gap_records_do_not_gather_for_ever(settings: JetStreamSettings) -> None:
    """Each turn of a link may leave something out: what was said of it is said anew, and the messages before it go."""
    storage = await opened(settings)
    forward = await storage.forward(STREAM)
    name, base = storage.zone.names.buffer(STREAM, Buffer.FORWARD)
    for at in range(0, 2_400, 2):
        await forward.record_gaps([GapRecord(at, at, GapReason.SKIPPED, at, "not carried", "plant")])
    server = storage.zone.server
    told = await asyncio.to_thread(
        server.run, "counting", lambda: server.page(name, f"{base}.meta.gaps", 1, 9_999, 1 << 24)
    )
    assert len(told) < 600
    await storage.close()
    storage = await opened(settings)
    assert (await (await storage.forward(STREAM)).gap_sets())[0].ranges.offsets == 1_200
    await storage.close()


async def test_a_stream_that_would_discard_is_refused(settings: JetStreamSettings) -> None:
    """Limits that let facts go are refused by name; the buffers beside it work. A sealed stream takes nothing."""
    storage = await opened(settings)
    for stream in (STREAM, "audit", "documents"):
        await (await storage.store(stream)).append(batch(2))
    for stream, change in (
        (STREAM, {"max_age": 3_600_000_000_000, "duplicate_window": 0}),
        ("audit", {"sealed": True}),
    ):
        name, _ = storage.zone.names.buffer(stream, Buffer.STORE)
        config = (await asked(storage, f"STREAM.INFO.{name}"))["config"]
        await asked(storage, f"STREAM.UPDATE.{name}", {**config, **change})
    await storage.close()
    storage = await opened(settings)
    with pytest.raises(StorageUnsafe) as caught:
        await storage.store(STREAM)
    assert "max_age" in caught.value.message and caught.value.hint
    with pytest.raises(StorageReadOnly):
        await storage.store("audit")
    assert (await (await storage.store("documents")).append(batch(3))).offsets.tolist() == [0, 1, 2]
    await storage.close()


async def test_messages_removed_by_hand_are_damage(settings: JetStreamSettings) -> None:
    """A frame that was removed is a recorded gap, found by reading; the other facts are given."""
    storage = await opened(settings)
    store = await storage.store(STREAM)
    for first in range(0, 12, 3):
        await store.append(batch(3, first=first))
    name, _ = storage.zone.names.buffer(STREAM, Buffer.STORE)
    rows = store._writer._keeper._known.frames.rows  # type: ignore[attr-defined]
    for base in (3, 6):
        (seq,) = rows["seq"][rows["base"] == base].tolist()
        await asked(storage, f"STREAM.MSG.DELETE.{name}", {"seq": seq})
    for _ in range(2):
        frames = [frame async for frame in store.replay(0)]
        reasons = [(frame.first, frame.last, frame.gap and frame.gap.reason) for frame in frames]
        assert reasons == [(0, 2, None), (3, 8, GapReason.LOST), (9, 11, None)]
        assert [(gap.first, gap.last, gap.reason) for gap in await store.gaps()] == [(3, 8, GapReason.LOST)]
        await storage.close()
        storage = await opened(settings)
        store = await storage.store(STREAM)
    # What is on record as lost has no key: who sends it again mends the harm.
    assert (await store.append(batch(12))).offsets.tolist() == [0, 1, 2, 12, 13, 14, 15, 16, 17, 9, 10, 11]
    await storage.close()
    (broken,) = look(settings, ZONE, 1 << 30)[2]
    assert broken == "operational/store: the frame at 9 does not follow what is before offset 3"


async def test_offsets_are_not_given_again_when_the_last_message_is_gone(settings: JetStreamSettings) -> None:
    """The last message says where the buffer ends: without it the buffer is out of service, and the others are not."""
    storage = await opened(settings)
    store, audit = await storage.store(STREAM), await storage.store("audit")
    await store.append(batch(3))
    await audit.append(batch(3))
    name, _ = storage.zone.names.buffer(STREAM, Buffer.STORE)
    await asked(storage, f"STREAM.PURGE.{name}")
    with pytest.raises(BsfgError):
        await (await opened_again(storage)).store(STREAM)


async def opened_again(storage: JetStreamStorage) -> JetStreamStorage:
    await storage.close()
    again = await opened(storage.server.settings)
    assert (await (await again.store("audit")).append(batch(4))).offsets.tolist() == [0, 1, 2, 3]
    with pytest.raises(StorageFailed):
        await again.store(STREAM)
    await again.close()
    return again


def test_what_is_too_large_for_a_message_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a server's default limits large facts are stored in several messages, whole or not at all."""
    server = PackagedNats(max_payload="65536").start()

    async def run() -> None:
        door = NatsProxy(server.port)
        storage = await opened(replace(settings_at(server, patience_seconds=0.2), servers=[door.url]))
        store = await storage.store(STREAM)
        facts = sealed([message(f"id-{number}", "x" * 50_000) for number in range(5)])
        assert (await store.append(facts)).offsets.tolist() == [0, 1, 2, 3, 4]
        sent = itertools.count()

        async def before(subject: str) -> bool:
            return subject.endswith("frame") and next(sent) == 1

        # The connection is cut when two of the parts are there.
        door.before = before
        with pytest.raises(OutcomeUnknown):
            await store.append(sealed([message(f"more-{number}", "y" * 50_000) for number in range(5)]))
        await storage.close()
        door.before = None
        door.open()
        storage = await opened(storage.server.settings)
        store = await storage.store(STREAM)
        assert (await store.stats()).end == 5
        assert (await store.append(facts)).count(Result.ALREADY_EXISTS) == 5
        assert (await store.append(batch(2))).offsets.tolist() == [5, 6]
        assert [len(frame.entries) for frame in [f async for f in store.replay(0)] if frame.entries] == [7]
        await storage.close()
        door.close()

    try:
        asyncio.run(run())
    finally:
        server.stop()


async def test_an_opening_reads_sums_of_frames(settings: JetStreamSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and places of frames are known again from sums, also when one of the sums was removed by hand."""
    monkeypatch.setattr(frames_module, "SUMMED_FRAMES", 4)
    storage = await opened(settings)
    store = await storage.store(STREAM)
    for first in range(0, 30, 2):
        await store.append(batch(2, first=first))
    name, base = storage.zone.names.buffer(STREAM, Buffer.STORE)
    page = await asyncio.to_thread(
        storage.server.run, "looking", lambda: storage.server.page(name, f"{base}.meta.keys", 1, 100, 1 << 20)
    )
    assert len(page) == 3
    await asked(storage, f"STREAM.MSG.DELETE.{name}", {"seq": page[1].seq})
    await storage.close()
    for _ in range(2):
        storage = await opened(settings)
        store = await storage.store(STREAM)
        assert (await store.append(batch(30))).offsets.tolist() == list(range(30))
        assert [frame.last async for frame in store.replay(0)][-1] == 29
        await storage.close()


@pytest.mark.campaign
async def test_a_cluster_of_three_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three servers one after the other is killed while many append: all goes on, each fact is there once."""
    routes = [free_port() for _ in range(3)]
    servers = [PackagedNats(sync_interval="2m", cluster=(own, [r for r in routes if r != own])) for own in routes]
    for server in servers:
        server.start(wait=False)
    settings = JetStreamSettings([server.url for server in servers], replicas=3, patience_seconds=60)
    try:
        storage = await retried_opening(settings)
        store, acked, stopping = await storage.store(STREAM), set[str](), asyncio.Event()

        async def producer(number: int) -> None:
            facts = itertools.count()
            while not stopping.is_set():
                first = 3 * next(facts)
                assert (await store.append(batch(3, seed=number, first=first))).count(Result.INSERTED) == 3
                acked.update(str(each.envelope.message_id) for each in messages(3, seed=number, first=first))

        producers = [asyncio.create_task(producer(number)) for number in range(4)]
        for server in servers:
            await asyncio.sleep(2)
            await asyncio.to_thread(server.kill)
            await asyncio.sleep(4)
            await asyncio.to_thread(server.start)
        await asyncio.sleep(3)
        stopping.set()
        await asyncio.gather(*producers)
        await check_all_there([store], [acked])
        await storage.close()
    finally:
        for server in servers:
            server.stop()


async def retried_opening(settings: JetStreamSettings) -> JetStreamStorage:
    """Open a storage as soon as the servers have found each other."""
    for _ in range(60):
        try:
            return await opened(settings)
        except (StorageUnavailable, StorageUnreadable, OutcomeUnknown):
            await asyncio.sleep(0.5)
    raise AssertionError("the servers do not find each other")
