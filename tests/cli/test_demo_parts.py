"""The parts of `bsfg demo`: the referee notices everything, the wire cuts, the janitor clears, the picture fits."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests.cli.conftest import Run

from bsfg.cli.demo import crew, referee
from bsfg.cli.demo.director import steps_of
from bsfg.cli.demo.people import page
from bsfg.cli.demo.picture import StagePicture, show_verdict
from bsfg.cli.demo.referee import DemoVerdict, LateFacts, Takeover
from bsfg.cli.demo.site import EVENTS, DemoSite, DemoZone, Wire
from bsfg.cli.demo.stage import DemoStage, StepProgress
from bsfg.errors import BsfgError, PeerUnreachable, TimedOut
from bsfg.fact import ArtifactRef, Message
from bsfg.ports import Buffer, OriginSpan
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.testing.facts import altered, messages, sealed

SAID = messages(20, from_zone="plant-a")
TOLD = {str(each.envelope.message_id): offset for offset, each in enumerate(SAID)}


async def fill(data: Path, buffer: Buffer, facts: Sequence[Message]) -> None:
    """Put facts into a buffer of a new folder, in the order given."""
    storage = await LogStorage.open(data)
    if buffer == Buffer.STORE:
        await (await storage.store(EVENTS)).append(sealed(facts))
    else:
        span = OriginSpan("plant-a", np.arange(len(facts)), np.ones(len(facts), dtype=np.int64))
        await (await storage.forward(EVENTS)).put_if_absent(sealed(facts), span)
    await storage.close()


def judged(
    root: Path, has: Sequence[Message], said: Sequence[Message] = SAID, told: dict[str, int] | None = None
) -> referee.DirectionTally:
    """Have the referee look at a zone that has some facts of another one."""
    source, target = DemoZone("plant-a", "Plant A", root), DemoZone("enterprise", "Enterprise", root)
    asyncio.run(fill(source.data, Buffer.STORE, said))
    asyncio.run(fill(target.data, Buffer.FORWARD, has))
    return referee.judge(source, target, EVENTS, TOLD if told is None else told)


def test_the_referee_is_content_when_all_is_there(tmp_path: Path) -> None:
    """What was said and what arrived agree."""
    way = judged(tmp_path, SAID)
    assert way.ok
    assert (way.sent, way.received, way.lost, way.twice, way.altered, way.out_of_order) == (20, 20, 0, 0, 0, 0)


def test_the_referee_notices_a_loss(tmp_path: Path) -> None:
    """A fact that did not arrive is lost."""
    way = judged(tmp_path, [*SAID[:7], *SAID[8:]])
    assert (way.ok, way.lost, way.received) == (False, 1, 19)


def test_the_referee_notices_what_a_zone_has_forgotten(tmp_path: Path) -> None:
    """A fact that was acknowledged and is nowhere is lost, too."""
    way = judged(tmp_path, SAID[:19], SAID[:19])
    assert (way.ok, way.lost, way.sent) == (False, 1, 20)


def test_the_referee_notices_other_bytes(tmp_path: Path) -> None:
    """A fact with another body under its id is altered."""
    way = judged(tmp_path, [*SAID[:3], *altered([SAID[3]]), *SAID[4:]])
    assert (way.ok, way.altered, way.lost) == (False, 1, 0)


def test_the_referee_notices_disorder(tmp_path: Path) -> None:
    """A fact that stands before an earlier one is out of order."""
    way = judged(tmp_path, [SAID[1], SAID[0], *SAID[2:]])
    assert (way.ok, way.out_of_order) == (False, 1)


def test_the_referee_notices_what_is_there_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a reader meets twice is counted."""
    monkeypatch.setattr(
        referee, "open_folder", lambda folder: open_folder(folder) * (1 + folder.parts.count("enterprise"))
    )
    way = judged(tmp_path, SAID)
    assert (way.ok, way.twice, way.received) == (False, 20, 20)


@pytest.mark.parametrize("stored", [None, b"another page", b"a page"], ids=["missing", "altered", "whole"])
def test_the_referee_looks_into_artifacts(tmp_path: Path, stored: bytes | None) -> None:
    """A file that a fact names must be there, with the bytes of its digest."""
    digest = "sha256:" + hashlib.sha256(b"a page").hexdigest()
    named = [replace(each, fact=replace(each.fact, artifact=_reference(digest))) for each in SAID[:1]]
    if stored is not None:
        digits = digest[7:]
        path = tmp_path / "enterprise" / "data" / "artifacts" / "content" / digits[:2] / digits
        path.parent.mkdir(parents=True)
        path.write_bytes(stored)
    way = judged(tmp_path, named, named, {})
    assert (way.artifacts, way.artifacts_bad) == (1, int(stored != b"a page"))


def _reference(digest: str) -> ArtifactRef:
    return ArtifactRef("document-files", "WO-1.pdf", digest, 6, "application/pdf")


def test_acknowledged_facts_are_looked_for_at_their_place(tmp_path: Path) -> None:
    """A killed node's folder must have every acknowledged fact where its producer was told."""
    plant = DemoZone("plant-a", "Plant A", tmp_path)
    asyncio.run(fill(plant.data, Buffer.STORE, SAID))
    assert referee.missing(plant, EVENTS, TOLD) == 0
    first = next(iter(TOLD))
    assert referee.missing(plant, EVENTS, {**TOLD, first: 9, "never said": 20}) == 2


def test_lag_is_measured_in_a_span(tmp_path: Path) -> None:
    """Only facts that were appended in the span count, and none gives no number."""
    way = judged(tmp_path, SAID)
    way.sent_at_ms, way.lag_ms = np.arange(20), np.arange(20) * 10.0
    assert referee.Lag.of([way]) == referee.Lag(95.0, 188.1, 190.0)
    assert referee.Lag.of([way], (5, 8)) == referee.Lag(60.0, 69.8, 70.0)
    assert referee.Lag.of([way], (50, 80)) is None
    assert referee.Lag.of([]) is None


def verdict_of(way: referee.DirectionTally, **audit: object) -> DemoVerdict:
    """Make a verdict of one direction."""
    found = {"link": "enterprise/from-plant-a", "clean": True, "facts": 20, "counts": {}, "checks": {}, **audit}
    return DemoVerdict("native", [way, way], [found], {"x": ["normal"]}, None, None, None, [1.0, 2.0], 3.0, 4.0)


def test_a_broken_promise_is_exit_code_1(quick: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that the referee finds, or a difference that the audit does, fails the demo; no folder is left."""
    place = tmp_path / "temporary"
    place.mkdir()
    good, bad = judged(tmp_path / "good", SAID), judged(tmp_path / "bad", SAID[:19])
    for verdict, code in (
        (verdict_of(good), 0),
        (verdict_of(bad), 1),
        (verdict_of(good, clean=False, counts={"missing": 1}), 1),
    ):

        async def played(*given: object, verdict: DemoVerdict = verdict, **how: object) -> DemoVerdict:
            show_verdict(Console(), verdict)
            return verdict

        monkeypatch.setattr("bsfg.cli.demo.director.played", played)
        monkeypatch.setattr("tempfile.tempdir", str(place))
        outcome = quick("demo", "--engine", "native")
        assert outcome.code == code
        assert ("Nothing was lost" in outcome.out, "A promise was broken" in outcome.out) == (not code, bool(code))
    assert list(place.iterdir()) == []


def test_a_wire_is_cut_and_mended() -> None:
    """A cut ends connections and refuses new ones; a mended wire carries again, over the same port."""

    async def work() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        wire = Wire(server.sockets[0].getsockname()[1])
        await wire.open()
        with socket.socket() as before, socket.socket() as meanwhile, socket.socket() as after:
            assert await _answer(before, wire.port) == b"hello"
            wire.cut()
            assert await _answer(before) == b""
            assert await _answer(meanwhile, wire.port) == b""
            wire.mend()
            assert await _answer(after, wire.port) == b"hello"
            wire.close()
            assert await _answer(after) == b""
        server.close()

    asyncio.run(work())


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def _answer(caller: socket.socket, port: int | None = None) -> bytes:
    """Say hello over a connection, a new one where there is a port, and give what comes back."""
    loop = asyncio.get_running_loop()
    caller.setblocking(False)
    try:
        if port is not None:
            await loop.sock_connect(caller, ("127.0.0.1", port))
        await loop.sock_sendall(caller, b"hello")
        return await loop.sock_recv(caller, 100)
    except ConnectionError:
        return b""


def test_the_janitor_clears_up_when_its_master_is_gone(tmp_path: Path) -> None:
    """When the pipe to it closes, it ends the processes of the run, no others, and removes the folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "file").write_text("x")
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    ours, other = (
        subprocess.Popen(sleep, env={**os.environ, crew.MARK: run}, stdout=subprocess.PIPE) for run in ("a1", "b2")
    )
    for process in (ours, other):
        assert process.stdout is not None
        process.stdout.readline()
    assert crew.marked("a1") == [ours.pid]
    cleaner = subprocess.Popen([sys.executable, "-I", crew.__file__, str(folder), "a1"], stdin=subprocess.PIPE)
    cleaner.communicate(timeout=60)
    assert ours.wait(60) == -9
    assert not folder.exists()
    assert other.poll() is None
    for process in (ours, other):
        process.kill()
        process.communicate()


def test_the_pdf_is_whole() -> None:
    """Every object stands where the table says, and special characters are kept from breaking the text."""
    content = page(["Work order (7)", "Größe: 5 \\ 6"])
    assert content.startswith(b"%PDF-1.4\n")
    assert content.endswith(b"%%EOF\n")
    table = int(content.rsplit(b"startxref\n", 1)[1].split()[0])
    rows = content[table:].splitlines()
    assert rows[:2] == [b"xref", b"0 6"]
    for number, row in enumerate(rows[3:8], 1):
        assert content[int(row[:10]) :].startswith(b"%d 0 obj\n" % number)
    assert b"(Work order \\(7\\))" in content


def stage_of(tmp_path: Path, three_zones: bool, *, two_nodes: bool = False) -> DemoStage:
    """Make a stage in the middle of the story."""
    site = DemoSite(tmp_path, three_zones, spark=True, two_nodes=two_nodes)
    stage = DemoStage(site, steps_of(site), is_cut=True, note="both sides to notice")
    for number, step in enumerate(stage.steps[:4]):
        step.progress = StepProgress.DONE if number < 3 else StepProgress.NOW
        step.detail = "12,345 facts that had waited crossed"
    for zone in stage.zones.values():
        zone.alive, zone.seen, zone.appended, zone.forwarded, zone.backlog = True, True, 654_321, 1_000, 99
        for node in zone.nodes:
            node.pid = 7
    for link in stage.links.values():
        link.mode, link.lag_ms = "reconciliation", 98_000.0
        link.lags_ms.extend([None, 0.5, 20.0, 500.0, 98_000.0, 1e9] * 30)
    return stage


@pytest.mark.parametrize("three_zones", [False, True], ids=["two", "three"])
@pytest.mark.parametrize("size", [(60, 24), (80, 24), (94, 30), (120, 40), (200, 50)], ids=str)
def test_the_picture_fits(tmp_path: Path, size: tuple[int, int], three_zones: bool) -> None:
    """At any size no line is too wide, the present step and every gate's mode is told, and few lines are left over."""
    width, height = size
    screen = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    screen.print(StagePicture(stage_of(tmp_path, three_zones)))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line) for line in lines) <= width
    assert len(lines) <= height
    text = "\n".join(lines)
    for words in ("Plant A", "Enterprise", "● reconciliation", "cut", "▶ The network between", "▁", "█", "both sides"):
        assert words in text, words
    assert text.count("● reconciliation") == (4 if three_zones else 2)


def test_the_picture_needs_no_unicode(tmp_path: Path) -> None:
    """On a terminal that knows ASCII alone, it is drawn with that."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=100, height=40, force_terminal=True, color_system=None).print(
        StagePicture(stage_of(tmp_path, False))
    )
    file.flush()
    text = file.buffer.getvalue().decode("ascii")
    assert "* reconciliation" in text
    assert "x cut x" in text


def test_a_node_that_is_down_is_shown(tmp_path: Path) -> None:
    """Its panel says so, and its gate is not known."""
    stage = stage_of(tmp_path, False)
    plant = stage.zones["plant-a"]
    plant.alive, plant.nodes[0].pid = False, 0
    screen = Console(file=io.StringIO(), width=100, height=40, force_terminal=True, color_system=None)
    screen.print(StagePicture(stage))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "node DOWN" in text
    assert "not known" in text


@pytest.mark.parametrize("width", [60, 94, 200])
def test_of_two_nodes_it_is_shown_who_is_active(tmp_path: Path, width: int) -> None:
    """Each node's state is told, also when it is killed, paused or does not answer."""
    stage = stage_of(tmp_path, False, two_nodes=True)
    first, second = stage.zones["plant-a"].nodes
    first.serves, second.serves = True, False
    for change, words in (
        ({}, "node 1 active, node 2 stands by"),
        ({"paused": True}, "node 1 paused, node 2 stands by"),
        ({"paused": False, "serves": None}, "node 1 silent, node 2 stands by"),
        ({"pid": 0}, "node 1 DOWN, node 2 stands by"),
    ):
        for name, value in change.items():
            setattr(first, name, value)
        screen = Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)
        screen.print(StagePicture(stage))
        assert words in screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("late", "ok"), [((["storage_taken"], 0), True), ((["stored"], 0), False),
                                          ((["outcome_unknown"], 1), False), (([], 0), False)])  # fmt: skip
def test_a_node_that_writes_when_another_is_active_breaks_a_promise(
    tmp_path: Path, late: tuple[list[str], int], ok: bool
) -> None:
    """A late fact that is stored, or said to be, fails the demo; so does a pause in which none was handed over."""
    verdict = replace(verdict_of(judged(tmp_path, SAID)), late=LateFacts(*late), takeovers=[Takeover("paused", "b", 2)])
    assert (verdict.ok, verdict.to_dict()["late"]["answers"]) == (ok, late[0])
    screen = Console(file=io.StringIO(), width=100)
    show_verdict(screen, verdict)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert ("Nothing was lost" in text, "wrote when another one was active" in text) == (ok, not ok)


def test_whoever_waits_learns_of_a_failure(tmp_path: Path) -> None:
    """A wait ends with what went wrong elsewhere, or says what it waited for in vain."""

    async def work(fails: bool) -> BsfgError:
        stage = stage_of(tmp_path, False)
        if fails:
            stage.fail(PeerUnreachable("the node ended by itself"))
        with pytest.raises(BsfgError) as caught:
            await stage.until(lambda: False, "rain", 0.01)
        if fails:
            with pytest.raises(PeerUnreachable):
                await stage.during(60)
        return caught.value

    assert isinstance(asyncio.run(work(True)), PeerUnreachable)
    late = asyncio.run(work(False))
    assert isinstance(late, TimedOut)
    assert "rain" in late.message
