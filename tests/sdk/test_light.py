"""The light client against a real node under mutual TLS: facts arrive once, verified, whoever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.cli.folders import flip, segments
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint
from tests.syncs import noted_syncs

from bsfg import (
    ArtifactRef,
    Buffer,
    Entry,
    Fact,
    GapRecord,
    LightConsumer,
    LightNode,
    LightProducer,
    Producer,
)
from bsfg.errors import (
    ArtifactMissing,
    BsfgError,
    ConflictingDuplicate,
    DigestMismatch,
    ForeignLog,
    HasherUnknown,
    InvalidArgument,
    PeerUnreachable,
    PermissionRefused,
    StorageClosed,
)
from bsfg.ports import ConsumerSpec
from bsfg.sdk.lightconsumer import body_digest, entry_of, gap_of

CONTENT = os.urandom(2_000_000)
TO = {"stream": "operational", "to_zone": "enterprise"}


def node_of(zone: Zone, role: str = "producer", **more: float) -> LightNode:
    files = zone.files(f"{zone.name}-{role}")
    name = f"{zone.name}-bsfg"
    return LightNode(f"127.0.0.1:{zone.http_port}", files.ca, files.certificate, files.key, name, **more)


def create(zone: Zone, *names: str) -> None:
    async def made() -> None:
        async with zone.admin() as operator:
            for name in names:
                await operator.create_consumer(ConsumerSpec(name, "operational", Buffer.STORE))

    asyncio.run(made())


def test_every_fact_arrives_once_though_the_node_is_killed(zone: Zone, tmp_path: Path) -> None:
    """What is in the outbox survives its producer and the node, and is taken in order, with its numbers as written."""
    create(zone, "app-light")
    outbox = tmp_path / "outbox"
    with LightProducer(node_of(zone), outbox=outbox, **TO) as producer:  # type: ignore[arg-type]
        for number in range(100):
            producer.send(Fact("batch:B1", "said", b'{"v": %d.50}' % number), message_id=str(number))
            if number == 50:
                zone.kill()
        producer.close(timeout_seconds=0.1)
        assert producer.waiting > 0
        with pytest.raises(StorageClosed):
            producer.send(Fact("batch:B1", "said"), message_id="late")
    zone.start()
    with LightProducer(node_of(zone), outbox=outbox, **TO) as producer:  # type: ignore[arg-type]
        producer.send(Fact("batch:B1", "drawn", b"\x00\xff"), message_id="png", object_media_type="image/png")
        producer.drain(30)
        assert producer.problem is None
        assert producer.append(Fact("batch:B1", "said", b'{"v":0.50}'), message_id="0").result == "already_exists"
    taken = list[Entry]()
    with LightConsumer("app-light", node_of(zone, "consumer"), batch_facts=30) as consumer:
        for entry in consumer.entries(idle_seconds=0):
            taken.append(entry)
            if len(taken) == 40:
                zone.kill()
                zone.start()
            consumer.confirm(entry)
        consumer.flush()
        assert consumer.committed == 100
    assert [entry.key.message_id for entry in taken] == [*map(str, range(100)), "png"]
    assert taken == zone.entries(Buffer.STORE)
    assert taken[7].message.fact.object == b'{"v":7.50}' and taken[-1].message.fact.object == b"\x00\xff"
    with LightConsumer("app-light", node_of(zone, "consumer")) as consumer:
        assert list(consumer.items(idle_seconds=0)) == []


def test_what_is_refused_is_kept_aside_and_stops_nobody(
    zone: Zone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taken id and a fact that breaks a rule leave the outbox with their reasons; the others arrive."""
    told, synced = list[str](), noted_syncs(monkeypatch)
    with LightProducer(
        node_of(zone),
        outbox=tmp_path / "outbox",
        on_refused=lambda message, error: told.append(error.code),
        **TO,  # type: ignore[arg-type]
    ) as producer:
        producer.append(Fact("batch:B1", "said"), message_id="taken")
        zone.kill()
        (tmp_path / "outbox" / "refused.jsonl").write_text('{"torn')
        for subject, id in (("batch:B1", "a"), ("batch:B2", "taken"), ("none", "b"), ("batch:B1", "c")):
            producer.send(Fact(subject, "said"), message_id=id)
        zone.start()
        producer.drain(30)
    assert sorted(told) == ["conflicting_duplicate", "invalid_fact"]
    at = synced.index(str(tmp_path / "outbox" / "refused.jsonl"))
    assert synced[at + 1] == str(tmp_path / "outbox"), "the name of the file is not durable"
    torn, *lines = (tmp_path / "outbox" / "refused.jsonl").read_text().splitlines()
    assert torn == '{"torn', "what an end in the middle of a line has left stays a line of its own"
    kept = [json.loads(line) for line in lines]
    assert {each["message"]["envelope"]["message_id"] for each in kept} == {"taken", "b"}
    assert [entry.key.message_id for entry in zone.entries(Buffer.STORE)] == ["taken", "a", "c"]


def test_a_failure_is_raised_though_the_node_is_away(zone: Zone, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handled before it is confirmed if that is quick; nobody waits for ever to hear of it."""
    monkeypatch.setattr("bsfg.sdk.lightconsumer.CLOSE_SECONDS", 0.5)
    create(zone, "app-light")
    with LightProducer(node_of(zone), **TO) as producer:  # type: ignore[arg-type]
        for number in range(2):
            producer.append(Fact("batch:B1", "said"), message_id=str(number))
    failures: list[Exception] = []

    def handle(entry: Entry) -> None:
        if entry.offset == 1:
            zone.kill()
            raise KeyError("the handler's own")

    def work() -> None:
        try:
            consumer.run(handle)
        except Exception as error:
            failures.append(error)

    consumer = LightConsumer("app-light", node_of(zone, "consumer"))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert [type(each) for each in failures] == [KeyError]
    zone.start()
    assert [entry.offset for entry in consumer.entries(idle_seconds=0)] == [0, 1]
    consumer.close()


def test_a_node_that_was_put_back_is_noticed(zone: Zone, tmp_path: Path) -> None:
    """Its offsets mean other facts now; who goes on afterwards begins where the node is."""

    def say(*names: str) -> None:
        with LightProducer(node_of(zone), **TO) as producer:  # type: ignore[arg-type]
            for name in names:
                producer.append(Fact("batch:B1", "said"), message_id=name)

    create(zone, "app-light")
    say("a")
    with LightConsumer("app-light", node_of(zone, "consumer")) as consumer:
        assert consumer.run(lambda entry: None, idle_seconds=0) == 1
        zone.stop()
        shutil.copytree(zone.data, tmp_path / "copy")
        zone.start()
        say("b", "c")
        assert consumer.run(lambda entry: None, idle_seconds=0) == 2
        zone.stop()
        shutil.rmtree(zone.data)
        shutil.copytree(tmp_path / "copy", zone.data)
        zone.start()
        say("d", "e", "f", "g")
        with pytest.raises(ForeignLog, match="went back"):
            consumer.run(lambda entry: None, idle_seconds=0)
        taken: list[str | None] = []
        consumer.run(lambda entry: taken.append(entry.key.message_id), idle_seconds=0)
        assert (taken, consumer.committed) == (["d", "e", "f", "g"], 4)


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (302, b""), (200, b"{}"), (200, b"[]")])
def test_what_is_no_node_is_told_as_an_error_of_ours(status: int, body: bytes) -> None:
    """Whatever listens at a port that was mistaken for a node's: nothing counts as stored or fetched."""

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        node = f"127.0.0.1:{server.server_port}"
        with LightProducer(node, deadline_seconds=0, **TO) as producer:  # type: ignore[arg-type]
            with pytest.raises(BsfgError):
                producer.append(Fact("batch:B1", "said"), message_id="1")
            with pytest.raises(BsfgError):
                producer.upload("reports", "a", b"content")
        with LightConsumer("app-light", node, patience_seconds=0) as consumer, pytest.raises(BsfgError):
            list(consumer.items(idle_seconds=0))
        server.shutdown()


def test_gaps_refusals_and_unconfirmed_entries(zone: Zone, caplog: pytest.LogCaptureFixture) -> None:
    """What was damaged comes as a gap, what is refused leaves a record, and what is not confirmed comes again."""
    create(zone, "app-light", "app-late", "app-told")
    with Producer(endpoint(zone), stream="operational", from_zone="plant", to_zone="enterprise") as producer:
        for number in range(10):
            producer.append(Fact.of("batch:B1", "said", number), message_id=str(number))
    with LightConsumer("app-light", node_of(zone, "consumer"), batch_facts=2) as consumer:
        seen = list[int]()
        for entry in consumer.entries(idle_seconds=0):
            seen.append(entry.offset)
            if entry.offset == 3:
                consumer.refuse(entry, "unknown_schema", "no reader for it")
            elif entry.offset != 5:
                consumer.confirm(entry)
        assert seen == list(range(10))
        assert consumer.committed == 4
        with pytest.raises(InvalidArgument):
            consumer.refuse(entry, " ")
    with LightConsumer("app-light", node_of(zone, "consumer")) as consumer:
        again = list[Entry]()
        assert consumer.run(again.append, idle_seconds=0) >= 1
        assert again[0].offset == 5 and consumer.committed == 9

    with Producer(endpoint(zone), stream="operational", from_zone="plant", to_zone="enterprise") as producer:
        for number in range(3):
            producer.append(Fact.of("batch:B2", "said", "x" * 600_000), message_id=f"large-{number}")
    with LightConsumer("app-light", node_of(zone, "consumer")) as consumer:
        # More than one answer takes, and none of it confirmed before the last has come.
        large = list(consumer.entries(idle_seconds=0.5))
        assert [entry.offset for entry in large] == [10, 11, 12] and consumer.committed == 9
        for entry in reversed(large):
            consumer.confirm(entry)
        consumer.flush()
        assert consumer.committed == 12

    zone.kill()
    [segment] = segments(zone.data)
    flip(segment, segment.read_bytes().index(b"batch:B1", segment.read_bytes().index(b"batch:B2") // 2))
    zone.start()
    with LightConsumer("app-late", node_of(zone, "consumer")) as consumer:
        items = list(consumer.items(idle_seconds=0))
        [gap] = [item for item in items if isinstance(item, GapRecord)]
        assert gap.reason == "damaged" and items.index(gap) == gap.first
        offsets = [item.offset for item in items if isinstance(item, Entry)]
        assert offsets == [at for at in range(13) if not gap.first <= at <= gap.last]
        for item in items[: gap.first + 1]:
            consumer.confirm(item)
        consumer.flush()
        assert consumer.committed == gap.last
    with LightConsumer("app-told", node_of(zone, "consumer")) as consumer:
        assert consumer.run(lambda entry: None, idle_seconds=0) == len(offsets)
        assert consumer.committed == 12
    [warning] = [each for each in caplog.records if each.name == "bsfg.consumer"]
    assert f"offsets {gap.first} to {gap.last} are not there: damaged" in warning.getMessage()


def test_artifacts_go_up_and_down(zone: Zone, tmp_path: Path) -> None:
    """A file goes up from bytes or from disk, and comes down by its fact, resumed and verified."""
    create(zone, "app-light")
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    with LightProducer(node_of(zone), **TO) as producer:  # type: ignore[arg-type]
        with source.open("rb") as file:
            reference = producer.upload("reports", "B1 ä/report", file, media_type="application/pdf")
        assert producer.upload("reports", "copy", CONTENT).digest == reference.digest
        producer.append(Fact("batch:B1", "reported", b"{}", reference), message_id="a/ä b")
        with pytest.raises(InvalidArgument, match="outbox"):
            producer.send(Fact("batch:B1", "said"), message_id="b")
    with LightConsumer("app-light", node_of(zone, "consumer")) as consumer:
        [entry] = consumer.entries(idle_seconds=0)
        assert entry.message.fact.artifact == reference
        assert consumer.artifacts.read(entry) == CONTENT
        part = tmp_path / f"copy.{reference.digest[7:19]}.part"
        for begun in (b"", CONTENT[:1_500_000], CONTENT):
            part.write_bytes(begun)
            path = consumer.artifacts.download(entry, tmp_path / "copy", resume=True, overwrite=True)
            assert path.read_bytes() == CONTENT
        for wrong in (b"x" * 100, CONTENT + b"x"):
            part.write_bytes(wrong)
            with pytest.raises(DigestMismatch):
                consumer.artifacts.download(entry, tmp_path / "copy", resume=True, overwrite=True)
            assert not part.exists()
        with pytest.raises(ArtifactMissing):
            consumer.artifacts.read("sha256:" + 64 * "0")
        pieces = consumer.artifacts.pieces(entry)
        assert CONTENT.startswith(next(pieces))
        assert consumer.artifacts.read(entry) == CONTENT
        del pieces


def test_errors_have_their_codes(zone: Zone, tmp_path: Path) -> None:
    """Who may not is told so at once; an absent node is borne as long as was said, and a wrong one is not believed."""
    with LightConsumer("not-mine", node_of(zone, "consumer")) as consumer, pytest.raises(PermissionRefused):
        next(consumer.items())
    with LightProducer(node_of(zone, "viewer"), **TO) as producer, pytest.raises(PermissionRefused):  # type: ignore[arg-type]
        producer.append(Fact("batch:B1", "said"), message_id="a")
    with LightProducer(node_of(zone), **TO) as producer:  # type: ignore[arg-type]
        producer.append(Fact("batch:B1", "said"), message_id="a")
        with pytest.raises(ConflictingDuplicate):
            producer.append(Fact("batch:B2", "said"), message_id="a")
        with pytest.raises(InvalidArgument, match="envelope already"):
            producer.append(zone.entries(Buffer.STORE)[0].message, message_id="b")
    problems = list[BsfgError]()
    away = LightNode("127.0.0.1:1")
    began = time.monotonic()
    with (
        LightConsumer("app-x", away, patience_seconds=0.4, on_problem=problems.append) as consumer,
        pytest.raises(PeerUnreachable),
    ):
        next(consumer.items())
    assert len(problems) > 1 and time.monotonic() - began < 10
    files = zone.files("plant-producer")
    other = LightNode(f"127.0.0.1:{zone.http_port}", files.ca, files.certificate, files.key, "somebody-else")
    with LightProducer(other, deadline_seconds=0, **TO) as producer, pytest.raises(BsfgError) as told:  # type: ignore[arg-type]
        producer.append(Fact("batch:B1", "said"), message_id="a")
    assert told.value.code == "certificate_invalid"
    for wrong in ("nowhere", "example.org:9080", "localhost:0x", "localhost:9080/v1"):
        with pytest.raises(InvalidArgument):
            LightNode(wrong)
    with pytest.raises(InvalidArgument):
        LightNode("localhost:9080", ca="ca.crt")


def test_the_active_one_of_several_nodes_is_found(zone: Zone) -> None:
    """An address that does not answer is passed over for the next."""
    node = node_of(zone)
    several = LightNode(f"127.0.0.1:1,{node.address}", node.ca, node.certificate, node.key, node.server_name)
    with LightProducer(several, **TO) as producer:  # type: ignore[arg-type]
        assert producer.append(Fact("batch:B1", "said"), message_id="a").offset == 0


ENTRY = {
    "offset": 7, "appended_at_unix_ms": 1, "digest": "",
    "envelope": {"message_id": "a", "from_zone": "plant", "to_zone": "enterprise", "produced_at_unix_ms": 1},
    "fact": {"subject": "batch:B1", "predicate": "said", "object": {"v": 1}},
}  # fmt: skip


def test_an_entry_is_believed_only_with_its_digest() -> None:
    """The digest covers subject, predicate, artifact and object; functions that are not known are named."""
    digest = "sha256:88ea2b9d"
    with pytest.raises(DigestMismatch):
        entry_of(json.dumps({**ENTRY, "digest": digest}).encode())
    with pytest.raises(HasherUnknown):
        entry_of(json.dumps({**ENTRY, "digest": "sha9:" + 64 * "0"}).encode())
    from bsfg.fact import Envelope, Message

    message = Message(Envelope("plant", "enterprise", 1, "a"), Fact("batch:B1", "said", b'{"v":1}'))
    right = {**ENTRY, "digest": "sha256:" + body_digest(message).hex()}
    assert entry_of(json.dumps(right).encode()).message == message
    blake3 = {**ENTRY, "digest": "blake3:" + body_digest(message, "blake3").hex()}
    assert entry_of(json.dumps(blake3).encode()).hasher == "blake3"
    named = Message(message.envelope, Fact("batch:B1", "said", b'{"v":1}', ArtifactRef(digest="sha256:" + 64 * "0")))
    assert body_digest(named) != body_digest(message)


def test_gap_records_say_for_how_many_they_stand() -> None:
    """A folded range keeps its count; one that stands for all of its offsets has none."""
    record = {"first": 3, "last": 9, "reason": "expired", "at_unix_ms": 5, "count": 7}
    assert gap_of(record).count is None and gap_of(record).offsets == 7
    assert gap_of({**record, "count": 2}).offsets == 2
