"""What a status means and how it is drawn, for whatever a node may answer."""

from __future__ import annotations

import copy
import re
from io import StringIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bsfg
from bsfg.cli.output import CleanConsole
from bsfg.cli.status import bar, render
from bsfg.node.status import HealthLevel, as_json, autonomy, findings, pipeline_level, worst
from bsfg.wording import duration_text, hours_text, offset_text

NOW = 1_800_000_000_000

BUFFER: dict[str, Any] = {
    "stream": "operational",
    "buffer": "store",
    "log_id": "ab",
    "start": 0,
    "end": 5_000,
    "used_bytes": 10,
    "capacity_bytes": 10 << 30,
    "fill_percent": 1.0,
    "fill": "healthy",
    "oldest_unix_ms": NOW,
    "newest_unix_ms": NOW,
    "gaps": 0,
    "quarantined": 0,
    "chain_head": "",
    "facts_per_second": 100.0,
    "hours_left": 52.0,
    "oldest_unconfirmed_seconds": 3 * 86_400.0,
    "max_age_seconds": 7 * 86_400.0,
    "expiry_near": False,
}
CONSUMER: dict[str, Any] = {
    "name": "enterprise.operational",
    "stream": "operational",
    "buffer": "store",
    "required": True,
    "committed": 4_999,
    "backlog": 0,
    "retired_reason": None,
    "last_fetch_unix_ms": NOW - 40,
}
REPORT: dict[str, Any] = {
    "stream": "operational",
    "at_unix_ms": NOW - 100,
    "backlog": 0,
    "lag_seconds": 0.01,
    "inserted": 1,
    "repeated": 0,
    "refused": 0,
}
LINK: dict[str, Any] = {
    "link": "from-enterprise",
    "side": "receiver",
    "mode": "normal",
    "since_unix_ms": NOW,
    "reason": "",
    "held_by": "",
    "held_until_unix_ms": None,
    "lease": "native",
    "reports": [REPORT],
}
DOCUMENT: dict[str, Any] = {
    "zone": "plant-a",
    "version": bsfg.__version__,
    "now_unix_ms": NOW,
    "started_unix_ms": NOW - 3_600_000,
    "buffers": [BUFFER],
    "consumers": [CONSUMER],
    "links": [LINK],
    "artifacts": None,
    "alerts": [],
}


def document(**changes: Any) -> dict[str, Any]:
    """Give a healthy document with some values of its first buffer, consumer, link or report changed."""
    result = copy.deepcopy(DOCUMENT)
    places = {
        "buffer": result["buffers"][0],
        "consumer": result["consumers"][0],
        "link": result["links"][0],
        "report": result["links"][0]["reports"][0],
    }
    for name, value in changes.items():
        place, _, key = name.partition("__")
        (places[place] if key else result)[key or name] = value
    return result


def levels(found: dict[str, Any]) -> dict[str, str]:
    """Give the level of each kind of finding."""
    return {each.alert: str(each.level) for each in findings(found)}


def drawn(found: dict[str, Any], width: int) -> str:
    """Draw a document without colours."""
    file = StringIO()
    console = CleanConsole(file=file, width=width, color_system=None, highlight=False, emoji=False)
    console.print(render(found, width=width))
    return file.getvalue()


def test_a_healthy_node_has_no_findings() -> None:
    """A node that is as it should be needs nobody."""
    assert findings(document()) == []
    assert worst([]) == HealthLevel.OK
    assert as_json(document())["health"] == "ok"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"report__lag_seconds": 0.099}, {}),
        ({"report__lag_seconds": 0.1}, {"replication_lag": "warning"}),
        ({"report__lag_seconds": 1.0}, {"replication_lag": "warning"}),
        ({"report__lag_seconds": 1.01}, {"replication_lag": "alert"}),
        ({"report__lag_seconds": 900.0, "report__at_unix_ms": NOW - 61_000}, {}),
        ({"report__lag_seconds": None}, {}),
        ({"consumer__backlog": 100}, {}),
        ({"consumer__backlog": 101}, {"consumer_backlog": "warning"}),
        ({"consumer__backlog": 10_000}, {"consumer_backlog": "warning"}),
        ({"consumer__backlog": 10_001}, {"consumer_backlog": "alert"}),
        ({"consumer__backlog": 10_001, "consumer__retired_reason": "gone"}, {}),
        ({"buffer__fill": "warning", "buffer__fill_percent": 61.0}, {"buffer_fill": "warning"}),
        ({"buffer__fill": "alert", "buffer__fill_percent": 81.0}, {"buffer_fill": "alert"}),
        ({"buffer__quarantined": 3}, {"quarantine": "alert"}),
        ({"buffer__expiry_near": True}, {"expiry_near": "alert"}),
        ({"buffer__gaps_full": True}, {"gaps_full": "alert"}),
        ({"buffer__quarantine_full": True}, {"quarantine_full": "alert"}),
        ({"link__mode": "held", "link__held_by": "ops"}, {"gate_held": "alert"}),
        ({"link__mode": "autonomous"}, {"link_autonomous": "warning"}),
        ({"link__mode": "reconciliation"}, {"link_reconciliation": "warning"}),
        ({"buffer__hours_left": 3.0}, {}),
        (
            {"buffer__hours_left": 3.0, "link__side": "sender", "link__mode": "autonomous"},
            {"autonomy": "warning", "link_autonomous": "warning"},
        ),
    ],
)
def test_each_value_is_judged_by_the_table_of_health(changes: dict[str, Any], expected: dict[str, str]) -> None:
    """Lag, backlog, fill, modes, quarantine and autonomy count as the reference says, on both sides of each limit."""
    assert levels(document(**changes)) == expected


def test_the_nodes_own_word_stands() -> None:
    """An alert that the node raised replaces what its values show, and one of its own is added, the worst first."""
    raised = [
        {"alert": "buffer_fill", "about": "operational/store", "severity": "alert", "text": "full", "since_unix_ms": 1},
        {"alert": "aaa", "about": "x", "severity": "warning", "text": "hm", "since_unix_ms": 1},
    ]
    found = findings(document(buffer__fill="warning", alerts=raised))
    assert [(each.alert, each.level, each.says) for each in found] == [
        ("buffer_fill", HealthLevel.ALERT, "full"),
        ("aaa", HealthLevel.WARNING, "hm"),
    ]


def test_autonomy_is_that_of_the_buffer_which_is_full_first() -> None:
    """Only store buffers that grow count: a forward buffer that fills does not end autonomy."""
    found = document()
    found["buffers"] += [
        {**BUFFER, "stream": "audit", "hours_left": 7.5},
        {**BUFFER, "stream": "documents", "hours_left": None},
        {**BUFFER, "buffer": "forward", "hours_left": 0.1},
    ]
    assert autonomy(found) == ("audit", 7.5)
    assert as_json(found)["autonomy_hours"] == 7.5
    assert "7.5 h at the rate of the last minute (audit)" in drawn(found, 100)
    assert autonomy(document(buffer__hours_left=None)) is None
    assert "no store buffer grew" in drawn(document(buffer__hours_left=None), 100)
    unknown = drawn(document(buffer__hours_left=None, buffer__facts_per_second=None), 100)
    assert "autonomy: not known yet" in unknown and " unknown " in unknown


def test_what_nobody_has_confirmed_has_no_offset() -> None:
    """Before the first fact the frontier is a dash, as on the dashboard, and not one less than nothing."""
    text = drawn(document(consumer__committed=-1), 120)
    assert " -1 " not in text and " – " in text
    assert (offset_text(-1), offset_text(0), offset_text(12345)) == ("–", "0", "12345")


def test_findings_are_sentences() -> None:
    """One fact waits, two wait; a link is autonomous, or in reconciliation."""
    for changed, says in (
        ({"buffer__quarantined": 1}, "1 fact waits in quarantine for a decision, in operational/store"),
        ({"buffer__quarantined": 2}, "2 facts wait in quarantine for a decision, in operational/store"),
        ({"link__mode": "autonomous"}, "from-enterprise is autonomous"),
        ({"link__mode": "reconciliation"}, "from-enterprise is in reconciliation"),
    ):
        assert any(each.says.startswith(says) for each in findings(document(**changed))), says


def test_everything_of_a_wide_terminal_is_shown() -> None:
    """Streams, fill, frontier, backlog, mode, lag and who moves a link are there, and each in a word."""
    text = drawn(document(link__mode="reconciliation", report__backlog=1_234), 120)
    for word in (
        "operational/store",
        "1.0 % of 10.0 GiB",
        "52 h",
        "3 d of 7 d",
        "enterprise.operational",
        "4999",
        "required",
    ):
        assert word in text
    for word in ("from-enterprise", "receiver", "reconciliation", "10 ms", "1,234", "native", "0–4999", "● warning"):
        assert word in text


PIPELINE: dict[str, Any] = {
    "pipeline": "lake",
    "kind": "land",
    "state": "running",
    "runs": 2,
    "failures": 1,
    "facts": 12_000,
    "next_unix_ms": 0,
    "progress": "12,000 facts landed",
    "last_error": "disk_full: no room",
}


@pytest.mark.parametrize("width", [60, 120])
def test_pipelines_are_shown_with_what_they_do_or_why_not(width: int) -> None:
    """One that works says how far it is, any other what went wrong; nodes of earlier versions know none."""
    text = drawn(document(pipelines=[PIPELINE]), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for word in ("Pipelines", "lake (land)", "running", "lake: 12,000 facts landed"):
        assert word in text
    assert "disk_full" not in text
    failed = {**PIPELINE, "state": "failed", "next_unix_ms": NOW + 5_000}
    assert "lake: disk_full: no room" in drawn(document(pipelines=[failed]), width)
    assert [str(pipeline_level(state)) for state in ("waiting", "failed", "unknown", "dead")] == [
        "ok",
        "warning",
        "warning",
        "alert",
    ]
    assert "Pipelines" not in drawn(document(), width)


def test_sixty_columns_are_enough() -> None:
    """On a narrow terminal nothing is wider than it, and nothing that matters is left out."""
    text = drawn(document(link__mode="reconciliation"), 60)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 60
    for word in ("operational/store", "52 h", "enterprise.operational", "4999", "reconciliation", "10 ms", "native"):
        assert word in text


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_word_is_broken(width: int) -> None:
    """At every common width names, bars and times are whole; what has no room is left out as a column."""
    text = drawn(document(link__mode="reconciliation"), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for word in ("operational/store", "enterprise.operational", "reconciliation", "52 h", "1.0 %"):
        assert word in text
    bars = {len(bar) for bar in re.findall("[█░]+", text)}
    assert bars <= {8, 20}, "a bar goes on in another line"


@pytest.mark.parametrize("width", [60, 80])
def test_a_buffer_that_is_full_in_ages_breaks_no_word(width: int) -> None:
    """Long words in one column take the room of the bars, not that of the names."""
    text = drawn(document(buffer__buffer="forward", buffer__hours_left=1e6, buffer__facts_per_second=0.01), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for word in ("operational/forward", "over 10 years", "< 0.1/s", "1.0 %"):
        assert word in text


NAMES = st.text(alphabet="abz0._-", min_size=1, max_size=64)
WORDS = st.text(max_size=80)
COUNTS = st.integers(0, 10**15)
DOCUMENTS = st.fixed_dictionaries(
    {
        "zone": NAMES,
        "version": NAMES,
        "now_unix_ms": st.just(NOW),
        "started_unix_ms": st.integers(0, NOW),
        "buffers": st.lists(
            st.fixed_dictionaries(
                {
                    "stream": NAMES,
                    "buffer": st.sampled_from(["store", "forward"]),
                    "start": st.integers(0, 10),
                    "end": COUNTS,
                    "capacity_bytes": COUNTS,
                    "fill_percent": st.floats(0, 120),
                    "fill": st.sampled_from(["healthy", "warning", "alert"]),
                    "gaps": COUNTS,
                    "quarantined": COUNTS,
                    "facts_per_second": st.none() | st.floats(0, 1e9),
                    "hours_left": st.none() | st.floats(0, 1e12),
                }
            ),
            max_size=3,
        ),
        "consumers": st.lists(
            st.fixed_dictionaries(
                {
                    "name": NAMES,
                    "stream": NAMES,
                    "buffer": st.sampled_from(["store", "forward"]),
                    "required": st.booleans(),
                    "committed": st.integers(-1, 10**15),
                    "backlog": COUNTS,
                    "retired_reason": st.none() | WORDS,
                    "last_fetch_unix_ms": st.none() | st.integers(0, NOW + 1000),
                }
            ),
            max_size=3,
        ),
        "links": st.lists(
            st.fixed_dictionaries(
                {
                    "link": NAMES,
                    "side": st.sampled_from(["receiver", "sender"]),
                    "mode": st.sampled_from(["normal", "autonomous", "reconciliation", "held"]),
                    "reason": WORDS,
                    "held_by": WORDS,
                    "lease": st.none() | WORDS,
                    "reports": st.lists(
                        st.fixed_dictionaries(
                            {
                                "stream": NAMES,
                                "at_unix_ms": st.integers(0, NOW),
                                "backlog": COUNTS,
                                "lag_seconds": st.none() | st.floats(0, 1e9),
                            }
                        ),
                        max_size=2,
                    ),
                }
            ),
            max_size=3,
        ),
        "alerts": st.lists(
            st.fixed_dictionaries({"alert": NAMES, "about": WORDS, "severity": NAMES, "text": WORDS}), max_size=2
        ),
    }
)


@settings(max_examples=60)
@given(DOCUMENTS, st.sampled_from([60, 75, 76, 120, 200]))
def test_any_status_can_be_drawn_and_judged(found: dict[str, Any], width: int) -> None:
    """Whatever names, numbers and words a node answers with, the picture has its width and the judgement its level."""
    text = drawn(found, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    health = as_json(found)
    assert health["health"] in ("ok", "warning", "alert")
    assert (health["health"] == "ok") == (health["findings"] == [])


def test_words_of_others_cannot_speak_to_the_terminal() -> None:
    """A reason that another zone gave may hold escape sequences and marks that turn text round; none is printed."""
    found = document()
    found["links"][0]["mode"] = "held"
    found["links"][0]["reason"] = "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe\x9b31m\r\nforged"
    text = drawn(found, 200)
    assert "gnp.exe" in text
    assert not set(text) & set("\x1b\x07\x9b\r\u202e")


@given(st.floats(0, 200), st.integers(1, 40))
def test_a_bar_has_its_width(percent: float, width: int) -> None:
    """A bar is as long as asked, empty below half a percent, and full only when there is no room."""
    text = bar(percent, width, "green").plain
    assert len(text) == width
    assert ("█" in text) == (percent >= 0.5 or round(percent * width / 100) > 0)
    if percent >= 100:
        assert "░" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12 ms"),
        (1, "1 s"),
        (1.238, "1.24 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7_200, "2 h"),
        (172_800, "2 d"),
    ],
)
def test_spans_of_time_have_a_fitting_unit(seconds: float, text: str) -> None:
    """A span is written in the unit that leaves two or three digits."""
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("hours", "text"), [(0.25, "15 min"), (9.96, "10.0 h"), (52.4, "52 h"), (100.0, "4 days"), (1e7, "over 10 years")]
)
def test_hours_become_days_when_there_are_many(hours: float, text: str) -> None:
    """Autonomy is written in hours, and in days when it is long."""
    assert hours_text(hours) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"link__mode": "held", "link__held_by": "ops"},
        {"link__mode": "autonomous"},
        {"link__lease": None},
        {"link__trouble": "native holds it and does not move it"},
        {"report__at_unix_ms": NOW - 61_000},
        {"link__reports": []},
    ],
)
def test_a_link_that_does_not_move_has_no_lag_and_nothing_to_come(changes: dict[str, Any]) -> None:
    """However good its last word was: what is not known now is unknown, with the time of that word."""
    found = document(report__lag_seconds=5.0, **changes)
    link = as_json(found)["links"][0]
    assert (link["lag_seconds"], link["lag"], link["to_come"]) == (None, None, None)
    reports = found["links"][0]["reports"]
    assert link["told_unix_ms"] == (reports[0]["at_unix_ms"] if reports else None)
    assert "replication_lag" not in levels(found)
    line = next(line for line in drawn(found, 120).splitlines() if line.startswith(" from-enterprise"))
    assert line.split().count("unknown") == 2 and " 0 " not in line


def test_a_link_that_moves_is_judged_by_the_lag_that_is_shown() -> None:
    """The number, its level and the finding are one; a link that has nothing to bring has no lag and is no trouble."""
    link = as_json(document(report__lag_seconds=0.0996))["links"][0]
    assert (duration_text(link["lag_seconds"]), link["lag"], link["to_come"]) == ("100 ms", "warning", 0)
    assert as_json(document(report__lag_seconds=1.004))["links"][0]["lag"] == "warning", "it is shown as 1 s"
    assert as_json(document(report__lag_seconds=1.006))["links"][0]["lag"] == "alert"
    idle = as_json(document(report__lag_seconds=None))["links"][0]
    assert (idle["lag_seconds"], idle["lag"], idle["to_come"]) == (None, None, 0)
    assert as_json(document(link__side="sender"))["links"][0]["to_come"] is None
