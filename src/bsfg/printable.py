"""Words of others, made fit to be shown: what moves a cursor, ends a line or turns a text round is no word.

Reasons, names and messages come from other zones, and end on a terminal or in a log. There an escape sequence would be
obeyed, and a line end would begin a line that the node never wrote. `printable` is for texts of several lines,
`one_line` for whatever stands within a line, `markup` for pages, `printable_json` for documents: it writes the same
values in escaped form, so that programs read what was meant and terminals are told nothing.
"""

from __future__ import annotations

import html
import re
from typing import Any

_LINE_ENDS = "\t\n\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029"
_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SPACES = re.compile(f"[{_LINE_ENDS}]+")
_CONTROLS = re.compile(f"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f{_BIDI}\ud800-\udfff]")
_ENDS_BUT_NEWLINES = re.compile("\r\n|[\t\x0b\x0c\r\x1c-\x1f\x85\u2028\u2029]")

# The same characters as UTF-8; orjson itself escapes those below U+0020.
_RAW_IN_JSON = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]|\xe2\x81[\xa6-\xa9]",
)


def printable(text: str) -> str:
    """Give a text of one or more lines without anything that a terminal would obey."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _ENDS_BUT_NEWLINES.sub(_newline_or_space, text))


def one_line(text: str) -> str:
    """Give a text as a part of one line: whatever ends a line is a space."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub("", _SPACES.sub(" ", text))


def counted(number: int, thing: str) -> str:
    """Write a number of things: 1 fact, 2 facts, 1,000 entries."""
    things = f"{thing[:-1]}ies" if thing.endswith("ry") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else things}"


def markup(text: str) -> str:
    """Give a text as part of a page or a picture: of one line, with nothing that the page would obey."""
    return html.escape(one_line(text))


def printable_json(document: bytes) -> bytes:
    """Give a JSON document of the same meaning, in which control characters are written as escapes."""
    return _RAW_IN_JSON.sub(_escaped, document)


def printable_values(value: Any) -> Any:
    """Give a value of mappings, lists and texts with every text on one line."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {printable_values(name): printable_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(each) for each in value]
    return value


def _newline_or_space(found: re.Match[str]) -> str:
    return "\n" if found[0] == "\r\n" else " "


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())
