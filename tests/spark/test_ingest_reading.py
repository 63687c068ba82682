"""Files become rows: every record is read as it was written, or is rejected with its place, whatever the bytes are."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.ingesting import asked, look_at, mapped_rows

from bsfg.errors import FileChanged, InvalidArgument
from bsfg.spark.ingest import reading, survey
from bsfg.spark.ingest.survey import TextRecords, are_blank, digest_of, find, record_ends, split_fields

QUICK = settings(max_examples=200, deadline=None, derandomize=True)

FIELD = st.text(alphabet=st.sampled_from('ab,;"\n \té€'), max_size=6)
TABLE = st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(FIELD, min_size=width, max_size=width), max_size=12))
BYTES = st.binary(max_size=120) | st.lists(st.sampled_from([b'"', b",", b"\n", b"a", b"\r", b'""']), max_size=60).map(
    b"".join
)


def naive_ends(data: bytes, delimiter: bytes) -> list[int]:
    """Find the ends of records one byte after the other; the last one may lack its line break."""
    ends, at, quoted, field_start = [], 0, False, True
    while at < len(data):
        byte = data[at : at + 1]
        if quoted:
            if byte == b'"' and data[at + 1 : at + 2] == b'"':
                at += 1
            elif byte == b'"':
                quoted = False
        elif byte == b'"' and field_start:
            quoted = True
        elif byte == b"\n":
            ends.append(at + 1)
        field_start = not quoted and byte in (delimiter, b"\n")
        at += 1
    if not quoted and len(data) > (ends[-1] if ends else 0):
        ends.append(len(data))
    return ends


@QUICK
@given(BYTES)
def test_records_end_where_a_simple_reader_ends_them(data: bytes) -> None:
    """The quick search for the ends of CSV records agrees with one that goes byte by byte, on any bytes."""
    found = record_ends(data, ",", final=True)
    assert found.at.tolist() == naive_ends(data, b",")


@QUICK
@given(BYTES, st.integers(0, 120))
def test_records_of_a_beginning_are_those_of_the_whole(data: bytes, cut: int) -> None:
    """What is found in the first part of a file stays true when the rest comes."""
    whole = record_ends(data, ",", final=True).at.tolist()
    part = record_ends(data[:cut], ",", final=False).at.tolist()
    assert part == [end for end in whole if end <= cut and data[end - 1 : end] == b"\n"]


@QUICK
@given(TABLE, st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), st.sampled_from([",", ";", "\t"]))
def test_what_is_written_by_the_book_is_read_back(table: list[list[str]], quoting: Any, delimiter: str) -> None:
    """Fields that a CSV writer wrote are the fields that are read; an empty one without quotes is no value."""
    for row in table:
        out = io.StringIO()
        csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerow(row)
        found = split_fields(out.getvalue().encode(), delimiter)
        assert [b"" if field is None else field for field in found] == [field.encode() for field in row]


@QUICK
@given(BYTES)
def test_arrow_and_the_careful_reader_agree(data: bytes) -> None:
    """A block that Arrow reads as a whole is read the same record by record."""
    ends = record_ends(data, ",", final=True)
    starts = np.concatenate(([0], ends.at[:-1])).astype(np.int64)[: len(ends.at)]
    kept = ~are_blank(data, starts, ends.at)
    block = TextRecords(data, starts[kept], ends.at[kept], ends.regular)
    if not len(block):
        return
    names = [f"c{number}" for number in range(len(split_fields(block.record(0), ",")))]
    quick, careful = (
        reading._csv_at_once(block, names, ",", "utf-8"),
        reading._csv_one_by_one(block, names, ",", "utf-8"),
    )
    if quick is not None:
        assert quick.records.tolist() == careful.records.tolist()
        assert quick.columns == careful.columns
        assert quick.unreadable == careful.unreadable


@QUICK
@given(TABLE, st.sampled_from(["\n", "\r\n"]), st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]), st.booleans())
def test_a_table_survives_the_way_through_a_csv_file(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]], ends: str, quoting: Any, last_break: bool
) -> None:
    """All rows of a table come back from its file, in order and with their numbers, however large the chunks are."""
    width = len(table[0]) if table else 1
    table = [row for row in table if width > 1 or row[0]]
    names = [f"c{number}" for number in range(width)]
    out = io.StringIO()
    writer = csv.writer(out, quoting=quoting, lineterminator=ends)
    writer.writerows([names, *table])
    text = out.getvalue()
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    path.write_bytes((text if last_break or not table else text.removesuffix(ends)).encode())
    plan = asked(object=list(names)).plan()
    found = mapped_rows(path, plan)
    assert found.rejects == []
    assert [row["object"] for row in found.facts] == [
        {name: value or ("" if quoting == csv.QUOTE_ALL else None) for name, value in zip(names, row, strict=True)}
        for row in table
    ]
    assert [row["number"] for row in found.facts] == list(range(1, len(table) + 1))


@QUICK
@given(st.binary(max_size=300), st.sampled_from(["csv", "jsonl"]))
def test_no_bytes_are_lost_or_counted_twice(tmp_path_factory: pytest.TempPathFactory, data: bytes, format: str) -> None:
    """Of any bytes at all every row is a fact or a reject, never both, and the numbers of rows have no holes."""
    path = tmp_path_factory.mktemp("any") / f"any.{format}"
    path.write_bytes(b"a,b\n" + data if format == "csv" else data)
    plan = asked(object="*").plan()
    found = mapped_rows(path, plan)
    if found.file.problem is not None:
        assert [reject.code for reject in found.rejects] == ["file_unreadable"]
        return
    numbers = sorted([row["number"] for row in found.facts] + [reject.row or 0 for reject in found.rejects])
    assert numbers == list(range(1, found.file.rows + 1))
    assert found.file.digest == digest_of(path)


def test_chunks_do_not_change_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, numbers and lines are the same whether a file is read in one chunk or in hundreds."""
    path = tmp_path / "many.csv"
    rows = [f'{n},"text {n}\nwith ""quotes"" {n}",{"x" * (n % 50)}' for n in range(500)]
    path.write_text("a,b,c\n" + "\n".join(rows) + '\nbad\n7,5" pipe,end')
    plan = asked(object="*").plan()
    whole = mapped_rows(path, plan)
    monkeypatch.setattr(survey, "CHUNK_BYTES", 100)
    monkeypatch.setattr(survey, "BLOCK_BYTES", 64)
    parts = mapped_rows(path, plan)
    assert len(parts.file.chunks) > 100
    assert parts.facts == whole.facts
    assert parts.rejects == whole.rejects
    assert (whole.rejects[0].row, whole.rejects[0].line, whole.rejects[0].record) == (501, 1002, "bad")
    assert whole.facts[-1]["object"] == {"a": "7", "b": '5" pipe', "c": "end"}


def test_a_quote_that_never_closes_costs_one_line(tmp_path: Path) -> None:
    """A line that opens a quote for ever is rejected alone, and the rows behind it are read."""
    path = tmp_path / "open.csv"
    path.write_text('a,b\n1,x\n"2,y\n3,z\n4,w\n')
    found = mapped_rows(path, asked(object="*").plan())
    assert [row["object"]["a"] for row in found.facts] == ["1", "3", "4"]
    [reject] = found.rejects
    assert (reject.row, reject.line, reject.code, reject.record) == (2, 3, "row_unreadable", '"2,y')
    assert "opens a quote that never closes" in reject.reason


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_a_line_without_end_costs_one_line(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is longer than allowed is rejected with its beginning, and those around it are read."""
    monkeypatch.setattr(survey, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(reading, "RECORD_BYTES_MAX", 100)
    path = tmp_path / f"long.{format}"
    short, long = ("1\n", "9" * 5000 + "\n") if format == "csv" else ('{"a":1}\n', '{"a":"' + "9" * 5000 + '"}\n')
    path.write_text(("a\n" if format == "csv" else "") + short + long + short + long.rstrip("\n"))
    plan = asked(object="*").plan(max_row_bytes=2000)
    found = mapped_rows(path, plan)
    assert [row["number"] for row in found.facts] == [1, 3]
    assert [(reject.row, reject.record_bytes) for reject in found.rejects] == [(2, len(long)), (4, len(long) - 1)]
    assert all(reject.record == long[:100] and "the limit is 2000" in reject.reason for reject in found.rejects)


def test_a_long_quoted_field_with_line_breaks_is_not_taken_for_an_open_quote(tmp_path: Path) -> None:
    """A quoted field may have line breaks and be large, up to the limit of a row."""
    path = tmp_path / "quoted.csv"
    path.write_text('a,b\n1,"' + "line\n" * 1000 + '"\n2,y\n')
    plan = asked(object="*").plan(max_row_bytes=10_000)
    assert len(mapped_rows(path, plan).facts) == 2
    found = mapped_rows(path, asked(object="*").plan(max_row_bytes=1_000))
    assert "opens a quote" in found.rejects[0].reason
    assert found.facts[-1]["object"] == {"a": "2", "b": "y"}


def test_invalid_utf8_costs_its_own_row(tmp_path: Path) -> None:
    """Bytes that are no text reject their row alone, and are shown as they are."""
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"a,b\n1,x\n2,\xff\xfe\n3,z\n")
    found = mapped_rows(path, asked(object="*").plan())
    assert [row["object"]["a"] for row in found.facts] == ["1", "3"]
    assert (found.rejects[0].record, found.rejects[0].byte) == (r"2,\xff\xfe", 8)
    assert "is not utf-8: the byte 0xff" in found.rejects[0].reason
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"a":"1"}\n{"a":"\xff"}\n{"a":"3"}\n')
    found = mapped_rows(path, asked(object="*").plan())
    assert [row["object"]["a"] for row in found.facts] == ["1", "3"]
    assert "not valid UTF-8" in found.rejects[0].reason


def test_other_encodings_are_read(tmp_path: Path) -> None:
    """A sheet in the encoding of old Windows is read as such, with its own delimiter and decimal mark."""
    path = tmp_path / "old.csv"
    path.write_bytes("Maschine;Wert\nPresse für Süd;21,5\n".encode("cp1252"))
    plan = asked(object="*", types={"Wert": "number"}, encoding="cp1252", delimiter=";", decimal=",").plan()
    assert mapped_rows(path, plan).facts[0]["object"] == {"Maschine": "Presse für Süd", "Wert": 21.5}
    path.write_bytes(b"Maschine;Wert\nPresse \x81;1\ngut;2\n")
    found = mapped_rows(path, plan)
    assert [row["object"]["Maschine"] for row in found.facts] == ["gut"]
    assert "is not cp1252" in found.rejects[0].reason


def test_files_without_a_header_get_names(tmp_path: Path) -> None:
    """The names of columns can be given, and then the first line is a row."""
    path = tmp_path / "bare.tsv"
    path.write_text("1\tx\n2\ty\n")
    plan = asked(object="*", columns=["n", "t"]).plan()
    assert [row["object"] for row in mapped_rows(path, plan).facts] == [{"n": "1", "t": "x"}, {"n": "2", "t": "y"}]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "is UTF-16"),
        ("a.csv", b"\x1f\x8b123", "is compressed"),
        ("a.csv", b'"a,b\n1,2\n', "has no header"),
        ("a.csv", b"PAR1....", "is a Parquet file"),
        ("a.csv", b"a,a\n1,2\n", "has more than one column 'a'"),
        ("a.csv", b"a,\n1,2\n", "without a name"),
        ("a.jsonl", b'[{"a":1}]', "is a JSON array"),
        ("a.parquet", b"", "is not a whole Parquet file"),
        ("a.parquet", b"PAR1 not at all PAR1", "is not a whole Parquet file"),
    ],
)
def test_a_file_that_is_not_what_it_seems_is_one_reject(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    """A file that cannot be used is rejected as a whole, with the reason."""
    path = tmp_path / name
    path.write_bytes(content)
    found = mapped_rows(path, asked(object="*").plan())
    assert found.facts == []
    [reject] = found.rejects
    assert (reject.code, reject.row) == ("file_unreadable", None)
    assert says in reject.reason


def test_missing_columns_are_named(tmp_path: Path) -> None:
    """A file without a column of the mapping is rejected, and its columns are listed."""
    path = tmp_path / "a.csv"
    path.write_text("machine,ts\npress,now\nsaw,then\n")
    found = mapped_rows(path, asked(map={"subject": "asset:{machin}"}).plan())
    [reject] = found.rejects
    assert reject.reason == "has no column 'machin'; it has machine, ts"
    assert reject.rows == 2


@pytest.mark.parametrize("content", [("a.csv", b""), ("a.csv", b"a,b\n"), ("a.jsonl", b""), ("a.jsonl", b"\n\n")])
def test_empty_files_have_no_rows(tmp_path: Path, content: tuple[str, bytes]) -> None:
    """A file without rows gives neither facts nor rejects."""
    path = tmp_path / content[0]
    path.write_bytes(content[1])
    found = mapped_rows(path, asked(object="*").plan())
    assert (found.facts, found.rejects, found.file.problem) == ([], [], None)


def test_json_keeps_what_was_written(tmp_path: Path) -> None:
    """Numbers in JSON Lines keep their digits, alone and inside; doubled keys and other values are rejected."""
    path = tmp_path / "a.jsonl"
    lines = [
        '{"a": 1.10, "b": {"c": 12345678901234567890123, "d": [1.0, 2]}}',
        '{"a":2.50,"b":"\\u00e9 \\"x\\""}',
        '{"a":1,"a":2}',
        "[1,2]",
        '{"a":',
        '{"a": NaN}',
        "  ",
        '{"a":3}   ',
    ]
    path.write_text("\n".join(lines))
    found = mapped_rows(path, asked(object="a,b").plan())
    assert [row["raw"] for row in found.facts] == [
        b'{"a":1.10,"b":{"c":12345678901234567890123,"d":[1.0,2]}}',
        '{"a":2.50,"b":"é \\"x\\""}'.encode(),
        b'{"a":3,"b":null}',
    ]
    assert [reject.row for reject in found.rejects] == [3, 4, 5, 6, 7]
    assert "appears twice" in found.rejects[0].reason
    whole = mapped_rows(path, asked(object="*").plan())
    assert whole.facts[0]["raw"] == b'{"a":1.10,"b":{"c":12345678901234567890123,"d":[1.0,2]}}'
    inside = mapped_rows(path, asked(object="x=b.c").plan())
    assert inside.facts[0]["raw"] == b'{"x":12345678901234567890123}'


def test_types_of_parquet_become_json(tmp_path: Path) -> None:
    """Numbers, times, truth values, decimals, bytes and nested values of Parquet have their natural form in JSON."""
    from datetime import UTC, date, datetime
    from decimal import Decimal

    table = pa.table(
        {
            "i": pa.array([1, None], pa.int64()),
            "f": pa.array([1.0, 0.1]),
            "g": pa.array([0.1, 2.5], pa.float32()),
            "b": [True, False],
            "t": pa.array([datetime(2026, 3, 1, 6, 0, 0, 120000, UTC)] * 2, pa.timestamp("us", tz="Europe/Berlin")),
            "n": pa.array([datetime(2026, 3, 1, 6)] * 2, pa.timestamp("ns")),
            "d": [date(2026, 3, 1), None],
            "m": pa.array([Decimal("1.50"), Decimal("-2.00")], pa.decimal128(10, 2)),
            "s": pa.array(["x", "ü\n"]).dictionary_encode(),
            "y": pa.array([b"raw", b"\xff"]),
            "l": [[1, 2], None],
            "o": [{"p": {"q": 1.5}}, {"p": None}],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    found = mapped_rows(tmp_path / "a.parquet", asked(object="*").plan())
    assert orjson.loads(found.facts[0]["raw"]) == {
        "i": 1, "f": 1.0, "g": 0.1, "b": True, "t": "2026-03-01T06:00:00.12Z", "n": "2026-03-01T06:00:00",
        "d": "2026-03-01", "m": 1.5, "s": "x", "y": "raw", "l": [1, 2], "o": {"p": {"q": 1.5}},
    }  # fmt: skip
    assert b'"m":1.50,' in found.facts[0]["raw"]
    [reject] = found.rejects
    assert (reject.row, reject.field) == (2, "object")
    assert reject.record["s"] == "ü\n"
    paths = mapped_rows(tmp_path / "a.parquet", asked(object="v=o.p.q").plan())
    assert [row["object"] for row in paths.facts] == [{"v": 1.5}, {"v": None}]


def test_nan_is_rejected(tmp_path: Path) -> None:
    """A number that JSON cannot say rejects its row."""
    pq.write_table(pa.table({"v": [1.5, float("nan"), float("inf"), None]}), tmp_path / "a.parquet")
    found = mapped_rows(tmp_path / "a.parquet", asked(object="*").plan())
    assert [row["raw"] for row in found.facts] == [b'{"v":1.5}', b'{"v":null}']
    assert [(reject.row, reject.reason) for reject in found.rejects] == [
        (2, "column v is nan, which JSON cannot say"),
        (3, "column v is inf, which JSON cannot say"),
    ]


def test_a_damaged_row_group_is_rejected_as_a_range(tmp_path: Path) -> None:
    """Rows of Parquet that cannot be read are one reject that says how many they are; the others are facts."""
    path = tmp_path / "a.parquet"
    numbers = np.random.default_rng(1).integers(0, 1 << 60, 3000)
    pq.write_table(pa.table({"n": numbers}), path, row_group_size=1000, use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[at : at + 24] = b"\xff" * 24
    path.write_bytes(data)
    found = mapped_rows(path, asked(object="*").plan())
    assert [row["number"] for row in found.facts] == [*range(1, 1001), *range(2001, 3001)]
    [reject] = found.rejects
    assert (reject.code, reject.row, reject.rows) == ("file_unreadable", 1001, 1000)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    """A file that is not what it was when it was surveyed is not read."""
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n2\n")
    plan = asked(object="*").plan()
    found = survey.survey(str(path), "csv", plan)
    path.write_text("a\n1\n2\n3\n")
    with pytest.raises(FileChanged, match=r"a\.csv changed while it was being ingested"):
        list(reading.read_chunk(found, found.chunks[0], plan))
    path.unlink()
    with pytest.raises(FileChanged, match="cannot be read any more"):
        list(reading.read_chunk(found, found.chunks[0], plan))


def test_files_are_found_in_order(tmp_path: Path) -> None:
    """Paths stay in the order in which they were given; folders and patterns go by name; nothing comes twice."""
    for name in ("b.csv", "a.jsonl", "sub/c.parquet", "notes.txt", "_SUCCESS", ".hidden.csv", "_tmp/d.csv", "x.data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    def names(*given: str, format: str | None = None) -> list[tuple[str, str]]:
        found = find([str(tmp_path / each) for each in given], format)
        return [(Path(source.path).name, source.format) for source in found.files]

    everything = [("a.jsonl", "jsonl"), ("b.csv", "csv"), ("c.parquet", "parquet")]
    assert names("") == everything
    assert names("b.csv", "") == [everything[1], everything[0], everything[2]]
    assert names("*.csv") == [("b.csv", "csv")]
    assert names("x.data", format="csv") == [("x.data", "csv")]
    assert [Path(path).name for path in find([str(tmp_path)]).left_out] == ["notes.txt", "x.data"]
    for wrong, says in (("no.csv", "there is no file"), ("*.xml", "no file matches"), ("x.data", "does not show")):
        with pytest.raises(InvalidArgument, match=says):
            names(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match="no file to ingest"):
        names("empty")


def test_a_dry_run_looks_at_the_beginning(tmp_path: Path) -> None:
    """A dry run ends after the rows it was told to look at, and finds ids that two rows share."""
    path = tmp_path / "a.csv"
    path.write_text("a,id\n" + "".join(f"{n},{n % 3}\n" for n in range(10)))
    seen = look_at([path], asked(object="*", id="{id}").plan(), None)
    assert (seen.rows, seen.facts, seen.whole, seen.repeated_ids) == (10, 10, True, 7)
    assert seen.first_repeated == ("0", f"{path} row 1", f"{path} row 4")
    seen = look_at([path, path.with_name("b.csv")], asked(object="*").plan(), 5)
    assert seen.whole is False
