"""The figures of `bsfg bench pipeline --starts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bsfg.cli.bench.pipeline import show_starts
from bsfg.cli.bench.pipeline_measure import STARTS, aims_of_starts, numbers_of_starts
from bsfg.cli.bench.store import finished


def test_starts_are_held_against_seconds_and_a_bare_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The middle of all rounds counts, each beside what Spark alone takes on the same machine."""
    starts = {"bare": [4.0, 5.0, 40.0], **{name: [10.0, 11.0, 90.0] for name in STARTS}, "land": [13.0, 14.0, 15.0]}
    numbers = finished(numbers_of_starts(starts), aims_of_starts, tmp_path, 60.0)
    assert (numbers["rounds"], numbers["bare_seconds"], numbers["first_fact_seconds"]) == (3, 5.0, 11.0)
    assert (numbers["first_fact_of_bare"], numbers["land_of_bare"]) == (2.2, 2.8)
    assert {aim.name: aim.met for aim in aims_of_starts(numbers)} == {
        "first_fact_seconds": True, "audit_seconds": True, "ingest_seconds": True, "land_seconds": False,
    }  # fmt: skip
    show_starts(numbers)
    assert "a bare session of PySpark that counts one row: 5.0 s" in capsys.readouterr().out
