"""What pages and hints tell people to type exists: commands with their options, keys of the configuration, metrics."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from bsfg.cli.app import app
from bsfg.cli.help import pages
from bsfg.config.declare import tables_of
from bsfg.config.settings import ZoneConfig
from bsfg.errors import BsfgError

ROOT = Path(__file__).parents[2]
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "reference"]
PAGES = [*WRITTEN, *sorted(ROOT.glob("*.md"))]
BSFG: Any = get_command(app)
METRICS = (ROOT / "docs" / "reference" / "observability.md").read_text(encoding="utf-8")
KEYS = {table.name: {item.name for item in table.settings()} for table in tables_of(ZoneConfig)}
for inner in [name for name in KEYS if "." in name]:
    KEYS[inner.partition(".")[0]].add(inner.partition(".")[2])
NAMED = {table.name for table in tables_of(ZoneConfig) if table.named is not None}
FOREIGN_OPTIONS = {"--insecure", "--py-files"}
"""Options of other programs that pages speak of."""

ORDINARY = {"and", "as", "has", "in", "is", "knows", "must", "needs", "of", "or", "says", "table", "that", "to", "with"}
"""What may follow the name of a table in a sentence."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(text: str, *languages: str) -> Iterator[str]:
    """Give the blocks of code in some languages."""
    for language, body in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        if language in languages:
            yield body


def inline(text: str) -> list[str]:
    """Give what stands between backticks in the text."""
    return re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def typed(text: str) -> Iterator[list[str]]:
    """Give the words of every command of ours that a page shows."""
    lines = [line for block in blocks(text, "", "sh") for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *inline(text)]:
        for found in re.findall(r"(?:^|[\s(;&])bsfg ([^|#>);&]*)", line.split("  #")[0]):
            yield found.split()


def resolved(words: list[str]) -> tuple[Any, list[str]]:
    """Find the command that a line means, and the words that are left for it."""
    command = BSFG
    while words and hasattr(command, "list_commands") and (found := command.get_command(None, words[0])) is not None:
        command, words = found, words[1:]
    return command, words


@cache
def options_of(command: Any) -> frozenset[str]:
    """Give the options of a command; of a group those of its commands, too."""
    found = {option for param in command.params for option in param.opts + param.secondary_opts} | {"--help"}
    if hasattr(command, "list_commands"):
        found.update(*(options_of(command.get_command(None, name)) for name in command.list_commands(None)))
    return frozenset(found)


def wrong_key(table: str, key: str) -> bool:
    """Tell whether there is no such key."""
    return table not in KEYS or bool(key and key not in KEYS[table])


@each_page
def test_commands_exist_with_their_options(page: Path) -> None:
    """Whatever a page types is a command and has the options that it is given."""
    text = page.read_text(encoding="utf-8")
    for words in typed(text):
        command, rest = resolved(words)
        used = {word.split("=")[0].strip("[],.…") for word in rest if word.startswith("--")}
        assert used <= options_of(command), f"{page.name}: bsfg {' '.join(words)}"
    known = options_of(BSFG) | FOREIGN_OPTIONS
    for each in inline(text):
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", each)) <= known, f"{page.name}: {each}"


@each_page
def test_keys_and_metrics_exist(page: Path) -> None:
    """A key that a page names with its table, a block of configuration and a metric are real."""
    text = page.read_text(encoding="utf-8")
    for each in inline(text):
        for table, key in re.findall(r"^\[(\w+)(?:\.[^\]]*)?\](?: (\w+))?", each):
            assert not wrong_key(table, key), f"{page.name}: {each}"
        for metric in re.findall(r"\bbsfg_[a-z_]+", each):
            assert metric.removesuffix("_bucket") in METRICS, f"{page.name}: {metric}"
    for block in blocks(text, "toml"):
        for table, content in tomllib.loads(block).items():
            if "[map]" in block:
                continue  # a mapping of `bsfg pipeline ingest`, which has tests of its own
            for row in content.values() if table in NAMED else [content]:
                assert not [key for key in row if wrong_key(table, key)], f"{page.name}: {block}"


SOURCE_FILE = re.compile(r"`((?:[\w-]+/)*\w+\.py)`")


@each_page
def test_source_files_exist(page: Path) -> None:
    """A file of the source that a page names is there, wherever it lies."""
    for name in SOURCE_FILE.findall(page.read_text(encoding="utf-8")):
        found = [place for place in ("src/bsfg", "tests", "tools", "examples") if [*(ROOT / place).rglob(name)]]
        assert found or (ROOT / name).exists(), name


def test_keys_in_messages_and_hints_exist() -> None:
    """A key that our own words name with its table is one."""
    named = {
        (source.name, table, key)
        for source in sorted((ROOT / "src").rglob("*.py"))
        for table, key in re.findall(r"\[(\w+)\] (\w+)", source.read_text(encoding="utf-8"))
        if table in KEYS and key not in ORDINARY
    }
    assert not {each for each in named if wrong_key(*each[1:])}


@pytest.fixture(scope="module")
def spoken() -> list[tuple[str, str]]:
    """Give every text of the source that is not a docstring, with where it stands; what is filled in is an X."""
    return [each for source in sorted((ROOT / "src").rglob("*.py")) for each in _spoken(source)]


def _spoken(source: Path) -> Iterator[tuple[str, str]]:
    nodes = [*ast.walk(ast.parse(source.read_text(encoding="utf-8")))]
    left_out = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out |= {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        where = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            yield where, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield where, node.value


def test_commands_in_messages_and_hints_exist(spoken: list[tuple[str, str]]) -> None:
    """What our own words tell people to type is a command with these options, and a topic of the help is a page."""
    seen = 0
    for where, text in spoken:
        for found in re.findall(r"`bsfg ([^`]+)`", text):
            command, rest = resolved(found.split())
            used = {word.split("=")[0].strip("[],.…") for word in rest if word.startswith("--")}
            assert used <= options_of(command), f"{where}: bsfg {found}"
            filled_in = rest and rest[0] in ("COMMAND", "X", "--version")
            assert command is not BSFG or filled_in, f"{where}: bsfg {found}"
            if command.name == "help" and rest:
                assert rest[0] in pages(), f"{where}: bsfg {found}"
            seen += 1
    assert seen > 40


HAVE_PAGES = ("help.py", "pages.py")
"""What shows the documentation knows where it is."""


def test_messages_and_hints_name_no_file_that_a_wheel_does_not_have(spoken: list[tuple[str, str]]) -> None:
    """The documentation is `bsfg help TOPIC`, or a page of the node; whoever has a wheel has no folder of docs."""
    wrong = [
        (where, text)
        for where, text in spoken
        if where.partition(":")[0] not in HAVE_PAGES and re.search(r"\bdocs/|\bexamples/|\btests/|README", text)
    ]
    assert not wrong


FOR_PROGRAMMERS = {"writing-a-backend.md", "producer.md", "consumer.md"}
"""Pages whose names are those of the programming interface, where units are part of a name."""


def test_keys_are_named_as_they_stand_in_the_file() -> None:
    """In zone.toml the unit is part of the value: what a page or hint calls by the name of the code is no key."""
    of_code = {item.attribute for table in tables_of(ZoneConfig) for item in table.settings()}
    of_code -= {item.name for table in tables_of(ZoneConfig) for item in table.settings()}
    assert "quarantine_bytes" in of_code
    for page in (each for each in PAGES if each.name not in FOR_PROGRAMMERS and each.parent.name != "adr"):
        named = set(inline(page.read_text(encoding="utf-8"))) & of_code
        assert not named, f"{page.name} names {named}, which are no keys of a zone.toml"
    for error in BsfgError.registry.values():
        named = set(re.findall(r"\w+", error.default_hint or "")) & of_code
        assert not named, f"the hint of {error.code} names {named}, which are no keys of a zone.toml"
