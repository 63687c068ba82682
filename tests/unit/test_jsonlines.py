"""JSON Lines: facts come in with their literals kept and their line numbers named, and go out the same."""

import base64
import io
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, message, messages

from bsfg.batch import EntryBatch, FactBatch
from bsfg.canonical import MAX_DEPTH
from bsfg.errors import FactTooLarge, InvalidFact
from bsfg.fact import Envelope, Fact, Message
from bsfg.jsonform import entry_to_dict, message_from_json, message_to_dict
from bsfg.model import Limits
from bsfg.node.http import read_facts
from bsfg.sealing import seal

DEFAULTS = {"from_zone": "plant-a", "to_zone": "enterprise", "produced_at_unix_ms": 1_700_000_000_000}


def line(fact: dict[str, Any] | None = None, **envelope: Any) -> bytes:
    """Write a line whose envelope relies on the defaults."""
    body = {"subject": "a:b", "predicate": "was_seen", "object": 1} if fact is None else fact
    return orjson.dumps({"envelope": {"message_id": "m", **envelope}, "fact": body}) + b"\n"


def read(*lines: bytes, **options: Any) -> list[Message]:
    """Read lines into messages."""
    return read_facts(lines, DEFAULTS, **options).to_messages()


def written(batch: FactBatch) -> bytes:
    """Write a line per fact, or per entry."""
    if isinstance(batch, EntryBatch):
        forms = map(entry_to_dict, batch.to_entries())
    else:
        forms = map(message_to_dict, batch.to_messages())
    return b"".join(orjson.dumps(form) + b"\n" for form in forms)


OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(OBJECTS, max_size=5), st.binary(max_size=9), st.booleans())
def test_round_trip(values: list[Any], opaque: bytes, labelled: bool) -> None:
    """Any facts, JSON or opaque, with labels and artifacts or without, come back as they were written."""
    labels = {"silo": "A"} if labelled else {}
    out = [Message(message(n, labels=labels).envelope, Fact.of("a:b", "c", value)) for n, value in enumerate(values)]
    head = message(99, ARTIFACT, object_media_type="application/octet-stream", signature="s").envelope
    out.append(Message(head, Fact("k:s/i", "p", opaque, ARTIFACT)))
    data = written(seal(FactBatch.from_messages(out)))
    assert data.count(b"\n") == len(out)
    assert read_facts(io.BytesIO(data)).to_messages() == out


@pytest.mark.parametrize("literal", ["1.10", "-0", "1e5", "1E+5", "123456789012345678901234567890", "0.1000"])
def test_number_literals_are_kept(literal: str) -> None:
    """A number in an object stays as the producer wrote it, in and out."""
    text = (
        f'{{"fact": {{"subject":"a:b","predicate":"p","object":{{"v": {literal} }}}}, "envelope":{{"message_id":"1"}}}}'
    )
    (got,) = read(text.encode())
    assert got.fact.object == f'{{"v":{literal}}}'.encode()
    assert f'"object":{{"v":{literal}}}'.encode() in written(seal(FactBatch.from_messages([got])))


def test_opaque_objects_are_base64() -> None:
    """An object that is not JSON travels as base64, and only as that."""
    head = {"object_media_type": "image/png"}
    (got,) = read(
        line({"subject": "a:b", "predicate": "p", "object_base64": base64.b64encode(b"\x89\0\xff").decode()}, **head)
    )
    assert got.fact.object == b"\x89\0\xff"
    for name in ("object", "object_json"):
        with pytest.raises(InvalidFact, match="give object_base64"):
            read(line({"subject": "a:b", "predicate": "p", name: "1"}, **head))


def test_the_forms_of_a_json_object() -> None:
    """A JSON object may come as a value, as a text or as base64; each becomes the same canonical bytes."""
    forms: list[dict[str, Any]] = [
        {"object": {"b": 1, "a": 2}},
        {"object_json": ' {"b":1,"a":2}'},
        {"object_base64": base64.b64encode(b'{"b":1, "a":2}').decode()},
    ]
    got = read(*(line({"subject": "a:b", "predicate": "p", **form}) for form in forms))
    assert [each.fact.object for each in got] == [b'{"a":2,"b":1}'] * 3


def test_defaults_fill_what_is_left_out() -> None:
    """Defaults serve absent and null fields; what a line says itself stands."""
    (got,) = read(line(to_zone="idmz", correlation_id=None))
    assert got.envelope == Envelope("plant-a", "idmz", DEFAULTS["produced_at_unix_ms"], "m")  # type: ignore[arg-type]
    with pytest.raises(InvalidFact, match="from_zone: is required"):
        read_facts([line()])


BAD_LINES = [
    (b"{", "message", "not valid JSON"),
    (b"[]", "message", "must be an object"),
    (b"{}", "message", "must be an object"),
    (b'{"fact":1}', "message", "must be an object"),
    (b'{"fact":{},"envelope":1}', "envelope", "must be an object"),
    (b'{"fact":{},"fakt":{}}', "message", "has no field 'fakt'"),
    (b'{"fact":{"subject":"a:b"},"fact":{"subject":"a:b"}}', "message", "appears twice"),
    (line(labels={"a": 1}), "labels", "must be an object of strings"),
    (line(labels="x"), "labels", "must be an object of strings"),
    (line(produced_at_unix_ms=1.5), "produced_at_unix_ms", "must be an integer"),
    (line(produced_at_unix_ms=True), "produced_at_unix_ms", "must be an integer"),
    (line(produced_at_unix_ms=-1), "produced_at_unix_ms", "1970"),
    (line(message_id=7), "message_id", "must be a string"),
    (line(message_id=""), "message_id", "must be 1 to 256 bytes"),
    (line(colour="red"), "envelope", "has no field 'colour'"),
    (line({"subject": "a:b", "predicate": "p"}), "object", "is required"),
    (line({"predicate": "p", "object": 1}), "subject", "is required"),
    (line({"subject": 1, "predicate": "p", "object": 1}), "subject", "must be a string"),
    (line({"subject": "no colon", "predicate": "p", "object": 1}), "subject", "kind:id"),
    (line({"subject": "a:b\u0000", "predicate": "p", "object": 1}), "subject", "kind:id"),
    (line({"subject": "a:b", "predicate": "Bad", "object": 1}), "predicate", "lower_snake_case"),
    (line({"subject": "a:b", "predicate": "p", "object": 1, "object_json": "1"}), "object", "give one of"),
    (line({"subject": "a:b", "predicate": "p", "object_json": '{"a":1,"a":2}'}), "object", "appears twice"),
    (line({"subject": "a:b", "predicate": "p", "object_base64": "%%%"}), "object_base64", "not valid base64"),
    (line({"subject": "a:b", "predicate": "p", "object_base64": "ew=="}), "object", "not valid JSON"),
    (line({"subject": "a:b", "predicate": "p", "object": 1, "extra": 1}), "fact", "has no field 'extra'"),
    (line({"subject": "a:b", "predicate": "p", "object": 1, "artifact": 1}), "artifact", "must be an object"),
    (line({"subject": "a:b", "predicate": "p", "object": 1, "artifact": {"x": 1}}), "artifact", "has no field"),
    (line({"subject": "a:b", "predicate": "p", "object": 1, "artifact": {"key": "k"}}), "artifact", "lacks digest"),
    (line({"subject": "a:b", "predicate": "p", "object": 1, "artifact": {}}), "artifact", "lacks digest"),
    (b'{"envelope":{"message_id":"\xff"},"fact":{}}', "message", "not valid JSON"),
    (line({"subject": "a:b", "predicate": "p", "object_json": "[" * 500 + "]" * 500}), "object", "nested"),
    (b'{"fact":{"subject":"a:b","predicate":"p","object":' + b"[" * 200 + b"]" * 200 + b"}}", "object", "nested"),
    (b'{"fact":{"subject":"a:b","predicate":"p","object":' + b"[" * 900 + b"]" * 900 + b"}}", "message", "nested"),
    (
        b'{"fact":{"subject":"a:b","predicate":"p","object": ' + b"[" * 900 + b"]" * 900 + b"}}",
        "message",
        "recursion|nested",
    ),
    (b'{"fact":{"subject":"a:b","predicate":"p","object":' + b"[" * 9000 + b"]" * 9000 + b"}}", "message", "depth"),
    (b'{"fact":{"subject":"a:b","predicate":"p","object": NaN}}', "message", "not valid JSON"),
    (b'{"fact":{"subject":"a:b","predicate":"p","object": 1e999}}', "message", "infinity"),
]


@pytest.mark.parametrize(("bad", "name", "says"), BAD_LINES)
def test_errors_name_line_field_and_rule(bad: bytes, name: str, says: str) -> None:
    """The first bad line is named by its number, its field and the rule."""
    with pytest.raises(InvalidFact, match=says) as caught:
        read(line(), b"\n", line(message_id="2"), bad, b"{")
    assert (caught.value.details["line"], caught.value.details["field"]) == (4, name)
    assert str(caught.value).startswith(f"line 4, {name}: ")


def test_a_deep_object_within_the_limit_is_read() -> None:
    """An object nested to the limit is read from either form of line."""
    for space in ("", " "):
        deep = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
        (got,) = read(f'{{"fact":{{"subject":"a:b","predicate":"p","object":{space}{deep}}}}}'.encode())
        assert got.fact.object == deep.encode()


def test_files_of_other_systems_are_read() -> None:
    """Windows line ends, a byte order mark, blank lines and a last line without an end are no obstacle."""
    data = b"\xef\xbb\xbf" + line(message_id="1").rstrip() + b"\r\n\r\n  \n" + line(message_id="2").rstrip()
    assert read_facts(io.BytesIO(data), DEFAULTS).values("message_id") == ["1", "2"]
    assert len(read_facts(io.BytesIO(b""))) == 0


def test_an_object_over_the_limit_is_named() -> None:
    """An object one byte over the limit is too large, with its line."""
    fact = {"subject": "a:b", "predicate": "p", "object": "x" * 99}
    with pytest.raises(FactTooLarge) as caught:
        read(line(), line(fact), limits=Limits(max_object_bytes=100))
    assert (caught.value.details["line"], caught.value.details["field"]) == (2, "object")
    assert len(read(line(fact), limits=Limits(max_object_bytes=101))) == 1


def test_an_export_of_entries_can_be_read_in_again() -> None:
    """Entries are written with offset, time and digest, and read again as the facts they were."""
    facts = seal(FactBatch.from_messages(messages(3)))
    entries = EntryBatch.of(facts.record_batch, np.arange(5, 8), 1_000)
    first = orjson.loads(written(entries).splitlines()[0])
    assert (first["offset"], first["appended_at_unix_ms"]) == (5, 1_000)
    assert first["digest"] == "sha256:" + facts.digests()[0].hex()
    assert read_facts(io.BytesIO(written(entries))).to_messages() == messages(3)


def test_the_dictionary_form_leaves_absent_fields_out() -> None:
    """Absent fields do not appear in the JSON form; an artifact appears as an object."""
    plain = message_to_dict(message())
    assert set(plain["envelope"]) == {"message_id", "from_zone", "to_zone", "produced_at_unix_ms", "object_media_type"}
    assert set(plain["fact"]) == {"subject", "predicate", "object"}
    rich = orjson.dumps(message_to_dict(message(artifact=ARTIFACT)))
    assert message_from_json(rich).fact.artifact == ARTIFACT
