"""`bsfg inspect`: the overview, single entries, and the export of ranges."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.cli import folders
from tests.cli.conftest import Outcome, Run

from bsfg.jsonform import message_from_json
from bsfg.testing.facts import messages

STORE = ("--stream", "operational", "--buffer", "store")


def lines(outcome: Outcome) -> list[dict[str, Any]]:
    """Read JSON Lines."""
    assert outcome.code == 0, outcome
    return [orjson.loads(line) for line in outcome.out.splitlines()]


def test_the_overview(bsfg: Run, data: Path) -> None:
    """The overview shows logs, consumers with their lag, segments, key segments, index, gaps and quarantine."""
    outcome = bsfg("inspect", data)
    assert (outcome.code, outcome.err) == (0, "")
    for text in ("operational/store", "audit/forward", "650–1999", "enterprise", "1,247", "retired: replaced"):
        assert text in outcome.out, text
    for part in ("segments", "key segments", "key index", "gap records", "quarantine"):
        assert f": {part}" in outcome.out, part
    assert "consumer_retired" in outcome.out
    assert "conflict" in outcome.out


def test_the_overview_as_json(quick: Run, data: Path) -> None:
    """The same as JSON, complete and with numbers as numbers."""
    info = quick("inspect", data, "--json").json()
    assert (info["format"], info["hasher"], info["writer_pid"]) == (1, "sha256", None)
    audit, store = info["logs"]
    assert (audit["stream"], audit["buffer"], store["stream"], store["buffer"]) == (
        "audit",
        "forward",
        "operational",
        "store",
    )
    assert (store["start"], store["end"]) == (650, 2000)
    ranges = [(item["first"], item["last"]) for item in store["segments"]]
    assert ranges == [(first, first + 199) for first in range(600, 2000, 200)]
    assert [item["active"] for item in store["segments"]] == [False] * 6 + [True]
    assert [(item["first"], item["last"]) for item in store["key_segments"]] == [(0, 199), (200, 399), (400, 599)]
    assert sum(run["keys"] for run in store["index"]) == 2000
    gaps = [(gap["first"], gap["last"], gap["count"], gap["reason"]) for gap in store["gaps"]]
    assert gaps == [(1990, 1999, 10, "consumer_retired")]
    assert [(item["reason"], item["existing_offset"]) for item in audit["quarantine"]] == [
        ("conflict", 3),
        ("conflict", 4),
    ]
    assert store["size_bytes"] > 300_000


def test_consumers_and_their_lag(quick: Run, data: Path) -> None:
    """A consumer has its frontier, its open ranges and the number of entries it has not confirmed."""
    consumers = {item["name"]: item for item in quick("inspect", data, "--json").json()["consumers"]}
    assert set(consumers) == {"enterprise", "historian", "old"}
    enterprise = consumers["enterprise"]
    assert (enterprise["committed"], enterprise["ranges"]) == (700, [[900, 950], [1000, 1000]])
    assert enterprise["lag"] == 1999 - 700 - 51 - 1
    assert (enterprise["required"], enterprise["same_history"]) == (True, True)
    assert consumers["old"]["retired_reason"] == "replaced"
    assert (consumers["historian"]["committed"], consumers["historian"]["lag"]) == (-1, 300)


def test_one_stream_or_buffer(quick: Run, data: Path) -> None:
    """The overview can be limited to a stream or a buffer, with its consumers."""
    info = quick("inspect", data, "--buffer", "forward", "--json").json()
    assert [log["stream"] for log in info["logs"]] == ["audit"]
    assert [item["name"] for item in info["consumers"]] == ["historian"]
    outcome = quick("inspect", data, "--stream", "nothing")
    assert outcome.code == 1
    assert outcome.err.startswith("error[invalid_argument]: there is no log nothing/*")


def test_export_of_a_range(bsfg: Run, data: Path) -> None:
    """A range is exported as one JSON object a line, both ends included, and can be read back as messages."""
    found = lines(bsfg("inspect", data, *STORE, "--from", "700", "--to", "719", "--export"))
    assert [entry["offset"] for entry in found] == list(range(700, 720))
    expected = messages(20, first=700)
    for entry, message in zip(found, expected, strict=True):
        line = orjson.dumps({"envelope": entry["envelope"], "fact": entry["fact"]})
        assert message_from_json(line) == message
        assert entry["digest"].startswith("sha256:")
        assert entry["appended_at_unix_ms"] > 0


def test_export_of_everything(quick: Run, data: Path) -> None:
    """Without a range everything that is retained is exported, in order and once."""
    found = lines(quick("inspect", data, *STORE, "--export"))
    assert [entry["offset"] for entry in found] == list(range(650, 2000))


def test_export_of_what_is_gone(quick: Run, data: Path) -> None:
    """A range that was truncated is a line that says so."""
    found = lines(quick("inspect", data, *STORE, "--from", "600", "--to", "651", "--export"))
    assert (found[0]["gap"]["first"], found[0]["gap"]["last"], found[0]["gap"]["reason"]) == (600, 649, "truncated")
    assert [entry["offset"] for entry in found[1:]] == [650, 651]


def test_export_of_what_is_damaged(quick: Run, data: Path) -> None:
    """Damaged entries are a line {"gap": …} in their place, and all others are exported."""
    folders.flipped_bit(data)
    found = lines(quick("inspect", data, *STORE, "--export"))
    [gap] = [line["gap"] for line in found if "gap" in line]
    assert gap["reason"] == "damaged"
    offsets = [line["offset"] for line in found if "gap" not in line]
    assert sorted([*offsets, *range(gap["first"], gap["last"] + 1)]) == list(range(650, 2000))


def test_export_carries_origins(quick: Run, data: Path) -> None:
    """Entries of a forward buffer tell where they came from."""
    found = lines(quick("inspect", data, "--stream", "audit", "--to", "1", "--export"))
    assert [entry["origin"]["zone"] for entry in found] == ["plant", "plant"]
    assert [entry["origin"]["offset"] for entry in found] == [0, 1]


@pytest.mark.parametrize(
    ("option", "wanted"),
    [("--subject", "machine:press-3"), ("--subject", "machine:*3"), ("--predicate", "temperature_*")],
)
def test_filters(quick: Run, data: Path, option: str, wanted: str) -> None:
    """A filter keeps exactly the entries that fit; a star stands for any text."""
    found = lines(quick("inspect", data, *STORE, option, wanted, "--export"))
    expected = messages(1350, first=650)
    if option == "--subject":
        expected = [message for message in expected if message.fact.subject == "machine:press-3"]
    assert [entry["envelope"]["message_id"] for entry in found] == [item.envelope.message_id for item in expected]


def test_a_filter_is_not_an_expression(quick: Run, data: Path) -> None:
    """Characters of regular expressions in a filter stand for themselves."""
    assert lines(quick("inspect", data, *STORE, "--subject", "machine.press-[0-9]", "--export")) == []


def test_looking_at_entries(quick: Run, data: Path) -> None:
    """A range without --export is a table of entries; the rest of a long one is counted."""
    outcome = quick("inspect", data, *STORE, "--from", "640", "--to", "655")
    assert outcome.code == 0
    assert "640–649" in outcome.out
    assert "not here: truncated" in outcome.out
    assert all(f" {offset} " in outcome.out for offset in range(650, 656))
    assert "1,300 more; --export" in quick("inspect", data, *STORE, "--from", "650").out
    assert [entry["offset"] for entry in quick("inspect", data, *STORE, "--from", "1998", "--json").json()] == [
        1998,
        1999,
    ]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("--export",), "invalid_argument", "--stream audit --buffer forward"),
        (("--stream", "audit", "--buffer", "store", "--export"), "invalid_argument", "there is no log audit/store"),
        ((*STORE, "--from", "5", "--to", "3", "--export"), "invalid_argument", "--to 3"),
        ((*STORE, "--from", "2001", "--export"), "offset_out_of_range", "2000"),
    ],
)
def test_wrong_ranges(quick: Run, data: Path, args: tuple[str, ...], code: str, says: str) -> None:
    """A range or a log that cannot be is an error that names it."""
    outcome = quick("inspect", data, *args)
    assert outcome.code == 1
    assert outcome.err.startswith(f"error[{code}]: ")
    assert says in outcome.err
    assert outcome.out == ""


def test_a_log_that_cannot_be_read_hides_no_other(bsfg: Run, data: Path) -> None:
    """With a foreign segment in one log the other is still shown, the error is named, and the exit code is 1."""
    folders.foreign_segment(data)
    outcome = bsfg("inspect", data, "--json")
    assert outcome.code == 1
    audit, store = outcome.json()["logs"]
    assert (audit["error"], audit["end"]) == (None, 300)
    assert store["error"]["code"] == "foreign_log"
    shown = bsfg("inspect", data)
    assert shown.code == 1
    assert "✗ foreign_log" in shown.out
    assert "error[foreign_log]: " in shown.err


def test_a_missing_segment_is_shown(quick: Run, data: Path) -> None:
    """The place of a segment file that is gone is marked in the list of segments."""
    folders.missing_segment(data)
    store = quick("inspect", data, "--json").json()["logs"][1]
    assert [(item["first"], item["last"]) for item in store["segments"] if item["missing"]] == [(1200, 1399)]
    assert "MISSING" in quick("inspect", data).out


def test_bytes_set_aside_are_listed(quick: Run, data: Path) -> None:
    """What recovery cut from a torn tail is kept, and inspect shows where."""
    folders.half_a_frame(data)
    asyncio.run(folders.append_more(data, 50))
    store = quick("inspect", data, "--json").json()["logs"][1]
    assert [item["size_bytes"] for item in store["aside"]] == [300]
    assert "bytes kept aside" in quick("inspect", data).out


def test_facts_of_a_zone_are_exported_for_append(quick: Run, data: Path) -> None:
    """--facts leaves gap records out, and --from-zone chooses who said it: every line is one that append reads."""
    options = ("inspect", data, "--stream", folders.STREAM, "--from", 0, "--to", 700, "--export")
    everything = quick(*options).out.splitlines()
    facts = quick(*options, "--from-zone", "plant", "--facts").out.splitlines()
    assert len(everything) == len(facts) + 1 and "gap" in orjson.loads(everything[0])
    assert [message_from_json(line.encode()) for line in facts] == messages(51, first=650)
    assert quick(*options, "--from-zone", "nowhere", "--facts").out == ""
    assert quick("inspect", data, "--facts").err.startswith("error[invalid_argument]: --facts")
