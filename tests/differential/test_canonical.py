"""Whatever a quick look clears as canonical JSON is canonical by the plain model, and all paths seal alike."""

import json
from random import Random

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.differential import campaign
from tests.differential.jsonmodel import model
from tests.unit.samples import columns, row

from bsfg.canonical import NotJson, canonicalize, canonicalize_all
from bsfg.errors import InvalidFact
from bsfg.jsonform import message_from_json
from bsfg.layouts import MIN_ROWS, unproven
from bsfg.rows import Row
from bsfg.sealing import seal

PLAIN = ["", "a", "b", "ok", "é", "😀", "\x7f", "1", "null", "true", "a,b", "\u2028"]
STRINGS = [*PLAIN, 'q"q', "back\\slash", "l\nf", '","b":"']
NUMBERS = ["0", "-0", "1", "10", "12.50", "-3e5", "1E+05", "1e-400", "9" * 30, "1.0", "18446744073709551616"]
BREAKING = b'"\\{}[]:, 0019eE+-.ntfu\x00\n\x1f\x7f\x80\xc3\xa9ab'


def value(random: Random, depth: int = 0) -> str:
    """Draw a JSON text; its keys are sorted and its strings in their shortest form more often than not."""
    kind = random.random()
    if depth < 3 and kind < 0.35:
        keys = random.sample(STRINGS, random.randrange(5))
        if random.random() < 0.8:
            keys.sort(key=str.encode)
        return "{" + ",".join(f"{string(random, key)}:{value(random, depth + 1)}" for key in keys) + "}"
    if depth < 3 and kind < 0.5:
        return "[" + ",".join(value(random, depth + 1) for _ in range(random.randrange(4))) + "]"
    if kind < 0.75:
        return string(random, random.choice(PLAIN if random.random() < 0.7 else STRINGS))
    return random.choice(NUMBERS) if kind < 0.9 else random.choice(("true", "false", "null"))


def string(random: Random, text: str) -> str:
    """Write a string, now and then with more escapes than it needs."""
    return json.dumps(text, ensure_ascii=random.random() < 0.03)


def object_text(random: Random) -> bytes:
    """Draw the text of an object that is canonical as it stands, if chance allows."""
    for _ in range(8):
        text = value(random).encode()
        if len(text) > 6 and model(text) == text:
            return text
    return random.choice((b'{"a":"say \\"no\\"","b":10}', b'{"a":"x","b":[10,"y"]}', b'{"a":"now","b":-1.5}'))


def neighbour(random: Random, text: bytes) -> bytes:
    """Alter a text a little, mostly without changing its length."""
    changed = bytearray(text)
    for _ in range(random.choice((1, 1, 2, 3))):
        at = random.randrange(len(changed))
        kind = random.random()
        if kind < 0.7:
            changed[at] = random.choice(BREAKING)
        elif kind < 0.8:
            other = random.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        elif kind < 0.9:
            changed.insert(at, random.choice(BREAKING))
        elif len(changed) > 1:
            del changed[at]
    return bytes(changed)


def column(random: Random) -> list[bytes]:
    """Draw a column of which many texts resemble a few, as those of machines do."""
    patterns = [object_text(random) for _ in range(random.choice((1, 1, 2, 3)))]
    texts = random.choices(patterns, k=MIN_ROWS)
    for _ in range(random.choice((1, 10, 40))):
        texts.append(neighbour(random, random.choice(patterns)))
    if random.random() < 0.5:
        first, rest = texts[0], texts[1:]
        random.shuffle(rest)
        texts = [first, *rest]
    return texts


def proven_is_canonical(random: Random) -> str:
    """Look at a column: what needs no closer look is its own canonical form."""
    texts = column(random)
    doubtful = set(unproven(pa.array(texts, pa.binary())).tolist())
    for text in {text for at, text in enumerate(texts) if at not in doubtful}:
        assert model(text) == text, text
    return "some proven" if len(doubtful) < len(texts) else "none proven"


@pytest.mark.soak
def test_what_is_proven_by_likeness_is_canonical() -> None:
    """However a text differs from its neighbours: cleared without being parsed, it is canonical."""
    campaign.run(proven_is_canonical, short=800, long=40_000, must_see=("some proven", "none proven"))


@given(st.lists(st.sampled_from(b",:a1k{}[]"), min_size=4, max_size=4))
@example(list(b"k,k:"))
def test_likeness_to_a_text_with_escapes_proves_nothing_false(instead: list[int]) -> None:
    """A text with escaped quotes gives nobody leave to end strings elsewhere: no doubled, unsorted or broken keys."""
    for pattern in (b'{"ak":"1\\"\\"a\\"\\"2"}', b'{"z":"1\\"\\"a\\"\\"2"}', b'["\\"\\"\\"\\""]'):
        parts = pattern.split(b"\\")
        forged = parts[0] + b"".join(bytes([byte]) + part for byte, part in zip(instead, parts[1:], strict=True))
        if MIN_ROWS not in unproven(pa.array([pattern] * MIN_ROWS + [forged], pa.binary())):
            assert model(forged) == forged


def sealed(rows: list[Row]) -> list[bytes] | tuple[int, str]:
    """Seal rows in one batch; give the objects, or which row is refused and by which rule."""
    try:
        return seal(columns(rows)).values("object")
    except InvalidFact as error:
        return int(error.details["row"]), str(error.details["rule"])


def sealed_alike(random: Random) -> str:
    """Seal a column as a batch and text by text."""
    texts = column(random)
    if random.random() < 0.5:
        texts = [text for text in texts if model(text) is not None] or [b"1"]
    found = sealed([row(at, object=text) for at, text in enumerate(texts)])
    for at, text in enumerate(texts):
        expected = model(text)
        if expected is None:
            with pytest.raises(NotJson) as caught:
                canonicalize(text)
            assert found == (at, str(caught.value))
            return "refused"
        assert isinstance(found, tuple) or found[at] == expected
    assert len(found) == len(texts)
    return "sealed"


@pytest.mark.soak
def test_batches_are_sealed_as_their_facts_are() -> None:
    """A batch has the canonical objects of its facts, or is refused for the first fact that is refused alone."""
    campaign.run(sealed_alike, short=100, long=10_000, must_see=("refused", "sealed"))


def canonical_by_model(random: Random) -> str:
    """Canonicalise some texts alone and together."""
    texts = [value(random).encode("utf-8", "surrogatepass") for _ in range(random.choice((1, 2, 5, 40)))]
    texts = [neighbour(random, text) if random.random() < 0.3 else text for text in texts]
    changed, problems = canonicalize_all(texts)
    for at, text in enumerate(texts):
        expected = model(text)
        assert (at in problems) == (expected is None)
        try:
            alone = canonicalize(text)
        except NotJson:
            alone = None
        assert alone == expected
        assert expected is None or changed.get(at, text) == expected
    return "refused" if problems else "changed" if changed else "kept"


@pytest.mark.soak
def test_texts_are_canonicalised_as_by_the_model() -> None:
    """Alone or in company, a text gives what the plainest reading of the rules gives."""
    campaign.run(canonical_by_model, short=800, long=50_000, must_see=("refused", "changed", "kept"))


def read_from_a_message(random: Random) -> str:
    """Read a message in its JSON form with an object of any text."""
    text = value(random).encode("utf-8", "surrogatepass")
    text = neighbour(random, text) if random.random() < 0.2 else text
    line = b'{"envelope":%s,"fact":{"subject":"a:b","predicate":"c","object":%s}}' % (ENVELOPE, text)
    expected = model(text)
    try:
        found = message_from_json(line if random.random() < 0.8 else b" " + line.replace(b'"fact":', b'"fact" : '))
    except InvalidFact:
        # A text that ends the object by itself may make another message, a good one or none.
        assert expected is None
        return "refused"
    assert expected is None or found.fact.object == expected
    return "read" if expected is not None else "another message"


ENVELOPE = b'{"from_zone":"a","to_zone":"b","produced_at_unix_ms":1}'


@pytest.mark.soak
def test_objects_in_messages_are_those_of_the_model() -> None:
    """The JSON form of a message keeps the object that was written: same literals, canonical, or refused."""
    campaign.run(read_from_a_message, short=2_000, must_see=("read", "refused"))
