"""Options are known by name, checked by value, and refused with the list of good ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import InvalidArgument
from bsfg.spark.options import (
    OPTIONS,
    READ,
    READ_STREAM,
    WRITE,
    WRITE_STREAM,
    Position,
    ceil_unix_ms,
    parse,
    position,
)
from bsfg.spark.source import FactsSource

BASE = {"address": "127.0.0.1:9443", "stream": "operational"}
PUT = {**BASE, "mode": "put", "link": "from-plant"}


def test_names_are_taken_in_any_case() -> None:
    """Spark does not keep the case of options, so nobody can rely on it."""
    options = parse({**BASE, "MAXFACTSPERBATCH": "5", "startingoffsets": "LATEST"}, READ_STREAM)
    assert (options["maxFactsPerBatch"], options["startingOffsets"]) == (5, Position(word="latest"))


@pytest.mark.parametrize(
    ("given", "use", "says"),
    [
        ({**BASE, "nosuch": "1"}, READ, "there is no option 'nosuch' for read"),
        ({**BASE, "startOffsets": "1"}, READ, "did you mean startingOffsets"),
        ({**BASE, "maxFactsPerBatch": "1"}, READ, "only for readStream"),
        ({**BASE, "path": "x"}, WRITE, "there is no option 'path'"),
        ({"stream": "operational"}, READ, "the option address is required"),
        ({"address": "a:1"}, READ, "the option stream is required"),
        ({**BASE, "address": "nowhere"}, READ, 'address must be "host:port"'),
        ({**BASE, "ca": "x"}, READ, "all three of the options ca, cert and key"),
        ({**BASE, "stream": "No Name"}, READ, "is not a name"),
        ({**BASE, "buffer": "both"}, READ, "must be store or forward"),
        ({**BASE, "partitionFacts": "0"}, READ, "must be a whole number above 0"),
        ({**BASE, "partitionFacts": "1e3"}, READ, "must be a whole number above 0"),
        ({**BASE, "retrySeconds": "nan"}, READ, "must be a number of seconds"),
        ({**BASE, "startingOffsets": "-1"}, READ, "must be earliest, latest, an offset or a time"),
        ({**BASE, "startingOffsets": "2026-03-01T06:00:00"}, READ, "is a time without a zone"),
        ({**BASE, "endingOffsets": "earliest"}, READ, "endingOffsets cannot be earliest"),
        ({**BASE, "columns": "offset,nosuch"}, READ, "has no column 'nosuch'"),
        ({**BASE, "columns": "offset,offset"}, READ, "names a column twice"),
        ({**BASE, "columns": "gap"}, READ, "the column gap needs the option gaps"),
        ({**BASE, "rows": "frames", "columns": "offset"}, READ, "a frame is whole"),
        ({**BASE, "gaps": "skip"}, READ_STREAM, "must be fail or rows"),
        ({**BASE, "sources": "a:1/s"}, READ, "option address belongs to one source"),
        ({"sources": "a:1/s", "config": "zone.toml"}, READ, "give one of the options sources and config"),
        ({"sources": "a:1"}, READ, "must be host:port/stream"),
        ({"sources": "a:1/s,a:1/s"}, READ, "names a:1/s twice"),
        (
            {"sources": '[{"address": "a:1", "stream": "s"}, {"address": "a:1", "stream": "s", "name": "b"}]'},
            READ,
            "names one buffer twice, as a:1/s and as b/s",
        ),
        ({"sources": '[{"address": "a:1"}]'}, READ, "stream must be a name"),
        ({"sources": '[{"address": "a:1", "stream": "s", "port": 1}]'}, READ, "has no key 'port'"),
        ({"sources": '[{"address": "a:1", "stream": "s", "consumer": 1}]'}, READ, "consumer must be a text"),
        ({"sources": '[{"address": "a", "stream": "s"}]'}, READ, 'must be "host:port"'),
        ({"sources": '[{"address": "a:1", "stream": "s", "buffer": "both"}]'}, READ, "buffer must be store or forward"),
        ({"sources": "["}, READ, "is not JSON"),
        ({"sources": "[]"}, READ, "names no source"),
        ({"sources": "[1]"}, READ, "must be host:port/stream"),
        ({"sources": "a:1/s", "rows": "frames"}, READ, "reads one source"),
        ({"sources": "a:1/s", "startingOffsets": "4"}, READ, "of several sources is a word, a time"),
        ({"sources": "a:1/s", "endingOffsets": '{"a:1/s": "earliest"}'}, READ, "endingOffsets cannot be earliest"),
        ({"sources": "a:1/s", "startingOffsets": '{"a:1/s": -3}'}, READ, "must be earliest, latest, an offset"),
        ({"sources": "a:1/s", "startingOffsets": '{"a:1/s": '}, READ, "is not JSON"),
        ({**BASE, "startingOffsets": '{"a:1/s": 3}'}, READ, "belong to the option sources or config"),
        ({**BASE, "subjects": ","}, READ, "0 characters"),
        ({**BASE, "subjects": "[1]"}, READ, "must be a list of texts"),
        ({**BASE, "producedFrom": "latest"}, READ, "must be a time"),
        ({**BASE, "missingSources": "wait"}, READ, "only for readStream"),
        ({**BASE, "ordered": "maybe"}, WRITE, "must be true or false"),
        ({**BASE, "link": "from-plant"}, WRITE, "belongs to mode"),
        ({**BASE, "mode": "put"}, WRITE_STREAM, "put needs the option link"),
        ({**PUT, "ordered": "false"}, WRITE, "put keeps the order"),
        ({**PUT, "confirmAddress": "a:1"}, WRITE, "needs both options confirmAddress and confirmConsumer"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, str], use: str, says: str) -> None:
    """A wrong option says what is wrong with it, and what would be right."""
    with pytest.raises(InvalidArgument) as caught:
        parse(given, use)
    assert says in str(caught.value)
    assert caught.value.hint


def test_an_unknown_option_is_answered_with_the_good_ones() -> None:
    """The hint lists every option of that use and none of another."""
    with pytest.raises(InvalidArgument) as caught:
        parse({**BASE, "nosuch": "1"}, WRITE)
    listed = caught.value.hint.removeprefix("The options of write are ").removesuffix(".").split(", ")
    assert listed == [option.name for option in OPTIONS if WRITE in option.uses]


def test_options_of_spark_itself_are_left_alone() -> None:
    """Spark hands its own options to every source."""
    parse({**BASE, "checkpointLocation": "somewhere", "queryName": "q"}, WRITE_STREAM)


def test_secrets_are_not_repeated_in_errors() -> None:
    """An error about a secret option does not show its value."""
    with pytest.raises(InvalidArgument) as caught:
        parse({**BASE, "key": " "}, READ)
    assert "key" in str(caught.value)
    options = parse({**BASE, "ca": "C4", "cert": "C3RT", "key": "K3Y"}, READ)
    assert "K3Y" not in repr(options.access)


def test_the_class_documents_every_option() -> None:
    """Whoever asks for help on the source sees all options with their defaults."""
    for option in OPTIONS:
        assert f"``{option.name}``" in (FactsSource.__doc__ or "")
        assert option.says.endswith(".")


def test_positions() -> None:
    """A position is a word, an offset or a time."""
    assert position("17") == Position(offset=17)
    assert position(" Earliest ") == Position(word="earliest")
    assert position("1970-01-01T01:00:00.5+01:00") == Position(unix_ms=500)
    assert position("1970-01-01T00:00:00.000001Z") == Position(unix_ms=1)


@given(st.datetimes(datetime(1960, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)))
def test_times_are_rounded_up(moment: datetime) -> None:
    """The first whole millisecond at or after a moment: facts from then on are those from the moment on."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    found = ceil_unix_ms(moment)
    assert epoch + timedelta(milliseconds=found - 1) < moment <= epoch + timedelta(milliseconds=found)
