"""Numbers and times as people read them, the same on the command line, in findings and on the dashboard.

`format.js` of the dashboard has a twin of each, and a test holds them against each other. What counts has its digits in
groups of three; an offset names a place and has none, so that it can be pasted.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal

FEW = 10
"""Below this a figure has digits behind the point."""


def fixed(value: float, digits: int = 0) -> str:
    """Write a number with so many digits behind the point; halves go up, as they do in browsers."""
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):,}"


def count_text(number: int) -> str:
    """Write a whole number in groups of three."""
    return f"{number:,}"


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
