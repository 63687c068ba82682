"""Signatures between real nodes: they survive a relay, and no zone on the way takes what is forged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, bsfg, certificates, link_to, peer, serve, until

from bsfg.batch import FactBatch
from bsfg.errors import SignatureInvalid, SignatureMissing
from bsfg.ports import Buffer
from bsfg.sdk.local import LocalReader
from bsfg.sdk.signing import Signer
from bsfg.signatures import TrustedKeys, read_key
from bsfg.testing.facts import message, messages

STREAM = "operational"


async def test_plant_idmz_enterprise(tmp_path: Path, cleanup: Cleanup) -> None:
    """A plant that checks nothing relays over an IDMZ to an enterprise that does: good facts of two keys come through.

    What is unsigned, forged or of another stream is quarantined there and told back, and the link stays open.
    """
    made = [orjson.loads(bsfg("certs", "signing-key", str(tmp_path / f"{name}.key"), "--json")) for name in "ab"]
    again = orjson.loads(bsfg("certs", "signing-key", str(tmp_path / "a.key"), "--json"))
    assert again == made[0]
    texts = [each["key"] for each in made]
    signers = [Signer.load(tmp_path / f"{name}.key") for name in "ab"]
    certs = certificates(tmp_path, "plant-a", "idmz", "enterprise")
    plant, idmz, enterprise = (Zone(name, tmp_path, certs) for name in ("plant-a", "idmz", "enterprise"))
    plant.identities, plant.serve = peer("idmz"), serve("idmz")
    idmz.links, idmz.identities = link_to(plant), peer("plant-a") + peer("enterprise")
    idmz.serve = serve("enterprise", 'buffers = ["store", "forward"]')
    enterprise.links = link_to(idmz, name="over-idmz", more='buffer = "forward"')
    enterprise.identities = peer("idmz", 'relay_for = ["plant-a"]')
    enterprise.more = f"[signing.plant-a]\nkeys = {orjson.dumps(texts).decode()}\n"
    for zone in (plant, idmz, enterprise):
        zone.write()
        cleanup.zone(zone).start()
    facts = messages(20, from_zone="plant-a")
    signed = [signers[at % 2].sign_message(each, STREAM) for at, each in enumerate(facts)]
    signed[5] = replace(signed[5], envelope=replace(signed[5].envelope, correlation_id="forged"))
    signed[6] = facts[6]
    signed[7] = signers[0].sign_message(facts[7], "audit")
    async with plant.client() as producer:
        await producer.append(STREAM, FactBatch.from_messages(signed))
    await until(lambda: enterprise.end(Buffer.FORWARD) == 17)
    ids = [entry.message.envelope.message_id for entry in enterprise.entries(Buffer.FORWARD)]
    assert ids == [each.envelope.message_id for at, each in enumerate(facts) if at not in (5, 6, 7)]
    keys = TrustedKeys({"plant-a": dict(map(read_key, texts))}, v1=frozenset())
    assert len(list(LocalReader(enterprise.data, keys=keys).entries(STREAM, 0))) == 17
    # The relay was told of each, and knows why.
    told = await until(lambda: [gap for gap in idmz.gaps(Buffer.FORWARD) if "signature" in gap.detail])
    assert {offset for gap in told for offset in range(gap.first, gap.last + 1)} == {5, 6, 7}
    later = signers[1].sign_message(message("later", from_zone="plant-a"), STREAM)
    async with plant.client() as producer:
        await producer.append(STREAM, FactBatch.from_messages([later]))
    await until(lambda: enterprise.end(Buffer.FORWARD) == 18)


async def test_a_node_refuses_its_producers(tmp_path: Path, cleanup: Cleanup) -> None:
    """A node of which the zone has keys refuses at the door what is unsigned or forged."""
    text = orjson.loads(bsfg("certs", "signing-key", str(tmp_path / "a.key"), "--json"))["key"]
    signer = Signer.load(tmp_path / "a.key")
    plant = Zone("plant-a", tmp_path, certificates(tmp_path, "plant-a"), more=f'[signing.plant-a]\nkeys = ["{text}"]\n')
    plant.write()
    cleanup.zone(plant).start()
    signed = signer.sign_message(message("one", from_zone="plant-a"), STREAM)
    false = replace(signed, envelope=replace(signed.envelope, to_zone="moon"))
    async with plant.client() as producer:
        with pytest.raises(SignatureMissing):
            await producer.append(STREAM, FactBatch.from_messages([message("two", from_zone="plant-a")]))
        with pytest.raises(SignatureInvalid, match="does not fit"):
            await producer.append(STREAM, FactBatch.from_messages([false]))
        await producer.append(STREAM, FactBatch.from_messages([signed]))
    assert plant.end(Buffer.STORE) == 1
