"""A node checks signatures where keys are configured: of what is appended, and of what a link brings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site
from tests.wire.test_putting import frame, pipeline

from bsfg.batch import FactBatch
from bsfg.errors import BsfgError, ConfigInvalid, SignatureInvalid, SignatureMissing
from bsfg.fact import Message
from bsfg.jsonform import message_to_dict
from bsfg.ports import Buffer, Result
from bsfg.retention import GapReason
from bsfg.sdk.core import ProducerSettings
from bsfg.sdk.producer import AsyncProducer
from bsfg.sdk.signing import Signer, create_key, public_key_text
from bsfg.signatures import TrustedKeys, read_key
from bsfg.testing.facts import message, messages


@dataclass
class Keys:
    """Signers of three keys, of which a zone trusts the first two."""

    signers: list[Signer]
    texts: list[str]

    def row(self, zone: str, more: str = "") -> str:
        """Write the table of a zone."""
        keys = ", ".join(f'"{text}"' for text in self.texts[:2])
        return f"[signing.{zone}]\nkeys = [{keys}]\n{more}\n"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Make three keys."""
    public = [create_key(tmp_path / f"k{number}.key") for number in range(3)]
    signers = [Signer.load(tmp_path / f"k{number}.key") for number in range(3)]
    return Keys(signers, [public_key_text(path) for path in public])


def forged(signed: Message) -> Message:
    """Give a signed message with another envelope."""
    return replace(signed, envelope=replace(signed.envelope, correlation_id="forged"))


def trust(site: Site, zone: str, texts: list[str]) -> None:
    """Let a site go on with these keys, as it would after a new start."""
    signing = TrustedKeys({zone: dict(map(read_key, texts))}, v1=frozenset())
    site.parts.settings = replace(site.parts.settings, signing=signing)


async def refused(site: Site, facts: list[Message], stream: str = STREAM) -> BsfgError:
    """Append facts that must be refused, and give the error."""
    with pytest.raises(BsfgError) as error:
        await site.client().append(stream, FactBatch.from_messages(facts))
    return error.value


async def test_an_append_is_checked(sites: Sites, keys: Keys) -> None:
    """Good signatures of either key pass; a forged, missing, unknown or replayed one is refused, with all beside it."""
    site = await sites(zone_lines=keys.row("plant"))
    old, new, other = keys.signers
    good = [signer.sign_message(message(f"good-{at}"), STREAM) for at, signer in enumerate((old, new))]
    await site.client().append(STREAM, FactBatch.from_messages(good))
    bad = {
        "has a signature that does not fit it": forged(old.sign_message(message("x"), STREAM)),
        "is signed with a key that is not known: 'k2'": other.sign_message(message("x"), STREAM),
        "has a signature that does not fit": old.sign_message(message("x"), "audit"),
    }
    for why, each in bad.items():
        error = await refused(site, [new.sign_message(message("beside"), STREAM), each])
        assert (error.code, error.details["row"]) == ("signature_invalid", 1)
        assert why in error.message
    error = await refused(site, [message("unsigned")])
    assert (error.code, type(error)) == ("signature_missing", SignatureMissing)
    assert "signing key" in error.hint
    many = [old.sign_message(each, STREAM) for each in messages(40)]
    assert (await refused(site, [*many, message("unsigned")])).details["row"] == 40
    assert (await (await site.parts.store(STREAM)).stats()).end == 2


async def test_an_append_by_http_is_checked(sites: Sites, keys: Keys) -> None:
    """The other door has the same rule."""
    site = await sites(zone_lines=keys.row("plant"))
    path = f"/v1/streams/{STREAM}/facts"
    answer = await site.http("POST", path, orjson.dumps(message_to_dict(message("unsigned"))))
    assert (answer.status, answer.json()["code"]) == (422, "signature_missing")


async def test_zones_without_keys_are_not_checked(sites: Sites, keys: Keys) -> None:
    """Keys of one zone say nothing of another: what its facts carry as a signature is carried on unread."""
    site = await sites(zone_lines=keys.row("enterprise"))
    odd = replace(message("odd"), envelope=replace(message("odd").envelope, signature="of somebody else"))
    await site.client().append(STREAM, FactBatch.from_messages([message("plain"), odd]))


async def test_signatures_that_need_not_be_there(sites: Sites, keys: Keys) -> None:
    """Without ``require`` an unsigned fact passes, and a wrong signature still does not."""
    site = await sites(zone_lines=keys.row("plant", "require = false"))
    await site.client().append(STREAM, FactBatch.from_messages([message("unsigned")]))
    error = await refused(site, [forged(keys.signers[0].sign_message(message("x"), STREAM))])
    assert error.code == "signature_invalid"


async def test_version_1_is_allowed_by_its_row_only(sites: Sites, keys: Keys, tmp_path: Path) -> None:
    """A signature that names no stream passes only where the zone's row says so."""
    signed = Signer.load(tmp_path / "k0.key", version=1).sign_message(message("old"), STREAM)
    strict = await sites(zone_lines=keys.row("plant"))
    assert "version 1" in (await refused(strict, [signed])).message
    lenient = await sites(zone_lines=keys.row("plant", "allow_v1 = true"))
    await lenient.client().append(STREAM, FactBatch.from_messages([signed]))


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_what_a_link_brings_is_checked(sites: Sites, keys: Keys, storage: str) -> None:
    """Good facts of a link are put; the others are quarantined by reason, told to the sender, and the link goes on."""
    site, puts = await pipeline(sites, storage=storage, zone_lines=keys.row("enterprise"))
    now = site.parts.clock.now_unix_ms()
    facts = messages(30, from_zone="enterprise")
    signed = [keys.signers[at % 2].sign_message(each, STREAM) for at, each in enumerate(facts)]
    signed[3:5] = [forged(signed[3]), forged(signed[4])]
    signed[9] = facts[9]
    signed[20] = keys.signers[0].sign_message(facts[20], "audit")
    async with puts:
        first = await puts.put(frame(signed[:2], 100, now))
        second = await puts.put(frame(signed, 100, now))
    assert (first.inserted, first.refusals) == (2, [])
    assert (second.inserted, second.repeated, second.through, second.held_code) == (24, 2, 129, "")
    assert [(each.first, each.last, each.reason) for each in second.refusals] == [
        (103, 104, "signature_invalid"),
        (120, 120, "signature_invalid"),
        (109, 109, "signature_missing"),
    ]
    forward = await site.parts.forward(STREAM)
    aside = await forward.quarantine()
    assert sorted(each.key.message_id for each in aside) == [f"0-{at:06}" for at in (3, 4, 9, 20)]
    assert {each.reason for each in aside} == {"signature_invalid", "signature_missing"}
    gaps = [gap for gap in await forward.gaps() if gap.reason == GapReason.QUARANTINED]
    assert {offset for gap in gaps for offset in range(gap.first, gap.last + 1)} == {103, 104, 109, 120}
    assert (await forward.stats()).end == 26


async def test_what_is_here_is_a_repeat(sites: Sites, keys: Keys) -> None:
    """A fact that came before its zone had keys, and comes again, is a repeat and no forgery."""
    site, puts = await pipeline(sites)
    frames = frame(messages(3, from_zone="enterprise"), 0, site.parts.clock.now_unix_ms())
    async with puts:
        assert (await puts.put(frames)).inserted == 3
    trust(site, "enterprise", keys.texts)
    async with site.client().put_stream("from-enterprise", STREAM, "log-of-enterprise") as puts:
        again = await puts.put(frames)
    assert (again.inserted, again.repeated, again.refusals) == (0, 3, [])


async def test_quarantine_is_checked_again(sites: Sites, keys: Keys) -> None:
    """A fact whose key was added after it came can be put again; a forged one stays where it is."""
    site, puts = await pipeline(sites, zone_lines=keys.row("enterprise"))
    other = keys.signers[2]
    late, false = (other.sign_message(each, STREAM) for each in messages(2, from_zone="enterprise"))
    async with puts:
        await puts.put(frame([late, forged(false)], 0, site.parts.clock.now_unix_ms()))
    forward = await site.parts.forward(STREAM)
    ids = {each.key.message_id: each.id for each in await forward.quarantine()}
    site.act_as("operator")
    admin = site.admin_client()
    with pytest.raises(SignatureInvalid, match="a key that is not known"):
        await admin.retry_quarantined(STREAM, ids["0-000000"], "try", Buffer.FORWARD)
    trust(site, "enterprise", keys.texts)
    assert await admin.retry_quarantined(STREAM, ids["0-000000"], "key added", Buffer.FORWARD) == (
        True,
        Result.INSERTED,
    )
    with pytest.raises(SignatureInvalid, match="does not fit"):
        await admin.retry_quarantined(STREAM, ids["0-000001"], "try", Buffer.FORWARD)
    assert [each.key.message_id for each in await forward.quarantine()] == ["0-000001"]
    assert (await forward.stats()).end == 1


async def test_a_producer_fails_alone_or_waits(sites: Sites, keys: Keys, tmp_path: Path) -> None:
    """Without an outbox a refused fact fails by itself; with one it waits for the key that an operator can add."""
    site = await sites(zone_lines=keys.row("plant"))
    good = keys.signers[0].sign_message(message("good"), STREAM)
    async with AsyncProducer(site.grpc_address, stream=STREAM, linger_ms=50) as producer:
        futures = [await producer.send(each) for each in (message("bad"), good)]
        with pytest.raises(SignatureMissing):
            await futures[0]
        assert (await futures[1]).offset == 0
    problems: list[BsfgError] = []
    options: ProducerSettings = {
        "outbox": tmp_path / "outbox",
        "signer": keys.signers[2],
        "on_problem": problems.append,
    }
    async with AsyncProducer(site.grpc_address, stream=STREAM, **options) as producer:
        future = await producer.send(message("early"))
        while not problems:  # noqa: ASYNC110 - it is told by a plain call
            await asyncio.sleep(0.01)
        assert problems[0].code == "signature_invalid"
        trust(site, "plant", keys.texts)
        assert (await future).offset == 1


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("keys = []", "names no key"),
        ('keys = ["ed25519:k0:AAAA"]', "is not a public key"),
        ('keys = ["rsa:k0:AAAA"]', "is not a public key"),
        ('keys = ["nonsense"]', "is not a public key"),
        (f'keys = ["ed25519:a b:{"A" * 43}="]', "is not a key id"),
        (f'keys = ["ed25519:a:{"A" * 43}=", "ed25519:a:{"B" * 42}A="]', "two keys of one id"),
        ("require = true", "keys is missing"),
    ],
)
async def test_rows_that_cannot_be_used(sites: Sites, lines: str, says: str) -> None:
    """A configuration with keys that are none is refused with the place."""
    with pytest.raises(ConfigInvalid, match=says):
        await sites(zone_lines=f"[signing.plant]\n{lines}")
