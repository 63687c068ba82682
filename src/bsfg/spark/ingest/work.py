"""The work folder: which files a job has taken up, how far it is, and the rows that it rejected.

Two files hold what matters, each replaced as a whole and synced: ``job.json`` with the survey of every file, and
``progress.json`` with the place up to which chunks are done. The reject file only grows; what stands in it beyond the
length that the progress names belongs to a step that was cut off, and is written again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from bsfg.disk import replace_file
from bsfg.errors import FileChanged, FolderLocked, FormatUnsupported
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.survey import Chunk, FileSurvey, SourceFile, digest_of, stamp_of
from bsfg.stores.log.files import translated

VERSION = 1
FAIL, AGAIN, SKIP = "fail", "again", "skip"
CHANGED = (FAIL, AGAIN, SKIP)


@dataclass(slots=True)
class Counts:
    """What became of rows; ``facts`` of them reached the node."""

    rows: int = 0
    facts: int = 0
    inserted: int = 0
    already_exists: int = 0
    rejected: int = 0
    conflicts: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of another part."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(slots=True)
class IngestProgress:
    """How far a job is: files before ``file`` are done, and of that one the chunks before ``chunk``.

    ``counts`` are those of the files from ``reported`` on, about which no summary has been given yet; their rejects
    begin at ``reported_bytes``.
    """

    file: int = 0
    chunk: int = 0
    reject_bytes: int = 0
    reported: int = 0
    reported_bytes: int = 0
    counts: Counts = field(default_factory=Counts)
    rejected: dict[str, int] = field(default_factory=dict)


class IngestWork:
    """One job's part of a work folder; `opened` gives it to one process at a time."""

    def __init__(self, folder: Path, plan: IngestPlan) -> None:
        self.folder, self._plan = folder, plan
        self.files: list[FileSurvey] = []
        self.progress = IngestProgress()

    @property
    def rejects(self) -> Path:
        """The reject file."""
        return self.folder / "rejects.jsonl"

    @property
    def parts(self) -> Path:
        """Where tasks leave what they found, until a step is done."""
        return self.folder / "parts"

    @staticmethod
    @contextmanager
    def opened(folder: Path, plan: IngestPlan, *, again: bool = False) -> Iterator[IngestWork]:
        """Open the folder of a job, made if need be; ``again`` forgets what an earlier run did."""
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                hint = "Wait for the other run, or stop it; it is safe to run this again afterwards."
                raise FolderLocked(f"another `bsfg pipeline ingest` works in {folder}", hint=hint) from None
            work = IngestWork(folder, plan)
            with _told(folder):
                if again:
                    work._forget()
                work._load()
            yield work

    def _forget(self) -> None:
        for path in (self.folder / "progress.json", self.folder / "job.json", self.rejects):
            path.unlink(missing_ok=True)

    def _load(self) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        self.parts.mkdir()
        job = _read(self.folder / "job.json")
        if job is not None:
            if job["version"] != VERSION:
                raise FormatUnsupported(f"{self.folder} was written by another version of BSFG")
            self.files = [FileSurvey.from_dict(each) for each in job["files"]]
        found = _read(self.folder / "progress.json")
        if found is not None:
            self.progress = IngestProgress(**{**found, "counts": Counts(**found["counts"])})
        size = self.rejects.stat().st_size if self.rejects.exists() else 0
        if size < self.progress.reject_bytes:
            hint = "Restore it, or begin anew with --again: what is stored already is recognised."
            raise FileChanged(f"{self.rejects} is shorter than it was: rejected rows were taken out of it", hint=hint)
        if size > self.progress.reject_bytes:
            os.truncate(self.rejects, self.progress.reject_bytes)

    # The files.

    def new_sources(self, sources: Iterable[SourceFile], changed: str) -> list[SourceFile]:
        """Give the files that must be surveyed: those that are new, and changed ones that are to be taken again.

        Raises `FileChanged` for a known file that is not what it was, unless ``changed`` says what to do about it.
        """
        known = {survey.path: number for number, survey in enumerate(self.files)}
        wanted = {source.path: source for source in sources}
        unfinished = {survey.path for survey in self.files[self.progress.file :]}
        result = [source for path, source in wanted.items() if path not in known]
        for path, number in known.items():
            if (path in wanted or path in unfinished) and not self._is_same(self.files[number]):
                result += self._changed(number, wanted.get(path), changed)
        return result

    def _is_same(self, survey: FileSurvey) -> bool:
        try:
            stamp = stamp_of(survey.path)
            if stamp == survey.stamp:
                return True
            if not survey.digest or digest_of(survey.path) != survey.digest:
                return False
        except OSError:
            return False
        survey.size_bytes, survey.mtime_ns = stamp
        return True

    def _changed(self, number: int, source: SourceFile | None, changed: str) -> list[SourceFile]:
        survey = self.files[number]
        exists = os.path.exists(survey.path)
        if survey.problem is not None and source is not None:
            changed = AGAIN  # a file that could not be used may be mended without asking
        if changed == FAIL:
            done = sum(chunk.rows for chunk in self.files[number].chunks[: self._chunks_done(number)])
            gone = "has changed" if exists else "is gone"
            raise FileChanged(f"{survey.path} {gone} since {done:,} of its {survey.rows:,} rows were ingested")
        survey.chunks = survey.chunks[: self._chunks_done(number)]
        if changed == AGAIN and source is not None and exists:
            survey.path = f"{survey.path} (before it changed)"
            return [source]
        if exists:
            # What it is now is what the next run compares it with.
            survey.size_bytes, survey.mtime_ns, survey.digest = *stamp_of(survey.path), digest_of(survey.path)
        return []

    def _chunks_done(self, number: int) -> int:
        if number < self.progress.file:
            return len(self.files[number].chunks)
        return self.progress.chunk if number == self.progress.file else 0

    def take_up(self, surveys: Iterable[FileSurvey]) -> None:
        """Add files behind those that are known, and make that durable."""
        self.files += surveys
        job = {"version": VERSION, "plan": self._plan.to_dict(), "files": [each.to_dict() for each in self.files]}
        with _told(self.folder):
            replace_file(self.folder / "job.json", orjson.dumps(job))

    # The way through them.

    def ahead(self) -> list[tuple[int, int, Chunk]]:
        """Give the chunks that are left, each with the numbers of its file and of itself."""
        result = []
        for number in range(self.progress.file, len(self.files)):
            first = self._chunks_done(number)
            result += [(number, at, c) for at, c in enumerate(self.files[number].chunks) if at >= first]
        return result

    def open_files(self) -> list[FileSurvey]:
        """Give the files about which no summary has been given."""
        return self.files[self.progress.reported :]

    def advance(self, file: int, chunk: int, counts: Counts, rejects: Iterable[bytes], by_file: dict[str, int]) -> None:
        """Note that everything up to a chunk is done, with the rejects of it; durable when this returns."""
        progress = self.progress
        with _told(self.folder), self.rejects.open("ab") as out:
            for data in rejects:
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
            progress.reject_bytes = out.tell()
        progress.counts.add(counts)
        for path, rejected in by_file.items():
            progress.rejected[path] = progress.rejected.get(path, 0) + rejected
        last = chunk + 1 >= len(self.files[file].chunks)
        progress.file, progress.chunk = (file + 1, 0) if last else (file, chunk + 1)
        self._save()

    def report(self) -> None:
        """Note that a summary was given; the next one is about files that come later."""
        progress = self.progress
        progress.file, progress.chunk, progress.reported = len(self.files), 0, len(self.files)
        progress.counts, progress.rejected, progress.reported_bytes = Counts(), {}, progress.reject_bytes
        self._save()

    def _save(self) -> None:
        with _told(self.folder):
            replace_file(self.folder / "progress.json", orjson.dumps(asdict(self.progress)))


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Tell what the disk refuses in our own words."""
    try:
        yield
    except OSError as error:
        raise translated(error, f"writing to {folder}") from None


def _read(path: Path) -> Any:
    return orjson.loads(path.read_bytes()) if path.exists() else None
