"""Facts as JSON Lines: one message or entry per line, in the form of `bsfg.jsonform`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, FactTooLarge, InvalidFact
from bsfg.jsonform import message_from_json
from bsfg.model import DEFAULT_LIMITS, Limits
from bsfg.rows import Row, row_of
from bsfg.rules import judge

BATCH_FACTS = 2_000
_BATCH_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"


def read_jsonl(
    stream: BinaryIO | Iterable[bytes],
    defaults: Mapping[str, Any] | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    batch_facts: int = BATCH_FACTS,
) -> Iterator[FactBatch]:
    """Read messages as unsealed batches; ``defaults`` fill envelope fields that a line leaves out.

    Blank lines are skipped. The first line that breaks a rule raises `InvalidFact` or `FactTooLarge` with its number
    (from 1) as the detail ``line``; the batches before it were given already.
    """
    # A line can be longer than its object: base64 adds a third, escapes up to six times, and the envelope comes on top.
    max_line_bytes = 6 * limits.max_object_bytes + (1 << 20)
    rows: list[Row] = []
    size_bytes = 0
    for number, line in enumerate(_lines(stream, max_line_bytes), 1):
        if len(line) > max_line_bytes:
            raise FactTooLarge(f"line {number}: has more than {max_line_bytes} bytes", line=number)
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        rows.append(_row(number, line, defaults or {}, limits))
        size_bytes += len(line)
        if len(rows) >= batch_facts or size_bytes >= _BATCH_BYTES:
            yield FactBatch.of_rows(rows)
            rows, size_bytes = [], 0
    if rows:
        yield FactBatch.of_rows(rows)


def _lines(stream: BinaryIO | Iterable[bytes], max_line_bytes: int) -> Iterator[bytes]:
    """Give lines, never holding much more of a file than the longest that is allowed."""
    readline = getattr(stream, "readline", None)
    if readline is None:
        yield from stream
        return
    while line := readline(max_line_bytes + 1):
        yield line


def _row(number: int, line: bytes, defaults: Mapping[str, Any], limits: Limits) -> Row:
    try:
        row = row_of(message_from_json(line, **defaults))
        judge(number, row, limits)
    except (InvalidFact, FactTooLarge) as error:
        raise _at_line(number, error) from None
    return row


def _at_line(number: int, error: BsfgError) -> BsfgError:
    name, rule = error.details.get("field", "message"), error.details.get("rule", error.message)
    return type(error)(f"line {number}, {name}: {rule}", line=number, field=name, rule=rule)
