"""Facts for tests: the same seed gives the same facts, however many are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

from bsfg.batch import FactBatch
from bsfg.digest import DIGEST_BYTES, Hasher, Sha256
from bsfg.fact import Envelope, Fact, Key, Message
from bsfg.sealing import seal
from bsfg.testing.clock import START_UNIX_MS

SHA256 = Sha256()
KEPT_FACTS = 2_000


class WeakHasher:
    """A digest that knows only the length of its input, so that two bodies of one length collide."""

    name = "weak"

    def digest(self, data: bytes) -> bytes:
        """Give the digest of one byte string."""
        return hashlib.sha256(len(data).to_bytes(8, "big")).digest()[:DIGEST_BYTES]

    def digest_all(self, items: Iterable[bytes]) -> list[bytes]:
        """Give the digests of many byte strings, in order."""
        return [self.digest(item) for item in items]


def message(
    message_id: str,
    value: object = 0,
    *,
    from_zone: str = "plant",
    to_zone: str = "enterprise",
    subject: str = "machine:press-1",
    predicate: str = "temperature_measured",
) -> Message:
    """Make one message with a given id and object."""
    envelope = Envelope(from_zone, to_zone, START_UNIX_MS, message_id)
    return Message(envelope, Fact.of(subject, predicate, value))


def messages(
    count: int, *, seed: int = 0, first: int = 0, from_zone: str = "plant", object_bytes: int = 60
) -> list[Message]:
    """Make messages number ``first`` and following of a seed, with ids such as ``7-000012``.

    Objects are JSON of about ``object_bytes`` bytes that do not compress. The number alone decides what a message
    says: ``messages(5)`` is the beginning of ``messages(10)``.
    """
    return [_numbered(number, seed, from_zone, object_bytes) for number in range(first, first + count)]


@lru_cache(maxsize=16_384)  # tests ask for the same few over and over, and nobody can change them
def _numbered(number: int, seed: int, from_zone: str, object_bytes: int) -> Message:
    random = Random(f"{seed}/{number}")
    value = {"noise": random.randbytes(max(1, (object_bytes - 30) // 2)).hex(), "value": random.randrange(10**6)}
    labels = {"shift": "night"} if random.random() < 0.25 else {}
    envelope = Envelope(
        from_zone=from_zone,
        to_zone="enterprise",
        produced_at_unix_ms=START_UNIX_MS + number,
        message_id=f"{seed}-{number:06}",
        correlation_id=f"run-{number // 8}" if random.random() < 0.5 else None,
        labels=labels,
    )
    return Message(envelope, Fact.of(f"machine:press-{random.randrange(8)}", "temperature_measured", value))


def sealed(facts: Sequence[Message], *, hasher: Hasher = SHA256) -> FactBatch:
    """Make a batch that a buffer accepts."""
    return seal(FactBatch.from_messages(facts), hasher=hasher)


def batch(count: int, *, seed: int = 0, first: int = 0, from_zone: str = "plant", object_bytes: int = 60) -> FactBatch:
    """Make a sealed batch of `messages`."""
    if count > KEPT_FACTS:
        return sealed(messages(count, seed=seed, first=first, from_zone=from_zone, object_bytes=object_bytes))
    # Every storage is told the same by the same contracts, and sealing is half of what that costs. Each has a batch of
    # its own all the same: one that has not been looked at as columns, or written as a message, by somebody else.
    return _kept(seal, count, seed, first, from_zone, object_bytes).as_sealed()


@lru_cache(maxsize=2_048)
def _kept(
    sealing: Callable[..., FactBatch], count: int, seed: int, first: int, from_zone: str, object_bytes: int
) -> FactBatch:
    facts = messages(count, seed=seed, first=first, from_zone=from_zone, object_bytes=object_bytes)
    return sealing(FactBatch.from_messages(facts), hasher=SHA256)


def altered(facts: Sequence[Message], note: object = "altered") -> list[Message]:
    """Give messages with the same keys and other bodies: what a conflict is made of."""
    return [replace(fact, fact=Fact.of(fact.fact.subject, fact.fact.predicate, {"note": note})) for fact in facts]


def key_of(fact: Message) -> Key:
    """Give the idempotency key of a message."""
    return Key(fact.envelope.from_zone, fact.envelope.message_id or "")
