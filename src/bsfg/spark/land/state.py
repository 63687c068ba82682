"""What a landing folder knows of itself: whose facts it holds, how far they reach, and what was promised last.

The state is one small file, replaced as a whole. Replacing it is the commit: it moves the position and names what is
still to be done for it. Whoever opens the folder next finishes that, as often as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson

from bsfg.errors import FormatUnsupported, LandingDamaged

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose facts a folder holds, and by which of their times they are partitioned."""

    stream: str
    buffer: str
    log_id: str
    by: str


@dataclass(frozen=True, slots=True)
class Add:
    """A staged file and the name that it gets in its partition."""

    staged: str
    name: str


@dataclass(frozen=True, slots=True)
class Change:
    """What changes in one partition: files that come, and files that they replace."""

    partition: str
    adds: Sequence[Add]
    removes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """What the last commit promised: changes of partitions, and lines for the list of gaps from a size on."""

    changes: Sequence[Change] = ()
    gaps: Sequence[dict[str, Any]] = ()
    gaps_at_bytes: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A landing folder at one commit. ``next`` is the first offset that is not landed."""

    origin: Origin
    start: int
    next: int
    sequence: int = 0
    facts: int = 0
    missing: int = 0
    tail_offset: int | None = None
    tail_digest: str = ""
    gaps_token: str = ""
    pending: Pending | None = field(default=None)

    def to_json(self) -> bytes:
        """Write the state."""
        form = {"format": FORMAT, **asdict(self)}
        return orjson.dumps(form, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @staticmethod
    def from_json(data: bytes) -> State:
        """Read a state, or raise the error that says what is wrong with it."""
        try:
            form = orjson.loads(data)
            found = form.pop("format")
        except (ValueError, TypeError, AttributeError, KeyError):
            raise _damaged() from None
        if found != FORMAT:
            raise FormatUnsupported(f"the landing folder has format {found!r}, this version knows {FORMAT}")
        try:
            pending = form.pop("pending")
            state = State(origin=Origin(**form.pop("origin")), **form)
            return replace(state, pending=None if pending is None else _pending(pending))
        except (TypeError, KeyError, AttributeError):
            raise _damaged() from None


def _pending(form: dict[str, Any]) -> Pending:
    changes = [
        Change(each["partition"], [Add(**add) for add in each["adds"]], list(each["removes"]))
        for each in form["changes"]
    ]
    return Pending(changes, form["gaps"], form["gaps_at_bytes"])


def _damaged() -> LandingDamaged:
    return LandingDamaged("the state of the landing folder, _bsfg/state.json, cannot be read")
