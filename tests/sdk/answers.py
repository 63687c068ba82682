"""Answers of a node, made up for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bsfg.ports import Receipt, Result
from bsfg.wire.streams import Appended


def appended(
    offsets: Sequence[int], results: Sequence[Result] | None = None, ids: Sequence[str] | None = None
) -> Appended:
    """Give an answer with these offsets; a digest is its offset repeated."""
    found = np.array(offsets, dtype=np.int64)
    verdicts = np.array(results if results is not None else [0] * len(found), dtype=np.uint8)
    digests = np.repeat((found % 251).astype(np.uint8), 32).reshape(len(found), 32)
    return Appended(Receipt(found, verdicts, b"head", 1), digests, list(ids) if ids is not None else None)
