"""One number per entry, for whole batches at once: what the two ends of a link are compared by.

The numbers are keyed with a secret that every audit draws anew, so nobody can prepare an alteration that they miss.
They cover the envelope, the digest of the body, and offset and time of the entry at the sender.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.arrays import byte_lengths, constant_value, fixed_rows
from bsfg.batch import EntryBatch
from bsfg.hashing import KeyHash
from bsfg.schema import DIGEST_BYTES

TEXTS = (
    "message_id",
    "from_zone",
    "to_zone",
    "correlation_id",
    "causation_id",
    "labels",
    "object_media_type",
    "object_schema",
    "signature",
    "artifact",
)
"""The columns of the envelope that hold text; the body is covered by its digest."""

_LONG_BYTES = 256
_NUMBER_WORDS = 2
_NULL = np.uint64(0x9E3779B97F4A7C15)
_LANES = (np.uint64(0), np.uint64(0xC2B2AE3D27D4EB4F))


class EntryHash:
    """The keyed hash of entries and of their keys; the same secret gives the same numbers everywhere."""

    def __init__(self, secret: bytes) -> None:
        self._texts = {name: KeyHash(_derived(secret, name)) for name in TEXTS}
        self._keys = KeyHash(_derived(secret, "key"))
        words = DIGEST_BYTES // 4 + 3 * _NUMBER_WORDS
        raw = b"".join(_derived(secret, f"number {at}")[:16] for at in range(words + 1))
        self._coefficients = np.frombuffer(raw, dtype="<u8").reshape(-1, 2)

    def of(self, entries: EntryBatch, offsets: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Hash entries with the offsets and times that they have at the sender."""
        result = self._numbers(entries, offsets, times)
        for name, hasher in self._texts.items():
            result ^= _text_terms(hasher, entries.column(name))
        return mixed(result)

    def keys(self, entries: EntryBatch) -> np.ndarray:
        """Hash the keys of entries."""
        return self.keys_of(entries.column("from_zone"), entries.column("message_id"))

    def keys_of(self, from_zone: pa.Array, message_id: pa.Array) -> np.ndarray:
        """Hash keys that stand in two columns."""
        return np.asarray(self._keys.of(_filled(from_zone), _filled(message_id)))

    def _numbers(self, entries: EntryBatch, offsets: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Hash what has a fixed width: offset, both times and the digest."""
        produced, missing = _whole_numbers(entries.column("produced_at_unix_ms"))
        digests, unsealed = _digest_words(entries.column("digest"))
        words = np.empty((len(entries), len(self._coefficients)), dtype=np.uint64)
        words[:, 0] = 1
        for at, column in enumerate((offsets, times, produced)):
            split = np.ascontiguousarray(column, dtype=np.int64).view(np.uint32).reshape(-1, _NUMBER_WORDS)
            words[:, 1 + at * _NUMBER_WORDS : 1 + (at + 1) * _NUMBER_WORDS] = split
        words[:, 1 + 3 * _NUMBER_WORDS :] = digests
        sums = words @ self._coefficients
        high = np.uint64(0xFFFFFFFF00000000)
        result = np.asarray((sums[:, 0] & high) | (sums[:, 1] >> np.uint64(32)))
        for absent, place in ((missing, 1), (unsealed, 2)):
            if absent is not None:
                result[absent] ^= _NULL * np.uint64(2 * place + 1)
        return result


def mixed(values: np.ndarray) -> np.ndarray:
    """Spread numbers so that sums tell them apart: else exchanging a field between two entries would not show."""
    result = values.astype(np.uint64, copy=True)
    result ^= result >> np.uint64(33)
    result *= np.uint64(0xFF51AFD7ED558CCD)
    result ^= result >> np.uint64(33)
    result *= np.uint64(0xC4CEB9FE1A85EC53)
    result ^= result >> np.uint64(33)
    return result


def lanes(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give two independent numbers per hash, to be summed up side by side."""
    first, second = (mixed(hashes ^ lane) for lane in _LANES)
    return first, second


def _derived(secret: bytes, what: str) -> bytes:
    return hashlib.blake2b(what.encode(), digest_size=32, key=secret, person=b"audit").digest()


def _text_terms(hasher: KeyHash, column: pa.Array) -> np.ndarray | np.uint64:
    """Hash a column of texts; a null is not the empty text."""
    if column.null_count == len(column):
        return _NULL
    single = constant_value(column)
    if single is not None:
        return np.uint64(hasher.of_one("", _short(single)))
    texts = _short_all(_filled(column))
    terms = np.asarray(hasher.of(pa.repeat(pa.scalar("", pa.string()), len(texts)), texts))
    if column.null_count:
        terms = np.where(np.asarray(column.is_valid()), terms, _NULL)
    return terms


def _filled(column: pa.Array) -> pa.Array:
    return pc.fill_null(column, "") if column.null_count else column


def _short(text: str) -> str:
    data = text.encode()
    return text if len(data) <= _LONG_BYTES else f"\x01{hashlib.sha256(data).hexdigest()}"


def _short_all(texts: pa.Array) -> pa.Array:
    """Replace long texts by their digests: the hash lays all rows out as wide as the widest."""
    long = np.flatnonzero(byte_lengths(texts) > _LONG_BYTES)
    if not len(long):
        return texts
    values = texts.to_pylist()
    for row in long.tolist():
        values[row] = _short(values[row])
    return pa.array(values, type=pa.string())


def _whole_numbers(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Give a column of numbers, and which of them are missing if any are."""
    if not column.null_count:
        return np.asarray(column), None
    return np.asarray(pc.fill_null(column, 0)), np.asarray(column.is_null())


def _digest_words(column: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    missing = None
    if column.null_count:
        missing = np.asarray(column.is_null())
        column = pc.fill_null(column, bytes(DIGEST_BYTES))
    return np.ascontiguousarray(fixed_rows(column)).view("<u4"), missing
