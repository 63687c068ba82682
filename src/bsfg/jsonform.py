"""The JSON form of messages and entries: JSON Lines files, the HTTP wire and the CLI speak it."""

from __future__ import annotations

import base64
from typing import Any

import orjson

from bsfg.canonical import NotJson, canonicalize, parse_literals, write_literals
from bsfg.errors import InvalidFact
from bsfg.fact import ArtifactRef, Entry, Envelope, Fact, Message, is_json


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
        body["artifact"] = artifact_to_dict(fact.artifact)
    return {"envelope": {name: value for name, value in head.items() if value is not None}, "fact": body}


def artifact_to_dict(artifact: ArtifactRef) -> dict[str, Any]:
    """Give the JSON form of an artifact reference."""
    result: dict[str, Any] = {
        "bucket": artifact.bucket,
        "key": artifact.key,
        "digest": artifact.digest,
        "size_bytes": artifact.size_bytes,
        "media_type": artifact.media_type,
    }
    if artifact.file_name is not None:
        result["file_name"] = artifact.file_name
    return result


def entry_to_dict(entry: Entry) -> dict[str, Any]:
    """Give the JSON form of an entry."""
    result: dict[str, Any] = {
        "offset": entry.offset,
        "appended_at_unix_ms": entry.appended_at_unix_ms,
        "digest": "sha256:" + entry.digest.hex(),
    }
    if entry.origin is not None:
        result["origin"] = {
            "zone": entry.origin.zone,
            "offset": entry.origin.offset,
            "appended_at_unix_ms": entry.origin.appended_at_unix_ms,
        }
    return result | message_to_dict(entry.message)


# What an exported entry adds is accepted and not used, so that an export can be read in again.
_MESSAGE_FIELDS = frozenset({"envelope", "fact", "offset", "appended_at_unix_ms", "digest", "origin"})
_ENVELOPE_FIELDS = frozenset(Envelope.__dataclass_fields__)
_FACT_FIELDS = frozenset({"subject", "predicate", "object", "object_json", "object_base64", "artifact"})
_ARTIFACT_FIELDS = frozenset(ArtifactRef.__dataclass_fields__)


def message_from_json(line: bytes, **defaults: Any) -> Message:
    """Read the JSON form of a message; ``defaults`` fill envelope fields that it leaves out.

    Numbers inside ``object`` keep their literals: 1.10 stays 1.10.
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
    body = _object_bytes(fact, literal, head.object_media_type)
    artifact = _artifact(fact.get("artifact"))
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
        if given and not is_json(media_type):
            raise _invalid("object", f"{media_type} is not JSON: give object_base64")
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


def _artifact(data: Any) -> ArtifactRef | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise _invalid("artifact", "must be an object")
    _no_unknown("artifact", data, _ARTIFACT_FIELDS)
    missing = [name for name in ("bucket", "key", "digest", "size_bytes", "media_type") if name not in data]
    if missing:
        raise _invalid("artifact", f"lacks {', '.join(missing)}")
    size = data["size_bytes"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise _invalid("artifact", "size_bytes must be a non-negative integer")
    return ArtifactRef(
        _text(data, "bucket"),
        _text(data, "key"),
        _text(data, "digest"),
        size,
        _text(data, "media_type"),
        data.get("file_name"),
    )


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
