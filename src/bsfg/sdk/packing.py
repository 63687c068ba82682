"""Making a batch of gathered rows: a row that breaks a rule fails alone, the others go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bsfg.batch import SMALL_BATCH_FACTS, FactBatch
from bsfg.errors import BsfgError, FactTooLarge, InvalidFact
from bsfg.hashing import Hasher, hasher_named
from bsfg.keys import EXPLICIT, MessageIds
from bsfg.model import Limits
from bsfg.offload import THREAD_BYTES, by_size
from bsfg.rows import Row, is_plain, record_batch_of
from bsfg.rules import check, judge
from bsfg.sdk.futures import Outcome
from bsfg.sdk.intake import Gathering
from bsfg.sdk.shipment import Part, Shipment
from bsfg.sealing import seal
from bsfg.sealmark import SHA256_NAME

if TYPE_CHECKING:
    from bsfg.sdk.signing import Signer

LOOSE = Limits(max_object_bytes=1 << 30, max_batch_facts=1 << 30, max_batch_bytes=1 << 40)
"""Only the node knows how large its streams allow facts to be."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A gathered batch, ready to travel: which of its rows are in it (None for all), and whose outcome it is."""

    facts: FactBatch
    outcome: Outcome
    size_bytes: int
    ends: float | None = None
    divisible: bool = True
    rows: np.ndarray | None = None

    def shipment(self, stream: str) -> Shipment:
        """Make a shipment of it."""
        part = Part(self.outcome, 0, 0, self.outcome.count)
        return Shipment(stream, self.facts, (part,), self.size_bytes, self.divisible, self.ends, self.rows)


Failures = dict[int, BsfgError]


class Packer:
    """Makes batches of what was gathered: checks them, and signs them when there is a signer."""

    def __init__(self, signer: Signer | None = None, ids: MessageIds = EXPLICIT, hasher: str = SHA256_NAME) -> None:
        self._signer, self._ids, self._hasher = signer, ids, hasher_named(hasher)

    async def pack(self, gathering: Gathering, stream: str) -> Packed:
        """Pack a gathering of a stream; rows that break a rule fail at once."""
        # A signature takes long, however small the fact is.
        size_bytes = gathering.size_bytes if self._signer is None else THREAD_BYTES
        facts, rows, failures = await by_size(size_bytes, self._pack, gathering, stream)
        for row, error in failures.items():
            gathering.outcome.fail(error, [row])
        divisible = gathering.facts is None
        gathering.rows = []
        return Packed(facts, gathering.outcome, gathering.size_bytes, gathering.ends, divisible, rows)

    def _pack(self, gathering: Gathering, stream: str) -> tuple[FactBatch, np.ndarray | None, Failures]:
        if gathering.facts is not None:
            if self._signer is None:
                return gathering.facts, None, {}
            sealed = seal(gathering.facts, hasher=self._hasher, ids=self._ids, limits=LOOSE)
            return self._signer.sign(sealed, stream), None, {}
        facts, rows, failures = _checked(gathering.rows)
        if self._signer is None or not len(facts):
            return facts, rows, failures
        sealed, kept, worse = _sealed(facts, self._ids, self._hasher)
        if kept is not None:
            rows = np.arange(len(facts)) if rows is None else rows
            failures |= {int(rows[at]): error for at, error in worse.items()}
            rows = rows[kept]
        return self._signer.sign(sealed, stream), rows, failures


def _checked(rows: list[Row]) -> tuple[FactBatch, np.ndarray | None, Failures]:
    """Make a batch of rows; give which rows are in it (None for all) and why the others are not."""
    try:
        small = len(rows) <= SMALL_BATCH_FACTS and all(map(is_plain, rows))
        batch = FactBatch.of_rows(rows) if small else FactBatch(record_batch_of(rows))
        check(batch, LOOSE)
    except (InvalidFact, FactTooLarge):
        return _checked_one_by_one(rows)
    return batch, None, {}


def _checked_one_by_one(rows: list[Row]) -> tuple[FactBatch, np.ndarray | None, Failures]:
    failures: Failures = {}
    for number, row in enumerate(rows):
        try:
            judge(number, FactBatch(record_batch_of([row])).rows()[0], LOOSE)
        except (InvalidFact, FactTooLarge) as error:
            failures[number] = _for_one_fact(error)
    kept = [number for number in range(len(rows)) if number not in failures]
    return FactBatch(record_batch_of([rows[number] for number in kept])), np.array(kept, dtype=np.int64), failures


def _sealed(batch: FactBatch, ids: MessageIds, hasher: Hasher) -> tuple[FactBatch, np.ndarray | None, Failures]:
    """Seal a batch; give which rows are in it (None for all) and why the others are not."""
    try:
        return seal(batch, hasher=hasher, ids=ids, limits=LOOSE), None, {}
    except (InvalidFact, FactTooLarge):
        pass
    sealed, kept, failures = [], [], {}
    for number in range(len(batch)):
        try:
            sealed.append(seal(batch.slice(number, 1), hasher=hasher, ids=ids, limits=LOOSE))
            kept.append(number)
        except (InvalidFact, FactTooLarge) as error:
            failures[number] = _for_one_fact(error)
    return FactBatch.concat(sealed), np.array(kept, dtype=np.int64), failures


def _for_one_fact(error: BsfgError) -> BsfgError:
    """Give the error without the number of a row that its reader cannot know."""
    name, rule = error.details.get("field"), error.details.get("rule")
    text = f"{name}: {rule}" if name and rule else error.message
    details = {key: value for key, value in error.details.items() if key != "row"}
    return type(error)(text, hint="Correct the named field and send the fact again; it was not sent.", **details)
