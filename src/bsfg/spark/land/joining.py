"""What a landing asks the node before it goes on: where to start, and whether it still has the same history."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bsfg.errors import ForeignLog, InvalidArgument
from bsfg.spark.fetching import Source
from bsfg.spark.land.settings import Settings
from bsfg.spark.land.staging import gap_reason
from bsfg.spark.land.state import Origin, State
from bsfg.spark.options import EARLIEST, Position

if TYPE_CHECKING:
    from bsfg.journey.link import Fetched

HINT = (
    "The node was replaced, or restored from an older copy. Its facts need a folder of their own: give another --out."
)


def first_origin(source: Source, settings: Settings) -> tuple[Origin, int]:
    """Give whose facts a new folder will hold, and from which offset on."""
    head = _start(source, settings)
    start = head.start
    if settings.starting is not None and settings.starting.offset is not None:
        start = settings.starting.offset
        if start > head.end:
            raise InvalidArgument(f"the buffer ends at offset {head.end}, and {start} is to be the first")
    return Origin(settings.stream, settings.buffer, head.log_id, str(settings.by)), start


def _start(source: Source, settings: Settings) -> Fetched:
    wanted = settings.starting
    if wanted is None and settings.consumer is not None:
        return source.consumer_head(settings.consumer)
    wanted = wanted or Position(word=EARLIEST)
    if wanted.unix_ms is not None or wanted.word == EARLIEST:
        return source.head(unix_ms=max(0, wanted.unix_ms or 0))
    head = source.head()
    return replace(head, start=head.end)


def check_history(source: Source, settings: Settings, state: State, head: Fetched) -> None:
    """Refuse a folder that holds other facts than those the node has, or that was made in another way."""
    origin = state.origin
    for name, given in (("stream", settings.stream), ("buffer", settings.buffer), ("by", str(settings.by))):
        if getattr(origin, name) != given:
            raise InvalidArgument(
                f"{settings.out} was made with --{name} {getattr(origin, name)}, not {given}",
                hint="What is in a folder cannot be changed afterwards: give another --out.",
            )
    if head.log_id != origin.log_id:
        raise ForeignLog(
            f"{settings.out} holds facts of the log {origin.log_id}, the node's is {head.log_id}", hint=HINT
        )
    if head.end < state.next:
        raise ForeignLog(f"the node's log ends at offset {head.end}, facts up to {state.next} are landed", hint=HINT)
    if state.tail_offset is None:
        return
    for frame in source.frames(state.tail_offset, state.tail_offset + 1, origin.log_id):
        digests = [] if frame.entries is None else frame.entries.digests()
        if digests and digests[0].hex() != state.tail_digest:
            raise ForeignLog(f"the fact at offset {state.tail_offset} is another one than was landed", hint=HINT)


def check_consumer(source: Source, settings: Settings, head: Fetched) -> None:
    """Refuse a consumer of another buffer, and one that is not there or not ours, before anything is landed."""
    assert settings.consumer is not None
    if source.consumer_head(settings.consumer).log_id != head.log_id:
        raise InvalidArgument(
            f"the consumer {settings.consumer} reads another buffer than {settings.stream}/{settings.buffer}",
            hint="`bsfg consumers list` shows what each reads.",
        )


def received_gaps(source: Source, settings: Settings, log_id: str, token: str) -> tuple[list[dict[str, Any]], str]:
    """Give the gap records that came from other zones since the last commit, and the token for the next."""
    assert settings.consumer is not None
    head = source.consumer_head(settings.consumer, gaps_after=token)
    place = {"stream": settings.stream, "buffer": settings.buffer, "log_id": log_id}
    lines = [
        {"first": gap.first, "last": gap.last, **gap_reason(gap), "origin_zone": gap.origin_zone, **place}
        for gap in head.gaps
    ]
    return lines, head.gaps_token
