"""What a write promises: offsets, receipts, repeats and conflicts, alone and in a race."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from bsfg.batch import FactBatch
from bsfg.digest import Hasher, hasher_named
from bsfg.errors import InvalidArgument
from bsfg.fact import Message
from bsfg.ports import Buffer, Receipt, Result
from bsfg.sealing import digest_mismatches
from bsfg.testing.clock import START_UNIX_MS
from bsfg.testing.conformance.case import BufferUnderTest, Rig, StorageCase, scenario
from bsfg.testing.facts import WeakHasher, altered, batch, message, messages, sealed

INSERTED, ALREADY_EXISTS, CONFLICT = int(Result.INSERTED), int(Result.ALREADY_EXISTS), int(Result.CONFLICT)


def rows(receipt: Receipt) -> list[tuple[int, int]]:
    """Give a receipt as pairs of result and offset."""
    return list(zip(receipt.results.tolist(), receipt.offsets.tolist(), strict=True))


def all_rows(result: int, first: int, count: int) -> list[tuple[int, int]]:
    """Give the pairs of a receipt with one result and consecutive offsets."""
    return [(result, offset) for offset in range(first, first + count)]


def two_functions() -> tuple[Hasher, Hasher]:
    """Give two digest functions; the second one needs the extra blake3."""
    return hasher_named("sha256"), hasher_named("blake3")


class WritingContract(StorageCase):
    """Idempotent writes; the tests run on the buffer that ``kind`` names."""

    @scenario
    async def test_new_facts_get_consecutive_offsets(self, lane: BufferUnderTest) -> None:
        """New facts get consecutive offsets from 0 in row order, batch after batch."""
        assert rows(await lane.write(batch(3))) == all_rows(INSERTED, 0, 3)
        assert rows(await lane.write(batch(4, first=3))) == all_rows(INSERTED, 3, 4)
        assert await lane.messages() == messages(7)

    @scenario
    async def test_entries_keep_every_field(self, rig: Rig) -> None:
        """A stored fact comes back with envelope, body and digest as they were, also after a restart."""
        lane = await rig.lane()
        facts = batch(20, seed=3)
        await lane.write(facts)
        async for lane in rig.across_restart():
            entries = await lane.entries()
            assert [entry.message for entry in entries] == facts.to_messages()
            assert [entry.digest for entry in entries] == facts.digests()

    @scenario
    async def test_repeats_are_answered_with_the_first_offset(self, lane: BufferUnderTest) -> None:
        """The same facts again are repeats with their first offsets, mixed with new ones or not."""
        await lane.write(batch(5))
        assert rows(await lane.write(batch(5))) == all_rows(ALREADY_EXISTS, 0, 5)
        mixed = await lane.write(batch(4, first=3))
        assert rows(mixed) == [(ALREADY_EXISTS, 3), (ALREADY_EXISTS, 4), (INSERTED, 5), (INSERTED, 6)]
        assert await lane.messages() == messages(7)

    @scenario
    async def test_another_envelope_around_the_same_body_is_a_repeat(self, lane: BufferUnderTest) -> None:
        """The body alone decides whether a fact is the same: a retry may carry another label or time."""
        first, again = message("a", 1), message("a", 1, to_zone="elsewhere")
        await lane.write_messages([first])
        assert rows(await lane.write_messages([again])) == [(ALREADY_EXISTS, 0)]
        assert await lane.messages() == [first]

    @scenario
    async def test_another_body_is_a_conflict(self, lane: BufferUnderTest) -> None:
        """A taken key with another body is a conflict with the first offset, and the first fact stays."""
        await lane.write(batch(3))
        receipt = await lane.write_messages(altered(messages(3)))
        assert rows(receipt) == all_rows(CONFLICT, 0, 3)
        assert receipt.count(Result.CONFLICT) == 3
        assert await lane.messages() == messages(3)

    @scenario
    async def test_subject_and_predicate_belong_to_the_body(self, lane: BufferUnderTest) -> None:
        """A taken key with another subject or predicate is a conflict even when the object is the same."""
        await lane.write_messages([message("a", 1)])
        others = [message("a", 1, subject="machine:press-2"), message("a", 1, predicate="pressure_measured")]
        assert rows(await lane.write_messages(others)) == [(CONFLICT, 0), (CONFLICT, 0)]

    @scenario
    async def test_repeats_inside_a_batch(self, lane: BufferUnderTest) -> None:
        """A later row of a batch that repeats an earlier one gets that one's offset; another body is a conflict."""
        await lane.write_messages([message("old", 1)])
        facts = [message("a", 1), message("a", 1), message("b", 2), message("a", 9), message("old", 1), message("b", 2)]
        expected = [(INSERTED, 1), (ALREADY_EXISTS, 1), (INSERTED, 2), (CONFLICT, 1), (ALREADY_EXISTS, 0)]
        assert rows(await lane.write_messages(facts)) == [*expected, (ALREADY_EXISTS, 2)]
        assert await lane.messages() == [message("old", 1), facts[0], facts[2]]

    @scenario
    async def test_repeats_after_reopening(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A restart forgets no key: repeats and conflicts are known as before."""
        await lane.write(batch(5))
        lane = await rig.reopened()
        assert rows(await lane.write(batch(5))) == all_rows(ALREADY_EXISTS, 0, 5)
        assert rows(await lane.write_messages(altered(messages(5)))) == all_rows(CONFLICT, 0, 5)
        assert rows(await lane.write(batch(1, first=5))) == [(INSERTED, 5)]

    @scenario
    async def test_repeats_after_truncation(self, rig: Rig) -> None:
        """Keys outlive bytes: what was truncated is still a repeat or a conflict, also after a restart."""
        lane = await rig.lane()
        await lane.write(batch(6))
        await lane.create_reader()
        await lane.confirm()
        await lane.buffer.truncate_before(4)
        async for lane in rig.across_restart():
            assert rows(await lane.write(batch(6))) == all_rows(ALREADY_EXISTS, 0, 6)
            assert rows(await lane.write_messages(altered(messages(6)))) == all_rows(CONFLICT, 0, 6)
            assert await lane.messages() == messages(2, first=4)

    @scenario
    async def test_two_origins_with_one_message_id(self, lane: BufferUnderTest) -> None:
        """One message id from two zones is two facts."""
        await lane.write_messages([message("a", 1, from_zone="plant")])
        both = [message("a", 2, from_zone="idmz"), message("a", 1, from_zone="plant")]
        assert rows(await lane.write_messages(both)) == [(INSERTED, 1), (ALREADY_EXISTS, 0)]

    @scenario
    async def test_ids_that_look_alike_are_different(self, lane: BufferUnderTest) -> None:
        """Zone and id do not run into each other, and ids differ by case and by every byte."""
        pairs = [("ab", "c"), ("a", "bc"), ("a", "BC"), ("a", "bc "), ("a", "b"), ("a", "bc\u0301"), ("a", "x" * 256)]
        facts = [message(name, 0, from_zone=zone) for zone, name in pairs]
        assert rows(await lane.write_messages(facts)) == all_rows(INSERTED, 0, len(facts))

    @scenario
    async def test_equal_digests_of_other_bytes_are_quarantined(self, rig: Rig) -> None:
        """Two bodies with one digest are a conflict and kept aside as a hash collision, across a restart too."""
        hasher = WeakHasher()
        await rig.open(hasher=hasher)
        lane = await rig.lane()
        await lane.write_messages([message("a", 11), message("b", 22)], hasher=hasher)
        inside = [message("a", 12), message("c", 33), message("c", 34)]
        receipt = await lane.write_messages(inside, hasher=hasher)
        assert rows(receipt) == [(CONFLICT, 0), (INSERTED, 2), (CONFLICT, 2)]
        async for lane in rig.across_restart():
            aside = await lane.buffer.quarantine()
            assert [(one.reason, one.existing_offset) for one in aside] == [
                ("hash_collision", 0),
                ("hash_collision", 2),
            ]
            assert [one.facts.to_messages()[0].fact.value() for one in aside] == [12, 34]
            assert rows(await lane.write_messages([message("b", 22)], hasher=hasher)) == [(ALREADY_EXISTS, 1)]

    @scenario
    async def test_facts_of_several_functions_live_side_by_side(self, rig: Rig) -> None:
        """A zone may change its digest function, and relay facts of zones with another: each keeps its own digest."""
        lane, functions = await rig.lane(), two_functions()
        for at in range(6):
            await lane.write(sealed(messages(3, first=3 * at), hasher=functions[at % 2]))
        async for lane in rig.across_restart():
            found = await lane.entries()
            assert [entry.message for entry in found] == messages(18)
            assert [entry.hasher for entry in found] == [functions[at // 3 % 2].name for at in range(18)]
            for frame in await lane.frames():
                assert frame.entries is not None
                assert len(digest_mismatches(frame.entries)) == 0

    @scenario
    async def test_one_fact_by_two_functions_is_one_entry(self, rig: Rig) -> None:
        """The digests differ and the fact is the same: a repeat, also when only its key is left, and in one batch."""
        lane = await rig.lane()
        one, other = two_functions()
        await lane.write(sealed(messages(4), hasher=one))
        both = FactBatch.concat([sealed(messages(1, first=4), hasher=hasher) for hasher in (other, one)])
        assert rows(await lane.write(both)) == [(INSERTED, 4), (ALREADY_EXISTS, 4)]
        await lane.create_reader()
        await lane.confirm()
        await lane.buffer.truncate_before(2)
        async for lane in rig.across_restart():
            assert rows(await lane.write(sealed(messages(4), hasher=other))) == all_rows(ALREADY_EXISTS, 0, 4)
            assert rows(await lane.write(sealed(messages(1, first=4), hasher=one))) == [(ALREADY_EXISTS, 4)]
            assert rows(await lane.write(sealed(altered(messages(5)), hasher=other))) == all_rows(CONFLICT, 0, 5)
            apart = FactBatch.concat([sealed(facts, hasher=other) for facts in (messages(1), altered(messages(1)))])
            assert rows(await lane.write(apart)) == [(ALREADY_EXISTS, 0), (CONFLICT, 0)]
        assert {one.reason for one in await lane.buffer.quarantine()} <= {"conflict"}

    @scenario
    async def test_an_unsealed_batch_is_refused(self, lane: BufferUnderTest) -> None:
        """A batch that was not validated and digested is refused and leaves nothing."""
        with pytest.raises(InvalidArgument):
            await lane.write(FactBatch.from_messages(messages(2)))
        assert (await lane.stats()).end == 0

    @scenario
    async def test_an_empty_batch_has_an_empty_receipt(self, lane: BufferUnderTest) -> None:
        """An empty batch is accepted and changes nothing."""
        await lane.write(batch(1))
        before = await lane.stats()
        receipt = await lane.write(FactBatch.empty())
        assert rows(receipt) == []
        assert receipt.chain_head == before.chain_head
        assert await lane.stats() == before

    @scenario
    async def test_a_slice_of_a_batch_is_a_batch(self, lane: BufferUnderTest) -> None:
        """Rows cut or picked from a larger batch are stored as if they had come alone."""
        whole = batch(10)
        await lane.write(whole.slice(4, 3))
        await lane.write(whole.take([9, 0]))
        everything = messages(10)
        assert await lane.messages() == [*everything[4:7], everything[9], everything[0]]

    @scenario
    async def test_the_receipt_tells_the_time_of_the_entries(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Entries carry the time of their receipt, which is that of the clock."""
        receipts = []
        for number in range(3):
            receipts.append(await lane.write(batch(2, first=2 * number)))
            assert receipts[-1].appended_at_unix_ms == rig.clock.now_unix_ms()
            rig.clock.advance(5)
        times = [entry.appended_at_unix_ms for entry in await lane.entries()]
        assert times == [receipt.appended_at_unix_ms for receipt in receipts for _ in range(2)]

    @scenario
    async def test_time_never_runs_back(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A clock that jumps back does not make times decrease inside a buffer, also across a restart."""
        await lane.write(batch(1))
        rig.clock.jump(-3600)
        await lane.write(batch(1, first=1))
        lane = await rig.reopened()
        await lane.write(batch(1, first=2))
        times = [entry.appended_at_unix_ms for entry in await lane.entries()]
        assert times == sorted(times)
        assert times[0] == rig.clock.now_unix_ms() + 3_600_000

    @scenario
    async def test_a_jump_forward_is_not_written(self, rig: Rig, lane: BufferUnderTest) -> None:
        """A clock that is ten years ahead for a while leaves no trace: times go on, and so does what follows them."""
        expected = []
        for number, seconds in enumerate((0, 315_360_000, 0, -315_360_000)):
            rig.clock.jump(seconds)
            rig.clock.advance(5)
            expected.append(START_UNIX_MS + 5_000 * (number + 1))
            await lane.write(batch(1, first=number))
        assert [entry.appended_at_unix_ms for entry in await lane.entries()] == expected
        lane = await rig.reopened()
        await lane.write(batch(1, first=4))
        assert [entry.appended_at_unix_ms for entry in await lane.entries()][-1] == rig.clock.now_unix_ms()

    @scenario
    async def test_the_chain_head_follows_what_is_stored(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Each stored batch moves the chain head, a repeat does not, and a restart keeps it."""
        heads = [(await lane.write(batch(2, first=2 * number))).chain_head for number in range(4)]
        assert len(set(heads)) == 4
        assert (await lane.write(batch(2))).chain_head == heads[-1]
        assert (await lane.stats()).chain_head == heads[-1]
        assert (await (await rig.reopened()).stats()).chain_head == heads[-1]

    @scenario
    async def test_many_writers_of_one_key_insert_once(self, lane: BufferUnderTest) -> None:
        """Of many concurrent writes of one fact exactly one inserts it; all learn the same offset."""
        one = batch(1)
        receipts = await asyncio.gather(*(lane.write(one) for _ in range(24)))
        assert sorted(rows(receipt)[0] for receipt in receipts) == [(INSERTED, 0)] + [(ALREADY_EXISTS, 0)] * 23
        assert await lane.messages() == messages(1)

    @scenario
    async def test_many_bodies_race_for_one_key(self, lane: BufferUnderTest) -> None:
        """Of many concurrent bodies for one key one wins, and every other one is a conflict with its offset."""
        bodies = [message("a", number) for number in range(16)]
        receipts = await asyncio.gather(*(lane.write_messages([body]) for body in bodies))
        assert sorted(rows(receipt)[0] for receipt in receipts) == [(INSERTED, 0)] + [(CONFLICT, 0)] * 15
        winner = next(number for number, receipt in enumerate(receipts) if rows(receipt) == [(INSERTED, 0)])
        assert await lane.messages() == [bodies[winner]]

    @scenario
    async def test_concurrent_batches_overlap(self, lane: BufferUnderTest) -> None:
        """Concurrent batches that share facts store each fact once, in receipts that agree with the buffer."""
        random = Random(11)
        facts = messages(60)
        picks = [random.sample(range(60), random.randint(1, 12)) for _ in range(30)]
        receipts = await asyncio.gather(*(lane.write_messages([facts[i] for i in pick]) for pick in picks))
        await self._check_agreement(lane, facts, picks, receipts)

    async def _check_agreement(
        self, lane: BufferUnderTest, facts: list[Message], picks: list[list[int]], receipts: list[Receipt]
    ) -> None:
        entries = await lane.entries()
        at = {entry.message.envelope.message_id: entry.offset for entry in entries}
        assert len(at) == len(entries) == len({number for pick in picks for number in pick})
        inserted: list[int] = []
        for pick, receipt in zip(picks, receipts, strict=True):
            assert [at[facts[number].envelope.message_id] for number in pick] == receipt.offsets.tolist()
            new = [offset for result, offset in rows(receipt) if result == INSERTED]
            assert new == list(range(new[0], new[0] + len(new))) if new else True
            inserted += new
        assert sorted(inserted) == list(range(len(entries)))

    @scenario
    async def test_concurrent_batches_keep_the_order_of_their_calls(self, lane: BufferUnderTest) -> None:
        """Batches of any size, written without waiting for the one before, are stored in the order of the calls."""
        sizes = [300, 1, 40, 2, 500, 1, 1, 260, 3]
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        batches = [batch(size, first=first) for size, first in zip(sizes, firsts, strict=True)]
        receipts = await asyncio.gather(*map(lane.write, batches))
        assert [rows(receipt)[0] for receipt in receipts] == [(INSERTED, first) for first in firsts]
        assert await lane.messages() == messages(sum(sizes))

    @scenario
    async def test_a_batch_is_visible_as_a_whole(self, lane: BufferUnderTest) -> None:
        """A reader that looks all the time never sees a part of a batch."""
        ends: set[int] = set()
        writer = asyncio.create_task(self._write_batches(lane, 30))
        while not writer.done():
            ends.add((await lane.stats()).end)
            ends.add(len(await lane.entries()))
            await asyncio.sleep(0)
        await writer
        assert {end % 7 for end in ends} == {0}

    async def _write_batches(self, lane: BufferUnderTest, count: int) -> None:
        for number in range(count):
            await lane.write(batch(7, first=7 * number))

    @scenario
    async def test_buffers_and_streams_are_apart(self, rig: Rig) -> None:
        """The same facts in another stream or in the other buffer are new there."""
        lanes = [
            await rig.lane(kind=kind, stream=stream)
            for kind in Buffer
            for stream in ("operational", "audit", "audit-2")
        ]
        for lane in lanes:
            assert rows(await lane.write(batch(3))) == all_rows(INSERTED, 0, 3)
        await rig.reopen()
        lane = await rig.lane(stream="audit")
        assert rows(await lane.write(batch(4))) == [*all_rows(ALREADY_EXISTS, 0, 3), (INSERTED, 3)]

    @scenario
    async def test_a_large_batch_is_one_write(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Thousands of facts in one batch are stored in order, and all of them are known afterwards."""
        facts = batch(5_000)
        assert rows(await lane.write(facts)) == all_rows(INSERTED, 0, 5_000)
        lane = await rig.reopened()
        assert rows(await lane.write(facts)) == all_rows(ALREADY_EXISTS, 0, 5_000)
        assert (await lane.messages())[4_321] == messages(1, first=4_321)[0]

    @scenario
    async def test_objects_of_any_media_type_are_kept(self, rig: Rig, lane: BufferUnderTest) -> None:
        """Objects that are not JSON, empty ones included, come back byte for byte."""
        contents = [b"", b"\x00\xff\x00", bytes(range(256)) * 64]
        facts = [
            replace(
                message(f"m{number}"),
                envelope=replace(message(f"m{number}").envelope, object_media_type="application/octet-stream"),
                fact=replace(message(f"m{number}").fact, object=content),
            )
            for number, content in enumerate(contents)
        ]
        await lane.write(sealed(facts))
        lane = await rig.reopened()
        assert [one.fact.object for one in await lane.messages()] == contents
