"""By which function the digest of a fact was made, carried with the fact itself.

SHA-256 is what everybody takes for granted and needs no mark. Any other function is named in the column of labels,
under a name that no label of a producer can have: labels travel with a fact through logs, wires, quarantine and Parquet
files, and what has travelled along need not be looked up anywhere. The mark is the product's own: applications see it
as `Entry.hasher`, and not among the labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

MARK = "$digest"
"""Comes before all labels in their order, because none of theirs may begin with it."""

SHA256_NAME = "sha256"
_BEGINS = f'{{"{MARK}":"'
_name = re.compile(r"[a-z][a-z0-9_-]{0,31}").fullmatch


def digest_text(hasher: str, digest: bytes) -> str:
    """Write a digest as people and programs read it: ``sha256:`` or the name of another function, and 64 digits."""
    return f"{hasher}:{digest.hex()}"


def mark_problem(name: object) -> str | None:
    """Say what is wrong with the name in a mark; whether its function is known is another question."""
    if not isinstance(name, str) or not _name(name):
        return f"{MARK} must name a digest function"
    return f"{MARK} is left out for {SHA256_NAME}" if name == SHA256_NAME else None


def is_marked(text: str | None) -> bool:
    """Tell whether labels, given as their JSON text, hold a mark."""
    return text is not None and text.startswith(_BEGINS)


def function_in(text: str | None) -> str:
    """Give the function that the labels of a row name, given as their JSON text."""
    return text[len(_BEGINS) :].partition('"')[0] if text is not None and is_marked(text) else SHA256_NAME


def unmarked(text: str | None) -> str | None:
    """Give the labels of a row without the mark."""
    if text is None or not is_marked(text):
        return text
    rest = text[len(_BEGINS) :].partition('"')[2]
    return "{" + rest[1:] if rest.startswith(",") else None


def marked(text: str | None, hasher: str) -> str | None:
    """Give the labels of a row with the mark of a function in the place of any other."""
    plain = unmarked(text)
    if hasher == SHA256_NAME:
        return plain
    return f'{_BEGINS}{hasher}"' + ("}" if plain is None else "," + plain[1:])


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Give labels that were read without the mark."""
    return {name: value for name, value in labels.items() if name != MARK}


def any_marked(column: pa.Array) -> bool:
    """Tell whether any row of a column of labels holds a mark."""
    if column.null_count == len(column):
        return False
    return bool(pc.any(pc.starts_with(column, _BEGINS)).as_py())
