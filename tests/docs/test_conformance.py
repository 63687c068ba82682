"""The page of the specification's clauses names only what there is, and says of each clause how it stands."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conformance.md"
STATES = ("holds", "differs", "open")
REASONED = ("differs", "open")


def rows() -> Iterator[list[str]]:
    """Give the cells of every clause."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and re.match(r"[ASRPM] \d", cells[0]):
            yield cells


def test_every_document_is_there() -> None:
    """All five documents have their clauses; a table that cannot be read would hide them."""
    found = [cells[0][0] for cells in rows()]
    assert {name: found.count(name) for name in "ASRPM"} == {"A": 78, "S": 14, "R": 26, "P": 37, "M": 22}


@pytest.mark.parametrize("cells", list(rows()), ids=lambda cells: cells[0] if isinstance(cells, list) else None)
def test_a_clause_names_what_there_is(cells: list[str]) -> None:
    """A clause has a state, a reason where it is not as asked, and code and tests that exist under these names."""
    clause, asks, stands, code, held = cells
    state, _, reason = stands.partition(":")
    assert asks and state in STATES, clause
    assert reason.strip() or state not in REASONED, f"{clause} needs a reason"
    names = re.findall(r"`([^`]+)`", code) + re.findall(r"`([^`]+)`", held)
    assert re.findall(r"`([^`]+)`", held) or state == "open", f"{clause} is held by nothing"
    for name in names:
        path, _, test = name.partition("::")
        assert (ROOT / path).is_file(), f"{clause} names {path}"
        assert not test or re.search(rf"def {test}\b", (ROOT / path).read_text()), f"{clause} names {name}"


PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_tests_that_exist(page: Path) -> None:
    """Wherever a page says which test or source file holds a promise, that file is there."""
    for name in re.findall(r"`((?:tests|src)/[\w./-]+)(?:::\w+)?`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
