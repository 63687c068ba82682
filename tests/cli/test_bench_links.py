"""The senders of `bsfg bench pipeline --links`, and all of it in the long form."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bsfg.batch import FactBatch
from bsfg.cli.bench import pipeline_links
from bsfg.cli.bench.pipeline_links import APPENDS_PER_SECOND, HUB, Senders
from bsfg.cli.zones import certificates


class _Noting:
    """A store that notes what it is given."""

    def __init__(self) -> None:
        self.taken: list[FactBatch] = []

    async def append(self, facts: FactBatch) -> None:
        self.taken.append(facts)


@pytest.mark.parametrize("rate", [APPENDS_PER_SECOND, 10 * APPENDS_PER_SECOND])
def test_facts_are_shared_out_in_the_order_of_the_senders(rate: int) -> None:
    """Every sender appends its share once and in order, at a high rate several facts at once, each with its time."""
    stores = [_Noting() for _ in range(3)]
    senders = [pipeline_links._Sender(number, f"site-{number}", store) for number, store in enumerate(stores)]
    for _ in range(2):
        times = asyncio.run(pipeline_links._append(senders, rate, 64))
    assert sum(map(len, times)) == 64
    for number, (store, noted) in enumerate(zip(stores, times, strict=True)):
        ids = [text for facts in store.taken for text in facts.values("message_id")]
        assert sorted(set(ids)) == ids and len(ids) == 2 * len(noted)
        assert noted == sorted(noted)
        assert {facts.values("from_zone")[0] for facts in store.taken} == {f"site-{number}"}
        assert max(map(len, store.taken)) == rate // APPENDS_PER_SECOND


@pytest.fixture
def senders(tmp_path: Path) -> Iterator[Senders]:
    """Two senders in a process of their own."""
    zones = ["site-0000", "site-0001"]
    certificates(tmp_path / "certs", [HUB, *zones], ("producer",))
    running = Senders(tmp_path, zones)
    yield running
    running.close()


def test_senders_are_nodes_that_append_when_told(senders: Senders) -> None:
    """The process answers with its ports, and then with the moment at which each fact was stored."""
    assert len(set(senders.ports)) == 2
    assert [len(times) for times in senders.append(APPENDS_PER_SECOND, 9)] == [5, 4]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_links_are_measured(tmp_path: Path) -> None:
    """Every figure is there, for links that all move."""
    command = [sys.executable, "-m", "bsfg", "bench", "pipeline", "--links", "3", "--seconds", "5", "--json"]
    done = subprocess.run([*command, "--dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["links"] == 3 and 0 < numbers["lag_ms_p50"] <= numbers["lag_ms_p99"]
    assert min(numbers[name] for name in ("memory_mb", "processes", "all_moving_seconds", "after_kill_seconds")) > 0
