"""The list of planted bugs is true: each still has its place in the source, its tests exist, and a few are caught."""

from __future__ import annotations

import ast
import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planted.bugs import ROOT, Bug, PlantedError, escape, load, place, sources

SAMPLE = 3


def test_every_bug_has_its_place_and_its_tests() -> None:
    """The text of each stands in the source exactly once; whoever changes such a line looks after the bug, too."""
    bugs, texts = load(), sources()
    assert len(bugs) >= 45
    names: dict[str, set[str]] = {}
    for bug in bugs:
        place(bug, texts)
        assert bug.tests, bug.name
        assert bug.mistake.endswith("."), bug.name
        for test in bug.tests:
            path, name, *_ = test.split("::")
            known = names.setdefault(path, _names(ROOT / path))
            assert name.partition("[")[0] in known, f"{bug.name}: there is no test {test}"


def _names(path: Path) -> set[str]:
    """Name the tests of a file; what a class of them inherits is found when it runs."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def test_a_text_that_is_gone_or_not_alone_is_told() -> None:
    """A bug that cannot be planted, or changes nothing, is an error and not a bug that was caught."""
    texts = {Path("a.py"): "x = 1\ny = 1\n", Path("b.py"): "x = 1\n"}
    for old, new, says in (("x = 1", "", "2 times"), ("z", "", "nowhere"), ("y = 1", "y = 1", "changes nothing")):
        with pytest.raises(PlantedError, match=says):
            place(Bug("area", "name", "It is wrong.", old, new, ()), texts)


def test_a_few_are_caught_and_a_harmless_one_is_not() -> None:
    """Some bugs are planted for real, others with every change of the source: `make planted` tries them all."""
    bugs = load()
    source = hashlib.sha256("".join(sources().values()).encode()).digest()
    chosen = random.Random(source).sample(bugs, SAMPLE)
    words = "The gate of one side of one link"
    harmless = replace(chosen[0], name="harmless", old=words, new=words.lower())
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(escape, [*chosen, harmless]))
    assert found[:SAMPLE] == [""] * SAMPLE
    assert found[SAMPLE].endswith("passes")
