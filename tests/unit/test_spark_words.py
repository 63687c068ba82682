"""What Spark and Java say reaches a person as a sentence of ours; their own words are in a file that the hint names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bsfg.errors import BsfgError, SparkFailed
from bsfg.spark.errors import told_by_spark
from bsfg.spark.land import staging
from bsfg.spark.replicate.replay import live_failure
from bsfg.spark.session import WORDS as SPOKEN

WORDS = """An error occurred while calling o87.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2898)
"""
TELLERS = [told_by_spark, live_failure]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the session of this process writes."""
    monkeypatch.setattr(SPOKEN, "log", tmp_path / "spark.log")
    return tmp_path / "spark.log"


@pytest.mark.parametrize("teller", TELLERS)
def test_a_failure_is_told_in_our_words(teller: Callable[[BaseException], BsfgError], log: Path) -> None:
    """No class, no trace and no task of Spark in what a person reads; all of it in the file."""
    error = teller(RuntimeError(WORDS))
    assert isinstance(error, SparkFailed)
    for theirs in ("org.apache", "o87", "Exception", "stage", "Job"):
        assert theirs not in f"{error.message} {error.hint}"
    assert str(log) in error.hint
    assert WORDS in log.read_text()


@pytest.mark.parametrize("teller", TELLERS)
def test_what_an_operator_can_change_is_named(teller: Callable[[BaseException], BsfgError], log: Path) -> None:
    """Memory and disk are said as such, with what to do."""
    error = teller(RuntimeError("java.lang.OutOfMemoryError: Java heap space"))
    assert "memory" in error.message and "spark.driver.memory" in error.hint and "heap" not in error.message
    error = teller(RuntimeError("java.io.IOException: No space left on device"))
    assert "disk is full" in error.message and "IOException" not in error.message


def test_without_a_file_the_hint_says_how_to_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that uses the pipelines as a library has no file."""
    monkeypatch.setattr(SPOKEN, "log", None)
    error = told_by_spark(RuntimeError(WORDS))
    assert "org.apache" not in error.message and "BSFG_DEBUG" in error.hint


def test_an_error_of_ours_within_theirs_stays_ours() -> None:
    """The sentence of ours that a query failed with is what is told."""
    text = f"{WORDS}bsfg.errors.links.PeerUnreachable: plant:9443 cannot be reached\n\n{WORDS}"
    assert told_by_spark(RuntimeError(text)).message == "plant:9443 cannot be reached"


def test_tasks_of_a_landing_fail_in_our_words(log: Path) -> None:
    """So does what the landing runs on Spark."""

    class Broken:
        """A session whose jobs all fail."""

        @property
        def sparkContext(self) -> None:
            raise RuntimeError(WORDS)

    with pytest.raises(SparkFailed) as caught:
        staging._run(Broken(), 1, lambda number: {})  # type: ignore[arg-type]
    assert "org.apache" not in str(caught.value) and str(log) in caught.value.hint
