"""`bsfg append`, `fetch` and `confirm`, as a user types them, against a real node."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.e2e.zones import Zone

from bsfg.cli import main
from bsfg.jsonform import message_to_dict
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.testing.facts import altered, message, messages


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def lines(self) -> list[Any]:
        """What it printed, as JSON Lines."""
        return [orjson.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Outcome]


@pytest.fixture
def bsfg(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give what runs a command inside this process."""
    for name in [name for name in os.environ if name.startswith("BSFG_")]:
        monkeypatch.delenv(name)

    def run(*args: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def beside(zone: Zone, monkeypatch: pytest.MonkeyPatch) -> Zone:
    """Give a zone whose configuration lies in the present folder."""
    monkeypatch.chdir(zone.folder)
    return zone


def lines(*forms: object) -> bytes:
    """Write JSON Lines."""
    return b"".join(
        form + b"\n" if isinstance(form, bytes) else orjson.dumps(form, option=orjson.OPT_APPEND_NEWLINE)
        for form in forms
    )


def forms(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Give facts of the zone in their JSON form."""
    return [message_to_dict(each) for each in messages(count, first=first)]


def consumer(zone: Zone, name: str) -> None:
    """Create a durable consumer of what the zone itself produced."""

    async def create() -> None:
        async with zone.admin() as admin:
            await admin.create_consumer(ConsumerSpec(name, "operational", Buffer.STORE))

    asyncio.run(create())


def test_facts_go_in_and_come_out_again(bsfg: Run, beside: Zone) -> None:
    """What append takes, fetch writes: the same facts, in order; confirming moves on."""
    done = bsfg("append", "-", "--stream", "operational", stdin=lines(*forms(250)))
    assert (done.code, done.out) == (0, "250 facts: 250 stored.\n"), done.err
    assert beside.messages(Buffer.STORE) == messages(250)
    consumer(beside, "app-1")
    shown = bsfg("fetch", "app-1")
    assert [line["offset"] for line in shown.lines()] == list(range(100))
    assert shown.lines()[7]["fact"] == orjson.loads(orjson.dumps(forms(8)[7]["fact"]))
    taken = bsfg("fetch", "app-1", "--limit", 120, "--confirm")
    assert [line["offset"] for line in taken.lines()] == list(range(120))
    confirmed = bsfg("confirm", "app-1", 129)
    assert "confirmed through offset 129" in confirmed.out
    ranges = bsfg("confirm", "app-1", "--ranges", "131-140,150", "--json")
    assert orjson.loads(ranges.out) == {"consumer": "app-1", "cursor_advanced_to": 129}
    assert orjson.loads(bsfg("confirm", "app-1", 130, "--json").out)["cursor_advanced_to"] == 140
    rest = bsfg("fetch", "app-1", "--limit", 1000, "--confirm")
    assert [line["offset"] for line in rest.lines()] == list(range(141, 250))
    assert bsfg("fetch", "app-1", "--wait", 0.1).out == ""
    again = bsfg("append", "-", "--stream", "operational", "--json", stdin=taken.out.encode())
    assert orjson.loads(again.out) | {"refusals": []} == {
        "stream": "operational", "facts": 120, "inserted": 0, "already_exists": 120, "kept": 0, "refused": 0,
        "refusals": [],
    }  # fmt: skip


def test_a_bad_line_does_not_stop_the_others(bsfg: Run, beside: Zone, tmp_path: Path) -> None:
    """Each line has its own result; those that are refused are named by number, and the exit code says so."""
    path = tmp_path / "facts.jsonl"
    good, (other,) = forms(3), [message_to_dict(each) for each in altered(messages(1))]
    no_zone = {"envelope": {"message_id": "x"}, "fact": {"subject": "a:b", "predicate": "c", "object": 1}}
    bad_subject = message_to_dict(message("y", subject="NO"))
    path.write_bytes(b"\xef\xbb\xbf" + lines(good[0], b"", b"{not json", no_zone, bad_subject, other, good[1]))
    done = bsfg("append", path, "--stream", "operational", "--results")
    assert done.code == 1
    assert [(line["line"], line["result"]) for line in done.lines()] == [
        (1, "inserted"), (3, "refused"), (4, "refused"), (5, "refused"), (6, "refused"), (7, "inserted")
    ]  # fmt: skip
    codes = [line["error"]["code"] for line in done.lines() if line["result"] == "refused"]
    assert codes == ["invalid_fact", "invalid_fact", "invalid_fact", "conflicting_duplicate"]
    assert "line 4: error[invalid_fact]: to_zone: is required" in done.err
    assert "6 facts: 2 stored, 4 refused." in done.err
    assert done.lines()[0]["digest"].startswith("sha256:")
    filled = bsfg("append", path, "--stream", "operational", "--to-zone", "enterprise")
    assert filled.out == "6 facts: 1 stored, 2 were there already, 3 refused.\n"
    assert beside.messages(Buffer.STORE)[-1].envelope.from_zone == "plant"


def test_errors_that_concern_all_lines_stop_at_once(bsfg: Run, beside: Zone) -> None:
    """An unknown stream, a right that is missing and an absent node are told once, with what was stored before."""
    unknown = bsfg("append", "-", "--stream", "nowhere", stdin=lines(*forms(3)))
    assert (unknown.code, unknown.out) == (1, "")
    assert "error[unknown_stream]" in unknown.err
    assert "Nothing was stored." in unknown.err
    foreign = bsfg("append", "-", "--stream", "operational", "--identity", "plant-consumer", stdin=lines(*forms(3)))
    assert "error[permission_denied]" in foreign.err
    nobody = bsfg("fetch", "app-9")
    assert (nobody.code, nobody.out) == (1, "")
    assert "error[unknown_consumer]" in nobody.err
    beside.kill()
    away = bsfg("append", "-", "--stream", "operational", "--timeout", 0.5, stdin=lines(*forms(3)))
    assert away.code == 1
    assert "waiting: " in away.err
    assert "error[peer_unreachable]" in away.err
    assert "nobody listens there" in away.err.splitlines()[-2]
    assert bsfg("fetch", "app-1", "--timeout", 0.5).code == 1
    assert "error[peer_unreachable]" in bsfg("confirm", "app-1", 1).err


def test_the_outbox_keeps_what_cannot_be_sent(bsfg: Run, beside: Zone) -> None:
    """With an outbox an absent node is no error; the next command with the same folder brings the facts."""
    beside.kill()
    options = ("--stream", "operational", "--outbox", "outbox", "--timeout", 0.5)
    kept = bsfg("append", "-", *options, "--results", stdin=lines(*forms(5)))
    assert kept.code == 0, kept.err
    assert {line["result"] for line in kept.lines()} == {"kept_in_outbox"}
    assert "5 kept in the outbox" in kept.err
    beside.start()
    sent = bsfg("append", "-", "--stream", "operational", "--outbox", "outbox", stdin=lines(*forms(2, first=5)))
    assert sent.out == "2 facts: 2 stored.\n"
    assert beside.messages(Buffer.STORE) == messages(7)


def test_following(bsfg: Run, beside: Zone) -> None:
    """A follower writes facts as they come, one line each, and confirms what it wrote."""
    consumer(beside, "app-1")
    assert "needs --confirm" in bsfg("fetch", "app-1", "--follow").err
    command = [sys.executable, "-m", "bsfg", "fetch", "app-1", "--follow", "--confirm", "--limit", "6"]
    follower = subprocess.Popen(command, cwd=beside.folder, stdout=subprocess.PIPE)
    assert follower.stdout is not None
    for first in (0, 3):
        bsfg("append", "-", "--stream", "operational", stdin=lines(*forms(3, first=first)))
        assert [orjson.loads(follower.stdout.readline())["offset"] for _ in range(3)] == list(range(first, first + 3))
    assert follower.wait(60) == 0
    follower.stdout.close()
    assert bsfg("fetch", "app-1").out == ""


def test_a_reader_that_has_seen_enough(bsfg: Run, beside: Zone) -> None:
    """A closed pipe ends a fetch quietly, and confirms only what was written out before."""
    bsfg("append", "-", "--stream", "operational", stdin=lines(*forms(900)))
    consumer(beside, "app-1")
    command = [sys.executable, "-m", "bsfg", "fetch", "app-1", "--limit", "900", "--confirm"]
    process = subprocess.Popen(command, cwd=beside.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    rest = bsfg("fetch", "app-1", "--limit", 900).lines()
    assert [line["offset"] for line in rest] == list(range(rest[0]["offset"], 900))
    assert 0 < len(rest) <= 900


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("confirm", "app-1"), "nothing is to be confirmed"),
        (("confirm", "app-1", "--ranges", "5-x"), "neither an offset nor a range"),
        (("confirm", "app-1", "--ranges", "5-3"), "ends before it begins"),
        (("append", "none.jsonl", "--stream", "operational"), "cannot be read"),
        (("append", "--stream", "operational", "--json", "--results"), "both want to print"),
    ],
)
def test_wrong_use_is_explained(bsfg: Run, args: tuple[object, ...], says: str) -> None:
    """What cannot be meant is refused with a sentence, and never with a traceback."""
    done = bsfg(*args, "--address", "127.0.0.1:1")
    assert done.code == 1
    assert says in done.err
    assert "Traceback" not in done.err
