"""What a producer says (a fact in its envelope) and what a buffer keeps of it (an entry).

A fact carries with it by which function its digest was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from bsfg.canonical import NotJson, canonicalize_value
from bsfg.errors import InvalidFact

MARK = "$digest"
"""Comes before all labels in their order, because none of theirs may begin with it."""

SHA256_NAME = "sha256"
MARK_BEGINS = f'{{"{MARK}":"'
_name = re.compile(r"[a-z][a-z0-9_-]{0,31}").fullmatch


def digest_text(hasher: str, digest: bytes) -> str:
    """Write a digest as people and programs read it: ``sha256:`` or the name of another function, and 64 digits."""
    return f"{hasher}:{digest.hex()}"


def mark_problem(name: object) -> str | None:
    """Say what is wrong with the name in a mark; whether its function is known is another question."""
    if not isinstance(name, str) or not _name(name):
        return f"{MARK} must name a digest function"
    return f"{MARK} is left out for {SHA256_NAME}" if name == SHA256_NAME else None


def is_marked(text: str | None) -> bool:
    """Tell whether labels, given as their JSON text, hold a mark."""
    return text is not None and text.startswith(MARK_BEGINS)


def function_in(text: str | None) -> str:
    """Give the function that the labels of a row name, given as their JSON text."""
    return text[len(MARK_BEGINS) :].partition('"')[0] if text is not None and is_marked(text) else SHA256_NAME


def unmarked(text: str | None) -> str | None:
    """Give the labels of a row without the mark."""
    if text is None or not is_marked(text):
        return text
    rest = text[len(MARK_BEGINS) :].partition('"')[2]
    return "{" + rest[1:] if rest.startswith(",") else None


def marked(text: str | None, hasher: str) -> str | None:
    """Give the labels of a row with the mark of a function in the place of any other."""
    plain = unmarked(text)
    if hasher == SHA256_NAME:
        return plain
    return f'{MARK_BEGINS}{hasher}"' + ("}" if plain is None else "," + plain[1:])


def own_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Give labels that were read without the mark."""
    return {name: value for name, value in labels.items() if name != MARK}


JSON_MEDIA_TYPE = "application/json"


def is_json(media_type: str) -> bool:
    """Tell whether objects of this media type are canonicalised; any other type is opaque bytes."""
    if media_type == JSON_MEDIA_TYPE:
        return True
    bare = media_type.split(";", 1)[0].strip().lower()
    return bare == JSON_MEDIA_TYPE or bare.endswith("+json")


class Buffer(StrEnum):
    """The two buffers of a stream: what the zone produced, and what other zones sent it."""

    STORE = "store"
    FORWARD = "forward"


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
