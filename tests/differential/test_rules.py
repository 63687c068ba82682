"""Looking at whole columns, or at each value once, judges facts as the judge does row by row.

A case is a batch of up to 150 facts, so that a long run judges more than a million of them.
"""

from random import Random
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.differential import campaign, drawing
from tests.unit.samples import columns, row

from bsfg.batch import FactBatch
from bsfg.columns import AT, FACT_FIELDS, FACT_SCHEMA
from bsfg.digest import KeyHash
from bsfg.errors import FactTooLarge, InvalidFact
from bsfg.model import LATEST_UNIX_MS, TEXT_RULES, Limits
from bsfg.rows import Row, is_plain, record_batch_of
from bsfg.rules import check, judge
from bsfg.sealing import bodies, digest_mismatches

LIMITS = Limits(max_object_bytes=50, max_labels=3, max_label_value_bytes=10)
HEX = "0123456789abcdef" * 4
DIGESTS = [f"sha256:{HEX}", f"sha999:{HEX}", f"sha256:{HEX[:-1]}", f"sha256:{HEX.upper()}", f"sha256:{HEX[1:]}0"]

GOOD = [row(number) for number in range(150)]


def reference(digest: str, **fields: Any) -> str:
    """Write an artifact reference as the column holds it."""
    whole = {"bucket": "b", "key": "k", "digest": digest, "size_bytes": 1, "media_type": "a/b", **fields}
    return orjson.dumps(whole, option=orjson.OPT_SORT_KEYS).decode()


ODD: dict[str, list[Any]] = {
    "subject": ["a:b", "a:b/c", "a1:7", "A:b", "a:", "a", "a:b/", "a:b/c/d", "1:b", "a:é", "a:b\n", "a:" + "é" * 255],
    "predicate": ["a", "a_1", "a1", "_a", "a_", "a__b", "1a", "é", "a" * 128, "a" * 129, "a\n"],
    "from_zone": ["A", "z-9", "9", "-a", "é", "a" * 64, "a" * 65, "", "a\n", "a b"],
    "object_media_type": ["a/b", "a/b;c=\x80", "a/", "a", "a/b;", "a/b\n", "é/b", "a/" + "b" * 253, "a/" + "b" * 254],
    "produced_at_unix_ms": [0, -1, LATEST_UNIX_MS, LATEST_UNIX_MS + 1, -(1 << 63), (1 << 63) - 1],
    "object": [b"", b"x" * 50, b"x" * 51, b"\x00\xff"],
    "labels": ['{"a":"b"}', '{"b":"","a":"x"}', "{}", "[]", "", '{"a":1}', '{"a":"b","a":"c"}', '{"a":"12345678901"}',
               '{"a":"\\u0000"}', '{"a":"b", "c":"d"}', '{"a":"1","b":"2","c":"3","d":"4"}', '{"é":"x"}', '{"a":"é"}'],
    "artifact_digest": DIGESTS,
    "artifact": [*map(reference, DIGESTS), reference(DIGESTS[0], size_bytes=-1), reference(DIGESTS[0], more=1), "{}",
                 reference(DIGESTS[0], file_name="f"), reference(DIGESTS[0], key=""), "[]", "x" * 4097, "null"],
}  # fmt: skip
ODD["to_zone"] = ODD["from_zone"]
_TEXTS = [
    "",
    "a",
    "é",
    "€" * 85,
    "€" * 86,
    "x" * 256,
    "x" * 257,
    "x" * 512,
    "x" * 513,
    "a\x7fb",
    "a\x80b",
    "\u2028",
    "9",
]


def odd(random: Random, name: str) -> Any:
    """Draw a value of a field that is at the border of its rule, or beyond it."""
    if random.random() < 0.1:
        return None
    return random.choice(ODD.get(name) or (_TEXTS if random.random() < 0.7 else drawing.TEXTS))


def facts(random: Random, count: int) -> list[Row]:
    """Draw facts of which most are good; columns are constant, numbered, repeated or mixed, as machines make them."""
    rows = [list(each) for each in GOOD[:count]]
    for name in random.sample(FACT_FIELDS[:-1], random.choice((0, 1, 1, 2, 4))):
        values = [odd(random, name) for _ in range(random.choice((1, 1, 2, 3, 3)))]
        how = random.choice(("one", "all", "some", "runs"))
        for number, each in enumerate(rows):
            if how == "all" or (how == "some" and random.random() < 0.2) or (how == "runs" and number % 7):
                each[AT[name]] = random.choice(values)
        if how == "one":
            rows[random.randrange(count)][AT[name]] = values[0]
    if random.random() < 0.3:
        digest = random.choice(DIGESTS)
        for each in rows if random.random() < 0.5 else random.sample(rows, 1):
            each[AT["artifact"]], each[AT["artifact_digest"]] = reference(digest), digest
            digest = random.choice((digest, digest, digest.replace("256", str(random.randrange(100, 1000)))))
    return [tuple(each) for each in rows]


Verdict = tuple[str, dict[str, Any]] | None


def by_rows(rows: list[Row]) -> Verdict:
    """Judge rows one by one."""
    try:
        for number, each in enumerate(rows):
            judge(number, each, LIMITS)
    except (InvalidFact, FactTooLarge) as error:
        return error.code, error.details
    return None


def by_batch(batch: FactBatch) -> Verdict:
    """Judge rows as a batch."""
    try:
        check(batch, LIMITS)
    except (InvalidFact, FactTooLarge) as error:
        return error.code, error.details
    return None


def with_rubbish_under_nulls(random: Random, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Give the same rows, laid out with bytes where no values are, and as a slice of more rows."""
    arrays = []
    for array in batch.columns:
        if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
            filler = "rubbish\n" * 70 if pa.types.is_string(array.type) else b"\xff" * 600
            full = array.fill_null(filler)
            valid = np.packbits(array.is_valid().to_numpy(zero_copy_only=False), bitorder="little")
            buffers = [pa.py_buffer(valid.tobytes()), *full.buffers()[1:]]
            array = pa.Array.from_buffers(array.type, len(array), buffers)
        arrays.append(array)
    made = pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
    before = made.slice(0, random.randrange(3))
    return pa.concat_batches([before, made]).slice(before.num_rows)


def judged_alike(random: Random) -> str:
    """Judge facts row by row, as rows and as columns in several layouts."""
    count = random.choice((1, 2, 5, 64, 65, 70, 100, 150))
    rows = facts(random, count)
    expected = by_rows(rows)
    made = record_batch_of(rows)
    batches = [FactBatch(made), FactBatch(with_rubbish_under_nulls(random, made))]
    if all(map(is_plain, rows)) and count <= 64:
        batches.append(FactBatch.of_rows(rows))
    for batch in batches:
        assert by_batch(batch) == expected
    return "fine" if expected is None else "refused"


@pytest.mark.soak
def test_batches_are_judged_as_their_rows_are() -> None:
    """A batch is fine, or refused for the same row, field and rule, as when each row is judged by itself."""
    campaign.run(judged_alike, short=600, long=20_000, must_see=("fine", "refused"))


@pytest.mark.parametrize(("name", "bad"), [("object", b"x" * 51), ("produced_at_unix_ms", -1)])
def test_the_first_of_two_faults_is_named(name: str, bad: object) -> None:
    """A value that is absent further down does not hide one that is wrong."""
    rows = [
        row(number, **({name: bad} if number == 3 else {name: None} if number == 50 else {})) for number in range(70)
    ]
    assert by_batch(columns(rows)) == by_rows(rows)


@given(st.data())
def test_texts_of_any_letters_are_judged_alike(data: st.DataObject) -> None:
    """The expressions of Arrow and of Python mean the same by every rule, for letters of every kind."""
    rule = data.draw(st.sampled_from(TEXT_RULES))
    texts = data.draw(st.lists(st.from_regex(rule.pattern) | st.text(max_size=20), min_size=1, max_size=5))
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    rows = [row(number, **{rule.name: texts[number % len(texts)]}) for number in range(70)]
    assert by_batch(columns(rows)) == by_rows(rows)


def hashed_alike(random: Random) -> str:
    """Hash keys as columns and one by one, and digest bodies likewise."""
    rows = drawing.rows(random, FACT_SCHEMA, random.choice((1, 15, 16, 17, 40)))
    needed = [AT[name] for name in ("message_id", "from_zone", "subject", "predicate", "object")]
    empty = {at: b"" if at == AT["object"] else "" for at in needed}
    rows = [tuple(empty.get(at) if cell is None else cell for at, cell in enumerate(each)) for each in rows]
    by_columns, as_rows = columns(rows), FactBatch.of_rows(rows)
    keys = KeyHash(b"0123456789abcdef")
    assert keys.of_batch(by_columns).tolist() == keys.of_few(as_rows)
    assert bodies(by_columns) == bodies(as_rows)
    assert digest_mismatches(by_columns).tolist() == digest_mismatches(as_rows).tolist()
    return "agreed"


@pytest.mark.soak
def test_keys_and_bodies_of_columns_are_those_of_rows() -> None:
    """The hash of a key and the bytes of a body do not depend on how a batch is held."""
    campaign.run(hashed_alike, short=300, long=20_000)
