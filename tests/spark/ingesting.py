"""What the tests of the pipeline `ingest` share: plans, and files read and mapped without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from bsfg.spark.ingest.mapped import Look, look, to_mapped
from bsfg.spark.ingest.options import Asked
from bsfg.spark.ingest.plan import IngestPlan
from bsfg.spark.ingest.reading import Reject, read_chunk
from bsfg.spark.ingest.survey import FileSurvey, SourceFile, find, survey
from bsfg.spark.mapping import to_facts

SETS = {"subject": "machine:press-1", "predicate": "temperature_measured", "produced_at": "2026-03-01T06:00:00Z"}


class Asking(Asked):
    """What was asked for, with limits that only tests change."""

    def plan(self, **more: Any) -> IngestPlan:
        """Make the plan."""
        return replace(super().plan(), **more)


def asked(**more: Any) -> Asking:
    """Ask for facts with constant fields, unless ``more`` says otherwise."""
    mapped = more.get("map", {})
    sets = {name: text for name, text in SETS.items() if name not in mapped} | more.pop("set", {})
    given: dict[str, Any] = {"stream": "operational", "from_zone": "plant-a", "to_zone": "enterprise", "set": sets}
    return Asking(**(given | more))


@dataclass(frozen=True)
class Found:
    """What a file became."""

    file: FileSurvey
    facts: list[dict[str, Any]]
    rejects: list[Reject]


def mapped_rows(path: Path, plan: IngestPlan) -> Found:
    """Survey, read and map a file; each fact is a row of its columns, with the object parsed and its row's number."""
    [source] = find([str(path)]).files
    file = survey(source.path, source.format, plan)
    facts: list[dict[str, Any]] = []
    rejects: list[Reject] = []
    for chunk in file.chunks:
        for rows in read_chunk(file, chunk, plan):
            mapped = to_mapped(rows, plan)
            found = to_facts(mapped.facts).record_batch.to_pylist()
            numbers = rows.numbers[mapped.at].tolist()
            for row, number in zip(found, numbers, strict=True):
                raw = row.pop("object")
                value = orjson.loads(raw) if row["object_media_type"] == "application/json" else None
                facts.append({**row, "raw": raw, "number": number, "object": value})
            rejects += mapped.rejects
    return Found(file, facts, rejects)


def look_at(paths: Sequence[Path], plan: IngestPlan, rows_max: int | None) -> Look:
    """Make a dry run over CSV files."""
    return look([SourceFile(str(path), "csv") for path in paths], plan, rows_max)
