"""Whether a zone's message ids come about as they did before: a retry must find its first attempt."""

from __future__ import annotations

from bsfg.batch import EntryBatch
from bsfg.errors import BsfgError, ConfigInvalid, HasherUnknown
from bsfg.hashing import SHA256, hasher_named
from bsfg.keys import LABEL, IdStrategy, MessageIds
from bsfg.node.parts import Parts, Settings
from bsfg.ports import StoreBuffer
from bsfg.sealing import functions_of, plain


async def check_ids(parts: Parts, zone: str) -> None:
    """Raise `ConfigInvalid` when ids would be derived otherwise than those which the zone's newest facts have.

    What was stored and is sent again would then be taken for something new, so it is for the operator to say what is
    meant. Ids that producers give themselves come from nowhere else.
    """
    if parts.settings.ids.strategy == IdStrategy.EXPLICIT:
        return
    for stream in parts.settings.lanes:
        try:
            newest = await _newest(await parts.store(stream), zone)
        except BsfgError:
            # Recovery says what is wrong with it; the other streams serve meanwhile.
            continue
        if newest is not None:
            _check_function(newest, stream, parts.settings)
            _check_formula(newest, stream, parts.settings.ids)


def _check_function(newest: EntryBatch, stream: str, settings: Settings) -> None:
    """Refuse to derive ids by another digest function than before."""
    before, now = functions_of(newest)[0], settings.hasher.name
    if before == now:
        return
    try:
        found = settings.ids.derived(plain(newest), newest.digests(), hasher_named(before))
    except HasherUnknown:
        found = newest.values("message_id")
    if found == newest.values("message_id"):
        raise ConfigInvalid(
            f'hasher = "{now}" gives other ids than those of the facts in {stream}, which {before} gave',
            hint=f'Write hasher = "{before}" in [zone] to go on with them. `bsfg help upgrading` tells how to change.',
            stream=stream,
        )


def _check_formula(newest: EntryBatch, stream: str, ids: MessageIds) -> None:
    """Refuse ``semantic`` where ids are of version 0.1, in which it was another formula."""
    if ids.strategy != IdStrategy.SEMANTIC or any(name.startswith(LABEL) for name in ids.fields):
        return
    older = MessageIds(IdStrategy.SEMANTIC_V1, ids.fields)
    if older.derived(newest, newest.digests(), SHA256) == newest.values("message_id"):
        raise ConfigInvalid(
            f'message_ids = "semantic" gives other ids than those of the facts in {stream}',
            hint='Their ids are of version 0.1: write message_ids = "semantic-v1" in [zone] to go on with them. '
            "`bsfg help upgrading` tells how to change.",
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
