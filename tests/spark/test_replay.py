"""How a backlog is cut into micro-batches."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows

from bsfg.journey.link import Fetched
from bsfg.spark.calls import BufferSource
from bsfg.spark.options import READ_STREAM, parse
from bsfg.spark.replicate.replay import BATCH_FACTS_MAX, Replay
from bsfg.spark.source import FactsStreamReader

LOG = "00" * 16
OPTIONS = {"address": "127.0.0.1:1", "stream": "operational"}


def batches(start: int, target: int, most: int, later: int) -> list[int]:
    """Give the sizes of the micro-batches of a query that reads what there is, while more comes."""
    with pytest.MonkeyPatch.context() as patched:
        ends = [target]
        patched.setattr(BufferSource, "head", lambda source: Fetched(LOG, 0, ends[0], b"", [], []))
        reader = FactsStreamReader(parse(OPTIONS, READ_STREAM), ["offset"])
        reader.prepareForTriggerAvailableNow()
        ends[0] += later
        at, sizes = start, list[int]()
        while at < target:
            end: dict[str, Any] = reader.latestOffset({"log_id": LOG, "offset": at}, ReadMaxRows(most))
            sizes.append(end["offset"] - at)
            at = end["offset"]
        assert at == target
        assert reader.latestOffset({"log_id": LOG, "offset": at}, ReadMaxRows(most))["offset"] == target
    return sizes


@given(st.integers(0, 10**6), st.integers(1, 50_000_000), st.integers(0, 10**6))
def test_a_backlog_is_cut_into_even_parts(start: int, facts: int, later: int) -> None:
    """As few parts as can be, and none is a small rest, which would cost as much as the others."""
    sizes = batches(start, start + facts, BATCH_FACTS_MAX, later)
    assert len(sizes) == -(-facts // BATCH_FACTS_MAX)
    assert max(sizes) - min(sizes) <= 1


def test_a_small_limit_is_kept() -> None:
    """Who wants few facts in each gets no more, and even parts, too."""
    assert batches(5, 26, 10, 1) == [7, 7, 7]
    assert batches(0, 3, 1, 0) == [1, 1, 1]


@pytest.mark.parametrize("form", [lambda end: end, lambda end: orjson.dumps(end).decode()])
def test_a_replay_counts_what_it_has_moved(form: Callable[[dict[str, Any]], Any]) -> None:
    """It goes by the micro-batches that are done, whatever there was when it was planned."""
    plan: Any = None
    query: Any = SimpleNamespace(lastProgress=None)
    replay = Replay(plan, plan, "lease", 100, query)
    assert replay.facts == 0
    query.lastProgress = {"sources": [{"endOffset": form({"log_id": LOG, "offset": 140})}]}
    assert replay.facts == 40
