"""Message ids that the zone derives: the node's are the producer's, and they never change without a word."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.journey.zones import append
from tests.wire.conftest import Sites
from tests.wire.site import STREAM

from bsfg import AsyncProducer
from bsfg.batch import FactBatch
from bsfg.clock import SystemClock
from bsfg.config import parse
from bsfg.errors import ConfigInvalid, StorageFailed
from bsfg.fact import Envelope, Fact, Message
from bsfg.node.node import Node
from bsfg.node.parts import NodeContext
from bsfg.node.state import check_ids
from bsfg.ports import StoreBuffer
from bsfg.sealing import IdStrategy, MessageIds, seal
from bsfg.stores.log.storage import LogStorage

FIELDS = ("produced_at_unix_ms",)
MESSAGE = Message(Envelope("plant", "enterprise", 5, labels={"silo": "A"}), Fact("a:b", "measured", b"{}"))
STRATEGIES = {
    'message_ids = "message"': MessageIds(IdStrategy.MESSAGE),
    'message_ids = "semantic"\nsemantic_fields = ["to_zone", "labels.silo"]': MessageIds(
        IdStrategy.SEMANTIC, ("to_zone", "labels.silo")
    ),
    'message_ids = "semantic-v1"\nsemantic_fields = ["labels"]': MessageIds(IdStrategy.SEMANTIC_V1, ("labels",)),
}


@pytest.mark.parametrize("lines", STRATEGIES)
async def test_node_and_producer_derive_the_same_id(sites: Sites, lines: str) -> None:
    """The id that the SDK derives is the one that the node derives, and a repeat is known by it."""
    site = await sites(zone_lines=lines)
    expected = seal(FactBatch.from_messages([MESSAGE]), ids=STRATEGIES[lines]).values("message_id")[0]
    async with AsyncProducer(site.grpc_address, stream=STREAM) as producer:
        assert (await producer.append(MESSAGE)).message_id == expected
    async with AsyncProducer(site.grpc_address, stream=STREAM, ids=STRATEGIES[lines]) as producer:
        again = await producer.append(MESSAGE)
    assert (again.message_id, again.offset) == (expected, 0)
    sent = await site.http("POST", f"/v1/streams/{STREAM}/facts", json.dumps(FORM))
    [result] = sent.json()["results"]
    assert (result["message_id"], result["result"]) == (expected, "already_exists")


FORM = {
    "envelope": {"from_zone": "plant", "to_zone": "enterprise", "produced_at_unix_ms": 5, "labels": {"silo": "A"}},
    "fact": {"subject": "a:b", "predicate": "measured", "object_json": "{}"},
}


async def test_the_id_of_the_full_message_over_http(sites: Sites) -> None:
    """What is sent as the specification writes it gets the SHA-256 of exactly that, as plain JSON."""
    site = await sites(zone_lines='message_ids = "message"')
    text = json.dumps(FORM, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    sent = await site.http("POST", f"/v1/streams/{STREAM}/facts", text)
    assert sent.json()["results"][0]["message_id"] == hashlib.sha256(text.encode()).hexdigest()


def config(folder: Path, ids: str, fields: tuple[str, ...] = FIELDS) -> str:
    """Write the configuration of a node that listens in the clear."""
    return f"""
[zone]
name = "plant"
data_folder = "{folder}"
message_ids = "{ids}"
semantic_fields = {json.dumps(fields)}
[listen]
plaintext = true
plaintext_identity = "app"
grpc = "127.0.0.1:0"
http_enabled = false
[identities.app]
zone = "plant"
roles = ["producer"]
streams = ["*"]
to_zones = ["*"]
[streams.operational]
"""


@pytest.mark.parametrize("written", [IdStrategy.SEMANTIC_V1, IdStrategy.SEMANTIC])
async def test_ids_do_not_change_in_silence(tmp_path: Path, written: IdStrategy) -> None:
    """A zone whose facts have ids of the older formula does not start with the newer one; with its own it does."""
    storage = await LogStorage.open(tmp_path)
    sealed = seal(FactBatch.from_messages([MESSAGE]), ids=MessageIds(written, FIELDS))
    await append(await storage.store("operational"), sealed, clock=SystemClock())
    await storage.close()
    for ids in (IdStrategy.SEMANTIC_V1, IdStrategy.SEMANTIC):
        node = Node(parse(config(tmp_path, ids), tmp_path / "zone.toml"))
        if (written, ids) == (IdStrategy.SEMANTIC_V1, IdStrategy.SEMANTIC):
            with pytest.raises(ConfigInvalid, match="gives other ids") as caught:
                await node.start()
            assert "semantic-v1" in caught.value.hint
        else:
            await node.start()
            await node.stop()


async def test_a_stream_that_cannot_be_opened_does_not_stop_the_check(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the ids looks at the streams that are there and leaves one that is out of service to recovery."""
    site = await sites(zone_lines='message_ids = "semantic"\nsemantic_fields = ["to_zone"]')
    asked = []

    async def failing(parts: NodeContext, stream: str) -> StoreBuffer:
        asked.append(stream)
        raise StorageFailed("the disk does not answer")

    monkeypatch.setattr(NodeContext, "store", failing)
    await check_ids(site.parts, "plant")
    assert asked == list(site.parts.settings.streams)
