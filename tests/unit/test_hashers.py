"""Digest functions: what one zone seals every other can check, whatever function it uses itself."""

import hashlib
import subprocess
import sys
from typing import Any

import blake3
import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.samples import ARTIFACT, columns, message, row

from bsfg import digest
from bsfg.batch import SMALL_BATCH_FACTS, EntryBatch, FactBatch
from bsfg.digest import Blake3, Hasher, Sha256, hasher_named, is_digest_of, known_hashers, register
from bsfg.errors import DigestMismatch, HasherUnknown, InvalidArgument, InvalidFact
from bsfg.fact import MARK, Envelope, Fact, Message, function_in, marked, unmarked
from bsfg.jsonform import entry_to_dict
from bsfg.model import Limits
from bsfg.sealing import IdStrategy, MessageIds, bodies, digest_mismatches, functions_of, plain, reseal, seal

HASHERS: list[Hasher] = [Sha256(), Blake3()]
BOTH = pytest.mark.parametrize("hasher", HASHERS, ids=lambda each: each.name)
FORMS = pytest.mark.parametrize("count", [1, 5, SMALL_BATCH_FACTS + 10])

names = st.text("abcXYZ0", min_size=1, max_size=5)
labels = st.dictionaries(names, st.text(st.characters(min_codepoint=32, exclude_categories=["Cc", "Cs"]), max_size=8))
texts = st.one_of(
    st.none(), labels.filter(bool).map(lambda each: orjson.dumps(each, option=orjson.OPT_SORT_KEYS).decode())
)


def facts(count: int, **envelope: Any) -> FactBatch:
    """Make unsealed facts, some of them with labels and artifacts."""
    kinds: list[dict[str, Any]] = [{}, {"labels": {"shift": "night"}}, {"labels": {"a": "1", "b": "2"}}]
    return FactBatch.from_messages(
        message(number, ARTIFACT if number % 4 == 3 else None, **kinds[number % 3], **envelope)
        for number in range(count)
    )


def entries(batch: FactBatch) -> EntryBatch:
    """Give facts as a store buffer would give them."""
    return EntryBatch.of(batch.record_batch, np.arange(len(batch)), 1)


def test_the_functions_are_what_they_are_called() -> None:
    """The names stand for the functions that everybody knows by them."""
    assert hasher_named("sha256").digest(b"fact") == hashlib.sha256(b"fact").digest()
    assert hasher_named("blake3").digest_all([b"", b"fact"]) == [
        blake3.blake3(b"").digest(),
        blake3.blake3(b"fact").digest(),
    ]
    assert [each.name for each in known_hashers()] == ["sha256", "blake3"]
    with pytest.raises(HasherUnknown, match="md5"):
        hasher_named("md5")


@FORMS
@BOTH
def test_what_is_sealed_with_one_function_is_checked_by_all(hasher: Hasher, count: int) -> None:
    """Rows and columns say by which function they were sealed, and alterations are found, whoever looks."""
    sealed = seal(facts(count), hasher=hasher)
    assert functions_of(sealed) == [hasher.name]
    assert sealed.digests() == hasher.digest_all(bodies(sealed))
    assert sealed.to_messages() == facts(count).to_messages()
    for batch in (sealed, FactBatch(sealed.record_batch), FactBatch.from_ipc(sealed.to_ipc().to_pybytes())):
        assert len(digest_mismatches(batch)) == 0
        assert reseal(batch) == sealed
    digests = [b"\0" * 32, *sealed.digests()[1:]]
    damaged = sealed.with_columns(digest=pa.array(digests, pa.binary(32)))
    assert digest_mismatches(damaged).tolist() == [0]
    with pytest.raises(DigestMismatch):
        reseal(damaged)


@FORMS
def test_digests_by_sha256_carry_no_mark(count: int) -> None:
    """What is sealed with the default is, byte for byte, what it was before there was another function."""
    batch = facts(count)
    rows = [(*each[:-1], hashlib.sha256(body).digest()) for each, body in zip(batch.rows(), bodies(batch), strict=True)]
    expected = FactBatch.of_rows(rows) if batch.has_rows else columns(rows)
    assert bytes(seal(batch).to_ipc()) == bytes(expected.to_ipc())


@FORMS
def test_facts_of_several_functions_stand_in_one_batch(count: int) -> None:
    """A relay holds facts of many zones side by side; each is checked by its own function."""
    parts = [seal(facts(count, causation_id=str(at)), hasher=HASHERS[at % 2]) for at in range(4)]
    mixed = FactBatch.concat(parts)
    assert functions_of(mixed) == [HASHERS[at % 2].name for at in range(4) for _ in range(count)]
    assert len(digest_mismatches(mixed)) == 0
    assert [entry.hasher for entry in entries(mixed).to_entries()] == functions_of(mixed)
    digests = mixed.digests()
    digests[count], digests[-1] = b"\1" * 32, b"\2" * 32
    damaged = mixed.with_columns(digest=pa.array(digests, pa.binary(32)))
    assert digest_mismatches(damaged).tolist() == [count, 4 * count - 1]


@BOTH
def test_an_entry_tells_its_function(hasher: Hasher) -> None:
    """Applications see the name beside the digest, and the labels that the producer gave, no others."""
    [entry] = entries(
        seal(FactBatch.from_messages([message(1, labels={"shift": "night"})]), hasher=hasher)
    ).to_entries()
    assert (entry.hasher, entry.message.envelope.labels) == (hasher.name, {"shift": "night"})
    assert entry_to_dict(entry)["digest"] == entry.digest_text == f"{hasher.name}:{entry.digest.hex()}"
    assert MARK not in orjson.dumps(entry_to_dict(entry)).decode()


@BOTH
@pytest.mark.parametrize("strategy", [each for each in IdStrategy if each != IdStrategy.EXPLICIT])
def test_derived_ids_follow_the_function(hasher: Hasher, strategy: IdStrategy) -> None:
    """Ids come from the zone's function and what the producer said, and come out the same from a stored fact."""
    fields = ("labels",) if strategy in (IdStrategy.SEMANTIC, IdStrategy.SEMANTIC_V1) else ()
    ids = MessageIds(strategy, fields)
    batch = columns([row(number, message_id=None, labels='{"shift":"night"}') for number in range(3)])
    sealed = seal(batch, hasher=hasher, ids=ids)
    again = ids.derived(plain(sealed), sealed.digests(), hasher)
    assert sealed.values("message_id") == again
    assert len({*again, *seal(batch, hasher=HASHERS[hasher.name == "sha256"], ids=ids).values("message_id")}) == 6
    if strategy == IdStrategy.PAYLOAD:
        assert again == [digest.hex() for digest in sealed.digests()]


@given(texts, st.sampled_from(["sha256", "blake3", "weak"]), st.sampled_from(["sha256", "blake3", "weak"]))
def test_a_mark_comes_and_goes(text: str | None, first: str, second: str) -> None:
    """A mark replaces another, leaves labels as they were, and is canonical JSON that the rules accept."""
    once = marked(text, first)
    assert function_in(once) == first
    assert unmarked(once) == text
    twice = marked(once, second)
    assert (function_in(twice), unmarked(twice)) == (second, text)
    if twice is not None:
        assert orjson.dumps(orjson.loads(twice), option=orjson.OPT_SORT_KEYS).decode() == twice


def test_the_mark_takes_no_place_of_a_label() -> None:
    """A producer may use as many labels as before, and the next zone accepts them all."""
    limits = Limits(max_labels=3)
    full = Message(Envelope("plant-a", "enterprise", 1, "a", labels=dict.fromkeys("abc", "x")), Fact.of("a:b", "c", 1))
    sealed = seal(FactBatch.from_messages([full]), hasher=Blake3(), limits=limits)
    assert reseal(FactBatch(sealed.record_batch), limits=limits).to_messages() == [full]


@pytest.mark.parametrize(
    "text", ['{"$digest":"sha256"}', '{"$digest":7}', '{"$digest":""}', '{"$digest":"A B"}', '{"$x":"y"}']
)
def test_marks_that_are_none_are_refused(text: str) -> None:
    """There is one way to write each function, and no other label may look like the mark."""
    with pytest.raises(InvalidFact, match="labels"):
        reseal(columns([row(1, labels=text, digest=b"\0" * 32)]))


@FORMS
def test_a_mark_is_not_the_producers_to_set(count: int) -> None:
    """Who appends what another zone had sealed gets the digest of his own zone."""
    before = seal(facts(count), hasher=Blake3())
    for batch in (FactBatch(before.record_batch), FactBatch.of_rows(before.rows()[:SMALL_BATCH_FACTS])):
        again = seal(batch)
        assert functions_of(again) == ["sha256"]
        assert len(digest_mismatches(again)) == 0


def test_a_function_that_is_not_known_is_named() -> None:
    """What cannot be checked is refused by name, and never taken for altered or for good."""
    sealed = seal(facts(3), hasher=Blake3())
    strange = sealed.with_columns(labels=pa.array([marked(None, "blake9")] * 3, pa.string()))
    for batch in (
        strange,
        FactBatch.of_rows(strange.rows()),
        FactBatch.concat([FactBatch(sealed.record_batch), strange]),
    ):
        with pytest.raises(HasherUnknown, match="blake9") as caught:
            reseal(batch)
        assert (caught.value.code, caught.value.details["hasher"]) == ("hasher_unknown", "blake9")


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process can be taught another function, under a name that is free."""

    class Sha3(Sha256):
        name = "sha3-256"

        def digest(self, data: bytes) -> bytes:
            return hashlib.sha3_256(data).digest()

        def digest_all(self, items: Any) -> list[bytes]:
            return [self.digest(item) for item in items]

    monkeypatch.setattr(digest, "_known", dict(digest._known))
    sealed = seal(facts(3), hasher=Sha3())
    with pytest.raises(HasherUnknown):
        reseal(sealed)
    register(Sha3())
    assert reseal(sealed).sealed
    for name in ("sha256", "No Name"):
        wrong = Sha3()
        wrong.name = name
        with pytest.raises(InvalidArgument):
            register(wrong)


def test_a_digest_is_recognised_by_any_function() -> None:
    """Two digests of one body by two functions are of the same fact."""
    assert all(is_digest_of(hasher.digest(b"body"), b"body") for hasher in HASHERS)
    assert not is_digest_of(HASHERS[0].digest(b"other"), b"body")


WITHOUT_BLAKE3 = """
import sys
sys.modules["blake3"] = None
from bsfg.errors import ConfigInvalid, HasherUnknown
from bsfg.digest import hasher_named, known_hashers
from bsfg.batch import FactBatch
from bsfg.sealing import reseal
assert [each.name for each in known_hashers()] == ["sha256"]
for work in (lambda: hasher_named("blake3"), lambda: reseal(FactBatch.from_ipc(sys.stdin.buffer.read()))):
    try:
        work()
    except HasherUnknown as error:
        print(error.code, error.message, error.hint)
from bsfg.config import parse
try:
    parse('[zone]\\nname = "plant"\\nhasher = "blake3"\\n[listen]\\nplaintext = true\\n[streams.operational]\\n')
except ConfigInvalid as error:
    print(error.message)
"""


def test_without_the_extra_everything_says_so() -> None:
    """Where BLAKE3 is not installed, digests by it and a configuration that asks for it are refused with what to do."""
    data = bytes(seal(facts(3), hasher=Blake3()).to_ipc())
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BLAKE3], input=data, capture_output=True, timeout=120, check=True
    )
    said = done.stdout.decode()
    assert said.count("hasher_unknown the digest function 'blake3' is not known here: the extra") == 2
    assert said.count("pip install 'bsfg[blake3]'") >= 3
    assert "zone.hasher" in said
