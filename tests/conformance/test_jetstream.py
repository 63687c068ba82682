"""JetStream keeps the contract of every port, on a real server that breaks on demand."""

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import nats
import orjson
from tests.conformance.functions import SealedByBlake3
from tests.natsproxy import NatsProxy
from tests.servers import jetstream

from bsfg.digest import Hasher
from bsfg.ports import Buffer, Clock, Storage
from bsfg.stores.jetstream.server import JetStreamSettings
from bsfg.stores.jetstream.storage import JetStreamStorage
from bsfg.testing.conformance import (
    BrokenMediumContract,
    CursorTrackerContract,
    ForwardBufferContract,
    HeldMediumContract,
    MediumFault,
    RandomOperationsContract,
    SetsAsideContract,
    StorageCase,
    StorageContract,
    StoreBufferContract,
)

_numbers = itertools.count(1)


class JetStreamCase(StorageCase):
    """A storage in streams of its own, closed before it is opened again."""

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        settings = JetStreamSettings(
            [jetstream().url],
            f"t{os.getpid()}_{next(_numbers)}",
            monitor_url=jetstream().monitor_url,
            patience_seconds=0.3,
        )
        return await JetStreamStorage.open(settings, zone="plant", clock=clock, hasher=hasher)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(JetStreamStorage, storage)
        await self.end(old)
        return await JetStreamStorage.open(old.server.settings, zone="plant", clock=old.clock, hasher=old.hasher)

    async def end(self, old: JetStreamStorage) -> None:
        await old.close()


class KilledCase(JetStreamCase):
    """Every reopening is that of a node that was killed: its connection ends, and it can say nothing more."""

    async def end(self, old: JetStreamStorage) -> None:
        await asyncio.to_thread(old.server.close)
        await old.close()


class BehindDoor(JetStreamCase):
    """The server is reached through a door that a test can hold, cut or let fail."""

    doors: dict[str, NatsProxy]

    async def make(self, tmp_path: Path, *, clock: Clock, hasher: Hasher) -> Storage:
        door = NatsProxy(jetstream().port)
        self.doors = {**getattr(self, "doors", {}), door.url: door}
        prefix = f"t{os.getpid()}_{next(_numbers)}"
        settings = JetStreamSettings([door.url], prefix, monitor_url=jetstream().monitor_url, patience_seconds=0.3)
        return await JetStreamStorage.open(settings, zone="plant", clock=clock, hasher=hasher)

    async def reopen(self, storage: Storage) -> Storage:
        old = cast(JetStreamStorage, storage)
        await self.end(old)
        door = self._door(old)
        door.before = None
        door.open()
        return await JetStreamStorage.open(old.server.settings, zone="plant", clock=old.clock, hasher=old.hasher)

    def teardown_method(self) -> None:
        for door in getattr(self, "doors", {}).values():
            door.close()

    def _door(self, storage: Storage) -> NatsProxy:
        return self.doors[cast(JetStreamStorage, storage).server.settings.servers[0]]

    def hold_medium(self, storage: Storage) -> Callable[[], None]:
        """Keep back what is published to the zone's streams; the server is asked as ever."""
        door, going = self._door(storage), asyncio.Event()
        prefix = cast(JetStreamStorage, storage).server.settings.prefix

        async def before(subject: str) -> bool:
            if subject.startswith(prefix):
                await going.wait()
            return False

        def release() -> None:
            door.before = None
            door.call(going.set)

        door.before = before
        return release

    def break_medium(self, storage: Storage, fault: MediumFault) -> None:
        """Let the next message be refused by the server, for a limit that it has for that moment, or be cut off."""
        door = self._door(storage)
        prefix = cast(JetStreamStorage, storage).server.settings.prefix

        async def before(subject: str) -> bool:
            if not subject.startswith(prefix):
                return False
            door.before = None
            if fault == "sync_fails":
                return True
            await limited(subject, "max_bytes" if fault == "no_space" else "max_msg_size")
            door.after = lambda: limited(subject)
            return False

        door.before = before


async def limited(subject: str, limit: str = "") -> None:
    """Let the stream that a subject is of take nothing more, by one of its limits, or let it be without any."""
    client = await nats.connect(jetstream().url)

    async def api(what: str, document: Any) -> Any:
        return orjson.loads((await client.request(f"$JS.API.{what}", orjson.dumps(document))).data)

    (name,) = (await api("STREAM.NAMES", {"subject": subject}))["streams"]
    found = await api(f"STREAM.INFO.{name}", {})
    limits: dict[str, Any] = {"max_bytes": -1, "max_msg_size": -1, "discard_new_per_subject": False}
    if limit == "max_bytes" and found["config"]["max_msgs_per_subject"] == 1:
        # What takes the place of another message of its size is no question of bytes.
        limits["discard_new_per_subject"] = True
    elif limit:
        limits[limit] = found["state"]["bytes"] if limit == "max_bytes" else 1
    assert "error" not in await api(f"STREAM.UPDATE.{name}", {**found["config"], **limits})
    await client.close()


class TestStoreBuffer(JetStreamCase, StoreBufferContract):
    """The store buffer."""


class TestForwardBuffer(JetStreamCase, ForwardBufferContract):
    """The forward buffer."""


class TestStoreBufferByBlake3(SealedByBlake3, JetStreamCase, StoreBufferContract):
    """The store buffer of a zone that seals with BLAKE3."""


class TestCursors(JetStreamCase, CursorTrackerContract):
    """The cursors."""


class TestStorage(JetStreamCase, StorageContract):
    """The storage as a whole."""


class TestHeldMedium(BehindDoor, HeldMediumContract):
    """A server that takes its time."""


class TestSetsAside(JetStreamCase, SetsAsideContract):
    """Facts set aside without being put."""

    kind = Buffer.FORWARD


class TestKilledForwardBuffer(KilledCase, ForwardBufferContract):
    """The forward buffer of a node that is killed at every reopening."""


class TestKilledCursors(KilledCase, CursorTrackerContract):
    """The cursors of a node that is killed at every reopening."""


class TestBrokenStore(BehindDoor, BrokenMediumContract):
    """A server that fails under a store buffer."""


class TestBrokenForward(BehindDoor, BrokenMediumContract):
    """A server that fails under a forward buffer."""

    kind = Buffer.FORWARD


class TestRandomOperations(KilledCase, RandomOperationsContract):
    """Random operations against the model."""
