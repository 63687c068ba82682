"""The work folder survives a kill at every single write, notices files that change, and belongs to one run alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.spark.ingesting import asked

from bsfg.errors import BsfgError, FileChanged, FolderLocked, InvalidArgument
from bsfg.spark.calls import NodeAccess
from bsfg.spark.ingest import survey as surveying
from bsfg.spark.ingest.mapped import to_mapped
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.reading import read_chunk
from bsfg.spark.ingest.run import Ingest, IngestSettings, IngestWatch, steps
from bsfg.spark.ingest.survey import Chunk, find, survey
from bsfg.spark.ingest.task import Left
from bsfg.spark.ingest.work import AGAIN, FAIL, SKIP, Counts, IngestWork

PLAN = asked(map={"subject": "asset:{m}"}, object="v").plan()


class Killed(BaseException):
    """The process ends here, as by SIGKILL."""


class WithoutSpark(Ingest):
    """A run whose steps are done in this process, into a node that is a dictionary."""

    def __init__(self, work: IngestWork, plan: IngestPlan, node: dict[str, bytes], step_bytes: int = 1) -> None:
        settings = IngestSettings(NodeAccess("127.0.0.1:1"), step_bytes=step_bytes)
        super().__init__(None, work, plan, settings, IngestWatch())  # type: ignore[arg-type]
        self._node = node

    def survey(self, sources: Sequence[Any]) -> None:
        self._work.take_up([survey(source.path, source.format, self._plan) for source in sources])

    def _do(self, step: Sequence[tuple[int, int, Chunk]]) -> Left:
        left = Left(Counts(), [], {})
        for file, _, chunk in step:
            for rows in read_chunk(self._work.files[file], chunk, self._plan):
                mapped = to_mapped(rows, self._plan)
                for fact in mapped.facts.to_pylist():
                    known = fact["message_id"] in self._node
                    assert self._node.setdefault(fact["message_id"], fact["object"]) == fact["object"]
                    left.counts.already_exists += known
                    left.counts.inserted += not known
                left.rejects.append(b"".join(orjson.dumps(r.to_dict()) + b"\n" for r in mapped.rejects))
                left.counts.facts += mapped.facts.num_rows
                left.counts.rejected += len(mapped.rejects)
                left.counts.rows += mapped.facts.num_rows + len(mapped.rejects)
                path = rows.file.path
                left.by_file[path] = left.by_file.get(path, 0) + len(mapped.rejects)
        return left


def ingest(folder: Path, files: Path, node: dict[str, bytes], *, changed: str = FAIL, again: bool = False) -> Counts:
    """Ingest a folder of files once, and give the counts that a summary would tell."""
    with IngestWork.opened(folder, PLAN, again=again) as work:
        run = WithoutSpark(work, PLAN, node)
        run.survey(work.new_sources(find([str(files)]).files, changed))
        run.run()
        counts = work.progress.counts
        work.report()
    return counts


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder of files with good and bad rows, read in many small chunks."""
    monkeypatch.setattr(surveying, "CHUNK_BYTES", 30)
    monkeypatch.setattr(surveying, "BLOCK_BYTES", 40)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a", "b"):
        rows = [f"{name}{number},{number}" if number % 4 else ",bad" for number in range(12)]
        (folder / f"{name}.csv").write_text("m,v\n" + "\n".join(rows) + "\n")
    (folder / "empty.csv").write_text("m,v\n")
    return folder


def rejected(folder: Path) -> list[tuple[str, int]]:
    """Read the reject file: which rows of which files."""
    lines = (folder / "rejects.jsonl").read_bytes().splitlines()
    return [(Path(reject["file"]).name, reject["row"]) for reject in map(orjson.loads, lines)]


EXPECTED_REJECTS = [(f"{name}.csv", row) for name in "ab" for row in (1, 5, 9)]


class Switch:
    """Kills the process at the n-th time that something is made durable, before or after it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, after: bool) -> None:
        self.at, self.count, self.after = at, 0, after
        for owner, name in ((os, "fsync"), (Path, "replace"), (os, "truncate")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real: Any) -> Any:
        def call(*args: Any) -> Any:
            self.count += 1
            if self.count == self.at and not self.after:
                raise Killed
            result = real(*args)
            if self.count == self.at:
                raise Killed
            return result

        return call


def moments() -> Iterator[tuple[int, bool]]:
    """Give every moment at which a run can be killed, and one that never comes."""
    for at in range(1, 26):
        yield at, False
        yield at, True


@pytest.mark.parametrize("twice", [False, True])
def test_a_kill_at_any_write_loses_nothing_and_repeats_no_reject(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    """Whatever write is the last, the next run ends with all facts, each reject once and in order, and right sums."""
    reached = 0
    for number, (at, after) in enumerate(moments()):
        folder, node = tmp_path / f"work-{number}", dict[str, bytes]()
        for _ in range(2 if twice else 1):
            with monkeypatch.context() as patch:
                Switch(patch, at, after=after)
                try:
                    ingest(folder, files, node)
                except Killed:
                    reached += 1
        counts = ingest(folder, files, node)
        assert rejected(folder) == EXPECTED_REJECTS, (at, after)
        assert len(node) == 18
        if counts.rows:
            assert (counts.rows, counts.facts, counts.rejected) == (24, 18, 6), (at, after)
        assert ingest(folder, files, node).rows == 0
    assert reached > 40


def test_new_files_are_taken_up_and_known_ones_left(tmp_path: Path, files: Path) -> None:
    """A second run takes only files that are new, and its summary is about those."""
    node: dict[str, bytes] = {}
    assert asdict(ingest(tmp_path / "w", files, node)) == {
        "rows": 24, "facts": 18, "inserted": 18, "already_exists": 0, "rejected": 6, "conflicts": 0,
    }  # fmt: skip
    (files / "a0.csv").write_text("m,v\nnew,1\n,2\n")
    counts = ingest(tmp_path / "w", files, node)
    assert (counts.rows, counts.inserted, counts.rejected) == (2, 1, 1)
    assert rejected(tmp_path / "w") == [*EXPECTED_REJECTS, ("a0.csv", 2)]
    counts = ingest(tmp_path / "w", files, node, again=True)
    assert (counts.rows, counts.inserted, counts.already_exists) == (26, 0, 19)
    assert sorted(rejected(tmp_path / "w")) == sorted([*EXPECTED_REJECTS, ("a0.csv", 2)])


def test_a_touched_file_is_the_same_file(tmp_path: Path, files: Path) -> None:
    """A file with a new time and the same content is known by its digest."""
    ingest(tmp_path / "w", files, {})
    os.utime(files / "a.csv", ns=(1, 1))
    assert ingest(tmp_path / "w", files, {}).rows == 0


def test_a_changed_file_is_noticed(tmp_path: Path, files: Path) -> None:
    """A file that is not what it was stops the run, or is taken anew, or left, as the user says."""
    node: dict[str, bytes] = {}
    ingest(tmp_path / "w", files, node)
    with (files / "b.csv").open("a") as file:
        file.write("more,1\n")
    with pytest.raises(FileChanged, match=r"b\.csv has changed since 12 of its 12 rows were ingested"):
        ingest(tmp_path / "w", files, node)
    assert ingest(tmp_path / "w", files, node, changed=SKIP).rows == 0
    assert ingest(tmp_path / "w", files, node).rows == 0
    with (files / "b.csv").open("a") as file:
        file.write("more,2\n")
    counts = ingest(tmp_path / "w", files, node, changed=AGAIN)
    assert (counts.rows, counts.rejected) == (14, 3)
    assert ingest(tmp_path / "w", files, node).rows == 0


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_changes_half_way_is_noticed(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """What is left of a file that changed after a kill is not read as if it were the old one."""
    node: dict[str, bytes] = {}
    with monkeypatch.context() as patch:
        Switch(patch, 8, after=True)
        with pytest.raises(Killed):
            ingest(tmp_path / "w", files, node)
    stored = len(node)
    assert 0 < stored < 18
    with IngestWork.opened(tmp_path / "w", PLAN) as work:
        half = Path(work.files[work.progress.file].path)
    half.unlink() if gone else half.write_text("m,v\nx,1\n")
    with pytest.raises(FileChanged, match=f"{half.name} {'is gone' if gone else 'has changed'} since"):
        ingest(tmp_path / "w", files, node)
    counts = ingest(tmp_path / "w", files, node, changed=SKIP)
    assert half.name == "a.csv"
    assert counts.rows < 24
    assert [row for name, row in rejected(tmp_path / "w") if name == "b.csv"] == [1, 5, 9]
    assert ingest(tmp_path / "w", files, node).rows == 0


def test_a_mended_file_is_taken_without_asking(tmp_path: Path, files: Path) -> None:
    """A file that could not be used is taken when it has become another."""
    bad = files / "bad.csv"
    bad.write_text("other,columns\n1,2\n")
    counts = ingest(tmp_path / "w", files, {})
    assert (counts.rows, counts.rejected) == (25, 7)
    bad.write_text("m,v\nx,1\n")
    counts = ingest(tmp_path / "w", files, {})
    assert (counts.rows, counts.rejected) == (1, 0)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second run in the same folder is told so."""
    with (
        IngestWork.opened(tmp_path / "w", PLAN),
        pytest.raises(FolderLocked, match="another `bsfg pipeline ingest` works in"),
        IngestWork.opened(tmp_path / "w", PLAN),
    ):
        pass


def test_rejects_cannot_disappear(tmp_path: Path, files: Path) -> None:
    """A reject file that became shorter is noticed; beginning anew mends it."""
    ingest(tmp_path / "w", files, {})
    (tmp_path / "w" / "rejects.jsonl").write_text("")
    with pytest.raises(FileChanged, match="is shorter than it was"):
        ingest(tmp_path / "w", files, {})
    ingest(tmp_path / "w", files, {}, again=True)
    assert rejected(tmp_path / "w") == EXPECTED_REJECTS


def test_another_version_is_refused(tmp_path: Path) -> None:
    """A folder of another version is not guessed at."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "job.json").write_bytes(orjson.dumps({"version": 99, "files": []}))
    with pytest.raises(BsfgError, match="another version"), IngestWork.opened(tmp_path / "w", PLAN):
        pass


def test_steps_are_of_a_size() -> None:
    """Chunks are put together until a step has its size, and a large one stands alone."""
    chunks = [(0, at, Chunk(0, size, 1, 1)) for at, size in enumerate([4, 4, 4, 20, 1, 1])]
    assert [[piece[1] for piece in step] for step in steps(chunks, 10)] == [[0, 1], [2], [3], [4, 5]]
    assert steps([], 10) == []


def test_a_mapping_that_fits_no_file_is_refused(tmp_path: Path) -> None:
    """When every file lacks a column the mapping is wrong, and nothing is taken up."""

    class Surveyed(WithoutSpark):
        def _told(self, work: Any) -> Any:
            return [[orjson.dumps(survey(str(path), "csv", PLAN).to_dict())] for path in paths]

        survey = Ingest.survey

    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for path in paths:
        path.write_text("machine,v\n1,2\n")
    with IngestWork.opened(tmp_path / "w", PLAN) as work:
        with pytest.raises(InvalidArgument, match="has no column 'm'; it has machine, v"):
            Surveyed(work, PLAN, {}).survey(find([str(path) for path in paths]).files)
        assert work.files == []
        paths[1].write_text("m,v\n1,2\n")
        Surveyed(work, PLAN, {}).survey(find([str(path) for path in paths]).files)
        assert [file.problem is None for file in work.files] == [False, True]
