"""Facts as JSON to a web server: in order, at least once, and never left out without a word."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
import trustme
from tests.sinks.conftest import Plant
from tests.syncs import noted_syncs

from bsfg.errors import DiskFull, InvalidArgument, SinkAway, SinkRefused, StorageUnreadable
from bsfg.ports import Buffer
from bsfg.retention import GapReason, GapRecord
from bsfg.sdk.consumer import Consumer
from bsfg.sinks.flow import Sink, SinkBatch
from bsfg.sinks.webhook import REFUSED_IN_A_ROW_MAX, Webhook, WebhookSettings, retry_after
from bsfg.testing.facts import messages
from bsfg.wire.posting import trusting

WAIT_SECONDS = 60.0
Answer = tuple[int, dict[str, str], bytes]
TAKEN: Answer = (204, {}, b"")


class Receiver:
    """A web server that answers as a test says, and remembers what it was given and what of it it has taken."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer] = lambda body: TAKEN) -> None:
        self.answer, self.asked, self.taken = answer, list[dict[str, Any]](), list[dict[str, Any]]()
        self.bodies, self.headers = list[bytes](), list[dict[str, str]]()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                body = orjson.loads(data)
                receiver.bodies.append(data)
                receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
                receiver.asked.append(body)
                status, headers, words = receiver.answer(body)
                if 200 <= status < 300:
                    receiver.taken += body["items"]
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(words))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(words)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.scheme = "http"

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{self.scheme}://127.0.0.1:{self.server.server_port}/facts"

    @property
    def ids(self) -> list[str]:
        """The ids of the facts that it has taken, in order."""
        return [item["envelope"]["message_id"] for item in self.taken if "fact" in item]

    @contextmanager
    def listening(self) -> Iterator[Receiver]:
        """Answer while a block runs."""
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            thread.join()
            self.server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine has set for others does not concern these tests."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def aside(tmp_path: Path) -> Path:
    """Where refused facts go."""
    return tmp_path / "aside.jsonl"


def run(plant: Plant, settings: WebhookSettings, consumer: str = "app-sink", **options: Any) -> Sink:
    """Post what is there now."""
    sink = Sink(plant.endpoint, consumer, Webhook(settings), **options)
    sink.run(once=True)
    return sink


def ids(count: int, first: int = 0) -> list[str]:
    """Give the ids of so many facts."""
    return [f"0-{number:06}" for number in range(first, first + count)]


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_facts_come_in_order_with_their_keys(plant: Plant, aside: Path) -> None:
    """In batches that are signed; what was taken is confirmed and does not come again."""
    plant.produce(messages(250))
    secret = aside.with_name("secret")
    secret.write_text("whsec_" + base64.b64encode(b"s" * 32).decode() + "\n")
    headers = aside.with_name("headers")
    headers.write_text("Authorization: Bearer 123\n\nX-Plant: a\n")
    with Receiver().listening() as receiver:
        settings = WebhookSettings(receiver.url, aside, secret, headers)
        sink = run(plant, settings, max_facts=100)
        assert (sink.done.facts, sink.done.batches, sink.done.next) == (250, 3, 250)
        run(plant, settings)
    assert receiver.ids == ids(250)
    entry, item = plant.entries(Buffer.STORE)[0], receiver.taken[0]
    assert item["idempotency_key"] == "plant/operational/0-000000"
    assert (item["offset"], item["digest"]) == (0, entry.digest_text)
    assert orjson.dumps(item["fact"]["object"], option=orjson.OPT_SORT_KEYS) == entry.message.fact.object
    assert (receiver.asked[0]["stream"], plant.committed()) == ("operational", 249)
    for body, sent in zip(receiver.bodies, receiver.headers, strict=True):
        number = hashlib.sha256(body).hexdigest()
        signed = hmac.new(b"s" * 32, f"{number}.{sent['webhook-timestamp']}.".encode() + body, hashlib.sha256).digest()
        assert sent["webhook-signature"] == f"v1,{base64.b64encode(signed).decode()}"
        assert sent["idempotency-key"] == sent["webhook-id"] == number
        assert (sent["authorization"], sent["x-plant"]) == ("Bearer 123", "a")
    assert not aside.exists()


def test_gap_records_come_too(plant: Plant, aside: Path) -> None:
    """In the place of what is missing, with a key of their own."""
    plant.add_consumer("app-late", "lossy", required=False)
    for first in range(0, 6_000, 500):
        plant.produce(messages(500, first=first), "lossy")
    with Receiver().listening() as receiver:
        run(plant, WebhookSettings(receiver.url, aside), "app-late")
    gap = receiver.taken[0]["gap"]
    assert (gap["first"], gap["reason"]) == (0, "evicted")
    assert receiver.taken[0]["idempotency_key"].startswith("gap/")
    assert receiver.ids == ids(5_999 - gap["last"], gap["last"] + 1)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_what_passes_is_waited_for(plant: Plant, aside: Path, status: int) -> None:
    """The same batch is sent again under the same key, and nothing behind it before it is taken."""
    plant.produce(messages(20))
    answers = iter([(status, {"Retry-After": "0"}, b"later"), (status, {}, b"")])
    with Receiver(lambda body: next(answers, TAKEN)).listening() as receiver:
        run(plant, WebhookSettings(receiver.url, aside), max_facts=10)
    assert receiver.ids == ids(20)
    assert receiver.bodies[0] == receiver.bodies[1] == receiver.bodies[2] != receiver.bodies[3]


def test_retry_after_is_honoured(plant: Plant, aside: Path) -> None:
    """Until then nothing is sent, and who waits can be ended."""
    plant.produce(messages(1))
    with Receiver(lambda body: (429, {"Retry-After": "1000"}, b"slow down")).listening() as receiver:
        sink = Sink(plant.endpoint, "app-sink", Webhook(WebhookSettings(receiver.url, aside)))
        thread = threading.Thread(target=sink.run)
        thread.start()
        until(lambda: sink.problem is not None)
        problem = sink.problem
        assert isinstance(problem, SinkAway)
        assert problem.details["retry_after_seconds"] == 1000
        assert "429: slow down" in problem.message
        sink.end()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert len(receiver.asked) == 1
    assert plant.committed() == -1


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 7 ", 7),
        ("-7", 0),
        ("soon", 0),
        ("999999999", 3600),
        ("Thu, 01 Jan 1970 00:02:00 GMT", 20),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Thu, 01 Jan 99999 00:00:00 GMT", 0),
    ],
)
def test_what_retry_after_may_say(said: str | None, seconds: float) -> None:
    """Seconds or a date, and not for ever."""
    assert retry_after(said, 100.0) == seconds


def refusing(*wrong: str, status: int = 422) -> Callable[[dict[str, Any]], Answer]:
    """Give answers that refuse a batch in which one of some facts is."""

    def answer(body: dict[str, Any]) -> Answer:
        found = [item["envelope"]["message_id"] for item in body["items"] if "fact" in item]
        return (status, {}, b"do not\nlike it") if set(found) & set(wrong) else TAKEN

    return answer


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_fact_that_is_to_blame_is_set_aside(plant: Plant, aside: Path, status: int) -> None:
    """It and nothing else, with why; all others come in their order."""
    plant.produce(messages(100))
    wrong = ("0-000000", "0-000001", "0-000057")
    aside.write_bytes(b'{"torn')
    with Receiver(refusing(*wrong, status=status)).listening() as receiver:
        sink = run(plant, WebhookSettings(receiver.url, aside), max_facts=40)
    assert receiver.ids == [each for each in ids(100) if each not in wrong]
    torn, *lines = aside.read_bytes().splitlines()
    found = [orjson.loads(line) for line in lines]
    assert torn == b'{"torn'
    assert tuple(each["item"]["envelope"]["message_id"] for each in found) == wrong
    assert {each["refused"] for each in found} == {f"{status}: do not like it"}
    assert sink.target.noted() == {"aside": 3, "refused": 0}
    assert plant.committed() == 99


def test_a_new_file_of_what_was_set_aside_survives_a_power_loss(
    plant: Plant, aside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is synced before the fact is confirmed, and not only what is in it."""
    plant.produce(messages(3))
    synced = noted_syncs(monkeypatch)
    with Receiver(refusing("0-000001", status=422)).listening() as receiver:
        run(plant, WebhookSettings(receiver.url, aside))
    assert synced == [str(aside), str(aside.parent)]


def test_a_receiver_that_refuses_everything_is_to_blame_itself(plant: Plant, aside: Path) -> None:
    """What it has taken is confirmed; of the rest nothing is set aside or left out, however often it is tried."""
    plant.produce(messages(60))
    good = set(ids(20))

    def answer(body: dict[str, Any]) -> Answer:
        return TAKEN if {item["envelope"]["message_id"] for item in body["items"]} <= good else (400, {}, b"broken")

    with Receiver(answer).listening() as receiver:
        for _ in range(3):
            with pytest.raises(SinkRefused, match=f"refused {REFUSED_IN_A_ROW_MAX} in a row: 400: broken"):
                run(plant, WebhookSettings(receiver.url, aside))
            assert plant.committed() == 19
        assert not aside.exists()
        receiver.answer = lambda body: TAKEN
        run(plant, WebhookSettings(receiver.url, aside))
    assert receiver.ids == ids(60)


def test_the_last_fact_is_not_set_aside_before_another_is_taken(plant: Plant, aside: Path) -> None:
    """Nobody can know yet who is to blame: it stays where it is, and is settled with the next one."""
    plant.produce(messages(5))
    with Receiver(refusing("0-000004")).listening() as receiver:
        with pytest.raises(SinkRefused, match="1 in a row"):
            run(plant, WebhookSettings(receiver.url, aside))
        assert (plant.committed(), aside.exists()) == (3, False)
        plant.produce(messages(1, first=5))
        run(plant, WebhookSettings(receiver.url, aside))
    assert receiver.ids == [*ids(4), "0-000005"]
    assert len(aside.read_bytes().splitlines()) == 1
    assert plant.committed() == 5


def test_what_cannot_be_set_aside_is_not_confirmed(plant: Plant, aside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is waited for; with no more patience the fact comes again."""
    monkeypatch.setattr("bsfg.sinks.flow.ONCE_PATIENCE_SECONDS", 0.3)
    plant.produce(messages(5))
    with Receiver(refusing("0-000001")).listening() as receiver:
        with pytest.raises(DiskFull):
            run(plant, WebhookSettings(receiver.url, Path("/dev/full")), max_facts=2)
        assert plant.committed() == 0
        run(plant, WebhookSettings(receiver.url, aside))
    assert len(aside.read_bytes().splitlines()) == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_nobody_is_followed_elsewhere(plant: Plant, aside: Path, status: int) -> None:
    """The sink ends with an error that says so; no other address gets a fact."""
    plant.produce(messages(3))
    with Receiver().listening() as elsewhere:
        answer: Answer = (status, {"Location": elsewhere.url}, b"")
        with Receiver(lambda body: answer).listening() as receiver, pytest.raises(SinkRefused) as caught:
            run(plant, WebhookSettings(receiver.url, aside))
    assert "elsewhere" in caught.value.hint
    assert (elsewhere.asked, len(receiver.asked), plant.committed()) == ([], 1, -1)


@pytest.mark.parametrize("status", [401, 403, 404, 405, 410, 415])
def test_who_is_not_let_in_leaves_nothing_out(plant: Plant, aside: Path, status: int) -> None:
    """No fact is to blame, so none is set aside and none is confirmed."""
    plant.produce(messages(3))
    with Receiver(lambda body: (status, {}, b"no")).listening() as receiver, pytest.raises(SinkRefused) as caught:
        run(plant, WebhookSettings(f"{receiver.url}?token=hidden", aside))
    assert caught.value.message.endswith(f"/facts answers {status}: no")
    assert (plant.committed(), aside.exists()) == (-1, False)


def test_the_receiver_must_be_who_it_says(plant: Plant, aside: Path) -> None:
    """Its certificate is checked by the authority that is named, or by the system's, which does not know this one."""
    plant.produce(messages(3))
    authority, trust = trustme.CA(), aside.with_name("ca.pem")
    authority.cert_pem.write_to_path(trust)
    receiver, context = Receiver(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
    receiver.scheme = "https"
    with receiver.listening():
        with pytest.raises(SinkRefused, match="is not trusted"):
            run(plant, WebhookSettings(receiver.url, aside))
        with pytest.raises(SinkRefused, match="is not trusted"):
            run(plant, WebhookSettings(receiver.url.replace("127.0.0.1", "localhost"), aside, trust=trust))
        assert receiver.asked == []
        run(plant, WebhookSettings(receiver.url, aside, trust=trust))
    assert receiver.ids == ids(3)


def test_authorities_are_read_again_when_they_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with another authority counts for the next delivery; as long as nothing changes nothing is read."""
    read: list[str | None] = []
    make = ssl.create_default_context

    def noted(cafile: str | None = None) -> ssl.SSLContext:
        read.append(cafile)
        return make(cafile=cafile)

    monkeypatch.setattr(ssl, "create_default_context", noted)
    trust, old, new = tmp_path / "ca.pem", trustme.CA(), trustme.CA()
    old.cert_pem.write_to_path(trust)
    first = trusting(trust)
    assert (trusting(trust), read) == (first, [str(trust)])
    new.cert_pem.write_to_path(tmp_path / "new.pem")
    (tmp_path / "new.pem").replace(trust)
    assert trusting(trust).get_ca_certs() != first.get_ca_certs()
    system = trusting()
    assert trusting() is system
    assert read.count(str(trust)) == 2
    assert read.count(None) <= 1  # another test may have read the system's


def test_what_cannot_be_used_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    """Addresses, secrets and headers; an address never holds a password."""
    wrong = ("http://[x/", "https://x.example:99999/", "https://x.example/ä", "https://x.example/a b?t=me:secret")
    for url in ("ftp://me:secret@x/", "http://plant.example/", "https://me:secret@x.example/", "facts", *wrong):
        with pytest.raises(InvalidArgument, match="--url") as caught:
            WebhookSettings(url, tmp_path / "aside")
        assert "me:secret" not in caught.value.message
    for seconds in (0, float("inf"), float("nan"), 1e18):
        with pytest.raises(InvalidArgument, match="--timeout"):
            WebhookSettings("https://x.example/", tmp_path, timeout_seconds=seconds)
    file = tmp_path / "file"
    headers = ("no header", ": x", "A b: x", "A: b\x01", "Content-Length: 3", "transfer-encoding: chunked")
    for text, option in (("short", "secret"), ("whsec_%%%", "secret"), *((each, "headers") for each in headers)):
        file.write_text(text)
        with pytest.raises(InvalidArgument, match=f"--{option}"):
            Webhook(WebhookSettings("https://x.example/", tmp_path, **{option: file})).open()  # type: ignore[arg-type]
    with pytest.raises(StorageUnreadable, match="--secret"):
        Webhook(WebhookSettings("https://x.example/", tmp_path, tmp_path / "none")).open()
    for trust, why in ((file, "it holds no certificate"), (tmp_path / "none", "No such file"), (tmp_path, "Is a dir")):
        with pytest.raises(InvalidArgument, match=f"--trust {trust} cannot be used: {why}"):
            Webhook(WebhookSettings("https://x.example/", tmp_path, trust=trust)).open()


def test_once_is_what_is_there_at_its_start(plant: Plant, aside: Path) -> None:
    """A zone that never falls silent does not keep it for ever."""
    plant.produce(messages(25))

    def answer(body: dict[str, Any]) -> Answer:
        first = 25 + 10 * (len(receiver.asked) - 1)
        if first < 125:
            plant.produce(messages(10, first=first))
        return TAKEN

    with Receiver(answer).listening() as receiver:
        run(plant, WebhookSettings(receiver.url, aside), max_facts=10)
    assert (receiver.ids, len(receiver.asked)) == (ids(25), 3)


def test_once_does_not_wait_longer_than_it_has_patience(plant: Plant, aside: Path) -> None:
    """Whoever wants to be left alone for an hour is left alone."""
    plant.produce(messages(1))
    with Receiver(lambda body: (503, {"Retry-After": "3600"}, b"tonight")).listening() as receiver:
        sink = Sink(plant.endpoint, "app-sink", Webhook(WebhookSettings(receiver.url, aside)))
        failures: list[BaseException] = []

        def work() -> None:
            try:
                sink.run(once=True)
            except SinkAway as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
        late = thread.is_alive()
        sink.end()
        thread.join(WAIT_SECONDS)
    assert (late, len(failures), len(receiver.asked)) == (False, 1, 1)


def test_it_can_be_ended_while_it_begins(plant: Plant, aside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes that would wake it, and there is no consumer yet that could be closed."""
    sink = Sink(plant.endpoint, "app-sink", Webhook(WebhookSettings("http://127.0.0.1:9/", aside)))

    def made(*words: Any, **options: Any) -> Consumer:
        sink.end()
        return Consumer(*words, **options)

    monkeypatch.setattr("bsfg.sinks.flow.Consumer", made)
    thread = threading.Thread(target=sink.run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_secret_that_is_being_written_is_waited_for(plant: Plant, aside: Path) -> None:
    """A new one needs no restart: for a moment its file is empty, or not there at all."""
    plant.produce(messages(30))
    secret = aside.with_name("secret")
    secret.write_text("s" * 32)

    def answer(body: dict[str, Any]) -> Answer:
        match len(receiver.asked):
            case 1:
                secret.write_text("")
                threading.Timer(0.5, secret.unlink).start()
                threading.Timer(1.0, secret.write_text, ["t" * 32]).start()
        return TAKEN

    with Receiver(answer).listening() as receiver:
        run(plant, WebhookSettings(receiver.url, aside, secret), max_facts=10)
    assert receiver.ids == ids(30)


def test_what_is_for_this_machine_goes_to_no_other(aside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for everything else would read what is sent in plaintext."""
    monkeypatch.delenv("no_proxy")
    gap = GapRecord(0, 6, GapReason.EVICTED, 1)
    with Receiver().listening() as receiver, Receiver().listening() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert Webhook(WebhookSettings(receiver.url, aside)).write(SinkBatch("s", "l", [gap], 7)) == 6
    assert (len(receiver.asked), proxy.asked) == (1, [])


def test_what_is_set_aside_is_for_its_owner(plant: Plant, aside: Path) -> None:
    """Facts that others must not fetch from the node are no better in a file that everybody can read."""
    plant.produce(messages(3))
    with Receiver(refusing("0-000001")).listening() as receiver:
        run(plant, WebhookSettings(receiver.url, aside))
    assert aside.stat().st_mode & 0o077 == 0


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_killed_again_and_again_every_fact_comes_in_order(
    plant: Plant, tmp_path: Path, soak_size: Callable[[int, int], int]
) -> None:
    """The first time that each comes is in order, none is missing, and what comes again has the key it had."""
    random, count, log = Random(7), 0, tmp_path / "sink.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BSFG_")}
    with Receiver(refusing("0-000123", "0-000777")).listening() as receiver:
        words = ["webhook", "-c", str(plant.folder / "zone.toml"), "--consumer", "app-sink", "--url", receiver.url]
        words += ["--aside", str(tmp_path / "aside"), "--max-facts-per-batch", "9"]
        for kill in range(soak_size(8, 200) + 1):
            with log.open("ab") as out:
                command = [sys.executable, "-m", "bsfg.cli", "pipeline", *words]
                process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
            before = len(set(receiver.ids))
            plant.produce(messages(150, first=count))
            count += 150
            until(lambda before=before: len(set(receiver.ids)) > before)  # type: ignore[misc]
            if kill < soak_size(8, 200):
                time.sleep(random.uniform(0, 0.2))
                process.kill()
            else:
                until(lambda count=count: plant.committed() == count - 1)  # type: ignore[misc]
                process.terminate()
            process.wait()
        assert process.returncode == 0
    wrong = {"0-000123", "0-000777"}
    assert list(dict.fromkeys(receiver.ids)) == [each for each in ids(count) if each not in wrong]
    aside = (tmp_path / "aside").read_bytes()
    refused = [orjson.loads(line)["item"]["envelope"]["message_id"] for line in aside.splitlines()]
    assert set(refused) == wrong
    assert "Traceback" not in log.read_text()
