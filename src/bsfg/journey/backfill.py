"""What follows from an operator's release of a link that a finding about its sender's history had closed.

Two findings can be accepted. A sender with another history, or with an older copy of its own, is believed anew from
where it stands. A sender that goes on beyond what the receiver remembers is right where the receiver was restored from
an older copy: what lies between can be read without moving a cursor, as long as the sender retains it, and what it
does not retain becomes a gap record.

The release is remembered by the receiving node until somebody has acted upon it, and it covers the history that was
found, no other: neither a restart nor another engine asks the operator twice, and a third history does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from bsfg.errors import DigestMismatch, ForeignLog, FrameInvalid
from bsfg.journey.link import Fetched, FetchRequest, PeerLink, PeerMemory, PeerPosition
from bsfg.journey.receive import BeforePut, LinkHeld, LinkRules, PullProgress, check_history, receive
from bsfg.ports import Clock, ForwardBuffer, Frame

ReadRange = Callable[[int, int], AsyncIterator[Frame]]
"""Reads a range of the sender's offsets (its end exclusive), moving no cursor."""

PutFrame = Callable[[Frame, Fetched], Awaitable[PullProgress]]
"""Puts a frame of the sender whose history and time an answer tells."""


async def make_good(peer: PeerLink, memory: PeerMemory, read: ReadRange, put: PutFrame) -> PullProgress | None:
    """Act upon what an operator released, None when there is nothing to act upon.

    An interruption costs nothing: what was put is remembered, and the release stays until everything is done. What
    holds or pauses the link ends this early. Raises what the link and the storage raise.
    """
    position = await memory.recall()
    released = position.released
    if released is None:
        return None
    fetched = await peer.fetch(FetchRequest(max_facts=1, gaps_after=position.gaps_token))
    try:
        check_history(fetched, position)
    except ForeignLog as error:
        if not released.covers(error.code, fetched.log_id):
            return PullProgress(held=LinkHeld(error.code, error.message, fetched.log_id))
        await memory.remember(PeerPosition(log_id=fetched.log_id), settles=released)
        return None
    total: PullProgress | None = None
    if _skips(fetched, position) and released.covers(FrameInvalid.code, fetched.log_id):
        total = await _read_between(fetched, position, memory, read, put)
        if total.held is not None or total.paused is not None:
            return total
    # Where nothing of the kind is found any more there is nothing left to accept.
    await memory.remember(await memory.recall(), settles=released)
    return total


def _skips(fetched: Fetched, position: PeerPosition) -> bool:
    return position.latest_start is not None and fetched.start > position.latest_start


async def _read_between(
    fetched: Fetched, position: PeerPosition, memory: PeerMemory, read: ReadRange, put: PutFrame
) -> PullProgress:
    """Put what lies between the remembered position and where the sender goes on, frame by frame and in order."""
    total = PullProgress(backlog=fetched.end - fetched.start)
    assert position.latest_start is not None
    async for frame in read(position.latest_start, fetched.start):
        progress = await put(frame, fetched)
        if progress.refetch_at is not None:
            raise DigestMismatch(f"the entry at offset {progress.refetch_at} does not match its digest")
        if progress.held is not None or progress.paused is not None:
            return progress
        position = replace(position, latest_start=frame.last + 1)
        await memory.remember(position)
        total = replace(total, inserted=total.inserted + progress.inserted, repeated=total.repeated + progress.repeated)
    return total


async def put_again(
    frame: Frame,
    fetched: Fetched,
    zone: str,
    rules: LinkRules,
    forward: ForwardBuffer,
    clock: Clock,
    before_put: BeforePut,
) -> PullProgress:
    """Put a frame that had come before into a forward buffer of this process."""
    log_id, served_at = fetched.log_id, fetched.served_at_unix_ms
    answer = Fetched(log_id, frame.first, frame.last + 1, b"", [frame], served_at_unix_ms=served_at)
    position = PeerPosition(log_id=log_id, latest_start=frame.first)
    # It was on time when it came first.
    return await receive(
        answer, position, rules, zone, forward, clock=clock, clock_trusted=False, before_put=before_put
    )
