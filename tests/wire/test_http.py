"""JSON over HTTP: every operation, errors as problem documents, and the OpenAPI document of all that."""

import asyncio
import hashlib
import json
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Answer, Site, until
from tests.wire.test_objects import pieces

from bsfg.batch import FactBatch
from bsfg.ports import Buffer, ConsumerSpec
from bsfg.testing.facts import messages
from bsfg.wire.http_server import HttpListener, attachment
from bsfg.wire.limits import WireLimits
from bsfg.wire.operations import HTTP, ROUTES, SCHEMAS, Asks, openapi, terms_of
from bsfg.wire.service import ObjectInfo

FACTS = f"/v1/streams/{STREAM}/facts"
JSON = {"content-type": "application/json"}
LINES = {"content-type": "application/x-ndjson"}


def form(id: str = "a", value: Any = 1, **envelope: Any) -> dict[str, Any]:
    """Make the JSON form of a message."""
    head = {"message_id": id, "to_zone": "enterprise", "produced_at_unix_ms": 1_700_000_000_000, **envelope}
    return {"envelope": head, "fact": {"subject": "machine:press-1", "predicate": "measured", "object": value}}


def lines(*forms: Any) -> str:
    """Write forms as JSON Lines."""
    return "".join(json.dumps(each) + "\n" for each in forms)


def assert_problem(answer: Answer, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is a problem document with this code, and give it."""
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")
    found: dict[str, Any] = answer.json()
    assert (found["status"], found["code"]) == (status, code)
    assert found["detail"]
    assert found["hint"]
    return found


@pytest.mark.parametrize("storage", ["memory", "log"])
async def test_one_fact_is_appended_once(sites: Sites, storage: str) -> None:
    """A fact is answered with its offset; a repeat with the same, another body with a conflict."""
    site = await sites(storage=storage)
    first = await site.http("POST", FACTS, json.dumps(form()), headers=JSON)
    assert first.status == 200
    [result] = first.json()["results"]
    assert (result["result"], result["offset"], result["message_id"]) == ("inserted", 0, "a")
    assert result["digest"].startswith("sha256:")
    again = await site.http("POST", FACTS, json.dumps(form()), headers=JSON)
    assert again.json()["results"] == [{**result, "result": "already_exists"}]
    conflict = await site.http("POST", FACTS, json.dumps(form(value=2)), headers=JSON)
    assert assert_problem(conflict, 409, "conflicting_duplicate")["details"]["existing_offset"] == 0
    stored = await (await site.parts.store(STREAM)).stats()
    assert stored.end == 1


async def test_numbers_keep_their_literals(sites: Sites) -> None:
    """1.10 arrives as 1.10, and opaque bytes as they are."""
    site = await sites()
    text = json.dumps(form()).replace('"object": 1', '"object": {"b": 1.10, "a": 1e2}')
    opaque = form("b", object_media_type="application/x-thing")
    opaque["fact"] = {"subject": "machine:press-1", "predicate": "measured", "object_base64": "AAH/"}
    assert (await site.http("POST", FACTS, text, headers=JSON)).status == 200
    assert (await site.http("POST", FACTS, json.dumps(opaque), headers=JSON)).status == 200
    frames = [frame async for frame in (await site.parts.store(STREAM)).replay(0)]
    objects = [data for frame in frames if frame.entries for data in frame.entries.values("object")]
    assert objects == [b'{"a":1e2,"b":1.10}', b"\x00\x01\xff"]


async def test_many_facts_are_appended_as_json_lines(sites: Sites) -> None:
    """Lines are appended as a whole with a result each; a wrong line names itself and nothing is stored."""
    site = await sites()
    body = lines(form("a"), form("b"), form("a"), form("b", 2))
    answer = await site.http("POST", FACTS, body, headers=LINES)
    assert [each["result"] for each in answer.json()["results"]] == [
        "inserted",
        "inserted",
        "already_exists",
        "conflict",
    ]
    wrong = await site.http("POST", FACTS, lines(form("c"), form("d", from_zone=7)), headers=LINES)
    assert assert_problem(wrong, 422, "invalid_fact")["details"]["line"] == 2
    assert (await (await site.parts.store(STREAM)).stats()).end == 2


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ("{", JSON, 422, "invalid_fact"),
        ("[]", JSON, 422, "invalid_fact"),
        ("", JSON, 400, "invalid_argument"),
        ("\n\n", LINES, 400, "invalid_argument"),
        (json.dumps(form(to_zone="no zone")), JSON, 422, "invalid_fact"),
        (json.dumps(form(from_zone="lab")), JSON, 403, "permission_denied"),
        (json.dumps(form()) + "\x00", JSON, 422, "invalid_fact"),
        (b"\xff\xfe\x00", JSON, 422, "invalid_fact"),
    ],
)
async def test_bodies_that_are_no_facts_are_refused(
    sites: Sites, body: str | bytes, headers: dict[str, str], status: int, code: str
) -> None:
    """What is not a fact is a problem of the caller and is said so."""
    site = await sites()
    assert_problem(await site.http("POST", FACTS, body, headers=headers), status, code)


async def test_a_consumer_fetches_and_confirms(sites: Sites) -> None:
    """A consumer gets entries and gaps from its place on, and moves it by confirming."""
    site = await sites()
    await site.client().append(STREAM, FactBatch.from_messages(messages(5)))
    await site.consumer()
    path = "/v1/consumers/historian"
    fetched = (await site.http("GET", f"{path}/facts?limit=2")).json()
    assert [entry["offset"] for entry in fetched["entries"]] == [0, 1]
    assert fetched["entries"][0]["envelope"]["message_id"] == "0-000000"
    assert (fetched["start"], fetched["next_offset"], fetched["end"]) == (0, 2, 5)
    confirmation = {"through": 1, "ranges": [[3, 4]], "log_id": fetched["log_id"]}
    confirmed = await site.http("POST", f"{path}/confirm", json.dumps(confirmation), headers=JSON)
    assert confirmed.json() == {"cursor_advanced_to": 1}
    refusal = {"through": 2, "refusals": [{"first": 2, "last": 2, "reason": "conflict"}]}
    assert (await site.http("POST", f"{path}/confirm", json.dumps(refusal))).json() == {"cursor_advanced_to": 4}
    rest = await site.http("GET", f"{path}/facts", headers={"accept": "application/x-ndjson"})
    assert (rest.status, rest.body) == (200, b"")
    [gap] = await (await site.parts.store(STREAM)).gaps()
    assert gap.detail == "app: conflict"


async def test_fetched_facts_can_be_appended_again(sites: Sites) -> None:
    """Entries as JSON Lines are read back as the same facts."""
    site = await sites()
    await site.client().append(STREAM, FactBatch.from_messages(messages(5)))
    await site.consumer()
    fetched = await site.http("GET", "/v1/consumers/historian/facts", headers={"accept": "application/x-ndjson"})
    entries = [json.loads(line) for line in fetched.body.splitlines()]
    body = lines(*({"envelope": each["envelope"], "fact": each["fact"]} for each in entries))
    answer = await site.http("POST", FACTS, body, headers=LINES)
    assert {each["result"] for each in answer.json()["results"]} == {"already_exists"}


async def test_a_fetch_waits_for_facts(sites: Sites) -> None:
    """A long poll is answered when a fact becomes durable."""
    site = await sites()
    await site.consumer()
    waiting = asyncio.create_task(site.http("GET", "/v1/consumers/historian/facts?wait_ms=50000"))
    await until(lambda: site.listeners.admission.serving == 1)
    await site.client().append(STREAM, FactBatch.from_messages(messages(1)))
    assert len((await waiting).json()["entries"]) == 1


async def test_a_caller_who_goes_while_he_waits_is_forgotten(sites: Sites) -> None:
    """A long poll ends when its connection does, not when its time is over."""
    site = await sites()
    await site.consumer()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port)
    writer.write(b"GET /v1/consumers/historian/facts?wait_ms=60000 HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: site.listeners.admission.serving == 1)
    writer.close()
    await until(lambda: site.listeners.admission.serving == 0)
    assert await reader.read() == b""


@pytest.mark.parametrize(
    "body",
    [
        "nonsense",
        "[]",
        "{}",
        '{"through": "1"}',
        '{"through": true}',
        '{"ranges": [[1]]}',
        '{"ranges": 5}',
        '{"through": 0, "refusals": [{}]}',
        '{"through": 0, "refusals": [{"first": "x", "last": 1, "reason": "r"}]}',
    ],
)
async def test_confirmations_that_are_none_are_refused(sites: Sites, body: str) -> None:
    """A body that is no confirmation changes nothing."""
    site = await sites()
    await site.consumer()
    await site.client().append(STREAM, FactBatch.from_messages(messages(1)))
    assert_problem(await site.http("POST", "/v1/consumers/historian/confirm", body), 400, "invalid_argument")
    assert (await site.parts.storage.cursors.checkpoint("historian")).committed == -1


async def test_queries_that_are_none_are_refused(sites: Sites) -> None:
    """Numbers out of range and unknown consumers have their own problems."""
    site = await sites()
    await site.consumer()
    for query in ("limit=0", "limit=x", "wait_ms=-1", "limit=99999999999999999999999", "limit=%D9%A3"):
        assert_problem(await site.http("GET", f"/v1/consumers/historian/facts?{query}"), 400, "invalid_argument")
    assert_problem(await site.http("GET", "/v1/consumers/app-nobody/facts"), 404, "unknown_consumer")


async def test_a_fact_is_found_by_its_key(sites: Sites) -> None:
    """A key with slashes and spaces is found; another is not."""
    import numpy as np

    from bsfg.ports import OriginSpan
    from bsfg.testing.facts import message, sealed

    site = await sites()
    forward = await site.parts.forward(STREAM)
    facts = sealed([message("a/b c", from_zone="enterprise")])
    await forward.put_if_absent(facts, OriginSpan("enterprise", np.zeros(1, dtype=int), np.ones(1, dtype=int)))
    found = await site.http("GET", f"{FACTS}/enterprise/a/b%20c")
    assert found.json()["envelope"]["message_id"] == "a/b c"
    assert found.json()["origin"] == {"zone": "enterprise", "offset": 0, "appended_at_unix_ms": 1}
    assert_problem(await site.http("GET", f"{FACTS}/enterprise/other"), 404, "fact_not_found")
    assert_problem(await site.http("GET", f"{FACTS}/enterprise/x?buffer=both"), 400, "invalid_argument")


async def name_in_a_fact(site: Site, digest: str) -> None:
    """Append a fact that names an artifact: from then on it can be read."""
    fact = form(f"names-{digest[-8:]}")
    fact["fact"]["artifact_digest"] = digest
    assert (await site.http("POST", FACTS, json.dumps(fact), headers=JSON)).status == 200


async def test_artifacts_go_up_and_down(sites: Sites) -> None:
    """An artifact comes back with its media type and its digest as the ETag; a wrong digest is refused."""
    site = await sites()
    content = b"%PDF" * 300_000
    path = "/v1/objects/batch-files/B1042/report%201.pdf"
    stored = await site.http("PUT", path, content, headers={"content-type": "application/pdf"})
    assert stored.json()["size_bytes"] == len(content)
    assert_problem(await site.http("GET", path), 404, "artifact_missing")
    await name_in_a_fact(site, stored.json()["digest"])
    found = await site.http("GET", path)
    assert (found.status, found.body) == (200, content)
    assert found.headers["content-type"] == "application/pdf"
    assert found.headers["etag"] == f'"{stored.json()["digest"]}"'
    wrong = await site.http("PUT", f"/v1/objects/b/k?digest=sha256:{64 * '0'}", content)
    assert_problem(wrong, 422, "digest_mismatch")
    assert_problem(await site.http("GET", "/v1/objects/b/k"), 404, "artifact_missing")


async def test_artifacts_are_read_by_digest_and_by_fact(sites: Sites) -> None:
    """The digest decides, with or without a name beside it; a fact leads to its own artifact. HEAD tells the size."""
    site = await sites()
    content, own = b"%PDF" * 300_000, b"this zone's own"
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    name = "/v1/objects/batch-files/report.pdf"
    await site.http("PUT", f"/v1/objects/sha256/{digest[7:]}", content)
    await site.http("PUT", name, own, headers={"content-type": "text/plain"})
    await name_in_a_fact(site, "sha256:" + hashlib.sha256(own).hexdigest())
    fact = form("a/1", object_media_type="application/pdf")
    fact["fact"]["artifact_digest"] = digest
    assert (await site.http("POST", FACTS, json.dumps(fact), headers=JSON)).status == 200
    assert (await site.http("POST", FACTS, json.dumps(form("b")), headers=JSON)).status == 200
    of_fact = f"/v1/streams/{STREAM}/artifacts/plant"
    for path in (f"/v1/artifacts/{digest}", f"{name}?digest={digest}", f"{of_fact}/a/1?buffer=store"):
        found = await site.http("GET", path)
        assert (found.status, found.body) == (200, content)
        head = await site.http("HEAD", path)
        assert (head.status, head.body) == (200, b"")
        for answer in (found, head):
            assert answer.headers["etag"] == f'"{digest}"'
            assert answer.headers["content-length"] == str(len(content))
    assert found.headers["content-type"] == "application/pdf"
    assert (await site.http("GET", name)).body == own
    absent = "sha256:" + 64 * "0"
    for path in (f"/v1/artifacts/{absent}", f"{name}?digest={absent}", f"{of_fact}/b?buffer=store"):
        assert_problem(await site.http("GET", path), 404, "artifact_missing")
    assert_problem(await site.http("GET", "/v1/artifacts/report.pdf"), 400, "invalid_argument")
    assert_problem(await site.http("GET", f"{of_fact}/none?buffer=store"), 404, "fact_not_found")
    for who, status in (("viewer", 403), ("enterprise-bsfg", 200)):
        site.act_as(who)
        assert (await site.http("GET", f"/v1/artifacts/{digest}")).status == status


async def test_a_download_is_resumed(sites: Sites) -> None:
    """`Range: bytes=N-` gives what follows; other ranges, and those of other content, are answered with the whole."""
    site = await sites()
    content = bytes(range(256)) * 5_000
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    await site.http("PUT", "/v1/objects/b/k", content)
    await name_in_a_fact(site, digest)
    for path in (f"/v1/artifacts/{digest}", "/v1/objects/b/k"):
        for offset in (1, 700_000, len(content) - 1):
            found = await site.http("GET", path, headers={"range": f"bytes={offset}-", "if-range": f'"{digest}"'})
            assert (found.status, found.body) == (206, content[offset:])
            assert found.headers["content-range"] == f"bytes {offset}-{len(content) - 1}/{len(content)}"
            assert found.headers["etag"] == f'"{digest}"'
        for offset in (len(content), 10**17):
            assert_problem(await site.http("GET", path, headers={"range": f"bytes={offset}-"}), 416, "invalid_argument")
        for range_of in ("bytes=0-", "bytes=-5", "bytes=1-2", "bytes=1-,3-", "lines=1-", f"bytes={10**20}-"):
            found = await site.http("GET", path, headers={"range": range_of})
            assert (found.status, found.body) == (200, content)
        found = await site.http("GET", path, headers={"range": "bytes=5-", "if-range": '"another"'})
        assert (found.status, found.body) == (200, content)
    head = await site.http("HEAD", path, headers={"range": "bytes=5-"})
    assert (head.status, head.headers["content-length"]) == (200, str(len(content)))


async def test_a_media_type_that_no_header_can_hold(sites: Sites) -> None:
    """Content whose media type has letters beyond ASCII, or a line end in a fact, is given as plain bytes."""
    site = await sites()
    client = site.client()
    content = b"hello"
    stored = await client.put_object(ObjectInfo("b", "k", "text/plain;name=中"), pieces(content))
    await name_in_a_fact(site, stored.digest or "")
    found = await site.http("GET", "/v1/objects/b/k")
    assert (found.status, found.body) == (200, content)
    assert found.headers["content-type"] == "application/octet-stream"
    fact = form("a")
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    fact["fact"]["artifact"] = {"digest": digest, "media_type": "text/plain\r\nx-forged: 1"}
    assert (await site.http("POST", FACTS, json.dumps(fact), headers=JSON)).status == 200
    found = await site.http("GET", f"/v1/streams/{STREAM}/artifacts/plant/a?buffer=store")
    assert (found.status, found.body) == (200, content)
    assert "x-forged" not in found.headers


@pytest.mark.parametrize(
    "media_type", ["text/html", "image/svg+xml", "text/html;charset=utf-8", "application/xhtml+xml"]
)
async def test_what_was_uploaded_is_never_a_page_of_ours(sites: Sites, media_type: str) -> None:
    """Content of producers is given as a file: nothing in it can run where the dashboard's cookies are."""
    site = await sites()
    content = b"<script>alert(document.domain)</script>"
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    name = "/v1/objects/b/r%22eports/%E2%80%AEx%0D%0Ay%22;=.html"
    put = await site.http("PUT", name, content, headers={"content-type": media_type})
    paths = [f"/v1/artifacts/{digest}"]
    if put.status == 200:
        paths.append(name)
    else:
        await site.http("PUT", "/v1/objects/b/plain.html", content, headers={"content-type": media_type})
        paths.append("/v1/objects/b/plain.html")
    await name_in_a_fact(site, digest)
    for path in paths:
        for method in ("GET", "HEAD"):
            found = await site.http(method, path)
            assert found.status == 200
            assert found.headers["content-disposition"].startswith("attachment; filename=")
            assert found.headers["x-content-type-options"] == "nosniff"
            assert {"sandbox", "default-src 'none'"} <= set(found.headers["content-security-policy"].split("; "))


@given(name=st.text(max_size=300))
def test_a_name_of_a_file_cannot_leave_its_header(name: str) -> None:
    """Whatever an artifact is called: the header is one line of ASCII, and the name has no folder in it."""
    found = attachment(name)
    assert found.isascii() and found.isprintable() and found.count('"') == 2
    plain, encoded = found.removeprefix('attachment; filename="').split("\"; filename*=UTF-8''")
    own = unquote(encoded)
    assert plain and own and not {"/", "\\"} & {*plain, *own} and not own.startswith(".")
    assert own.isprintable() or not name.isprintable()


async def test_a_body_that_is_too_large_is_refused(sites: Sites) -> None:
    """A body beyond the limit is refused while it is read, and the connection ends."""
    site = await sites(message_bytes=100_000)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port)
    writer.write(f"POST {FACTS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for _ in range(4):
        writer.write(b"8000\r\n" + bytes(0x8000) + b"\r\n")
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"message_too_large"' in answer
    writer.close()


async def test_monitors_get_what_they_ask_for(sites: Sites) -> None:
    """Health is for everybody; status and metrics are for those who may see."""
    site = await sites()
    await site.client().append(STREAM, FactBatch.from_messages(messages(3)))
    assert (await site.http("GET", "/healthz")).json() == {"status": "ok"}
    assert (await site.http("GET", "/readyz")).json() == {"status": "ready"}
    for path in ("/metrics", "/v1/status"):
        assert_problem(await site.http("GET", path), 403, "permission_denied")
    site.act_as("viewer")
    status = (await site.http("GET", "/v1/status")).json()
    assert status["zone"] == "plant"
    metrics = await site.http("GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    text = metrics.body.decode()
    assert 'bsfg_facts_total{buffer="store",result="inserted",stream="operational"} 3.0' in text
    assert 'bsfg_request_failures_total{code="permission_denied"} 2.0' in text
    assert 'bsfg_request_seconds_count{operation="AppendFacts"}' not in text
    assert "bsfg_requests_in_flight 2.0" in text
    assert 'bsfg_store_buffer_fill_percent{stream="operational"}' in text
    assert 'bsfg_append_latency_seconds_bucket{le="0.001",stream="operational"}' in text


async def test_a_node_that_is_not_ready_says_so(sites: Sites) -> None:
    """A node that lost its storage answers 503 with a hint to wait."""
    site = await sites()
    await site.parts.storage.close()
    assert_problem(await site.http("GET", "/readyz"), 503, "not_ready")
    assert (await site.http("GET", "/healthz")).status == 200
    answer = await site.http("POST", FACTS, json.dumps(form()))
    assert assert_problem(answer, 503, "storage_closed")["retryable"]
    assert answer.headers["retry-after"] == "1"


async def test_what_is_no_operation_is_said_so(sites: Sites) -> None:
    """Unknown paths and methods are problems that point to the OpenAPI document."""
    site = await sites()
    assert "openapi" in assert_problem(await site.http("GET", "/v2/facts"), 404, "invalid_argument")["hint"]
    answer = await site.http("DELETE", FACTS)
    assert_problem(answer, 405, "invalid_argument")
    assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize(
    ("path", "host"), [("/v2/facts", "localhost"), ("/v1/status/", "localhost"), ("/v1/status", "elsewhere.example")]
)
async def test_what_is_no_operation_is_not_asked_for_without_end(sites: Sites, path: str, host: str) -> None:
    """Answers that cost nobody a right wait as refusals do when one caller asks for very many of them."""
    site = await sites(names=[])
    admission = site.listeners.admission
    asked = [asyncio.create_task(site.http("GET", path, headers={"host": host})) for _ in range(30)]
    await until(lambda: admission.sleeping > 0)
    assert {answer.status for answer in await asyncio.gather(*asked)} <= {404, 421}
    assert admission.sleeping == 0


async def test_the_document_describes_the_routes(sites: Sites) -> None:
    """The OpenAPI document names every operation with its parameters, and every schema it refers to exists."""
    site = await sites()
    document = (await site.http("GET", "/openapi.json")).json()
    assert document == json.loads(json.dumps(openapi()))
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(each.method, each.template) for each in ROUTES}
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(SCHEMAS)
    for operation in ROUTES:
        declared = document["paths"][operation.template][operation.method.lower()]
        in_path = {each["name"] for each in declared["parameters"] if each["in"] == "path"}
        assert in_path == set(operation.path_names)
        assert all("{" + name + "}" in operation.template for name in in_path)


@pytest.mark.parametrize("operation", ROUTES, ids=lambda operation: operation.name)
async def test_every_operation_checks_its_caller(sites: Sites, operation: Any) -> None:
    """Whoever is revoked gets nothing but what is open to everybody."""
    site = await sites()
    await site.parts.storage.cursors.create(ConsumerSpec("x", STREAM, Buffer.STORE))
    site.act_as("gone")
    path = operation.template.format(
        stream=STREAM, consumer="x", bucket="b", key="k", from_zone="plant", message_id="a", digest=f"sha256:{64 * '0'}"
    )
    body = json.dumps(form()) if operation.name == "append" else '{"through": 0}'
    answer = await site.http(operation.method, path, body if operation.bodies else None)
    if terms_of(HTTP, operation.name).asks == Asks.CERTIFICATE:
        assert answer.status == 200
    else:
        assert_problem(answer, 401, "identity_revoked")
        assert len(site.refusals) == 1


@pytest.mark.parametrize(
    "number", ["0" * 5_000, "0" * 20 + "9" * 400, "0" * 19 + "1" + "9" * 400, "\u0662", "1e3", "-1", ""]
)
async def test_numbers_that_are_none(sites: Sites, number: str) -> None:
    """A number in a query has few digits and is within its bounds; anything else is the caller's mistake."""
    site = await sites()
    await site.consumer()
    for name in ("wait_ms", "limit", "max_bytes"):
        answer = await site.http("GET", f"/v1/consumers/historian/facts?{name}={quote(number)}")
        assert (answer.status, answer.json()["code"]) == (400, "invalid_argument"), (name, answer.body)


class Answering:
    """An application that answers when it may, and knows what became of its answers."""

    def __init__(self) -> None:
        self.asked, self.may = asyncio.Event(), asyncio.Event()
        self.ended = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        self.asked.set()
        try:
            await self.may.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
        except asyncio.CancelledError:
            self.ended = "cut off"
            raise
        self.ended = "answered"


async def asking(app: Answering) -> tuple[HttpListener, asyncio.StreamReader, asyncio.StreamWriter]:
    """Start a listener, and have one request under way."""
    listener = HttpListener(app, WireLimits())
    reader, writer = await asyncio.open_connection("127.0.0.1", await listener.start("127.0.0.1", 0))
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await app.asked.wait()
    return listener, reader, writer


async def test_a_listener_that_is_idle_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timer is waited for, however short: neither to notice the end nor for connections without requests."""
    app = Answering()
    app.may.set()
    listener, reader, writer = await asking(app)
    assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    sleep = asyncio.sleep

    async def waited(seconds: float) -> None:
        assert seconds == 0
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", waited)
    await listener.stop()
    assert await reader.read() == b""
    writer.close()


async def test_an_answer_under_way_is_waited_for() -> None:
    """Who has asked before the listener was told to stop has his answer; then it ends."""
    app = Answering()
    listener, reader, writer = await asking(app)
    stopping = asyncio.create_task(listener.stop())
    done, _ = await asyncio.wait([stopping], timeout=0.1)
    assert not done
    app.may.set()
    assert (await reader.read()).endswith(b"ok")
    await stopping
    assert app.ended == "answered"
    writer.close()


async def test_an_answer_without_end_is_cut_off() -> None:
    """A listener waits for a while and no longer."""
    app = Answering()
    listener, _, writer = await asking(app)
    listener._server.config.timeout_graceful_shutdown = 0
    await listener.stop()
    await until(lambda: app.ended == "cut off")
    writer.close()
