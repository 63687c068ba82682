"""Digests: of fact bodies, of ranges of entries, and the keyed hash of the key index."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import FactBatch
from bsfg.columns import DIGEST_BYTES, binary_parts, constant_value
from bsfg.errors import HasherUnknown, InvalidArgument
from bsfg.fact import SHA256_NAME, mark_problem

__all__ = [
    "DIGEST_BYTES",
    "Blake3",
    "Hasher",
    "KeyHash",
    "Sha256",
    "hasher_named",
    "is_digest_of",
    "known_hashers",
    "register",
]


MIN_SECRET_BYTES = 16
_FEW = 16
_MANY = 1 << 16
_ID_WORDS = 256 // 4 + 1


class Hasher(Protocol):
    """A digest function of 32 bytes; its name travels with every fact that it seals."""

    name: str

    def digest(self, data: bytes) -> bytes:
        """Give the digest of one byte string."""

    def digest_all(self, items: Iterable[bytes]) -> list[bytes]:
        """Give the digests of many byte strings, in order."""


class Sha256:
    """SHA-256, the digest of the specification."""

    name = SHA256_NAME

    def digest(self, data: bytes) -> bytes:
        """Give the SHA-256 of one byte string."""
        return hashlib.sha256(data).digest()

    def digest_all(self, items: Iterable[bytes]) -> list[bytes]:
        """Give the SHA-256 of many byte strings, in order."""
        sha256 = hashlib.sha256
        return [sha256(item).digest() for item in items]


class Blake3:
    """BLAKE3, which the extra of that name brings."""

    name = "blake3"

    def __init__(self) -> None:
        from blake3 import blake3

        self._blake3 = blake3

    def digest(self, data: bytes) -> bytes:
        """Give the BLAKE3 of one byte string."""
        return self._blake3(data).digest()

    def digest_all(self, items: Iterable[bytes]) -> list[bytes]:
        """Give the BLAKE3 of many byte strings, in order."""
        blake3 = self._blake3
        return [blake3(item).digest() for item in items]


SHA256 = Sha256()
_MAKERS: dict[str, Callable[[], Hasher]] = {SHA256.name: Sha256, Blake3.name: Blake3}
_known: dict[str, Hasher] = {SHA256.name: SHA256}


def register(hasher: Hasher) -> None:
    """Make a digest function of one's own known to this process, so that it can check what it sealed."""
    if problem := mark_problem(hasher.name):
        raise InvalidArgument(f"{hasher.name!r} cannot be registered as a digest function: {problem}")
    _known[hasher.name] = hasher


def hasher_named(name: str) -> Hasher:
    """Give the digest function of a name; raises `HasherUnknown` where it is not installed, or not known at all."""
    known = _known.get(name)
    if known is not None:
        return known
    try:
        known = _known[name] = _MAKERS[name]()
    except (KeyError, ImportError):
        raise HasherUnknown.of(name, installable=name in _MAKERS) from None
    return known


def known_hashers() -> list[Hasher]:
    """Give all digest functions that this process can compute."""
    _look_for_all()
    return list(_known.values())


@cache
def _look_for_all() -> None:
    # Once: to look in vain for a module takes as long as a few hundred digests.
    for name in _MAKERS:
        with suppress(HasherUnknown):
            hasher_named(name)


def is_digest_of(digest: bytes, body: bytes) -> bool:
    """Tell whether a digest is that of a body by any function that is known."""
    return any(hasher.digest(body) == digest for hasher in known_hashers())


class KeyHash:
    """A keyed 64-bit hash of (from_zone, message_id), computed for a whole batch at once.

    Two independent strongly universal multilinear hashes of 32 bits each, with coefficients drawn from a secret of
    the folder: nobody who does not know the secret can aim collisions at the index. A collision costs one look into
    the log and nothing else, because a hit is always checked against the full key.
    """

    def __init__(self, secret: bytes) -> None:
        if not MIN_SECRET_BYTES <= len(secret) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise InvalidArgument(
                f"the secret of a key hash has {len(secret)} bytes, it needs {MIN_SECRET_BYTES} to 64"
            )
        self._secret = secret
        # Made at once for the longest id there is: threads share this object, and a table that grows could tear.
        self._coefficients = self._drawn(_ID_WORDS)
        self._highs, self._lows = self._coefficients.T.tolist()
        self._zones: dict[str, np.uint64] = {}

    def of_batch(self, batch: FactBatch) -> np.ndarray:
        """Hash the key of each fact of a batch."""
        if batch.has_rows:
            return np.array(self.of_few(batch), dtype=np.uint64)
        return self.of(batch.column("from_zone"), batch.column("message_id"))

    def of_few(self, batch: FactBatch) -> list[int]:
        """Hash the key of each fact of a small batch, without array operations."""
        return list(map(self.of_one, batch.values("from_zone"), batch.values("message_id")))

    def of(self, from_zone: pa.Array, message_id: pa.Array) -> np.ndarray:
        """Hash each row's key to an unsigned 64-bit number."""
        if len(message_id) <= _FEW:
            pairs = zip(from_zone.to_pylist(), message_id.to_pylist(), strict=True)
            return np.array([self.of_one(zone, text) for zone, text in pairs], dtype=np.uint64)
        if len(message_id) > _MANY:
            parts = range(0, len(message_id), _MANY)
            return np.concatenate([self.of(from_zone.slice(at, _MANY), message_id.slice(at, _MANY)) for at in parts])
        words = _padded_words(message_id)
        coefficients = self._for_width(words.shape[1])
        sums = words @ coefficients
        high = np.uint64(0xFFFFFFFF00000000)
        return np.asarray(((sums[:, 0] & high) | (sums[:, 1] >> np.uint64(32))) ^ self._zone_terms(from_zone))

    def of_one(self, zone: str, message_id: str) -> int:
        """Hash one key; the same number as `of` gives, without the cost of array operations."""
        data = message_id.encode()
        width = (len(data) + 3) // 4
        words = (len(data) + 1, *struct.unpack(f"<{width}I", data.ljust(4 * width, b"\0")))
        highs, lows = self._highs, self._lows
        if len(highs) < len(words):
            highs, lows = self._drawn(len(words)).T.tolist()
        high, low = sum(map(mul, words, highs)), sum(map(mul, words, lows))
        mixed: int = (high & 0xFFFFFFFF00000000) | ((low >> 32) & 0xFFFFFFFF)
        return mixed ^ int(self._zone_term(zone))

    def _zone_terms(self, from_zone: pa.Array) -> np.ndarray | np.uint64:
        single = constant_value(from_zone)
        if single is not None:
            return self._zone_term(single)
        encoded = from_zone.dictionary_encode()
        terms = np.array([self._zone_term(zone) for zone in encoded.dictionary.to_pylist()], dtype=np.uint64)
        return np.asarray(terms[encoded.indices.to_numpy()])

    def _zone_term(self, zone: str) -> np.uint64:
        term = self._zones.get(zone)
        if term is None:
            raw = hashlib.blake2b(zone.encode(), digest_size=8, key=self._secret, person=b"zone").digest()
            term = np.uint64(int.from_bytes(raw, "little"))
            if len(self._zones) < 4096:
                self._zones[zone] = term
        return term

    def _for_width(self, width: int) -> np.ndarray:
        return self._coefficients[:width] if width <= _ID_WORDS else self._drawn(width)

    def _drawn(self, width: int) -> np.ndarray:
        """Draw pairs of coefficients from the secret, the same ones for every width."""
        blocks = [
            hashlib.blake2b(block.to_bytes(8, "little"), digest_size=64, key=self._secret, person=b"words").digest()
            for block in range((width + 3) // 4)
        ]
        return np.frombuffer(b"".join(blocks), dtype="<u8").reshape(-1, 2)[:width]


def _padded_words(strings: pa.Array) -> np.ndarray:
    """Lay strings out as rows of 32-bit words (held in 64), zero padded, the length in the first word."""
    offsets, data = binary_parts(strings)
    lengths = np.diff(offsets)
    count = len(lengths)
    longest = int(lengths.max()) if count else 0
    width = (longest + 3) // 4
    padded = np.zeros((count, width * 4), dtype=np.uint8)
    if count and int(lengths.min()) == longest:
        padded[:, :longest] = data[offsets[0] : offsets[-1]].reshape(count, longest)
    elif count:
        column = np.arange(width * 4)
        inside = column < lengths[:, None]
        padded[inside] = data[offsets[0] : offsets[-1]]
    words = np.empty((count, width + 1), dtype=np.uint64)
    words[:, 0] = lengths.astype(np.uint64) + np.uint64(1)
    words[:, 1:] = padded.view(np.uint32)
    return words


ENVELOPE = (
    "message_id",
    "from_zone",
    "to_zone",
    "produced_at_unix_ms",
    "correlation_id",
    "causation_id",
    "labels",
    "object_media_type",
    "object_schema",
    "signature",
    "artifact",
)


@dataclass(frozen=True, slots=True)
class KeptRange:
    """What a log keeps of a range whose entries have left: the digest over them, and the chain before and after."""

    first: int
    last: int
    range_digest: str
    chain_before: bytes
    chain_after: bytes


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore of a log from a backup: the first offset that was given anew, when, and the id of the log until then.

    The time is by the clock of the log's own zone.
    """

    first: int
    at_unix_ms: int
    was_log_id: str


@dataclass(frozen=True, slots=True)
class LogHistory:
    """What a log can show of its past.

    ``heads`` says for each chain value that was asked for the offset before which the log had it, None when what is
    left of the log does not have it.
    """

    kept: tuple[KeptRange, ...] = ()
    heads: Mapping[bytes, int | None] = field(default_factory=dict)
    restores: tuple[Restore, ...] = ()


class RangeDigest:
    """Takes batches in offset order and gives the digest of all their entries."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, batch: FactBatch) -> None:
        """Add the next entries."""
        sha256 = hashlib.sha256
        for line in _lines(batch):
            self._hash.update(sha256(line).digest())

    def hexdigest(self) -> str:
        """Give the digest so far."""
        return self._hash.hexdigest()


def _lines(batch: FactBatch) -> list[bytes]:
    """Give one unambiguous byte string per entry: an absent field is marked, and none can contain a NUL."""
    parts = []
    for name in ENVELOPE:
        column = batch.column(name).cast(pa.string())
        parts.append(pc.fill_null(column, "\x01").cast(pa.binary()))
    parts.append(batch.column("digest").cast(pa.binary()))
    result: list[bytes] = pc.binary_join_element_wise(*parts, b"\0").to_pylist()
    return result
