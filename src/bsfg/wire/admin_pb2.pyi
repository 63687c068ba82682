from bsfg.wire import boundary_pb2 as _boundary_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: bytes
    def __init__(self, status_json: _Optional[bytes] = ...) -> None: ...

class ListConsumersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Consumer(_message.Message):
    __slots__ = ("name", "stream", "buffer", "required", "committed", "next_to_send", "ranges", "log_id", "created_unix_ms", "retired_reason", "backlog", "start", "start_value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TO_SEND_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_REASON_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    stream: str
    buffer: _boundary_pb2.Buffer
    required: bool
    committed: int
    next_to_send: int
    ranges: _containers.RepeatedCompositeFieldContainer[_boundary_pb2.Range]
    log_id: str
    created_unix_ms: int
    retired_reason: str
    backlog: int
    start: str
    start_value: int
    def __init__(self, name: _Optional[str] = ..., stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., required: _Optional[bool] = ..., committed: _Optional[int] = ..., next_to_send: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_boundary_pb2.Range, _Mapping]]] = ..., log_id: _Optional[str] = ..., created_unix_ms: _Optional[int] = ..., retired_reason: _Optional[str] = ..., backlog: _Optional[int] = ..., start: _Optional[str] = ..., start_value: _Optional[int] = ...) -> None: ...

class ListConsumersResponse(_message.Message):
    __slots__ = ("consumers",)
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    consumers: _containers.RepeatedCompositeFieldContainer[Consumer]
    def __init__(self, consumers: _Optional[_Iterable[_Union[Consumer, _Mapping]]] = ...) -> None: ...

class CreateConsumerRequest(_message.Message):
    __slots__ = ("name", "stream", "buffer", "start", "start_value", "required")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_VALUE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_FIELD_NUMBER: _ClassVar[int]
    name: str
    stream: str
    buffer: _boundary_pb2.Buffer
    start: str
    start_value: int
    required: bool
    def __init__(self, name: _Optional[str] = ..., stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., start: _Optional[str] = ..., start_value: _Optional[int] = ..., required: _Optional[bool] = ...) -> None: ...

class RetireConsumerRequest(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RetireConsumerResponse(_message.Message):
    __slots__ = ("gaps",)
    GAPS_FIELD_NUMBER: _ClassVar[int]
    gaps: _containers.RepeatedCompositeFieldContainer[_boundary_pb2.GapRecord]
    def __init__(self, gaps: _Optional[_Iterable[_Union[_boundary_pb2.GapRecord, _Mapping]]] = ...) -> None: ...

class GetFrontierRequest(_message.Message):
    __slots__ = ("stream", "buffer")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ...) -> None: ...

class TruncateBeforeRequest(_message.Message):
    __slots__ = ("stream", "buffer", "before", "reason")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    before: int
    reason: str
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., before: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class FrontierView(_message.Message):
    __slots__ = ("stream", "buffer", "start", "end", "frontier", "slowest", "held_by")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    start: int
    end: int
    frontier: int
    slowest: _containers.RepeatedScalarFieldContainer[str]
    held_by: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., frontier: _Optional[int] = ..., slowest: _Optional[_Iterable[str]] = ..., held_by: _Optional[_Iterable[str]] = ...) -> None: ...

class ListGatesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Gate(_message.Message):
    __slots__ = ("link", "side", "mode", "since_unix_ms", "reason", "held_by", "held_until_unix_ms")
    LINK_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HELD_BY_FIELD_NUMBER: _ClassVar[int]
    HELD_UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    link: str
    side: str
    mode: str
    since_unix_ms: int
    reason: str
    held_by: str
    held_until_unix_ms: int
    def __init__(self, link: _Optional[str] = ..., side: _Optional[str] = ..., mode: _Optional[str] = ..., since_unix_ms: _Optional[int] = ..., reason: _Optional[str] = ..., held_by: _Optional[str] = ..., held_until_unix_ms: _Optional[int] = ...) -> None: ...

class ListGatesResponse(_message.Message):
    __slots__ = ("gates",)
    GATES_FIELD_NUMBER: _ClassVar[int]
    gates: _containers.RepeatedCompositeFieldContainer[Gate]
    def __init__(self, gates: _Optional[_Iterable[_Union[Gate, _Mapping]]] = ...) -> None: ...

class HoldGateRequest(_message.Message):
    __slots__ = ("link", "side", "reason", "until_unix_ms")
    LINK_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    link: str
    side: str
    reason: str
    until_unix_ms: int
    def __init__(self, link: _Optional[str] = ..., side: _Optional[str] = ..., reason: _Optional[str] = ..., until_unix_ms: _Optional[int] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("digest", "changed", "waiting_for_restart")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_RESTART_FIELD_NUMBER: _ClassVar[int]
    digest: str
    changed: _containers.RepeatedScalarFieldContainer[str]
    waiting_for_restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digest: _Optional[str] = ..., changed: _Optional[_Iterable[str]] = ..., waiting_for_restart: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseGateRequest(_message.Message):
    __slots__ = ("link", "side", "reason")
    LINK_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    link: str
    side: str
    reason: str
    def __init__(self, link: _Optional[str] = ..., side: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("link", "holder", "ttl_ms", "wait_ms", "urgent")
    LINK_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    URGENT_FIELD_NUMBER: _ClassVar[int]
    link: str
    holder: str
    ttl_ms: int
    wait_ms: int
    urgent: bool
    def __init__(self, link: _Optional[str] = ..., holder: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., urgent: _Optional[bool] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("link", "holder", "token", "ttl_ms", "mode", "wanted")
    LINK_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    link: str
    holder: str
    token: str
    ttl_ms: int
    mode: str
    wanted: int
    def __init__(self, link: _Optional[str] = ..., holder: _Optional[str] = ..., token: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., mode: _Optional[str] = ..., wanted: _Optional[int] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("link", "token", "ttl_ms", "wait_ms", "seen")
    LINK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    link: str
    token: str
    ttl_ms: int
    wait_ms: int
    seen: int
    def __init__(self, link: _Optional[str] = ..., token: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., seen: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("link", "token")
    LINK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    link: str
    token: str
    def __init__(self, link: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcquireLeasesRequest(_message.Message):
    __slots__ = ("links", "holder", "ttl_ms", "wait_ms", "plan")
    LINKS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedScalarFieldContainer[str]
    holder: str
    ttl_ms: int
    wait_ms: int
    plan: int
    def __init__(self, links: _Optional[_Iterable[str]] = ..., holder: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., plan: _Optional[int] = ...) -> None: ...

class KeptLease(_message.Message):
    __slots__ = ("link", "token", "seen", "mode")
    LINK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    link: str
    token: str
    seen: int
    mode: str
    def __init__(self, link: _Optional[str] = ..., token: _Optional[str] = ..., seen: _Optional[int] = ..., mode: _Optional[str] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("leases", "holder", "ttl_ms", "wait_ms", "plan")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[KeptLease]
    holder: str
    ttl_ms: int
    wait_ms: int
    plan: int
    def __init__(self, leases: _Optional[_Iterable[_Union[KeptLease, _Mapping]]] = ..., holder: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., plan: _Optional[int] = ...) -> None: ...

class LeaseAnswer(_message.Message):
    __slots__ = ("link", "lease", "error")
    LINK_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    link: str
    lease: Lease
    error: _boundary_pb2.Error
    def __init__(self, link: _Optional[str] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., error: _Optional[_Union[_boundary_pb2.Error, _Mapping]] = ...) -> None: ...

class LeasesResponse(_message.Message):
    __slots__ = ("leases", "plan")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseAnswer]
    plan: int
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseAnswer, _Mapping]]] = ..., plan: _Optional[int] = ...) -> None: ...

class ReportLinksRequest(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[ReportLinkRequest]
    def __init__(self, reports: _Optional[_Iterable[_Union[ReportLinkRequest, _Mapping]]] = ...) -> None: ...

class ReportAnswer(_message.Message):
    __slots__ = ("gate", "error")
    GATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    gate: ReportLinkResponse
    error: _boundary_pb2.Error
    def __init__(self, gate: _Optional[_Union[ReportLinkResponse, _Mapping]] = ..., error: _Optional[_Union[_boundary_pb2.Error, _Mapping]] = ...) -> None: ...

class ReportLinksResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[ReportAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[ReportAnswer, _Mapping]]] = ...) -> None: ...

class ReportLinkRequest(_message.Message):
    __slots__ = ("link", "stream", "event", "backlog", "inserted", "repeated", "refused", "lag_seconds", "hold_code", "hold_detail", "lease", "reason", "failure_code", "hold_stream", "hold_log_id")
    LINK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_CODE_FIELD_NUMBER: _ClassVar[int]
    HOLD_DETAIL_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_CODE_FIELD_NUMBER: _ClassVar[int]
    HOLD_STREAM_FIELD_NUMBER: _ClassVar[int]
    HOLD_LOG_ID_FIELD_NUMBER: _ClassVar[int]
    link: str
    stream: str
    event: str
    backlog: int
    inserted: int
    repeated: int
    refused: int
    lag_seconds: float
    hold_code: str
    hold_detail: str
    lease: str
    reason: str
    failure_code: str
    hold_stream: str
    hold_log_id: str
    def __init__(self, link: _Optional[str] = ..., stream: _Optional[str] = ..., event: _Optional[str] = ..., backlog: _Optional[int] = ..., inserted: _Optional[int] = ..., repeated: _Optional[int] = ..., refused: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., hold_code: _Optional[str] = ..., hold_detail: _Optional[str] = ..., lease: _Optional[str] = ..., reason: _Optional[str] = ..., failure_code: _Optional[str] = ..., hold_stream: _Optional[str] = ..., hold_log_id: _Optional[str] = ...) -> None: ...

class ReportLinkResponse(_message.Message):
    __slots__ = ("mode", "reason")
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    mode: str
    reason: str
    def __init__(self, mode: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PipelineReport(_message.Message):
    __slots__ = ("name", "state", "progress", "runs", "failures", "failures_in_a_row", "facts", "backlog", "batches", "batch_seconds", "last_error", "last_error_unix_ms", "last_good_unix_ms", "next_unix_ms", "finding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_GOOD_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    progress: str
    runs: int
    failures: int
    failures_in_a_row: int
    facts: int
    backlog: int
    batches: int
    batch_seconds: float
    last_error: str
    last_error_unix_ms: int
    last_good_unix_ms: int
    next_unix_ms: int
    finding: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., progress: _Optional[str] = ..., runs: _Optional[int] = ..., failures: _Optional[int] = ..., failures_in_a_row: _Optional[int] = ..., facts: _Optional[int] = ..., backlog: _Optional[int] = ..., batches: _Optional[int] = ..., batch_seconds: _Optional[float] = ..., last_error: _Optional[str] = ..., last_error_unix_ms: _Optional[int] = ..., last_good_unix_ms: _Optional[int] = ..., next_unix_ms: _Optional[int] = ..., finding: _Optional[str] = ...) -> None: ...

class ReportPipelinesRequest(_message.Message):
    __slots__ = ("holder", "pipelines", "last")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    holder: str
    pipelines: _containers.RepeatedCompositeFieldContainer[PipelineReport]
    last: bool
    def __init__(self, holder: _Optional[str] = ..., pipelines: _Optional[_Iterable[_Union[PipelineReport, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class ReportPipelinesResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class RecallPeerRequest(_message.Message):
    __slots__ = ("link", "stream")
    LINK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    link: str
    stream: str
    def __init__(self, link: _Optional[str] = ..., stream: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("code", "log_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    log_id: str
    def __init__(self, code: _Optional[str] = ..., log_id: _Optional[str] = ...) -> None: ...

class PeerPosition(_message.Message):
    __slots__ = ("log_id", "latest_start", "acknowledged", "end", "chain_head", "suspect", "gaps_token", "released")
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    LATEST_START_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    GAPS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    log_id: str
    latest_start: int
    acknowledged: int
    end: int
    chain_head: bytes
    suspect: int
    gaps_token: str
    released: Release
    def __init__(self, log_id: _Optional[str] = ..., latest_start: _Optional[int] = ..., acknowledged: _Optional[int] = ..., end: _Optional[int] = ..., chain_head: _Optional[bytes] = ..., suspect: _Optional[int] = ..., gaps_token: _Optional[str] = ..., released: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class RememberPeerRequest(_message.Message):
    __slots__ = ("link", "stream", "position", "lease", "settles")
    LINK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SETTLES_FIELD_NUMBER: _ClassVar[int]
    link: str
    stream: str
    position: PeerPosition
    lease: str
    settles: Release
    def __init__(self, link: _Optional[str] = ..., stream: _Optional[str] = ..., position: _Optional[_Union[PeerPosition, _Mapping]] = ..., lease: _Optional[str] = ..., settles: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class RememberPeerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RememberPeersRequest(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[RememberPeerRequest]
    def __init__(self, peers: _Optional[_Iterable[_Union[RememberPeerRequest, _Mapping]]] = ...) -> None: ...

class RememberAnswer(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _boundary_pb2.Error
    def __init__(self, error: _Optional[_Union[_boundary_pb2.Error, _Mapping]] = ...) -> None: ...

class RememberPeersResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[RememberAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[RememberAnswer, _Mapping]]] = ...) -> None: ...

class ListGapsRequest(_message.Message):
    __slots__ = ("stream", "buffer", "sets")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    sets: bool
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., sets: _Optional[bool] = ...) -> None: ...

class ListGapsResponse(_message.Message):
    __slots__ = ("gaps", "gap_sets")
    GAPS_FIELD_NUMBER: _ClassVar[int]
    GAP_SETS_FIELD_NUMBER: _ClassVar[int]
    gaps: _containers.RepeatedCompositeFieldContainer[_boundary_pb2.GapRecord]
    gap_sets: _containers.RepeatedCompositeFieldContainer[_boundary_pb2.GapSet]
    def __init__(self, gaps: _Optional[_Iterable[_Union[_boundary_pb2.GapRecord, _Mapping]]] = ..., gap_sets: _Optional[_Iterable[_Union[_boundary_pb2.GapSet, _Mapping]]] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ("stream", "after", "limit", "newest_first")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    stream: str
    after: str
    limit: int
    newest_first: bool
    def __init__(self, stream: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., newest_first: _Optional[bool] = ...) -> None: ...

class Quarantined(_message.Message):
    __slots__ = ("stream", "buffer", "id", "at_unix_ms", "reason", "from_zone", "message_id", "existing_offset", "detail", "facts")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    EXISTING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    id: int
    at_unix_ms: int
    reason: str
    from_zone: str
    message_id: str
    existing_offset: int
    detail: str
    facts: bytes
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., id: _Optional[int] = ..., at_unix_ms: _Optional[int] = ..., reason: _Optional[str] = ..., from_zone: _Optional[str] = ..., message_id: _Optional[str] = ..., existing_offset: _Optional[int] = ..., detail: _Optional[str] = ..., facts: _Optional[bytes] = ...) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("quarantined", "next", "total")
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    quarantined: _containers.RepeatedCompositeFieldContainer[Quarantined]
    next: str
    total: int
    def __init__(self, quarantined: _Optional[_Iterable[_Union[Quarantined, _Mapping]]] = ..., next: _Optional[str] = ..., total: _Optional[int] = ...) -> None: ...

class ShowQuarantinedRequest(_message.Message):
    __slots__ = ("stream", "buffer", "id")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    id: int
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., id: _Optional[int] = ...) -> None: ...

class SettleQuarantinedRequest(_message.Message):
    __slots__ = ("stream", "buffer", "id", "reason")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: _boundary_pb2.Buffer
    id: int
    reason: str
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[_boundary_pb2.Buffer, str]] = ..., id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SettleQuarantinedResponse(_message.Message):
    __slots__ = ("settled", "result")
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    settled: bool
    result: _boundary_pb2.Result
    def __init__(self, settled: _Optional[bool] = ..., result: _Optional[_Union[_boundary_pb2.Result, str]] = ...) -> None: ...
