"""Zones with different digest functions: each fact keeps the digest of its zone, wherever it goes."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, bsfg, certificates, link_to, pair, peer, serve, until
from tests.wire.entries import fetch_entries

from bsfg.config import load
from bsfg.errors import ConfigInvalid, HasherUnknown
from bsfg.fact import Key
from bsfg.node.node import Node
from bsfg.ports import Buffer, OriginSpan
from bsfg.sdk.local import LocalReader
from bsfg.testing.facts import batch, messages, sealed
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.tls import client_context

STREAM = "operational"
FUNCTIONS = {"plant-a": "blake3", "idmz": "sha256", "enterprise": "sha256"}


def texts(zone: Zone, buffer: Buffer) -> set[tuple[str, str]]:
    """Give who said the facts of a buffer, and by which function their digests are."""
    return {(entry.message.envelope.from_zone, entry.digest_text.partition(":")[0]) for entry in zone.entries(buffer)}


def get(zone: Zone, path: str) -> Any:
    """Ask a node over HTTP."""
    connection = HTTPSConnection(
        "127.0.0.1", zone.http_port, context=client_context(zone.files(f"{zone.name}-consumer")), timeout=30
    )
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        data = answer.read()
    assert answer.status == 200, data
    return orjson.loads(data)


def start(zones: list[Zone], cleanup: Cleanup) -> None:
    """Start zones."""
    for zone in zones:
        zone.write()
        cleanup.zone(zone).start()


async def test_facts_keep_the_function_of_their_zone(tmp_path: Path, cleanup: Cleanup) -> None:
    """Both directions of a link work, and everything that shows a digest says by which function it is."""
    plant, enterprise = pair(tmp_path)
    plant.hasher = "blake3"
    start([plant, enterprise], cleanup)
    async with plant.client() as producer, enterprise.client() as other:
        appended = await producer.append(STREAM, batch(30, from_zone="plant-a"))
        single = await producer.append_fact(STREAM, messages(1, first=30, from_zone="plant-a")[0])
        theirs = await other.append(STREAM, batch(20, from_zone="enterprise"))
    assert (appended.hasher, single.hasher, theirs.hasher) == ("blake3", "blake3", "sha256")
    await until(lambda: enterprise.end(Buffer.FORWARD) == 31 and plant.end(Buffer.FORWARD) == 20)
    assert texts(enterprise, Buffer.FORWARD) == texts(plant, Buffer.STORE) == {("plant-a", "blake3")}
    assert texts(plant, Buffer.FORWARD) == texts(enterprise, Buffer.STORE) == {("enterprise", "sha256")}
    expected = "blake3:" + bytes(appended.digests[0]).hex()
    async with enterprise.client("consumer") as consumer:
        entry = await consumer.get_fact(STREAM, Key("plant-a", "0-000000"))
    assert entry is not None
    assert entry.digest_text == expected
    assert get(enterprise, f"/v1/streams/{STREAM}/facts/plant-a/0-000000")["digest"] == expected
    [latest, *_] = LocalReader(enterprise.data).entries(STREAM, 0)
    assert latest.digest_text == expected
    for zone in (plant, enterprise):
        assert orjson.loads(bsfg("verify", str(zone.data), "--json"))["problems"] == []


async def test_the_command_line_shows_the_function(tmp_path: Path, cleanup: Cleanup) -> None:
    """What `bsfg append` prints names it."""
    plant, _ = pair(tmp_path)
    plant.hasher = "blake3"
    start([plant], cleanup)
    lines, files = tmp_path / "facts.jsonl", plant.files("plant-a-producer")
    fact = {"subject": "a:b", "predicate": "c", "object": 1}
    lines.write_bytes(orjson.dumps({"envelope": {"message_id": "a", "to_zone": "enterprise"}, "fact": fact}))
    node = ["--address", f"127.0.0.1:{plant.port}", "--server-name", "plant-a-bsfg", "--ca", str(files.ca)]
    caller = ["--cert", str(files.certificate), "--key", str(files.key), "--from-zone", "plant-a"]
    [answer, *_] = bsfg("append", str(lines), "--stream", STREAM, "--results", *node, *caller).splitlines()
    [entry] = plant.entries(Buffer.STORE)
    assert orjson.loads(answer)["digest"] == entry.digest_text == "blake3:" + entry.digest.hex()


async def test_a_relay_with_another_function_carries_on(tmp_path: Path, cleanup: Cleanup) -> None:
    """A relay keeps digests as they came; its forward buffer holds several functions side by side."""
    certs = certificates(tmp_path, *FUNCTIONS)
    plant, idmz, enterprise = zones = [Zone(name, tmp_path, certs, hasher=FUNCTIONS[name]) for name in FUNCTIONS]
    plant.identities, plant.serve = peer("idmz"), serve("idmz")
    idmz.links, idmz.identities = link_to(plant), peer("plant-a") + peer("enterprise")
    idmz.serve = serve("enterprise", 'buffers = ["store", "forward"]')
    enterprise.links = link_to(idmz) + link_to(idmz, name="over-idmz", more='buffer = "forward"')
    enterprise.identities = peer("idmz", 'relay_for = ["plant-a"]')
    start(zones, cleanup)
    for zone in (plant, idmz):
        async with zone.client() as producer:
            await producer.append(STREAM, batch(25, from_zone=zone.name))
    await until(lambda: enterprise.end(Buffer.FORWARD) == 50)
    assert texts(enterprise, Buffer.FORWARD) == {("plant-a", "blake3"), ("idmz", "sha256")}
    said = {entry.key: entry.digest for zone in (plant, idmz) for entry in zone.entries(Buffer.STORE)}
    assert {entry.key: entry.digest for entry in enterprise.entries(Buffer.FORWARD)} == said


async def test_a_zone_may_change_its_function(tmp_path: Path, cleanup: Cleanup) -> None:
    """The history then holds both; what was said before is still known when it is said again, and all of it travels."""
    plant, enterprise = pair(tmp_path)
    start([plant, enterprise], cleanup)
    async with plant.client() as producer:
        await producer.append(STREAM, batch(10, from_zone="plant-a"))
    plant.hasher = "blake3"
    plant.restart()
    async with plant.client() as producer:
        again = await producer.append(STREAM, batch(20, from_zone="plant-a"))
    assert again.receipt.results.tolist() == [1] * 10 + [0] * 10
    await until(lambda: enterprise.end(Buffer.FORWARD) == 20)
    functions = [entry.hasher for entry in enterprise.entries(Buffer.FORWARD)]
    assert functions == ["sha256"] * 10 + ["blake3"] * 10
    # The same facts over another path, sealed by the other function, are no conflict either.
    plant.stop()
    enterprise.stop()
    async with Node(load(enterprise.folder / "zone.toml")) as node:
        facts = sealed(messages(20, from_zone="plant-a"))
        span = OriginSpan("idmz", np.arange(20), np.full(20, 1))
        receipt = await (await node.parts.forward(STREAM)).put_if_absent(facts, span)
        assert receipt.results.tolist() == [1] * 20
    assert orjson.loads(bsfg("verify", str(plant.data), "--json"))["problems"] == []


async def test_derived_ids_hold_a_zone_to_its_function(tmp_path: Path, cleanup: Cleanup) -> None:
    """With other ids a retry would be stored twice: a node that derives them does not start with another function."""
    plant, _ = pair(tmp_path)
    plant.hasher = 'blake3"\nmessage_ids = "payload'
    start([plant], cleanup)
    async with plant.client() as producer:
        said = batch(2, from_zone="plant-a")
        answer = await producer.append(STREAM, said.with_columns(message_id=pa.nulls(2, pa.string())))
    assert answer.message_ids == [bytes(row).hex() for row in answer.digests]
    plant.stop()
    plant.hasher = 'sha256"\nmessage_ids = "payload'
    plant.write()
    with pytest.raises(ConfigInvalid, match="blake3"):
        async with Node(load(plant.folder / "zone.toml")):
            pass


async def test_a_peer_without_the_extra_is_held_and_loses_nothing(
    tmp_path: Path, cleanup: Cleanup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver that cannot check the digests holds its link and says why; with the extra it takes everything."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / "blake3.py").write_text("raise ModuleNotFoundError(\"No module named 'blake3'\", name='blake3')\n")
    plant, enterprise = pair(tmp_path)
    plant.hasher = "blake3"
    start([plant], cleanup)
    async with plant.client() as producer:
        await producer.append(STREAM, batch(10, from_zone="plant-a"))
    enterprise.write()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(absent))
        cleanup.zone(enterprise).start(by_command=True)
    held = await enterprise.seen("link_held", code="hasher_unknown")
    assert "blake3" in held["detail"]
    assert enterprise.end(Buffer.FORWARD) == 0
    enterprise.stop()
    enterprise.start()
    async with enterprise.admin() as operator:
        await operator.release_gate("from-plant-a", "the extra is installed")
    await until(lambda: enterprise.end(Buffer.FORWARD) == 10)
    assert texts(enterprise, Buffer.FORWARD) == {("plant-a", "blake3")}


async def test_an_older_peer_is_told(tmp_path: Path, cleanup: Cleanup) -> None:
    """Who asks for frames without saying that it knows the function, as earlier versions do, is refused by name."""
    plant, _ = pair(tmp_path)
    plant.hasher = "blake3"
    start([plant], cleanup)
    async with plant.client() as producer:
        await producer.append(STREAM, batch(3, from_zone="plant-a"))
    async with plant.client("enterprise-bsfg") as older:
        ask = pb.FetchRequest(consumer=f"enterprise.{STREAM}", limit=10, frames=True, ages=True)
        with pytest.raises(HasherUnknown, match="blake3"):
            await older.connection.call("FetchFacts", ask)
        ask.hashers.append("blake3")
        assert len((await older.connection.call("FetchFacts", ask)).frames) == 2
        shown = await fetch_entries(older, f"enterprise.{STREAM}")
        assert [entry.hasher for entry in shown.entries] == ["blake3"] * 3
