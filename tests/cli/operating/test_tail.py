"""`bsfg tail` and `bsfg append` by options, against a real node under mutual TLS."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import orjson
import pytest
from tests.cli.operating.conftest import Cli
from tests.e2e.zones import SETTLE_SECONDS, Zone, pair

from bsfg.batch import FactBatch
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.testing.facts import message, messages

COUNT = 3_000
STREAMS = """\
[streams.operational]
[streams.lossy]
store_capacity = "600kB"
max_batch = "500kB"
max_object = "100kB"
overflow = "drop_oldest"
"""


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zone]:
    """A zone with three thousand facts, every hundredth an alarm."""
    zone, _ = pair(tmp_path_factory.mktemp("tail"), streams=STREAMS)
    zone.start()

    async def produce() -> None:
        async with zone.client() as client:
            for first in range(0, COUNT, 1_000):
                facts = [fact(number) for number in range(first, first + 1_000)]
                await client.append("operational", FactBatch.from_messages(facts))

    try:
        asyncio.run(produce())
        yield zone
    finally:
        zone.kill()


def fact(number: int) -> Message:
    """Give a numbered fact of some subject."""
    predicate = "alarm_raised" if number % 100 == 0 else "temperature_measured"
    return message(f"m-{number}", from_zone="plant-a", subject=f"asset:press-{number % 7}", predicate=predicate)


def offsets(lines: list) -> list[int]:  # type: ignore[type-arg]
    """Give the offsets of printed facts."""
    return [line["offset"] for line in lines]


def test_the_newest_come_first_of_all(cli: Cli, plant: Zone) -> None:
    """Ten without a word, so many as are asked for, none twice, in order."""
    config = ("--config", plant.folder / "zone.toml")
    assert offsets(cli("tail", "operational", *config).lines) == list(range(COUNT - 10, COUNT))
    assert offsets(cli("tail", "operational", "-n", 1_700, *config).lines) == list(range(COUNT - 1_700, COUNT))
    assert offsets(cli("tail", "operational", "-n", COUNT + 5, *config).lines) == list(range(COUNT))
    assert cli("tail", "operational", "-n", 0, *config).lines == []


def test_what_fits_is_looked_for_further_back(cli: Cli, plant: Zone) -> None:
    """Filters count: the newest three alarms are those, however far back."""
    config = ("--config", plant.folder / "zone.toml")
    found = cli("tail", "operational", "--predicate", "alarm_*", "--last", 3, *config).lines
    assert offsets(found) == [2_700, 2_800, 2_900]
    found = cli("tail", "operational", "--predicate", "alarm_*", "--subject", "asset:press-0", *config).lines
    assert offsets(found) == [number for number in range(0, COUNT, 100) if number % 7 == 0]
    assert cli("tail", "operational", "--from-zone", "enterprise", *config).lines == []


def test_since_a_moment(cli: Cli, plant: Zone) -> None:
    """A time may be said as how long ago, or as such; everything since then comes."""
    config = ("--config", plant.folder / "zone.toml")
    assert offsets(cli("tail", "operational", "--since", "1h", *config).lines) == list(range(COUNT))
    assert cli("tail", "operational", "--since", "2100-01-01T00:00:00Z", *config).lines == []


def test_what_has_left_is_a_gap(cli: Cli, plant: Zone) -> None:
    """Who asks for more than there is sees what is there, and is told what is not and why."""

    async def produce() -> None:
        async with plant.client() as client:
            for first in range(0, 2_500, 500):
                facts = messages(500, first=first, from_zone="plant-a", object_bytes=200)
                await client.append("lossy", FactBatch.from_messages(facts))

    asyncio.run(produce())
    config = ("--config", plant.folder / "zone.toml")
    last = plant.gaps(Buffer.STORE, "lossy")[-1].last
    found = cli("tail", "lossy", "-n", 10_000, *config).lines
    assert offsets([line for line in found if "gap" not in line]) == list(range(last + 1, 2_500))
    gaps = [line["gap"] for line in found if "gap" in line]
    assert {gap["reason"] for gap in gaps} == {"evicted"}
    assert max(gap["last"] for gap in gaps) == last
    assert offsets(cli("tail", "lossy", *config).lines) == list(range(2_490, 2_500))


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("operational", "--since", "1h", "--last", "3"), "invalid_argument", "both say where to begin"),
        (("operational", "--since", "yesterday"), "invalid_argument", "neither a time nor a duration"),
        (("unheard-of",), "unknown_stream", "unheard-of"),
        (("operational", "--identity", "plant-a-viewer"), "permission_denied", "viewer"),
    ],
)
def test_wrong_words(cli: Cli, plant: Zone, args: tuple[str, ...], code: str, says: str) -> None:
    """Each is one sentence with a code."""
    done = cli("tail", *args, "--config", plant.folder / "zone.toml")
    assert done.code == 1
    assert f"error[{code}]" in done.err
    assert says in done.err


def test_it_follows_and_survives_a_restart(plant: Zone) -> None:
    """Facts come as they are appended, each once, also when the node dies in between; no consumer is left behind."""
    command = [sys.executable, "-m", "bsfg.cli", "tail", "operational", "-n", "1", "--follow"]
    with subprocess.Popen(command, cwd=plant.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tailing:
        assert tailing.stdout is not None
        seen = [orjson.loads(tailing.stdout.readline())["offset"]]
        for number in range(2):
            asyncio.run(appended(plant, f"late-{number}"))
            seen.append(orjson.loads(tailing.stdout.readline())["offset"])
            plant.kill()
            plant.start()
        asyncio.run(appended(plant, "late-2"))
        seen.append(orjson.loads(tailing.stdout.readline())["offset"])
        tailing.send_signal(signal.SIGINT)
        assert tailing.wait(SETTLE_SECONDS) == 130
        assert tailing.stderr is not None
        assert b"Traceback" not in tailing.stderr.read()
    assert seen == list(range(seen[0], seen[0] + 4))
    assert plant.end(Buffer.STORE) == seen[-1] + 1


async def appended(zone: Zone, id_: str) -> None:
    """Append one fact."""
    async with zone.client() as client:
        await client.append_fact("operational", message(id_, from_zone="plant-a"))


@pytest.mark.parametrize(("columns", "lines"), [(80, 2), (120, 1)])
def test_a_person_sees_each_fact_whole(plant: Zone, columns: int, lines: int) -> None:
    """On a terminal a fact is a line that fits, with its object below it where there is no room beside it."""
    own, other = pty.openpty()
    command = [sys.executable, "-m", "bsfg.cli", "tail", "operational", "-n", "3"]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(command, cwd=plant.folder, stdout=other, env=environment) as tailing:
        assert tailing.wait(SETTLE_SECONDS) == 0
    os.close(other)
    text = os.read(own, 1 << 16).decode()
    os.close(own)
    assert len(text.splitlines()) == 3 * lines
    assert text.count("plant-a") == 3


def test_one_fact_by_options(cli: Cli, plant: Zone) -> None:
    """A fact is made of options; said again with its id it is there already, and another body is refused."""
    config = ("--config", plant.folder / "zone.toml")
    base = ("append", "--stream", "operational", "--to-zone", "enterprise", *config, "--json")
    of = ("--subject", "asset:press-1", "--predicate", "alarm_raised")
    before = int(time.time() * 1000)
    assert cli(*base, *of, "--object", '{"code": 7}', "--message-id", "by-hand").json["inserted"] == 1
    last = cli("tail", "operational", "-n", 1, *config).lines[0]
    assert last["fact"] == {"subject": "asset:press-1", "predicate": "alarm_raised", "object": {"code": 7}}
    assert last["envelope"]["message_id"] == "by-hand"
    assert last["envelope"]["produced_at_unix_ms"] >= before
    assert cli(*base, *of, "--object", '{"code": 7}', "--message-id", "by-hand").json["already_exists"] == 1
    other = cli(*base, *of, "--object", '{"code": 8}', "--message-id", "by-hand")
    assert (other.code, other.json["refused"]) == (1, 1)
    assert cli(*base, *of).json["inserted"] == 1
    assert cli(*base, *of).json["inserted"] == 1, "each has an id of its own"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--subject", "a:b"), "need each other"),
        (("--object", "1"), "belong to one fact"),
        (("--subject", "a:b", "--predicate", "p", "--object", "{oops"), "is not JSON"),
        (("facts.jsonl", "--subject", "a:b", "--predicate", "p"), "both say what to append"),
    ],
)
def test_options_that_make_no_fact(cli: Cli, plant: Zone, args: tuple[str, ...], says: str) -> None:
    """Each is one sentence, and nothing is appended."""
    end = plant.end(Buffer.STORE)
    done = cli("append", *args, "--stream", "operational", "--config", plant.folder / "zone.toml")
    assert done.code == 1
    assert "error[invalid_argument]" in done.err
    assert says in done.err
    assert plant.end(Buffer.STORE) == end
