"""The table of the message model: which fields a message has, what they must look like and how large they may be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from bsfg.errors import InvalidArgument
from bsfg.fact import MARK, mark_problem

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
    _matches: Callable[[str], object] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # `fullmatch`, because in Python a `$` alone would let a trailing newline pass.
        object.__setattr__(self, "_matches", re.compile(self.pattern).fullmatch)

    def breaks(self, value: str) -> bool:
        """Tell whether a text breaks this rule."""
        if len(value) > self.max_bytes or self._matches(value) is None:
            return True
        return not value.isascii() and len(value.encode()) > self.max_bytes


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
TIME_SAYS = "must be milliseconds since 1970, up to the year 9999"


def check_name(kind: str, value: str, pattern: str = STREAM) -> str:
    """Give a stream, consumer or zone name if it is one, or say what a name looks like."""
    if not re.fullmatch(pattern, value):
        raise InvalidArgument(f"{kind} {value!r} is not a name: it must match {pattern}", **{kind: value})
    return value


_label_name = re.compile(LABEL_NAME).fullmatch
_printable = re.compile(PRINTABLE).fullmatch


def labels_problem(text: str, limits: Limits) -> str | None:
    """Say what is wrong with the labels of one row, given as their JSON text."""
    try:
        labels = orjson.loads(text)
    except orjson.JSONDecodeError:
        return "must be a JSON object of strings"
    if not isinstance(labels, dict) or not labels:
        return "must be a JSON object of strings, null when there are none"
    if len(labels) - (MARK in labels) > limits.max_labels:
        return f"has {len(labels)} labels, the limit is {limits.max_labels}"
    for name, value in labels.items():
        if problem := mark_problem(value) if name == MARK else _label_problem(name, value, limits):
            return problem
    if orjson.dumps(labels, option=orjson.OPT_SORT_KEYS) != text.encode():
        return "must be canonical JSON with sorted, unique names"
    return None


def _label_problem(name: str, value: Any, limits: Limits) -> str | None:
    if not _label_name(name):
        return f"label name {name[:80]!r} must match {LABEL_NAME}"
    if not isinstance(value, str) or len(value.encode()) > limits.max_label_value_bytes:
        return f"label {name!r} must be a string of at most {limits.max_label_value_bytes} bytes"
    return f"label {name!r} has control characters" if value and not _printable(value) else None


def artifact_problem(text: str | None, digest: str | None) -> tuple[str, str] | None:
    """Name the field and the rule that an artifact reference, given as its JSON text, breaks with its digest."""
    if text is None or digest is None:
        return "artifact", "needs both the reference and its digest"
    try:
        reference = orjson.loads(text)
    except orjson.JSONDecodeError:
        return "artifact", "must be a JSON object"
    if not isinstance(reference, dict):
        return "artifact", "must be a JSON object"
    if says := _reference_problem(reference):
        return "artifact", says
    if orjson.dumps(reference, option=orjson.OPT_SORT_KEYS) != text.encode():
        return "artifact", "must be canonical JSON"
    if reference["digest"] != digest:
        return "artifact_digest", "differs from the digest in the reference"
    return None


def _reference_problem(reference: dict[str, Any]) -> str | None:
    if "digest" not in reference:
        return "needs a text 'digest'"
    if ("bucket" in reference) != ("key" in reference):
        return "needs bucket and key, or neither"
    for name in ("bucket", "key", "digest", "media_type"):
        if name in reference and (not isinstance(reference[name], str) or not reference[name]):
            return f"needs a text {name!r}"
    size = reference.get("size_bytes", 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        return "size_bytes must be a non-negative integer"
    if not isinstance(reference.get("file_name", ""), str):
        return "file_name must be a text"
    unknown = set(reference) - {"bucket", "key", "digest", "media_type", "size_bytes", "file_name"}
    return f"has no field {sorted(unknown)[0]!r}" if unknown else None
