"""Step 1, append: a producer's facts become durable in their own zone's store buffer.

The producer is done when this step answers: nothing here waits for another zone. A repeat of the same facts with the
same ids is answered as a repeat, so a producer that heard nothing simply sends again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np

from bsfg.batch import FactBatch
from bsfg.columns import constant_value
from bsfg.digest import SHA256, Hasher
from bsfg.errors import ImplausibleTime, ZoneNotAllowed
from bsfg.fact import Message
from bsfg.journey.link import AppendOutcome
from bsfg.offload import by_size
from bsfg.ports import Clock, Receipt, StoreBuffer
from bsfg.rows import weight_of_message
from bsfg.rules import DEFAULT_LIMITS, Limits
from bsfg.sealing import EXPLICIT, MessageIds, functions_of, seal


@dataclass(frozen=True, slots=True)
class Plausibility:
    """How far a fact's ``produced_at`` may lie from this zone's clock; an unset side is not checked."""

    past_seconds: float | None = None
    future_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class AppendRules:
    """What one caller may append, and how its facts are sealed. The defaults allow every zone and every time."""

    from_zones: frozenset[str] | None = None
    to_zones: frozenset[str] | None = None
    plausibility: Plausibility | None = None
    ids: MessageIds = EXPLICIT
    hasher: Hasher = SHA256
    limits: Limits = DEFAULT_LIMITS


ANYTHING = AppendRules()

_FRAMES = (bytes, bytearray, memoryview)


async def append(
    store: StoreBuffer, facts: FactBatch | Sequence[Message], *, clock: Clock, rules: AppendRules = ANYTHING
) -> AppendOutcome:
    """Check a producer's facts, seal them and make them durable; give a result per fact.

    The batch is refused as a whole, and nothing of it stored, when a fact breaks a rule (`InvalidFact`,
    `FactTooLarge`), speaks for another zone (`ZoneNotAllowed`) or has an `ImplausibleTime`. A conflicting id refuses
    its own fact alone: look at `AppendOutcome.conflicts`.

    A sealed batch is given to the store at once: batches that were sealed before are stored in the order of the calls.
    A node does the two halves by themselves, because it looks for artifacts and signatures in between.
    """
    sealed = await prepare(facts, rules)
    # Who has sealed them before may have done so with another function.
    hasher = functions_of(sealed)[0] if sealed is facts and len(sealed) else rules.hasher.name
    return AppendOutcome(sealed, await commit(store, sealed, clock=clock, rules=rules), hasher)


async def prepare(facts: FactBatch | Sequence[Message] | bytes, rules: AppendRules = ANYTHING) -> FactBatch:
    """Seal a producer's facts, a large batch in a thread; bytes are an Arrow frame that is decoded there, too."""
    if isinstance(facts, FactBatch):
        # What is sealed is only looked at, and must not be passed by a later call.
        size_bytes = 0 if facts.sealed else facts.weight_bytes
    else:
        size_bytes = len(facts) if isinstance(facts, _FRAMES) else sum(map(weight_of_message, facts))
    return await by_size(size_bytes, _sealed, facts, rules)


def commit(store: StoreBuffer, sealed: FactBatch, *, clock: Clock, rules: AppendRules = ANYTHING) -> Awaitable[Receipt]:
    """Hold sealed facts against the rules of their caller and give them to the store at once."""
    return store.append(admit(sealed, rules, clock.now_unix_ms()))


def _sealed(facts: FactBatch | Sequence[Message] | bytes, rules: AppendRules) -> FactBatch:
    if isinstance(facts, _FRAMES):
        facts = FactBatch.from_ipc(facts, rules.limits)
    batch = facts if isinstance(facts, FactBatch) else FactBatch.from_messages(facts)
    return seal(batch, hasher=rules.hasher, ids=rules.ids, limits=rules.limits)


def admit(batch: FactBatch, rules: AppendRules, now_unix_ms: int) -> FactBatch:
    """Check a batch against the rules of its caller and seal it, or raise what is wrong with its first bad row."""
    # Sealing comes first because it proves that the columns can be read at all.
    sealed = seal(batch, hasher=rules.hasher, ids=rules.ids, limits=rules.limits)
    check_zones(sealed, "from_zone", rules.from_zones)
    check_zones(sealed, "to_zone", rules.to_zones)
    if rules.plausibility is not None:
        check_produced_at(sealed, rules.plausibility, now_unix_ms)
    return sealed


def check_zones(batch: FactBatch, column: str, allowed: frozenset[str] | None) -> None:
    """Raise `ZoneNotAllowed` for the first row whose zone is not among the allowed ones; None allows all."""
    if allowed is None or (not batch.has_rows and constant_value(batch.column(column)) in allowed):
        return
    for row, zone in enumerate(batch.values(column)):
        if zone not in allowed:
            raise ZoneNotAllowed(f"row {row}: {column} {zone!r} is not allowed here", row=row, field=column, zone=zone)


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
