"""Numbered cases of one seed: thousands in every run, hundreds of thousands in a long one, each of which runs again.

A case gets a source of chance that depends on seed and number alone. A failure names both: `BSFG_SEED=7 BSFG_CASE=1234`
before the same test runs that case by itself.
"""

import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from tests.conftest import LONG_SOAK

Case = Callable[[Random], str]
"""Checks one input that it draws, and gives a word for how it ended: `agreed`, `refused` and so on."""

LONG = 200_000
"""How many inputs each hand-made path gets in a long run."""

_WORDS = (0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 255, 256, 1 << 15, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31)
_LONG_WORDS = (*_WORDS, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63)
_BYTES = (0x00, 0x01, 0x1F, 0x20, 0x22, 0x2F, 0x30, 0x5C, 0x7F, 0x80, 0xBF, 0xC0, 0xED, 0xF4, 0xF5, 0xFF)


def run(case: Case, *, short: int, long: int = LONG, must_see: Sequence[str] = ()) -> Counter[str]:
    """Run the cases and count how they ended; ``must_see`` are the ends without which nothing would be proven."""
    seed = int(os.environ.get("BSFG_SEED") or (time.time_ns() // 1_000_000 if LONG_SOAK else 0))
    alone = os.environ.get("BSFG_CASE")
    numbers = range(long if LONG_SOAK else short) if alone is None else [int(alone)]
    ends: Counter[str] = Counter()
    for number in numbers:
        try:
            ends[case(Random(f"{seed} {number}"))] += 1
        except BaseException as error:
            error.add_note(f"this case again: BSFG_SEED={seed} BSFG_CASE={number}")
            raise
    print(f"seed {seed}: {len(numbers)} inputs, {dict(ends)}")
    assert alone is not None or not set(must_see) - ends.keys(), f"of {ends} nothing was {must_see}"
    return ends


def mutated(random: Random, data: bytes, places: Sequence[int] = ()) -> bytes:
    """Alter bytes as damage or malice would; ``places`` are those where something decisive stands."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not changed:
            return random.randbytes(8)
        at = random.choice(places) if places and random.random() < 0.6 else random.randrange(len(changed))
        random.choice(_MUTATIONS)(random, changed, min(at, len(changed) - 1))
    return bytes(changed)


def _flip(random: Random, data: bytearray, at: int) -> None:
    data[at] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray, at: int) -> None:
    data[at] = random.choice(_BYTES) if random.random() < 0.7 else random.randrange(256)


def _set_word(random: Random, data: bytearray, at: int) -> None:
    form, words = random.choice((("<I", _WORDS), ("<Q", _LONG_WORDS)))
    at -= at % struct.calcsize(form)
    word = random.choice(words)
    word = word if random.random() < 0.6 else -word % (1 << 8 * struct.calcsize(form))
    if at + struct.calcsize(form) <= len(data):
        struct.pack_into(form, data, at, word)


def _step_word(random: Random, data: bytearray, at: int) -> None:
    """Make a number a little larger or smaller, which is the lie that is hardest to see."""
    form = random.choice(("<H", "<I", "<Q", "<Q"))
    size = struct.calcsize(form)
    at -= at % size
    if at + size <= len(data):
        [word] = struct.unpack_from(form, data, at)
        step = random.choice((-64, -32, -16, -8, -4, -2, -1, -1, 1, 1, 2, 4, 8, 16, 32, 64))
        struct.pack_into(form, data, at, (word + step) % (1 << 8 * size))


def _move(random: Random, data: bytearray, at: int) -> None:
    """Put what stands somewhere else over this place."""
    size = random.choice((1, 4, 8, 16, 40))
    start = random.randrange(len(data))
    data[at : at + size] = data[start : start + len(data[at : at + size])]


def _insert(random: Random, data: bytearray, at: int) -> None:
    data[at:at] = random.choice(
        (bytes(8), b"\xff" * 8, bytes(data[at : at + 8]), random.randbytes(random.randint(1, 9)))
    )


def _remove(random: Random, data: bytearray, at: int) -> None:
    del data[at : at + random.choice((1, 4, 8, 8, 64))]


def _cut(random: Random, data: bytearray, at: int) -> None:
    del data[random.choice((at, len(data) - 1, len(data) - 8)) :]


def _blank(random: Random, data: bytearray, at: int) -> None:
    size = min(random.choice((2, 8, 32)), len(data) - at)
    data[at : at + size] = random.choice((b"\0", b"\xff", b"a")) * size


_MUTATIONS = (_flip, _flip, _set, _set, _set_word, _set_word, *[_step_word] * 5, _move, _insert, _remove, _cut, _blank)
