"""The page about the message model says what the code does."""

import hashlib
import json
import re
from pathlib import Path

import orjson
import pytest

from bsfg.batch import FactBatch
from bsfg.canonical import MAX_DEPTH, NotJson, canonicalize
from bsfg.columns import FACT_FIELDS
from bsfg.errors import BsfgError
from bsfg.jsonform import message_from_json
from bsfg.model import DEFAULT_LIMITS, TEXT_RULES, TIME_SAYS
from bsfg.sealing import SEMANTIC_FIELDS, IdStrategy, MessageIds, seal

PAGE = (Path(__file__).parents[2] / "docs" / "message-model.md").read_text(encoding="utf-8")


def table(*heading: str) -> list[list[str]]:
    """Give the rows of the table with this heading."""
    _, found, rest = PAGE.partition("| " + " | ".join(heading) + " |\n")
    assert found
    lines = [line for line in rest.split("\n\n")[0].splitlines()[1:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_fields_are_those_of_the_rule_table() -> None:
    """Every field stands in the page with its rule, its size and whether it is required, in the words of the code."""
    limits = DEFAULT_LIMITS
    expected = [
        [f"`{rule.name}`", "yes" if rule.required else "no", str(rule.max_bytes), rule.says] for rule in TEXT_RULES
    ]
    expected[0][1] = "see [ids](#message-ids)"
    expected += [
        ["`produced_at_unix_ms`", "yes", "–", TIME_SAYS],
        ["`object`", "yes", str(limits.max_object_bytes), "canonical JSON, or any bytes of another media type"],
        [
            "`labels`",
            "no",
            "–",
            f"at most {limits.max_labels} texts by name, each at most {limits.max_label_value_bytes} bytes without "
            "control characters",
        ],
    ]
    assert table("Field", "Required", "Bytes", "Rule") == expected
    assert {name.strip("`") for name, *_ in expected} == set(FACT_FIELDS) - {"digest"}


def test_the_limits_are_those_of_the_code() -> None:
    """The limits of a batch and the depth of JSON are stated as they are."""
    text = " ".join(PAGE.split())
    assert f"at most {DEFAULT_LIMITS.max_batch_facts:,} facts and {DEFAULT_LIMITS.max_batch_bytes >> 30} GiB" in text
    assert DEFAULT_LIMITS.max_batch_bytes % (1 << 30) == 0
    assert f"nested more than {MAX_DEPTH} deep" in text


def test_the_strategies_are_those_of_the_code() -> None:
    """Every id strategy has its row, and the fields for `semantic` are listed."""
    rows = table("Strategy", "The id is", "Choose it when")
    assert [name for name, *_ in rows] == [f"`{strategy}`" for strategy in IdStrategy]
    assert ", ".join(f"`{name}`" for name in SEMANTIC_FIELDS) in " ".join(PAGE.split())


@pytest.mark.parametrize(("sent", "stored"), table("As sent", "As stored"))
def test_the_examples_of_canonical_json_are_true(sent: str, stored: str) -> None:
    """Each example is stored, or refused, as the page says."""
    data = sent.strip("`").encode()
    if stored == "refused":
        with pytest.raises(NotJson):
            canonicalize(data)
    else:
        assert canonicalize(data) == stored.strip("`").encode()


@pytest.mark.parametrize("example", re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
def test_the_example_messages_are_good(example: str) -> None:
    """Each example message is read and sealed without complaint."""
    message = message_from_json(example.encode(), message_id="some")
    sealed = seal(FactBatch.from_messages([message]))
    assert sealed.to_messages() == [message]


def test_the_object_of_the_specification() -> None:
    """The example object of the message model document takes its canonical form."""
    example = b"""{
"status":"completed",
"completed_at":"2026-03-06T14:30:00Z",
"duration_ms":1250,
"result_code":0
}"""
    canonical = canonicalize(example)
    assert canonical == (
        b'{"completed_at":"2026-03-06T14:30:00Z","duration_ms":1250,"result_code":0,"status":"completed"}'
    )
    assert orjson.loads(canonical) == orjson.loads(example)


def test_anybody_can_compute_the_id_of_a_full_message() -> None:
    """The worked example, its canonical form and its id agree, with json and hashlib alone; so does the node's."""
    _, _, section = PAGE.partition("### The id of a full message")
    (example,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    (canonical,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
    (id,) = re.findall(r"has the id `([0-9a-f]{64})`", section)
    text = json.dumps(json.loads(example), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert (text, hashlib.sha256(text.encode()).hexdigest()) == (canonical, id)
    ours = seal(
        FactBatch.from_messages([message_from_json(example.encode())]), ids=MessageIds(IdStrategy.MESSAGE)
    ).values("message_id")
    assert ours == [id]


def test_the_error_codes_exist() -> None:
    """The codes that the page names are codes of errors."""
    for code in ("invalid_fact", "fact_too_large"):
        assert f"`{code}`" in PAGE
        assert code in BsfgError.registry
