"""The source keeps the house style; these tests read it."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import bsfg

# One process reads the source, once.
pytestmark = pytest.mark.xdist_group("source")

ROOT = Path(__file__).parents[2]
TEXT_SUFFIXES = {"", ".cfg", ".css", ".csv", ".html", ".ini", ".js", ".json", ".md", ".proto", ".py", ".sh"}
TEXT_SUFFIXES |= {".sql", ".toml", ".txt", ".yaml", ".yml"}
WALKED = ("src", "tests", "docs", "examples", "benchmarks", "tools", ".ci")

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

# The character classes keep these patterns from finding themselves.
MACHINE_PATH = re.compile(r"(?<![\w.~$}/-])/(?:home|root|work|Users|tmp)/[\w.]")
REGISTRY = re.compile(r"https?://[^\s\"'<>]*pypi|(?:extra[-])?index[-]url|find[-]links|/simple[/]", re.IGNORECASE)
LEFTOVER = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b")


@cache
def tracked() -> tuple[Path, ...]:
    """List the files under version control, or all files where git is not at hand."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for top in WALKED for path in (ROOT / top).rglob("*")]
        paths += ROOT.iterdir()
    return tuple(sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts))


def generated(path: Path) -> bool:
    """Say whether a file was written by the protobuf compiler."""
    return "_pb2" in path.stem


@dataclass(frozen=True)
class Function:
    """One function of a module, methods and inner ones included."""

    place: str
    name: str
    body_lines: int
    described: bool


@dataclass(frozen=True)
class Module:
    """One hand-written Python file, and what is asked about it; its syntax tree would be a hundred times as large."""

    name: str
    lines: int
    described: bool
    functions: tuple[Function, ...]


@cache
def module(path: Path) -> Module:
    """Read a file."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = tuple(
        Function(
            f"{name}:{node.lineno} {node.name}", node.name, body_lines(node), ast.get_docstring(node) not in (None, "")
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    described = not text.strip() or ast.get_docstring(tree) is not None
    return Module(name, len(text.splitlines()), described, found)


def python_files(*tops: str) -> Iterator[Module]:
    """Read each hand-written Python file under some folders."""
    for path in tracked():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in tops and not generated(path):
            yield module(path)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function beside its signature, where commands declare their options, and its docstring."""
    described = ast.get_docstring(function) is not None
    statements = function.body[1:] if described else function.body
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


@cache
def texts() -> tuple[tuple[str, list[str]], ...]:
    """Read the lines of all text files."""
    return tuple(
        (path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace").splitlines())
        for path in tracked()
        if path.suffix in TEXT_SUFFIXES
    )


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    """Find the lines of all text files that match a pattern, as `file:line`."""
    return [
        f"{name}:{number}" for name, lines in texts() for number, line in enumerate(lines, 1) if pattern.search(line)
    ]


def test_modules_are_small() -> None:
    """A module of the package has fewer than 600 lines."""
    sizes = {module.name: module.lines for module in python_files("src")}
    assert sizes
    assert {name: size for name, size in sizes.items() if size >= MODULE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    """A function of the package has at most 60 lines beside its signature and its docstring."""
    functions = [function for module in python_files("src") for function in module.functions]
    assert functions
    assert [each.place for each in functions if each.body_lines > FUNCTION_LINES_MAX] == []


def test_public_modules_have_docstrings() -> None:
    """Every public module of the package, and every test module, says what it is for."""
    public = [module for module in python_files("src", "tests") if not re.search(r"/_[a-z]", module.name)]
    assert public
    assert [module.name for module in public if not module.described] == []


def test_tests_have_docstrings() -> None:
    """Every test function states the behaviour it checks."""
    functions = [function for module in python_files("src", "tests") for function in module.functions]
    tests = [function for function in functions if function.name.startswith("test_")]
    assert tests
    assert [each.place for each in tests if not each.described] == []


def test_no_machine_paths() -> None:
    """No file names a folder of somebody's machine."""
    assert lines_matching(MACHINE_PATH) == []


def test_no_registry_addresses() -> None:
    """No file says where packages are to be fetched from."""
    assert lines_matching(REGISTRY) == []


def test_no_leftovers() -> None:
    """No file holds a note about unfinished work."""
    assert lines_matching(LEFTOVER) == []


def test_version_is_stated_once() -> None:
    """The package, what it is built from, and the newest part of the changelog agree about the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changes is not None
    assert bsfg.__version__ == project["version"] == changes[1]


def test_no_start_waits_for_pandas() -> None:
    """Commands, the node and the SDK are loaded without pandas, which Spark alone needs."""
    loaded = "import sys, bsfg.cli.app, bsfg.node.node, bsfg.sdk; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
