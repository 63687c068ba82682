"""Values and messages: what is written is what is read, and what is not a frame is refused."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.batch import EntryBatch, FactBatch
from bsfg.errors import BsfgError, FrameInvalid, InvalidFact
from bsfg.fact import ArtifactRef, Entry, Envelope, Fact, Message, Origin
from bsfg.journey.link import AppendOutcome, Fetched, Refusal
from bsfg.ports import Buffer, Confirmation, Frame, GapRecord, Receipt
from bsfg.retention import GapReason
from bsfg.testing.facts import batch, message
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.convert import (
    buffer_number,
    buffer_of,
    confirm_request,
    confirmation_of,
    entry_message,
    entry_of,
    envelope_message,
    fact_message,
    gap_message,
    gap_of,
    refusal_message,
    refusal_of,
    single_fact,
)
from bsfg.wire.frames import (
    ack_message,
    frame_messages,
    head_message,
    pieces,
    read_ack,
    read_frame,
    read_head,
    with_batch,
)

texts = st.text(st.characters(codec="utf-8"), max_size=12)
maybe = st.none() | texts
numbers = st.integers(-(2**63), 2**63 - 1)
envelopes = st.builds(
    Envelope,
    from_zone=texts,
    to_zone=texts,
    produced_at_unix_ms=numbers,
    message_id=maybe,
    correlation_id=maybe,
    causation_id=maybe,
    labels=st.dictionaries(texts, texts, max_size=3),
    object_media_type=texts,
    object_schema=maybe,
    signature=maybe,
)
artifacts = st.builds(ArtifactRef, maybe, maybe, texts, st.none() | st.integers(0, 2**62), maybe, maybe)
facts = st.builds(Fact, texts, texts, st.binary(max_size=20), st.none() | artifacts)
origins = st.none() | st.builds(Origin, texts, numbers, numbers)
entries = st.builds(Entry, numbers, numbers, st.builds(Message, envelopes, facts), st.binary(max_size=32), origins)
gaps = st.builds(GapRecord, numbers, numbers, st.sampled_from(GapReason), numbers, texts, maybe)


@given(entries)
def test_entries_survive_the_way(entry: Entry) -> None:
    """Every field of an entry comes out as it went in, absent ones absent."""
    assert entry_of(pb.Entry.FromString(entry_message(entry).SerializeToString())) == entry


@given(envelopes, facts)
def test_a_single_fact_is_laid_out_as_in_a_batch(envelope: Envelope, fact: Fact) -> None:
    """The short way from a request to a row gives the same batch as the way over Python objects."""
    request = pb.AppendRequest(envelope=envelope_message(envelope), fact=fact_message(fact))
    assert single_fact(request) == FactBatch.from_messages([Message(envelope, fact)])


def test_half_a_message_is_refused() -> None:
    """A message needs its envelope and its fact."""
    for request in (pb.AppendRequest(envelope=pb.Envelope()), pb.AppendRequest(fact=pb.Fact())):
        with pytest.raises(InvalidFact):
            single_fact(request)


@given(gaps)
def test_gap_records_survive_the_way(gap: GapRecord) -> None:
    """Every field of a gap record comes out as it went in."""
    assert gap_of(gap_message(gap)) == gap


def test_unknown_words_are_refused() -> None:
    """A reason or a buffer that nobody knows is said so."""
    with pytest.raises(FrameInvalid):
        gap_of(pb.GapRecord(reason="magic"))
    with pytest.raises(BsfgError):
        buffer_of(77, Buffer.STORE)
    assert [buffer_of(buffer_number(each), Buffer.STORE) for each in Buffer] == list(Buffer)


@given(
    st.builds(
        Confirmation,
        st.none() | numbers,
        st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
        maybe,
        st.none() | st.binary(max_size=32),
    )
)
def test_confirmations_survive_the_way(confirmation: Confirmation) -> None:
    """Absent fields of a confirmation stay absent: nothing is not offset 0."""
    assert confirmation_of(confirm_request("c", confirmation)) == confirmation
    refusal = Refusal(1, 2, "conflict", "why")
    assert refusal_of(refusal_message(refusal)) == refusal


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2)), max_size=40), st.booleans())
def test_acks_survive_the_way(rows: list[tuple[int, int]], follow: bool) -> None:
    """Offsets, results and digests come out per fact, also when the ack leaves out what can be derived."""
    offsets = np.array([offset for offset, _ in rows], dtype=np.int64)
    results = np.array([result for _, result in rows], dtype=np.uint8)
    if follow and len(rows):
        offsets, results = np.arange(offsets[0], offsets[0] + len(rows)), np.zeros(len(rows), dtype=np.uint8)
    facts = batch(len(rows)) if rows else FactBatch.empty()
    outcome = AppendOutcome(facts, Receipt(offsets, results, b"head", 5), "sha256")
    ack = pb.AppendAck.FromString(ack_message(7, outcome, ids_derived=True).SerializeToString())
    receipt, digests = read_ack(ack)
    assert (ack.sequence, receipt.chain_head, receipt.appended_at_unix_ms) == (7, b"head", 5)
    assert receipt.offsets.tolist() == offsets.tolist()
    assert receipt.results.tolist() == results.tolist()
    assert [row.tobytes() for row in digests] == facts.digests()
    assert list(ack.message_ids) == facts.values("message_id")
    if follow:
        assert not ack.offsets


@pytest.mark.parametrize(
    "ack",
    [
        pb.AppendAck(count=1),
        pb.AppendAck(count=2**31),
        pb.AppendAck(count=1, digests=bytes(32), results=b"\x00\x00"),
        pb.AppendAck(count=1, digests=bytes(32), results=b"\x09"),
        pb.AppendAck(count=1, digests=bytes(32), offsets=b"\x00"),
        pb.AppendAck(count=0, digests=bytes(32)),
    ],
)
def test_acks_that_lie_are_refused(ack: pb.AppendAck) -> None:
    """An ack whose columns do not fit its count is refused before anything is allocated for it."""
    with pytest.raises(FrameInvalid):
        read_ack(ack)


def entries_of(sizes: list[int]) -> EntryBatch:
    """Make entries with objects of given sizes."""
    rows = [message(str(at), "x" * size) for at, size in enumerate(sizes)]
    return EntryBatch.of(FactBatch.from_messages(rows).record_batch, np.arange(len(rows)), 5)


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=60), st.integers(200, 20_000))
def test_pieces_cover_a_batch(sizes: list[int], max_bytes: int) -> None:
    """Pieces have every row once and in order, and are small unless a single fact is not."""
    whole = entries_of(sizes)
    found = list(pieces(whole, max_bytes))
    assert EntryBatch.concat(found) == whole
    # Columns without values may share their bytes, which `size_bytes` counts once and `nbytes` for each.
    assert all(len(piece) == 1 or piece.size_bytes <= max_bytes for piece in found)


def test_frames_survive_the_way() -> None:
    """A frame of entries or a gap record, cut into messages, comes out whole."""
    whole = Frame(0, 29, entries_of([1_000] * 30))
    gap = Frame(30, 33, gap=GapRecord(28, 40, GapReason.EXPIRED, 9, "old"))

    async def written(frame: Frame) -> list[pb.FetchFrame]:
        messages = [each async for each in frame_messages(frame, 8_000)]
        return [
            pb.FetchFrame.FromString(each if isinstance(each, bytes) else each.SerializeToString()) for each in messages
        ]

    messages = asyncio.run(written(whole))
    assert len(messages) > 3
    frames = [read_frame(each) for each in messages]
    assert EntryBatch.concat([frame.entries for frame in frames if frame.entries is not None]) == whole.entries
    assert [frame.first for frame in frames[1:]] == [frame.last + 1 for frame in frames[:-1]]
    [again] = [read_frame(each) for each in asyncio.run(written(gap))]
    assert again == gap


def test_heads_survive_the_way() -> None:
    """The head of an answer has the log, its end and the gap records of other zones."""
    gap = GapRecord(1, 2, GapReason.EVICTED, 9, "full", "idmz")
    fetched = Fetched("log", 5, 9, b"head", (), [gap], "token")
    again = read_head(pb.FetchFrame.FromString(head_message(fetched).SerializeToString()))
    assert again == fetched
    with pytest.raises(FrameInvalid):
        read_head(pb.FetchFrame(first=0, last=0, gap=gap_message(gap)))
    with pytest.raises(FrameInvalid):
        read_frame(head_message(fetched))


@pytest.mark.parametrize("changed", [{"log_id": "x" * 81}, {"gaps_token": "x" * 81}, {"chain_head": bytes(65)}])
def test_names_that_are_kept_are_short(changed: dict[str, Any]) -> None:
    """A receiver keeps them with the positions of all its links, and a sender may say what it likes."""
    short = Fetched("x" * 80, 5, 9, bytes(64), (), [], "y" * 80)
    assert read_head(head_message(short)) == short
    with pytest.raises(FrameInvalid, match="the limit is"):
        read_head(head_message(replace(short, **changed)))


@given(st.integers(0, 2**63 - 1), st.integers(0, 60))
def test_a_batch_written_behind_a_message_is_its_field(sequence: int, count: int) -> None:
    """The short way to write a large message gives what the library itself would read and write."""
    facts = batch(count) if count else FactBatch.empty()
    data = with_batch(pb.AppendFrame(stream="s", sequence=sequence), "facts", facts)
    plain = pb.AppendFrame(stream="s", sequence=sequence, facts=facts.to_ipc().to_pybytes())
    assert pb.AppendFrame.FromString(data) == plain


@given(st.binary(max_size=300))
def test_garbage_is_no_frame(data: bytes) -> None:
    """Bytes that are no Arrow stream are refused as such."""
    with pytest.raises(FrameInvalid):
        read_frame(pb.FetchFrame(first=0, last=0, entries=data))
