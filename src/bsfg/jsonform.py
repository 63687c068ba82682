"""The JSON form of messages and entries: JSON Lines files, the HTTP wire and the CLI speak it."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import orjson

from bsfg.canonical import NotJson, canonicalize, parse_literals, write_literals
from bsfg.errors import InvalidFact
from bsfg.fact import JSON_MEDIA_TYPE, ArtifactRef, Entry, Envelope, Fact, Message, is_json

_ARTIFACT_FIELDS = tuple(ArtifactRef.__dataclass_fields__)


def message_to_dict(message: Message) -> dict[str, Any]:
    """Give the JSON form of a message: a JSON object appears as itself, any other as base64."""
    envelope, fact = message.envelope, message.fact
    head = {
        "message_id": envelope.message_id,
        "from_zone": envelope.from_zone,
        "to_zone": envelope.to_zone,
        "produced_at_unix_ms": envelope.produced_at_unix_ms,
        "correlation_id": envelope.correlation_id,
        "causation_id": envelope.causation_id,
        "labels": dict(envelope.labels) or None,
        "object_media_type": envelope.object_media_type,
        "object_schema": envelope.object_schema,
        "signature": envelope.signature,
    }
    body: dict[str, Any] = {"subject": fact.subject, "predicate": fact.predicate}
    if is_json(envelope.object_media_type):
        body["object"] = orjson.Fragment(fact.object)
    else:
        body["object_base64"] = base64.b64encode(fact.object).decode()
    if fact.artifact is not None:
        body["artifact_digest"] = fact.artifact.digest
        body["artifact"] = artifact_to_dict(fact.artifact)
    return {"envelope": {name: value for name, value in head.items() if value is not None}, "fact": body}


def artifact_to_dict(artifact: ArtifactRef) -> dict[str, Any]:
    """Give the JSON form of an artifact reference: its digest, and what else it says."""
    values = {name: getattr(artifact, name) for name in _ARTIFACT_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def entry_to_dict(entry: Entry) -> dict[str, Any]:
    """Give the JSON form of an entry."""
    result: dict[str, Any] = {
        "offset": entry.offset,
        "appended_at_unix_ms": entry.appended_at_unix_ms,
        "digest": entry.digest_text,
    }
    if entry.origin is not None:
        result["origin"] = {
            "zone": entry.origin.zone,
            "offset": entry.origin.offset,
            "appended_at_unix_ms": entry.origin.appended_at_unix_ms,
        }
        if entry.origin.age_ms is not None:
            result["origin"]["age_ms"] = entry.origin.age_ms
    return result | message_to_dict(entry.message)


# What an exported entry adds is accepted and not used, so that an export can be read in again.
_MESSAGE_FIELDS = frozenset({"envelope", "fact", "offset", "appended_at_unix_ms", "digest", "origin"})
_ENVELOPE_FIELDS = frozenset(Envelope.__dataclass_fields__)
_FACT_FIELDS = frozenset(
    {"subject", "predicate", "object", "object_json", "object_base64", "artifact", "artifact_digest"}
)


def message_from_json(line: bytes, **defaults: Any) -> Message:
    """Read the JSON form of a message; ``defaults`` fill envelope fields that it leaves out.

    Numbers inside ``object`` keep their literals: 1.10 stays 1.10. A media type that is not JSON, beside ``object`` or
    ``object_json``, is that of the artifact which the fact refers to, as the message model has it.
    """
    data, literal = _parsed(line)
    if not isinstance(data, dict) or not isinstance(data.get("fact"), dict):
        raise _invalid("message", 'must be an object with "envelope" and "fact"')
    _no_unknown("message", data, _MESSAGE_FIELDS)
    envelope, fact = data.get("envelope", {}), data["fact"]
    if not isinstance(envelope, dict):
        raise _invalid("envelope", "must be an object")
    _no_unknown("envelope", envelope, _ENVELOPE_FIELDS)
    _no_unknown("fact", fact, _FACT_FIELDS)
    merged = {**defaults, **{name: value for name, value in envelope.items() if value is not None}}
    for name in ("from_zone", "to_zone", "produced_at_unix_ms"):
        if name not in merged:
            raise _invalid(name, "is required")
    head = _checked_envelope(merged)
    artifact = _artifact(fact)
    if ("object" in fact or "object_json" in fact) and not is_json(head.object_media_type):
        artifact = _typed(artifact, head.object_media_type)
        head = replace(head, object_media_type=JSON_MEDIA_TYPE)
    body = _object_bytes(fact, literal, head.object_media_type)
    return Message(head, Fact(_text(fact, "subject"), _text(fact, "predicate"), body, artifact))


def _parsed(line: bytes) -> tuple[Any, Any]:
    """Parse a line as plain values and, unless it serialises back to itself, also with its number literals kept."""
    try:
        data = orjson.loads(line)
        if orjson.dumps(data) == line.strip():
            return data, None
        return data, parse_literals(line)
    except NotJson as problem:
        raise _invalid("message", str(problem)) from None
    except orjson.JSONDecodeError as error:
        raise _invalid("message", f"not valid JSON: {error}") from None
    except orjson.JSONEncodeError:
        raise _invalid("message", "containers are nested too deep") from None


def _checked_envelope(merged: dict[str, Any]) -> Envelope:
    labels = merged.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise _invalid("labels", "must be an object of strings")
    produced = merged["produced_at_unix_ms"]
    if isinstance(produced, bool) or not isinstance(produced, int):
        raise _invalid("produced_at_unix_ms", "must be an integer")
    for name, value in merged.items():
        if name not in ("labels", "produced_at_unix_ms") and not isinstance(value, str):
            raise _invalid(name, "must be a string")
    return Envelope(**merged)


def _object_bytes(fact: dict[str, Any], literal: Any, media_type: str) -> bytes:
    given = [name for name in ("object", "object_json", "object_base64") if name in fact]
    if len(given) > 1:
        raise _invalid("object", f"give one of object, object_json, object_base64, not {' and '.join(given)}")
    try:
        if "object_base64" in fact:
            data = base64.b64decode(_text(fact, "object_base64"), validate=True)
            return canonicalize(data) if is_json(media_type) else data
        if "object_json" in fact:
            return canonicalize(_text(fact, "object_json").encode())
        if "object" in fact:
            return canonicalize(_written(fact["object"], literal))
    except NotJson as problem:
        raise _invalid("object", str(problem)) from None
    except ValueError as error:
        raise _invalid("object_base64", f"not valid base64: {error}") from None
    raise _invalid("object", "is required (object, object_json or object_base64)")


def _written(value: Any, literal: Any) -> bytes:
    if literal is None:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return write_literals(literal["fact"]["object"])


def _artifact(fact: dict[str, Any]) -> ArtifactRef | None:
    """Read the reference to an artifact: ``artifact_digest``, the object ``artifact``, or both."""
    if fact.get("artifact") is None and fact.get("artifact_digest") is None:
        return None
    data = {} if fact.get("artifact") is None else fact["artifact"]
    if not isinstance(data, dict):
        raise _invalid("artifact", "must be an object")
    _no_unknown("artifact", data, frozenset(_ARTIFACT_FIELDS))
    given = {name: value for name, value in data.items() if value is not None}
    if fact.get("artifact_digest") is not None:
        digest = _text(fact, "artifact_digest")
        if given.setdefault("digest", digest) != digest:
            raise _invalid("artifact_digest", "differs from the digest in artifact")
    if "digest" not in given:
        raise _invalid("artifact", "lacks digest")
    if ("bucket" in given) != ("key" in given):
        raise _invalid("artifact", "needs bucket and key, or neither")
    size = given.get("size_bytes", 0)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise _invalid("artifact", "size_bytes must be a non-negative integer")
    texts = {name: _text(given, name) for name in given if name != "size_bytes"}
    return ArtifactRef(**texts, size_bytes=given.get("size_bytes"))


def _typed(artifact: ArtifactRef | None, media_type: str) -> ArtifactRef:
    """Give an artifact the media type that stands in the envelope beside a JSON object."""
    if artifact is None:
        rule = f"{media_type} is not JSON: give object_base64, or refer to the artifact that has this type"
        raise _invalid("object_media_type", rule)
    if artifact.media_type not in (None, media_type):
        rule = f"is {media_type}, but the artifact's own media_type is {artifact.media_type}"
        raise _invalid("object_media_type", rule)
    return replace(artifact, media_type=media_type)


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise _invalid(name, "must be a string" if name in data else "is required")
    return value


def _no_unknown(where: str, data: dict[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise _invalid(where, f"has no field {unknown[0]!r}; it knows {', '.join(sorted(known))}")


def _invalid(name: str, rule: str) -> InvalidFact:
    return InvalidFact(f"{name}: {rule}", field=name, rule=rule)
