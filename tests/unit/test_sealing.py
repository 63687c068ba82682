"""Sealing: valid, canonical, digested and named, alike for one fact and for thousands."""

import hashlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, columns, message, messages, row

from bsfg import digest
from bsfg.batch import SMALL_BATCH_FACTS, FactBatch
from bsfg.canonical import NotJson, canonicalize
from bsfg.digest import register
from bsfg.errors import BsfgError, DigestMismatch, FactTooLarge, HasherUnknown, InvalidFact
from bsfg.fact import Fact, Message, is_json
from bsfg.model import Limits
from bsfg.rows import Row
from bsfg.rules import judge
from bsfg.sealing import EXPLICIT, IdStrategy, MessageIds, bodies, digest_mismatches, reseal, seal

LARGE = SMALL_BATCH_FACTS * 4


def body(subject: str, predicate: str, data: bytes, artifact_digest: str | None) -> bytes:
    """Write the body of a fact by the plainest means."""
    return b"\0".join([subject.encode(), predicate.encode(), (artifact_digest or "").encode(), data])


def naive_seal(rows: list[Row], limits: Limits) -> list[Row] | tuple[str, dict[str, Any]]:
    """Seal row by row: the plain meaning of `seal` with explicit ids."""
    try:
        for number, each in enumerate(rows):
            judge(number, each, limits)
    except BsfgError as error:
        return error.code, error.details
    sealed = []
    for number, each in enumerate(rows):
        data = each[12]
        if is_json(each[7]):
            try:
                data = canonicalize(data)
            except NotJson as problem:
                return "invalid_fact", {"row": number, "field": "object", "rule": str(problem)}
        digest = hashlib.sha256(body(each[10], each[11], data, each[14])).digest()
        sealed.append((*each[:12], data, *each[13:15], digest))
    for number, each in enumerate(rows):
        if each[0] is None:
            rule = "is required: this zone takes ids from its producers"
            return "invalid_fact", {"row": number, "field": "message_id", "rule": rule}
    return sealed


def outcome(batch: FactBatch, limits: Limits) -> list[Row] | tuple[str, dict[str, Any]]:
    """Seal a batch and give its rows, or code and details of the error."""
    try:
        sealed = seal(batch, limits=limits)
    except (InvalidFact, FactTooLarge) as error:
        return error.code, error.details
    assert sealed.sealed
    assert sealed.record_batch.schema.equals(FactBatch.schema)
    assert sealed.column("digest").null_count == 0
    return sealed.rows()


CHANGES = st.sampled_from(
    [
        {"object": b'{"a":1}'},
        {"object": b' {"b":1.10,"a":2}'},
        {"object": b"[1"},
        {"object": b"2]"},
        {"object": b'{"a":1,"a":2}'},
        {"object": b'"\xff"'},
        {"object": b""},
        {"object": b"\x89PNG\0", "object_media_type": "image/png"},
        {"object": b"", "object_media_type": "text/plain"},
        {"object": b"{ }", "object_media_type": "application/vnd.x+json; charset=utf-8"},
        {"object": b"x" * 201},
        {"message_id": None},
        {"message_id": "é\n"},
        {"subject": "nothing"},
        {"predicate": "another_one"},
        {"labels": '{"a":"b"}'},
        {"labels": "{}"},
        {"produced_at_unix_ms": -1},
        {"digest": b"x" * 32},
        {"artifact_digest": ARTIFACT.digest},
    ]
)


@given(
    st.lists(st.tuples(st.integers(0, LARGE - 1), CHANGES), max_size=5),
    st.sampled_from([1, 2, SMALL_BATCH_FACTS, SMALL_BATCH_FACTS + 1, LARGE]),
    st.booleans(),
)
def test_every_path_agrees_with_the_plain_meaning(
    changes: list[tuple[int, dict[str, Any]]], count: int, first: bool
) -> None:
    """Rows, columns and slices of any size are sealed, or refused by the same error, as one by one."""
    limits = Limits(max_object_bytes=200)
    rows = [row(number) for number in range(LARGE)]
    for number, change in changes:
        rows[number % count if first else number] = row(number, **change)
    chosen = rows[:count] if first else rows[LARGE - count :]
    expected = naive_seal(chosen, limits)
    sliced = columns(rows).slice(0 if first else LARGE - count, count)
    for batch in (FactBatch.of_rows(chosen), columns(chosen), sliced):
        assert outcome(batch, limits) == expected


@pytest.mark.parametrize("count", [1, LARGE])
def test_the_digest_is_that_of_the_body(count: int) -> None:
    """The digest is the SHA-256 of subject, predicate, artifact digest and object, joined by NUL."""
    given_messages = [message(number, ARTIFACT if number % 3 == 0 else None) for number in range(count)]
    batch = seal(FactBatch.from_messages(given_messages))
    expected = [
        body(each.fact.subject, each.fact.predicate, each.fact.object, ARTIFACT.digest if each.fact.artifact else None)
        for each in given_messages
    ]
    assert bodies(batch) == expected
    assert batch.digests() == [hashlib.sha256(data).digest() for data in expected]


def test_the_digest_is_fixed_for_good() -> None:
    """The digest of a known fact never changes, because stored logs carry it."""
    fact = Message(message().envelope, Fact("work_order:12345", "was_created", b'{"a":1}'))
    (digest,) = seal(FactBatch.from_messages([fact])).digests()
    assert digest.hex() == "197b2adea829f15c360342617609cbea3a05c209a7dd67a351d72f03e649f76a"


def test_the_envelope_is_not_in_the_digest() -> None:
    """The same body in another envelope has the same digest; another subject, predicate or object has not."""
    base = row()
    same = [base, row(message_id="x", correlation_id="y", labels='{"a":"b"}', produced_at_unix_ms=1)]
    other = [row(subject="a:b"), row(predicate="p"), row(object=b"1")]
    digests = seal(FactBatch.of_rows([*same, *other])).digests()
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_parts_cannot_be_shifted_between_fields() -> None:
    """Moving bytes from one field to the next changes the digest."""
    digests = seal(
        FactBatch.of_rows([row(subject="a:bc", predicate="d"), row(subject="a:b", predicate="cd")])
    ).digests()
    assert digests[0] != digests[1]


@pytest.mark.parametrize("count", [3, LARGE])
def test_sealing_again_changes_nothing(count: int) -> None:
    """A sealed batch is given back as it is, and sealing its content again gives the same."""
    batch = seal(FactBatch.from_messages(messages(count)))
    assert seal(batch) is batch
    assert seal(FactBatch(batch.record_batch)) == batch


@pytest.mark.parametrize("count", [3, LARGE])
def test_sealing_leaves_the_given_batch_alone(count: int) -> None:
    """The batch that was given still has its own bytes and no digests."""
    rows = [row(number, object=b'{ "a": 1 }') for number in range(count)]
    batch = columns(rows)
    assert set(seal(batch).values("object")) == {b'{"a":1}'}
    assert batch.rows() == rows


def test_opaque_objects_are_never_touched() -> None:
    """Objects of other media types keep every byte, even where they look like JSON."""
    rows = [row(number, object=b'{ "b": 1, "a": 2 }', object_media_type="text/plain") for number in range(LARGE)]
    assert set(seal(columns(rows)).values("object")) == {b'{ "b": 1, "a": 2 }'}


@pytest.mark.parametrize(
    ("media_type", "json"),
    [
        ("application/json", True),
        ("Application/JSON", True),
        ("application/json; charset=utf-8", True),
        ("application/vnd.acme+json", True),
        ("application/jsonl", False),
        ("text/json-ish", False),
        ("application/octet-stream", False),
        ("text/plain;a=+json", False),
    ],
)
def test_which_media_types_are_json(media_type: str, json: bool) -> None:
    """application/json and +json types are canonicalised, with parameters and in any case; nothing else is."""
    assert is_json(media_type) == json


@pytest.mark.parametrize("count", [3, LARGE])
def test_reseal_accepts_what_was_sealed(count: int) -> None:
    """Facts that another zone sealed are accepted with ids, digests and bytes as they came."""
    batch = seal(FactBatch.from_messages(messages(count)))
    assert reseal(FactBatch(batch.record_batch)) == batch
    assert reseal(FactBatch(batch.record_batch)).sealed
    assert len(digest_mismatches(batch)) == 0


@pytest.mark.parametrize("count", [5, LARGE])
def test_reseal_notices_altered_bytes(count: int) -> None:
    """An altered subject, predicate, object or digest is a mismatch that names the rows."""
    good = seal(FactBatch.from_messages(messages(count))).rows()
    for at, value in ((10, "a:b"), (11, "p"), (12, b"{}"), (12, b"{"), (15, b"x" * 32), (15, None)):
        altered = list(good)
        altered[3] = (*good[3][:at], value, *good[3][at + 1 :])
        altered[4] = (*good[4][:at], value, *good[4][at + 1 :])
        for batch in (columns(altered), FactBatch.of_rows(altered)):
            with pytest.raises(DigestMismatch) as caught:
                reseal(batch)
            assert caught.value.details["rows"][:2] == [3, 4]


@pytest.mark.parametrize("count", [5, LARGE])
def test_reseal_refuses_what_breaks_a_rule(count: int) -> None:
    """A missing id, a broken rule or JSON that is not canonical is refused even when the digest is right."""
    rows = [row(number) for number in range(count)]
    for change, blamed in (
        ({"message_id": None}, "message_id"),
        ({"subject": "x"}, "subject"),
        ({"object": b'{ "a": 1 }'}, "object"),
        ({"object": b"{"}, "object"),
    ):
        bad = list(rows)
        bad[2] = row(2, **change)
        digests = [hashlib.sha256(each).digest() for each in bodies(columns(bad))]
        batch = columns([(*each[:15], digest) for each, digest in zip(bad, digests, strict=True)])
        with pytest.raises(InvalidFact) as caught:
            reseal(batch)
        assert (caught.value.details["row"], caught.value.details["field"]) == (2, blamed)


def test_damage_is_called_damage_even_when_it_breaks_json() -> None:
    """Altered bytes raise a mismatch, not a complaint about JSON; a bad fact before them is refused first."""
    good = seal(FactBatch.from_messages(messages(5))).rows()
    damaged = [*good[:3], (*good[3][:12], b"{", *good[3][13:]), good[4]]
    with pytest.raises(DigestMismatch):
        reseal(columns(damaged))
    spaced = row(1, object=b"[ ]")
    digest = hashlib.sha256(bodies(FactBatch.of_rows([spaced]))[0]).digest()
    with pytest.raises(InvalidFact, match="not canonical"):
        reseal(columns([good[0], (*spaced[:15], digest), *damaged[2:]]))


class WeakHasher:
    """Every digest is the same."""

    name = "weak"

    def digest(self, data: bytes) -> bytes:
        """Give the one digest."""
        return b"w" * 32

    def digest_all(self, items: Any) -> list[bytes]:
        """Give the one digest for each."""
        return [self.digest(item) for item in items]


def test_the_hasher_is_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another digest function is used throughout, ids included; what it sealed can be checked where it is known."""
    ids = MessageIds(IdStrategy.PAYLOAD)
    batch = seal(columns([row(number, message_id=None) for number in range(3)]), hasher=WeakHasher(), ids=ids)
    assert batch.digests() == [b"w" * 32] * 3
    assert batch.values("message_id") == [(b"w" * 32).hex()] * 3
    with pytest.raises(HasherUnknown, match="weak"):
        digest_mismatches(batch)
    monkeypatch.setattr(digest, "_known", dict(digest._known))
    register(WeakHasher())
    assert len(digest_mismatches(batch)) == 0


def test_an_empty_batch_is_sealed() -> None:
    """A batch without facts passes."""
    assert len(seal(FactBatch.from_messages([]))) == 0
    assert len(seal(FactBatch(FactBatch.empty().record_batch))) == 0
    assert len(reseal(FactBatch(FactBatch.empty().record_batch))) == 0


def test_explicit_is_the_default() -> None:
    """Without a word about ids they come from the producer, and a missing one is named."""
    assert EXPLICIT.strategy == IdStrategy.EXPLICIT
    for batch in (columns([row(0), row(1, message_id=None)]), FactBatch.of_rows([row(0), row(1, message_id=None)])):
        with pytest.raises(InvalidFact, match="takes ids from its producers") as caught:
            seal(batch)
        assert (caught.value.details["row"], caught.value.details["field"]) == (1, "message_id")


def test_labels_of_any_mapping() -> None:
    """Labels are written sorted, whatever order the producer gave them in."""
    batch = seal(FactBatch.from_messages([message(labels={"silo": "A", "priority": "high"})]))
    assert batch.values("labels") == ['{"priority":"high","silo":"A"}']
    assert pa.types.is_string(batch.column("labels").type)
