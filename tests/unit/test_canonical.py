"""Canonical JSON, held against a naive model made of Python's own parser."""

import dataclasses
import datetime
import enum
import json
import math
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.differential.jsonmodel import model

from bsfg.canonical import (
    MAX_DEPTH,
    NotJson,
    canonicalize,
    canonicalize_all,
    canonicalize_value,
)
from bsfg.layouts import MIN_ROWS, laid_out_like, unproven


def outcome(data: bytes) -> bytes | None:
    try:
        return canonicalize(data)
    except NotJson as problem:
        assert str(problem)
        return None


NUMBERS = st.one_of(
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)
SPACES = st.sampled_from(["", "", "", " ", "\n", "\t ", "\r\n"])
STRINGS = st.text(max_size=8).flatmap(
    lambda text: st.sampled_from([json.dumps(text), json.dumps(text, ensure_ascii=False), orjson.dumps(text).decode()])
)


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(SPACES, STRINGS, SPACES, SPACES, inner, SPACES).map(
        lambda p: f"{p[0]}{p[1]}{p[2]}:{p[3]}{p[4]}{p[5]}"
    )
    return st.one_of(
        st.lists(pair, max_size=4).map(lambda items: "{" + ",".join(items) + "}"),
        st.lists(st.tuples(SPACES, inner, SPACES).map("".join), max_size=4).map(lambda items: f"[{','.join(items)}]"),
    )


TEXTS = st.recursive(
    st.one_of(NUMBERS, STRINGS, st.sampled_from(["true", "false", "null"])), containers, max_leaves=12
).map(lambda text: text.encode("utf-8", "surrogatepass"))


@given(TEXTS)
def test_agrees_with_the_model_on_json(data: bytes) -> None:
    """Any JSON text, however it is spaced, escaped and ordered, gives what the naive model gives."""
    assert outcome(data) == model(data)


@given(
    st.binary(max_size=30) | st.text(alphabet='[]{}",:\\u0018d8-+.eEnultrfas \x00\ufeff', max_size=30).map(str.encode)
)
def test_agrees_with_the_model_on_noise(data: bytes) -> None:
    """Bytes that are mostly not JSON are accepted or refused as the naive model does."""
    assert outcome(data) == model(data)


@given(TEXTS)
def test_is_idempotent(data: bytes) -> None:
    """The canonical form of a canonical text is that very text."""
    first = outcome(data)
    if first is not None:
        assert canonicalize(first) is first


@pytest.mark.parametrize(
    ("data", "canonical"),
    [
        (b' { "b" : 1 , "a" : [ 1 , 2 ] } ', b'{"a":[1,2],"b":1}'),
        (b"-0", b"-0"),
        (b"-0.0", b"-0.0"),
        (b"1e5", b"1e5"),
        (b"1E+5", b"1E+5"),
        (b"1.10", b"1.10"),
        (b"1e-400", b"1e-400"),
        (b"18446744073709551616", b"18446744073709551616"),
        (b"1" * 300, b"1" * 300),
        (b'"\\u00e9"', '"é"'.encode()),
        (b'"\\ud83d\\ude00"', '"😀"'.encode()),
        (b'"\\/"', b'"/"'),
        (b'"\\u0008\\u000a\\u001f\\u007f"', b'"\\b\\n\\u001f\x7f"'),
        (b'{"\\u0062":1,"a":2}', b'{"a":2,"b":1}'),
        ('{"é":1,"z":2,"😀":3,"\uffff":4}'.encode(), '{"z":2,"é":1,"\uffff":4,"😀":3}'.encode()),
        (b'{"":0}', b'{"":0}'),
        (b'{"t":"a \\" : { b","k":[ 1 , "\\\\" ] }', b'{"k":[1,"\\\\"],"t":"a \\" : { b"}'),
        (b'{"t": "a , b", "k": 1}', b'{"k":1,"t":"a , b"}'),
        (b"null", b"null"),
    ],
)
def test_keeps_literals_and_orders_keys(data: bytes, canonical: bytes) -> None:
    """Numbers stay as written, keys are sorted by code point, strings take their shortest escape."""
    assert canonicalize(data) == canonical == model(data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a":1,"a":2}', "the key 'a' appears twice"),
        (b'{"a":1,"\\u0061":2}', "the key 'a' appears twice"),
        (b'[{"x":{"k":1,"k":1}}]', "the key 'k' appears twice"),
        (b"NaN", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"1e400", "too large"),
        (b"-" + b"9" * 400, "too large"),
        (b'{"b":1e400,"a":1}', "too large"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udc00":1}', "surrogate"),
        (b'"\xed\xa0\x80"', "not valid UTF-8 at byte 1"),
        (b'"\xff"', "not valid UTF-8 at byte 1"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ('{"a":1}'.encode("utf-16"), "UTF-8"),
        (b"", "empty"),
        (b" \n", "empty"),
        (b"01", "not valid JSON"),
        (b"[1", "not valid JSON"),
        (b"1 2", "not valid JSON"),
        (b'"\n"', "not valid JSON"),
        (b'"\x00"', "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b"[1,]", "not valid JSON"),
    ],
)
def test_refuses_with_the_reason(data: bytes, says: str) -> None:
    """What is not acceptable JSON is refused with the rule it breaks."""
    with pytest.raises(NotJson, match=says.replace("(", r"\(")):
        canonicalize(data)
    assert model(data) is None


@pytest.mark.parametrize("count", [MAX_DEPTH + 1, 254, 255, 256, 1000, 1025, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_refuses_deep_nesting(count: int, opening: bytes, closing: bytes) -> None:
    """Containers nested beyond the limit are refused by name, at any depth, and nothing overflows a stack."""
    with pytest.raises(NotJson, match=f"the limit is {MAX_DEPTH}"):
        canonicalize(opening * count + b"1" + closing * count)


@pytest.mark.parametrize("number", [b"1", b"1.10"])
def test_accepts_nesting_up_to_the_limit(number: bytes) -> None:
    """Nesting up to the limit passes, on the quick path and on the careful one, alone and in company."""
    data = b"[" * MAX_DEPTH + number + b"]" * MAX_DEPTH
    assert canonicalize(data) == data
    assert canonicalize_all([data, data]) == ({}, {}) or number == b"1.10"


def test_the_limit_of_depth_is_exact() -> None:
    """Wide and deep at once: the limit passes and one level more does not, alone and in company."""
    for extra, fine in ((0, True), (1, False)):
        inner = MAX_DEPTH - 2 + extra
        data = b"[[" + b"[]," * 50 + b"[" * inner + b"]" * inner + b"]]"
        assert (outcome(data) == data) == fine
        assert (model(data) == data) == fine
        assert sorted(canonicalize_all([b"1", data, data])[1]) == ([] if fine else [1, 2])


@pytest.mark.parametrize("count", [MAX_DEPTH + 1, 200, 253, 254, 1000])
def test_company_does_not_hide_depth(count: int) -> None:
    """A text that is nested too deeply is refused among others too."""
    deep = b"[" * count + b"]" * count
    assert list(canonicalize_all([b"1", deep, b"2"])[1]) == [1]


def test_depth_ignores_brackets_in_strings() -> None:
    """Brackets inside strings do not count as nesting, escaped quotes or not."""
    data = orjson.dumps(["[" * 500, '\\"[{' * 200, {"{" * 300: "]"}])
    assert canonicalize(data) == data


def test_wide_objects_are_not_deep() -> None:
    """Thousands of containers side by side are fine."""
    data = orjson.dumps([{"a": [index]} for index in range(5_000)])
    assert canonicalize(data) == data


def test_hostile_escapes_take_linear_time() -> None:
    """A megabyte of unterminated escapes and brackets is refused at once."""
    with pytest.raises(NotJson):
        canonicalize(b"[" * 200 + b'"' + b'\\"' * 500_000)


@given(st.lists(TEXTS | st.sampled_from([b"[1", b"2]", b'{"a":1', b'"b":2}', b"1,2", b'"', b"", b"\xff"]), max_size=70))
def test_many_at_once_agree_with_one_by_one(objects: list[bytes]) -> None:
    """Texts canonicalised together give what each gives alone, changed, unchanged or refused."""
    changed, problems = canonicalize_all(objects)
    for place, data in enumerate(objects):
        expected = model(data)
        assert (place in problems) == (expected is None)
        if expected is not None:
            assert changed.get(place, data) == expected
            assert (place in changed) == (expected != data)


@pytest.mark.parametrize(
    "parts",
    [[b"[1", b"2]"], [b'{"a":[1', b"2]}"], [b'"x', b'y"'], [b"1,2", b"3"], [b"[", b"]"], [b"1,2,3", b"[4", b"5]"]],
)
def test_parts_that_only_together_are_json_are_refused(parts: list[bytes]) -> None:
    """Two texts that would make valid JSON when joined are each refused."""
    changed, problems = canonicalize_all([b"1", *parts, b"2"])
    assert changed == {}
    assert 1 in problems


def test_a_guessed_separator_does_not_help() -> None:
    """A text that carries what looks like a separator of its own is one value, or refused."""
    forged = b'1,"0123456789abcdef",2'
    assert 0 in canonicalize_all([forged, b"3"])[1]


@dataclasses.dataclass
class Reading:
    """A value that orjson writes by itself."""

    value: float
    unit: str | None = None


class Colour(enum.Enum):
    """An enumeration that orjson writes by its value."""

    RED = 1
    BROKEN = math.nan


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        (1 << 80, str(1 << 80).encode()),
        ({2: "two", 1: "one"}, b'{"1":"one","2":"two"}'),
        (datetime.datetime(2026, 3, 6, 14, 30, tzinfo=datetime.UTC), b'"2026-03-06T14:30:00+00:00"'),
        (Reading(1.5), b'{"unit":null,"value":1.5}'),
        ([Colour.RED, None], b"[1,null]"),
        ("null", b'"null"'),
        (-0.0, b"-0.0"),
    ],
)
def test_python_values(value: Any, canonical: bytes) -> None:
    """A Python value becomes canonical JSON, large integers and integer keys included."""
    assert canonicalize_value(value) == canonical


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        [1, {"a": math.inf}],
        {"a": -math.inf, "b": None},
        Reading(math.nan),
        [Colour.BROKEN],
        "\ud800",
        {"\ud800": 1},
        {1: "a", "1": "b"},
        object(),
        {1, 2},
        b"bytes",
        10**400,
    ],
)
def test_python_values_without_a_json_form_are_refused(value: Any) -> None:
    """NaN and infinities anywhere, lone surrogates, colliding keys and unknown types are refused, never altered."""
    with pytest.raises(NotJson):
        canonicalize_value(value)


def test_deep_and_circular_python_values_are_refused() -> None:
    """A value nested beyond the limit or within itself is refused, not a crash."""
    value: list[Any] = []
    for _ in range(MAX_DEPTH + 5):
        value = [value]
    circular: list[Any] = []
    circular.append(circular)
    deepest: list[Any] = []
    for _ in range(50_000):
        deepest = [deepest]
    for each in (value, circular, deepest):
        with pytest.raises(NotJson):
            canonicalize_value(each)


KEYS = st.text(min_size=0, max_size=5)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
TEMPLATES = st.dictionaries(
    KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(KEYS, SCALARS, max_size=3)), max_size=5
)


@given(TEMPLATES, st.lists(TEXTS, max_size=20), st.data())
def test_what_a_skeleton_proves_is_canonical(
    template: dict[str, Any], others: list[bytes], data: st.DataObject
) -> None:
    """A row that is proven by likeness is its own canonical form by the model, whatever surrounds it."""
    like = [
        json.dumps(
            revalued(template, data.draw), ensure_ascii=data.draw(st.booleans()), separators=(",", ":"), sort_keys=True
        )
        for _ in range(4)
    ]
    texts = [text.encode() for text in like] * (MIN_ROWS // 4) + others
    for row in sorted(set(range(len(texts))) - set(unproven(pa.array(texts, pa.binary())).tolist())):
        assert model(texts[row]) == texts[row]


def revalued(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        return {key: revalued(item, draw) for key, item in value.items()}
    if isinstance(value, list):
        return [revalued(item, draw) for item in value]
    return draw(SCALARS)


HOSTILE_ROWS = [
    b'{"a":1,"b":"x" }',
    b'{"a":01,"b":"x"}',
    b'{"a":+1,"b":"x"}',
    b'{"a":1.,"b":"x"}',
    b'{"a":-,"b":"x"}',
    b'{"a":,"b":"x"}',
    b'{"a":1,"b":"x\n"}',
    b'{"a":1,"b":"x"}\n',
    b'{"a":1,"b":"\\u0041"}',
    b'{"a":1,"b":"x\x00"}',
    b'{"a":1,"b":"x","b":"y"}',
    b'{"b":"x","a":1}',
    b'{"a":NaN,"b":"x"}',
    b'{"a":' + b"9" * 400 + b',"b":"x"}',
    b'{"a":1e400,"b":"x"}',
    b'{"a":1e,"b":"x"}',
    b'{"a":nulll,"b":"x"}',
    b'x{"a":1,"b":"x"}',
]


@pytest.mark.parametrize("hostile", HOSTILE_ROWS)
def test_a_skeleton_never_proves_what_is_not_canonical(hostile: bytes) -> None:
    """A row that only resembles the others is left for the closer look."""
    texts = [b'{"a":%d,"b":"text %d"}' % (number, number) for number in range(MIN_ROWS * 2)]
    texts[77] = hostile
    assert unproven(pa.array(texts, pa.binary())).tolist() == [77]


def test_a_skeleton_clears_rows_with_unusual_literals_and_letters() -> None:
    """Fixed decimals, nulls, other scripts and long numbers are proven without a parse."""
    texts = [
        f'{{"text":"ж{number}","v":{"null" if number % 3 else -number},"ä\\"b":{number}.10}}'.encode()
        for number in range(300)
    ]
    assert unproven(pa.array(texts, pa.binary())).tolist() == []


def test_a_skeleton_clears_exponents_within_range() -> None:
    """Small numbers as Python writes them are proven; only an exponent of three digits needs the closer look."""
    texts = [b'{"v":%d.5e-0%d}' % (number, number % 9) for number in range(300)]
    texts[200] = b'{"v":1e-100}'
    assert unproven(pa.array(texts, pa.binary())).tolist() == [200]


def test_a_skeleton_serves_several_kinds() -> None:
    """A batch of interleaved kinds is proven kind by kind."""
    texts = [b'{"k%d":%d}' % (number % 4, number) for number in range(MIN_ROWS * 8)]
    assert unproven(pa.array(texts, pa.binary()).slice(5)).tolist() == []


def test_a_skeleton_steps_aside() -> None:
    """Invalid UTF-8 among texts of many lengths, a first row that is no model, or too few rows are all parsed."""
    fine = [b'{"a":1%s}' % (b"0" * number) for number in range(MIN_ROWS)]
    wide = [orjson.dumps(list(range(number, number + 100))) for number in range(10**9, 10**9 + MIN_ROWS)]
    assert unproven(pa.array([*fine, b'"\xff"'], pa.binary())).tolist() == list(range(1, MIN_ROWS + 1))
    assert len(unproven(pa.array([wide[0], *(text[:-1] + b",1]" for text in wide)], pa.binary()))) == MIN_ROWS
    for texts in ([b"{", *fine], [b'{"b":1, "a":2}', *fine], fine[1:]):
        assert len(unproven(pa.array(texts, pa.binary()))) == len(texts)


@given(TEMPLATES, st.data())
def test_what_a_layout_proves_is_canonical(template: dict[str, Any], data: st.DataObject) -> None:
    """A text that is proven by its layout is its own canonical form by the model, whichever bytes were changed."""
    first = canonicalize_value(template)
    changed = st.lists(st.tuples(st.integers(0, len(first) - 1), st.sampled_from(b'09a"\\ {}.-e\x1f\xc3~')), max_size=4)
    texts = []
    for changes in data.draw(st.lists(changed, min_size=1, max_size=20)):
        written = bytearray(first)
        for at, byte in changes:
            written[at] = byte
        texts.append(bytes(written))
    column = pa.array([first, b"{}", *texts], pa.binary())
    fine = laid_out_like(first, column)
    assert fine[0] == (b"\\" not in first)
    assert fine[1] == (first == b"{}")
    for text, proven in zip(texts, fine[2:], strict=True):
        assert not proven or model(text) == text


@pytest.mark.parametrize("text", [b'{"a":09}', b'{"a":1.}', b'{"b":10}', b'{"a":1e}', b'{"a":"" }', b'{"a":-1}'])
def test_a_layout_proves_no_neighbour(text: bytes) -> None:
    """Another key, a leading zero, a sign or a space in the place of a digit are no likeness."""
    assert not laid_out_like(b'{"a":10}', pa.array([text], pa.binary())).any()


def test_a_layout_proves_digits_and_plain_characters() -> None:
    """Digits for digits and plain characters for plain characters are proven, also in a slice of a longer column."""
    texts = [b'{"id":"%04x","t":%d.50,"z":"%c"}' % (number, number, 65 + number % 50) for number in range(300)]
    texts[7], texts[8] = b"{}", texts[8].replace(b'"z":"I"', b'"z":"\\"')
    column = pa.array(texts, pa.binary()).slice(5, 200)
    fine = laid_out_like(texts[150], column)
    # One column of the texts is a backslash, which begins an escape; those of fewer digits have another length.
    expected = [len(text) == len(texts[150]) and b"\\" not in text for text in texts[5:205]]
    assert fine.tolist() == expected
    assert sum(expected) == 103
