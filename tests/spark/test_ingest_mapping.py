"""Rows become facts by the plan, as a simple model of it says row by row, and nothing that is no fact slips through."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.ingesting import asked, mapped_rows

from bsfg.errors import BsfgError, InvalidArgument
from bsfg.fact import Envelope, Fact, Message
from bsfg.rows import row_of
from bsfg.rules import judge
from bsfg.spark.ingest.options import Asked, from_file
from bsfg.spark.ingest.plan import Template, TimeFormat, stamped_times, text_times
from bsfg.spark.ingest.survey import digest_of

SLOW = settings(max_examples=60, deadline=None, derandomize=True)
QUICK = settings(max_examples=200, deadline=None, derandomize=True)

NAMES = ("machine", "ts", "value", "note")
TIMES = st.sampled_from(
    [
        "2026-03-01T06:00:00Z",
        "2026-03-01 06:00:00.123+01:00",
        "2026-13-01T06:00:00Z",
        "yesterday",
        "2026-03-01T06:00:00",
    ]
)
TEXTS = st.text(alphabet=st.sampled_from('ab/:"\\\n\té\u007f '), max_size=6)
VALUES = st.sampled_from(["1", "-0.50", "1e5", "1e999", "NaN", "007", "x", " 3 ", "+1"])
ROW = st.fixed_dictionaries(
    {
        "machine": st.none() | TEXTS | st.just("press-1"),
        "ts": st.none() | TIMES,
        "value": st.none() | VALUES,
        "note": st.none() | TEXTS,
    }
)


def written(folder: Path, rows: list[dict[str, str | None]], format: str) -> Path:
    """Write rows as a file of a format."""
    path = folder / f"rows.{format}"
    if format == "parquet":
        columns = {name: pa.array([row[name] for row in rows], pa.string()) for name in NAMES}
        pq.write_table(pa.table(columns), path, row_group_size=5)
    elif format == "jsonl":
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            file.write(",".join(NAMES) + "\n")
            for row in rows:
                file.write(",".join(_quoted(row[name]) for name in NAMES) + "\n")
    return path


def _quoted(value: str | None) -> str:
    return "" if value is None else '"' + value.replace('"', '""') + '"'


def model(row: dict[str, str | None], number: int, digest: str) -> dict[str, Any] | None:
    """Map one row as the guide says, with nothing but plain Python; None when it must be rejected."""
    machine, ts, note = row["machine"], row["ts"], row["note"]
    value = (row["value"] or "").strip() or None
    if machine is None or ts is None:
        return None
    try:
        moment = datetime.fromisoformat(ts)
    except ValueError:
        return None
    if moment.tzinfo is None:
        return None
    number_form = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
    if value is not None and (not re.fullmatch(number_form, value) or abs(float(value)) == float("inf")):
        return None
    body = b'{"note":%b,"v":%b}' % (orjson.dumps(note), (value or "null").encode())
    since = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    labels = {} if note is None else {"note": f"<{note}>"}
    envelope = Envelope("plant-a", "enterprise", int(since * 1000), f"{digest[:32]}-{number}", labels=labels)
    message = Message(envelope, Fact(f"asset:P/{machine}", "value_read", body))
    try:
        judge(0, row_of(message))
    except BsfgError:
        return None
    return {"subject": message.fact.subject, "id": envelope.message_id, "at": envelope.produced_at_unix_ms,
            "raw": body, "labels": dict(envelope.labels)}  # fmt: skip


PLAN = asked(
    map={"subject": "asset:P/{machine}", "produced_at": "ts", "label.note": "<{note}>"},
    set={"predicate": "value_read"},
    object="v=value,note",
    types={"value": "number"},
).plan()


@SLOW
@given(st.lists(ROW, min_size=1, max_size=12), st.sampled_from(["csv", "jsonl", "parquet"]))
def test_the_mapping_agrees_with_a_simple_model(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str | None]], format: str
) -> None:
    """Columns are mapped as single rows would be; exactly the rows that the model refuses are rejected."""
    path = written(tmp_path_factory.mktemp("rows"), rows, format)
    found = mapped_rows(path, PLAN)
    digest = digest_of(path)
    expected = {number: model(row, number, digest) for number, row in enumerate(rows, 1)}
    facts = {
        row["number"]: {
            "subject": row["subject"],
            "id": row["message_id"],
            "at": row["produced_at_unix_ms"],
            "raw": row["raw"],
            "labels": orjson.loads(row["labels"] or b"{}"),
        }
        for row in found.facts
    }
    assert facts == {number: fact for number, fact in expected.items() if fact is not None}
    assert [reject.row for reject in found.rejects] == [number for number, fact in expected.items() if fact is None]


def test_a_wrong_value_that_all_rows_share_rejects_them_all(tmp_path: Path) -> None:
    """The same bad value in every row rejects every row, and not the first alone."""
    path = tmp_path / "a.csv"
    path.write_text("kind,n\n" + "".join(f"Not A Predicate,{n}\n" for n in range(500)))
    found = mapped_rows(path, asked(map={"predicate": "kind"}).plan())
    assert (found.facts, len(found.rejects)) == ([], 500)
    assert {(reject.field, reject.code) for reject in found.rejects} == {("predicate", "invalid_fact")}


def test_large_objects_are_rejected(tmp_path: Path) -> None:
    """An object above the limit rejects its row, and the limit can be raised."""
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "x" * 2_000_000 + "\nshort\n")
    found = mapped_rows(path, asked().plan())
    assert [row["object"] for row in found.facts] == [{"a": "short"}]
    assert (found.rejects[0].code, found.rejects[0].reason) == ("fact_too_large", "at most 1048576 bytes")
    assert len(mapped_rows(path, asked(max_object_bytes=4_000_000).plan()).facts) == 2


def test_ids_of_content_and_columns(tmp_path: Path) -> None:
    """Ids come from columns, from the content, from file and row, or not at all; never from clock or chance."""
    path = tmp_path / "a.csv"
    path.write_text("m,n\nx,1\nx,1\ny,2\n")

    def ids(**more: Any) -> list[str | None]:
        plan = asked(map={"subject": "asset:{m}"}, **more).plan()
        first, second = (mapped_rows(path, plan).facts for _ in range(2))
        assert first == second
        return [row["message_id"] for row in first]

    digest = digest_of(path)[:32]
    assert ids() == [f"{digest}-1", f"{digest}-2", f"{digest}-3"]
    assert ids(id="{m}/{n}") == ["x/1", "x/1", "y/2"]
    assert ids(id="n") == ["1", "1", "2"]
    assert ids(id="none") == [None, None, None]
    assert ids(id="{@file}:{@row}") == ["a.csv:1", "a.csv:2", "a.csv:3"]
    body = b'asset:x\x00temperature_measured\x001772344800000\x00{"m":"x","n":"1"}'
    content = ids(id="content")
    assert content[0] == content[1] == hashlib.sha256(body).hexdigest()[:32]
    assert content[2] != content[0]


def test_the_object_can_be_one_column(tmp_path: Path) -> None:
    """A column of JSON becomes the object in canonical form; other media types stay as they are, to the byte."""
    path = tmp_path / "a.csv"
    path.write_text('p\n"{""b"": 2.50, ""a"": 1}"\n[1\n\n"""x"""\n')
    found = mapped_rows(path, asked(map={"object": "p"}).plan())
    assert [row["raw"] for row in found.facts] == [b'{"a":1,"b":2.50}', b'"x"']
    assert [(reject.row, reject.field) for reject in found.rejects] == [(2, "object")]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"p":{"b":2.50,"a":"x"}}\n{"p":"text"}\n{"p":null}\n{"q":1}\n')
    found = mapped_rows(lines, asked(map={"object": "p"}).plan())
    assert [row["raw"] for row in found.facts] == [b'{"a":"x","b":2.50}', b'"text"']
    assert [reject.reason for reject in found.rejects] == ["is required, and column p is empty"] * 2
    pq.write_table(pa.table({"p": [b"\x00\xff", b"{ }"]}), tmp_path / "a.parquet")
    plan = asked(map={"object": "p"}, set={"object_media_type": "application/octet-stream"}).plan()
    assert [row["raw"] for row in mapped_rows(tmp_path / "a.parquet", plan).facts] == [b"\x00\xff", b"{ }"]
    found = mapped_rows(tmp_path / "a.parquet", asked(map={"object": "p"}).plan())
    assert [row["raw"] for row in found.facts] == [b"{}"]


def test_types_of_texts(tmp_path: Path) -> None:
    """Texts become numbers as written, truth values and JSON where the plan says so; what is not that is rejected."""
    path = tmp_path / "a.csv"
    path.write_text('n,b,j\n1.50,TRUE,"{""z"":1, ""a"":[]}"\n,,\n 7 ,0,null\n1,maybe,1\n1,true,{\n0x1,true,1\n')
    found = mapped_rows(path, asked(types={"n": "number", "b": "boolean", "j": "json"}).plan())
    assert [row["raw"] for row in found.facts] == [
        b'{"b":true,"j":{"a":[],"z":1},"n":1.50}',
        b'{"b":null,"j":null,"n":null}',
        b'{"b":false,"j":null,"n":7}',
    ]
    assert [(reject.row, reject.reason.partition(":")[0]) for reject in found.rejects] == [
        (4, "column b 'maybe' is neither true nor false"),
        (5, "column j is not JSON"),
        (6, "column n '0x1' is not a number"),
    ]


# Times.


@QUICK
@given(
    st.lists(st.datetimes(datetime(1970, 1, 2), datetime(9999, 12, 30)), min_size=1, max_size=5),
    st.sampled_from(["Z", "+01:00", "-0530"]),
    st.sampled_from(["T", " "]),
)
def test_iso_times_are_read_as_python_reads_them(moments: list[datetime], zone: str, between: str) -> None:
    """A column of ISO times gives what Python's own reader gives for each."""
    texts = [moment.isoformat(between) + zone for moment in moments]
    values, problems = text_times(pa.array(texts), TimeFormat())
    assert problems == {}
    expected = [(datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)) for text in texts]
    assert values.to_pylist() == [each // (datetime.resolution) for each in expected]


@pytest.mark.parametrize(
    ("text", "format", "zone", "expected"),
    [
        ("2026-03-01T06:00:00", "iso", "Europe/Berlin", "2026-03-01T05:00:00Z"),
        ("01.03.2026 06:00:00", "%d.%m.%Y %H:%M:%S", "UTC", "2026-03-01T06:00:00Z"),
        ("1772344800", "unix_s", None, "2026-03-01T06:00:00Z"),
        ("1772344800.25", "unix_s", None, "2026-03-01T06:00:00.25Z"),
        ("1772344800250", "unix_ms", None, "2026-03-01T06:00:00.25Z"),
        ("1772344800250999999", "unix_ns", None, "2026-03-01T06:00:00.250999Z"),
        ("2026-03-29T02:30:00", "iso", "Europe/Berlin", "never was in Europe/Berlin"),
        ("2026-10-25T02:30:00", "iso", "Europe/Berlin", "was twice in Europe/Berlin"),
        ("2026-03-01T06:00:00", "iso", None, "has no time zone"),
        ("2026-03-01T25:00:00Z", "iso", None, "is not an ISO time"),
        ("1e9", "unix_s", None, "is not a number of unix_s"),
        ("9" * 30, "unix_s", None, "lies outside"),
    ],
)
def test_times_in_all_their_forms(text: str, format: str, zone: str | None, expected: str) -> None:
    """Each form of a time is read exactly, and one that has no single meaning is refused with the reason."""
    values, problems = text_times(pa.array([text]), TimeFormat(format, zone))
    if problems:
        assert expected in problems[0]
    else:
        wanted = datetime.fromisoformat(expected) - datetime(1970, 1, 1, tzinfo=UTC)
        assert values.to_pylist() == [wanted // datetime.resolution]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_of_parquet_are_times(unit: str) -> None:
    """Timestamps with a zone are taken as they are, those without in the plan's zone, and never guessed."""
    moment = datetime(2026, 3, 1, 6)
    naive = pa.array([moment, None], pa.timestamp(unit))
    berlin = moment.replace(tzinfo=ZoneInfo("Europe/Berlin"))
    wanted = (berlin - datetime(1970, 1, 1, tzinfo=UTC)) // datetime.resolution
    zoned = pa.array([berlin, None], pa.timestamp(unit, tz="Europe/Berlin"))
    assert stamped_times(zoned, TimeFormat())[0].to_pylist() == [wanted, None]
    assert stamped_times(naive, TimeFormat(zone="Europe/Berlin"))[0].to_pylist() == [wanted, None]
    values, problems = stamped_times(naive, TimeFormat())
    assert values.to_pylist() == [None, None]
    assert list(problems) == [0]
    twice = pa.array([datetime(2026, 10, 25, 2, 30), moment], pa.timestamp(unit))
    values, problems = stamped_times(twice, TimeFormat(zone="Europe/Berlin"))
    assert values.to_pylist() == [None, wanted]
    assert list(problems) == [0]


def test_times_beyond_all_calendars_are_rejected(tmp_path: Path) -> None:
    """A timestamp that no clock shows is rejected and does not wrap around into a good one."""
    table = pa.table({"t": pa.array([1 << 60, -(1 << 60), 1772344800000], pa.timestamp("ms", tz="UTC"))})
    pq.write_table(table, tmp_path / "a.parquet")
    found = mapped_rows(tmp_path / "a.parquet", asked(map={"produced_at": "t"}, id="{@row}", object="x=t").plan())
    assert [row["number"] for row in found.facts] == [3]


# What a user asks for.


@QUICK
@given(st.lists(st.text(alphabet="ab{}", max_size=4) | st.just("{column}"), max_size=5).map("".join))
def test_templates_are_read_or_refused(text: str) -> None:
    """A template with all braces paired gives back its text when it is filled in with its own names."""
    try:
        template = Template.parse(text)
    except InvalidArgument:
        return
    parts = [part if at % 2 == 0 else "{" + part + "}" for at, part in enumerate(template.parts)]
    again = [part.replace("{", "{{").replace("}", "}}") if at % 2 == 0 else part for at, part in enumerate(parts)]
    assert Template.parse("".join(again)) == template


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"set": {"subject": "no subject"}}, "subject 'no subject' must be kind:id"),
        ({"set": {"predicate": "Not Snake"}}, "predicate 'Not Snake' must be lower_snake_case"),
        ({"map": {"subjct": "a"}}, "facts have no field 'subjct'; did you mean subject?"),
        ({"map": {"subject": "asset:{a"}}, "has a brace without its partner"),
        ({"map": {"subject": ""}}, "mapped to nothing"),
        ({"map": {"subject": "{@when}"}}, "subject cannot be made of {@when}"),
        ({"map": {"subject": "{@content}"}}, "subject cannot be made of {@content}"),
        ({"map": {"produced_at": "{a} {b}"}}, "produced_at must be one column"),
        ({"set": {"produced_at": "now"}}, "produced_at 'now' is not an ISO time"),
        ({"set": {"produced_at": "2026-03-01T06:00:00"}}, "has no time zone"),
        ({"set": {"message_id": "same"}}, "every row would have the message_id 'same'"),
        ({"id": "{a}", "map": {"message_id": "b"}}, "the message_id is said twice"),
        ({"map": {"object": "a"}, "object": "b"}, "the object is said twice"),
        ({"map": {"object": "{a}{b}"}}, "the object is one column"),
        ({"set": {"object": "x"}}, "cannot be the same in all rows"),
        ({"object": "a,a"}, "must differ"),
        ({"types": {"a": "integer"}}, "must be one of text, number, boolean, json"),
        ({"map": {"label.a b": "a"}}, "label name 'a b' must match"),
        ({"time_format": "excel"}, "'excel' is no format of times"),
        ({"time_zone": "Mars/Base"}, "there is no time zone 'Mars/Base'"),
        ({"delimiter": ";;"}, "is not one ASCII character"),
        ({"encoding": "utf-16"}, "the encoding must be one of"),
        ({"decimal": "'"}, "the decimal mark"),
        ({"stream": "No Stream"}, "is not a name"),
        ({"to_zone": None}, "what to_zone is to be is not said"),
        ({"stream": None}, "the stream is not said"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(more: dict[str, Any], says: str) -> None:
    """A mapping that contradicts itself or the rules of facts is refused with what is wrong."""
    with pytest.raises(InvalidArgument) as caught:
        asked(**more).plan()
    assert says in caught.value.message
    assert caught.value.hint


def test_a_file_says_what_options_say(tmp_path: Path) -> None:
    """A mapping file gives the same plan as options, and options go before it."""
    path = tmp_path / "m.toml"
    path.write_text("""
stream = "operational"
from_zone = "plant-a"
to_zone = "enterprise"
id = "{machine}/{n}"
object = ["value", "u=unit"]
max_object_bytes = 5000
[map]
subject = "asset:{machine}"
produced_at = "ts"
[map.label]
shift = "{s}"
[set]
predicate = "value_read"
[types]
value = "number"
[time]
format = "unix_ms"
zone = "UTC"
[csv]
delimiter = ";"
encoding = "latin-1"
decimal = ","
columns = ["a", "b"]
""")
    options = Asked(
        stream="operational",
        from_zone="plant-a",
        to_zone="enterprise",
        id="{machine}/{n}",
        object="value, u=unit",
        max_object_bytes=5000,
        map={"subject": "asset:{machine}", "produced_at": "ts", "label.shift": "{s}"},
        set={"predicate": "value_read"},
        types={"value": "number"},
        time_format="unix_ms",
        time_zone="UTC",
        delimiter=";",
        encoding="latin-1",
        decimal=",",
        columns=["a", "b"],
    )
    found = from_file(path)
    assert found.plan() == options.plan()
    assert found.plan().fingerprint() == options.plan().fingerprint()
    over = Asked(set={"subject": "asset:one"}, map={"predicate": "kind"}, id="file").over(found).plan()
    assert over.fields["subject"].value == "asset:one"
    assert over.fields["predicate"].only_column == "kind"
    assert over.fingerprint() != found.plan().fingerprint()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sream = 'x'", "there is no sream; did you mean stream?"),
        ("[csv]\ndelimeter = ';'", "there is no csv.delimeter; did you mean delimiter?"),
        ("map = 1", "map must be a table"),
        ("[map]\nsubject = 1", "map.subject must be a text"),
        ("max_object_bytes = 'x'", "must be a number of bytes"),
        ("= 1", "is not TOML"),
    ],
)
def test_a_wrong_mapping_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    """What is wrong with a mapping file is named, with what was probably meant."""
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        from_file(path)
    assert says in caught.value.message
