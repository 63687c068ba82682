"""The words that configuration keys choose from."""

from __future__ import annotations

from enum import StrEnum

from bsfg.ports import StartAt


class Role(StrEnum):
    """What an identity is in this zone."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    PEER = "peer"
    PIPELINE = "pipeline"
    OPERATOR = "operator"
    VIEWER = "viewer"


class TokenRole(StrEnum):
    """What the bearer of a token may be."""

    VIEWER = Role.VIEWER
    OPERATOR = Role.OPERATOR


class IdentityFrom(StrEnum):
    """The part of a certificate that names its holder."""

    CN = "cn"
    SAN = "san"


class HasherName(StrEnum):
    """A digest function."""

    SHA256 = "sha256"
    BLAKE3 = "blake3"


class Engine(StrEnum):
    """What moves the facts of a link."""

    SPARK = "spark"
    NATIVE = "native"


class Safety(StrEnum):
    """Whether a stream serves a safety function."""

    NONE = "none"
    SIL = "sil"


class TlsVersion(StrEnum):
    """The TLS versions that may be the lowest allowed one."""

    V1_3 = "1.3"


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log records are written."""

    JSON = "json"
    TEXT = "text"


class Start(StrEnum):
    """Where a consumer that the node creates for a peer begins."""

    EARLIEST = StartAt.EARLIEST
    LATEST = StartAt.LATEST


class Action(StrEnum):
    """What a caller can ask for."""

    APPEND = "append"
    FETCH = "fetch"
    CONFIRM = "confirm"
    READ = "read"
    PUT = "put"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    REPORT = "report"
    VIEW = "view"
    ACT = "act"


MEANINGS: dict[Action, str] = {
    Action.APPEND: "append facts of its zone, or of one it relays for, to the store buffer",
    Action.FETCH: "fetch as a durable consumer of its own; a peer only what it is served",
    Action.CONFIRM: "confirm as a durable consumer of its own",
    Action.READ: "read by key, offset or time, without moving a cursor; a peer only what it is served",
    Action.PUT: "put what a link brought into the forward buffer, as that link's peer may send it",
    Action.UPLOAD: "upload an artifact",
    Action.DOWNLOAD: "download an artifact that a fact names which it may read",
    Action.REPORT: "take the lease of a link and report on it",
    Action.VIEW: "see status, consumers, gates, gaps and quarantine",
    Action.ACT: "hold and release gates, create and retire consumers, truncate, settle quarantine",
}

ROLE_ACTIONS: dict[Role, frozenset[Action]] = {
    Role.PRODUCER: frozenset({Action.APPEND, Action.UPLOAD}),
    Role.CONSUMER: frozenset({Action.FETCH, Action.CONFIRM, Action.READ, Action.DOWNLOAD}),
    Role.PEER: frozenset({Action.FETCH, Action.CONFIRM, Action.READ, Action.DOWNLOAD}),
    Role.PIPELINE: frozenset(
        {Action.PUT, Action.READ, Action.UPLOAD, Action.DOWNLOAD, Action.REPORT, Action.VIEW},
    ),
    Role.OPERATOR: frozenset({Action.VIEW, Action.ACT}),
    Role.VIEWER: frozenset({Action.VIEW}),
}
