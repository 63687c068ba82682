"""What the listeners need from the node behind them, whatever carries the requests.

`bsfg.node.service` implements the first contract, `bsfg.node.administration` the second. Every call names its caller;
the implementation decides whether he may, does it, counts it, and raises only `bsfg.errors.BsfgError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bsfg.artifacts import DEFAULT_MEDIA_TYPE
from bsfg.batch import FactBatch
from bsfg.errors import BsfgError
from bsfg.fact import Entry, Key
from bsfg.gate import Event, Gate
from bsfg.journey.link import AppendOutcome, Fetched, FetchRequest, PeerPosition, Refusal, Release, Room
from bsfg.ports import (
    Buffer,
    Confirmation,
    ConsumerSpec,
    ConsumerState,
    Frame,
    Gap,
    GapRecord,
    GapSet,
    Quarantined,
    Result,
    StoreBuffer,
)
from bsfg.wire.convert import LogEvidence
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
class Prepared:
    """Facts that were checked and sealed for one caller and wait to be made durable in a buffer."""

    stream: str
    facts: FactBatch
    store: StoreBuffer
    hasher: str
    ids_derived: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read frame by frame: what it belongs to, and its frames; a gate that is held ends them."""

    head: Fetched
    frames: AsyncIterator[Frame]


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


class BoundaryService(Protocol):
    """The operations of producers, consumers, peers and the zone's own pipeline."""

    def admit(self, caller: Caller, actions: tuple[str, ...]) -> str:
        """Give the name of a caller whose row is in force and allows one of the actions, whatever it is about.

        Without actions only the row is asked for. Raises `IdentityUnknown`, `IdentityRevoked` or `PermissionRefused`
        before anything of a request was looked at; the refusal is recorded.
        """
        ...

    def known(self, caller: Caller) -> str | None:
        """Give the name of a caller whose row is in force, None for anybody else; nothing is recorded."""
        ...

    async def prepare(self, caller: Caller, stream: str, facts: FactBatch | bytes) -> Prepared:
        """Decide whether the caller may append these facts, and seal them; bytes are an Arrow stream.

        Calls for one stream of frames are made one after the other, so that a later frame never overtakes.
        """
        ...

    def commit(self, prepared: Prepared) -> Awaitable[AppendOutcome]:
        """Make prepared facts durable; that begins at the call, and goes on whether or not anybody waits for it."""
        ...

    async def fetch(
        self, caller: Caller, consumer: str, request: FetchRequest, carry_only: frozenset[str] | None = None
    ) -> Fetched:
        """Give what follows the last confirmed offset of a durable consumer, waiting as long as the request says."""
        ...

    async def fetch_frames(
        self, caller: Caller, consumer: str, request: FetchRequest, carry_only: frozenset[str] | None = None
    ) -> Reading:
        """Fetch as `fetch` does, and give the frames one by one: a gate that is held ends them."""
        ...

    async def read_offsets(
        self,
        caller: Caller,
        stream: str,
        buffer: Buffer,
        first: int,
        end: int | None,
        *,
        max_facts: int,
        carry_only: frozenset[str] | None = None,
    ) -> Reading:
        """Read a range of offsets."""
        ...

    async def read_times(
        self,
        caller: Caller,
        stream: str,
        buffer: Buffer,
        start_unix_ms: int,
        end_unix_ms: int,
        *,
        max_facts: int,
        carry_only: frozenset[str] | None = None,
    ) -> Reading:
        """Read what became durable in a span of time."""
        ...

    async def get(self, caller: Caller, stream: str, key: Key, buffer: Buffer) -> Entry:
        """Give the entry of a key, or raise `FactNotFound`."""
        ...

    async def evidence(self, caller: Caller, stream: str, buffer: Buffer, heads: Sequence[bytes]) -> LogEvidence:
        """Tell what a log shows of itself beside its entries."""
        ...

    async def confirm(
        self, caller: Caller, consumer: str, confirmation: Confirmation, refusals: Sequence[Refusal] = ()
    ) -> int:
        """Record a confirmation and give the offset through which nothing is missing."""
        ...

    async def put(self, caller: Caller, call: PutCall) -> PutOutcome:
        """Put what a link brought into the forward buffer."""
        ...

    async def put_object(self, caller: Caller, info: ObjectInfo, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Store an artifact; it is there when this returns."""
        ...

    async def get_object(
        self, caller: Caller, bucket: str, key: str, digest: str | None = None
    ) -> tuple[ObjectInfo, AsyncGenerator[bytes, None]]:
        """Give an artifact by name, or by digest alone, and its bytes."""
        ...


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


class AdminService(Protocol):
    """The operations of operators and viewers, and of pipelines about their links."""

    async def status(self, caller: Caller) -> Mapping[str, Any]:
        """Describe the node in a document of JSON values."""
        ...

    async def consumers(self, caller: Caller) -> list[ConsumerView]:
        """List all durable consumers."""
        ...

    async def create_consumer(self, caller: Caller, spec: ConsumerSpec) -> ConsumerView:
        """Create a durable consumer."""
        ...

    async def retire_consumer(self, caller: Caller, name: str, reason: str) -> list[GapRecord]:
        """End a consumer and give the gap records it leaves."""
        ...

    async def frontier(self, caller: Caller, stream: str, buffer: Buffer) -> FrontierView:
        """Tell how far all required consumers of a buffer have confirmed it."""
        ...

    async def truncate_before(
        self, caller: Caller, stream: str, buffer: Buffer, before: int, reason: str
    ) -> FrontierView:
        """Remove everything below an offset at once; `TruncateRefused` when somebody still needs it."""
        ...

    async def gates(self, caller: Caller) -> list[GateView]:
        """List the gates of all links."""
        ...

    async def hold_gate(
        self, caller: Caller, link: str, side: str, reason: str, until_unix_ms: int | None = None
    ) -> GateView:
        """Close a gate."""
        ...

    async def release_gate(self, caller: Caller, link: str, side: str, reason: str) -> GateView:
        """Open a held gate."""
        ...

    async def acquire_lease(
        self, caller: Caller, link: str, holder: str, ttl_ms: int, wait_seconds: float = 0.0, *, urgent: bool = False
    ) -> LeaseView:
        """Take the lease of a link, or raise `LeaseHeld`."""
        ...

    async def renew_lease(
        self, caller: Caller, link: str, token: str, ttl_ms: int, wait_seconds: float = 0.0, seen: int = 0
    ) -> LeaseView:
        """Keep a lease, or raise `LeaseLost`; answer early when it is wanted more than ``seen``."""
        ...

    async def release_lease(self, caller: Caller, link: str, token: str) -> None:
        """Give a lease back; one that is not held any more is no error."""
        ...

    async def report_link(self, caller: Caller, report: LinkReport) -> GateView:
        """Take a report and give the link's gate."""
        ...

    async def acquire_leases(
        self, caller: Caller, links: Sequence[str], holder: str, ttl_ms: int, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Take the leases of many links, as many as there are to be had; wait until there is one."""
        ...

    async def renew_leases(
        self, caller: Caller, leases: Sequence[KeptLease], holder: str, ttl_ms: int, wait_seconds: float, plan: int
    ) -> LeasesView:
        """Keep many leases; answer early when there is something new about one of them."""
        ...

    async def report_links(self, caller: Caller, reports: Sequence[LinkReport]) -> list[GateView | BsfgError]:
        """Take reports about many links; each is taken or refused by itself."""
        ...

    async def recall_peer(self, caller: Caller, link: str, stream: str) -> PeerPosition:
        """Give what is remembered of the sender of a link."""
        ...

    async def remember_peer(
        self,
        caller: Caller,
        link: str,
        stream: str,
        position: PeerPosition,
        lease: str | None,
        settles: Release | None = None,
    ) -> None:
        """Keep what a pipeline knows of the sender of a link, and that it has acted upon a release."""
        ...

    async def gaps(self, caller: Caller, stream: str, buffer: Buffer) -> list[GapSet]:
        """Give the gap records of a buffer as sets."""
        ...

    async def quarantine(
        self, caller: Caller, stream: str | None, after: str = "", limit: int = 0, *, newest_first: bool = False
    ) -> QuarantinePage:
        """List what is in quarantine, a page at a time."""
        ...

    async def quarantined(self, caller: Caller, stream: str, buffer: Buffer, id: int) -> QuarantinedView:
        """Give one quarantined fact."""
        ...

    async def retry_quarantined(
        self, caller: Caller, stream: str, buffer: Buffer, id: int, reason: str
    ) -> tuple[bool, Result]:
        """Put a quarantined fact again; tell whether it left quarantine, and the result."""
        ...

    async def drop_quarantined(self, caller: Caller, stream: str, buffer: Buffer, id: int, reason: str) -> None:
        """Give up a quarantined fact."""
        ...
