"""Which facts somebody asks for: patterns of subjects and predicates, zones, and a span of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.columns import constant_value
from bsfg.errors import InvalidArgument

if TYPE_CHECKING:
    from bsfg.batch import EntryBatch
    from bsfg.fact import Message

ANY_TEXT = "*"
"""What stands for any text in a pattern, also for none."""

PATTERNS_MAX, PATTERN_CHARACTERS_MAX = 100, 512
"""How many patterns of a kind a filter may have, and how long each may be: a node tries all of them on every fact."""

STARS_MAX = 8
"""How often any text may stand in a pattern: each time, what follows is looked for once more in every text."""


@dataclass(frozen=True, slots=True)
class FactFilter:
    """Which facts are wanted: those that fit in every respect that is named, in each by one of its patterns.

    In patterns of subjects, predicates and zones ``*`` stands for any text. The span of time is of when a fact was
    produced, its end left out.
    """

    subjects: tuple[str, ...] = ()
    predicates: tuple[str, ...] = ()
    from_zones: tuple[str, ...] = ()
    to_zones: tuple[str, ...] = ()
    produced_from_unix_ms: int | None = None
    produced_before_unix_ms: int | None = None

    def __post_init__(self) -> None:
        for name in _PATTERNED.values():
            check_patterns(name, getattr(self, name))

    def __bool__(self) -> bool:
        if self.subjects or self.predicates or self.from_zones or self.to_zones:
            return True
        return self.produced_from_unix_ms is not None or self.produced_before_unix_ms is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of entries that are looked at."""
        looked_at = [column for column, name in _PATTERNED.items() if getattr(self, name)]
        if self.produced_from_unix_ms is not None or self.produced_before_unix_ms is not None:
            looked_at.append("produced_at_unix_ms")
        return tuple(looked_at)

    def wanted(self, entries: EntryBatch) -> np.ndarray:
        """Tell of each entry whether it is wanted."""
        mask = np.ones(len(entries), dtype=bool)
        for column, name in _PATTERNED.items():
            if patterns := getattr(self, name):
                mask &= fitting(entries.column(column), patterns)
        if self.produced_from_unix_ms is not None:
            mask &= entries.numbers("produced_at_unix_ms") >= self.produced_from_unix_ms
        if self.produced_before_unix_ms is not None:
            mask &= entries.numbers("produced_at_unix_ms") < self.produced_before_unix_ms
        return mask

    def fits(self, message: Message) -> bool:
        """Tell whether one fact is wanted, whose times are not asked about."""
        said = {
            "subject": message.fact.subject,
            "predicate": message.fact.predicate,
            "from_zone": message.envelope.from_zone,
            "to_zone": message.envelope.to_zone,
        }
        return all(
            bool(fitting(pa.array([said[column]], pa.string()), patterns)[0])
            for column, name in _PATTERNED.items()
            if (patterns := getattr(self, name))
        )


_PATTERNED = {"subject": "subjects", "predicate": "predicates", "from_zone": "from_zones", "to_zone": "to_zones"}


def check_patterns(name: str, patterns: Sequence[str]) -> None:
    """Raise `InvalidArgument` for more patterns, or longer ones, than anybody may ask with."""
    if len(patterns) > PATTERNS_MAX:
        raise InvalidArgument(f"{name} has {len(patterns)} patterns, the limit is {PATTERNS_MAX}", field=name)
    for pattern in patterns:
        if not 0 < len(pattern) <= PATTERN_CHARACTERS_MAX:
            raise InvalidArgument(
                f"a pattern of {name} has {len(pattern)} characters, there must be 1 to {PATTERN_CHARACTERS_MAX}",
                field=name,
            )
        if pattern.count(ANY_TEXT) > STARS_MAX:
            raise InvalidArgument(
                f"a pattern of {name} has {pattern.count(ANY_TEXT)} {ANY_TEXT}, the limit is {STARS_MAX}", field=name
            )


def fitting(texts: pa.Array, patterns: Sequence[str]) -> np.ndarray:
    """Tell of each text whether it fits one of some patterns."""
    if constant_value(texts) is not None:
        return np.full(len(texts), _fitting_one(texts.slice(0, 1), patterns)[0])
    # A batch has far fewer subjects than facts, and each is looked at once.
    encoded = texts.dictionary_encode()
    fits = pa.array(_fitting_one(encoded.dictionary, patterns)).take(encoded.indices).fill_null(False)
    return np.array(fits.to_numpy(zero_copy_only=False), dtype=bool)


def _fitting_one(texts: pa.Array, patterns: Sequence[str]) -> np.ndarray:
    mask = np.zeros(len(texts), dtype=bool)
    for pattern in patterns:
        mask |= _fitting(texts, pattern)
    return mask


def _fitting(texts: pa.Array, pattern: str) -> np.ndarray:
    """Tell of each text whether it fits a pattern, in a time that grows with the text and with the pattern only.

    No regular expression: one of many patterns that somebody thought of for it takes a minute for a frame of facts.
    """
    first, *rest = pattern.split(ANY_TEXT)
    if not rest:
        return _truths(pc.equal(texts, first))
    *between, last = rest
    # Both ends must have room beside each other: "aba" does not fit "ab*ba".
    long_enough = pc.greater_equal(pc.binary_length(texts), len((first + last).encode()))
    mask: np.ndarray = _truths(pc.starts_with(texts, first)) & _truths(pc.ends_with(texts, last)) & _truths(long_enough)
    pieces = [piece for piece in between if piece]
    if pieces:
        rows = np.flatnonzero(mask)
        end = -len(last) or None
        mask[rows] = [_in_order(text[len(first) : end], pieces) for text in texts.take(pa.array(rows)).to_pylist()]
    return mask


def _in_order(text: str, pieces: Sequence[str]) -> bool:
    """Tell whether a text has some pieces one after the other; the first place of each leaves most to the others."""
    at = 0
    for piece in pieces:
        found = text.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def _truths(found: pa.Array) -> np.ndarray:
    return np.array(found.fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)


EVERY_FACT = FactFilter()
