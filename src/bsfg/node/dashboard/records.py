"""Gap records and quarantined facts as documents: a bounded list to look at, and all of them to take away."""

from __future__ import annotations

from typing import Any

import orjson

from bsfg.fact import Message, is_json
from bsfg.jsonform import message_to_dict
from bsfg.node.authorize import Action, Request
from bsfg.node.parts import Parts
from bsfg.ports import GapRecord
from bsfg.wire.service import AdminService, Caller, QuarantinedView

SHOWN_MAX = 200
OBJECT_CHARACTERS_MAX = 2_000


async def gaps(admin: AdminService, parts: Parts, caller: Caller) -> list[dict[str, Any]]:
    """List the gap records of all buffers that the caller may see, the newest first."""
    found = []
    for stream, buffer in await parts.storage.streams():
        if stream in parts.settings.lanes and parts.guard.allows(caller, Request(Action.VIEW, stream)):
            found += [_gap(stream, str(buffer), gap) for gap in await admin.gaps(caller, stream, buffer)]
    return sorted(found, key=lambda gap: int(gap["at_unix_ms"]), reverse=True)


async def quarantine(admin: AdminService, caller: Caller) -> list[QuarantinedView]:
    """List what is in quarantine and may be seen by the caller, the newest first."""
    return sorted(await admin.quarantine(caller, None), key=lambda view: view.quarantined.at_unix_ms, reverse=True)


def shown(rows: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """Give the document of a list: what is shown of it, and how long it is."""
    return {"total": total, "rows": rows[:SHOWN_MAX]}


def lines(rows: list[dict[str, Any]]) -> bytes:
    """Write rows as JSON Lines."""
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def quarantined_rows(views: list[QuarantinedView]) -> list[dict[str, Any]]:
    """Describe quarantined facts for the page, long objects cut."""
    return [{**_head(view), "facts": [_brief(each) for each in _messages(view)]} for view in views[:SHOWN_MAX]]


def quarantined_whole(views: list[QuarantinedView]) -> list[dict[str, Any]]:
    """Describe quarantined facts with all their content, a row per fact."""
    return [{"quarantined": _head(view), **message_to_dict(each)} for view in views for each in _messages(view)]


def _messages(view: QuarantinedView) -> list[Message]:
    return view.quarantined.facts.to_messages()


def _head(view: QuarantinedView) -> dict[str, Any]:
    found = view.quarantined
    return {
        "stream": view.stream,
        "buffer": str(view.buffer),
        "id": found.id,
        "at_unix_ms": found.at_unix_ms,
        "reason": found.reason,
        "from_zone": found.key.from_zone,
        "message_id": found.key.message_id,
        "existing_offset": found.existing_offset if found.existing_offset >= 0 else None,
        "detail": found.detail,
    }


def _brief(message: Message) -> dict[str, Any]:
    fact, media_type = message.fact, message.envelope.object_media_type
    readable = is_json(media_type) or media_type.startswith("text/")
    text = fact.object.decode("utf-8", "replace") if readable else f"{len(fact.object):,} bytes of {media_type}"
    return {
        "subject": fact.subject,
        "predicate": fact.predicate,
        "produced_at_unix_ms": message.envelope.produced_at_unix_ms,
        "to_zone": message.envelope.to_zone,
        "object": text[:OBJECT_CHARACTERS_MAX],
        "cut": len(text) > OBJECT_CHARACTERS_MAX,
    }


def _gap(stream: str, buffer: str, gap: GapRecord) -> dict[str, Any]:
    return {
        "stream": stream,
        "buffer": buffer,
        "first": gap.first,
        "last": gap.last,
        "reason": str(gap.reason),
        "at_unix_ms": gap.at_unix_ms,
        "detail": gap.detail,
        "origin_zone": gap.origin_zone,
    }
