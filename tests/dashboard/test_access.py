"""Who gets in: certificates, tokens, sessions, and the requests that only our own page may make."""

import asyncio
import json
import re
import ssl
from datetime import UTC, datetime
from typing import Any

import pytest
from starlette.routing import Route
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import TOKENS, Stage
from tests.dashboard.trouble import trouble

from bsfg.gate import Mode
from bsfg.node.dashboard import sessions
from bsfg.wire.certs import create_authority, issue
from bsfg.wire.limits import STRANGERS_PER_ADDRESS, Admission, FaultThrottle, WireLimits
from bsfg.wire.operations import PAGES, ROUTES, TERMS
from bsfg.wire.tls import TlsFiles, client_context

FORM = {"content-type": "application/x-www-form-urlencoded"}
HOLD = {"link": "from-enterprise", "side": "receiver", "reason": "works on the firewall"}


def mode(stage: Stage) -> Mode:
    """Give the mode of the link's gate."""
    return stage.node.parts.links.gate("from-enterprise").gate.mode


async def test_without_tokens_a_certificate_is_wanted_at_the_door(stages: Stages) -> None:
    """Where no token is configured, TLS itself refuses whoever shows no certificate."""
    stage = await stages(with_tokens=False)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await stage.ask("GET", "/dashboard/")
    assert (await stage.ask("GET", "/dashboard/", certificate="viewer")).status == 200


async def test_with_tokens_nobody_without_one_gets_further_than_the_form(stages: Stages) -> None:
    """Without certificate and token there is the sign-in page and its files; every operation asks who it is."""
    stage = await stages()
    home = await stage.ask("GET", "/")
    assert (home.status, home.header("location")) == (307, "/dashboard/")
    page = await stage.ask("GET", "/dashboard/")
    assert (page.status, page.header("location")) == (303, "/dashboard/sign-in")
    assert b'name="token"' in (await stage.ask("GET", "/dashboard/sign-in")).body
    assert (await stage.ask("GET", "/dashboard/static/css/base.css")).status == 200
    for operation in ROUTES:
        path = re.sub(r"{\w+(:path)?}", "x", operation.path)
        answer = await stage.ask(operation.method, path)
        assert (answer.status, answer.json()["code"]) == (401, "sign_in_required"), operation.name
    for path in ("session", "events", "gaps", "gaps.jsonl", "quarantine", "quarantine.jsonl"):
        assert (await stage.ask("GET", f"/dashboard/api/{path}")).status == 401
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD)).status == 403


async def test_a_wrong_certificate_is_refused_although_none_is_needed(stages: Stages) -> None:
    """A certificate of another authority ends the handshake, also where tokens are taken."""
    stage = await stages()
    foreign = stage.folder / "foreign"
    now = datetime.now(UTC)
    create_authority(foreign, name="another", days=5, now=now)
    issue(foreign, "operator", days=5, now=now)
    context = client_context(TlsFiles(foreign / "ca.crt", foreign / "operator.crt", foreign / "operator.key"))
    context.verify_mode = ssl.CERT_NONE
    stage.context = lambda certificate: context  # type: ignore[method-assign]
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await stage.ask("GET", "/dashboard/sign-in")


async def test_a_token_in_a_header_serves_monitors(stages: Stages) -> None:
    """A viewer's token reads status and metrics; it appends nothing, and a wrong one opens nothing."""
    stage = await stages()
    bearer = {"authorization": f"Bearer {stage.tokens['control-room']}"}
    assert (await stage.ask("GET", "/v1/status", headers=bearer)).json()["zone"] == "plant-a"
    assert b"bsfg_gate_state" in (await stage.ask("GET", "/metrics", headers=bearer)).body
    assert (await stage.ask("GET", "/healthz", headers=bearer)).status == 200
    refused = await stage.ask("POST", "/v1/streams/operational/facts", {"fact": {}}, headers=bearer)
    assert refused.status in (400, 403, 422)
    fact = {"envelope": {"message_id": "a", "to_zone": "x", "produced_at_unix_ms": 1}}
    fact |= {"fact": {"subject": "a:b", "predicate": "c", "object": 1}}
    refused = await stage.ask("POST", "/v1/streams/operational/facts", fact, headers=bearer)
    assert (refused.status, refused.json()["code"]) == (403, "permission_denied")
    for wrong in ("nonsense", "", stage.tokens["control-room"][:-1] + "z" * 2):
        answer = await stage.ask("GET", "/v1/status", headers={"authorization": f"Bearer {wrong}"})
        assert (answer.status, answer.json()["code"]) == (401, "sign_in_required")
    # Whoever shows a wrong token is not helped by a good certificate: he meant to be somebody else.
    answer = await stage.ask("GET", "/v1/status", headers={"authorization": "Bearer x"}, certificate="viewer")
    assert answer.status == 401
    assert {each["rule"] for each in stage.events("request_refused")} >= {"token_in_table"}


async def test_signing_in_sets_a_cookie_that_only_our_pages_get(stages: Stages) -> None:
    """The cookie is out of reach of scripts, of plain HTTP and of other sites, and its name tells zones apart."""
    stage = await stages()
    typed = stage.tokens["shift-lead"].upper().replace("-", " - ").replace("1", "l").replace("0", "O")
    body = f"token={typed}".replace(" ", "+").encode()
    answer = await stage.ask("POST", "/dashboard/sign-in", body, headers={**FORM, "origin": stage.origin})
    assert (answer.status, answer.header("location")) == (303, "/dashboard/")
    cookie = answer.header("set-cookie")
    assert cookie.startswith("__Host-bsfg-plant-a=")
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= {each.strip().lower() for each in cookie.split(";")}
    assert "domain" not in cookie.lower()
    assert [each["by"] for each in stage.events("signed_in")] == ["token:shift-lead"]
    page = await stage.ask("GET", "/dashboard/", headers={"cookie": answer.cookie})
    assert (page.status, page.header("set-cookie")) == (200, "")


async def test_a_wrong_token_is_told_so_and_recorded(stages: Stages) -> None:
    """A wrong token, none at all, and words that nobody made a token of are answered alike, with the form again."""
    stage = await stages()
    for token in (b"token=wrong", b"", b"token=" + b"x" * 9_000, b"\xff\xfe", b"a=1&" * 50):
        answer = await stage.ask("POST", "/dashboard/sign-in", token, headers={**FORM, "origin": stage.origin})
        assert answer.status in (400, 401), token
        assert answer.header("set-cookie") == ""
        assert b'name="token"' in answer.body
    assert (
        b"That is not a token of this zone."
        in (
            await stage.ask("POST", "/dashboard/sign-in", b"token=wrong", headers={**FORM, "origin": stage.origin})
        ).body
    )
    # Signing somebody in from another site would have him work as somebody else.
    good = f"token={stage.tokens['control-room']}".encode()
    for origin in ({}, {"origin": "https://evil.example"}, {"origin": "null"}):
        answer = await stage.ask("POST", "/dashboard/sign-in", good, headers={**FORM, **origin})
        assert (answer.status, answer.header("set-cookie")) == (403, "")


async def test_guessing_becomes_slow(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many wrong tokens from one place are answered later and later; nobody else waits."""
    delays: list[tuple[str, float]] = []
    measured = FaultThrottle.delay_seconds

    def noted(patience: FaultThrottle, caller: str, error: Exception) -> float:
        delays.append((caller, measured(patience, caller, error)))
        return 0.0

    monkeypatch.setattr(FaultThrottle, "delay_seconds", noted)
    stage = await stages()
    monkeypatch.setattr("bsfg.wire.limits.FORGIVEN_PER_SECOND", 0.0)
    for _ in range(30):
        await stage.ask("POST", "/dashboard/sign-in", b"token=x", headers={**FORM, "origin": stage.origin})
    assert {caller for caller, _ in delays} == {"anybody at 127.0.0.1"}
    assert delays[0][1] == 0.0 < delays[-1][1]


async def test_pages_carry_the_headers_that_protect_them(stages: Stages) -> None:
    """No page can be framed, no script runs that is not a file of ours, and nothing private is kept by a cache."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    for path in ("/dashboard/", "/dashboard/sign-in", "/dashboard/api/session", "/dashboard/api/gaps"):
        answer = await stage.ask("GET", path, headers=headers)
        policy = answer.header("content-security-policy")
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
        assert (answer.header("x-frame-options"), answer.header("cache-control")) == ("DENY", "no-store")
        assert answer.header("x-content-type-options") == "nosniff"
        assert "access-control-allow-origin" not in {name.lower() for name, _ in answer.headers}
        for script in re.findall(rb"<script[^>]*>", answer.body):
            assert b'src="/dashboard/static/' in script
        assert b"http://" not in answer.body.replace(b"http://www.w3.org", b"")
        assert not re.search(rb"\son\w+=|style=", answer.body)
    refused = await stage.ask("GET", "/dashboard/api/session")
    assert (refused.status, refused.header("cache-control")) == (401, "no-store")


async def test_files_are_only_those_of_the_dashboard(stages: Stages) -> None:
    """What lies beside the files cannot be asked for; a known file is not sent twice."""
    stage = await stages()
    for path in (
        "../dashboard.py",
        "..%2fdashboard.py",
        "js/../../door.py",
        "index.html",
        "",
        "js",
        "%00",
        "js//main.js",
    ):
        assert (await stage.ask("GET", f"/dashboard/static/{path}")).status == 404, path
    first = await stage.ask("GET", "/dashboard/static/js/main.js")
    assert (first.status, first.header("content-type")) == (200, "text/javascript; charset=utf-8")
    again = await stage.ask("GET", "/dashboard/static/js/main.js", headers={"if-none-match": first.header("etag")})
    assert (again.status, again.body) == (304, b"")


async def test_an_operator_acts_with_a_reason_and_a_viewer_does_not(stages: Stages) -> None:
    """Holding and releasing are recorded with who, what and why; a viewer is refused, and that is recorded too."""
    stage = await stages()
    viewer, operator = await stage.sign_in("control-room"), await stage.sign_in("shift-lead")
    refused = await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=viewer)
    assert (refused.status, refused.json()["code"], mode(stage)) == (403, "permission_denied", Mode.AUTONOMOUS)
    assert stage.events("request_refused")[-1]["identity"] == "token:control-room"
    held = await stage.ask("POST", "/dashboard/api/act/hold", {**HOLD, "for_seconds": 3600}, headers=operator)
    assert (held.status, held.json(), mode(stage)) == (200, {"mode": "held"}, Mode.HELD)
    gate = stage.node.parts.links.gate("from-enterprise").gate
    assert (gate.held_by, gate.reason) == ("token:shift-lead", "works on the firewall")
    assert gate.held_until_unix_ms is not None
    [record] = stage.events("gate_held")
    assert (record["by"], record["reason"], record["link"]) == ("token:shift-lead", HOLD["reason"], "from-enterprise")
    assert record["caller"].startswith("127.0.0.1:")
    done = await stage.ask("POST", "/dashboard/api/act/release", {**HOLD, "reason": "done"}, headers=operator)
    assert (done.status, mode(stage)) == (200, Mode.AUTONOMOUS)
    assert stage.events("gate_released")[0]["reason"] == "done"


@pytest.mark.parametrize(
    "change",
    [
        {"reason": ""},
        {"reason": " \n "},
        {"reason": None},
        {"reason": "x" * 501},
        {"reason": ["a"]},
        {"link": 7},
        {"link": "nobody"},
        {"side": "middle"},
        {"for_seconds": 0},
        {"for_seconds": -1},
        {"for_seconds": 1e3},
        {"for_seconds": True},
        {"for_seconds": 10**12},
    ],
)
async def test_wrong_acts_change_nothing(stages: Stages, change: dict[str, Any]) -> None:
    """An act without a reason, or with values of the wrong kind, is answered with what is wrong."""
    stage = await stages()
    operator = await stage.sign_in("shift-lead")
    answer = await stage.ask("POST", "/dashboard/api/act/hold", {**HOLD, **change}, headers=operator)
    assert answer.status in (400, 404)
    assert answer.json()["hint"]
    assert mode(stage) == Mode.AUTONOMOUS


async def test_only_our_own_page_can_act(stages: Stages) -> None:
    """A request from another origin, without the page's key, or marked by the browser as foreign, does nothing."""
    stage = await stages()
    good = await stage.sign_in("shift-lead")

    def without(*names: str, **more: str) -> dict[str, str]:
        return {name: value for name, value in good.items() if name not in names} | more

    port = stage.node.http_port
    attempts = [
        without("origin"),
        without(origin="https://evil.example"),
        without(origin="null"),
        without(origin=f"http://127.0.0.1:{port}"),
        without(origin=f"https://127.0.0.1:{port + 1}"),
        without(origin=f"https://127.0.0.1:{port}.evil.example"),
        without("x-bsfg-page-key"),
        {**good, "x-bsfg-page-key": "wrong"},
        {**good, "x-bsfg-page-key": ""},
        {**good, "sec-fetch-site": "cross-site"},
        {**good, "sec-fetch-site": "same-site"},
    ]
    for headers in attempts:
        answer = await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=headers)
        assert (answer.status, answer.json()["code"]) == (403, "permission_denied"), headers
        assert (await stage.ask("POST", "/dashboard/sign-out", {}, headers=headers)).status == 403
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=without("cookie"))).status == 401
    assert (await stage.ask("GET", "/dashboard/api/act/hold", headers=good)).status == 405
    assert (await stage.ask("POST", "/dashboard/api/act/explode", HOLD, headers=good)).status == 400
    for body in (b"", b"[]", b"{", b"\xff", b'{"link": "' + b"x" * 20_000 + b'"}'):
        assert (await stage.ask("POST", "/dashboard/api/act/hold", body, headers=good)).status == 400
    assert mode(stage) == Mode.AUTONOMOUS
    assert {each["rule"] for each in stage.events("request_refused")} >= {"own_page_asks", "session_in_force"}
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=good)).status == 200


async def test_other_sites_cannot_use_the_operations_either(stages: Stages) -> None:
    """A browser adds its user's certificate also when another site asks; such a request is refused."""
    stage = await stages()
    body = {"envelope": {"message_id": "a", "to_zone": "x", "produced_at_unix_ms": 1}}
    body |= {"fact": {"subject": "a:b", "predicate": "c", "object": 1}}
    path, headers = "/v1/streams/operational/facts", {"content-type": "application/json"}
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        sent = {**headers, "sec-fetch-site": site}
        assert (await stage.ask("POST", path, body, certificate="producer", headers=sent)).status == status
    # A browser that says no site says at least where its page is from; a program says neither.
    port = stage.node.http_port
    foreign = ("https://evil.example", "null", "", f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port + 1}")
    for origin, status in (*((each, 403) for each in foreign), (stage.origin, 200), (stage.origin.upper(), 200)):
        sent = {**headers, "origin": origin}
        assert (await stage.ask("POST", path, body, certificate="producer", headers=sent)).status == status, origin
    sent = {**headers, "origin": "https://evil.example", "sec-fetch-site": "none"}
    assert (await stage.ask("POST", path, body, certificate="producer", headers=sent)).status == 403
    assert (await stage.ask("POST", path, body, certificate="producer", headers=headers)).status == 200


async def test_a_host_that_is_not_ours_is_refused(stages: Stages) -> None:
    """A name that was made to point here opens nothing; names of the certificate, addresses and configured ones do."""
    stage = await stages(more="", listen='http_names = ["bsfg.plant.example", "*.wild.example"]\n')
    port = stage.node.http_port
    good = ("localhost", f"LOCALHOST:{port}", "127.0.0.1", "[::1]:9", "10.0.0.7", "plant-a-bsfg", "PLANT-A-bsfg.:1")
    for host in (*good, "bsfg.plant.example:443", "a.wild.example"):
        assert (await stage.ask("GET", "/v1/status", certificate="viewer", headers={"host": host})).status == 200, host
    bad = (
        "evil.example",
        f"localhost.evil.example:{port}",
        "plant-a-bsfg.evil.example",
        "wild.example",
        "a.b.wild.example",
    )
    for host in (*bad, "", "a@localhost", "[::1"):
        for path in ("/v1/status", "/dashboard/", "/dashboard/static/css/base.css", "/metrics", "/nothing"):
            answer = await stage.ask("GET", path, certificate="viewer", headers={"host": host})
            assert answer.status in (400, 421), (host, path)
            if answer.status == 421:
                assert answer.json()["code"] == "host_unknown" and "http_names" in answer.json()["hint"]
    for path in ("/healthz", "/readyz"):
        assert (await stage.ask("GET", path, certificate="viewer", headers={"host": "probe.example"})).status == 200


async def test_every_answer_carries_headers_that_keep_it_data(stages: Stages) -> None:
    """Operations, refusals, pages and what is not there: no sniffing, frames or cache; nothing runs."""
    stage = await stages()
    asked = [
        ("GET", "/v1/status"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
        ("GET", "/nothing"),
        ("POST", "/v1/status"),
    ]
    asked += [("GET", "/v1/artifacts/sha256:" + 64 * "0"), ("GET", "/dashboard/"), ("GET", "/dashboard/api/session")]
    for method, path in asked:
        answer = await stage.ask(method, path, certificate="viewer")
        names = [name.lower() for name, _ in answer.headers]
        assert len(names) == len(set(names)), (path, names)
        assert answer.header("x-content-type-options") == "nosniff", path
        policy = answer.header("content-security-policy")
        assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy, path
        assert answer.header("cache-control") == "no-store" and answer.header("referrer-policy"), path
        assert answer.header("cross-origin-resource-policy") == "same-origin"
    # What is not even a request is answered by the listener itself.
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", stage.node.http_port, ssl=stage.context("viewer"), server_hostname="127.0.0.1"
    )
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nx\x01: y\r\n\r\n")
    head = await reader.read(65_536)
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ") and b"x-content-type-options: nosniff" in head


async def test_certificates_open_the_dashboard_by_themselves(stages: Stages) -> None:
    """A viewer's certificate begins a session, a producer's is told what it lacks, a stranger's that it is unknown."""
    stage = await stages()
    page = await stage.ask("GET", "/dashboard/", certificate="operator")
    assert page.status == 200
    headers = await stage.page_headers(page.cookie, "operator")
    session = await stage.ask("GET", "/dashboard/api/session", certificate="operator", headers=headers)
    assert (session.json()["identity"], session.json()["may_act"], session.json()["by"]) == (
        "operator",
        True,
        "certificate",
    )
    held = await stage.ask("POST", "/dashboard/api/act/hold", HOLD, certificate="operator", headers=headers)
    assert (held.status, stage.events("gate_held")[0]["by"]) == (200, "operator")
    # The cookie alone, or with somebody else's certificate, is worth nothing.
    for other in (None, "viewer"):
        assert (await stage.ask("GET", "/dashboard/api/session", certificate=other, headers=headers)).status == 401
    for name, status, says in (("producer", 403, b"viewer"), ("stranger", 401, b"[identities]")):
        answer = await stage.ask("GET", "/dashboard/", certificate=name)
        assert (answer.status, says in answer.body, b'name="token"' in answer.body) == (status, True, True)
    # A token counts more than the certificate beside it: its bearer chose to be that one.
    form = {**FORM, "origin": stage.origin}
    body = f"token={stage.tokens['control-room']}".encode()
    signed = await stage.ask("POST", "/dashboard/sign-in", body, headers=form, certificate="operator")
    headers = await stage.page_headers(signed.cookie, "operator")
    refused = await stage.ask("POST", "/dashboard/api/act/hold", HOLD, certificate="operator", headers=headers)
    assert refused.status == 403


async def test_sessions_end_by_time_and_by_their_owner(stages: Stages) -> None:
    """After its time, and after signing out, a session opens nothing, and what it watches comes to an end."""
    stage = await stages(more='[dashboard]\nsession = "1s"\n')
    headers = await stage.sign_in("shift-lead")
    events = await asyncio.create_task(_events(stage, headers))
    assert events[0].startswith("event: hello") and events[-1] == "event: ended\ndata: {}"
    assert (await stage.ask("GET", "/dashboard/api/session", headers=headers)).status == 401
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=headers)).status == 401
    stage = await stages()
    headers = await stage.sign_in("shift-lead")
    watching = asyncio.create_task(_events(stage, headers))
    other = await stage.sign_in("shift-lead")
    out = await stage.ask("POST", "/dashboard/sign-out", {}, headers=headers)
    assert (out.status, "max-age=0" in out.header("set-cookie").lower()) == (200, True)
    assert (await watching)[-1] == "event: ended\ndata: {}"
    assert (await stage.ask("GET", "/dashboard/api/session", headers=headers)).status == 401
    assert (await stage.ask("GET", "/dashboard/api/session", headers=other)).status == 200


async def test_a_session_that_may_act_ends_when_nobody_is_there(stages: Stages) -> None:
    """Left alone an operator's session ends, a hand on the page keeps it; a display on a wall goes on."""
    stage = await stages(more='[dashboard]\nidle = "10m"\n')
    operator, viewer = await stage.sign_in("shift-lead"), await stage.sign_in("control-room")

    def later(minutes: int) -> None:
        for session in stage.node.pages._sessions._open.values():  # type: ignore[union-attr]
            session.used_ms -= 60_000 * minutes

    later(9)
    assert (await stage.ask("GET", "/dashboard/api/session?awake", headers=operator)).status == 200
    later(9)
    assert (await stage.ask("GET", "/dashboard/api/session", headers=operator)).status == 200
    later(2)
    assert (await stage.ask("GET", "/dashboard/api/session?awake", headers=operator)).status == 401
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=operator)).status == 401
    assert (await stage.ask("GET", "/dashboard/api/session", headers=viewer)).status == 200


async def _events(stage: Stage, headers: dict[str, str]) -> list[str]:
    """Watch until the node ends it, and give all events."""
    answer = await stage.ask("GET", "/dashboard/api/events", headers=headers)
    assert answer.status == 200, answer
    return answer.body.decode().strip().split("\n\n")


async def test_a_token_that_has_expired_opens_nothing(stages: Stages) -> None:
    """A row with a date in the past refuses its token, and says why."""
    old = sessions.make()
    stage = await stages(
        more=f'[tokens.old]\nhash = "{sessions.hash_of(old)}"\nrole = "operator"\nexpires = 2024-01-01\n'
    )
    form = {**FORM, "origin": stage.origin}
    answer = await stage.ask("POST", "/dashboard/sign-in", f"token={old}".encode(), headers=form)
    assert (answer.status, answer.header("set-cookie")) == (401, "")
    assert b"has expired" in answer.body
    bearer = {"authorization": f"Bearer {old}"}
    assert (await stage.ask("GET", "/v1/status", headers=bearer)).json()["code"] == "identity_revoked"


async def test_without_tls_the_dashboard_is_for_this_machine(stages: Stages) -> None:
    """A plaintext node serves loopback names only: a name that was made to point here is refused."""
    stage = await stages(plaintext="operator")
    port = stage.node.http_port
    page = await stage.ask("GET", "/dashboard/", headers={"host": f"localhost:{port}"})
    assert (page.status, "secure" in page.header("set-cookie").lower()) == (200, False)
    headers = await stage.page_headers(page.cookie)
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=headers)).status == 200
    for host in (f"evil.example:{port}", f"localhost.evil.example:{port}", "10.0.0.7", ""):
        assert (await stage.ask("GET", "/dashboard/", headers={"host": host})).status in (400, 421), host
        sent = {**headers, "host": host, "origin": f"http://{host}"}
        assert (await stage.ask("POST", "/dashboard/api/act/release", HOLD, headers=sent)).status in (400, 421)
    assert mode(stage) == Mode.HELD


async def test_the_dashboard_can_be_switched_off(stages: Stages) -> None:
    """Without it, its addresses are not there, and the operations are as before."""
    stage = await stages(more="[dashboard]\nenabled = false\n", with_tokens=False)
    for path in ("/", "/dashboard/", "/dashboard/sign-in"):
        assert (await stage.ask("GET", path, certificate="viewer")).status == 404
    assert (await stage.ask("GET", "/v1/status", certificate="viewer")).status == 200


async def test_records_can_be_taken_away_whole(stages: Stages) -> None:
    """Quarantine and gap records are lists for the page, and JSON Lines for whoever must decide."""
    stage = await stages()
    await trouble(stage)
    headers = await stage.sign_in("control-room")
    aside = (await stage.ask("GET", "/dashboard/api/quarantine", headers=headers)).json()
    assert (aside["total"], len(aside["rows"])) == (3, 3)
    lines = await stage.ask("GET", "/dashboard/api/quarantine.jsonl", headers=headers)
    assert lines.header("content-disposition") == 'attachment; filename="quarantine-plant-a.jsonl"'
    rows = [json.loads(line) for line in lines.body.splitlines()]
    assert {row["quarantined"]["reason"] for row in rows} == {"conflict", "expired"}
    assert all(row["fact"]["subject"] for row in rows)
    gaps = (await stage.ask("GET", "/dashboard/api/gaps", headers=headers)).json()
    assert gaps["total"] == len(
        (await stage.ask("GET", "/dashboard/api/gaps.jsonl", headers=headers)).body.splitlines()
    )


async def test_slow_forms_of_strangers_take_nobodys_place(stages: Stages) -> None:
    """Callers without a certificate who never end their form have a few requests of their own, of 4 KiB at most."""
    stage = await stages()
    context, form = stage.context(None), {**FORM, "origin": stage.origin}
    large = await stage.ask("POST", "/dashboard/sign-in", b"token=" + b"x" * 5_000, headers=form)
    assert large.status == 400
    host = stage.origin.removeprefix("https://")
    head = f"POST /dashboard/sign-in HTTP/1.1\r\nHost: {host}\r\nOrigin: {stage.origin}\r\n"
    slow = [
        await asyncio.open_connection("127.0.0.1", stage.node.http_port, ssl=context)
        for _ in range(STRANGERS_PER_ADDRESS)
    ]
    for _, writer in slow:
        writer.write((head + "Content-Length: 100\r\n\r\ntoken=").encode())
    # Whoever comes from the same address without a name finds no place; nobody else notices.
    statuses = set()
    while 429 not in statuses:
        statuses.add((await stage.ask("POST", "/dashboard/sign-in", b"token=x", headers=form)).status)
    assert statuses <= {401, 429}
    assert (await stage.ask("GET", "/v1/status", certificate="viewer")).status == 200
    assert (await stage.ask("GET", "/dashboard/sign-in")).status == 200
    for _, writer in slow:
        writer.transport.abort()


WATCHES, ACTS = ("viewer", "control-room"), ("operator", "shift-lead")
NOBODIES = {"": 303, "stranger": 401, "producer": 403}
"""Whom no session is begun for, and what the page answers: without certificate, without a row, without such a role."""

OF_OPERATORS = ("act", "trail", "whole_trail")
NOT_THEIRS = {"facts": (403,), "doc": (404,)}
"""Nobody of these may look at facts, and the page that is asked for does not exist."""

OPEN = {"home": (307,), "sign_in_page": (200,), "file": (404,), "sign_in": (401, 403)}


async def _session(stage: Stage, name: str) -> dict[str, str]:
    """Give the headers of a page of somebody, without a session where he gets none."""
    if name in TOKENS:
        return await stage.sign_in(name)
    answer = await stage.ask("GET", "/dashboard/", certificate=name or None)
    if name in NOBODIES:
        assert answer.status == NOBODIES[name] and not answer.cookie, name
        return {"origin": stage.origin, "x-bsfg-page-key": "", "content-type": "application/json"}
    return await stage.page_headers(answer.cookie, certificate=name)


def _expected(name: str, page: str) -> tuple[int, ...]:
    """Give with which statuses a page answers somebody whose request has a body that is none."""
    if page in OPEN:
        return OPEN[page]
    if page == "page":
        return (NOBODIES.get(name, 200),)
    if name in NOBODIES:
        return (303,) if page == "doc" else (401,)
    if page in OF_OPERATORS:
        return (403,) if name in WATCHES else (400,) if page == "act" else (200,)
    return NOT_THEIRS.get(page, (200,))


async def test_every_page_for_every_role(stages: Stages) -> None:
    """Every route of the dashboard stands in the table of operations, and answers those whom it is for."""
    stage = await stages()
    assert stage.node.pages is not None
    given = Admission(WireLimits()), stage.node.pages._tails
    routes = [route for route in stage.node.pages.routes(*given) if isinstance(route, Route)]
    assert {route.name for route in routes} == {name for service, name in TERMS if service == PAGES}
    for name in (*NOBODIES, *WATCHES, *ACTS):
        headers = await _session(stage, name)
        # To sign out ends the session, and what is watched has no end.
        for route in sorted(
            (each for each in routes if each.name != "events"), key=lambda each: each.name == "sign_out"
        ):
            [method] = (route.methods or set()) - {"HEAD"}
            path = route.path.replace("{path:path}", "none.css").replace("{act}", "hold").replace("{stream}", "none")
            body = b"[]" if method == "POST" else None
            certificate = name if name and name not in TOKENS else None
            answer = await stage.ask(method, path, body, certificate=certificate, headers=headers)
            assert answer.status in _expected(name, route.name), (name, route.name, answer)
            assert answer.header("x-content-type-options") == "nosniff", (name, route.name)
            assert "default-src 'none'" in answer.header("content-security-policy"), (name, route.name)
    assert not stage.events("request_failed")
