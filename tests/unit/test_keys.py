"""Message-id strategies: what makes two appends the same event, for each choice a zone has."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, columns, message, row

from bsfg.artifacts import completed
from bsfg.batch import FactBatch
from bsfg.errors import InvalidArgument, InvalidFact
from bsfg.fact import ArtifactRef, Envelope, Fact, Message
from bsfg.sealing import SEMANTIC_FIELDS, IdStrategy, MessageIds, seal

PAYLOAD = MessageIds(IdStrategy.PAYLOAD)
OBJECT = MessageIds(IdStrategy.OBJECT)
MESSAGE = MessageIds(IdStrategy.MESSAGE)
NO_ID = replace(message().envelope, message_id=None)


def ids(strategy: MessageIds, *changes: dict[str, Any]) -> list[str]:
    """Give the ids of facts that differ from one another only in what is named; rows and columns agree."""
    rows = [row(0, **{"message_id": None, **change}) for change in changes]
    small = seal(FactBatch.of_rows(rows), ids=strategy).values("message_id")
    large = seal(columns(rows * 40), ids=strategy).values("message_id")
    assert large == small * 40
    return small


def test_payload_is_the_hash_of_the_body() -> None:
    """The same body is the same event, whatever the envelope; another subject, predicate or object is another."""
    same = ids(PAYLOAD, {}, {"produced_at_unix_ms": 5}, {"labels": '{"a":"b"}'}, {"to_zone": "idmz"})
    assert len(set(same)) == 1
    other = ids(PAYLOAD, {}, {"subject": "a:b"}, {"predicate": "p"}, {"object": b"1"})
    assert len(set(other)) == 4
    (batch,) = [seal(FactBatch.of_rows([row(message_id=None)]), ids=PAYLOAD)]
    assert batch.values("message_id") == [batch.digests()[0].hex()]


def test_payload_sees_the_artifact() -> None:
    """The same object with another artifact is another event."""
    with_artifact = FactBatch.from_messages([message(artifact=ARTIFACT)]).rows()[0]
    plain = FactBatch.from_messages([message()]).rows()[0]
    batch = FactBatch.of_rows([(None, *with_artifact[1:]), (None, *plain[1:])])
    assert len(set(seal(batch, ids=PAYLOAD).values("message_id"))) == 2


def test_payload_does_not_depend_on_how_json_is_written() -> None:
    """Spaces and the order of keys make no new event, because the canonical form is hashed."""
    assert len(set(ids(PAYLOAD, {"object": b'{"a":1,"b":2}'}, {"object": b' { "b" : 2, "a" : 1 } '}))) == 1
    assert len(set(ids(PAYLOAD, {"object": b'{"a":1.1}'}, {"object": b'{"a":1.10}'}))) == 2


def test_object_is_the_hash_of_the_canonical_object() -> None:
    """The literal reading of the specification: equal payloads are one event even of different subjects."""
    (first, second) = ids(
        OBJECT, {"object": b'{ "a": 1 }'}, {"object": b'{"a":1}', "subject": "other:1", "predicate": "p"}
    )
    assert first == second == hashlib.sha256(b'{"a":1}').hexdigest()


@pytest.mark.parametrize("strategy", [IdStrategy.SEMANTIC, IdStrategy.SEMANTIC_V1])
@pytest.mark.parametrize("name", SEMANTIC_FIELDS)
def test_semantic_adds_the_chosen_fields(name: str, strategy: IdStrategy) -> None:
    """A chosen field makes another event when it differs; a field that was not chosen does not."""
    other = {"produced_at_unix_ms": 7, "labels": '{"a":"b"}', "object_media_type": "application/vnd.a+json"}.get(
        name, "other"
    )
    chosen = MessageIds(strategy, (name,))
    assert len(set(ids(chosen, {}, {name: other}))) == 2
    rest = MessageIds(strategy, tuple(each for each in SEMANTIC_FIELDS if each != name))
    assert len(set(ids(rest, {}, {name: other}))) == 1


def test_semantic_sees_the_body() -> None:
    """Another body is another event even when all chosen fields agree."""
    strategy = MessageIds(IdStrategy.SEMANTIC, ("produced_at_unix_ms",))
    assert len(set(ids(strategy, {}, {"object": b"1"}))) == 2


def test_semantic_does_not_depend_on_the_order_of_its_fields() -> None:
    """The configuration may name the fields in any order."""
    one, two = (MessageIds(IdStrategy.SEMANTIC, names) for names in (("to_zone", "labels"), ("labels", "to_zone")))
    assert ids(one, {}, {"labels": '{"a":"b"}'}) == ids(two, {}, {"labels": '{"a":"b"}'})


def plain_id(envelope: dict[str, Any], fact: dict[str, Any]) -> str:
    """Compute an id as the page tells anybody to, with nothing of ours."""
    message = {"envelope": envelope, "fact": fact}
    text = json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=12)
OPTIONAL = st.fixed_dictionaries({}, optional=dict.fromkeys(("correlation_id", "causation_id", "object_schema"), TEXT))
LABELS = st.dictionaries(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,5}", fullmatch=True), TEXT, max_size=3)


@given(head=OPTIONAL, labels=LABELS, body=TEXT, of=st.sampled_from([None, "application/pdf", "opaque", "bare"]))
def test_message_ids_can_be_computed_by_anybody(
    head: dict[str, str], labels: dict[str, str], body: str, of: str | None
) -> None:
    """The id of the full message is the SHA-256 of its canonical JSON, with plain json and hashlib, for any message."""
    object_json = json.dumps({"b": body, "a": 1}, separators=(",", ":"), ensure_ascii=False, sort_keys=True)
    media_type, data = ("application/x-thing", b"\x00\xff") if of == "opaque" else ("application/json", object_json)
    artifact = None
    if of == "bare":
        artifact = ArtifactRef(digest=ARTIFACT.digest)
    elif of == "application/pdf":
        artifact = ARTIFACT
    raw = data if isinstance(data, bytes) else data.encode()
    envelope = Envelope("plant-a", "enterprise", 7, labels=labels, object_media_type=media_type, **head)
    given_batch = FactBatch.from_messages([Message(envelope, Fact("a:b", "p", raw, artifact))])
    expected: dict[str, Any] = {"from_zone": "plant-a", "to_zone": "enterprise", "produced_at_unix_ms": 7, **head}
    if labels:
        expected["labels"] = labels
    if of in ("opaque", "application/pdf"):
        expected["object_media_type"] = media_type if of == "opaque" else "application/pdf"
    fact: dict[str, Any] = {"subject": "a:b", "predicate": "p"}
    fact |= {"object_base64": "AP8="} if of == "opaque" else {"object_json": object_json}
    if artifact is not None:
        fact["artifact_digest"] = artifact.digest
    assert seal(given_batch, ids=MESSAGE).values("message_id") == [plain_id(expected, fact)]
    chosen = MessageIds(IdStrategy.SEMANTIC, ("to_zone", "labels.a", "correlation_id"))
    subset: dict[str, Any] = {name: expected[name] for name in ("to_zone", "correlation_id") if name in expected}
    if "a" in labels:
        subset["labels"] = {"a": labels["a"]}
    assert seal(given_batch, ids=chosen).values("message_id") == [plain_id(subset, fact)]


def test_a_fact_that_was_stored_keeps_its_id() -> None:
    """What a node fills into a reference changes no id, so that a fact which was read can be sent again."""
    bare = ArtifactRef(digest=ARTIFACT.digest)
    whole = completed(bare, 1234)
    for strategy in (MESSAGE, PAYLOAD, MessageIds(IdStrategy.SEMANTIC, ("object_media_type",))):
        batches = [FactBatch.from_messages([replace(message(artifact=each), envelope=NO_ID)]) for each in (bare, whole)]
        assert len({seal(batch, ids=strategy).values("message_id")[0] for batch in batches}) == 1


def test_semantic_by_single_labels() -> None:
    """A label that was chosen makes another event; one that was not does not; a label that is absent is no label."""
    chosen = MessageIds(IdStrategy.SEMANTIC, ("labels.silo",))
    same = ids(chosen, {"labels": '{"silo":"A"}'}, {"labels": '{"priority":"high","silo":"A"}'})
    assert len(set(same)) == 1
    other = ids(chosen, {"labels": '{"silo":"A"}'}, {"labels": '{"silo":"B"}'}, {"labels": '{"x":"A"}'}, {})
    assert len(set(other)) == 3


def test_explicit_keeps_two_equal_readings_apart() -> None:
    """Two equal readings with ids of their own are two facts."""
    batch = seal(FactBatch.of_rows([row(0, message_id="a"), row(0, message_id="b")]))
    assert batch.values("message_id") == ["a", "b"]
    assert len(set(batch.digests())) == 1


@pytest.mark.parametrize("strategy", [PAYLOAD, OBJECT, MESSAGE, MessageIds(IdStrategy.SEMANTIC, ("to_zone",))])
def test_a_derived_id_may_be_sent_along_but_not_another(strategy: MessageIds) -> None:
    """An id that agrees is accepted, so that a retry may repeat it; one that differs is refused by row."""
    (id,) = ids(strategy, {})
    assert ids(strategy, {"message_id": id}) == [id]
    for batch in (
        FactBatch.of_rows([row(message_id=id), row(message_id="mine")]),
        columns([row(message_id=id), row(message_id="mine")]),
    ):
        with pytest.raises(InvalidFact, match="differs from the id that this zone derives") as caught:
            seal(batch, ids=strategy)
        assert (caught.value.details["row"], caught.value.details["field"]) == (1, "message_id")


def test_wrong_settings_are_refused() -> None:
    """Fields that cannot be part of an id, and fields for a strategy that takes none, are refused."""
    with pytest.raises(InvalidArgument, match="'colour' cannot be part of an id"):
        MessageIds(IdStrategy.SEMANTIC, ("colour",))
    with pytest.raises(InvalidArgument, match="'message_id' cannot be part of an id"):
        MessageIds(IdStrategy.SEMANTIC, ("message_id",))
    with pytest.raises(InvalidArgument, match="takes no fields"):
        MessageIds(IdStrategy.PAYLOAD, ("to_zone",))
    with pytest.raises(InvalidArgument, match=r"'labels\.no name' cannot be part of an id"):
        MessageIds(IdStrategy.SEMANTIC, ("labels.no name",))
    with pytest.raises(InvalidArgument, match=r"'labels\.a' cannot be part of an id"):
        MessageIds(IdStrategy.SEMANTIC_V1, ("labels.a",))
    with pytest.raises(InvalidArgument, match=r"'labels\.a' is part of 'labels'"):
        MessageIds(IdStrategy.SEMANTIC, ("labels", "labels.a"))


def test_ids_are_fixed_for_good() -> None:
    """The derived ids of a known fact never change, because producers' retries depend on them."""
    known = {"subject": "work_order:12345", "predicate": "was_created", "object": b'{"a":1}', "produced_at_unix_ms": 1}
    older = MessageIds(IdStrategy.SEMANTIC_V1, ("produced_at_unix_ms", "correlation_id"))
    semantic = MessageIds(IdStrategy.SEMANTIC, ("produced_at_unix_ms", "correlation_id"))
    assert [ids(strategy, known)[0] for strategy in (PAYLOAD, older, OBJECT, semantic, MESSAGE)] == [
        "197b2adea829f15c360342617609cbea3a05c209a7dd67a351d72f03e649f76a",
        "b7016a59eaab82c411ec943c625b40e3c643050b9220c87f74462e92fe5904a8",
        "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862",
        "dd4e16f92794a098a214c8983105cb8fc30b287e085e8bfb79413740fa831f52",
        "527dc820ab8a17ace75b8572219f5bc59f6ed91ea1ed7ebaadac35fbeddde142",
    ]
