"""Where records begin and end in the bytes of a text file.

A record of JSON Lines is a line. A record of CSV is a line too, unless a quoted field has line breaks inside. Quotes
count only at the beginning of a field, as spreadsheets have it, so ``5" pipe`` is a text like any other. Nearly all
files quote in one regular way, which is recognised for a whole block at once; other blocks are read line by line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

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
class Block:
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
