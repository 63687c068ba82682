"""The terms of every operation of both listeners: who may call it at all, how much it may bring, and what it costs.

One table drives the handlers of gRPC, the routes of HTTP and the reference page. A caller is judged by it before a byte
of his request is read: whether anybody, any certificate, any identity of the configuration or only some roles may ask.
What the request then names, a stream or a consumer, is judged by the node when it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"
HTTP, PAGES = "http", "dashboard"

SMALL_BYTES = 64 << 10
CONFIRMATION_BYTES = 2 << 20
CHUNK_BYTES_MAX = 1 << 20
SIGN_IN_BYTES = 4 << 10
PAGE_BODY_BYTES = 16 << 10

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
_FETCHED = {"carry_only": 1_000, "hashers": 32}
_CONFIRMATION = {"ranges": 10_000, "refusals": 20_000}
_GAPS = {"gaps": 10_000, "gap_sets": 10_000, "skips": 10_000}


def _boundary(name: str, *actions: str, **terms: object) -> Terms:
    return Terms(name, "bsfg.v1.Boundary", actions, **terms)  # type: ignore[arg-type]


def _admin(name: str, action: str, cost: Cost = Cost.CHEAP, most: Mapping[str, int] | None = None) -> Terms:
    return Terms(name, "bsfg.v1.Admin", (action,), cost=cost, most=most or {}, audited=action == "act")


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
    _boundary("FetchFrames", "fetch", "read", cost=Cost.STREAM, most=_FETCHED),
    _boundary("GetFact", "read"),
    _boundary("GetEvidence", "read", cost=Cost.BYTES, most={"heads": 16}),
    _boundary("ConfirmReceipt", "confirm", message_bytes=CONFIRMATION_BYTES, most=_CONFIRMATION, fields=150_000),
    _boundary(
        "ConfirmReceipts",
        "confirm",
        message_bytes=CONFIRMATION_BYTES,
        cost=Cost.STREAM,
        most=_CONFIRMATION,
        fields=150_000,
    ),
    _boundary("PutFacts", "put", message_bytes=None, cost=Cost.STREAM, most=_GAPS, fields=70_000),
    _boundary("PutObject", "upload", message_bytes=CHUNK_BYTES_MAX, cost=Cost.STREAM),
    _boundary("GetObject", "download", cost=Cost.STREAM),
    _admin("Status", "view", Cost.BYTES),
    _admin("ListConsumers", "view", Cost.BYTES),
    _admin("CreateConsumer", "act"),
    _admin("RetireConsumer", "act", most=_REASON),
    _admin("GetFrontier", "view"),
    _admin("TruncateBefore", "act", most=_REASON),
    _admin("ListGates", "view"),
    _admin("HoldGate", "act", most=_REASON),
    _admin("ReleaseGate", "act", most=_REASON),
    _admin("AcquireLease", "report", Cost.WAITS),
    _admin("RenewLease", "report", Cost.WAITS),
    _admin("ReleaseLease", "report"),
    _admin("ReportLink", "report", most=_REPORT),
    _admin("RecallPeer", "report"),
    _admin("RememberPeer", "report"),
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
