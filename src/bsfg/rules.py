"""The rules of the message model, checked column by column.

The first look at a column is the cheap one that nearly always settles it; only a column that fails it is searched for
the row to name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import byte_lengths, constant_value, used_bytes
from bsfg.batch import FactBatch
from bsfg.errors import FactTooLarge, InvalidArgument, InvalidFact

_CONTROL = r"\x00-\x1f\x7f-\x9f"
ZONE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
STREAM = r"^[a-z0-9][a-z0-9._-]{0,63}$"
SUBJECT = rf"^[a-z][a-z0-9_-]*:[^{_CONTROL}/]+(/[^{_CONTROL}]+)?$"
PREDICATE = r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$"
MEDIA_TYPE = rf"^[A-Za-z0-9!#$&^_.+-]+/[A-Za-z0-9!#$&^_.+-]+(;[^{_CONTROL}]*)?$"
ARTIFACT_DIGEST = r"^sha256:[0-9a-f]{64}$"
PRINTABLE = rf"^[^{_CONTROL}]+$"
LABEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,63}$"

LATEST_UNIX_MS = 253_402_300_799_999
"""The last millisecond of the year 9999."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the parts of a fact may be."""

    max_object_bytes: int = 1 << 20
    max_labels: int = 64
    max_label_value_bytes: int = 1024
    max_batch_facts: int = 1_000_000
    max_batch_bytes: int = 1 << 30


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class TextRule:
    """What a text column must look like, and how to say so."""

    name: str
    pattern: str
    max_bytes: int
    says: str
    required: bool = False


_ID_SAYS = "must be 1 to 256 bytes without control characters"
TEXT_RULES = (
    TextRule("message_id", PRINTABLE, 256, _ID_SAYS),
    TextRule("from_zone", ZONE, 64, "must be a zone name: letters, digits, '.', '_', '-', at most 64", True),
    TextRule("to_zone", ZONE, 64, "must be a zone name: letters, digits, '.', '_', '-', at most 64", True),
    TextRule("correlation_id", PRINTABLE, 256, _ID_SAYS),
    TextRule("causation_id", PRINTABLE, 256, _ID_SAYS),
    TextRule("object_media_type", MEDIA_TYPE, 255, "must be a media type such as application/json", True),
    TextRule("object_schema", PRINTABLE, 512, "must be 1 to 512 bytes without control characters"),
    TextRule("signature", PRINTABLE, 512, "must be 1 to 512 bytes without control characters"),
    TextRule(
        "subject",
        SUBJECT,
        512,
        "must be kind:id or kind:scope/id, kind in lower case, no control characters",
        True,
    ),
    TextRule("predicate", PREDICATE, 128, "must be lower_snake_case, at most 128 bytes", True),
    TextRule("artifact", PRINTABLE, 4096, "must be 1 to 4096 bytes without control characters"),
    TextRule("artifact_digest", ARTIFACT_DIGEST, 71, "must be sha256: and 64 hexadecimal digits"),
)


def check_name(kind: str, value: str, pattern: str = STREAM) -> str:
    """Give a stream, consumer or zone name if it is one, or say what a name looks like."""
    if not re.fullmatch(pattern, value):
        raise InvalidArgument(f"{kind} {value!r} is not a name: it must match {pattern}", **{kind: value})
    return value


def check(batch: FactBatch, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise `InvalidFact` or `FactTooLarge` for the first row that breaks a rule of the message model."""
    if len(batch) > limits.max_batch_facts or batch.nbytes > limits.max_batch_bytes:
        raise FactTooLarge(
            f"the batch has {len(batch)} facts in {batch.nbytes} bytes; the limits are "
            f"{limits.max_batch_facts} and {limits.max_batch_bytes}",
            hint="Split the batch.",
        )
    _check_encoding(batch)
    for rule in TEXT_RULES:
        _check_text(batch.column(rule.name), rule)
    _check_times(batch.column("produced_at_unix_ms"))
    _check_objects(batch.column("object"), limits)
    _check_labels(batch.column("labels"), limits)
    _check_artifacts(batch)


def _check_encoding(batch: FactBatch) -> None:
    """Refuse arrays that lie about their own layout or hold bytes that are not UTF-8."""
    try:
        batch.record_batch.validate(full=True)
    except pa.ArrowInvalid as error:
        for field, column in zip(batch.schema, batch.record_batch.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as finer:
                raise invalid(_row_in(str(finer)), field.name, f"is not valid UTF-8 or is malformed: {finer}") from None
        raise invalid(0, "batch", f"is malformed: {error}") from None


def _row_in(text: str) -> int:
    found = re.search(r"(?:index|slot|position) (\d+)", text)
    return int(found.group(1)) if found else 0


def _check_text(column: pa.Array, rule: TextRule) -> None:
    if column.null_count == len(column) and not rule.required:
        return
    if rule.required and column.null_count:
        raise invalid(_first(pc.is_null(column)), rule.name, "is required")
    if _text_is_fine(column, rule):
        return
    good = pc.and_(
        pc.match_substring_regex(column, rule.pattern),
        pc.less_equal(pc.binary_length(column), rule.max_bytes),
    )
    bad = pc.fill_null(pc.invert(good), False)
    if pc.any(bad).as_py():
        raise invalid(_first(bad), rule.name, rule.says)


def _text_is_fine(column: pa.Array, rule: TextRule) -> bool:
    """Settle the common cases: one value throughout, or free text of plain ASCII."""
    single = constant_value(column)
    if single is not None:
        return len(single.encode()) <= rule.max_bytes and re.fullmatch(rule.pattern, single) is not None
    if rule.pattern is not PRINTABLE or column.null_count:
        return False
    lengths, data = byte_lengths(column), used_bytes(column)
    if int(lengths.max()) > rule.max_bytes or int(lengths.min()) == 0:
        return False
    return int(data.min()) >= 0x20 and int(data.max()) < 0x7F


def _check_times(column: pa.Array) -> None:
    if column.null_count:
        raise invalid(_first(pc.is_null(column)), "produced_at_unix_ms", "is required")
    values = column.to_numpy()
    if len(values) and (int(values.min()) < 0 or int(values.max()) > LATEST_UNIX_MS):
        row = int(np.argmax((values < 0) | (values > LATEST_UNIX_MS)))
        raise invalid(row, "produced_at_unix_ms", "must be milliseconds since 1970, up to the year 9999")


def _check_objects(column: pa.Array, limits: Limits) -> None:
    if column.null_count:
        raise invalid(_first(pc.is_null(column)), "object", "is required")
    lengths = byte_lengths(column)
    if len(lengths) and int(lengths.max()) > limits.max_object_bytes:
        row = int(np.argmax(lengths > limits.max_object_bytes))
        raise FactTooLarge(
            f"row {row}: the object has {int(lengths[row])} bytes, the limit is {limits.max_object_bytes}",
            row=row,
            field="object",
            rule=f"at most {limits.max_object_bytes} bytes",
        )


def _check_labels(column: pa.Array, limits: Limits) -> None:
    if column.null_count == len(column):
        return

    def problem(text: str) -> str | None:
        try:
            labels = orjson.loads(text)
        except orjson.JSONDecodeError:
            return "must be a JSON object of strings"
        if not isinstance(labels, dict) or not labels:
            return "must be a JSON object of strings, null when there are none"
        if len(labels) > limits.max_labels:
            return f"has {len(labels)} labels, the limit is {limits.max_labels}"
        for name, value in labels.items():
            if not re.fullmatch(LABEL_NAME, name):
                return f"label name {name[:80]!r} must match {LABEL_NAME}"
            if not isinstance(value, str) or len(value.encode()) > limits.max_label_value_bytes:
                return f"label {name!r} must be a string of at most {limits.max_label_value_bytes} bytes"
            if value and not re.fullmatch(PRINTABLE, value):
                return f"label {name!r} has control characters"
        if orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode() != text:
            return "must be canonical JSON with sorted, unique names"
        return None

    _check_distinct(column, "labels", problem)


def _check_artifacts(batch: FactBatch) -> None:
    artifact, digest = batch.column("artifact"), batch.column("artifact_digest")
    if artifact.null_count == len(batch) and digest.null_count == len(batch):
        return
    lonely = pc.not_equal(pc.is_null(artifact), pc.is_null(digest))
    if pc.any(lonely).as_py():
        raise invalid(_first(lonely), "artifact", "needs both the reference and its digest")

    def problem(text: str) -> str | None:
        try:
            reference = orjson.loads(text)
        except orjson.JSONDecodeError:
            return "must be a JSON object"
        if not isinstance(reference, dict):
            return "must be a JSON object"
        for name in ("bucket", "key", "digest", "media_type"):
            if not isinstance(reference.get(name), str) or not reference[name]:
                return f"{name} must be a text"
        size = reference.get("size_bytes")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            return "size_bytes must be a non-negative integer"
        if not isinstance(reference.get("file_name", ""), str):
            return "file_name must be a text"
        unknown = set(reference) - {"bucket", "key", "digest", "media_type", "size_bytes", "file_name"}
        return f"has no field {sorted(unknown)[0]!r}" if unknown else None

    _check_distinct(artifact, "artifact", problem)
    for row, (text, claimed) in enumerate(zip(artifact.to_pylist(), digest.to_pylist(), strict=True)):
        if text is not None and orjson.loads(text)["digest"] != claimed:
            raise invalid(row, "artifact_digest", "differs from the digest in the reference")


def _check_distinct(column: pa.Array, name: str, problem: Callable[[str], str | None]) -> None:
    """Check each distinct value once and name the first row that has a bad one."""
    for value in pc.unique(column).to_pylist():
        if value is not None and (says := problem(value)):
            raise invalid(_first(pc.equal(column, value)), name, says)


def _first(mask: pa.Array) -> int:
    return int(pc.index(mask, True).as_py())


def invalid(row: int, name: str, rule: str) -> InvalidFact:
    """Make the error for one row's field."""
    return InvalidFact(f"row {row}, {name}: {rule}", row=row, field=name, rule=rule)
