"""Step 1, append: a producer's facts become durable in their own zone's store buffer.

The producer is done when this step answers: nothing here waits for another zone. A repeat of the same facts with the
same ids is answered as a repeat, so a producer that heard nothing simply sends again.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

import numpy as np

from bsfg.batch import FactBatch
from bsfg.digest import SHA256, Hasher
from bsfg.errors import ImplausibleTime
from bsfg.offload import by_size
from bsfg.ports import Clock, Receipt, StoreBuffer
from bsfg.rules import DEFAULT_LIMITS, Limits
from bsfg.sealing import EXPLICIT, MessageIds, seal


@dataclass(frozen=True, slots=True)
class Plausibility:
    """How far a fact's ``produced_at`` may lie from this zone's clock; an unset side is not checked."""

    past_seconds: float | None = None
    future_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class AppendRules:
    """How the facts of a stream are sealed, and how large they may be."""

    ids: MessageIds = EXPLICIT
    hasher: Hasher = SHA256
    limits: Limits = DEFAULT_LIMITS


async def prepare(facts: FactBatch | bytes, rules: AppendRules) -> FactBatch:
    """Seal a producer's facts, a large batch in a thread; bytes are an Arrow frame that is decoded there, too.

    The batch is refused as a whole when a fact breaks a rule (`InvalidFact`, `FactTooLarge`). Who says the facts, for
    whom, what they refer to and who has signed them is looked at between this and `commit`.
    """
    size_bytes = facts.weight_bytes if isinstance(facts, FactBatch) else len(facts)
    return await by_size(size_bytes, _sealed, facts, rules)


def _sealed(facts: FactBatch | bytes, rules: AppendRules) -> FactBatch:
    batch = facts if isinstance(facts, FactBatch) else FactBatch.from_ipc(facts, rules.limits)
    return seal(batch, hasher=rules.hasher, ids=rules.ids, limits=rules.limits)


def commit(
    store: StoreBuffer, sealed: FactBatch, *, clock: Clock, window: Plausibility | None = None
) -> Awaitable[Receipt]:
    """Give sealed facts to the store at once: batches are stored in the order of the calls.

    With a ``window`` a fact that has an `ImplausibleTime` refuses the batch. A conflicting id refuses its own fact
    alone: look at `bsfg.journey.link.AppendOutcome.conflicts`.
    """
    if window is not None:
        check_produced_at(sealed, window, clock.now_unix_ms())
    return store.append(sealed)


def check_produced_at(batch: FactBatch, window: Plausibility, now_unix_ms: int) -> None:
    """Raise `ImplausibleTime` for the first row that was produced too long ago or too far in the future."""
    if batch.has_rows:
        produced = np.array(batch.values("produced_at_unix_ms"), dtype=np.int64)
    else:
        produced = batch.column("produced_at_unix_ms").to_numpy()
    ahead_ms = produced - now_unix_ms
    bad = np.zeros(len(produced), dtype=bool)
    if window.past_seconds is not None:
        bad |= -ahead_ms > window.past_seconds * 1000
    if window.future_seconds is not None:
        bad |= ahead_ms > window.future_seconds * 1000
    if bad.any():
        row = int(np.argmax(bad))
        raise ImplausibleTime(
            f"row {row}: produced_at_unix_ms lies {int(ahead_ms[row])} ms from this zone's clock",
            row=row,
            field="produced_at_unix_ms",
            ahead_ms=int(ahead_ms[row]),
        )
