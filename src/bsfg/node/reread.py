"""A receiver that was restored from an older copy reads again what its sender has long counted as confirmed.

The link notices by itself: the sender goes on beyond what the receiver remembers, and is held. What lies between can
be read without moving a cursor, as long as the sender retains it; what it does not retain becomes a gap record. That
is done once an operator has looked and released the link.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from bsfg.errors import DigestMismatch
from bsfg.journey.link import Fetched, FetchRequest, PeerLink, PeerMemory, PeerPosition, SessionMemory
from bsfg.journey.pull import BeforePut, Progress, pull_once
from bsfg.journey.verify import LinkRules, check_history
from bsfg.node.brought import Brought
from bsfg.ports import Clock, ForwardBuffer, Frame

ReadRange = Callable[[int, int], AsyncIterator[Frame]]
"""Reads a range of the sender's offsets (its end exclusive), moving no cursor."""


async def read_again(
    peer: PeerLink,
    memory: PeerMemory,
    rules: LinkRules,
    forward: ForwardBuffer,
    read: ReadRange,
    *,
    clock: Clock,
    before_put: BeforePut,
) -> Progress:
    """Put what lies between the remembered position and where the sender goes on, frame by frame and in order.

    What was put is remembered, so that an interruption costs nothing. A frame that holds or pauses the link ends this
    early, with its progress. Raises what the link and the storage raise.
    """
    total = Progress()
    position = await memory.recall()
    fetched = await peer.fetch(FetchRequest(max_facts=1, gaps_after=position.gaps_token))
    check_history(fetched, position)
    if position.latest_start is None or fetched.start <= position.latest_start:
        return total
    async for frame in read(position.latest_start, fetched.start):
        progress = await _put(frame, fetched, peer.zone, rules, forward, clock, before_put)
        if progress.refetch_at is not None:
            raise DigestMismatch(f"the entry at offset {progress.refetch_at} does not match its digest")
        if progress.held is not None or progress.paused is not None:
            return progress
        position = replace(position, latest_start=frame.last + 1)
        await memory.remember(position)
        total = replace(
            progress, inserted=total.inserted + progress.inserted, repeated=total.repeated + progress.repeated
        )
    return total


async def _put(
    frame: Frame,
    fetched: Fetched,
    zone: str,
    rules: LinkRules,
    forward: ForwardBuffer,
    clock: Clock,
    before_put: BeforePut,
) -> Progress:
    answer = Fetched(fetched.log_id, frame.first, frame.last + 1, b"", [frame])
    session = SessionMemory(PeerPosition(log_id=fetched.log_id, latest_start=frame.first))
    # It was on time when it came first.
    return await pull_once(
        Brought(zone, answer), forward, session, rules, clock=clock, clock_trusted=False, before_put=before_put
    )
