"""The rules of the message model: each with good and bad examples, judged alike one by one and by the column."""

import re
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, columns, message, row

from bsfg.batch import SMALL_BATCH_FACTS, FactBatch
from bsfg.errors import BsfgError, FactTooLarge, InvalidArgument, InvalidFact
from bsfg.model import LATEST_UNIX_MS, STREAM, TEXT_RULES, ZONE, Limits, check_name
from bsfg.rows import Row
from bsfg.rules import check, judge, suspects

LARGE = SMALL_BATCH_FACTS * 2
SMALL_LIMITS = Limits(max_object_bytes=100, max_labels=3, max_label_value_bytes=10)
REFERENCE = orjson.dumps(
    {
        "bucket": "docs",
        "digest": ARTIFACT.digest,
        "key": "k",
        "media_type": "application/pdf",
        "size_bytes": 1,
    }
).decode()

GOOD: dict[str, list[Any]] = {
    "message_id": [None, "e", "x" * 256, "é" * 128, "evt 1", "\u00a0", "日本"],
    "from_zone": ["a", "Plant-A.1_x", "0", "z" * 64],
    "to_zone": ["enterprise", "Z"],
    "correlation_id": [None, "batch 7", "~"],
    "causation_id": [None, "evt-1"],
    "object_media_type": ["application/json", "text/plain;charset=utf-8", "application/vnd.a+json", "a/b;"],
    "object_schema": [None, "urn:schema:1", "s" * 512],
    "signature": [None, "ed25519:abc"],
    "subject": ["work_order:12345", "assembly:lineA/step42", "a:b/c/d", "a-b_9:ü ö", "a::", "k:" + "x" * 510],
    "predicate": ["was_created", "transitioned_to", "has_defect", "was_completed_by", "a", "a1_2b", "p" * 128],
    "produced_at_unix_ms": [0, 1, LATEST_UNIX_MS],
    "object": [b"{}", b"", b"\xff\x00", b"x" * 100],
    "labels": [None, '{"priority":"high","silo":"A"}', '{"a":""}', '{"a/b.c-d":"0123456789"}'],
    "digest": [None, b"d" * 32],
}
BAD: dict[str, list[Any]] = {
    "message_id": ["", "x" * 257, "é" * 129, "a\n", "\n", "a\x00", "\x7f", "\x9f", "a\tb"],
    "from_zone": [None, "", "-a", "a b", "a\n", "z" * 65, "é", "a\x00", "a/b"],
    "to_zone": [None, "", ".a", "a\n"],
    "correlation_id": ["", "x" * 257, "a\r"],
    "causation_id": ["", "\x1f"],
    "object_media_type": [None, "", "json", "a/", "/b", "a/b c", "a/b\n", "a/" + "b" * 254, "a/b;\n"],
    "object_schema": ["", "s" * 513, "a\n"],
    "signature": ["", "s" * 513],
    "subject": [
        *(None, "", "order", ":1", "Order:1", "a:", "a:/b", "a:b/", "a:b\n", "a:\x00", "a:b/\x1f", "é:1", "1:a"),
        *("k:" + "x" * 511, "k:" + "é" * 256, "a :b", "a:b/c\x85"),
    ],
    "predicate": [None, "", "WasCreated", "was-created", "_a", "a_", "a__b", "1a", "a\n", "p" * 129, "é"],
    "produced_at_unix_ms": [None, -1, LATEST_UNIX_MS + 1, -(1 << 63), (1 << 63) - 1],
    "object": [None, b"x" * 101],
    "labels": [
        *("", "{}", "[]", "null", '"a"', "{", '{"b":"1","a":"2"}', '{"a":"1","a":"1"}', '{"a": "1"}', '{"a":1}'),
        *('{"":"x"}', '{"a b":"x"}', '{"a":"x\\n"}', '{"a":"01234567890"}', '{"a":"1","b":"2","c":"3","d":"4"}'),
        *('{"a":"\\ud800"}', '{"a\\n":"x"}', '{"' + "n" * 65 + '":"x"}', '{"a":"ééééééé"}'),
    ],
}


def broken(batch: FactBatch, limits: Limits = SMALL_LIMITS) -> dict[str, Any] | None:
    """Give code and details of the error that a batch meets, or None."""
    try:
        check(batch, limits)
    except (InvalidFact, FactTooLarge) as error:
        return {"code": error.code, "message": str(error), **error.details}
    return None


def first_broken(rows: list[Row]) -> dict[str, Any] | None:
    """Judge rows one after the other: the plain meaning of `check`."""
    for number, each in enumerate(rows):
        try:
            judge(number, each, SMALL_LIMITS)
        except BsfgError as error:
            return {"code": error.code, "message": str(error), **error.details}
    return None


def pairs(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_values_pass(name: str, value: Any) -> None:
    """Every good example of every rule passes alone, and among others in columns."""
    assert broken(FactBatch.of_rows([row(**{name: value})])) is None
    rows = [row(number) for number in range(LARGE)]
    rows[70] = row(70, **{name: value})
    assert broken(columns(rows)) is None
    assert broken(columns([row(number, **{name: value}) for number in range(LARGE)])) is None


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_bad_values_are_named(name: str, value: Any) -> None:
    """Every bad example is refused with its row, field and rule: alone, among others, and throughout a column."""
    rows = [row(number) for number in range(LARGE)]
    rows[70] = row(70, **{name: value})
    rows[90] = row(90, **{name: value})
    found = broken(columns(rows))
    assert found is not None
    assert (found["row"], found["field"]) == (70, name)
    assert found["rule"]
    assert found["message"].startswith(f"row 70, {name}: ")
    assert found == first_broken(rows)
    throughout = [row(number, **{name: value}) for number in range(LARGE)]
    assert broken(columns(throughout)) == first_broken(throughout)
    alone = broken(FactBatch.of_rows(rows[70:71]))
    assert alone is not None
    assert (alone["row"], alone["rule"]) == (0, found["rule"])
    # A few are looked at in a way of their own.
    assert broken(FactBatch.of_rows(rows[69:72])) == first_broken(rows[69:72])


def test_every_field_has_examples() -> None:
    """No text rule is without a good and a bad example here."""
    tested_below = {"artifact", "artifact_digest"}
    names = {rule.name for rule in TEXT_RULES}
    assert names - tested_below <= GOOD.keys()
    assert names - tested_below <= BAD.keys()


FIELDS = st.one_of([st.tuples(st.just(n), st.sampled_from(GOOD[n] + BAD.get(n, []))) for n in GOOD])
FREE_TEXT = st.tuples(
    st.sampled_from([rule.name for rule in TEXT_RULES]),
    st.text(max_size=6) | st.text(alphabet="ab:/_-.;\n\x00\x7f\x80é", max_size=6),
)
CHANGES = st.lists(st.tuples(st.integers(0, 99), FIELDS | FREE_TEXT), max_size=4)


@given(CHANGES, st.integers(0, 30))
def test_columns_and_rows_give_the_same_verdict(changes: list[tuple[int, tuple[str, Any]]], start: int) -> None:
    """A batch of random good and bad rows meets the same error by the column, sliced or not, as one by one."""
    rows = [row(number) for number in range(100)]
    for number, (name, value) in changes:
        rows[number] = row(number, **{name: value})
    whole = columns(rows)
    assert broken(whole) == first_broken(rows)
    assert broken(whole.slice(start)) == first_broken(rows[start:])
    assert broken(FactBatch.of_rows(rows[start : start + 10])) == first_broken(rows[start : start + 10])
    assert broken(whole.slice(start, 10)) == first_broken(rows[start : start + 10])


@given(
    st.sampled_from(TEXT_RULES),
    st.text(max_size=8) | st.text(alphabet="az09AZ:/_-.;+sha256\n\r\x00\x7f\x85\u2028é", max_size=8),
)
def test_both_engines_read_the_patterns_alike(rule: Any, text: str) -> None:
    """Arrow's expressions and Python's agree about every pattern, a newline at the end included."""
    if len(text.encode()) <= rule.max_bytes:
        by_column = pc.match_substring_regex(pa.array([text]), rule.pattern)[0].as_py()
        assert by_column == (not rule.breaks(text))
        assert by_column == (re.fullmatch(rule.pattern, text) is not None)


def test_clean_batches_have_no_suspects() -> None:
    """Nothing of a clean batch goes before the judge, labels and artifacts included."""
    labelled = {"labels": '{"silo":"A"}', "artifact": REFERENCE, "artifact_digest": ARTIFACT.digest}
    rows = [row(number, **(labelled if number % 2 else {})) for number in range(LARGE)]
    assert len(suspects(columns(rows), SMALL_LIMITS)) == 0


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("over", "fails"), [(0, False), (1, True)])
def test_an_object_one_byte_over_the_limit(over: int, fails: bool, large: bool) -> None:
    """An object of exactly the limit passes; one byte more is too large, and the hint names the way out."""
    limits = Limits()
    big = row(object=b'"' + b"x" * (limits.max_object_bytes - 2 + over) + b'"')
    batch = columns([row(number) for number in range(LARGE)] + [big]) if large else FactBatch.of_rows([big])
    if not fails:
        check(batch)
        return
    with pytest.raises(FactTooLarge) as caught:
        check(batch)
    assert caught.value.details["field"] == "object"
    assert caught.value.details["row"] == len(batch) - 1
    assert "artifact" in caught.value.hint


def test_ten_thousand_labels() -> None:
    """Ten thousand labels are refused with their number and the limit."""
    labels = {f"n{number:05d}": "x" for number in range(10_000)}
    with pytest.raises(InvalidFact, match="has 10000 labels, the limit is 64") as caught:
        check(FactBatch.from_messages([message(labels=labels)]))
    assert caught.value.details["field"] == "labels"


def test_ten_thousand_sets_of_labels() -> None:
    """Every row may have labels of its own, and the one bad set among them is found."""
    rows = [row(number, labels=f'{{"n":"{number}"}}') for number in range(10_000)]
    check(columns(rows))
    rows[9_000] = row(9_000, labels='{"n":9}')
    assert broken(columns(rows)) == first_broken(rows)


ARTIFACTS: list[tuple[str | None, str | None, str | None]] = [
    (REFERENCE, ARTIFACT.digest, None),
    (None, ARTIFACT.digest, "artifact"),
    (REFERENCE, None, "artifact"),
    ("", ARTIFACT.digest, "artifact"),
    ("{", ARTIFACT.digest, "artifact"),
    ("[]", ARTIFACT.digest, "artifact"),
    (REFERENCE.replace('"docs"', '""'), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace('"docs"', "1"), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace('"size_bytes":1', '"size_bytes":-1'), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace('"size_bytes":1', '"size_bytes":true'), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace('"size_bytes":1', '"size_bytes":1.0'), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace('"key"', '"file_name":1,"key"'), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace("}", ',"x":1}'), ARTIFACT.digest, "artifact"),
    (REFERENCE.replace(":", ": "), ARTIFACT.digest, "artifact"),
    (REFERENCE, "sha256:" + "cd" * 32, "artifact_digest"),
    (REFERENCE, "sha256:" + "AB" * 32, "artifact_digest"),
    (REFERENCE, "md5:abc", "artifact_digest"),
    (REFERENCE, ARTIFACT.digest + "\n", "artifact_digest"),
    ("x" * 4097, ARTIFACT.digest, "artifact"),
]


@pytest.mark.parametrize(("reference", "digest", "blamed"), ARTIFACTS)
def test_artifact_references(reference: str | None, digest: str | None, blamed: str | None) -> None:
    """A reference needs its digest, the known fields and canonical form; the verdict is the same by the column."""
    rows = [row(number) for number in range(LARGE)]
    rows[5] = row(5, artifact=reference, artifact_digest=digest)
    found = broken(columns(rows))
    assert (found and found["field"]) == blamed
    assert found == first_broken(rows)


def test_batch_limits_hold_alike_for_rows_and_columns() -> None:
    """A batch at its limit of bytes or facts passes and one beyond fails, rows and columns alike."""
    rows = [row(number, object=b"x" * 10_000) for number in range(10)]
    size = columns(rows).nbytes
    for batch in (columns(rows), FactBatch.of_rows(rows)):
        check(batch, Limits(max_batch_bytes=size, max_batch_facts=10))
        for limits in (Limits(max_batch_bytes=size - 1), Limits(max_batch_facts=9)):
            with pytest.raises(FactTooLarge, match="the batch has 10 facts") as caught:
                check(batch, limits)
            assert caught.value.hint == "Split the batch."


def with_raw(name: str, array: pa.Array, count: int) -> FactBatch:
    good = columns([row(number) for number in range(count)])
    return good.with_columns(**{name: array})


@pytest.mark.parametrize("count", [5, LARGE])
@pytest.mark.parametrize("name", ["message_id", "subject", "predicate", "labels", "from_zone", "signature"])
def test_invalid_utf8_is_named(name: str, count: int) -> None:
    """Bytes in a text column that are not UTF-8 are refused with row and field, in small and large batches."""
    raw = pa.array([b"a:b"] * 3 + [b"a:\xff"] + [b"a:b"] * (count - 4), pa.binary())
    lying = pa.StringArray.from_buffers(count, raw.buffers()[1], raw.buffers()[2])
    with pytest.raises(InvalidFact, match="UTF-8") as caught:
        check(with_raw(name, lying, count))
    assert (caught.value.details["row"], caught.value.details["field"]) == (3, name)


@pytest.mark.parametrize("count", [5, LARGE])
def test_lying_offsets_are_refused(count: int) -> None:
    """Offsets that run backwards or beyond their data are refused before anybody follows them."""
    data = pa.py_buffer(b"x" * count)
    for offsets in ([0, 1 << 30], [0, 4, 2], [0, -5]):
        buffer = pa.array(offsets + [5] * (count + 1 - len(offsets)), pa.int32()).buffers()[1]
        lying = pa.Array.from_buffers(pa.binary(), count, [None, buffer, data])
        with pytest.raises(InvalidFact, match="malformed") as caught:
            check(with_raw("object", lying, count))
        assert caught.value.details["field"] == "object"


def test_an_empty_batch_is_fine() -> None:
    """A batch without rows breaks no rule."""
    check(FactBatch(FactBatch.empty().record_batch))
    check(FactBatch.from_messages([]))


@pytest.mark.parametrize("good", ["operational", "audit-2", "a.b_c", "0", "x" * 64])
def test_stream_names(good: str) -> None:
    """Stream names are short, lower case and safe as folder names."""
    assert check_name("stream", good) == good


@pytest.mark.parametrize("bad", ["", "Audit", "a b", "../x", ".a", "a/b", "a\n", "x" * 65, "é"])
def test_bad_names_are_refused(bad: str) -> None:
    """Anything else is refused, naming the kind and the pattern."""
    with pytest.raises(InvalidArgument, match="is not a name") as caught:
        check_name("stream", bad)
    assert caught.value.details == {"stream": bad}
    assert STREAM in str(caught.value)


def test_zone_names_may_have_capitals() -> None:
    """Zones keep the spelling of their certificates."""
    assert check_name("zone", "Plant-A", ZONE) == "Plant-A"
