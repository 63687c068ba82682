"""Events that repeat: told at once, then counted, and never a flood."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from bsfg.config import Alerts
from bsfg.node import alerts
from bsfg.node.alerts import EVENT_KINDS_MAX, OTHERS, AlertBoard, _posted
from bsfg.node.metrics import Metrics
from bsfg.testing.clock import FakeClock


class Board:
    """An alert board with its clock and what it told."""

    def __init__(self) -> None:
        self.clock, self.metrics, self.told = FakeClock(), Metrics(), list[tuple[str, str]]()
        settings = Alerts(timeout_seconds=1.0, repeat_every_seconds=3600.0)
        self.alerts = AlertBoard("here", settings, self.metrics, self.clock, self._note)

    def _note(self, event: str, **fields: Any) -> None:
        assert event == "alert_raised"
        self.told.append((fields["about"], fields["text"]))


def test_what_repeats_is_told_once_a_minute_with_how_often() -> None:
    """The first is told at once, the others in one line after a minute; the metric counts all."""
    board = Board()
    for _ in range(1_000):
        board.alerts.event("identity_refused", "mallory", "asked for audit")
    board.alerts.tick()
    assert board.told == [("mallory", "asked for audit")]
    board.clock.advance(60)
    board.alerts.tick()
    assert board.told[1:] == [("mallory", "asked for audit (999 times since it was last told)")]
    value = board.metrics.registry.get_sample_value("bsfg_alerts_total", {"alert": "identity_refused"})
    assert value == 1_000
    board.clock.advance(60)
    board.alerts.tick()
    board.alerts.event("identity_refused", "mallory", "asked again")
    assert board.told[2:] == [("mallory", "asked again")]


def test_many_names_are_told_of_as_others() -> None:
    """Whoever comes under ever new names fills neither memory nor log."""
    board = Board()
    for number in range(10_000):
        board.alerts.event("identity_refused", f"name-{number}", "who is that")
    assert len(board.told) == EVENT_KINDS_MAX + 1
    assert board.told[-1][0] == OTHERS


def request(connection: socket.socket) -> bytes:
    """Read a request to its end, in however many pieces it comes."""
    data = b""
    while not data.endswith(b"}") and (piece := connection.recv(65_536)):
        data += piece
    return data


@contextmanager
def answering(answer: bytes, *, endless: bytes = b"") -> Iterator[tuple[str, list[bytes]]]:
    """Give the address of what gives this answer to every connection, and what it was sent."""
    listening, heard = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    heard.append(request(connection))
                    connection.sendall(answer)
                    while endless:
                        connection.sendall(endless)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/alerts", heard
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has set for others does not concern these tests."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_webhook_is_given_the_alert() -> None:
    """A good answer is a delivery, and nothing of its body is needed."""
    with answering(b"HTTP/1.1 204 No Content\r\n\r\n") as (url, heard):
        _posted(url, b'{"alert": 1}', 30.0)
    assert heard[0].startswith(b"POST /alerts ") and heard[0].endswith(b'{"alert": 1}')


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_a_webhook_is_not_followed_elsewhere(status: str) -> None:
    """What answers an alert cannot send this node to another address; that it tried is a failed delivery."""
    with answering(b"HTTP/1.1 200 OK\r\n\r\n") as (elsewhere, heard):
        redirect = f"HTTP/1.1 {status}\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n".encode()
        with answering(redirect) as (url, _), pytest.raises(OSError, match=status[:3]):
            _posted(url, b"{}", 30.0)
    assert heard == []


@pytest.mark.parametrize("endless", [b"x", b"x: y\r\n"])
def test_an_answer_without_end_is_given_up(endless: bytes) -> None:
    """Headers that never end, in one line or in many, do not keep the delivery for ever."""
    with answering(b"HTTP/1.1 200 OK\r\n", endless=endless) as (url, _), pytest.raises(OSError):
        _posted(url, b"{}", 1.0)


@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\n"], ids=["from its start", "after a good status"])
def test_an_answer_byte_by_byte_is_cut_off(begins: bytes) -> None:
    """Who sends a little now and then would reset every timeout of a socket; the delivery has one of its own.

    That the cut looks like the end of the headers makes no delivery of it.
    """
    stop = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(begins)
            while not stop.wait(0.05):
                connection.sendall(b"H")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        with pytest.raises(TimeoutError, match="in time"):
            _posted(f"http://127.0.0.1:{listening.getsockname()[1]}/", b"{}", 0.5)
    finally:
        stop.set()
        listening.close()
        thread.join()


def delivering(folder: Path, notes: list[str]) -> AlertBoard:
    """Make a board that posts alerts and gives them to a command, which writes them down."""
    command = ("/bin/sh", "-c", f"printf '%s\\n' \"$(cat)\" >> {folder}/given")
    settings = Alerts(webhook="http://127.0.0.1:9/", command=command, timeout_seconds=60, repeat_every_seconds=3600.0)
    return AlertBoard("here", settings, Metrics(), FakeClock(), lambda event, **fields: notes.append(event))


def given(folder: Path) -> list[bool]:
    """Tell of each alert that the command was given whether it says that it is over."""
    return ["cleared" in orjson.loads(line) for line in (folder / "given").read_text().splitlines()]


def test_a_webhook_that_cannot_be_reached_does_not_keep_the_command_from_being_told(tmp_path: Path) -> None:
    """A zone that is cut off has nothing but what is on its own machine."""
    notes: list[str] = []

    async def work() -> None:
        board = delivering(tmp_path, notes)
        board.update("link_dead", "from-a", "nobody moves it")
        await board.close()

    asyncio.run(work())
    assert given(tmp_path) == [False]
    assert notes == ["alert_raised", "alert_not_delivered"]


def test_an_alert_is_over_only_after_it_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the first delivery is, the second of the same alert comes after it."""
    posted: list[bool] = []
    overtaken = threading.Event()

    def post(url: str, data: bytes, timeout_seconds: float) -> None:
        cleared = "cleared" in orjson.loads(data)
        if cleared:
            overtaken.set()
        else:
            overtaken.wait(0.5)
        posted.append(cleared)

    async def work() -> None:
        board = delivering(tmp_path, [])
        board.update("link_dead", "from-a", "nobody moves it")
        board.update("link_dead", "from-a", None)
        await board.close()

    monkeypatch.setattr(alerts, "_posted", post)
    asyncio.run(work())
    assert posted == given(tmp_path) == [False, True]
