"""Every key of a TOML text is found on its line, however the text is laid out."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.config.declare import dotted
from bsfg.config.positions import Path, lines_of

ODD = '''\
# [zone] in a comment is no table
title = "a # b = [c]"

zone.name = "x" # dotted at the top
"zone" . 'data folder' = 1

[ servers . "alpha.beta" ]   # spaces and a dot inside quotes
ip = """
[not.a.table]
key = "not a key" \\""" still text
"""
ports = [ 8000,
  8001, # one, [two]
  { low = 1, high.of.all = [ 2 ] } ]

[[row]]
name = 'C:\\[x]'
[[row.cell]]
v = 1
[[row.cell]]
v = 2
[[row]]
[row.style]
when = 1979-05-27 07:32:00
"quo\\"ted" = """"two quotes: """""
empty = {}
'\\' = ''
'''

ODD_LINES = [
    ("title", 2),
    ("zone.name", 4),
    ('zone."data folder"', 5),
    ('servers."alpha.beta"', 7),
    ('servers."alpha.beta".ip', 8),
    ('servers."alpha.beta".ports', 12),
    ('servers."alpha.beta".ports[0]', 12),
    ('servers."alpha.beta".ports[1]', 13),
    ('servers."alpha.beta".ports[2].high.of.all[0]', 14),
    ("row[0].name", 17),
    ("row[0].cell[0].v", 19),
    ("row[0].cell[1].v", 21),
    ("row[1]", 22),
    ("row[1].style", 23),
    ("row[1].style.when", 24),
    ('row[1].style."quo"ted"', 25),
    ("row[1].style.empty", 26),
]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_odd_layouts(newline: str) -> None:
    """Dotted and quoted keys, inline tables, lists of tables and texts that look like tables are all found."""
    text = ODD.replace("\n", newline)
    tomllib.loads(text)
    found = {dotted(path): line for path, line in lines_of(text).items()}
    assert [(name, found.get(name)) for name, _ in ODD_LINES] == ODD_LINES
    assert not any("not" in name for name in found)


def test_last_line_without_newline() -> None:
    """A text may end in the middle of its last line."""
    assert lines_of("[a]\nb = 1")[("a", "b")] == 2
    assert lines_of("") == {(): 1}


names = st.text(st.sampled_from("ab-_1.\"'\\#=[]{} \té"), max_size=4)
scalars = st.one_of(st.integers(0, 99), st.booleans(), names, st.sampled_from([1.5, "a\nb", '"""', "[x]\ny = 1"]))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=8,
)
documents = st.dictionaries(names, st.one_of(values, st.dictionaries(names, values, max_size=3)), max_size=4)


class Writer:
    """Writes a document in a layout that is drawn, and remembers the line of everything it wrote."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.text = ""
        self.lines: dict[Path, int] = {}

    def pick(self, *choices: str) -> str:
        """Draw one of some texts."""
        return self.data.draw(st.sampled_from(choices))

    def note(self, path: Path) -> None:
        """Remember where something begins, the first time."""
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def key(self, name: str) -> str:
        """Write a key bare where that is possible, else in one of the two kinds of quotes."""
        forms = [self.basic(name)]
        if name and name.replace("-", "").replace("_", "").isalnum() and name.isascii():
            forms.append(name)
        if "'" not in name and "\t" not in name:
            forms.append(f"'{name}'")
        return self.pick(*forms)

    @staticmethod
    def basic(text: str) -> str:
        """Write a text in double quotes."""
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'

    def string(self, text: str) -> str:
        """Write a text in one of the four ways."""
        forms = [self.basic(text), '"""' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""']
        if "'" not in text:
            forms.append(f"'''{text}'''")
            if "\n" not in text and "\t" not in text:
                forms.append(f"'{text}'")
        return self.pick(*forms)

    def value(self, value: Any, path: Path) -> None:
        """Write a value in one piece."""
        if isinstance(value, dict):
            self.text += "{" + self.pick("", " ")
            for number, (name, inner) in enumerate(value.items()):
                self.text += ", " if number else ""
                self.assignment(name, inner, path)
            self.text += " }"
        elif isinstance(value, list):
            self.text += "["
            for number, inner in enumerate(value):
                self.text += self.pick("", " ", "\n", " # ], note\n")
                self.note((*path, number))
                self.value(inner, (*path, number))
                self.text += self.pick(",", " ,", "\n,")
            self.text += self.pick("", "\n") + "]"
        elif isinstance(value, str):
            self.text += self.string(value)
        else:
            self.text += str(value).lower()

    def assignment(self, name: str, value: Any, path: Path) -> None:
        """Write a key and its value."""
        self.note((*path, name))
        self.text += self.key(name) + self.pick("=", " = ")
        self.value(value, (*path, name))

    def document(self, document: dict[str, Any]) -> None:
        """Write a whole document: plain keys first, then tables under headers or in one piece."""
        later = []
        for name, value in document.items():
            if isinstance(value, dict) and self.pick("header", "inline") == "header":
                later.append((name, value))
            else:
                self.assignment(name, value, ())
                self.text += self.pick("\n", "  # note\n", "\n\n")
        for name, value in later:
            self.text += self.pick("", "\n", "# [x]\n")
            self.note((name,))
            self.text += f"[{self.pick('', ' ')}{self.key(name)}]\n"
            for inner, content in value.items():
                self.assignment(inner, content, (name,))
                self.text += self.pick("\n", " # note\n")


@given(documents, st.data())
def test_lines_of_any_layout(document: dict[str, Any], data: st.DataObject) -> None:
    """Whatever the layout, exactly the keys that the standard reader sees are found, each where it was written."""
    writer = Writer(data)
    writer.document(document)
    assert tomllib.loads(writer.text) == document
    assert lines_of(writer.text) == {(): 1, **writer.lines}
