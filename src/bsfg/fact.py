"""What a producer says (a fact in its envelope) and what a buffer keeps of it (an entry).

These are the objects of applications and of the CLI. Hot paths work on `bsfg.batch.FactBatch` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from bsfg.canonical import NotJson, canonicalize_value
from bsfg.errors import InvalidFact
from bsfg.sealmark import SHA256_NAME, digest_text

JSON_MEDIA_TYPE = "application/json"


def is_json(media_type: str) -> bool:
    """Tell whether objects of this media type are canonicalised; any other type is opaque bytes."""
    if media_type == JSON_MEDIA_TYPE:
        return True
    bare = media_type.split(";", 1)[0].strip().lower()
    return bare == JSON_MEDIA_TYPE or bare.endswith("+json")


class Key(NamedTuple):
    """The idempotency key inside a stream: who said it, and the id the producer gave it."""

    from_zone: str
    message_id: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """The system's half of a message: identity, zones, time, correlation and labels."""

    from_zone: str
    to_zone: str
    produced_at_unix_ms: int
    message_id: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    object_media_type: str = JSON_MEDIA_TYPE
    object_schema: str | None = None
    signature: str | None = None


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """Content kept outside the log, pinned by its digest: ``ArtifactRef(digest="sha256:…")`` says enough.

    Bucket and key, both or neither, are what one zone calls it. What is left out is filled in by the node that the
    fact is appended to.
    """

    bucket: str | None = None
    key: str | None = None
    digest: str = ""
    size_bytes: int | None = None
    media_type: str | None = None
    file_name: str | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """The domain's half of a message: subject, predicate, object, and perhaps an artifact."""

    subject: str
    predicate: str
    object: bytes = b"null"
    artifact: ArtifactRef | None = None

    @staticmethod
    def of(subject: str, predicate: str, value: Any, artifact: ArtifactRef | None = None) -> Fact:
        """Make a fact whose object is a Python value, written as canonical JSON."""
        try:
            return Fact(subject, predicate, canonicalize_value(value), artifact)
        except NotJson as problem:
            raise InvalidFact(f"object: {problem}", field="object", rule=str(problem)) from None

    def value(self) -> Any:
        """Parse the object as JSON."""
        return orjson.loads(self.object)


@dataclass(frozen=True, slots=True)
class Message:
    """One fact in its envelope."""

    envelope: Envelope
    fact: Fact


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an entry of a forward buffer came from: the zone it was pulled from, and its place and time there.

    ``age_ms`` is how old the fact was when it was put, counted from its first append in any zone. Each sender counts
    by its own clock alone, so that neither skew nor the number of hops changes it; None when the sender did not tell.
    """

    zone: str
    offset: int
    appended_at_unix_ms: int
    age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored fact: the message with its offset, the time it became durable, its digest and its origin.

    ``hasher`` names the function that the digest was made by, which is that of the zone that said the fact.
    """

    offset: int
    appended_at_unix_ms: int
    message: Message
    digest: bytes
    origin: Origin | None = None
    hasher: str = SHA256_NAME

    @property
    def digest_text(self) -> str:
        """The digest as it is written for people: the name of its function, and 64 hexadecimal digits."""
        return digest_text(self.hasher, self.digest)

    @property
    def key(self) -> Key:
        """The idempotency key of this entry inside its stream."""
        return Key(self.message.envelope.from_zone, self.message.envelope.message_id or "")

    def age_seconds(self, now_unix_ms: int) -> float:
        """Give how old the fact is at a moment, told by the clock of the zone whose entry this is.

        The count begins with the first append in any zone, and each zone on the way counted by its own clock. Of an
        entry that came without an age it begins with the time at the zone that it was pulled from.
        """
        here_ms = now_unix_ms - self.appended_at_unix_ms
        if self.origin is None:
            return max(0.0, here_ms / 1000)
        if self.origin.age_ms is None:
            return max(0.0, (now_unix_ms - self.origin.appended_at_unix_ms) / 1000)
        return max(0.0, (here_ms + max(0, self.origin.age_ms)) / 1000)
