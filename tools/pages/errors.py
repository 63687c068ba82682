"""Writes the reference page of the errors from the classes themselves."""

from __future__ import annotations

from collections.abc import Iterator

import bsfg.errors
from bsfg.errors import BsfgError
from bsfg.wire.status import STATUSES

_INTRODUCTION = """\
# Errors

Every error has a stable code, a sentence, and a hint that says what to do next. Commands print it as
`error[code]: sentence` with exit code 1, and as JSON with `--json`; gRPC and HTTP carry it as [the wire](wire.md)
describes. *Retry* means that the same request with the same ids may succeed later.
"""


def page() -> str:
    """Give the whole page."""
    lines = [_INTRODUCTION, "| Code | Retry | Meaning | What to do |", "|---|---|---|---|"]
    for kind in sorted(set(_kinds(BsfgError)), key=lambda kind: kind.code):
        meaning = (kind.__doc__ or "").strip().split("\n\n")[0]
        retry = "yes" if kind.retryable else ""
        lines.append(f"| `{kind.code}` | {retry} | {_cell(meaning)} | {_cell(kind.default_hint)} |")
    return "\n".join(lines) + "\n"


def _kinds(kind: type[BsfgError]) -> Iterator[type[BsfgError]]:
    if kind.code in STATUSES and getattr(bsfg.errors, kind.__name__, None) is kind:
        yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
