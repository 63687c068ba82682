"""The terms of every operation of both listeners: who may call it, what it may bring and cost, and its route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import bsfg
from bsfg.wire.service import PIPELINES_MAX
from bsfg.wire.status import STATUSES

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"
HTTP, PAGES = "http", "dashboard"

SMALL_BYTES = 64 << 10
CONFIRMATION_BYTES = 2 << 20
CHUNK_BYTES_MAX = 1 << 20
SIGN_IN_BYTES = 4 << 10
PAGE_BODY_BYTES = 16 << 10

LINKS_AT_ONCE_MAX, LINK_BYTES_MAX = 1_000, 1 << 10
"""How many links one call may be about, and how many bytes each of them may take of it."""

PIPELINE_BYTES_MAX = 4 << 10
"""How many bytes each of the pipelines may take that one process tells of."""

REASON_CHARACTERS_MAX = 1_000
DETAIL_CHARACTERS_MAX = 10_000


class Cost(StrEnum):
    """What an operation costs the node: next to nothing, by its bytes, a wait, or a stream that stays open."""

    CHEAP = "cheap"
    BYTES = "bytes"
    WAITS = "waits"
    STREAM = "stream"


class Asks(StrEnum):
    """What the door asks of a caller: a role that allows it, a row, a certificate or token, a session, or nothing."""

    ROLE = "role"
    ROW = "row"
    CERTIFICATE = "certificate"
    SESSION = "session"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Terms:
    """One operation.

    A role must allow one of ``actions``. ``message_bytes`` is the most that one message may have, None for what the
    configuration allows; ``fields`` the most fields of a large one. ``most`` bounds lists by their length and texts by
    their characters. What is ``audited`` changes something, and who did it is recorded.
    """

    name: str
    service: str
    actions: tuple[str, ...] = ()
    message_bytes: int | None = SMALL_BYTES
    cost: Cost = Cost.CHEAP
    most: Mapping[str, int] = field(default_factory=dict)
    fields: int = 1_000
    asks: Asks = Asks.ROLE
    audited: bool = False

    def limit_bytes(self, message_bytes: int) -> int:
        """Give the most bytes of one message where the configuration allows so many."""
        return message_bytes if self.message_bytes is None else min(self.message_bytes, message_bytes)


_REASON = {"reason": REASON_CHARACTERS_MAX}
_REPORT = {"hold_detail": DETAIL_CHARACTERS_MAX, "reason": DETAIL_CHARACTERS_MAX}
_PIPELINES = {"pipelines": PIPELINES_MAX}
_FETCHED = {"carry_only": 1_000, "hashers": 32}
_FRAMES = {**_FETCHED, "columns": 32}
_CONFIRMATION = {"ranges": 10_000, "refusals": 20_000, "peer_head": 64}
_GAPS = {"gaps": 10_000, "gap_sets": 10_000, "skips": 10_000}


def _boundary(name: str, *actions: str, **terms: object) -> Terms:
    return Terms(name, "bsfg.v1.Boundary", actions, **terms)  # type: ignore[arg-type]


def _admin(name: str, action: str, cost: Cost = Cost.CHEAP, most: Mapping[str, int] | None = None) -> Terms:
    return Terms(name, "bsfg.v1.Admin", (action,), cost=cost, most=most or {}, audited=action == "act")


def _of_many(name: str, field: str, cost: Cost) -> Terms:
    """Give the terms of what a pipeline asks or tells of many links at once."""
    most, limit = {field: LINKS_AT_ONCE_MAX}, LINKS_AT_ONCE_MAX * LINK_BYTES_MAX
    return Terms(name, "bsfg.v1.Admin", ("report",), limit, cost, most, 20 * LINKS_AT_ONCE_MAX)


def _http(name: str, *actions: str, **terms: object) -> Terms:
    return Terms(name, HTTP, actions, **terms)  # type: ignore[arg-type]


def _page(name: str, asks: Asks = Asks.SESSION, message_bytes: int = 0, cost: Cost = Cost.CHEAP) -> Terms:
    audited = name in ("sign_in", "sign_out", "act")
    return Terms(name, PAGES, (), message_bytes, cost, asks=asks, audited=audited)


_TABLE = (
    _boundary("AppendFact", "append", message_bytes=None, cost=Cost.BYTES),
    _boundary("AppendFacts", "append", message_bytes=None, cost=Cost.STREAM),
    _boundary("FetchFacts", "fetch", cost=Cost.WAITS, most=_FETCHED),
    _boundary("FollowFacts", "fetch", cost=Cost.STREAM, most=_FETCHED),
    _boundary("FetchFrames", "fetch", "read", cost=Cost.STREAM, most=_FRAMES),
    _boundary("GetFact", "read"),
    _boundary("GetEvidence", "read", cost=Cost.BYTES, most={"heads": 16}),
    _boundary("SumFacts", "read", cost=Cost.BYTES, most={"carry_only": 1_000, "secret": 32}),
    _boundary("ConfirmReceipt", "confirm", message_bytes=CONFIRMATION_BYTES, most=_CONFIRMATION, fields=150_000),
    _boundary(
        "ConfirmReceipts",
        "confirm",
        message_bytes=CONFIRMATION_BYTES,
        cost=Cost.STREAM,
        most=_CONFIRMATION,
        fields=150_000,
    ),
    _boundary("PutFacts", "put", message_bytes=None, cost=Cost.STREAM, most={**_GAPS, "more": 0}, fields=70_000),
    _boundary("PutLanes", "put", message_bytes=None, cost=Cost.STREAM, most={**_GAPS, "more": 256}, fields=70_000),
    _boundary("PutObject", "upload", message_bytes=CHUNK_BYTES_MAX, cost=Cost.STREAM),
    _boundary("GetObject", "download", cost=Cost.STREAM),
    _admin("Status", "view", Cost.BYTES),
    _admin("ListConsumers", "view", Cost.BYTES),
    _admin("CreateConsumer", "act"),
    _admin("RetireConsumer", "act", most=_REASON),
    _admin("GetFrontier", "view"),
    _admin("TruncateBefore", "act", most=_REASON),
    _admin("Reload", "act"),
    _admin("ListGates", "view"),
    _admin("HoldGate", "act", most=_REASON),
    _admin("ReleaseGate", "act", most=_REASON),
    _admin("AcquireLease", "report", Cost.WAITS),
    _admin("RenewLease", "report", Cost.WAITS),
    _admin("ReleaseLease", "report"),
    _admin("ReportLink", "report", most=_REPORT),
    _of_many("AcquireLeases", "links", Cost.WAITS),
    _of_many("RenewLeases", "leases", Cost.WAITS),
    _of_many("ReportLinks", "reports", Cost.BYTES),
    Terms(
        "ReportPipelines",
        "bsfg.v1.Admin",
        ("report",),
        PIPELINES_MAX * PIPELINE_BYTES_MAX,
        most=_PIPELINES,
        fields=20 * PIPELINES_MAX,
    ),
    _admin("RecallPeer", "report"),
    _admin("RememberPeer", "report"),
    _of_many("RememberPeers", "peers", Cost.BYTES),
    _admin("ListGaps", "view", Cost.BYTES),
    _admin("ListQuarantine", "view", Cost.BYTES),
    _admin("ShowQuarantined", "view", Cost.BYTES),
    _admin("RetryQuarantined", "act", most=_REASON),
    _admin("DropQuarantined", "act", most=_REASON),
    Terms("Check", HEALTH_SERVICE, asks=Asks.CERTIFICATE, most={"service": 200}),
    Terms("List", HEALTH_SERVICE, asks=Asks.ROW),
    Terms("Watch", HEALTH_SERVICE, cost=Cost.STREAM, asks=Asks.ROW, most={"service": 200}),
    Terms("ServerReflectionInfo", REFLECTION_SERVICE, cost=Cost.STREAM, asks=Asks.ROW),
    _http("append", "append", message_bytes=None, cost=Cost.BYTES),
    _http("get", "read", message_bytes=0),
    _http("fetch", "fetch", message_bytes=0, cost=Cost.WAITS),
    _http("tail", "read", message_bytes=0, cost=Cost.STREAM),
    _http("confirm", "confirm", message_bytes=CONFIRMATION_BYTES, most=_CONFIRMATION),
    # An upload is written piece by piece; the artifact store has its own limit.
    _http("put_object", "upload", message_bytes=None, cost=Cost.STREAM),
    _http("get_object", "download", message_bytes=0, cost=Cost.STREAM),
    _http("get_artifact", "download", message_bytes=0, cost=Cost.STREAM),
    _http("get_fact_artifact", "read", message_bytes=0, cost=Cost.STREAM),
    _http("status", "view", message_bytes=0, cost=Cost.BYTES),
    _http("healthz", message_bytes=0, asks=Asks.CERTIFICATE),
    _http("readyz", message_bytes=0, asks=Asks.CERTIFICATE),
    _http("metrics", "view", message_bytes=0, cost=Cost.BYTES),
    _http("openapi", message_bytes=0, asks=Asks.CERTIFICATE),
    _page("home", Asks.NOTHING),
    _page("page", Asks.NOTHING),
    _page("sign_in_page", Asks.NOTHING),
    _page("sign_in", Asks.NOTHING, SIGN_IN_BYTES),
    _page("sign_out"),
    _page("file", Asks.NOTHING),
    _page("session"),
    _page("events", cost=Cost.STREAM),
    _page("facts", cost=Cost.STREAM),
    _page("history", cost=Cost.BYTES),
    _page("doc"),
    _page("gaps", cost=Cost.BYTES),
    _page("all_gaps", cost=Cost.BYTES),
    _page("trail", cost=Cost.BYTES),
    _page("whole_trail", cost=Cost.BYTES),
    _page("quarantine", cost=Cost.BYTES),
    _page("all_quarantine", cost=Cost.STREAM),
    _page("act", message_bytes=PAGE_BODY_BYTES),
)

TERMS: Mapping[tuple[str, str], Terms] = {(each.service, each.name): each for each in _TABLE}
"""Every operation by service and name."""


def terms_of(service: str, name: str) -> Terms:
    """Give the terms of an operation; there is none without."""
    return TERMS[service, name]


JSON = "application/json"
JSON_LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
PROBLEM = "application/problem+json"
BYTES = "application/octet-stream"
TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the query of a request."""

    name: str
    says: str
    kind: str = "integer"
    default: Any = None


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One operation over HTTP: where it is, what it does, what it takes and gives.

    ``bodies`` and ``answers`` map media types to the name of a schema. Who may call it, and how much it takes, stands
    in `TERMS`.
    """

    name: str
    method: str
    path: str
    says: str
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[tuple[str, str], ...] = ()
    answers: tuple[tuple[str, str], ...] = ((JSON, "Object"),)

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")

    @property
    def path_names(self) -> list[str]:
        """The names in the path."""
        return [part[1:].split("}")[0].split(":")[0] for part in self.path.split("/") if part.startswith("{")]


ROUTES: tuple[HttpRoute, ...] = (
    HttpRoute(
        "append",
        "POST",
        "/v1/streams/{stream}/facts",
        "Append one fact as JSON, or many as JSON Lines, and answer when they are durable. Many are appended as a "
        "whole; a conflicting one is answered as such among the results.",
        bodies=((JSON, "Message"), (JSON_LINES, "Messages")),
        answers=((JSON, "Appended"),),
    ),
    HttpRoute(
        "get",
        "GET",
        "/v1/streams/{stream}/facts/{from_zone}/{message_id:path}",
        "Give the fact of a key.",
        parameters=(Parameter("buffer", "store or forward.", "string", "forward"),),
        answers=((JSON, "Entry"),),
    ),
    HttpRoute(
        "fetch",
        "GET",
        "/v1/consumers/{consumer}/facts",
        "Give what follows the last offset that a durable consumer confirmed. As JSON Lines: an entry a line, and a "
        'line {"gap": …} for every range that is not there.',
        parameters=(
            Parameter("limit", "At most this many facts.", default=100),
            Parameter("wait_ms", "How long to wait when there is nothing yet.", default=0),
            Parameter("max_bytes", "At most about this many bytes, but at least one fact.", default=1 << 20),
            Parameter("gaps_after", "The gaps_token of the last answer; the node counts when left out.", "string"),
            Parameter("after", "Go on behind this offset, although what lies before it is not confirmed yet."),
        ),
        answers=((JSON, "Fetched"), (JSON_LINES, "Entries")),
    ),
    HttpRoute(
        "tail",
        "GET",
        "/v1/streams/{stream}/tail",
        "Look on as server-sent events, without a durable consumer: the newest facts that fit, then those that come. "
        "Each event `fact` is an Entry; `gap` is a range that is not there, `skipped` one that was left out for a "
        "reader who is behind or not searched, `restored` says that the history is another, `refused` is an error, and "
        "`end` comes without follow. The id of an event goes into Last-Event-ID to go on behind it.",
        parameters=(
            Parameter("buffer", "store or forward.", "string", "forward"),
            Parameter("subject", "Only this subject; * stands for any text.", "string"),
            Parameter("predicate", "Only this predicate; * stands for any text.", "string"),
            Parameter("from_zone", "Only what this zone said.", "string"),
            Parameter("last", "Begin with the newest so many that fit, 1,000 at most.", default=10),
            Parameter("since_unix_ms", "Begin with what became durable at this moment instead."),
            Parameter("after", "Begin behind the event with this id; the header Last-Event-ID counts first.", "string"),
            Parameter("follow", "Whether to go on with what comes.", "boolean", True),
        ),
        answers=((EVENTS, "Text"),),
    ),
    HttpRoute(
        "confirm",
        "POST",
        "/v1/consumers/{consumer}/confirm",
        "Confirm what was handled: everything through an offset, and ranges beyond it.",
        bodies=((JSON, "Confirmation"),),
        answers=((JSON, "Confirmed"),),
    ),
    HttpRoute(
        "put_object",
        "PUT",
        "/v1/objects/{bucket}/{key:path}",
        "Upload an artifact; the media type is the request's.",
        parameters=(Parameter("digest", 'What the content must have: "sha256:" and 64 digits.', "string"),),
        bodies=((BYTES, "Bytes"),),
        answers=((JSON, "StoredObject"),),
    ),
    HttpRoute(
        "get_object",
        "GET",
        "/v1/objects/{bucket}/{key:path}",
        "Download what this zone calls by a name; its digest is the ETag. What another zone's fact refers to may have "
        "another name here: give its digest, or ask for it by that.",
        parameters=(Parameter("digest", "The content that is meant, whatever the name stands for.", "string"),),
        answers=((BYTES, "Bytes"),),
    ),
    HttpRoute(
        "get_artifact",
        "GET",
        "/v1/artifacts/{digest}",
        'Download an artifact by its digest ("sha256:" and 64 digits); HEAD tells its size. '
        "`Range: bytes=N-` gives, with status 206, what follows the bytes that are there already.",
        answers=((BYTES, "Bytes"),),
    ),
    HttpRoute(
        "get_fact_artifact",
        "GET",
        "/v1/streams/{stream}/artifacts/{from_zone}/{message_id:path}",
        "Download the artifact that the fact of a key refers to.",
        parameters=(Parameter("buffer", "store or forward.", "string", "forward"),),
        answers=((BYTES, "Bytes"),),
    ),
    HttpRoute("status", "GET", "/v1/status", "Streams, consumers, links and artifacts at this moment."),
    HttpRoute("healthz", "GET", "/healthz", "200 while the process works."),
    HttpRoute("readyz", "GET", "/readyz", "200 when the node serves, 503 otherwise."),
    HttpRoute("metrics", "GET", "/metrics", "The metrics in the form of Prometheus.", answers=((TEXT, "Text"),)),
    HttpRoute("openapi", "GET", "/openapi.json", "This document."),
)

_INTEGER: dict[str, Any] = {"type": "integer"}
_STRING: dict[str, Any] = {"type": "string"}
_ENVELOPE: dict[str, Any] = {
    "type": "object",
    "required": ["to_zone", "produced_at_unix_ms"],
    "properties": {
        "message_id": {**_STRING, "description": "Left out where the zone derives ids."},
        "from_zone": {**_STRING, "description": "The node's zone when left out."},
        "to_zone": _STRING,
        "produced_at_unix_ms": _INTEGER,
        "correlation_id": _STRING,
        "causation_id": _STRING,
        "labels": {"type": "object", "additionalProperties": _STRING},
        "object_media_type": {
            **_STRING,
            "default": JSON,
            "description": "Of the object; another type than JSON beside object or object_json is the artifact's.",
        },
        "object_schema": _STRING,
        "signature": _STRING,
    },
}
_FACT: dict[str, Any] = {
    "type": "object",
    "required": ["subject", "predicate"],
    "properties": {
        "subject": _STRING,
        "predicate": _STRING,
        "object": {"description": "Any JSON value; its numbers keep their literals."},
        "object_json": {**_STRING, "description": "The same as a text."},
        "object_base64": {**_STRING, "description": "Bytes of another media type."},
        "artifact_digest": {**_STRING, "description": "Refers to an artifact, and is enough."},
        "artifact": {
            "type": "object",
            "description": "What else is known of it; what is left out is filled in.",
            "properties": {
                "bucket": _STRING,
                "key": _STRING,
                "digest": _STRING,
                "size_bytes": _INTEGER,
                "media_type": _STRING,
                "file_name": _STRING,
            },
        },
    },
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_DIGEST = {**_STRING, "example": "sha256:" + 64 * "0"}
_RESULT = {"enum": ["inserted", "already_exists", "conflict"]}
SCHEMAS: dict[str, Any] = {
    "Object": {"type": "object"},
    "Bytes": {**_STRING, "format": "binary"},
    "Text": _STRING,
    "Envelope": _ENVELOPE,
    "Fact": _FACT,
    "Message": _object(envelope=_ref("Envelope"), fact=_ref("Fact")) | {"required": ["fact"]},
    "Messages": {**_STRING, "description": "One Message per line."},
    "Entry": _object(
        offset=_INTEGER,
        appended_at_unix_ms=_INTEGER,
        digest=_DIGEST,
        origin=_object(zone=_STRING, offset=_INTEGER, appended_at_unix_ms=_INTEGER, age_ms=_INTEGER),
        envelope=_ref("Envelope"),
        fact=_ref("Fact"),
    ),
    "Entries": {**_STRING, "description": 'One Entry per line, or {"gap": GapRecord}.'},
    "Appended": _object(
        results=_list(_object(result=_RESULT, offset=_INTEGER, message_id=_STRING, digest=_DIGEST)),
        chain_head=_STRING,
        appended_at_unix_ms=_INTEGER,
    ),
    "GapRecord": _object(
        first=_INTEGER,
        last=_INTEGER,
        reason=_STRING,
        at_unix_ms=_INTEGER,
        detail=_STRING,
        origin_zone=_STRING,
        count=_INTEGER,
    ),
    "Fetched": _object(
        entries=_list(_ref("Entry")),
        gaps={
            **_list(_ref("GapRecord")),
            "description": "Records of other zones (origin_zone), given until confirmed; then ranges without entries.",
        },
        start=_INTEGER,
        next_offset={**_INTEGER, "description": "Confirm through next_offset - 1."},
        end=_INTEGER,
        log_id=_STRING,
        gaps_token={**_STRING, "description": "Names the last gap record of another zone, for gaps_after."},
    ),
    "Confirmation": _object(
        through=_INTEGER,
        ranges=_list({**_list(_INTEGER), "minItems": 2, "maxItems": 2}),
        refusals=_list(_object(first=_INTEGER, last=_INTEGER, reason=_STRING, detail=_STRING)),
        log_id=_STRING,
    ),
    "Confirmed": _object(cursor_advanced_to=_INTEGER),
    "StoredObject": _object(
        bucket=_STRING, key=_STRING, digest=_DIGEST, size_bytes=_INTEGER, already_exists={"type": "boolean"}
    ),
    "Problem": _object(
        type=_STRING,
        title=_STRING,
        status=_INTEGER,
        detail=_STRING,
        code={"enum": sorted(STATUSES)},
        retryable={"type": "boolean"},
        hint=_STRING,
        details={"type": "object"},
    ),
}


def openapi() -> dict[str, Any]:
    """Write the OpenAPI document of all operations."""
    paths: dict[str, Any] = {}
    for operation in ROUTES:
        paths.setdefault(operation.template, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "BSFG",
            "version": bsfg.__version__,
            "description": "The boundary of a zone as JSON over HTTP. Callers show a client certificate, or a token.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }


def _described(operation: HttpRoute) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _STRING} for name in operation.path_names
    ] + [
        {
            "name": each.name,
            "in": "query",
            "description": each.says,
            "schema": {"type": each.kind} | ({"default": each.default} if each.default is not None else {}),
        }
        for each in operation.parameters
    ]
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.says,
        "parameters": parameters,
        "responses": {
            "200": {"description": "Done.", "content": _content(operation.answers)},
            "default": {"description": "An error.", "content": _content(((PROBLEM, "Problem"),))},
        },
    }
    if operation.bodies:
        described["requestBody"] = {"required": True, "content": _content(operation.bodies)}
    return described


def _content(kinds: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    return {media_type: {"schema": _ref(name)} for media_type, name in kinds}
