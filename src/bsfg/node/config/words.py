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
