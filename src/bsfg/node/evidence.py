"""What a node tells an auditor of a log beside its entries; another zone sees only what concerns itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from bsfg.config.access import Identity
from bsfg.node.guard import speaker_of
from bsfg.node.parts import Parts
from bsfg.ports import Buffer, GapSet
from bsfg.rangedigest import History
from bsfg.retention import GapReason
from bsfg.wire.evidence import LogEvidence


@runtime_checkable
class Historical(Protocol):
    """A buffer with a hash chain, which can show its past; a storage need not have one."""

    async def history(self, heads: Sequence[bytes] = ()) -> History:
        """Give what was kept of what was removed, and where the log had some chain heads."""
        ...


async def gather(parts: Parts, row: Identity, stream: str, buffer: Buffer, heads: Sequence[bytes]) -> LogEvidence:
    """Gather the evidence of one log for one caller."""
    cursors = [
        state
        for state in await parts.storage.cursors.consumers()
        if (state.spec.stream, state.spec.buffer) == (stream, buffer)
        and row.owns_consumer(state.spec.name, stream, buffer)
    ]
    found = await parts.buffer(stream, buffer)
    is_ours = row.zone == parts.settings.zone
    gaps = [gap for gap in await found.gap_sets() if is_ours or _concerns(gap, row, stream, buffer)]
    history = await found.history(heads) if isinstance(found, Historical) else History()
    stats = await found.stats()
    return LogEvidence(stats.log_id, stats.start, stats.end, stats.chain_head, gaps, history, cursors)


def _concerns(gap: GapSet, row: Identity, stream: str, buffer: Buffer) -> bool:
    whose = gap.detail.partition(":")[0]
    if gap.reason == GapReason.RETIRED:
        return row.owns_consumer(whose, stream, buffer)
    return gap.reason != GapReason.QUARANTINED or whose == speaker_of(row)
