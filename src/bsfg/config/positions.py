"""Finds the line of every key in a TOML text, which the standard reader does not tell.

The text must already have been accepted by `tomllib`: the scan then only has to know where things begin and end.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}#\n\r]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"""(?:"{0,2}(?!"))', re.DOTALL),
    re.compile(r"'''.*?'''(?:'{0,2}(?!'))", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)


def lines_of(text: str) -> dict[Path, int]:
    """Give the line, from 1, on which each table, key and list item first appears."""
    scan = _Scan(text)
    scan.document()
    return scan.lines


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {(): 1}
        self._counts: dict[Path, int] = {}
        self._counted_to = 0
        self._line = 1

    def document(self) -> None:
        """Read headers and assignments until the text ends."""
        table: Path = ()
        self._skip()
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._assignment(table)
            self._skip()

    def _header(self) -> Path:
        is_list = self.text.startswith("[[", self.at)
        line = self._line_here()
        self.at += 2 if is_list else 1
        keys = self._dotted()
        self.at = self.text.index("]", self.at) + (2 if is_list else 1)
        path: Path = ()
        for number, key in enumerate(keys):
            path = (*path, key)
            self._note(path, line)
            last = number == len(keys) - 1
            if last and is_list:
                self._counts[path] = self._counts.get(path, 0) + 1
            if path in self._counts:
                path = (*path, self._counts[path] - 1)
                self._note(path, line)
        return path

    def _assignment(self, table: Path) -> None:
        line = self._line_here()
        path = table
        for key in self._dotted():
            path = (*path, key)
            self._note(path, line)
        self.at = self.text.index("=", self.at) + 1
        self._skip()
        self._value(path)

    def _value(self, path: Path) -> None:
        opening = self.text[self.at]
        if opening == "[":
            self._items(path)
        elif opening == "{":
            self.at += 1
            self._skip()
            while not self.text.startswith("}", self.at):
                self._assignment(path)
                self._skip_comma()
            self.at += 1
        elif opening in "\"'":
            self._string()
        else:
            match = _SCALAR.match(self.text, self.at)
            self.at = match.end() if match else self.at + 1

    def _items(self, path: Path) -> None:
        self.at += 1
        number = 0
        self._skip()
        while not self.text.startswith("]", self.at):
            item = (*path, number)
            self._note(item, self._line_here())
            self._value(item)
            number += 1
            self._skip_comma()
        self.at += 1

    def _dotted(self) -> list[str]:
        keys = [self._key()]
        while True:
            self._skip()
            if not self.text.startswith(".", self.at):
                return keys
            self.at += 1
            keys.append(self._key())

    def _key(self) -> str:
        self._skip()
        if self.text[self.at] in "\"'":
            # The standard reader resolves the escapes of a quoted key better than a second implementation would.
            literal = self._string()
            return str(tomllib.loads(f"key = {literal}")["key"])
        match = _BARE.match(self.text, self.at)
        if match is None:
            raise ValueError(f"no key at position {self.at}")
        self.at = match.end()
        return match[0]

    def _string(self) -> str:
        for pattern in _STRINGS:
            match = pattern.match(self.text, self.at)
            if match:
                self.at = match.end()
                return match[0]
        raise ValueError(f"no end of the text that begins at position {self.at}")

    def _skip(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _skip_comma(self) -> None:
        self._skip()
        if self.text.startswith(",", self.at):
            self.at += 1
            self._skip()

    def _note(self, path: Path, line: int) -> None:
        self.lines.setdefault(path, line)

    def _line_here(self) -> int:
        self._line += self.text.count("\n", self._counted_to, self.at)
        self._counted_to = self.at
        return self._line
