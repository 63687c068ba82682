"""The house in figures: how large it is, how its rooms are cut, and what is in it twice or for nobody.

`make house` prints them; a test holds them against the bounds in house.toml, which may only become stricter.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
BOUNDS = Path(__file__).with_name("house.toml")
SMALL_LINES = 110
"""A module below this with one reader beside it is a paragraph of that reader."""

WORD = re.compile(r"[A-Za-z_]\w*")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Module:
    """One hand-written file: its name for imports, where it lies, its text and its syntax tree."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax, read when somebody asks: of the tests only the text is."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """How many lines it has."""
        return self.text.count("\n")

    @property
    def is_package(self) -> bool:
        """Whether it stands for its folder."""
        return self.path.name == "__init__.py"

    def definitions(self) -> Iterator[Definition]:
        """What it defines at its top."""
        return (node for node in self.tree.body if isinstance(node, Definition))

    def imports(self) -> Iterator[str]:
        """Every name it imports that could be a module, wherever the import stands."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{each.name}" for each in node.names)


def modules(top: Path) -> list[Module]:
    """Read every hand-written Python file under a folder."""
    found = []
    for path in sorted(top.rglob("*.py")):
        if "_pb2" not in path.name:
            parts = path.relative_to(top).with_suffix("").parts
            text = path.read_text(encoding="utf-8")
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, text))
    return found


class House:
    """The product's modules and its tests, and what can be counted in them."""

    def __init__(self, root: Path = ROOT) -> None:
        self.product = modules(root / "src")
        self.tests = modules(root / "tests")

    @cached_property
    def lines(self) -> int:
        """How many lines the product has."""
        return sum(module.lines for module in self.product)

    @cached_property
    def lonely(self) -> list[str]:
        """Small modules with one reader, which lies beside them."""
        known = {module.name: module for module in self.product}
        readers: dict[str, set[Path]] = defaultdict(set)
        for module in self.product:
            for name in set(module.imports()) & known.keys() - {module.name}:
                readers[name].add(module.path)
        return sorted(
            name
            for name, who in readers.items()
            if len(who) == 1
            and known[name].lines < SMALL_LINES
            and not known[name].is_package
            and next(iter(who)).parent == known[name].path.parent
        )

    @cached_property
    def class_names_used_twice(self) -> list[str]:
        """Public names of classes that mean something else in another module."""
        count = Counter(
            node.name for module in self.product for node in module.definitions() if isinstance(node, ast.ClassDef)
        )
        return sorted(name for name, times in count.items() if times > 1 and not name.startswith("_"))

    @cached_property
    def only_tests_name(self) -> list[str]:
        """Functions and classes that the product never mentions again but tests do: a test of what does not run."""
        words = Counter(word for module in self.product for word in WORD.findall(module.text))
        tested = {word for module in self.tests for word in WORD.findall(module.text)}
        return sorted(
            f"{module.name}.{node.name}"
            for module in self.product
            if not module.name.startswith("bsfg.testing")
            for node in module.definitions()
            if not node.decorator_list and words[node.name] == 1 and node.name in tested
        )

    def figures(self) -> dict[str, float]:
        """Every figure by its name, as the file of bounds has them."""
        sizes = [module.lines for module in self.product if not module.is_package]
        return {
            "source_files": len(self.product),
            "source_lines": self.lines,
            "module_lines_median": median(sizes),
            "module_lines_max": max(sizes),
            "lonely_modules": len(self.lonely),
            "class_names_used_twice": len(self.class_names_used_twice),
            "only_tests_name": len(self.only_tests_name),
            "tests_to_code": round(sum(module.lines for module in self.tests) / self.lines, 2),
        }


def bounds() -> dict[str, dict[str, float]]:
    """Read the bounds: ``at_most`` and ``at_least``, by figure."""
    return tomllib.loads(BOUNDS.read_text(encoding="utf-8"))


def beyond(figures: dict[str, float]) -> list[str]:
    """Name the figures that are worse than their bounds."""
    limits = bounds()
    over = [f"{name}: {figures[name]:g} > {most:g}" for name, most in limits["at_most"].items() if figures[name] > most]
    under = [
        f"{name}: {figures[name]:g} < {least:g}" for name, least in limits["at_least"].items() if figures[name] < least
    ]
    return over + under


def main(verbose: bool) -> None:
    """Print the figures, and with ``verbose`` what they count."""
    house = House()
    figures, limits = house.figures(), bounds()
    for name, value in figures.items():
        bound = next((f"{word.replace('_', ' ')} {at[name]:g}" for word, at in limits.items() if name in at), "")
        print(f"{name:24} {value:>8g}  {bound}")
    for title in ("lonely", "class_names_used_twice", "only_tests_name"):
        if verbose:
            print(f"\n{title}: {', '.join(getattr(house, title)) or 'none'}")


if __name__ == "__main__":
    main("-v" in sys.argv[1:])
