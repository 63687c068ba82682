"""Gap records and quarantined facts as documents: a bounded list to look at, and all of them to take away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Any

import orjson

from bsfg.config.kinds import Action
from bsfg.fact import Entry, Message, is_json
from bsfg.jsonform import message_to_dict
from bsfg.node.administration import Administration
from bsfg.node.authorize import Request
from bsfg.node.parts import NodeContext
from bsfg.node.trail import AuditTrail
from bsfg.offload import by_size
from bsfg.ports import GapRecord, GapSet
from bsfg.trail import ACTIONS, TrailQuery, TrailRecord
from bsfg.wire.service import Caller, QuarantinedView

SHOWN_MAX = 200
OBJECT_CHARACTERS_MAX = 2_000
_RANGE_BYTES = 200


async def gaps(
    admin: Administration, parts: NodeContext, caller: Caller, at_most: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """List the gap records of all buffers that the caller may see, the newest first; tell how many there are in all."""
    found, total = list[tuple[str, str, GapSet]](), 0
    for stream, buffer in await parts.storage.streams():
        if (stream, buffer) in parts.unavailable:
            continue
        if stream in parts.settings.streams and parts.guard.allows(caller, Request(Action.VIEW, stream)):
            for each in await admin.gaps(caller, stream, buffer):
                total += len(each.ranges)
                found.append((stream, str(buffer), each if at_most is None else each.newest(at_most)))
    return await by_size(_RANGE_BYTES * sum(len(each.ranges) for *_, each in found), _newest_first, found), total


def _newest_first(found: Sequence[tuple[str, str, GapSet]]) -> list[dict[str, Any]]:
    rows = [_gap(stream, buffer, gap) for stream, buffer, each in found for gap in each.records()]
    return sorted(rows, key=lambda gap: int(gap["at_unix_ms"]), reverse=True)


async def quarantine(admin: Administration, caller: Caller) -> tuple[list[QuarantinedView], int]:
    """List the newest of what is in quarantine and may be seen by the caller; tell how many there are in all."""
    page = await admin.quarantine(caller, None, limit=SHOWN_MAX, newest_first=True)
    return sorted(page.views, key=lambda view: view.quarantined.at_unix_ms, reverse=True), page.total


async def quarantine_lines(admin: Administration, caller: Caller) -> AsyncIterator[bytes]:
    """Write all that is in quarantine as JSON Lines, a page at a time, the oldest first."""
    page = await admin.quarantine(caller, None)
    yield lines(quarantined_whole(page.views))
    while page.following:
        page = await admin.quarantine(caller, None, page.following)
        yield lines(quarantined_whole(page.views))


def trail_rows(trail: AuditTrail, query: TrailQuery) -> dict[str, Any]:
    """Give the newest records of the audit trail that are asked for, and the number of the last one of all."""
    last = next(trail.newest(), None)
    found = [record.document() for record in islice(trail.newest(query), SHOWN_MAX)]
    return {"total": last.number if last else 0, "rows": found, "actions": sorted(ACTIONS)}


def fact_row(entry: Entry) -> dict[str, Any]:
    """Describe a fact for the page, a long object cut."""
    envelope = entry.message.envelope
    return {
        "offset": entry.offset,
        "appended_at_unix_ms": entry.appended_at_unix_ms,
        "from_zone": envelope.from_zone,
        "message_id": envelope.message_id,
        "media_type": envelope.object_media_type,
        "artifact": reference.digest if (reference := entry.message.fact.artifact) else None,
        **_brief(entry.message),
    }


async def trail_lines(trail: AuditTrail) -> AsyncIterator[bytes]:
    """Write the whole audit trail as JSON Lines, some at a time, the oldest first."""
    after = 0

    def some() -> list[TrailRecord]:
        return list(islice(trail.oldest(after), 1_000))

    while found := await asyncio.to_thread(some):
        yield lines([record.document() for record in found])
        after = found[-1].number


def shown(rows: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """Give the document of a list: what is shown of it, and how long it is."""
    return {"total": total, "rows": rows[:SHOWN_MAX]}


def lines(rows: list[dict[str, Any]]) -> bytes:
    """Write rows as JSON Lines."""
    return b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)


def quarantined_rows(views: list[QuarantinedView]) -> list[dict[str, Any]]:
    """Describe quarantined facts for the page, long objects cut."""
    return [{**_head(view), "facts": [_brief(each) for each in _messages(view)]} for view in views[:SHOWN_MAX]]


def quarantined_whole(views: Sequence[QuarantinedView]) -> list[dict[str, Any]]:
    """Describe quarantined facts with all their content, a row per fact; of one that cannot be read, without it."""
    contents = [(view, [message_to_dict(each) for each in _messages(view)]) for view in views]
    return [{"quarantined": _head(view), **each} for view, found in contents for each in found or ({},)]


def _messages(view: QuarantinedView) -> list[Message]:
    return view.quarantined.facts.to_messages()


def _head(view: QuarantinedView) -> dict[str, Any]:
    return {"id": view.quarantined.id, **view.to_dict()}


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
        "count": gap.offsets,
    }
