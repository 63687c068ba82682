"""What an operator decides on the page: each with a reason, checked and recorded like the same act by other ways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from bsfg.errors import InvalidArgument
from bsfg.node.board import RECEIVER, SENDER
from bsfg.ports import Buffer, Clock
from bsfg.wire.service import AdminService, Caller

REASON_CHARACTERS_MAX = 500
HOLD_SECONDS_MAX = 366 * 86_400

Act = Callable[[Caller, dict[str, Any]], Awaitable[dict[str, Any]]]


class Actions:
    """The acts of the page, by the name in their path."""

    def __init__(self, admin: AdminService, clock: Clock) -> None:
        self._admin, self._clock = admin, clock
        self.table: dict[str, Act] = {
            "hold": self.hold,
            "release": self.release,
            "retry": self.retry,
            "drop": self.drop,
        }

    async def hold(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Close a gate, for a while or until it is released."""
        seconds = given.get("for_seconds")
        until = None
        if seconds is not None:
            until = self._clock.now_unix_ms() + 1000 * _whole(given, "for_seconds", 1, HOLD_SECONDS_MAX)
        view = await self._admin.hold_gate(caller, _text(given, "link"), _side(given), _reason(given), until)
        return {"mode": str(view.gate.mode)}

    async def release(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Open a held gate."""
        view = await self._admin.release_gate(caller, _text(given, "link"), _side(given), _reason(given))
        return {"mode": str(view.gate.mode)}

    async def retry(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Put a quarantined fact again."""
        stream, buffer, id, reason = _place(given)
        settled, result = await self._admin.retry_quarantined(caller, stream, buffer, id, reason)
        return {"settled": settled, "result": result.name.lower()}

    async def drop(self, caller: Caller, given: dict[str, Any]) -> dict[str, Any]:
        """Give up a quarantined fact."""
        await self._admin.drop_quarantined(caller, *_place(given))
        return {"settled": True}


def parsed(body: bytes) -> dict[str, Any]:
    """Read the body of a request."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument("the body must be a JSON object")
    return found


def _place(given: dict[str, Any]) -> tuple[str, Buffer, int, str]:
    try:
        buffer = Buffer(_text(given, "buffer"))
    except ValueError:
        raise InvalidArgument("buffer must be store or forward") from None
    return _text(given, "stream"), buffer, _whole(given, "id", 0, 1 << 62), _reason(given)


def _side(given: dict[str, Any]) -> str:
    side = _text(given, "side")
    if side not in (RECEIVER, SENDER):
        raise InvalidArgument("side must be receiver or sender")
    return side


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(f"{name} must be a text")
    return value


def _reason(given: dict[str, Any]) -> str:
    """Take the reason: one line, whatever was typed, and not without end, because it is shown and kept for long."""
    value = given.get("reason")
    reason = " ".join(value.split()) if isinstance(value, str) else ""
    if not reason:
        raise InvalidArgument("a reason is needed", hint="Say why, for those who read the record later.")
    if len(reason) > REASON_CHARACTERS_MAX:
        raise InvalidArgument(f"the reason has more than {REASON_CHARACTERS_MAX} characters")
    return reason


def _whole(given: dict[str, Any], name: str, least: int, most: int) -> int:
    value = given.get(name)
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(f"{name} must be a whole number from {least} to {most}")
    return value
