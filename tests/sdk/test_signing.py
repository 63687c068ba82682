"""Signatures: they cover body and envelope, survive the journey, and are demanded where a key is configured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sdk.test_consumer import filled
from tests.wire.conftest import Sites

from bsfg.batch import EntryBatch, FactBatch
from bsfg.digest import Blake3
from bsfg.errors import CertificateInvalid, FileExists, InvalidArgument, InvalidFact, SignatureInvalid
from bsfg.fact import ArtifactRef, Entry, Envelope, Fact, Message
from bsfg.sdk.consumer import AsyncConsumer
from bsfg.sdk.producer import AsyncProducer
from bsfg.sdk.signing import Signer, TrustedKeys, create_key
from bsfg.sealing import IdStrategy, MessageIds, seal
from bsfg.testing.facts import batch, message, messages

PAYLOAD = MessageIds(IdStrategy.PAYLOAD)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Signer, TrustedKeys]:
    """Give a signer of the zone plant and the keys by which others trust it."""
    folder = tmp_path / "trusted" / "plant"
    folder.mkdir(parents=True)
    public = create_key(tmp_path / "line-7.key")
    public.rename(folder / "line-7.pem")
    return Signer.load(tmp_path / "line-7.key"), TrustedKeys.load(tmp_path / "trusted")


def as_entry(signed: Message) -> Entry:
    """Give a message as a consumer gets it: with the digest of what its body is now."""
    batch = seal(FactBatch.from_messages([signed]))
    return Entry(0, 1, batch.to_messages()[0], batch.digests()[0])


RICH = Message(
    Envelope(
        from_zone="plant",
        to_zone="enterprise",
        produced_at_unix_ms=5,
        message_id="m1",
        correlation_id="c",
        causation_id="d",
        labels={"b": "2", "a": "1"},
        object_schema="urn:x",
    ),
    Fact("batch:B1", "made", b'{"b":1.10, "a":2}', ArtifactRef("b", "k", "sha256:" + "0" * 64, 3, "text/plain")),
)


def test_a_signed_fact_is_trusted(keys: tuple[Signer, TrustedKeys]) -> None:
    """A fact as it was signed passes; it names the key, and its JSON was made canonical first."""
    signer, trusted = keys
    signed = signer.sign_message(RICH, "operational")
    assert (signed.envelope.signature or "").startswith("ed25519.v2:line-7:")
    assert signed.fact.object == b'{"a":2,"b":1.10}'
    trusted.verify(as_entry(signed), "operational")


KNOWN = [
    "ed25519:k:Eq8JkYPMG+T984L1ICe5EK8OvZA7riYct33awD+FB7el02fora1VfCoqEJpkYGxgJJ3WKHKim/fTnKs4qV33BQ==",
    "ed25519.v2:k:0nYiZZDaW8VLM6w5Pka9wJud0P3LTHM/NQdIEF/WmpWOYktHCVEqKCwNZ39L2wnceOjvwCrdoRQAlech71KPBQ==",
]

ALTERED: dict[str, Any] = {
    "to_zone": "moon",
    "produced_at_unix_ms": 6,
    "message_id": "m2",
    "correlation_id": None,
    "causation_id": "e",
    "labels": {"a": "1"},
    "object_schema": None,
}


@pytest.mark.parametrize("field", ALTERED)
def test_every_part_of_the_envelope_is_covered(keys: tuple[Signer, TrustedKeys], field: str) -> None:
    """Whatever of the envelope is exchanged on the way, the signature does not fit any more."""
    signer, trusted = keys
    signed = signer.sign_message(RICH, "operational")
    forged = replace(signed, envelope=replace(signed.envelope, **{field: ALTERED[field]}))
    with pytest.raises(SignatureInvalid, match="does not fit"):
        trusted.verify(as_entry(forged), "operational")


@pytest.mark.parametrize("field", ["subject", "predicate", "object", "artifact"])
def test_the_body_is_covered(keys: tuple[Signer, TrustedKeys], field: str) -> None:
    """Whatever of the fact is exchanged on the way, the signature does not fit any more."""
    signer, trusted = keys
    signed = signer.sign_message(RICH, "operational")
    other: Any = {"subject": "batch:B2", "predicate": "sold", "object": b"1", "artifact": None}[field]
    with pytest.raises(SignatureInvalid, match="does not fit"):
        trusted.verify(as_entry(replace(signed, fact=replace(signed.fact, **{field: other}))), "operational")


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        (None, "is not signed"),
        ("ed25519:other:AAAA", "a key that is not known: 'other'"),
        ("rsa:line-7:AAAA", "in a way that is not known: 'rsa'"),
        ("ed25519:line-7:not base64!", "does not fit"),
        ("ed25519.v2:line-7:" + "A" * 88, "does not fit"),
        ("nonsense", "in a way that is not known: 'nonsense'"),
    ],
)
def test_other_signatures_are_refused(keys: tuple[Signer, TrustedKeys], signature: str | None, why: str) -> None:
    """A missing, foreign or malformed signature is refused with the reason; other zones are not checked."""
    _, trusted = keys
    forged = replace(RICH, envelope=replace(RICH.envelope, signature=signature))
    with pytest.raises(SignatureInvalid, match=why) as refused:
        trusted.verify(as_entry(forged), "operational")
    assert refused.value.details["from_zone"] == "plant"
    trusted.verify(as_entry(replace(forged, envelope=replace(forged.envelope, from_zone="elsewhere"))), "operational")


def test_the_function_of_the_digest_is_covered(keys: tuple[Signer, TrustedKeys]) -> None:
    """A fact of a zone with another digest function is signed with it, and cannot pass for one sealed otherwise."""
    signer, trusted = keys
    signed = signer.sign(seal(FactBatch.from_messages([RICH]), hasher=Blake3()), "operational")
    trusted.check(signed, "operational")
    [entry] = EntryBatch.of(signed.record_batch, np.zeros(1, dtype=np.int64), 1).to_entries()
    trusted.verify(entry, "operational")
    with pytest.raises(SignatureInvalid):
        trusted.verify(replace(entry, hasher="sha256"), "operational")
    message = signer.sign_message(RICH, "operational", hasher="blake3")
    assert message == signed.to_messages()[0]
    with pytest.raises(SignatureInvalid):
        trusted.check(seal(FactBatch.from_messages([message])), "operational")


def test_the_stream_is_covered(keys: tuple[Signer, TrustedKeys]) -> None:
    """A fact that is replayed in another stream does not fit its signature, nor does one whose stream is not known."""
    signer, trusted = keys
    entry = as_entry(signer.sign_message(RICH, "operational"))
    with pytest.raises(SignatureInvalid, match="does not fit"):
        trusted.verify(entry, "audit")
    with pytest.raises(SignatureInvalid, match="signed for a stream"):
        trusted.verify(entry)


def test_signatures_of_version_1(keys: tuple[Signer, TrustedKeys], tmp_path: Path) -> None:
    """What was signed before streams were covered still passes, in any stream, unless it is not allowed any more."""
    _, trusted = keys
    old = Signer.load(tmp_path / "line-7.key", version=1)
    signed = old.sign_message(RICH, "operational")
    assert (signed.envelope.signature or "").startswith("ed25519:line-7:")
    for stream in ("operational", "audit", None):
        trusted.verify(as_entry(signed), stream)
    with pytest.raises(SignatureInvalid, match="version 1, which names no stream"):
        TrustedKeys.load(tmp_path / "trusted", allow_v1=False).verify(as_entry(signed), "operational")
    relabelled = (signed.envelope.signature or "").replace("ed25519:", "ed25519.v2:")
    with pytest.raises(SignatureInvalid, match="does not fit"):
        upgraded = replace(signed, envelope=replace(signed.envelope, signature=relabelled))
        trusted.verify(as_entry(upgraded), "operational")
    with pytest.raises(InvalidArgument, match="version 1 and 2"):
        Signer.load(tmp_path / "line-7.key", version=3)


def test_the_signature_of_a_known_fact() -> None:
    """What version 1 and 2 cover never changes: a key and a message of a file give the same signatures for ever."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    found = [Signer(key, "k", version=each).sign_message(RICH, "operational").envelope.signature for each in (1, 2)]
    assert found == KNOWN


def test_a_key_of_one_zone_does_not_speak_for_another(keys: tuple[Signer, TrustedKeys]) -> None:
    """A zone's facts must be signed by one of its own keys."""
    signer, trusted = keys
    two = TrustedKeys({**trusted.zones, "enterprise": {}})
    signed = signer.sign_message(replace(RICH, envelope=replace(RICH.envelope, from_zone="enterprise")), "operational")
    with pytest.raises(SignatureInvalid, match="with a key that is not known"):
        two.verify(as_entry(signed), "operational")


def test_keys_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Missing folders, other kinds of keys and bad names say what is wrong."""
    from datetime import UTC, datetime

    from bsfg.wire.certs import create_authority

    with pytest.raises(CertificateInvalid, match="no folder"):
        TrustedKeys.load(tmp_path / "none")
    create_authority(tmp_path / "ca", name="x", days=1, now=datetime.now(UTC))
    with pytest.raises(CertificateInvalid, match="not an Ed25519 key"):
        Signer.load(tmp_path / "ca" / "ca.key")
    (tmp_path / "keys" / "plant").mkdir(parents=True)
    (tmp_path / "keys" / "plant" / "a.pem").write_text("nonsense")
    with pytest.raises(CertificateInvalid, match="no readable public key"):
        TrustedKeys.load(tmp_path / "keys")
    create_key(tmp_path / "k.key")
    with pytest.raises(InvalidArgument, match="key id"):
        Signer.load(tmp_path / "k.key", key_id="a:b")
    assert (tmp_path / "k.key").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExists):
        create_key(tmp_path / "k.key")


async def test_from_producer_to_consumer(sites: Sites, keys: tuple[Signer, TrustedKeys]) -> None:
    """What a producer signs is accepted at the other end; an unsigned fact among them stops the consumer there."""
    signer, trusted = keys
    site = await filled(sites, 0)
    async with AsyncProducer(site.grpc_address, stream="operational", signer=signer) as producer:
        futures = [await producer.send(each) for each in messages(400)]
        bad = await producer.send(message("bad", subject="NO"))
        noid = await producer.send(Fact("a:b", "c", b"1"), from_zone="plant", to_zone="x")
        for future in futures:
            await future
        with pytest.raises(InvalidFact, match="subject"):
            await bad
        with pytest.raises(InvalidFact, match="message_id"):
            await noid
        batch = await producer.send_batch(FactBatch.from_messages(messages(10, first=400)))
        await batch
        with pytest.raises(InvalidFact, match="row 0, subject"):
            await (await producer.send_batch(FactBatch.from_messages([message("x", subject="NO")])))
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        await producer.append(message("unsigned"))
    seen: list[Entry] = []
    async with AsyncConsumer("historian", site.grpc_address, keys=trusted) as consumer:
        with pytest.raises(SignatureInvalid, match="offset 410: the fact 'unsigned' of plant is not signed") as refused:
            await consumer.run(seen.append, idle_seconds=0)
        assert len(seen) == 410
        consumer.refuse(refused.value.details["offset"], refused.value.code)
        assert await consumer.run(seen.append, idle_seconds=0) == 0


async def test_from_producer_to_consumer_by_another_function(sites: Sites, keys: tuple[Signer, TrustedKeys]) -> None:
    """A producer that knows the function of its zone signs for it, and a consumer sees which one it was."""
    signer, trusted = keys
    site = await filled(sites, 0, zone_lines='hasher = "blake3"')
    async with AsyncProducer(site.grpc_address, stream="operational", signer=signer, hasher="blake3") as producer:
        appended = [await producer.append(each) for each in messages(5)]
        await (await producer.send_batch(FactBatch.from_messages(messages(100, first=5))))
    seen: list[Entry] = []
    async with AsyncConsumer("historian", site.grpc_address, keys=trusted) as consumer:
        await consumer.run(seen.append, idle_seconds=0)
    assert [entry.message.envelope.message_id for entry in seen] == [m.envelope.message_id for m in messages(105)]
    assert {entry.hasher for entry in seen} == {"blake3"}
    assert [each.digest_text for each in appended] == [entry.digest_text for entry in seen[:5]]


@pytest.mark.parametrize("inbox", [False, True], ids=["from the node", "from an inbox"])
async def test_a_fact_replayed_in_another_stream(
    sites: Sites, keys: tuple[Signer, TrustedKeys], tmp_path: Path, inbox: bool
) -> None:
    """A consumer knows its stream from the node or from its owner, and refuses what was signed for another."""
    signer, trusted = keys
    site = await filled(sites, 0)
    async with AsyncProducer(site.grpc_address, stream="operational") as producer:
        await producer.append(signer.sign_message(message("here"), "operational"))
        await producer.append(signer.sign_message(message("replayed"), "audit"))
    folder = tmp_path / "inbox" if inbox else None
    seen: list[Entry] = []
    async with AsyncConsumer("historian", site.grpc_address, keys=trusted, inbox=folder) as consumer:
        with pytest.raises(SignatureInvalid, match="the fact 'replayed' of plant has a signature that does not fit"):
            await consumer.run(seen.append)
    assert [entry.message.envelope.message_id for entry in seen] == ["here"]
    async with AsyncConsumer("historian", site.grpc_address, keys=trusted, stream="audit", inbox=folder) as consumer:
        entry = await anext(consumer.entries())
    assert entry.message.envelope.message_id == "replayed"


async def test_signing_where_the_zone_derives_ids(sites: Sites, keys: tuple[Signer, TrustedKeys]) -> None:
    """A producer that knows how its zone derives ids signs them too, and the zone agrees."""
    signer, trusted = keys
    site = await filled(sites, 0, zone_lines='message_ids = "payload"')
    async with AsyncProducer(
        site.grpc_address, stream="operational", from_zone="plant", to_zone="enterprise", signer=signer, ids=PAYLOAD
    ) as producer:
        appended = await producer.append(Fact.of("a:b", "c", {"x": 1}))
    async with AsyncConsumer("historian", site.grpc_address, keys=trusted) as consumer:
        entry = await anext(consumer.entries())
    assert entry.message.envelope.message_id == appended.message_id


def test_what_is_wrong_is_named_by_its_row() -> None:
    """Facts of zones without keys are not checked, and still count when a row is named: that row is set aside."""
    lab, plant = batch(3, from_zone="lab"), batch(2)
    facts = FactBatch.concat([lab.slice(0, 2), plant.slice(0, 1), lab.slice(2, 1), plant.slice(1, 1)])
    assert sorted(TrustedKeys({"plant": {}}).problems(facts, "operational")) == [2, 4]
