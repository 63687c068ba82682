"""From the bytes of a caller to the frames on disk: whatever is accepted can be read again, by Arrow alone."""

import asyncio
import hashlib
from functools import cache
from random import Random

import pyarrow as pa
import pytest
from tests.differential import arrowmodel, campaign, rowmodel
from tests.differential.jsonmodel import model
from tests.journey.zones import append
from tests.unit.samples import ARTIFACT, message, row

from bsfg.batch import EntryBatch, FactBatch
from bsfg.columns import AT, ENTRY_SCHEMA, FACT_SCHEMA, ORIGIN_FIELDS
from bsfg.errors import BsfgError
from bsfg.fact import is_json
from bsfg.journey.link import Fetched, PeerPosition
from bsfg.journey.receive import LinkRules, receive
from bsfg.ports import ForwardBuffer, Frame, Result, StoreBuffer
from bsfg.rows import Row, record_batch_of, row_of
from bsfg.rules import judge
from bsfg.sealing import seal
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, ROWS, decode_frame_header, decode_segment_header
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.messages import reader_of

INPUTS = 25
"""How many callers send something to one log before it is opened again."""

FACTS = len(FACT_SCHEMA)
DIGEST, OBJECT, MEDIA_TYPE = AT["digest"], AT["object"], AT["object_media_type"]
RULES = LinkRules("here", frozenset({"plant-a"}))
SCHEMA_BYTES = len(FactBatch.empty().to_ipc()) - 8


@cache
def fact(number: int, rich: bool) -> Row:
    """Make a good fact, with everything that may be absent or without."""
    more = {"labels": {"a": "é"}, "correlation_id": "c", "signature": "s"} if rich else {}
    return row_of(message(number, ARTIFACT if rich else None, **more))


def facts(random: Random, first: int) -> list[Row]:
    """Draw good facts with columns that are there, absent, or both."""
    count, some = random.choice((1, 1, 2, 3, 9, 9, 10, 17, 33, 65)), random.random()
    made = [fact(number, random.random() < some) for number in range(first, first + count)]
    if random.random() < 0.2:
        made[0] = row(first, object=b'{ "b":1, "a":2 }')
    return made


def sent(random: Random, data: bytes) -> bytes:
    """Give bytes as a caller would send them that is honest, unlucky or hostile."""
    kind = random.random()
    if kind < 0.3:
        return data
    if kind < 0.7:
        return arrowmodel.lying(random, data, SCHEMA_BYTES, SCHEMA_BYTES + arrowmodel.HEAD_BYTES)
    return arrowmodel.damaged(random, data)


def sealed(rows: list[Row]) -> list[Row]:
    """Seal rows one by one, by the judge, the model of canonical JSON and SHA-256."""
    result = []
    for number, each in enumerate(rows):
        judge(number, each)
        data = model(each[OBJECT]) if is_json(each[MEDIA_TYPE]) else each[OBJECT]
        assert data is not None
        parts = (each[AT["subject"]], each[AT["predicate"]], each[AT["artifact_digest"]] or "")
        digest = hashlib.sha256(b"\0".join([*(part.encode() for part in parts), data])).digest()
        result.append((*each[:OBJECT], data, *each[OBJECT + 1 : DIGEST], digest))
    return result


class Node:
    """What a node does with the bytes of its callers, on a disk that can be looked at."""

    def __init__(self, random: Random) -> None:
        self._random, self.disk = random, SimulatedDisk()
        self.stored: dict[int, Row] = {}
        self.offered: set[Row] = set()
        self.inserted = self.refused = self.set_aside = self._next = 0

    async def serve(self) -> None:
        """Take what callers send, some of it at the same time."""
        storage = await LogStorage.open(self.disk, clock=FakeClock())
        store, forward = await storage.store("s"), await storage.forward("s")
        for _ in range(INPUTS // 5):
            appends = [self._append(store) for _ in range(self._random.choice((1, 2, 4)))]
            await asyncio.gather(*appends)
            for _ in range(5 - len(appends)):
                await self._put(forward)
        await storage.close()

    def _drawn(self) -> tuple[int, list[Row]]:
        """Draw facts, now and then some that were there before, with the same content or another."""
        first = self._next if self._random.random() < 0.8 else self._random.randrange(self._next + 1)
        rows = facts(self._random, first)
        self._next = max(self._next, first + len(rows))
        return first, rows

    async def _append(self, store: StoreBuffer) -> None:
        data = sent(self._random, FactBatch(record_batch_of(self._drawn()[1])).to_ipc().to_pybytes())
        frame = reader_of(pb.AppendFrame)(pb.AppendFrame(stream="s", facts=data).SerializeToString())
        try:
            outcome = await append(store, FactBatch.from_ipc(frame.facts), clock=FakeClock())
        except BsfgError as error:
            assert error.code in ("frame_invalid", "fact_too_large", "invalid_fact"), error
            self.refused += 1
            return
        expected = arrowmodel.rows_in(data, FACT_SCHEMA)
        assert expected is not None
        for result, each in zip(outcome.results(), sealed(expected), strict=True):
            if result.result == Result.INSERTED:
                self.stored[result.offset] = each

    async def _put(self, forward: ForwardBuffer) -> None:
        first, rows = self._drawn()
        last = first + len(rows) - 1
        good = seal(FactBatch(record_batch_of(rows))).rows()
        entries = [(*each, at, 7, *[None] * len(ORIGIN_FIELDS)) for at, each in enumerate(good, first)]
        data = sent(self._random, EntryBatch(record_batch_of(entries, ENTRY_SCHEMA)).to_ipc().to_pybytes())
        call = reader_of(pb.PutFrame)(pb.PutFrame(first=first, last=last, entries=data).SerializeToString())
        try:
            frame = Frame(first, last, EntryBatch.from_ipc(call.entries))
        except BsfgError as error:
            assert error.code in ("frame_invalid", "fact_too_large"), error
            self.refused += 1
            return
        fetched = Fetched("id", first, last + 1, b"", [frame])
        position = PeerPosition(log_id="id")
        progress = await receive(fetched, position, RULES, "plant-a", forward, clock=FakeClock())
        self.refused += progress.held is not None
        self.inserted += progress.inserted
        expected = arrowmodel.rows_in(data, ENTRY_SCHEMA)
        assert expected is not None
        for each in expected:
            # Kept of an entry are its fact, where it came from and its age, not what the sender says of its own origin.
            self.offered.add((*each[:FACTS], "plant-a", each[FACTS], each[FACTS + 1]))

    def on_disk(self, folder: str) -> dict[int, Row]:
        """Read every frame of a log with Arrow and the model of rows alone, and give its rows by their offsets."""
        found: dict[int, Row] = {}
        for path, data in self.disk.content().items():
            if not path.endswith(".seg") or folder not in path:
                continue
            header = decode_segment_header(data)
            at = header.size_bytes
            while at < len(data):
                frame = decode_frame_header(data, at)
                payload = data[at + FRAME_HEADER_BYTES : at + FRAME_HEADER_BYTES + frame.payload_bytes]
                if frame.form == ROWS:
                    rows = rowmodel.rows_in(payload, header.schema) or []
                else:
                    rows = arrowmodel.rows_of(pa.ipc.read_record_batch(pa.py_buffer(payload), header.schema))
                assert len(rows) == frame.count
                found |= enumerate(rows, frame.base)
                at += frame.frame_bytes
        return found

    async def after_restart(self) -> tuple[dict[int, Row], dict[int, Row]]:
        """Open the logs again and give what they serve, by offsets: what was stored, and what was put."""
        storage = await LogStorage.open(self.disk.killed(), clock=FakeClock())
        served: list[dict[int, Row]] = []
        for buffer in (await storage.store("s"), await storage.forward("s")):
            assert buffer.problems == []
            for aside in await buffer.quarantine():
                arrowmodel.rows_of(aside.facts.record_batch)
                self.set_aside += 1
            rows = [each async for frame in buffer.replay(0) if frame.entries for each in frame.entries.rows()]
            served.append({each[FACTS]: each for each in rows})
        await storage.close()
        return served[0], served[1]


def all_is_read_again(random: Random) -> str:
    """Let callers send to a log, then read its frames with Arrow alone, and after a restart."""
    node = Node(random)
    asyncio.run(node.serve())
    assert node.on_disk("/store") == node.stored
    put = node.on_disk("/forward")
    assert len(put) == node.inserted
    assert {each[: FACTS + 3] for each in put.values()} <= node.offered
    stored, forwarded = asyncio.run(node.after_restart())
    assert {at: each[:FACTS] for at, each in stored.items()} == node.stored
    assert {at: (*each[:FACTS], *each[FACTS + 2 :]) for at, each in forwarded.items()} == put
    return "some set aside" if node.set_aside else "some refused" if node.refused else "all taken"


@pytest.mark.soak
def test_what_is_accepted_can_be_read_again() -> None:
    """Whatever a producer, or a lying peer, has stored is sound by Arrow's full check and survives a restart."""
    campaign.run(all_is_read_again, short=40, long=campaign.LONG // INPUTS, must_see=("some refused", "some set aside"))
