"""Verifying a data folder: every frame, the whole chain, key segments, index runs, notes and cursors.

It only reads, and works while the node runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from bsfg.batch import FactBatch
from bsfg.digest import KeyHash
from bsfg.errors import BsfgError, HasherUnknown
from bsfg.rows import Row
from bsfg.sealing import digest_mismatches
from bsfg.stores.log import keysegments
from bsfg.stores.log.damage import DamageFinding, readable, uncovered
from bsfg.stores.log.files import DiskFiles, Files, translated
from bsfg.stores.log.identity import read_identity
from bsfg.stores.log.index import Run, decode_run
from bsfg.stores.log.indexstore import PART
from bsfg.stores.log.journal import Record, read_journal
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.segments import SegmentFile, scan_segment, segment_bases, segment_name
from bsfg.stores.log.storage import CURSORS, cursor_from
from bsfg.stores.log.trailcheck import TrailReport, check_trail
from bsfg.stores.log.trailfile import FOLDER as TRAIL
from bsfg.stores.log.view import LogView
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, ROWS, Damaged, Torn, decode_payload, decode_rows, rows_batch

_ROWS_AT_ONCE = 2_048

Progress = Callable[[int, int], None]
"""Told the bytes verified so far and in all."""


@dataclass(slots=True)
class LogReport:
    """What was found in one log."""

    stream: str
    buffer: str
    log_id: str = ""
    start: int = 0
    end: int = 0
    facts: int = 0
    frames: int = 0
    segments: int = 0
    key_segments: int = 0
    index_runs: int = 0
    gaps: int = 0
    quarantined: int = 0
    chain_head: str = ""


@dataclass(slots=True)
class Report:
    """What was found in a data folder: ``problems`` are damage, ``notes`` are things worth knowing."""

    logs: list[LogReport] = field(default_factory=list)
    trail: TrailReport | None = None
    problems: list[DamageFinding] = field(default_factory=list)
    notes: list[DamageFinding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.problems


def verify(where: Any, *, progress: Progress | None = None) -> Report:
    """Verify all logs and the cursors of a data folder (a path or a `Files`)."""
    report = Report()
    files: Files = DiskFiles(where) if isinstance(where, str | os.PathLike) else where
    folders = open_folder(where)
    total = sum(_size(folder) for folder in folders)
    done = 0
    ends: dict[tuple[str, str], int] = {}
    # What is confirmed is read before what is there, so that a busy writer cannot make it look ahead of the log.
    records = _read_cursors(folders[0].files, report) if folders else []
    for folder in folders:
        check = _LogCheck(folder, report)
        for size in check.run():
            done += size
            if progress is not None:
                progress(done, total)
        ends[folder.stream, str(folder.buffer)] = check.summary.end
    for record in records:
        cursor = cursor_from(record)
        end = ends.get((cursor.spec.stream, str(cursor.spec.buffer)))
        if end is not None and cursor.frontier.committed >= end:
            detail = f"consumer {cursor.spec.name} has confirmed {cursor.frontier.committed}, the log ends at {end}"
            report.notes.append(DamageFinding("cursor_ahead", CURSORS, detail))
    _check_trail(files, report)
    return report


def _check_trail(files: Files, report: Report) -> None:
    """Check the audit trail, where there is one."""
    try:
        trail = check_trail(files)
    except OSError as error:
        failure = translated(error, "reading")
        report.problems.append(DamageFinding(failure.code, TRAIL, failure.message))
        return
    report.trail = trail if trail.files else None
    report.problems += trail.problems
    report.notes += trail.notes


def _size(folder: LogFolder) -> int:
    total = 0
    for base in segment_bases(folder.files, folder.path):
        with contextlib.suppress(OSError):  # truncated while we were looking, or reported when it is read
            total += folder.files.size(f"{folder.path}/{segment_name(base)}")
    return total


def _retained(view: LogView) -> list[SegmentFile]:
    """Give the segments that hold something retained; a crash may bring back any file that was removed before them."""
    gone = sum(following.base <= view.start for following in view.segments[1:])
    return list(view.segments[gone:])


class _LogCheck:
    """The walk through one log."""

    def __init__(self, folder: LogFolder, report: Report) -> None:
        self._folder, self._report = folder, report
        self.summary = LogReport(folder.stream, str(folder.buffer))
        report.logs.append(self.summary)
        self._key_hash: KeyHash | None = None
        self._hashes: list[tuple[int, np.ndarray]] = []

    def _problem(self, code: str, where: str, detail: str, first: int | None = None, last: int | None = None) -> None:
        self._report.problems.append(DamageFinding(code, where, detail, first, last))

    def run(self) -> Iterator[int]:
        """Check everything; give the sizes of the segments as they are done."""
        try:
            yield from self._run()
        except OSError as error:
            failure = translated(error, "reading")
            self._problem(failure.code, str(error.filename or self._folder.path), failure.message)

    def _run(self) -> Iterator[int]:
        folder = self._folder
        identity = read_identity(folder.files, folder.path)
        if identity is None and not segment_bases(folder.files, folder.path):
            detail = "the log was being made when its writer stopped; nothing was stored in it yet"
            self._report.notes.append(DamageFinding("log_unfinished", folder.path, detail))
            return
        if identity is None:
            self._problem("log_damaged", f"{folder.path}/log.json", "the identity of the log is missing or damaged")
        else:
            self.summary.log_id = identity.log_id.hex()
            self._key_hash = KeyHash(identity.secret)
        _checked_journal(folder.files, f"{folder.path}/notes.journal", self._report)
        try:
            view, notes = folder.look()
        except BsfgError as error:
            self._problem(error.code, folder.path, error.message)
            return
        self.summary.start, self.summary.end = view.start, view.end
        self.summary.gaps, self.summary.quarantined = len(notes.book), len(notes.quarantine)
        yield from self._segments(view, notes)
        self._keys(notes)
        self._index(identity.index_owner if identity else b"")

    def _segments(self, view: LogView, notes: Notes) -> Iterator[int]:
        chain, expected = b"", notes.start
        for segment in _retained(view):
            data = self._read(segment)
            if data is None:
                # Truncated while we were reading; if it was not, its entries are missed below.
                chain, expected = b"", max(expected, self._folder.notes().start)
                continue
            scan = scan_segment(data, segment.header, tail_may_be_torn=segment is view.segments[-1])
            scan.forget_from(view.end)
            if segment.header.is_made_up:
                detail = "the segment header is damaged; the frames behind it are read all the same"
                self._problem("log_damaged", segment.where(0), detail, segment.base)
            for hole in [*scan.holes, *scan.unchained]:
                self._problem("log_damaged", segment.where(hole.position), hole.why, hole.first, hole.last)
            if scan.torn:
                self._note("torn_tail", segment.path, scan.torn)
            missing = segment.base > expected
            on_record = missing and not any(uncovered(expected, segment.base - 1, notes.gaps))
            # Behind entries that are on record as lost the chain goes on from what they were.
            if chain and not on_record and segment.header.chain_before not in (b"", chain):
                self._problem("chain_broken", segment.path, "the chain does not continue from the segment before")
            if missing and not on_record:
                self._problem("log_damaged", segment.path, "entries are missing before", expected, segment.base - 1)
            segment.know(scan)
            self._frames(segment, data)
            chain, expected = scan.chain, max(expected, scan.end, segment.base)
            self.summary.segments += 1
            yield segment.size_bytes
        self.summary.chain_head = chain.hex()
        self._check_end(view, notes, expected)

    def _read(self, segment: SegmentFile) -> bytes | None:
        """Read a segment as it is now; None when it is gone or cannot be read."""
        try:
            data, bad = readable(self._folder.files, segment.path)
            for text in bad:
                self._problem("storage_failed", segment.path, text)
            return data
        except FileNotFoundError:
            return None
        except OSError as error:
            self._problem("storage_failed", segment.path, translated(error, "reading").message)
            return None

    def _check_end(self, view: LogView, notes: Notes, expected: int) -> None:
        """Everything up to the end was acknowledged, so it must be there or be explained."""
        if expected < view.end and any(uncovered(expected, view.end - 1, notes.gaps)):
            detail = "acknowledged entries are missing at the end"
            self._problem("log_damaged", self._folder.path, detail, expected, view.end - 1)
        for gap in notes.gaps:
            if gap.reason in ("damaged", "lost") and gap.origin_zone is None and gap.last >= notes.start:
                self._problem("entries_lost", self._folder.path, f"{gap.reason}: {gap.detail}", gap.first, gap.last)

    def _frames(self, segment: SegmentFile, data: bytes) -> None:
        """Check the digests of all facts and remember their keys for the index; small frames are checked together."""
        schema, view = segment.header.schema, memoryview(data)
        rows: list[Row] = []
        base = 0
        for ref in segment.frames:
            start = ref.position + FRAME_HEADER_BYTES
            payload = view[start : start + ref.header.payload_bytes]
            if rows and (ref.base != base + len(rows) or len(rows) >= _ROWS_AT_ONCE or ref.header.form != ROWS):
                self._facts(rows_batch(rows, schema), segment.path, base)
                rows = []
            try:
                if ref.header.form == ROWS:
                    found = decode_rows(ref.header, payload, schema)
                    base = base if rows else ref.base
                    rows += found
                else:
                    batch = decode_payload(ref.header, payload, schema)
                    batch.validate(full=True)
                    self._facts(batch, segment.path, ref.base)
            except (Damaged, Torn, ValueError) as error:
                self._problem("log_damaged", segment.where(ref.position), str(error), ref.base, ref.end - 1)
                continue
            self.summary.facts += ref.count
            self.summary.frames += 1
        if rows:
            self._facts(rows_batch(rows, schema), segment.path, base)

    def _facts(self, batch: pa.RecordBatch, path: str, base: int) -> None:
        facts = FactBatch(batch.select(FactBatch.schema.names))
        self._digests(facts, path, base)
        if self._key_hash is not None:
            hashes = self._key_hash.of(facts.column("from_zone"), facts.column("message_id"))
            self._hashes.append((base, hashes))

    def _digests(self, facts: FactBatch, path: str, base: int) -> None:
        """Check the digests of a frame's facts, or say that some of them cannot be checked here."""
        try:
            wrong = digest_mismatches(facts)
        except HasherUnknown as error:
            self._problem(error.code, path, error.message, base, base + len(facts) - 1)
            return
        for row in wrong[:10].tolist():
            detail = "the digest is not that of the fact"
            self._problem("digest_mismatch", path, detail, base + row, base + row)

    def _keys(self, notes: Notes) -> None:
        """Check the key segments, and that all are there that the notes speak of.

        Keys are written before they are noted, and are noted as forgotten before they go. So one is missing only if it
        was noted before the looking, and is not forgotten after it.
        """
        folder = self._folder
        names = keysegments.listed(folder.files, folder.path)
        self.summary.key_segments = len(names)
        for name in names:
            where = f"{folder.path}/keys/{name.file_name}"
            if keysegments.read(folder.files, folder.path, name) is None and folder.files.exists(where):
                self._problem("keys_damaged", where, "the key segment fails its checks", name.first, name.last)
        known = {(name.first, name.last) for name in names}
        missing = [anchor for anchor in notes.anchors if (anchor.first, anchor.last) not in known]
        kept_from = folder.notes().keys_start if missing else 0
        for anchor in missing:
            if anchor.first >= kept_from and anchor.last >= anchor.first:
                self._problem(
                    "keys_missing", f"{folder.path}/keys", "a key segment is missing", anchor.first, anchor.last
                )

    def _index(self, owner: bytes) -> None:
        """Check that every run is whole, and that none lacks a key it claims to cover."""
        folder = self._folder
        stored = np.sort(np.concatenate([hashes for _, hashes in self._hashes] or [np.empty(0, dtype=np.uint64)]))
        # A key stored twice shows as a hash that appears twice (or, once in 2^64, as chance).
        repeated = int(np.count_nonzero(stored[1:] == stored[:-1])) if len(stored) > 1 else 0
        if repeated:
            self._problem("stored_twice", self._folder.path, f"{repeated} keys are stored more than once")
        for name in folder.files.list(f"{folder.path}/index"):
            if name.endswith(PART):
                continue  # a merge that is under way, or was
            where = f"{folder.path}/index/{name}"
            try:
                decoded = decode_run(folder.files.read(where), owner)
            except FileNotFoundError:
                continue  # merged while we were reading
            if decoded is None:
                self._note("index_stale", where, "not usable; it is rebuilt at the next open")
                continue
            self.summary.index_runs += 1
            self._check_run(decoded[0], where)

    def _check_run(self, run: Run, where: str) -> None:
        if len(run.hashes) > 1 and not (run.hashes[:-1] <= run.hashes[1:]).all():
            self._note("index_stale", where, "its hashes are not in order")
            return
        if run.last >= self.summary.end and run.last >= self._folder.view().end:
            self._note("index_stale", where, "it is ahead of the log; it is rebuilt at the next open", run)
            return
        for base, hashes in self._hashes:
            part = np.sort(hashes[max(0, run.first - base) : max(0, run.last + 1 - base)])
            places = np.searchsorted(run.hashes, part)
            found = places < len(run.hashes)
            found[found] = run.hashes[places[found]] == part[found]
            if not found.all():
                lacking = int(np.count_nonzero(~found))
                self._problem("index_damaged", where, f"lacks {lacking} keys it should have", run.first, run.last)
                return

    def _note(self, code: str, where: str, detail: str, run: Run | None = None) -> None:
        first, last = (run.first, run.last) if run is not None else (None, None)
        self._report.notes.append(DamageFinding(code, where, detail, first, last))


def _read_cursors(files: Files, report: Report) -> list[Record]:
    try:
        return _checked_journal(files, CURSORS, report)
    except OSError as error:
        failure = translated(error, "reading")
        report.problems.append(DamageFinding(failure.code, CURSORS, failure.message))
        return []


def _checked_journal(files: Files, path: str, report: Report) -> list[Record]:
    """Read a journal and report what is wrong with it; an end that a writer is just adding is looked at again."""
    records, sound, problems = read_journal(files, path)
    torn = files.size(path) - sound if files.exists(path) else 0
    if torn:
        records, again, problems = read_journal(files, path)
        torn = torn if again == sound else 0
    report.problems += [DamageFinding("log_damaged", path, text) for text in problems]
    if torn:
        detail = f"the last {torn} bytes are no record: torn by a crash, or the last record was damaged"
        report.notes.append(DamageFinding("torn_tail", path, detail))
    return records
