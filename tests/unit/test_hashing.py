"""The keyed hash of the key index: the same key always, nobody else's collisions, in any layout."""

import hashlib
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.digest import KeyHash, Sha256
from bsfg.errors import InvalidArgument

SECRET = bytes(range(32))
KEYS = st.tuples(st.sampled_from(["plant-a", "plant-b", "z", ""]), st.text(max_size=20) | st.text("ab\0", max_size=20))


def hashed(keys: list[tuple[str, str]], secret: bytes = SECRET) -> list[int]:
    """Hash keys as one batch."""
    zones, ids = pa.array([zone for zone, _ in keys], pa.string()), pa.array([id for _, id in keys], pa.string())
    result: list[int] = KeyHash(secret).of(zones, ids).tolist()
    return result


@given(st.lists(KEYS, max_size=50), st.integers(0, 50), st.integers(0, 50))
def test_a_key_has_one_hash_in_every_layout(keys: list[tuple[str, str]], start: int, count: int) -> None:
    """Alone, in a batch, in a slice or beside longer ids, a key has the same hash; different keys have others."""
    key_hash = KeyHash(SECRET)
    alone = [key_hash.of_one(zone, id) for zone, id in keys]
    assert hashed(keys) == alone
    zones, ids = pa.array([zone for zone, _ in keys], pa.string()), pa.array([id for _, id in keys], pa.string())
    cut = key_hash.of(zones.slice(start, count), ids.slice(start, count))
    assert cut.tolist() == alone[start : start + count]
    assert cut.dtype == np.uint64
    beside = hashed([*keys, ("long", "x" * 300), *[("z", "y")] * 20])
    assert beside[: len(keys)] == alone
    assert len(set(alone)) == len(set(keys))


def test_padding_does_not_collide() -> None:
    """Ids that differ only in NULs at their end, or in how words are cut, have different hashes."""
    ids = ["", "\0", "\0\0", "a", "a\0", "a\0\0", "a\0\0\0", "a\0\0\0\0", "aaaa", "aaaa\0", "\0aaaa", "\0\0\0\0a"]
    keys = [("z", id) for id in ids]
    assert len(set(hashed(keys))) == len(ids)
    assert len(set(hashed(keys * 5))) == len(ids)


def test_the_zone_matters() -> None:
    """The same id of two zones is two keys, in constant and in mixed batches."""
    one, two = hashed([("a", "x")] * 20), hashed([("b", "x")] * 20)
    assert set(one).isdisjoint(two)
    assert hashed([("a", "x"), ("b", "x")] * 20) == [one[0], two[0]] * 20


def test_the_secret_matters() -> None:
    """Two folders hash alike keys differently, so nobody can aim collisions at an index."""
    keys = [("z", f"evt-{number}") for number in range(1_000)]
    assert set(hashed(keys)).isdisjoint(hashed(keys, b"another secret of this folder"))


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 15, b"x" * 65])
def test_weak_secrets_are_refused(secret: bytes) -> None:
    """A secret that is too short to be one, or too long to be used, is refused."""
    with pytest.raises(InvalidArgument):
        KeyHash(secret)


def test_hashes_are_spread() -> None:
    """Consecutive ids fill all bits: no two of a hundred thousand agree, and each bit is set in about half."""
    hashes = np.array(hashed([("plant-a", f"evt-{number:032d}") for number in range(100_000)]), dtype=np.uint64)
    assert len(np.unique(hashes)) == 100_000
    for bit in range(64):
        share = np.count_nonzero(hashes & np.uint64(1 << bit)) / len(hashes)
        assert 0.45 < share < 0.55


def test_large_batches_are_hashed_in_parts() -> None:
    """A batch of more rows than one part holds gives the same hashes as its parts."""
    keys = [(f"zone{number % 3}", str(number)) for number in range(70_000)]
    assert hashed(keys)[65_530:65_545] == hashed(keys[65_530:65_545])


def test_hashes_are_fixed_for_good() -> None:
    """A known key has a known hash, because index files on disk depend on it."""
    assert hashed([("plant-a", "evt-000001"), ("plant-b", "é" * 100)]) == [16500354141392814524, 4421737070780361023]


def test_threads_share_a_hash() -> None:
    """Threads that use one object at once get the hashes that one alone gets."""
    keys = [("z", "x" * number) for number in range(200)]
    expected = hashed(keys)
    shared, results = KeyHash(SECRET), []
    zones, ids = pa.array([zone for zone, _ in keys]), pa.array([id for _, id in keys])
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        results.append(shared.of(zones, ids).tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_sha256() -> None:
    """The default digest is SHA-256, one by one and many at once."""
    items = [b"", b"abc", b"x" * 1000]
    assert Sha256().digest_all(items) == [Sha256().digest(item) for item in items]
    assert Sha256().digest(b"abc") == hashlib.sha256(b"abc").digest()
    assert Sha256.name == "sha256"
