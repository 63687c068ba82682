from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Buffer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFER_UNSPECIFIED: _ClassVar[Buffer]
    BUFFER_STORE: _ClassVar[Buffer]
    BUFFER_FORWARD: _ClassVar[Buffer]

class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESULT_INSERTED: _ClassVar[Result]
    RESULT_ALREADY_EXISTS: _ClassVar[Result]
    RESULT_CONFLICT: _ClassVar[Result]
BUFFER_UNSPECIFIED: Buffer
BUFFER_STORE: Buffer
BUFFER_FORWARD: Buffer
RESULT_INSERTED: Result
RESULT_ALREADY_EXISTS: Result
RESULT_CONFLICT: Result

class Envelope(_message.Message):
    __slots__ = ("message_id", "from_zone", "to_zone", "produced_at_unix_ms", "correlation_id", "causation_id", "labels", "object_media_type", "object_schema", "signature")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    TO_ZONE_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSATION_ID_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    OBJECT_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    from_zone: str
    to_zone: str
    produced_at_unix_ms: int
    correlation_id: str
    causation_id: str
    labels: _containers.ScalarMap[str, str]
    object_media_type: str
    object_schema: str
    signature: str
    def __init__(self, message_id: _Optional[str] = ..., from_zone: _Optional[str] = ..., to_zone: _Optional[str] = ..., produced_at_unix_ms: _Optional[int] = ..., correlation_id: _Optional[str] = ..., causation_id: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., object_media_type: _Optional[str] = ..., object_schema: _Optional[str] = ..., signature: _Optional[str] = ...) -> None: ...

class ArtifactRef(_message.Message):
    __slots__ = ("bucket", "key", "digest", "size_bytes", "media_type", "file_name")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    key: str
    digest: str
    size_bytes: int
    media_type: str
    file_name: str
    def __init__(self, bucket: _Optional[str] = ..., key: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., media_type: _Optional[str] = ..., file_name: _Optional[str] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("subject", "predicate", "object", "artifact")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    PREDICATE_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    predicate: str
    object: bytes
    artifact: ArtifactRef
    def __init__(self, subject: _Optional[str] = ..., predicate: _Optional[str] = ..., object: _Optional[bytes] = ..., artifact: _Optional[_Union[ArtifactRef, _Mapping]] = ...) -> None: ...

class Origin(_message.Message):
    __slots__ = ("zone", "offset", "appended_at_unix_ms", "age_ms")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    APPENDED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    zone: str
    offset: int
    appended_at_unix_ms: int
    age_ms: int
    def __init__(self, zone: _Optional[str] = ..., offset: _Optional[int] = ..., appended_at_unix_ms: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("offset", "appended_at_unix_ms", "envelope", "fact", "digest", "origin", "hasher")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    APPENDED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    FACT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    HASHER_FIELD_NUMBER: _ClassVar[int]
    offset: int
    appended_at_unix_ms: int
    envelope: Envelope
    fact: Fact
    digest: bytes
    origin: Origin
    hasher: str
    def __init__(self, offset: _Optional[int] = ..., appended_at_unix_ms: _Optional[int] = ..., envelope: _Optional[_Union[Envelope, _Mapping]] = ..., fact: _Optional[_Union[Fact, _Mapping]] = ..., digest: _Optional[bytes] = ..., origin: _Optional[_Union[Origin, _Mapping]] = ..., hasher: _Optional[str] = ...) -> None: ...

class GapRecord(_message.Message):
    __slots__ = ("first", "last", "reason", "at_unix_ms", "detail", "origin_zone", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_ZONE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    reason: str
    at_unix_ms: int
    detail: str
    origin_zone: str
    count: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., reason: _Optional[str] = ..., at_unix_ms: _Optional[int] = ..., detail: _Optional[str] = ..., origin_zone: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GapSet(_message.Message):
    __slots__ = ("reason", "ranges", "detail", "origin_zone", "since_unix_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_ZONE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    ranges: bytes
    detail: str
    origin_zone: str
    since_unix_ms: int
    def __init__(self, reason: _Optional[str] = ..., ranges: _Optional[bytes] = ..., detail: _Optional[str] = ..., origin_zone: _Optional[str] = ..., since_unix_ms: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable", "hint", "details_json")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_JSON_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    hint: str
    details_json: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., hint: _Optional[str] = ..., details_json: _Optional[str] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ("stream", "envelope", "fact")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    FACT_FIELD_NUMBER: _ClassVar[int]
    stream: str
    envelope: Envelope
    fact: Fact
    def __init__(self, stream: _Optional[str] = ..., envelope: _Optional[_Union[Envelope, _Mapping]] = ..., fact: _Optional[_Union[Fact, _Mapping]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ("offset", "result", "digest", "chain_head", "appended_at_unix_ms", "message_id", "hasher")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    APPENDED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHER_FIELD_NUMBER: _ClassVar[int]
    offset: int
    result: Result
    digest: bytes
    chain_head: bytes
    appended_at_unix_ms: int
    message_id: str
    hasher: str
    def __init__(self, offset: _Optional[int] = ..., result: _Optional[_Union[Result, str]] = ..., digest: _Optional[bytes] = ..., chain_head: _Optional[bytes] = ..., appended_at_unix_ms: _Optional[int] = ..., message_id: _Optional[str] = ..., hasher: _Optional[str] = ...) -> None: ...

class AppendFrame(_message.Message):
    __slots__ = ("stream", "facts", "sequence")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    stream: str
    facts: bytes
    sequence: int
    def __init__(self, stream: _Optional[str] = ..., facts: _Optional[bytes] = ..., sequence: _Optional[int] = ...) -> None: ...

class AppendAck(_message.Message):
    __slots__ = ("sequence", "count", "first_offset", "offsets", "results", "digests", "chain_head", "appended_at_unix_ms", "message_ids", "error", "hasher")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    APPENDED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HASHER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    count: int
    first_offset: int
    offsets: bytes
    results: bytes
    digests: bytes
    chain_head: bytes
    appended_at_unix_ms: int
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    error: Error
    hasher: str
    def __init__(self, sequence: _Optional[int] = ..., count: _Optional[int] = ..., first_offset: _Optional[int] = ..., offsets: _Optional[bytes] = ..., results: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., chain_head: _Optional[bytes] = ..., appended_at_unix_ms: _Optional[int] = ..., message_ids: _Optional[_Iterable[str]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., hasher: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("consumer", "limit", "max_bytes", "wait_ms", "carry_only", "frames", "gaps_after", "after", "ages", "sets", "hashers", "instance", "packed", "filter")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CARRY_ONLY_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    GAPS_AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    AGES_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    HASHERS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    consumer: str
    limit: int
    max_bytes: int
    wait_ms: int
    carry_only: _containers.RepeatedScalarFieldContainer[str]
    frames: bool
    gaps_after: str
    after: int
    ages: bool
    sets: bool
    hashers: _containers.RepeatedScalarFieldContainer[str]
    instance: str
    packed: bool
    filter: FactFilter
    def __init__(self, consumer: _Optional[str] = ..., limit: _Optional[int] = ..., max_bytes: _Optional[int] = ..., wait_ms: _Optional[int] = ..., carry_only: _Optional[_Iterable[str]] = ..., frames: _Optional[bool] = ..., gaps_after: _Optional[str] = ..., after: _Optional[int] = ..., ages: _Optional[bool] = ..., sets: _Optional[bool] = ..., hashers: _Optional[_Iterable[str]] = ..., instance: _Optional[str] = ..., packed: _Optional[bool] = ..., filter: _Optional[_Union[FactFilter, _Mapping]] = ...) -> None: ...

class FactFilter(_message.Message):
    __slots__ = ("subjects", "predicates", "from_zones", "to_zones", "produced_from_unix_ms", "produced_before_unix_ms")
    SUBJECTS_FIELD_NUMBER: _ClassVar[int]
    PREDICATES_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONES_FIELD_NUMBER: _ClassVar[int]
    TO_ZONES_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_FROM_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PRODUCED_BEFORE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    subjects: _containers.RepeatedScalarFieldContainer[str]
    predicates: _containers.RepeatedScalarFieldContainer[str]
    from_zones: _containers.RepeatedScalarFieldContainer[str]
    to_zones: _containers.RepeatedScalarFieldContainer[str]
    produced_from_unix_ms: int
    produced_before_unix_ms: int
    def __init__(self, subjects: _Optional[_Iterable[str]] = ..., predicates: _Optional[_Iterable[str]] = ..., from_zones: _Optional[_Iterable[str]] = ..., to_zones: _Optional[_Iterable[str]] = ..., produced_from_unix_ms: _Optional[int] = ..., produced_before_unix_ms: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("entries", "gaps", "start", "next_offset", "log_id", "end", "chain_head", "frames", "gaps_token", "packed", "unpacked_bytes")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    GAPS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    UNPACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    gaps: _containers.RepeatedCompositeFieldContainer[GapRecord]
    start: int
    next_offset: int
    log_id: str
    end: int
    chain_head: bytes
    frames: _containers.RepeatedCompositeFieldContainer[FetchFrame]
    gaps_token: str
    packed: bytes
    unpacked_bytes: int
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., gaps: _Optional[_Iterable[_Union[GapRecord, _Mapping]]] = ..., start: _Optional[int] = ..., next_offset: _Optional[int] = ..., log_id: _Optional[str] = ..., end: _Optional[int] = ..., chain_head: _Optional[bytes] = ..., frames: _Optional[_Iterable[_Union[FetchFrame, _Mapping]]] = ..., gaps_token: _Optional[str] = ..., packed: _Optional[bytes] = ..., unpacked_bytes: _Optional[int] = ...) -> None: ...

class ConsumerSelection(_message.Message):
    __slots__ = ("consumer", "wait_ms", "gaps_after", "after", "sets")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    GAPS_AFTER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    consumer: str
    wait_ms: int
    gaps_after: str
    after: int
    sets: bool
    def __init__(self, consumer: _Optional[str] = ..., wait_ms: _Optional[int] = ..., gaps_after: _Optional[str] = ..., after: _Optional[int] = ..., sets: _Optional[bool] = ...) -> None: ...

class OffsetSelection(_message.Message):
    __slots__ = ("stream", "buffer", "first", "end")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: Buffer
    first: int
    end: int
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[Buffer, str]] = ..., first: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class TimeSelection(_message.Message):
    __slots__ = ("stream", "buffer", "start_unix_ms", "end_unix_ms")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: Buffer
    start_unix_ms: int
    end_unix_ms: int
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[Buffer, str]] = ..., start_unix_ms: _Optional[int] = ..., end_unix_ms: _Optional[int] = ...) -> None: ...

class FetchFramesRequest(_message.Message):
    __slots__ = ("consumer", "offsets", "times", "max_facts", "max_bytes", "carry_only", "ages", "hashers", "instance", "filter", "columns", "sets")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    MAX_FACTS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    CARRY_ONLY_FIELD_NUMBER: _ClassVar[int]
    AGES_FIELD_NUMBER: _ClassVar[int]
    HASHERS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    consumer: ConsumerSelection
    offsets: OffsetSelection
    times: TimeSelection
    max_facts: int
    max_bytes: int
    carry_only: _containers.RepeatedScalarFieldContainer[str]
    ages: bool
    hashers: _containers.RepeatedScalarFieldContainer[str]
    instance: str
    filter: FactFilter
    columns: _containers.RepeatedScalarFieldContainer[str]
    sets: bool
    def __init__(self, consumer: _Optional[_Union[ConsumerSelection, _Mapping]] = ..., offsets: _Optional[_Union[OffsetSelection, _Mapping]] = ..., times: _Optional[_Union[TimeSelection, _Mapping]] = ..., max_facts: _Optional[int] = ..., max_bytes: _Optional[int] = ..., carry_only: _Optional[_Iterable[str]] = ..., ages: _Optional[bool] = ..., hashers: _Optional[_Iterable[str]] = ..., instance: _Optional[str] = ..., filter: _Optional[_Union[FactFilter, _Mapping]] = ..., columns: _Optional[_Iterable[str]] = ..., sets: _Optional[bool] = ...) -> None: ...

class FetchHead(_message.Message):
    __slots__ = ("log_id", "start", "end", "chain_head", "gaps", "gaps_token", "served_at_unix_ms", "gap_sets", "stream")
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    GAPS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SERVED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    GAP_SETS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    log_id: str
    start: int
    end: int
    chain_head: bytes
    gaps: _containers.RepeatedCompositeFieldContainer[GapRecord]
    gaps_token: str
    served_at_unix_ms: int
    gap_sets: _containers.RepeatedCompositeFieldContainer[GapSet]
    stream: str
    def __init__(self, log_id: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., chain_head: _Optional[bytes] = ..., gaps: _Optional[_Iterable[_Union[GapRecord, _Mapping]]] = ..., gaps_token: _Optional[str] = ..., served_at_unix_ms: _Optional[int] = ..., gap_sets: _Optional[_Iterable[_Union[GapSet, _Mapping]]] = ..., stream: _Optional[str] = ...) -> None: ...

class FetchFrame(_message.Message):
    __slots__ = ("first", "last", "head", "entries", "gap", "skips")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    head: FetchHead
    entries: bytes
    gap: GapRecord
    skips: _containers.RepeatedCompositeFieldContainer[GapSet]
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., head: _Optional[_Union[FetchHead, _Mapping]] = ..., entries: _Optional[bytes] = ..., gap: _Optional[_Union[GapRecord, _Mapping]] = ..., skips: _Optional[_Iterable[_Union[GapSet, _Mapping]]] = ...) -> None: ...

class GetFactRequest(_message.Message):
    __slots__ = ("stream", "from_zone", "message_id", "buffer")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    stream: str
    from_zone: str
    message_id: str
    buffer: Buffer
    def __init__(self, stream: _Optional[str] = ..., from_zone: _Optional[str] = ..., message_id: _Optional[str] = ..., buffer: _Optional[_Union[Buffer, str]] = ...) -> None: ...

class GetFactResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: Entry
    def __init__(self, entry: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...

class GetEvidenceRequest(_message.Message):
    __slots__ = ("stream", "buffer", "heads", "sets")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: Buffer
    heads: _containers.RepeatedScalarFieldContainer[bytes]
    sets: bool
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[Buffer, str]] = ..., heads: _Optional[_Iterable[bytes]] = ..., sets: _Optional[bool] = ...) -> None: ...

class KeptRange(_message.Message):
    __slots__ = ("first", "last", "range_digest", "chain_before", "chain_after")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RANGE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHAIN_BEFORE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_AFTER_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    range_digest: str
    chain_before: bytes
    chain_after: bytes
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., range_digest: _Optional[str] = ..., chain_before: _Optional[bytes] = ..., chain_after: _Optional[bytes] = ...) -> None: ...

class CursorEvidence(_message.Message):
    __slots__ = ("name", "committed", "start", "start_value", "peer_head")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_VALUE_FIELD_NUMBER: _ClassVar[int]
    PEER_HEAD_FIELD_NUMBER: _ClassVar[int]
    name: str
    committed: int
    start: str
    start_value: int
    peer_head: bytes
    def __init__(self, name: _Optional[str] = ..., committed: _Optional[int] = ..., start: _Optional[str] = ..., start_value: _Optional[int] = ..., peer_head: _Optional[bytes] = ...) -> None: ...

class HeadEvidence(_message.Message):
    __slots__ = ("head", "offset")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    offset: int
    def __init__(self, head: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class RestoreEvidence(_message.Message):
    __slots__ = ("first", "at_unix_ms", "was_log_id")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WAS_LOG_ID_FIELD_NUMBER: _ClassVar[int]
    first: int
    at_unix_ms: int
    was_log_id: str
    def __init__(self, first: _Optional[int] = ..., at_unix_ms: _Optional[int] = ..., was_log_id: _Optional[str] = ...) -> None: ...

class GetEvidenceResponse(_message.Message):
    __slots__ = ("log_id", "start", "end", "chain_head", "gaps", "kept", "cursors", "heads", "gap_sets", "restores")
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    GAP_SETS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    log_id: str
    start: int
    end: int
    chain_head: bytes
    gaps: _containers.RepeatedCompositeFieldContainer[GapRecord]
    kept: _containers.RepeatedCompositeFieldContainer[KeptRange]
    cursors: _containers.RepeatedCompositeFieldContainer[CursorEvidence]
    heads: _containers.RepeatedCompositeFieldContainer[HeadEvidence]
    gap_sets: _containers.RepeatedCompositeFieldContainer[GapSet]
    restores: _containers.RepeatedCompositeFieldContainer[RestoreEvidence]
    def __init__(self, log_id: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., chain_head: _Optional[bytes] = ..., gaps: _Optional[_Iterable[_Union[GapRecord, _Mapping]]] = ..., kept: _Optional[_Iterable[_Union[KeptRange, _Mapping]]] = ..., cursors: _Optional[_Iterable[_Union[CursorEvidence, _Mapping]]] = ..., heads: _Optional[_Iterable[_Union[HeadEvidence, _Mapping]]] = ..., gap_sets: _Optional[_Iterable[_Union[GapSet, _Mapping]]] = ..., restores: _Optional[_Iterable[_Union[RestoreEvidence, _Mapping]]] = ...) -> None: ...

class SumFactsRequest(_message.Message):
    __slots__ = ("stream", "buffer", "first", "end", "secret", "range_facts", "bodies", "origin_zone", "origin_first", "origin_end", "shared", "relayed", "carry_only", "receiver_zone", "filter")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    RANGE_FACTS_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_ZONE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIRST_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_END_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    CARRY_ONLY_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ZONE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    stream: str
    buffer: Buffer
    first: int
    end: int
    secret: bytes
    range_facts: int
    bodies: bool
    origin_zone: str
    origin_first: int
    origin_end: int
    shared: bool
    relayed: bool
    carry_only: _containers.RepeatedScalarFieldContainer[str]
    receiver_zone: str
    filter: FactFilter
    def __init__(self, stream: _Optional[str] = ..., buffer: _Optional[_Union[Buffer, str]] = ..., first: _Optional[int] = ..., end: _Optional[int] = ..., secret: _Optional[bytes] = ..., range_facts: _Optional[int] = ..., bodies: _Optional[bool] = ..., origin_zone: _Optional[str] = ..., origin_first: _Optional[int] = ..., origin_end: _Optional[int] = ..., shared: _Optional[bool] = ..., relayed: _Optional[bool] = ..., carry_only: _Optional[_Iterable[str]] = ..., receiver_zone: _Optional[str] = ..., filter: _Optional[_Union[FactFilter, _Mapping]] = ...) -> None: ...

class NamedEntry(_message.Message):
    __slots__ = ("place", "offset", "from_zone", "message_id")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    place: int
    offset: int
    from_zone: str
    message_id: str
    def __init__(self, place: _Optional[int] = ..., offset: _Optional[int] = ..., from_zone: _Optional[str] = ..., message_id: _Optional[str] = ...) -> None: ...

class EntryDescent(_message.Message):
    __slots__ = ("entry", "behind")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    entry: NamedEntry
    behind: NamedEntry
    def __init__(self, entry: _Optional[_Union[NamedEntry, _Mapping]] = ..., behind: _Optional[_Union[NamedEntry, _Mapping]] = ...) -> None: ...

class EntryPath(_message.Message):
    __slots__ = ("origin_zone", "from_zone")
    ORIGIN_ZONE_FIELD_NUMBER: _ClassVar[int]
    FROM_ZONE_FIELD_NUMBER: _ClassVar[int]
    origin_zone: str
    from_zone: str
    def __init__(self, origin_zone: _Optional[str] = ..., from_zone: _Optional[str] = ...) -> None: ...

class SumFactsResponse(_message.Message):
    __slots__ = ("log_id", "log_end", "end", "facts", "size_bytes", "numbers", "counts", "first_sums", "second_sums", "first_places", "last_places", "left_out", "gap_sets", "altered", "altered_count", "descents", "descents_count", "lowest", "highest", "first_entry", "last_entry", "paths", "keys")
    class LeftOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    LOG_END_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_SUMS_FIELD_NUMBER: _ClassVar[int]
    SECOND_SUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PLACES_FIELD_NUMBER: _ClassVar[int]
    LAST_PLACES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    GAP_SETS_FIELD_NUMBER: _ClassVar[int]
    ALTERED_FIELD_NUMBER: _ClassVar[int]
    ALTERED_COUNT_FIELD_NUMBER: _ClassVar[int]
    DESCENTS_FIELD_NUMBER: _ClassVar[int]
    DESCENTS_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    LAST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    log_id: str
    log_end: int
    end: int
    facts: int
    size_bytes: int
    numbers: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    first_sums: _containers.RepeatedScalarFieldContainer[int]
    second_sums: _containers.RepeatedScalarFieldContainer[int]
    first_places: _containers.RepeatedScalarFieldContainer[int]
    last_places: _containers.RepeatedScalarFieldContainer[int]
    left_out: _containers.ScalarMap[str, int]
    gap_sets: _containers.RepeatedCompositeFieldContainer[GapSet]
    altered: _containers.RepeatedCompositeFieldContainer[NamedEntry]
    altered_count: int
    descents: _containers.RepeatedCompositeFieldContainer[EntryDescent]
    descents_count: int
    lowest: int
    highest: int
    first_entry: NamedEntry
    last_entry: NamedEntry
    paths: _containers.RepeatedCompositeFieldContainer[EntryPath]
    keys: bytes
    def __init__(self, log_id: _Optional[str] = ..., log_end: _Optional[int] = ..., end: _Optional[int] = ..., facts: _Optional[int] = ..., size_bytes: _Optional[int] = ..., numbers: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., first_sums: _Optional[_Iterable[int]] = ..., second_sums: _Optional[_Iterable[int]] = ..., first_places: _Optional[_Iterable[int]] = ..., last_places: _Optional[_Iterable[int]] = ..., left_out: _Optional[_Mapping[str, int]] = ..., gap_sets: _Optional[_Iterable[_Union[GapSet, _Mapping]]] = ..., altered: _Optional[_Iterable[_Union[NamedEntry, _Mapping]]] = ..., altered_count: _Optional[int] = ..., descents: _Optional[_Iterable[_Union[EntryDescent, _Mapping]]] = ..., descents_count: _Optional[int] = ..., lowest: _Optional[int] = ..., highest: _Optional[int] = ..., first_entry: _Optional[_Union[NamedEntry, _Mapping]] = ..., last_entry: _Optional[_Union[NamedEntry, _Mapping]] = ..., paths: _Optional[_Iterable[_Union[EntryPath, _Mapping]]] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("first", "last", "reason", "detail")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    reason: str
    detail: str
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("consumer", "through", "ranges", "refusals", "log_id", "peer_head")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_HEAD_FIELD_NUMBER: _ClassVar[int]
    consumer: str
    through: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    log_id: str
    peer_head: bytes
    def __init__(self, consumer: _Optional[str] = ..., through: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., log_id: _Optional[str] = ..., peer_head: _Optional[bytes] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ("cursor_advanced_to",)
    CURSOR_ADVANCED_TO_FIELD_NUMBER: _ClassVar[int]
    cursor_advanced_to: int
    def __init__(self, cursor_advanced_to: _Optional[int] = ...) -> None: ...

class PutFrame(_message.Message):
    __slots__ = ("link", "stream", "sequence", "log_id", "first", "last", "entries", "gap", "gaps", "lease", "served_at_unix_ms", "skips", "gap_sets", "lane", "more")
    LINK_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SERVED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SKIPS_FIELD_NUMBER: _ClassVar[int]
    GAP_SETS_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    link: str
    stream: str
    sequence: int
    log_id: str
    first: int
    last: int
    entries: bytes
    gap: GapRecord
    gaps: _containers.RepeatedCompositeFieldContainer[GapRecord]
    lease: str
    served_at_unix_ms: int
    skips: _containers.RepeatedCompositeFieldContainer[GapSet]
    gap_sets: _containers.RepeatedCompositeFieldContainer[GapSet]
    lane: int
    more: _containers.RepeatedCompositeFieldContainer[PutFrame]
    def __init__(self, link: _Optional[str] = ..., stream: _Optional[str] = ..., sequence: _Optional[int] = ..., log_id: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., entries: _Optional[bytes] = ..., gap: _Optional[_Union[GapRecord, _Mapping]] = ..., gaps: _Optional[_Iterable[_Union[GapRecord, _Mapping]]] = ..., lease: _Optional[str] = ..., served_at_unix_ms: _Optional[int] = ..., skips: _Optional[_Iterable[_Union[GapSet, _Mapping]]] = ..., gap_sets: _Optional[_Iterable[_Union[GapSet, _Mapping]]] = ..., lane: _Optional[int] = ..., more: _Optional[_Iterable[_Union[PutFrame, _Mapping]]] = ...) -> None: ...

class PutAck(_message.Message):
    __slots__ = ("sequence", "inserted", "repeated", "refusals", "through", "chain_head", "refetch_at", "error", "held", "more")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    THROUGH_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HEAD_FIELD_NUMBER: _ClassVar[int]
    REFETCH_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    inserted: int
    repeated: int
    refusals: _containers.RepeatedCompositeFieldContainer[Refusal]
    through: int
    chain_head: bytes
    refetch_at: int
    error: Error
    held: bool
    more: _containers.RepeatedCompositeFieldContainer[PutAck]
    def __init__(self, sequence: _Optional[int] = ..., inserted: _Optional[int] = ..., repeated: _Optional[int] = ..., refusals: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., through: _Optional[int] = ..., chain_head: _Optional[bytes] = ..., refetch_at: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., held: _Optional[bool] = ..., more: _Optional[_Iterable[_Union[PutAck, _Mapping]]] = ...) -> None: ...

class ObjectDescription(_message.Message):
    __slots__ = ("bucket", "key", "media_type", "file_name", "digest", "size_bytes", "link")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TYPE_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    key: str
    media_type: str
    file_name: str
    digest: str
    size_bytes: int
    link: str
    def __init__(self, bucket: _Optional[str] = ..., key: _Optional[str] = ..., media_type: _Optional[str] = ..., file_name: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., link: _Optional[str] = ...) -> None: ...

class PutObjectRequest(_message.Message):
    __slots__ = ("description", "chunk")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    description: ObjectDescription
    chunk: bytes
    def __init__(self, description: _Optional[_Union[ObjectDescription, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutObjectResponse(_message.Message):
    __slots__ = ("digest", "size_bytes", "already_exists")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALREADY_EXISTS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size_bytes: int
    already_exists: bool
    def __init__(self, digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., already_exists: _Optional[bool] = ...) -> None: ...

class GetObjectRequest(_message.Message):
    __slots__ = ("bucket", "key", "digest", "offset")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    key: str
    digest: str
    offset: int
    def __init__(self, bucket: _Optional[str] = ..., key: _Optional[str] = ..., digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class GetObjectResponse(_message.Message):
    __slots__ = ("description", "chunk", "offset")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    description: ObjectDescription
    chunk: bytes
    offset: int
    def __init__(self, description: _Optional[_Union[ObjectDescription, _Mapping]] = ..., chunk: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...
