"""What callers and nodes tell each other beside facts: who calls, what a pipeline brings, and views of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.errors import BsfgError
from bsfg.gate import Event, Gate
from bsfg.journey.link import PeerPosition, Refusal, Release, Room
from bsfg.ports import Buffer, ConsumerState, Gap, GapRecord, GapSet, Quarantined
from bsfg.wire.peer import PeerNames


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end: the names in his certificate, None without TLS, and where he called from.

    ``token`` is the name of the token that he has shown, which was checked already; it then counts, whatever
    certificate he has. ``room`` is where facts count that are read for him, until he has them.
    """

    names: PeerNames | None = None
    address: str = ""
    token: str | None = None
    room: Room | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.token is not None:
            return f"token:{self.token}"
        return str(self.names) if self.names else "plaintext"


@dataclass(frozen=True, slots=True)
class PutCall:
    """What a pipeline brings of one link: a range of the sender's offsets as entries or as a gap record.

    ``skips`` are what the link leaves out among the entries.
    """

    link: str
    stream: str
    log_id: str
    first: int
    last: int
    entries: bytes = b""
    gap: GapRecord | None = None
    gaps: Sequence[Gap] = ()
    lease: str | None = None
    served_at_unix_ms: int | None = None
    skips: Sequence[GapSet] = ()


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What became of it: see the message `PutAck`."""

    through: int
    inserted: int = 0
    repeated: int = 0
    refusals: Sequence[Refusal] = ()
    chain_head: bytes = b""
    refetch_at: int | None = None
    held_code: str = ""
    held_detail: str = ""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An artifact by name: what it is, once stored its digest and size, and the link that brought it if one did."""

    bucket: str
    key: str
    media_type: str = DEFAULT_MEDIA_TYPE
    file_name: str | None = None
    digest: str | None = None
    size_bytes: int | None = None
    already_exists: bool = False
    link: str | None = None


@dataclass(frozen=True, slots=True)
class GateView:
    """The gate of one side of a link, ``receiver`` or ``sender``."""

    link: str
    side: str
    gate: Gate


@dataclass(frozen=True, slots=True)
class FrontierView:
    """Where a buffer begins and ends, how far all required consumers have confirmed it, and what keeps the rest."""

    stream: str
    buffer: Buffer
    start: int
    end: int
    frontier: int
    slowest: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConsumerView:
    """A consumer and how much it has not confirmed."""

    state: ConsumerState
    backlog: int


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease as its holder sees it, with the mode of the link it is for.

    ``wanted`` is 1 while another part of the same holder waits for its turn, 2 when that is urgent.
    """

    link: str
    holder: str
    token: str
    ttl_ms: int
    mode: str
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class KeptLease:
    """A lease that is to be kept: how much it was wanted, and what its gate was, when its holder last looked."""

    link: str
    token: str
    seen: int = 0
    mode: str = ""


@dataclass(frozen=True, slots=True)
class LeasesView:
    """What became of the leases of many links, and the newest plan that was heard of from the same holder."""

    leases: Mapping[str, LeaseView]
    refused: Mapping[str, BsfgError]
    plan: int = 0


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How one stream of a link is doing, as the pipeline that moves it tells."""

    link: str
    stream: str = ""
    event: Event | None = None
    backlog: int = 0
    inserted: int = 0
    repeated: int = 0
    refused: int = 0
    lag_seconds: float | None = None
    hold_code: str = ""
    hold_detail: str = ""
    lease: str | None = None
    reason: str = ""
    failure_code: str = ""
    hold_stream: str = ""
    hold_log_id: str = ""


@dataclass(frozen=True, slots=True)
class PeerMemo:
    """What a pipeline knows of the sender of one stream of a link, and the lease by which it may say so.

    ``settles`` is what an operator released and the pipeline has acted upon.
    """

    link: str
    stream: str
    position: PeerPosition
    lease: str | None = None
    settles: Release | None = None


class PipelineState(StrEnum):
    """What a pipeline of a run is doing; one that `failed` waits for its next try."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    ENDED = "ended"


PIPELINES_MAX = 200
"""How many pipelines one process may tell of."""


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """How a pipeline is doing, as the process that runs it tells; see the message of this name."""

    name: str
    state: PipelineState
    progress: str = ""
    runs: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    facts: int = 0
    backlog: int | None = None
    batches: int = 0
    batch_seconds: float = 0.0
    last_error: str = ""
    last_error_unix_ms: int = 0
    last_good_unix_ms: int = 0
    next_unix_ms: int = 0
    finding: str = ""


@dataclass(frozen=True, slots=True)
class QuarantinedView:
    """A quarantined fact and the buffer it is in."""

    stream: str
    buffer: Buffer
    quarantined: Quarantined

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON form of all but its content and the id that people know it by."""
        found = self.quarantined
        return {
            "stream": self.stream,
            "buffer": str(self.buffer),
            "at_unix_ms": found.at_unix_ms,
            "reason": found.reason,
            "from_zone": found.key.from_zone,
            "message_id": found.key.message_id,
            "existing_offset": found.existing_offset if found.existing_offset >= 0 else None,
            "detail": found.detail,
        }


@dataclass(frozen=True, slots=True)
class QuarantinePage:
    """Some of what is in quarantine: where the next page begins (empty at the end), and how many there are in all."""

    views: Sequence[QuarantinedView]
    following: str = ""
    total: int = 0
