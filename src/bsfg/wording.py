"""Words and numbers made fit for people: foreign text without control characters, figures in one form, pages."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

from bsfg.errors import InvalidArgument

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


def check_reason(reason: str, doing: str) -> None:
    """Raise unless an operator said why, in words that everybody can store and show."""
    if not reason.strip():
        raise InvalidArgument(f"{doing} needs a reason")
    if _CONTROLS.search(reason):
        raise InvalidArgument("a reason must not have control characters")


def counted(number: int, thing: str) -> str:
    """Write a number of things: 1 fact, 2 facts, 1,000 entries."""
    things = f"{thing[:-1]}ies" if thing.endswith(("ry", "ty")) else f"{thing}s"
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


FEW = 10
"""Below this a figure has digits behind the point."""


def fixed(value: float, digits: int = 0) -> str:
    """Write a number with so many digits behind the point; halves go up, as they do in browsers."""
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def count_text(number: int) -> str:
    """Write a whole number in groups of three."""
    return f"{number:,}"


def offset_text(offset: int) -> str:
    """Write an offset, without groups so that it can be pasted; before the first there is none."""
    return str(offset) if offset >= 0 else "–"


def duration_text(seconds: float) -> str:
    """Write a span of time in the unit that suits it."""
    if shown_seconds(seconds) < 1:
        return f"{fixed(1000 * seconds)} ms"
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{fixed(seconds / size)} {unit}" if seconds >= FEW else f"{shown_seconds(seconds):g} s"
    return f"{fixed(seconds / 86_400)} d"


def shown_seconds(seconds: float) -> float:
    """Give a short span as `duration_text` shows it, so that it is judged by what people see."""
    milliseconds = float(Decimal(1000 * seconds).quantize(Decimal(1), ROUND_HALF_UP)) / 1000
    if milliseconds < 1:
        return milliseconds
    return float(Decimal(seconds).quantize(Decimal("0.01"), ROUND_HALF_UP))


def hours_text(hours: float) -> str:
    """Write hours of autonomy: in minutes when there are few, in days when there are many."""
    if hours < 1:
        return f"{max(1, int(fixed(60 * hours)))} min"
    if hours < 96:
        return f"{fixed(hours, 1 if hours < FEW else 0)} h"
    days = hours / 24
    return f"{fixed(days)} days" if days < 3_650 else "over 10 years"


def percent_text(percent: float) -> str:
    """Write a share of something that is full at 100."""
    return "< 0.1 %" if 0 < percent < 0.05 else f"{fixed(percent, 1)} %"


def rate_text(per_second: float) -> str:
    """Write a rate of facts."""
    if 0 < per_second < 0.05:
        return "< 0.1/s"
    return f"{fixed(per_second, 1 if 0 < per_second < FEW else 0)}/s"


def size_text(size_bytes: float) -> str:
    """Write a size in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{fixed(size_bytes, 0 if unit == 'B' else 1)} {unit}"
        size_bytes /= 1024
    return f"{fixed(size_bytes, 1)} TiB"


def time_text(unix_ms: int | None) -> str:
    """Write a time in UTC to the second."""
    if not unix_ms:
        return "–"
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return f"{unix_ms} ms"


class CheckLevel(StrEnum):
    """How a finding counts: a problem keeps a node from its work, an error is wrong with its certificates."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that was looked at: what was found and, unless it is right, what to do next."""

    level: CheckLevel
    check: str
    says: str
    do: str = ""

    def to_dict(self) -> dict[str, str]:
        """Give the form for ``--json``."""
        result = {"level": str(self.level), "check": self.check, "says": self.says}
        return result | ({"do": self.do} if self.do else {})


@dataclass(frozen=True, slots=True)
class Says:
    """Makes the findings of one check."""

    check: str
    wrong: CheckLevel = CheckLevel.PROBLEM

    def ok(self, says: str) -> CheckFinding:
        """Say that something is right."""
        return CheckFinding(CheckLevel.OK, self.check, says)

    def warning(self, says: str, do: str) -> CheckFinding:
        """Say that something works but should be looked at."""
        return CheckFinding(CheckLevel.WARNING, self.check, says, do)

    def problem(self, says: str, do: str) -> CheckFinding:
        """Say that something does not work."""
        return CheckFinding(self.wrong, self.check, says, do)


def help_folder() -> Path:
    """Give the folder of the documentation: in a wheel it lies in the package, in a clone where it is written."""
    own = Path(__file__).parent
    return next((each for each in (own / "help", own.parents[1] / "docs") if each.is_dir()), own / "help")


def title_of(path: Path) -> str:
    """Give the heading of a page of the documentation."""
    found = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].replace("`", "") if found else path.stem


def without_marks(text: str) -> str:
    """Leave out comments, which are for those who write the pages."""
    return re.sub(r"^<!--.*?-->\n", "", text, flags=re.DOTALL | re.MULTILINE)
