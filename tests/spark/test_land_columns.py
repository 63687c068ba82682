"""Typed columns of a landing: fields of objects in columns of their own, what does not fit beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.test_land_files import entries_of, place, predicates, work

from bsfg.errors import InvalidArgument
from bsfg.fact import Message
from bsfg.spark.land.columns import Inference, TypedColumn, joined, read_columns, typed
from bsfg.spark.land.staging import stage
from bsfg.spark.land.state import By, Shape

VALUE, UNIT = TypedColumn("value", "double", ("value",)), TypedColumn("unit", "string", ("unit",))


def saying(*objects: Any, predicate: str = "measured") -> list[Message]:
    """Make facts with objects; bytes are taken as they are."""
    data = [each if isinstance(each, bytes) else orjson.dumps(each) for each in objects]
    found = predicates(predicate, count=len(data))
    return [
        replace(message, fact=replace(message.fact, object=each)) for message, each in zip(found, data, strict=True)
    ]


def taken(columns: str, *objects: Any) -> list[dict[str, Any]]:
    """Give the columns that facts with these objects get."""
    chosen = read_columns(columns)
    arrays = typed(chosen, entries_of(saying(*objects)))
    rows: list[dict[str, Any]] = pa.table(arrays, names=[*(column.name for column in chosen), "rescued"]).to_pylist()
    return rows


def test_fields_become_columns() -> None:
    """A field with a value of its column's type is taken; one that is missing or null is null."""
    assert taken(
        "value double, unit string", {"value": 21.5, "unit": "C"}, {"value": 3, "more": 1}, {"unit": None}
    ) == [
        {"value": 21.5, "unit": "C", "rescued": None},
        {"value": 3.0, "unit": None, "rescued": None},
        {"value": None, "unit": None, "rescued": None},
    ]


@pytest.mark.parametrize(
    ("kind", "value", "becomes"),
    [
        ("double", True, None),
        ("double", "21.5", None),
        ("bigint", 9_223_372_036_854_775_807, 9_223_372_036_854_775_807),
        ("bigint", 9_223_372_036_854_775_808, None),
        ("bigint", 3.0, 3),
        ("bigint", 3.5, None),
        ("bigint", True, None),
        ("long", -5, -5),
        ("int", 2_147_483_648, None),
        ("integer", -2_147_483_648, -2_147_483_648),
        ("boolean", False, False),
        ("boolean", 0, None),
        ("string", "温度", "温度"),
        ("string", 5, None),
        ("timestamp", "2026-03-01T06:00:00.25Z", datetime(2026, 3, 1, 6, 0, 0, 250_000, tzinfo=UTC)),
        ("timestamp", "2026-03-01T06:00:00+02:00", datetime(2026, 3, 1, 4, tzinfo=UTC)),
        ("timestamp", "2026-03-01T06:00:00", None),
        ("timestamp", "0001-01-01T00:00:00+14:00", None),
        ("timestamp", 1_772_344_800, None),
        ("date", "2026-03-01", date(2026, 3, 1)),
        ("date", "2026-02-30", None),
        ("json", {"b": [1, None], "a": "x"}, '{"a":"x","b":[1,null]}'),
    ],
)
def test_what_fits_and_what_does_not(kind: str, value: Any, becomes: Any) -> None:
    """A value that is not of the type is null in its column and stands in the column of what was rescued."""
    [row] = taken(f"x {kind}", {"x": value, "y": 1})
    assert row["x"] == becomes
    assert row["rescued"] == (None if becomes is not None else orjson.dumps({"x": value}).decode())


def test_fields_inside_of_fields_and_with_any_name() -> None:
    """A column can be filled from a field further in, and names with dots, commas and spaces are quoted."""
    columns = 'deep int from reading.raw, odd int from "a.b, ""c"""."x y", third int'
    found = {"reading": {"raw": 1}, 'a.b, "c"': {"x y": 2}, "third": 3}
    assert taken(columns, found, {"reading": 5}) == [
        {"deep": 1, "odd": 2, "third": 3, "rescued": None},
        {"deep": None, "odd": None, "third": None, "rescued": None},
    ]
    [row] = taken(columns, {"reading": {"raw": "x"}})
    assert orjson.loads(row["rescued"]) == {"reading.raw": "x"}
    assert read_columns(", ".join(map(str, read_columns(columns)))) == read_columns(columns)


def test_objects_that_are_no_objects() -> None:
    """A number or a list alone is rescued whole; what cannot be read as JSON harms nobody."""
    deep = b'{"value":' + b'{"a":' * 600 + b"1" + b"}" * 600 + b"}"
    rows = taken("value double", 21.5, [1, 2], b"\xff\xfe", b"{", b"", deep, b'{"value": 1e400}')
    assert [row["value"] for row in rows] == [None] * len(rows)
    assert [row["rescued"] for row in rows[:2]] == ["21.5", "[1,2]"]
    assert rows[2]["rescued"] == "\ufffd\ufffd"


def test_other_media_types_are_left_alone(tmp_path: Path) -> None:
    """Only objects of JSON have fields."""
    [message] = saying({"value": 1})
    other = replace(message, envelope=replace(message.envelope, object_media_type="image/png"))
    like = replace(message, envelope=replace(message.envelope, object_media_type="application/cloudevents+json"))
    values, rescued = typed([VALUE], entries_of([other, like]))
    assert (values.to_pylist(), rescued.to_pylist()) == ([None, 1.0], [None, None])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no column"),
        ("value", "which is no column"),
        ("value double precision", "which is no column"),
        ("value decimal", "the type 'decimal'"),
        ("subject string", "a column of every fact"),
        ("Date date", "a column of every fact"),
        ("rescued string", "a column of every fact"),
        ("value double, Value string", "cannot become"),
        ("x int from a..b", "which is no column"),
        (",".join(f"c{number} int" for number in range(201)), "too many"),
        ("@/nowhere/columns.txt", "cannot be read"),
    ],
)
def test_mistakes_in_columns(text: str, says: str) -> None:
    """What cannot be read, is taken or is said twice is refused, with a hint."""
    with pytest.raises(InvalidArgument, match=says) as caught:
        read_columns(text)
    assert caught.value.hint


def test_columns_from_a_file(tmp_path: Path) -> None:
    """A file has a column per line, and may say why."""
    path = tmp_path / "columns.txt"
    path.write_text("# what sensors say\nvalue double\n\nunit string, serial bigint from device.serial\n")
    assert read_columns(f"@{path}") == (VALUE, UNIT, TypedColumn("serial", "bigint", ("device", "serial")))


def test_columns_only_come() -> None:
    """Columns of a table stay; more may come; none can change."""
    assert joined([VALUE], [UNIT]) == (VALUE, UNIT)
    assert joined([VALUE, UNIT], [UNIT]) == (VALUE, UNIT)
    with pytest.raises(InvalidArgument, match="'value double' cannot become 'value string'"):
        joined([VALUE], [TypedColumn("value", "string", ("value",))])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.lists(json_values, min_size=1, max_size=5), st.sampled_from(["double", "bigint", "string", "date", "json"]))
def test_nothing_is_lost(values: list[Any], kind: str) -> None:
    """Whatever a field holds, it is in its column or among what was rescued, and never in both."""
    found = [orjson.loads(orjson.dumps(value)) for value in values]
    for value, row in zip(found, taken(f"x {kind}", *({"x": value} for value in found)), strict=True):
        if value is None:
            assert (row["x"], row["rescued"]) == (None, None)
        else:
            assert (row["x"] is None) == (row["rescued"] is not None)
            assert row["rescued"] is None or orjson.loads(row["rescued"]) == {"x": value}


def test_columns_are_found_out() -> None:
    """Each field becomes a column of the type that most facts have; the report says how many fit, by predicate."""
    found = Inference()
    found.add(entries_of(saying({"value": 1, "on": True, "subject": "x"}, {"value": 2.5}, {"value": "high"})))
    found.add(entries_of(saying({"value": "open", "who": {"id": 1}}, 5, predicate="door_opened")))
    columns = found.columns([UNIT])
    assert [str(column) for column in columns] == [
        "unit string",
        "value string",
        "on boolean",
        "object_subject string from subject",
        "who json",
    ]
    report = {
        (each.predicate, each.field): (each.type, each.facts, each.having, each.fitting)
        for each in found.report(columns)
    }
    assert report[("measured", "value")] == ("string", 3, 3, 1)
    assert report[("door_opened", "value")] == ("string", 2, 1, 1)
    assert report[("door_opened", "who")] == ("json", 2, 1, 1)
    assert report[("measured", "on")] == ("boolean", 3, 1, 1)


def test_names_that_columns_cannot_have_are_changed() -> None:
    """Fields get names that every tool takes, and of two that would be one the rarer is left out, which is told."""
    found = Inference()
    found.add(entries_of(saying({"1st": 1, "a b": 2, "Value": 3, "value": 4}, {"value": 5})))
    columns = found.columns()
    assert [str(column) for column in columns] == [
        "value bigint",
        "object_1st bigint from 1st",
        'a_b bigint from "a b"',
    ]
    assert [each.column for each in found.report(columns) if each.field == "Value"] == [""]
    assert read_columns(", ".join(map(str, columns))) == columns


@given(st.lists(st.text(st.sampled_from('a". ,\n@#\u00a0\x1f'), max_size=6), min_size=1, max_size=3))
def test_fields_of_any_name_are_kept_as_they_are(steps: list[str]) -> None:
    """What a landing writes down of a column it reads again as the same one: a producer may name fields as it likes."""
    columns = TypedColumn("x", "json", tuple(steps)), TypedColumn("y", "json", ("",))
    assert read_columns(", ".join(map(str, columns))) == columns


def staged(root: Path, facts: list[Message], **more: Any) -> Iterator[pa.Table]:
    """Land facts and read their files."""
    import pyarrow.parquet as pq

    receipt = stage(work(root, facts, **more), 0, len(facts), lambda done: None)
    place(root, receipt.files)
    for path in sorted(root.rglob("*.parquet")):
        yield pq.ParquetFile(path).read()


def test_files_have_the_columns(tmp_path: Path) -> None:
    """A landed file has the columns of facts, then the typed ones, then what was rescued."""
    shape = Shape(By.PRODUCED_AT, columns=(VALUE, UNIT))
    [found] = staged(tmp_path, saying({"value": 1.5, "unit": 7}), shape=shape)
    assert found.schema.names[-3:] == ["value", "unit", "rescued"]
    assert found.select(["value", "unit", "rescued"]).to_pylist() == [
        {"value": 1.5, "unit": None, "rescued": '{"unit":7}'}
    ]
    assert "predicate" not in found.schema.names


@pytest.mark.parametrize(
    ("partition_by", "folder"),
    [
        (("month",), "month=2023-11"),
        (("hour", "from_zone"), "hour=2023-11-14T22/from_zone=…"),
        (("from_zone", "predicate"), "from_zone=…/predicate=measured"),
        (("origin_zone",), "origin_zone=__HIVE_DEFAULT_PARTITION__"),
    ],
)
def test_files_are_partitioned_as_wanted(tmp_path: Path, partition_by: tuple[str, ...], folder: str) -> None:
    """Pieces of time and columns with few values can be partitions; they then stand in the path alone."""
    facts = saying({"value": 1}, {"value": 2})
    [found] = staged(tmp_path, facts, shape=Shape(By.PRODUCED_AT, partition_by))
    [path] = tmp_path.rglob("*.parquet")
    assert path.parent.relative_to(tmp_path).as_posix() == folder.replace("…", facts[0].envelope.from_zone)
    assert not set(partition_by) & set(found.schema.names)
    assert {"predicate", "from_zone", "subject"} - set(partition_by) <= set(found.schema.names)
