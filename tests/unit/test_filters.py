"""A filter wants the facts that fit in every respect it names, and is refused when it is too much to try."""

import random
import re
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.batch import EntryBatch
from bsfg.errors import InvalidArgument
from bsfg.filters import EVERY_FACT, FactFilter, fitting
from bsfg.testing.facts import message, sealed

SAID = [
    message("1", subject="asset:press-1", predicate="alarm_raised"),
    message("2", subject="asset:press-2", predicate="temperature_measured"),
    message("3", subject="asset:oven.1", predicate="alarm_raised", to_zone="idmz"),
    message("4", subject="line:über/1", predicate="seen", from_zone="north"),
]
ENTRIES = EntryBatch.of(sealed(SAID).record_batch, np.arange(4), 1_000)
PRODUCED = SAID[0].envelope.produced_at_unix_ms


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (EVERY_FACT, "1234"),
        (FactFilter(subjects=("asset:press-*",)), "12"),
        (FactFilter(subjects=("asset:press-*",), predicates=("alarm_*",)), "1"),
        (FactFilter(predicates=("seen", "*_measured")), "24"),
        (FactFilter(subjects=("asset:oven.1",)), "3"),
        (FactFilter(subjects=("asset:oven?1", "asset:oven", "press-1", "")[:3]), ""),
        (FactFilter(subjects=("line*1",)), "4"),
        (FactFilter(from_zones=("north",)), "4"),
        (FactFilter(to_zones=("idmz", "nowhere")), "3"),
        (FactFilter(produced_from_unix_ms=PRODUCED), "1234"),
        (FactFilter(produced_from_unix_ms=PRODUCED + 1), ""),
        (FactFilter(produced_before_unix_ms=PRODUCED), ""),
        (FactFilter(produced_before_unix_ms=PRODUCED + 1), "1234"),
    ],
)
def test_what_fits_in_every_respect_is_wanted(wanted: FactFilter, ids: str) -> None:
    """Within a respect one pattern is enough, between respects all must fit; one fact alone is judged alike."""
    found = [
        entry.message.envelope.message_id for entry in ENTRIES.take(np.flatnonzero(wanted.wanted(ENTRIES))).to_entries()
    ]
    assert "".join(map(str, found)) == ids
    if wanted.produced_from_unix_ms is None and wanted.produced_before_unix_ms is None:
        assert [str(each.envelope.message_id) for each in SAID if wanted.fits(each)] == list(ids)


TEXTS = st.text("ab*.\n(ü", max_size=6)


@given(st.lists(st.none() | TEXTS, max_size=8), st.lists(TEXTS.filter(bool), min_size=1, max_size=3))
def test_patterns_mean_what_they_say(texts: list[str | None], patterns: list[str]) -> None:
    """The star stands for any text, everything else for itself, and what is not there fits nothing."""

    def fits(text: str | None) -> bool:
        each = (".*".join(re.escape(part) for part in pattern.split("*")) for pattern in patterns)
        return text is not None and any(re.fullmatch(one, text, re.DOTALL) for one in each)

    assert fitting(pa.array(texts, pa.string()), patterns).tolist() == [fits(text) for text in texts]


def test_a_filter_that_is_too_much_is_refused() -> None:
    """There is a bound to patterns and to their length, and the largest filter can be tried."""
    with pytest.raises(InvalidArgument, match="subjects has 101 patterns"):
        FactFilter(subjects=tuple(map(str, range(101))))
    with pytest.raises(InvalidArgument, match="a pattern of predicates has 513 characters"):
        FactFilter(predicates=("x" * 513,))
    with pytest.raises(InvalidArgument, match="0 characters"):
        FactFilter(to_zones=("",))
    with pytest.raises(InvalidArgument, match="a pattern of subjects has 9 \\*, the limit is 8"):
        FactFilter(subjects=("a*" * 9,))
    largest = FactFilter(subjects=tuple(f"{number}*" + "a*ü" * 7 + "x" * 480 for number in range(100)))
    assert not largest.wanted(ENTRIES).any()


def test_patterns_that_were_thought_of_for_it_cost_little() -> None:
    """As one regular expression these took more than a minute: too many states to keep, and one more for each byte."""
    made = random.Random(1)
    texts = ["".join(made.choices("ab", k=1_000)) for _ in range(400)]
    pieces = (["".join(made.choices("ab", k=9)) for _ in range(7)] for _ in range(100))
    patterns = tuple(f"*{'*'.join(each)}x*" for each in pieces)
    began = time.process_time()
    assert not fitting(pa.array(texts), patterns).any()
    assert time.process_time() - began < 2
