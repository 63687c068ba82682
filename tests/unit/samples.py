"""Facts for tests: good ones by default, bad ones by naming a field."""

from typing import Any

import orjson

from bsfg.batch import FactBatch
from bsfg.columns import AT, FACT_FIELDS
from bsfg.fact import ArtifactRef, Envelope, Fact, Message
from bsfg.rows import Row, record_batch_of, row_of

ARTIFACT = ArtifactRef("docs", "2026/report.pdf", "sha256:" + "ab" * 32, 1234, "application/pdf", "report.pdf")


def message(number: int = 0, artifact: ArtifactRef | None = None, **envelope: Any) -> Message:
    """Make a message that breaks no rule."""
    body = orjson.dumps({"line": "lineA", "seq": number, "temperature": 20.5 + number % 13})
    head = {"produced_at_unix_ms": 1_700_000_000_000 + number, "message_id": f"evt-{number:06d}", **envelope}
    return Message(
        Envelope("plant-a", "enterprise", **head),
        Fact(f"batch:lineA/B{number:06d}", "step_completed", body, artifact),
    )


def messages(count: int) -> list[Message]:
    """Make messages with distinct ids, subjects and objects."""
    return [message(number) for number in range(count)]


def row(number: int = 0, **fields: Any) -> Row:
    """Make a row with some of its fields replaced."""
    values = dict(zip(FACT_FIELDS, row_of(message(number)), strict=True))
    assert fields.keys() <= values.keys()
    return tuple({**values, **fields}.values())


def columns(rows: list[Row]) -> FactBatch:
    """Make a batch that has columns only."""
    return FactBatch(record_batch_of(rows))


def field(row: Row, name: str) -> Any:
    """Give one field of a row."""
    return row[AT[name]]
