"""The node's log: one JSON object per line, libraries included, and nothing below the level that was asked for."""

import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from bsfg.node.logs import configure


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """Give a stream to log to, and put everything back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def records(out: io.StringIO) -> list[dict[str, object]]:
    """Read what was logged."""
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_records_are_json_lines(out: io.StringIO) -> None:
    """A record has time, level and event first, then its fields, whatever their types."""
    configure(stream=out)
    structlog.get_logger("x").info("gate_moved", link="from-a", mode={"a": 1}, path=object)
    [record] = records(out)
    assert list(record)[:3] == ["timestamp", "level", "event"]
    assert (record["level"], record["event"], record["link"]) == ("info", "gate_moved", "from-a")


def test_levels_are_kept(out: io.StringIO) -> None:
    """Records below the level are not written."""
    configure(level="warning", stream=out)
    log = structlog.get_logger("x")
    log.info("listening")
    log.warning("link_held")
    assert [record["event"] for record in records(out)] == ["link_held"]


def test_failures_keep_their_traceback(out: io.StringIO) -> None:
    """A logged exception is one record with its traceback in a field, not lines of its own."""
    configure(stream=out)
    try:
        raise ValueError("inside")
    except ValueError:
        structlog.get_logger("x").exception("request_failed", method="AppendFact")
    [record] = records(out)
    assert record["method"] == "AppendFact"
    assert "ValueError: inside" in str(record["exception"])


def test_a_library_that_repeats_itself_is_counted(out: io.StringIO) -> None:
    """Callers can make a library say the same again and again; a few lines are written, without a traceback."""
    configure(stream=out)
    for number in range(1_000):
        try:
            bytes([0xFF, number % 256]).decode()
        except UnicodeDecodeError:
            logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", number)
    logging.getLogger("grpc._cython.cygrpc").error("something else")
    found = records(out)
    assert [record["message"] for record in found] == [
        *(f"Invalid encoding on {n}" for n in range(5)),
        "something else",
    ]
    assert not any("exception" in record for record in found)
    assert {record.get("reason") for record in found} == {"UnicodeDecodeError", None}


def test_a_library_without_descriptors_logs_no_traceback(out: io.StringIO) -> None:
    """That the system has no descriptor left is one short record."""
    configure(stream=out)
    error = OSError(errno.EMFILE, "Too many open files")
    logging.getLogger("asyncio").error("socket.accept() out of system resource", exc_info=error)
    [record] = records(out)
    assert (record["library"], record["reason"]) == ("asyncio", "Too many open files")
    assert "Traceback" not in out.getvalue() and "exception" not in record


def test_libraries_log_the_same_way(out: io.StringIO) -> None:
    """What a library says is the event ``library`` with its name and words; its chatter is left out."""
    configure(level="debug", stream=out)
    logging.getLogger("uvicorn.error").info("chatter")
    logging.getLogger("uvicorn.error").warning("Invalid %s received.", "request")
    [record] = records(out)
    assert (record["event"], record["library"], record["message"]) == (
        "library",
        "uvicorn.error",
        "Invalid request received.",
    )


def test_people_can_have_text(out: io.StringIO) -> None:
    """The text form has the same events for people."""
    configure(form="text", stream=out)
    structlog.get_logger("x").info("node_started", zone="plant-a")
    assert "node_started" in out.getvalue()
    assert "plant-a" in out.getvalue()
