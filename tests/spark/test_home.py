"""Spark's Python workers import the installed PySpark, whose modules are compiled, and not an archive of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyspark
import pytest

from bsfg.spark.session import REDACTION, SECRET_OPTIONS, SPARK_REDACTION, home_in_use, light_home, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have an environment in which nobody has chosen a Spark, and a cache of one's own."""
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_workers_use_the_installed_package(spark: SparkSession) -> None:
    """A worker's PySpark is the one of this environment."""

    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark as found

        for _ in batches:
            yield pa.RecordBatch.from_pylist([{"file": found.__file__}])

    rows = spark.range(1).mapInArrow(where, "file string").collect()
    assert [row["file"] for row in rows] == [pyspark.__file__]


def test_the_home_has_what_spark_needs_but_the_archive() -> None:
    """Programs and libraries are there, by links; the archive of Python modules is not."""
    home = light_home()
    assert home is not None
    assert (home / "bin" / "spark-submit").is_file()
    assert (home / "jars").is_dir()
    assert not (home / "python").exists()
    assert light_home() == home


def test_it_is_in_use_for_a_while_only() -> None:
    """SPARK_HOME is set inside the block, and gone behind it."""
    with home_in_use() as home:
        assert os.environ["SPARK_HOME"] == str(home)
    assert "SPARK_HOME" not in os.environ


@pytest.mark.parametrize(("name", "value"), [("SPARK_HOME", "elsewhere"), ("PYSPARK_PYTHON", "another-python")])
def test_what_somebody_has_chosen_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A Spark or a Python that is named in the environment is used as it is."""
    monkeypatch.setenv(name, value)
    before = os.environ.get("SPARK_HOME")
    with home_in_use() as home:
        assert home is None
        assert os.environ.get("SPARK_HOME") == before


def test_this_python_is_no_other_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming the Python that runs already changes nothing."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with home_in_use() as home:
        assert home is not None


def test_a_folder_that_others_can_change_is_not_used(tmp_path: Path) -> None:
    """Where somebody else could put his own programs, another place is taken."""
    home = light_home()
    assert home is not None
    home.chmod(0o777)
    found = light_home()
    assert found != home


def test_a_group_that_may_write_new_files_is_no_obstacle() -> None:
    """Many systems give every user a group of his own and a umask of 002; our folders are for us alone."""
    before = os.umask(0o002)
    try:
        home = light_home()
    finally:
        os.umask(before)
    assert home is not None and home.parent.name == "bsfg"


@pytest.mark.parametrize("name", ["with space", "with:colon", "with'quote", 'with"quotes', "with\\slash", "with$HOME"])
def test_a_cache_whose_name_java_would_take_apart_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Options and class paths are cut at such letters: with an archive there, no Spark would start any more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    home = light_home()
    assert home is not None and home.parent == tmp_path / f"bsfg-{os.getuid()}"


def test_a_session_that_runs_keeps_its_settings(spark: SparkSession) -> None:
    """Somebody's own session, time zone and plans are not changed behind their back; but secrets are hidden."""
    theirs = {
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.codegen.wholeStage": "true",
        "spark.sql.session.timeZone": "Europe/Berlin",
        REDACTION: SPARK_REDACTION,
    }
    asked = {"spark.sql.shuffle.partitions": "7"}
    before = {name: spark.conf.get(name) for name in (*theirs, *asked)}
    try:
        for name, value in theirs.items():
            spark.conf.set(name, value)
        found = session("another", "local[2]", asked)
        wanted = {**theirs, **asked, REDACTION: SECRET_OPTIONS}
        assert {name: found.conf.get(name) for name in wanted} == wanted
    finally:
        for name, earlier in before.items():
            spark.conf.set(name, str(earlier))
