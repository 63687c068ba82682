"""Whether a zone's message ids come about as they did before: a retry must find its first attempt."""

from __future__ import annotations

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, ConfigInvalid
from bsfg.keys import LABEL, IdStrategy, MessageIds
from bsfg.node.parts import Parts
from bsfg.ports import StoreBuffer
from bsfg.sealing import SHA256


async def check_ids(parts: Parts, zone: str) -> None:
    """Raise `ConfigInvalid` when ``semantic`` would give other ids than those which the zone's newest facts have.

    Up to version 0.1 ``semantic`` was another formula. What was stored by it and is sent again would be taken for
    something new, so it is for the operator to say which one is meant.
    """
    ids = parts.settings.ids
    if ids.strategy != IdStrategy.SEMANTIC or any(name.startswith(LABEL) for name in ids.fields):
        return
    older = MessageIds(IdStrategy.SEMANTIC_V1, ids.fields)
    for stream in parts.settings.lanes:
        try:
            newest = await _newest(await parts.store(stream), zone)
        except BsfgError:
            # Recovery says what is wrong with it; the other streams serve meanwhile.
            continue
        if newest is not None and older.derived(newest, newest.digests(), SHA256) == newest.values("message_id"):
            raise ConfigInvalid(
                f'message_ids = "semantic" gives other ids than those of the facts in {stream}',
                hint='Their ids are of version 0.1: write message_ids = "semantic-v1" in [zone] to go on with them. '
                "docs/upgrading.md tells how to change.",
                stream=stream,
            )


async def _newest(store: StoreBuffer, zone: str) -> EntryBatch | None:
    """Give the newest entry of a buffer if it was said by this zone."""
    stats = await store.stats()
    if stats.end <= stats.start:
        return None
    async for frame in store.replay(stats.end - 1, end=stats.end):
        if frame.entries is not None and frame.entries.values("from_zone")[-1] == zone:
            return frame.entries.slice(len(frame.entries) - 1)
    return None
