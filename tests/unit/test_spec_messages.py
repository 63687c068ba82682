"""The messages of the message model document pass as they are written there, and mean what it says they mean."""

import base64
import hashlib
import json
from typing import Any

import pytest

from bsfg.batch import FactBatch
from bsfg.errors import InvalidFact
from bsfg.fact import ArtifactRef
from bsfg.jsonform import message_from_json, message_to_dict
from bsfg.sealing import seal

CONTENT = b"%PDF-1.7 the report of work order 12345"
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
OBJECT_JSON = '{"completed_at":"2026-03-06T14:30:00Z","duration_ms":1250,"result_code":0,"status":"completed"}'

ENVELOPE: dict[str, Any] = {
    "message_id": "6f1c1e0a-4c39-5c86-9d3f-0b1a5a0e9b11",
    "from_zone": "plant-a",
    "to_zone": "enterprise",
    "produced_at_unix_ms": 1772807400000,
    "correlation_id": "order-12345",
    "causation_id": "evt-122",
    "labels": {"priority": "high", "silo": "A"},
}
PLAIN: dict[str, Any] = {
    "envelope": ENVELOPE,
    "fact": {"subject": "work_order:12345", "predicate": "was_completed_by", "object_json": OBJECT_JSON},
}
"""Without an artifact: no object_media_type."""

WITH_ARTIFACT: dict[str, Any] = {
    "envelope": {**ENVELOPE, "object_media_type": "application/pdf", "object_schema": "https://example.com/report/1"},
    "fact": {**PLAIN["fact"], "artifact_digest": DIGEST},
}
"""With an artifact: its digest in the fact, its media type in the envelope."""


def read(message: dict[str, Any], **fact: Any) -> Any:
    """Read a message, with some fields of its fact changed, and give it as it is sealed."""
    changed = {**message, "fact": {**message["fact"], **fact}}
    return seal(FactBatch.from_messages([message_from_json(json.dumps(changed).encode())])).to_messages()[0]


@pytest.mark.parametrize("subject", ["work_order:12345", "assembly:lineA/step42"])
@pytest.mark.parametrize("predicate", ["was_created", "transitioned_to", "has_defect", "was_completed_by"])
def test_a_message_without_an_artifact(subject: str, predicate: str) -> None:
    """Every subject and predicate of the document passes, and all its fields are kept."""
    found = read(PLAIN, subject=subject, predicate=predicate)
    assert (found.fact.subject, found.fact.predicate, found.fact.object) == (subject, predicate, OBJECT_JSON.encode())
    assert found.fact.artifact is None
    written = json.loads(json.dumps(ENVELOPE)) | {"object_media_type": "application/json"}
    assert message_to_dict(found)["envelope"] == written


@pytest.mark.parametrize("media_type", ["application/pdf", "image/png"])
def test_a_message_with_an_artifact(media_type: str) -> None:
    """Beside `object_json` the media type is that of the referenced artifact; the object stays JSON."""
    message = {**WITH_ARTIFACT, "envelope": {**WITH_ARTIFACT["envelope"], "object_media_type": media_type}}
    found = read(message)
    assert found.fact.artifact == ArtifactRef(digest=DIGEST, media_type=media_type)
    assert found.fact.object == OBJECT_JSON.encode()
    assert found.envelope.object_media_type == "application/json"
    assert found.envelope.object_schema == "https://example.com/report/1"


def test_the_object_may_also_be_written_as_a_value() -> None:
    """`object` instead of `object_json` is the same message."""
    fact = {name: value for name, value in WITH_ARTIFACT["fact"].items() if name != "object_json"}
    given = {**WITH_ARTIFACT, "fact": {**fact, "object": json.loads(OBJECT_JSON)}}
    assert read(given) == read(WITH_ARTIFACT)


def test_what_was_written_can_be_read_again() -> None:
    """The JSON form that we write says the same message, and names the digest where the specification has it."""
    for message in (PLAIN, WITH_ARTIFACT):
        found = read(message)
        written = message_to_dict(found)
        assert written["fact"].get("artifact_digest") == message["fact"].get("artifact_digest")
        again = read({**message, "envelope": written["envelope"]}, artifact=written["fact"].get("artifact"))
        assert again == found


@pytest.mark.parametrize("with_digest", [True, False])
def test_the_parts_of_a_reference_are_optional(with_digest: bool) -> None:
    """The digest alone is a reference, beside the object `artifact` or inside it; the rest may be added in any part."""
    rest: list[dict[str, Any]] = [
        {},
        {"size_bytes": 7},
        {"bucket": "b", "key": "k"},
        {"media_type": "application/pdf"},
        {"file_name": "f"},
    ]
    for parts in rest:
        given = {"digest": DIGEST, **parts} if with_digest else parts
        found = read(PLAIN, artifact=given, **({} if with_digest else {"artifact_digest": DIGEST}))
        assert found.fact.artifact == ArtifactRef(digest=DIGEST, **parts)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"object_media_type": "application/pdf"}, {}, "object_media_type", "is not JSON.*give object_base64.*artifact"),
    (
        {"object_media_type": "application/pdf"},
        {"artifact": {"digest": DIGEST, "media_type": "image/png"}},
        "object_media_type",
        "image/png",
    ),
    ({}, {"artifact": {"size_bytes": 3}}, "artifact", "lacks digest"),
    ({}, {"artifact_digest": DIGEST, "artifact": {"digest": "sha256:" + 64 * "0"}}, "artifact_digest", "differs"),
    ({}, {"artifact_digest": 5}, "artifact_digest", "must be a string"),
    ({}, {"artifact_digest": DIGEST[7:]}, "artifact_digest", "sha256:"),
    ({}, {"artifact": {"digest": DIGEST, "bucket": "b"}}, "artifact", "bucket and key"),
    ({}, {"artifact": {"digest": DIGEST, "media_type": 4}}, "media_type", "must be a string"),
]


@pytest.mark.parametrize(("envelope", "fact", "field", "says"), REFUSED)
def test_what_contradicts_itself_is_refused(
    envelope: dict[str, Any], fact: dict[str, Any], field: str, says: str
) -> None:
    """A media type of nothing, two media types, two digests or half a name are refused by name."""
    with pytest.raises(InvalidFact, match=says) as caught:
        read({**PLAIN, "envelope": {**ENVELOPE, **envelope}}, **fact)
    assert caught.value.details["field"] == field


def test_opaque_objects_keep_their_own_media_type() -> None:
    """With `object_base64` the media type is that of the bytes, also beside an artifact."""
    fact = {name: value for name, value in WITH_ARTIFACT["fact"].items() if name != "object_json"}
    given = {**WITH_ARTIFACT, "fact": {**fact, "object_base64": base64.b64encode(b"\x00\x01").decode()}}
    found = read(given)
    assert (found.envelope.object_media_type, found.fact.object) == ("application/pdf", b"\x00\x01")
    assert found.fact.artifact == ArtifactRef(digest=DIGEST)
