"""Rows that a node refuses are found out one by one, whatever it tells; the others are appended once and in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.spark.ingesting import asked

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, ConflictingDuplicate, FactTooLarge, ImplausibleTime, InvalidArgument, InvalidFact
from bsfg.ports import Receipt, Result
from bsfg.spark.calls import NodeAccess
from bsfg.spark.ingest import task
from bsfg.spark.ingest.mapped import Mapped, to_mapped
from bsfg.spark.ingest.reading import read_chunk
from bsfg.spark.ingest.survey import survey
from bsfg.spark.ingest.work import Counts
from bsfg.wire.streams import Appended

PLAN = asked(object="v", id="{@row}").plan()


class TakesFacts(Protocol):
    """What facts are appended to here."""

    def append(self, batch: FactBatch) -> Appended: ...


@dataclass
class FakeNode:
    """A node in memory that refuses some facts and knows others under other bodies."""

    refused: set[int]
    conflicts: set[int]
    tells_row: bool
    stored: list[int] = field(default_factory=list)
    sent: int = 0

    def append(self, batch: FactBatch) -> Appended:
        """Take a batch whole, or refuse it for one of its rows."""
        numbers = [int(id) for id in batch.values("message_id")]
        self.sent += len(numbers)
        for row, number in enumerate(numbers):
            if number in self.refused:
                details: dict[str, Any] = {"row": row, "field": "object"} if self.tells_row else {}
                raise FactTooLarge("too large", **details)
        results = [self._taken(number) for number in numbers]
        receipt = Receipt(np.array(numbers), np.array(results), b"", 0)
        return Appended(receipt, np.zeros((len(numbers), 32), dtype=np.uint8))

    def _taken(self, number: int) -> Result:
        if number in self.conflicts:
            return Result.CONFLICT
        if number in self.stored:
            return Result.ALREADY_EXISTS
        self.stored.append(number)
        return Result.INSERTED


def rows_of(folder: Path, count: int) -> Mapped:
    """Make facts of a file with so many rows."""
    path = folder / "a.csv"
    path.write_text("v\n" + "".join(f"{n}\n" for n in range(1, count + 1)))
    file = survey(str(path), "csv", PLAN)
    [rows] = read_chunk(file, file.chunks[0], PLAN)
    return to_mapped(rows, PLAN)


def appended(node: TakesFacts, mapped: Mapped, *, fail: bool = False) -> tuple[list[int], Counts]:
    """Append facts to a node in memory, and give the rows that were refused."""
    appending = task._Appending(NodeAccess("127.0.0.1:1"), PLAN, 0.0, fail)

    async def call(batch: FactBatch) -> Appended:
        return node.append(batch)

    appending._call = call  # type: ignore[method-assign]
    counts = Counts()
    rejects = appending.append(mapped, counts)
    return [reject.row or 0 for reject in rejects], counts


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 60), st.booleans())
def test_exactly_the_refused_rows_are_left_out(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, count: int, tells_row: bool
) -> None:
    """All rows but the refused ones are stored once and in order, whether or not the node says which row it means."""
    rows = st.sets(st.integers(1, count))
    refused = data.draw(rows)
    conflicts = data.draw(rows) - refused
    known = sorted(data.draw(rows) - refused - conflicts)
    node = FakeNode(refused, conflicts, tells_row, list(known))
    found, counts = appended(node, rows_of(tmp_path_factory.mktemp("rows"), count))
    assert sorted(found) == sorted(refused | conflicts)
    fresh = [number for number in range(1, count + 1) if number not in refused | conflicts | set(known)]
    assert node.stored == known + fresh
    assert (counts.inserted, counts.already_exists, counts.conflicts) == (len(fresh), len(known), len(conflicts))


def test_many_refusals_cost_little(tmp_path: Path) -> None:
    """Where row after row is refused, not everything behind them is sent again each time."""
    node = FakeNode(set(range(1, 500)), set(), tells_row=True)
    appended(node, rows_of(tmp_path, 20_000))
    assert node.sent < 20_000 * 2 + 500 * (task.NEXT_FACTS + 1)


def test_a_rule_for_all_rows_is_not_told_row_by_row(tmp_path: Path) -> None:
    """When a node refuses without end, its rule is told once and the run ends."""

    class Late:
        def append(self, batch: FactBatch) -> Appended:
            raise ImplausibleTime("row 0: too old", row=0, field="produced_at_unix_ms")

    with pytest.raises(ImplausibleTime, match="the node refuses row after row, the last one so: row 0: too old"):
        appended(Late(), rows_of(tmp_path, 5_000))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (
            InvalidFact("x", row=3, field="message_id", rule="differs from the id that this zone derives"),
            InvalidArgument,
        ),
        (BsfgError("a defect"), BsfgError),
    ],
)
def test_what_is_wrong_with_all_rows_is_raised_at_once(
    tmp_path: Path, error: BsfgError, raised: type[BsfgError]
) -> None:
    """An error that is not about one row stops the run."""

    class Refusing:
        def append(self, batch: FactBatch) -> Appended:
            raise error

    with pytest.raises(raised):
        appended(Refusing(), rows_of(tmp_path, 10))


def test_a_conflict_can_be_an_error(tmp_path: Path) -> None:
    """A user who wants to stop at a taken id is told which."""
    with pytest.raises(ConflictingDuplicate, match="message_id '7' is taken by another body, the fact at offset 7"):
        appended(FakeNode(set(), {7, 9}, tells_row=True), rows_of(tmp_path, 10), fail=True)
