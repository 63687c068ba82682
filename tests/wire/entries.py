"""The next facts of a consumer one by one, as an application in another language asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bsfg.fact import Entry
from bsfg.ports import GapRecord
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.client import BoundaryClient
from bsfg.wire.convert import entry_of, gap_of


@dataclass(frozen=True, slots=True)
class FetchedEntries:
    """The next facts of a consumer: confirm through ``next_offset - 1`` when they are handled."""

    entries: list[Entry]
    gaps: list[GapRecord]
    start: int
    next_offset: int
    end: int
    log_id: str
    chain_head: bytes
    gaps_token: str = ""


async def fetch_entries(
    client: BoundaryClient,
    consumer: str,
    *,
    limit: int = 100,
    wait_seconds: float = 0.0,
    max_bytes: int = 0,
    carry_only: Sequence[str] = (),
    gaps_after: str = "",
) -> FetchedEntries:
    """Fetch the next facts of a consumer one by one."""
    request = pb.FetchRequest(
        consumer=consumer,
        limit=limit,
        max_bytes=max_bytes,
        wait_ms=int(wait_seconds * 1000),
        carry_only=carry_only,
        gaps_after=gaps_after,
    )
    answer = await client.connection.call("FetchFacts", request, timeout_seconds=client._timeout(wait_seconds))
    return FetchedEntries(
        [entry_of(entry) for entry in answer.entries],
        [gap_of(gap) for gap in answer.gaps],
        answer.start,
        answer.next_offset,
        answer.end,
        answer.log_id,
        answer.chain_head,
        answer.gaps_token,
    )
