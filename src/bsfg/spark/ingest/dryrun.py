"""A look at what would happen: the first facts, rows that would be rejected, ids that repeat; without Spark or node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bsfg.jsonform import message_to_dict
from bsfg.spark.ingest.mapped import Mapped, to_mapped
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.reading import Reject, read_chunk
from bsfg.spark.ingest.survey import PARQUET, FileSurvey, SourceFile, survey
from bsfg.spark.mapping import to_facts

SHOWN_FACTS, SHOWN_REJECTS = 3, 10
UNKNOWN_DIGEST = "digest-of-the-whole-file"


@dataclass(slots=True)
class Look:
    """What was seen."""

    files: list[FileSurvey] = field(default_factory=list)
    rows: int = 0
    facts: int = 0
    rejected: int = 0
    first_facts: list[dict[str, Any]] = field(default_factory=list)
    first_rejects: list[Reject] = field(default_factory=list)
    repeated_ids: int = 0
    first_repeated: tuple[str, str, str] | None = None
    whole: bool = True


def look(
    sources: Sequence[SourceFile],
    plan: IngestPlan,
    rows_max: int | None,
    advance: Callable[[int], None] = lambda rows: None,
) -> Look:
    """Read and map the first rows; ``rows_max`` None means all."""
    seen = Look()
    ids: dict[str, str] = {}
    for source in sources:
        left = None if rows_max is None else rows_max - seen.rows
        if left is not None and left <= 0:
            seen.whole = False
            break
        found = survey(source.path, source.format, plan, left)
        if not found.digest:
            seen.whole = seen.whole and source.format == PARQUET
            found.digest = UNKNOWN_DIGEST
        seen.files.append(found)
        for chunk in found.chunks:
            if rows_max is not None and seen.rows >= rows_max:
                seen.whole = False
                break
            for rows in read_chunk(found, chunk, plan):
                _take(seen, to_mapped(rows, plan), ids)
            advance(chunk.rows)
    return seen


def _take(seen: Look, mapped: Mapped, ids: dict[str, str]) -> None:
    rejected = sum(reject.rows for reject in mapped.rejects)
    seen.rows += mapped.facts.num_rows + rejected
    seen.facts += mapped.facts.num_rows
    seen.rejected += rejected
    seen.first_rejects += mapped.rejects[: SHOWN_REJECTS - len(seen.first_rejects)]
    wanted = SHOWN_FACTS - len(seen.first_facts)
    if wanted > 0 and mapped.facts.num_rows:
        seen.first_facts += map(message_to_dict, to_facts(mapped.facts.slice(0, wanted)).to_messages())
    if "message_id" in mapped.facts.schema.names:
        _note_ids(seen, mapped, ids)


def _note_ids(seen: Look, mapped: Mapped, ids: dict[str, str]) -> None:
    """Find ids that two rows share: the second would not be stored."""
    file = mapped.rows.file.path
    for id, at in zip(mapped.facts.column("message_id").to_pylist(), mapped.at.tolist(), strict=True):
        place = f"{file} row {mapped.rows.numbers[at]}"
        before = ids.setdefault(id, place)
        if before is not place:
            seen.repeated_ids += 1
            seen.first_repeated = seen.first_repeated or (id, before, place)
