"""Operators' commands against real nodes under mutual TLS: status, gates, consumers, quarantine, artifacts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from tests.cli.operating.conftest import Cli
from tests.e2e.zones import SETTLE_SECONDS, Zone, pair, until

from bsfg.jsonform import message_from_json, message_to_dict
from bsfg.node.status import findings
from bsfg.ports import Buffer, OriginSpan
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import altered, batch, messages, sealed

# Two zones serve all tests here, and take a minute until nothing is left to see but what is wrong: once is enough.
pytestmark = pytest.mark.xdist_group("operating")

FACTS = 300
CONFLICTS = altered(messages(4, seed=9, from_zone="enterprise"))
LATE = messages(1, seed=10, from_zone="enterprise")
VIEWER = ("--identity", "plant-a-viewer")


async def quarantine(zone: Zone) -> None:
    """Put four facts and then others with their ids into a forward buffer, and set one aside as too old."""
    storage = await LogStorage.open(zone.data)
    forward = await storage.forward("operational")
    for facts in (messages(4, seed=9, from_zone="enterprise"), CONFLICTS):
        origin = OriginSpan("enterprise", np.arange(4), np.full(4, time.time_ns() // 10**6))
        await forward.put_if_absent(sealed(facts), origin)
    await forward.set_aside(sealed(LATE), "expired", "older than the link allows")
    await storage.close()


@pytest.fixture(scope="module")
def zones(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Zone, Zone]]:
    """Two zones that pull from each other, one of them with facts in quarantine."""
    plant, enterprise = pair(tmp_path_factory.mktemp("operating"))
    asyncio.run(quarantine(plant))

    async def produce() -> None:
        async with enterprise.client() as client:
            await client.append("operational", batch(FACTS, from_zone="enterprise"))
        await until(lambda: plant.end(Buffer.FORWARD) == FACTS + 4)
        await plant.mode("from-enterprise", "normal")
        await plant.mode("enterprise", "normal", "sender")

    try:
        plant.start()
        enterprise.start()
        asyncio.run(produce())
        calm(plant)
        yield plant, enterprise
    finally:
        plant.kill()
        enterprise.kill()


def calm(zone: Zone) -> None:
    """Wait until only quarantine is left to see: on a busy machine the first facts take longer than they should."""

    async def status() -> dict[str, Any]:
        async with zone.admin() as admin:
            return await admin.status()

    deadline = time.monotonic() + SETTLE_SECONDS
    while [each.alert for each in findings(asyncio.run(status()))] != ["quarantine"]:
        assert time.monotonic() < deadline, findings(asyncio.run(status()))
        time.sleep(0.5)


@pytest.fixture
def plant(zones: tuple[Zone, Zone], monkeypatch: pytest.MonkeyPatch) -> Zone:
    """The zone that commands are for: they are given in its folder."""
    monkeypatch.chdir(zones[0].folder)
    return zones[0]


# Status.


def test_status_shows_streams_consumers_links_and_what_needs_attention(cli: Cli, plant: Zone) -> None:
    """One look shows everything; quarantine is an alert until somebody decides, and the exit code tells it."""
    done = cli("status")
    assert (done.code, done.err) == (1, "")
    for word in ("plant-a", "● ALERT", "operational/forward", "enterprise.operational", "from-enterprise", "native"):
        assert word in done.out
    assert "5 in quarantine of operational/forward" in done.out
    found = cli("status", "--json")
    assert found.code == 1
    assert found.json["health"] == "alert"
    assert {link["mode"] for link in found.json["links"]} == {"normal"}
    assert [each["alert"] for each in found.json["findings"]] == ["quarantine"]


def test_status_fits_into_sixty_columns(cli: Cli, plant: Zone) -> None:
    """On a narrow terminal no line is wider than it."""
    done = cli("status", columns=60)
    assert "ALERT" in done.out
    assert max(len(line.rstrip()) for line in done.out.splitlines()) <= 60


def test_a_held_gate_is_an_alert_and_exit_code_1(cli: Cli, plant: Zone) -> None:
    """What is in alert is named with its reason, and a script sees it in the exit code."""
    assert cli("gate", "hold", "from-enterprise", "--reason", "works").code == 0
    try:
        done = cli("status")
        assert done.code == 1
        assert "ALERT gate_held: from-enterprise is held by plant-a-operator: works" in done.out
        assert cli("status", "--json").json["health"] == "alert"
    finally:
        assert cli("gate", "release", "from-enterprise", "--reason", "done").code == 0


def test_status_can_be_watched_by_a_program(plant: Zone) -> None:
    """With --watch and --json every line is a whole document, and Ctrl-C ends it with the last exit code."""
    command = [sys.executable, "-m", "bsfg", "status", "--watch", "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        seen = [orjson.loads(running.stdout.readline()) for _ in range(3)]
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 1
        assert running.stderr.read() == b""
    assert [found["zone"] for found in seen] == ["plant-a"] * 3
    assert seen[0]["now_unix_ms"] < seen[2]["now_unix_ms"]


def test_status_can_be_watched_by_a_person(plant: Zone) -> None:
    """On a terminal the picture is replaced in place, and the terminal is given back at the end."""
    main, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    command = [sys.executable, "-m", "bsfg", "status", "--watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as running:
        os.close(end)
        shown = b""
        while shown.count(b"plant-a") < 2:
            shown += os.read(main, 65_536)
        running.send_signal(signal.SIGINT)
        try:
            while data := os.read(main, 65_536):
                shown += data
        except OSError:
            pass
        assert running.wait(30) == 1
    os.close(main)
    assert b"\x1b[?1049h" in shown and b"\x1b[?1049l" in shown
    assert b"Traceback" not in shown


def test_a_node_that_is_away_is_watched_too(tmp_path: Path) -> None:
    """Watching goes on while the node cannot be reached, says so, and ends with 1."""
    plant, _ = pair(tmp_path)
    command = [sys.executable, "-m", "bsfg", "status", "-w", "--json", "--interval", "0.1", "-c"]
    with subprocess.Popen([*command, str(plant.folder / "zone.toml")], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        errors = [orjson.loads(running.stdout.readline())["error"] for _ in range(2)]
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 1
    assert [error["code"] for error in errors] == ["peer_unreachable"] * 2
    assert "nobody listens there" in errors[0]["message"]


# Who may, and who answers.


@pytest.mark.parametrize(
    "command",
    [
        ("gate", "hold", "from-enterprise", "--reason", "x"),
        ("consumers", "add", "app-x", "--stream", "operational"),
        ("consumers", "retire", "enterprise.operational", "--reason", "x", "--yes"),
        ("streams", "truncate", "operational", "--before", "1", "--reason", "x", "--yes"),
        ("quarantine", "retry", "--all", "--reason", "x"),
        ("quarantine", "drop", "--all", "--reason", "x", "--yes"),
    ],
)
def test_a_viewer_may_not_act(cli: Cli, plant: Zone, command: tuple[str, ...]) -> None:
    """A viewer's attempt is refused with the role that it would need, is on record, and changes nothing."""
    before = len(plant.events("request_refused", identity="plant-a-viewer"))
    done = cli(*command, *VIEWER, "--json")
    assert done.code == 1
    assert done.json["code"] == "permission_denied"
    assert "'plant-a-viewer' may not act: its roles are viewer, it would need operator" in done.err
    # Five of a kind are told in a minute, the rest are counted.
    asyncio.run(plant.seen("request_refused", count=min(before + 1, 5), identity="plant-a-viewer"))
    assert "held" not in {view["mode"] for view in cli("gate", "--json").json}


@pytest.mark.parametrize(
    ("identity", "code", "says"),
    [
        ("plant-a-producer", "permission_denied", "it would need pipeline or operator or viewer"),
        ("enterprise-bsfg", "permission_denied", "its roles are peer"),
    ],
)
def test_a_wrong_role_is_named(cli: Cli, plant: Zone, identity: str, code: str, says: str) -> None:
    """Whoever has no business here is told which role he has and which he would need."""
    done = cli("gate", "--identity", identity)
    assert done.code == 1
    assert f"error[{code}]" in done.err and says in done.err


def address(zone: Zone, identity: str, certs: Path | None = None) -> list[str]:
    """Give the options that name a node and a certificate without its file."""
    folder = certs or zone.certs
    return [
        *("--address", f"127.0.0.1:{zone.port}", "--ca", str(zone.certs / "ca.crt")),
        *("--cert", str(folder / f"{identity}.crt"), "--key", str(folder / f"{identity}.key")),
    ]


def test_a_certificate_of_another_zone_is_unknown(cli: Cli, plant: Zone) -> None:
    """A certificate of the same authority that is not in the table is refused by its name."""
    done = cli("gate", *address(plant, "enterprise-operator"), "--server-name", "plant-a-bsfg")
    assert done.code == 1
    assert "error[identity_unknown]: 'enterprise-operator' is not in [identities]" in done.err


def test_a_server_that_is_another_is_named(cli: Cli, plant: Zone) -> None:
    """Who answers instead of the node that is meant is told, not only that the call failed."""
    done = cli("gate", *address(plant, "plant-a-operator"), "--server-name", "enterprise-bsfg")
    assert done.code == 1
    assert "error[server_identity_mismatch]" in done.err
    assert "is plant-a-bsfg, not enterprise-bsfg" in done.err


def test_a_certificate_of_another_authority_is_refused(cli: Cli, plant: Zone, tmp_path: Path) -> None:
    """The node ends the connection when it sees the certificate, and the error says that it was the certificate."""
    assert cli("certs", "init-ca", tmp_path).code == 0
    assert cli("certs", "issue", tmp_path, "plant-a-operator").code == 0
    done = cli("gate", *address(plant, "plant-a-operator", tmp_path), "--server-name", "plant-a-bsfg")
    assert done.code == 1
    assert "error[certificate_invalid]" in done.err and "our certificate" in done.err


def test_a_call_without_tls_says_what_is_missing(cli: Cli, plant: Zone) -> None:
    """A node that wants TLS is not called unreachable."""
    done = cli("gate", "--address", f"127.0.0.1:{plant.port}")
    assert done.code == 1
    assert "does not answer calls without TLS" in done.err


# Gates.


def test_a_gate_is_held_and_released_with_reasons(cli: Cli, plant: Zone) -> None:
    """A hold has its operator, reason and end; the list shows them; a release lets the link go on."""
    start_ms = time.time_ns() // 10**6
    held = cli("gate", "hold", "from-enterprise", "--reason", "firewall works", "--for", "2h", "--json").json
    assert (held["mode"], held["held_by"], held["reason"]) == ("held", "plant-a-operator", "firewall works")
    assert 0 <= held["held_until_unix_ms"] - start_ms - 7_200_000 < 600_000
    listed = cli("gate")
    assert listed.code == 0
    assert "firewall works (plant-a-operator, until " in listed.out
    done = cli("gate", "release", "from-enterprise", "-r", "works are done")
    assert (done.code, "is released" in done.out) == (0, True)
    asyncio.run(plant.mode("from-enterprise", "normal"))


def test_a_hold_is_not_replaced_unseen(cli: Cli, plant: Zone) -> None:
    """A second hold is told of the first one, and replaces it only when that is said."""
    assert cli("gate", "hold", "enterprise", "--reason", "first").code == 0
    again = cli("gate", "hold", "enterprise", "--reason", "second")
    assert again.code == 1
    assert "error[gate_held]" in again.err and "by plant-a-operator" in again.err and ": first" in again.err
    assert cli("gate", "hold", "enterprise", "--reason", "second", "--replace", "--json").json["reason"] == "second"
    assert cli("gate", "release", "enterprise", "--reason", "done", "--side", "sender").code == 0


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("hold", "from-entrprise", "--reason", "x"), "unknown_link", "Did you mean 'from-enterprise'?"),
        (("hold", "enterprise", "--reason", "x", "--side", "receiver"), "unknown_link", "on the receiver's side"),
        (("release", "from-enterprise", "--reason", "x"), "invalid_transition", "is not held, it is normal"),
        (("hold", "from-enterprise", "--reason", " "), "invalid_argument", "--reason is empty"),
        (("release", "from-enterprise", "--reason", ""), "invalid_argument", "--reason is empty"),
        (("hold", "from-enterprise", "--reason", "x", "--for", "2"), "invalid_argument", "--for must be a duration"),
        (("hold", "from-enterprise", "--reason", "x", "--for", "0s"), "invalid_argument", "--for must be longer"),
        (("hold", "from-enterprise"), "usage", "--reason"),
        (("hold", "from-enterprise", "--reason", "x", "--side", "left"), "usage", "--side"),
    ],
)
def test_wrong_words_to_a_gate(cli: Cli, plant: Zone, args: tuple[str, ...], code: str, says: str) -> None:
    """What cannot be done with a gate is an error that names it, with the name that was probably meant."""
    asyncio.run(plant.mode("from-enterprise", "normal"))
    done = cli("gate", *args)
    assert done.code == (2 if code == "usage" else 1)
    assert done.err.startswith(f"error[{code}]: ")
    assert says in done.err


# Consumers.


def test_a_consumer_lives_from_add_to_retire(cli: Cli, plant: Zone) -> None:
    """It begins where it was told, is listed with its backlog, and leaves its gaps when it is retired."""
    made = cli("consumers", "add", "app-life", "--stream", "operational", "--start", "offset:100", "--json").json
    assert (made["committed"], made["backlog"], made["required"]) == (99, FACTS + 4 - 100, True)
    assert made["already_there"] is False
    again = cli("consumers", "add", "app-life", "--stream", "operational", "--start", "offset:100")
    assert (again.code, "was there already" in again.out) == (0, True)
    listed = {each["name"]: each for each in cli("consumers", "--json").json}
    assert listed["app-life"]["start_value"] == 100
    assert "app-life" in cli("consumers").out
    gone = cli("consumers", "retire", "app-life", "--reason", "never came back", "--yes", "--json").json
    assert gone["missed"] == FACTS + 4 - 100
    assert [(gap["first"], gap["last"], gap["reason"]) for gap in gone["gaps"]] == [
        (100, FACTS + 3, "consumer_retired")
    ]
    assert "retired: never came back" in cli("consumers", columns=200).out


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
def test_no_table_breaks_a_word(cli: Cli, plant: Zone, columns: int) -> None:
    """Columns for which there is no room are left out, or go over several lines between words."""
    names = ["from-enterprise", "receiver"]
    assert all(name in cli("gate", columns=columns).out for name in names)
    for command in (("consumers",), ("streams",), ("inspect", plant.data)):
        shown = cli(*command, columns=columns).out
        for name in ("operational/store", "enterprise.operational"):
            assert name in shown, shown
        assert max(map(len, shown.splitlines())) <= columns
    assert "operational/forward" in cli("verify", plant.data, columns=columns).out
    cli("consumers", "add", "app-words", "--stream", "operational", "--optional")
    trail = cli("audit-trail", columns=columns).out
    assert "app-words" in trail and "plant-a-operator" in trail and re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", trail)
    if columns < 110:
        assert re.search(r"^ record \d", trail, re.MULTILINE), trail


IRREVERSIBLE = [
    ("consumers", "retire", "app-asked"),
    ("streams", "truncate", "operational", "--before", "1"),
    ("quarantine", "drop", "--all"),
]


@pytest.mark.parametrize("command", IRREVERSIBLE, ids=[" ".join(each[:2]) for each in IRREVERSIBLE])
def test_what_cannot_be_undone_asks_first(cli: Cli, plant: Zone, command: tuple[str, ...]) -> None:
    """At a terminal somebody is asked, and no is the answer of whoever says nothing; a script must say --yes."""
    cli("consumers", "add", "app-asked", "--stream", "operational", "--start", "offset:1", "--optional")

    def state() -> list[Any]:
        return [cli(each, "--json").json for each in ("consumers", "quarantine")]

    before = state()
    done = cli(*command, "--reason", "x")
    assert (done.code, done.err.partition(":")[0]) == (1, "error[invalid_argument]")
    assert "This cannot be undone" in done.err and "--yes" in done.err
    for answer in (b"n\n", b"\n"):
        code, shown = at_a_terminal([*command, "--reason", "x"], answer)
        assert (code, shown.count("Go on? [y/N]"), "Nothing was done." in shown) == (1, 1, True), shown
    assert state() == before


def at_a_terminal(command: list[str], answer: bytes) -> tuple[int, str]:
    """Run a command with a terminal and type an answer; give its code and what was shown."""
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-m", "bsfg.cli", *command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as running:
        os.close(theirs)
        os.write(terminal, answer)
        shown = b""
        with suppress(OSError):  # the terminal ends with whoever has it
            while part := os.read(terminal, 65_536):
                shown += part
        os.close(terminal)
    return running.returncode, shown.decode()


def test_a_consumer_can_begin_at_a_time_or_at_the_end(cli: Cli, plant: Zone) -> None:
    """Time and latest are resolved by the node."""
    args = ("consumers", "add", "--stream", "operational", "--optional", "--json")
    assert cli(*args, "app-late", "--start", "latest").json["backlog"] == 0
    assert cli(*args, "app-old", "--start", "time:2020-01-01").json["backlog"] == FACTS + 4
    refused = cli(*args, "app-new", "--start", "time:2200-01-01T00:00:00+01:00")
    assert (refused.code, refused.json["code"]) == (1, "invalid_argument") and "yet to come" in refused.err


def test_the_frontier_is_shown_and_truncation_stops_at_it(cli: Cli, plant: Zone) -> None:
    """`bsfg streams` shows how far each buffer is confirmed; an order beyond that is refused and removes nothing."""
    listed = {(each["stream"], each["buffer"]): each for each in cli("streams", "--json").json}
    store = listed["operational", "store"]
    assert store["slowest"] == ["enterprise.operational"]
    assert store["start"] <= store["frontier"] + 1 <= store["end"]
    assert "enterprise.operational" in cli("streams").out
    order = ("streams", "truncate", "operational", "--before")
    done = cli(*order, str(store["frontier"] + 2), "--reason", "x", "--yes", "--json")
    assert (done.code, done.json["code"]) == (1, "truncate_refused")
    assert cli(*order, "0", "--reason", " ").code == 1
    unknown = cli("streams", "truncate", "operationl", "--before", "1", "--reason", "x", "--yes")
    assert unknown.code == 1 and "Did you mean 'operational'?" in unknown.err
    after = {(each["stream"], each["buffer"]): each for each in cli("streams", "--json").json}
    assert after["operational", "store"]["start"] == store["start"]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("add", "app-1", "--stream", "operationl"), "unknown_stream", "Did you mean 'operational'?"),
        (("add", "enterprise.operational", "--stream", "operational"), "consumer_exists", "operational/store"),
        (("add", "app-2", "--stream", "operational", "--start", "offset:99999"), "offset_out_of_range", "99999"),
        (("add", "app-3", "--stream", "operational", "--start", "tomorrow"), "invalid_argument", "earliest, latest"),
        (("add", "app-4", "--stream", "operational", "--start", "offset:-1"), "invalid_argument", "offset:N"),
        (("add", "app-5", "--stream", "operational", "--start", "time:noon"), "invalid_argument", "'noon'"),
        (("add", "app-6", "--stream", "operational", "--start", "time:2026-01-01T00:00"), "invalid_argument", "Z for"),
        (("add", "App 7", "--stream", "operational"), "invalid_argument", "'App 7' is not a name"),
        (("retire", "enterprise.operationl", "--reason", "x"), "unknown_consumer", "'enterprise.operational'?"),
        (("retire", "enterprise.operational", "--reason", "\t"), "invalid_argument", "--reason is empty"),
    ],
)
def test_wrong_words_about_consumers(cli: Cli, plant: Zone, args: tuple[str, ...], code: str, says: str) -> None:
    """What cannot be is an error that names it, with the name that was probably meant."""
    done = cli("consumers", *args)
    assert done.code == 1
    assert done.err.startswith(f"error[{code}]: ")
    assert says in done.err


# Quarantine: its tests follow each other, from looking to an empty list.


def test_quarantine_is_listed_and_shown(cli: Cli, plant: Zone) -> None:
    """Each quarantined fact has an id, a reason, and the place of the one that was there first."""
    listed = cli("quarantine", "list", "--json").json
    assert [each["id"] for each in listed] == [f"operational/forward/{each['number']}" for each in listed]
    assert [(each["reason"], each["existing_offset"]) for each in listed] == [
        *(("conflict", offset) for offset in range(4)),
        ("expired", None),
    ]
    assert listed[4]["detail"] == "older than the link allows"
    table = cli("quarantine", columns=60)
    assert max(len(line.rstrip()) for line in table.out.splitlines()) <= 60
    shown = cli("quarantine", "show", listed[0]["number"], "--json").json
    assert [message_from_json(orjson.dumps(each)) for each in shown["facts"]] == CONFLICTS[:1]
    assert '{"note":"altered"}' in cli("quarantine", "show", listed[0]["id"], *VIEWER).out


def test_quarantine_is_exported_as_json_lines(cli: Cli, plant: Zone) -> None:
    """An export has every fact with its refusal; --facts writes what can be read in again."""
    whole = cli("quarantine", "export").lines
    assert [line["quarantined"]["reason"] for line in whole] == ["conflict"] * 4 + ["expired"]
    facts = cli("quarantine", "export", "--facts").out.splitlines()
    assert [message_from_json(line.encode()) for line in facts] == CONFLICTS + LATE
    one = cli("quarantine", "export", whole[2]["quarantined"]["id"], "--facts").lines
    assert one == [orjson.loads(orjson.dumps(message_to_dict(CONFLICTS[2])))]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("show", "99"), "invalid_argument", "nothing in quarantine is called '99'"),
        (("drop", "operational/forwrd/1", "--reason", "x"), "invalid_argument", "Did you mean 'operational/forward/1'"),
        (("drop", "--reason", "x"), "invalid_argument", "--all"),
        (("retry", "1", "--reason", ""), "invalid_argument", "--reason is empty"),
        (("list", "--stream", "nothing"), "unknown_stream", "nothing"),
        (("drop", "1"), "usage", "--reason"),
    ],
)
def test_wrong_words_about_quarantine(cli: Cli, plant: Zone, args: tuple[str, ...], code: str, says: str) -> None:
    """What is not there, or not said, is named."""
    done = cli("quarantine", *args)
    assert done.code == (2 if code == "usage" else 1)
    assert done.err.startswith(f"error[{code}]: ")
    assert says in done.err


def test_quarantine_is_retried_and_dropped(cli: Cli, plant: Zone) -> None:
    """What is taken now leaves, a conflict stays with exit code 1, and what is dropped is gone and on record."""
    *ids, late = [each["id"] for each in cli("quarantine", "--json").json]
    retried = cli("quarantine", "retry", ids[0], late, "--reason", "try once more", "--json")
    assert retried.code == 1
    assert retried.json == [
        {"id": ids[0], "settled": False, "result": "conflict"},
        {"id": late, "settled": True, "result": "inserted"},
    ]
    assert plant.messages(Buffer.FORWARD)[-1:] == LATE
    dropped = cli("quarantine", "drop", *ids[:2], "--reason", "agreed with enterprise", "--yes")
    assert dropped.code == 0
    assert [line.split()[0] for line in dropped.out.splitlines()] == ids[:2]
    record = asyncio.run(plant.seen("quarantine_dropped", count=2))
    assert (record["by"], record["reason"]) == ("plant-a-operator", "agreed with enterprise")
    assert [each["id"] for each in cli("quarantine", "--json").json] == ids[2:]
    assert cli("quarantine", "drop", "--all", "--reason", "all settled", "--yes").code == 0
    assert cli("quarantine").out == "Nothing is in quarantine.\n"
    assert cli("quarantine", "export").out == ""


# Artifacts.


def name_in_a_fact(cli: Cli, digest: str) -> None:
    """Append a fact that names an artifact: from then on it can be read."""
    fact = {"subject": "batch:B1", "predicate": "reported", "object_json": "{}", "artifact_digest": digest}
    envelope = {"message_id": f"names-{digest[-8:]}", "to_zone": "enterprise", "produced_at_unix_ms": 1}
    line = json.dumps({"envelope": envelope, "fact": fact}).encode()
    assert cli("append", "--stream", "operational", "-", stdin=line).code == 0


def test_an_artifact_of_some_size_comes_back_as_it_went(cli: Cli, plant: Zone, tmp_path: Path) -> None:
    """A file is uploaded, shown and downloaded with one digest, which is that of its content."""
    path, copy = tmp_path / "report.pdf", tmp_path / "copy.pdf"
    path.write_bytes(Random(1).randbytes(9 << 20))
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    put = cli("artifact", "put", "batch-files", "B1042/report.pdf", path)
    assert (put.code, put.err) == (0, "")
    assert digest in put.out and "stored" in put.out and "application/pdf" in put.out
    assert "was there already" in cli("artifact", "put", "batch-files", "B1042/report.pdf", path).out
    unnamed = cli("artifact", "show", "batch-files", "B1042/report.pdf")
    assert (unnamed.code, "error[artifact_missing]" in unnamed.err) == (1, True)
    name_in_a_fact(cli, digest)
    shown = cli("artifact", "show", "batch-files", "B1042/report.pdf", "--json").json
    assert (shown["digest"], shown["size_bytes"]) == (digest, 9 << 20)
    assert cli("artifact", "get", "batch-files", "B1042/report.pdf", copy).code == 0
    assert copy.read_bytes() == path.read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy.pdf", "report.pdf"]


def test_an_artifact_is_downloaded_by_digest_and_by_fact(cli: Cli, plant: Zone, tmp_path: Path) -> None:
    """By digest, by key and by offset the content is that of the fact, whatever its name stands for here."""
    content = Random(2).randbytes(100_000)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert cli("artifact", "put", "sha256", digest[7:], "-", stdin=content).code == 0
    assert cli("artifact", "put", "batch-files", "report.pdf", "-", stdin=b"this zone's own").code == 0
    fact = {"subject": "batch:B1", "predicate": "reported", "object_json": "{}", "artifact_digest": digest}
    envelope = {"message_id": "evt/7", "to_zone": "enterprise", "produced_at_unix_ms": 1}
    line = json.dumps({"envelope": {**envelope, "object_media_type": "application/pdf"}, "fact": fact}).encode()
    assert cli("append", "--stream", "operational", "-", stdin=line).code == 0
    offset = str(plant.end(Buffer.STORE) - 1)
    of_fact = ("--stream", "operational", "--buffer", "store", "--fact")
    for at, which in enumerate([(digest,), (*of_fact, "plant-a/evt/7"), (*of_fact, offset)]):
        copy = tmp_path / f"copy-{at}"
        done = cli("artifact", "get", *which, "-o", copy)
        assert (done.code, done.err) == (0, "")
        assert digest in done.out
        assert copy.read_bytes() == content
        shown = cli("artifact", "show", *which, "--json").json
        assert (shown["digest"], shown["size_bytes"]) == (digest, len(content))
    assert shown["media_type"] == "application/pdf"
    assert cli("artifact", "get", digest, tmp_path / "again").code == 0
    [stored] = [file for file in plant.folder.rglob(digest[7:]) if file.is_file()]
    stored.chmod(0o644)
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = cli("artifact", "get", digest, "-o", tmp_path / "altered")
    assert (refused.code, "error[digest_mismatch]: " in refused.err) == (1, True)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("altered")]


def test_an_artifact_goes_through_pipes(cli: Cli, plant: Zone) -> None:
    """Standard input and output work, also for content of no bytes."""
    for content in (b"hello", b""):
        key = f"pipes/{len(content)}.txt"
        assert cli("artifact", "put", "batch-files", key, "-", "--media-type", "text/x-note", stdin=content).code == 0
        name_in_a_fact(cli, f"sha256:{hashlib.sha256(content).hexdigest()}")
        assert cli("artifact", "get", "batch-files", key, "-").out.encode() == content
        assert cli("artifact", "show", "batch-files", key, "--json").json["media_type"] == "text/x-note"


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("put", "batch-files", "x", "missing.txt"), "invalid_argument", "missing.txt cannot be read"),
        (("put", "batch files", "x", "zone.toml"), "invalid_argument", "'batch files' is not a name"),
        (("put", "batch-files", "x", "zone.toml", *VIEWER), "permission_denied", "it would need producer"),
        (("put", "batch-files", "taken", "zone.toml"), "artifact_conflict", "another key"),
        (("get", "batch-files", "nothing"), "artifact_missing", "batch-files/nothing"),
        (("get", "batch-files", "taken", "zone.toml"), "file_exists", "--force"),
        (("get", "batch-files", "taken", "missing/file"), "storage_read_only", "missing/file cannot be written"),
        (("get", "batch-files", "taken", "-", "--json"), "invalid_argument", "standard output"),
        (("get", "batch-files"), "invalid_argument", "say which artifact"),
        (("get", "batch-files", "taken", "x", "-o", "y"), "invalid_argument", "say which artifact"),
        (("get", "sha256:" + 64 * "0"), "artifact_missing", 64 * "0"),
        (("get", "sha256:none"), "invalid_argument", "64 hexadecimal digits"),
        (("get", "--fact", "plant/a"), "invalid_argument", "belong together"),
        (("get", "--fact", "plant", "--stream", "operational"), "invalid_argument", "neither an offset"),
        (("get", "--fact", "plant/none", "--stream", "operational"), "fact_not_found", "forward buffer"),
    ],
)
def test_wrong_words_about_artifacts(cli: Cli, plant: Zone, args: tuple[str, ...], code: str, says: str) -> None:
    """What cannot be stored, found or written is named, and leaves no file behind."""
    assert cli("artifact", "put", "batch-files", "taken", "-", stdin=b"first").code == 0
    name_in_a_fact(cli, f"sha256:{hashlib.sha256(b'first').hexdigest()}")
    before = sorted(plant.folder.iterdir())
    done = cli("artifact", *args)
    assert done.code == 1
    assert f"error[{code}]: " in done.err and says in done.err
    assert sorted(plant.folder.iterdir()) == before
