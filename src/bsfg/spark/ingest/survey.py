"""The first look at files: which are meant, where their records begin, and the chunks in which they are read later."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bsfg.errors import FileChanged, FileUnreadable, InvalidArgument
from bsfg.spark.ingest.plan import IngestPlan

NEWLINE, RETURN, QUOTE = 10, 13, 34
_NO_ENDS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the whole records of a block end, each just behind its line break.

    ``regular`` says that all quotes are where they must be, so that any reader of CSV agrees about the fields.
    """

    at: np.ndarray
    regular: bool = True

    @property
    def covered(self) -> int:
        """How many bytes belong to whole records."""
        return int(self.at[-1]) if len(self.at) else 0


@dataclass
class TextRecords:
    """Records of a text file: the bytes, and where each record begins and ends; empty lines lie between them."""

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    regular: bool

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def _breaks(self) -> np.ndarray:
        return np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) == NEWLINE)

    def lines_before(self, at: int) -> int:
        """Count the line breaks before a place."""
        return int(np.searchsorted(self._breaks, at))

    def record(self, at: int) -> bytes:
        """Give one record with its line break."""
        return self.data[int(self.starts[at]) : int(self.ends[at])]


def record_ends(data: bytes, delimiter: str | None, *, final: bool) -> Ends:
    """Find the ends of all whole records; ``delimiter`` is None for JSON Lines.

    With ``final`` the data ends where the file or chunk does, so that the last record needs no line break; but a quote
    that is still open there never ends a record.
    """
    array = np.frombuffer(data, dtype=np.uint8)
    breaks = np.flatnonzero(array == NEWLINE)
    if delimiter is None or b'"' not in data:
        return Ends(_with_rest(breaks + 1, len(data), final))
    quotes = np.flatnonzero(array == QUOTE)
    if not _are_regular(array, quotes, ord(delimiter)):
        return Ends(_line_by_line(data, delimiter, final), regular=False)
    outside = np.searchsorted(quotes, breaks) % 2 == 0
    open_at_end = len(quotes) % 2 == 1
    return Ends(_with_rest(breaks[outside] + 1, len(data), final and not open_at_end))


def _with_rest(ends: np.ndarray, size: int, rest_is_record: bool) -> np.ndarray:
    if rest_is_record and size > (int(ends[-1]) if len(ends) else 0):
        return np.append(ends, size)
    return ends


def _are_regular(array: np.ndarray, quotes: np.ndarray, delimiter: int) -> bool:
    """Tell whether every quote that opens stands at the start of a field and every one that closes at its end.

    Two quotes in a row close and open again, which is how a quote inside a quoted field is written.
    """
    opening, closing = quotes[0::2], quotes[1::2]
    before = array[opening[opening > 0] - 1]
    starts = (before == delimiter) | (before == NEWLINE) | (before == QUOTE)
    behind = array[closing[closing < len(array) - 1] + 1]
    stops = (behind == delimiter) | (behind == NEWLINE) | (behind == RETURN) | (behind == QUOTE)
    return bool(starts.all() and stops.all())


@cache
def _fields(delimiter: str) -> re.Pattern[bytes]:
    """Give the expression for one field and what ends it: the delimiter, a line break or the end of the data."""
    stop = re.escape(delimiter.encode())
    # The inside of quotes is atomic: without its last quote a field stays open, and is not cut at an earlier pair.
    return re.compile(
        rb'(?:"((?>[^"]*(?:""[^"]*)*))"([^' + stop + rb"\n]*)|([^" + stop + rb"\n]*))(" + stop + rb"|\n|\Z)"
    )


def _line_by_line(data: bytes, delimiter: str, final: bool) -> np.ndarray:
    ends: list[int] = []
    at, size = 0, len(data)
    while at < size:
        line_end = data.find(b"\n", at) + 1 or size
        if data.find(b'"', at, line_end) >= 0:
            found = _end_of_quoted(data, at, delimiter)
            if found is None:
                break
            line_end = found
        if data[line_end - 1] != NEWLINE and not final:
            break
        ends.append(line_end)
        at = line_end
    return np.array(ends, dtype=np.int64) if ends else _NO_ENDS


def _end_of_quoted(data: bytes, at: int, delimiter: str) -> int | None:
    """Find the end of a record that begins at ``at``; None when a quote stays open."""
    field = _fields(delimiter)
    while True:
        found = field.match(data, at)
        assert found is not None
        if found.group(3) is not None and found.group(3).startswith(b'"'):
            return None  # it opens a quote, and yet was not read as a quoted field
        at = found.end()
        if found.group(4) != delimiter.encode():
            return at


def split_fields(record: bytes, delimiter: str) -> list[bytes | None]:
    """Split one record into fields; a field that is empty without quotes is None."""
    field, result, at = _fields(delimiter), [], 0
    record = record.removesuffix(b"\n").removesuffix(b"\r")
    while True:
        found = field.match(record, at)
        assert found is not None
        quoted, behind, plain, end = found.groups()
        value = plain if quoted is None else quoted.replace(b'""', b'"') + behind
        result.append(value if value or quoted is not None else None)
        at = found.end()
        if not end:
            return result


def are_blank(data: bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Tell which records are empty lines: nothing but their line break."""
    array = np.frombuffer(data, dtype=np.uint8)
    sizes = ends - starts
    first = array[np.minimum(starts, max(len(array) - 1, 0))] if len(array) else np.empty(0, dtype=np.uint8)
    only_break = (sizes == 1) & ((first == NEWLINE) | (first == RETURN))
    return np.asarray(only_break | ((sizes == 2) & (first == RETURN) & (array[ends - 1] == NEWLINE)))


def field_counts(data: bytes, ends: np.ndarray, delimiter: str) -> np.ndarray:
    """Count the fields of the records of a regular block."""
    array = np.frombuffer(data, dtype=np.uint8)
    marks = np.flatnonzero(array == ord(delimiter))
    if b'"' in data:
        quotes = np.flatnonzero(array == QUOTE)
        marks = marks[np.searchsorted(quotes, marks) % 2 == 0]
    return np.diff(np.searchsorted(marks, ends), prepend=0) + 1


CSV, JSONL, PARQUET = "csv", "jsonl", "parquet"
FORMATS = (CSV, JSONL, PARQUET)

CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 4 << 20
HEADER_BYTES_MAX = 1 << 20
BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

ROWS, TOO_LONG, OPEN_QUOTE, REFUSED = "rows", "too_long", "open_quote", "refused"
"""Kinds of chunks: rows to read, a line that is too long, one whose quote never closes, a file that is refused."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file: where it is (for Parquet: which row group), its rows and the first of them, both from 1."""

    start: int
    size_bytes: int
    first_row: int
    rows: int
    first_line: int = 0
    kind: str = ROWS

    def to_list(self) -> list[Any]:
        """Give the short form in which a work folder keeps it."""
        return [self.start, self.size_bytes, self.first_row, self.rows, self.first_line, self.kind]


@dataclass(slots=True)
class FileSurvey:
    """What is known of one file."""

    path: str
    format: str
    size_bytes: int = 0
    mtime_ns: int = 0
    digest: str = ""
    columns: list[str] | None = None
    chunks: list[Chunk] = field(default_factory=list)
    problem: str | None = None

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def stamp(self) -> tuple[int, int]:
        """What changes when somebody writes to the file."""
        return self.size_bytes, self.mtime_ns

    def to_dict(self) -> dict[str, Any]:
        """Give the form in which a work folder keeps it."""
        kept = {name: getattr(self, name) for name in ("path", "format", "size_bytes", "mtime_ns", "digest")}
        more = {"columns": self.columns, "chunks": [chunk.to_list() for chunk in self.chunks], "problem": self.problem}
        return kept | more

    @staticmethod
    def from_dict(found: dict[str, Any]) -> FileSurvey:
        """Read the form that `to_dict` gives."""
        return FileSurvey(**{**found, "chunks": [Chunk(*each) for each in found["chunks"]]})


def stamp_of(path: str | Path) -> tuple[int, int]:
    """Give size and time of a file as they are now."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def digest_of(path: str | Path) -> str:
    """Give the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def survey(path: str, format: str, plan: IngestPlan, rows_max: int | None = None) -> FileSurvey:
    """Look through a file; one that cannot be used has a ``problem`` and one chunk that stands for all of it.

    With ``rows_max`` the look ends after about so many rows; then there is no digest unless it came to the end.
    """
    found = FileSurvey(path, format)
    try:
        found.size_bytes, found.mtime_ns = stamp_of(path)
        {CSV: _survey_csv, JSONL: _survey_jsonl, PARQUET: _survey_parquet}[format](found, plan, rows_max)
        if stamp_of(path) != found.stamp:
            raise FileChanged(f"{path} changed while it was looked through")
    except OSError as error:
        _refuse(found, f"cannot be read: {error.strerror or error}")
    except FileUnreadable as problem:
        _refuse(found, problem.message)
    return found


def _refuse(found: FileSurvey, reason: str) -> None:
    # A file whose rows cannot be counted counts as one, so that it is never nothing that was rejected.
    found.problem, found.chunks = reason, [Chunk(0, found.size_bytes, 1, max(1, found.rows), 0, REFUSED)]


# Text files.


def _survey_jsonl(found: FileSurvey, plan: IngestPlan, rows_max: int | None) -> None:
    with open(found.path, "rb") as file:
        start = file.read(4)
        _check_start(start)
        if start.removeprefix(BOM).lstrip()[:1] == b"[":
            raise FileUnreadable("is a JSON array, and not one JSON object per line")
        if plan.object.whole and plan.object.column is None and plan.types:
            raise FileUnreadable("has rows that are objects already, so --type needs --object to name columns")
        scan = _Scan(len(BOM) if start.startswith(BOM) else 0, 1, None, plan.max_row_bytes)
        _take(found, file, scan, rows_max)


def _survey_csv(found: FileSurvey, plan: IngestPlan, rows_max: int | None) -> None:
    csv = plan.csv
    delimiter = csv.separator(found.path)
    with open(found.path, "rb") as file:
        head = file.read(HEADER_BYTES_MAX)
        _check_start(head)
        begin, line = (len(BOM), 1) if head.startswith(BOM) else (0, 1)
        if csv.columns is not None:
            found.columns = list(csv.columns)
        elif head[begin:]:
            found.columns, header_bytes, lines = _header(head[begin:], delimiter, csv.encoding)
            begin, line = begin + header_bytes, line + lines
        _take(found, file, _Scan(begin, line, delimiter, plan.max_row_bytes), rows_max)
    if found.columns is not None:
        check_columns(found.columns, plan)


def _check_start(start: bytes) -> None:
    if start.startswith(_UTF16):
        raise FileUnreadable("is UTF-16: save it as UTF-8")
    if start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"PK\x03\x04")):
        raise FileUnreadable("is compressed: unpack it first")
    if start.startswith(b"PAR1"):
        raise FileUnreadable("is a Parquet file: give --format parquet")


def _header(head: bytes, delimiter: str, encoding: str) -> tuple[list[str], int, int]:
    """Read the header of a CSV file: the names, the bytes it takes and the lines."""
    ends = record_ends(head, delimiter, final=len(head) < HEADER_BYTES_MAX).at
    starts = np.concatenate(([0], ends[:-1]))
    used = np.flatnonzero(~are_blank(head, starts, ends)) if len(ends) else ends
    if not len(used):
        if head.strip(b"\r\n"):
            raise FileUnreadable("has no header: its first line never ends, or has a quote that never closes")
        return [], len(head), head.count(b"\n")
    end = int(ends[used[0]])
    try:
        names = [
            (name or b"").decode(encoding).strip() for name in split_fields(head[int(starts[used[0]]) : end], delimiter)
        ]
    except UnicodeDecodeError:
        raise FileUnreadable(f"has a header that is not {encoding}: say which with --encoding") from None
    return names, end, head.count(b"\n", 0, end)


def check_columns(columns: list[str], plan: IngestPlan, *, paths: bool = False) -> None:
    """Raise `FileUnreadable` when a file lacks a column that the plan names, or has it twice.

    With ``paths`` a name with dots may be that of a value inside a column.
    """
    for name in plan.columns():
        if columns.count(name) != 1 and not (paths and columns.count(name.partition(".")[0]) == 1):
            has = f"it has {', '.join(columns)}" if columns else "it has none at all"
            raise FileUnreadable(f"has {'no' if name not in columns else 'more than one'} column {name!r}; {has}"[:500])
    if plan.object.whole and plan.object.column is None:
        twice = sorted({name for name in columns if columns.count(name) > 1 or not name})
        if twice:
            raise FileUnreadable(f"has more than one column {twice[0]!r} or one without a name: choose with --object")


class _Scan:
    """Finds the chunks of a text file, block by block."""

    def __init__(self, offset: int, line: int, delimiter: str | None, max_row_bytes: int) -> None:
        self.offset, self.line, self.row = offset, line, 1
        self.delimiter, self.max_row_bytes = delimiter, max_row_bytes

    def chunks(self, more: Callable[[], bytes]) -> Iterator[Chunk]:
        """Give the chunks of what ``more`` reads, until it gives nothing."""
        data, final = b"", False
        while not final or data:
            if not final:
                block = more()
                data, final = data + block, not block
            data = yield from self._whole(data, final)
            if len(data) > self.max_row_bytes or (final and data):
                data, ended = yield from self._broken(data, more)
                final = final or ended

    def _whole(self, data: bytes, final: bool) -> Generator[Chunk, None, bytes]:
        """Give the whole records of the data as chunks, up to one that is too long; return what is left."""
        ends = record_ends(data, self.delimiter, final=final).at
        starts = np.concatenate(([0], ends[:-1])).astype(np.int64) if len(ends) else ends
        too_long = np.flatnonzero(ends - starts > self.max_row_bytes)
        if len(too_long):
            ends, starts = ends[: too_long[0]], starts[: too_long[0]]
        if not len(ends):
            return data
        blank = are_blank(data, starts, ends)
        cuts = np.flatnonzero(np.diff(ends // CHUNK_BYTES, prepend=0) > 0).tolist()
        at = 0
        for cut in dict.fromkeys([*cuts, len(ends)]):
            if cut > at:
                yield self._chunk(data, int(starts[at]), int(ends[cut - 1]), int((~blank[at:cut]).sum()), ROWS)
                at = cut
        return data[int(ends[-1]) :]

    def _chunk(self, data: bytes, start: int, end: int, rows: int, kind: str) -> Chunk:
        chunk = Chunk(self.offset, end - start, self.row, rows, self.line, kind)
        self.offset += end - start
        self.row += rows
        self.line += data.count(b"\n", start, end)
        return chunk

    def _broken(self, data: bytes, more: Callable[[], bytes]) -> Generator[Chunk, None, tuple[bytes, bool]]:
        """Give a line that is no record as a chunk, and return what is behind it and whether the file has ended."""
        line_end = data.find(b"\n") + 1
        if line_end and line_end <= self.max_row_bytes:
            yield self._chunk(data, 0, line_end, 1, OPEN_QUOTE)
            return data[line_end:], False
        if not line_end and len(data) <= self.max_row_bytes:
            yield self._chunk(data, 0, len(data), 1, OPEN_QUOTE)
            return b"", False
        size, ended = len(data), False
        while not line_end and not ended:
            # Nothing of it is kept: nobody reads a line of this length.
            data = more()
            line_end, ended = data.find(b"\n") + 1, not data
            size += len(data)
        rest = data[line_end:] if line_end else b""
        yield Chunk(self.offset, size - len(rest), self.row, 1, self.line, TOO_LONG)
        self.offset += size - len(rest)
        self.row += 1
        self.line += 1
        return rest, ended


def _take(found: FileSurvey, file: BinaryIO, scan: _Scan, rows_max: int | None) -> None:
    """Take the chunks of a text file, and its digest in the same go."""
    file.seek(0)
    hasher = hashlib.sha256(file.read(scan.offset))

    def more() -> bytes:
        block = file.read(BLOCK_BYTES)
        hasher.update(block)
        return block

    for chunk in scan.chunks(more):
        if chunk.rows:
            found.chunks.append(chunk)
        if rows_max is not None and scan.row > rows_max:
            return
    found.digest = hasher.hexdigest()


# Parquet.


def _survey_parquet(found: FileSurvey, plan: IngestPlan, rows_max: int | None) -> None:
    found.digest = digest_of(found.path) if rows_max is None else ""
    try:
        with pq.ParquetFile(found.path) as file:
            metadata = file.metadata
            found.columns = list(file.schema_arrow.names)
            row = 1
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                if group.num_rows:
                    found.chunks.append(Chunk(number, group.total_byte_size, row, group.num_rows))
                    row += group.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FileUnreadable(f"is not a whole Parquet file: {str(error).splitlines()[0]}"[:300]) from None
    check_columns(found.columns, plan, paths=True)


EXTENSIONS = {
    ".csv": CSV,
    ".tsv": CSV,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
    ".parquet": PARQUET,
    ".pq": PARQUET,
}
_PATTERN = "*?["


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, by its whole path, and the format in which it is read."""

    path: str
    format: str


@dataclass(frozen=True, slots=True)
class Sources:
    """The files in the order in which they are ingested, and those in folders that no format fits."""

    files: list[SourceFile]
    left_out: list[str]


def find(given: Sequence[str], format: str | None = None, *, may_be_none: bool = False) -> Sources:
    """Find files: as they were given, and by name inside each folder and pattern; each file once.

    Where there ``may_be_none``, as in a folder that is watched, an empty one is no mistake.

    In folders hidden files and those that begin with an underscore are left out, as Spark itself leaves them out.
    """
    if format is not None and format not in FORMATS:
        raise InvalidArgument(f"the format must be one of {', '.join(FORMATS)}, not {format!r}")
    files: dict[str, SourceFile] = {}
    left_out: list[str] = []
    for text in given:
        for path, by_name in _expanded(text, may_be_none=may_be_none):
            found = format or EXTENSIONS.get(Path(path).suffix.lower())
            if found is not None:
                files.setdefault(path, SourceFile(path, found))
            elif by_name:
                hint = "Say it with --format csv, jsonl or parquet."
                raise InvalidArgument(f"the format of {path} does not show in its name", hint=hint)
            else:
                left_out.append(path)
    if not files and not may_be_none:
        raise InvalidArgument(f"there is no file to ingest in {', '.join(given)}")
    return Sources(list(files.values()), left_out)


def _expanded(text: str, *, may_be_none: bool) -> list[tuple[str, bool]]:
    """Give the files that a text means, each with whether it was named itself."""
    path = Path(text)
    if path.is_dir():
        return [(found, False) for found in _in_folder(path)]
    if path.exists():
        return [(_checked(path), True)]
    if any(mark in text for mark in _PATTERN):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches and not may_be_none:
            raise InvalidArgument(f"no file matches {text!r}")
        named = [(os.path.abspath(match), True) for match in matches if os.path.isfile(match)]
        return named or [(found, False) for match in matches for found in _in_folder(Path(match))]
    raise InvalidArgument(f"there is no file {text!r}", hint="Give paths, folders or patterns such as 'in/*.csv'.")


def _checked(path: Path) -> str:
    if not path.is_file():
        hint = "It must be possible to read it again: write what a pipe gives to a file first."
        raise InvalidArgument(f"{path} is not a regular file", hint=hint)
    return os.path.abspath(path)


def _in_folder(folder: Path) -> list[str]:
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        found += [os.path.abspath(os.path.join(where, name)) for name in names if name[0] not in "._"]
    return sorted(path for path in found if os.path.isfile(path))
