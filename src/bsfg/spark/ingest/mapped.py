"""Rows become facts by the plan, column by column; rows that break a rule of facts are split off with the reason.

A look at what would happen is here too: the first facts, rows that would be rejected, ids that repeat; without Spark
or node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from bsfg.batch import FactBatch
from bsfg.canonical import canonicalize_all
from bsfg.columns import constant_value
from bsfg.errors import BsfgError, FactTooLarge, InvalidFact
from bsfg.fact import is_json
from bsfg.jsonform import message_to_dict
from bsfg.layouts import unproven
from bsfg.model import Limits
from bsfg.rules import judge, suspects
from bsfg.spark.ingest.columns import STRING, Column, constant
from bsfg.spark.ingest.plan import (
    CONTENT,
    DIGEST,
    FILE,
    ROW,
    UNIX_UNITS,
    IngestPlan,
    Template,
    microseconds,
    stamped_times,
    text_times,
    zone_of,
)
from bsfg.spark.ingest.reading import FileRows, Reject, read_chunk
from bsfg.spark.ingest.survey import PARQUET, FileSurvey, SourceFile, survey
from bsfg.spark.mapping import LABELS, TIME, schema_of, to_facts

ID_DIGITS = 32
_BINARY = pa.binary()
_NULL = pa.scalar(None, STRING)


@dataclass(slots=True)
class Problems:
    """What is wrong with rows: of each the first that was found."""

    found: dict[int, tuple[str, str, str]] = field(default_factory=dict)

    def add(self, rows: Iterable[int], name: str, reason: str, code: str = InvalidFact.code) -> None:
        """Note the same problem of several rows."""
        for row in rows:
            self.found.setdefault(int(row), (code, name, reason))

    def add_each(self, reasons: dict[int, str], name: str) -> None:
        """Note a problem per row."""
        for row, reason in reasons.items():
            self.found.setdefault(row, (InvalidFact.code, name, reason))


@dataclass(frozen=True, slots=True)
class Mapped:
    """Facts in Spark's columns, the numbers of their rows, and what could not become a fact."""

    facts: pa.RecordBatch
    rows: FileRows
    at: np.ndarray
    rejects: list[Reject]


def fact_columns(plan: IngestPlan) -> list[str]:
    """Name the columns that the facts of a plan have in Spark."""
    optional = ("message_id", "correlation_id", "causation_id", "object_media_type", "object_schema")
    used = [name for name in optional if name in plan.fields]
    return [
        *used,
        "from_zone",
        "to_zone",
        "produced_at",
        *(["labels"] if plan.labels else []),
        "subject",
        "predicate",
        "object",
    ]


def fact_schema(plan: IngestPlan) -> pa.Schema:
    """Give the schema of the facts of a plan."""
    return schema_of(fact_columns(plan))


def to_mapped(rows: FileRows, plan: IngestPlan) -> Mapped:
    """Make facts of rows; a row is a fact or a reject, never neither and never both."""
    if not len(rows):
        empty = pa.RecordBatch.from_pylist([], schema=fact_schema(plan))
        return Mapped(empty, rows, np.arange(0), rows.rejects)
    problems = Problems()
    columns = _Columns(rows, plan, problems).all()
    names = fact_columns(plan)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in names], schema=fact_schema(plan))
    at = np.arange(len(rows))
    if problems.found:
        at = np.setdiff1d(at, list(problems.found), assume_unique=True)
    batch, at = _without_rule_breakers(batch, at, plan, problems)
    rejects = [rows.reject(row, code, reason, name) for row, (code, name, reason) in problems.found.items()]
    everything = sorted([*rows.rejects, *rejects], key=lambda reject: reject.row or 0)
    return Mapped(batch, rows, at, everything)


class _Columns:
    """The columns of facts, made one after the other; what is wrong is noted on the way."""

    def __init__(self, rows: FileRows, plan: IngestPlan, problems: Problems) -> None:
        self.rows, self.plan, self.problems = rows, plan, problems
        self._known: dict[str, Column] = {}

    def all(self) -> dict[str, pa.Array]:
        """Make all columns of `fact_columns`."""
        fields = self.plan.fields
        made = {
            name: self._text(template, name, optional=name not in ("subject", "predicate", "from_zone", "to_zone"))
            for name, template in fields.items()
            if name not in ("produced_at", "message_id")
        }
        made["produced_at"] = self._times()
        if self.plan.labels:
            made["labels"] = self._labels()
        made["object"] = self._objects(made)
        if "message_id" in fields:
            made["message_id"] = self._ids(fields["message_id"], made)
        return made

    def _column(self, name: str, field: str, *, typed: bool = False) -> Column:
        """Give a column for a field, without values where no row has it; what is wrong with single values is noted."""
        if name not in self._known:
            self._known[name] = self.rows.get(name) or Column(pa.nulls(len(self.rows), STRING))
        column = self._known[name]
        if typed:
            column = column.as_type(self.plan.types.get(name, "text"), self.plan.csv.decimal)
        self.problems.add_each({row: f"column {name} {says}" for row, says in column.problems.items()}, field)
        return column

    def _text(self, template: Template, field: str, *, optional: bool, content: pa.Array | None = None) -> pa.Array:
        """Fill in a template; without one of its columns an optional field is null, and a row without others is bad."""
        count = len(self.rows)
        if template.value is not None:
            return constant(template.value, count)
        parts: list[pa.Array | pa.Scalar] = []
        for place, part in enumerate(template.parts):
            if place % 2:
                parts.append(content if part == CONTENT and content is not None else self._part(part, field, optional))
            elif part:
                parts.append(pa.scalar(part, STRING))
        return parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, pa.scalar("", STRING))

    def _part(self, name: str, field: str, optional: bool) -> pa.Array:
        """Give one value of a template as text."""
        count = len(self.rows)
        if name == ROW:
            return pa.array(self.rows.numbers).cast(STRING)
        if name in (FILE, DIGEST):
            file = self.rows.file
            return constant(file.path.rpartition("/")[2] if name == FILE else file.digest[:ID_DIGITS], count)
        column = self._column(name, field)
        self.problems.add(column.nested(), field, f"column {name} holds an object or array, which is no text")
        if not optional and column.text.null_count:
            self.problems.add(_rows(column.text.is_null()), field, f"is required, and column {name} is empty")
        return column.text

    def _times(self) -> pa.Array:
        template, time = self.plan.fields["produced_at"], self.plan.time
        if template.value is not None:
            moment = microseconds(template.value, time.format, zone_of(time.zone) if time.zone is not None else None)
            return pa.repeat(pa.scalar(moment, pa.int64()), len(self.rows)).cast(TIME)
        name = template.columns[0]
        column = self._column(name, "produced_at")
        if column.stamps is not None and time.format not in UNIX_UNITS:
            values, wrong = stamped_times(column.stamps, time)
        else:
            values, wrong = text_times(column.text, time)
        self.problems.add_each({row: f"column {name}: {says}" for row, says in wrong.items()}, "produced_at")
        self.problems.add(_rows(values.is_null()), "produced_at", f"is required, and column {name} is empty")
        return values.cast(TIME)

    def _labels(self) -> pa.Array:
        """Make a map per row, without the labels that have no value there."""
        labels = sorted(self.plan.labels)
        values = [self._text(template, f"label.{name}", optional=True) for name, template in labels]
        given = np.column_stack([value.is_valid().to_numpy(zero_copy_only=False) for value in values])
        # Row by row and label by label; the columns lie one behind the other.
        order = np.arange(given.size).reshape(len(labels), -1).T.ravel()
        keep = pa.array(given.ravel())
        names = pa.array([name for name, _ in labels], STRING)
        names = names.take(pa.array(np.tile(np.arange(len(labels)), len(self.rows)))).filter(keep)
        texts = pa.concat_arrays(values).take(pa.array(order)).filter(keep)
        offsets = np.concatenate(([0], np.cumsum(given.sum(axis=1)))).astype(np.int32)
        return pa.MapArray.from_arrays(pa.array(offsets), names, texts).cast(LABELS)

    # The object.

    def _objects(self, made: dict[str, pa.Array]) -> pa.Array:
        chosen = self.plan.object
        if chosen.column is not None:
            objects = self._content_of(chosen.column)
        elif chosen.whole and self.rows.whole is not None:
            objects = self.rows.whole()
        else:
            return self._built(chosen.fields or tuple((name, name) for name in self.rows.names))
        return self._canonical(objects, made.get("object_media_type"))

    def _content_of(self, name: str) -> pa.Array:
        """Give what one column holds: bytes as they are, text as it is, other values as JSON."""
        raw = self.rows.raw(name)
        if raw is None:
            column = self._column(name, "object", typed=True)
            text = column.text
            if self.rows.whole is not None and self.plan.makes_json:
                # In JSON Lines a value is JSON already, a text among them with its quotes.
                text = pc.if_else(column.text.is_valid(), column.as_json(), _NULL)
            raw = text.cast(_BINARY)
        self.problems.add(_rows(raw.is_null()), "object", f"is required, and column {name} is empty")
        return raw

    def _built(self, fields: tuple[tuple[str, str], ...]) -> pa.Array:
        """Write canonical JSON objects of columns: the keys are sorted once, the values are put between them."""
        parts: list[pa.Array | pa.Scalar] = []
        lead = "{"
        for key, name in sorted(fields):
            column = self._column(name, "object", typed=True)
            parts += [pa.scalar(f"{lead}{orjson.dumps(key).decode()}:", STRING), column.as_json()]
            lead = ","
        if not parts:
            return constant("{}", len(self.rows)).cast(_BINARY)
        return pc.binary_join_element_wise(*parts, pa.scalar("}", STRING), pa.scalar("", STRING)).cast(_BINARY)

    def _canonical(self, objects: pa.Array, media_types: pa.Array | None) -> pa.Array:
        """Check what somebody else wrote as JSON, and give it in canonical form."""
        if not self.plan.makes_json:
            return objects
        doubtful = [row for row in unproven(pc.fill_null(objects, b"null")).tolist() if objects[row].is_valid]
        if media_types is not None and doubtful:
            kinds = media_types.to_pylist()
            doubtful = [row for row in doubtful if kinds[row] is None or is_json(kinds[row])]
        if not doubtful:
            return objects
        values = objects.to_pylist()
        changed, wrong = canonicalize_all([values[row] for row in doubtful])
        for place, data in changed.items():
            values[doubtful[place]] = data
        self.problems.add_each({doubtful[place]: str(problem) for place, problem in wrong.items()}, "object")
        return pa.array(values, _BINARY) if changed else objects

    # The id.

    def _ids(self, template: Template, made: dict[str, pa.Array]) -> pa.Array:
        content = None
        if CONTENT in template.columns:
            parts = (made[name] for name in ("subject", "predicate", "produced_at", "object"))
            columns = (part.cast(pa.int64()).to_pylist() if part.type == TIME else part.to_pylist() for part in parts)
            content = pa.array(map(_content_digest, *columns), STRING)
        return self._text(template, "message_id", optional=False, content=content)


def _content_digest(subject: str | None, predicate: str | None, time: int | None, data: bytes | None) -> str:
    head = f"{subject}\0{predicate}\0{None if time is None else time // 1000}\0".encode()
    return hashlib.sha256(head + (data or b"")).hexdigest()[:ID_DIGITS]


def _rows(mask: pa.Array) -> list[int]:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist()


# The rules of facts.


def _without_rule_breakers(
    batch: pa.RecordBatch, at: np.ndarray, plan: IngestPlan, problems: Problems
) -> tuple[pa.RecordBatch, np.ndarray]:
    """Take out rows that are bad already and those that the judge of the message model convicts."""
    if len(at) != batch.num_rows:
        batch = batch.take(pa.array(at))
    if not len(at):
        return batch, at
    facts = to_facts(batch)
    guilty = convicted(facts, Limits(max_object_bytes=plan.max_object_bytes))
    if not guilty:
        return batch, at
    for row, error in guilty.items():
        name = str(error.details.get("field", "fact")).removesuffix("_unix_ms")
        problems.add([int(at[row])], name, str(error.details.get("rule", error.message)), error.code)
    innocent = np.setdiff1d(np.arange(len(at)), list(guilty), assume_unique=True)
    return batch.take(pa.array(innocent)), at[innocent]


def convicted(facts: FactBatch, limits: Limits) -> dict[int, BsfgError]:
    """Give the rows that break a rule, each with the first rule that it breaks."""
    guilty: dict[int, BsfgError] = {}
    doubtful = suspects(facts, limits)
    _judge(facts, doubtful, limits, guilty)
    if 0 in guilty and _is_everywhere(facts, guilty[0]):
        # Of a value that all rows share the quick look names the first row alone.
        _judge(facts, np.arange(len(facts)), limits, guilty)
    return guilty


def _judge(facts: FactBatch, rows: np.ndarray, limits: Limits, guilty: dict[int, BsfgError]) -> None:
    for number, row in zip(rows.tolist(), facts.take(rows).rows(), strict=True):
        try:
            judge(number, row, limits)
        except (InvalidFact, FactTooLarge) as error:
            guilty[number] = error


def _is_everywhere(facts: FactBatch, error: BsfgError) -> bool:
    name = str(error.details.get("field"))
    if name not in facts.schema.names or not pa.types.is_string(facts.schema.field(name).type):
        return False
    column = facts.column(name)
    return column.null_count == len(column) or constant_value(column) is not None


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
