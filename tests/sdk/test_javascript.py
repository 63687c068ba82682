"""The client in JavaScript under ``examples``: it agrees with the product to the byte, and survives what it must."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli.folders import flip, segments
from tests.e2e.zones import Zone
from tests.sdk.conftest import endpoint

from bsfg import Buffer, Fact, Producer
from bsfg.canonical import NotJson, canonicalize
from bsfg.ports import ConsumerSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "javascript"
FACTS = 300
ADDRESSED = {"stream": "operational", "from_zone": "plant", "to_zone": "enterprise"}

TEXTS = [
    '{"b": 1, "a": [1, 2]}', '{"v": 1.10}', '{"v": -0}', '"\\u00e9"', '{"a":1,"a":2}', '{"v": 1e400}', '{"v": NaN}',
    '{"\\ud83d\\ude00":1,"\\uff5e":2}', '"\\ud800"', '"\\/"', '"\t"', '"\\u0007\\b\\f\\n\\r\\t\\u001f\\u007f\\u2028"',
    "01",
    "-", "1.", "+1", "[1,]", "{,}", "", " ", "nul", "null", "true", "1E+5", "-0.0e-7", "[" * 128 + "]" * 128,
    "[" * 129 + "]" * 129, '{"a":{"z":1,"y":[{"c":1,"b":2}]}}', '{"__proto__":{"a":1},"b":2}', "1 2", '{"a" :\r\n 1}',
    "\ufeff1", '"\\x41"', "123456789012345678901234567890.5e1",
]  # fmt: skip


def environment(zone: Zone, role: str, **more: str) -> dict[str, str]:
    files = zone.files(f"{zone.name}-{role}")
    named = {"BSFG_CA": files.ca, "BSFG_CERT": files.certificate, "BSFG_KEY": files.key}
    return {
        **os.environ,
        **{name: str(path) for name, path in named.items()},
        "BSFG_HTTP": f"localhost:{zone.http_port}",
        "BSFG_SERVER_NAME": f"{zone.name}-bsfg",
        **more,
    }


def run(script: str, *args: object, env: dict[str, str] | None = None, stdin: str | None = None) -> str:
    command = ["node", str(EXAMPLE / script), *map(str, args)]
    done = subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(rng: random.Random, depth: int = 0) -> str:
    """Write some JSON in one of many ways."""
    kind = rng.randrange(7 if depth < 4 else 5)
    space = rng.choice(["", "", " ", "\n "])
    if kind < 2:
        return rng.choice(["0", "-1", "1.50", "3e7", "12E-2", "0.0", "true", "null", "-0", "9007199254740993"])
    if kind < 5:
        text = "".join(rng.choice('aé\u20ac\U0001f600\uff5e"\\\u0001z/') for _ in range(rng.randrange(5)))
        return json.dumps(text, ensure_ascii=rng.random() < 0.5)
    parts = [written(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return f"[{space}{f',{space}'.join(parts)}]"
    keys = [json.dumps(rng.choice("aé\U0001f600\uff5ez") + str(rng.randrange(3))) for _ in parts]
    return "{" + f"{space},".join(f"{key}{space}:{part}" for key, part in zip(keys, parts, strict=True)) + "}"


def expected(text: str) -> str | None:
    try:
        return canonicalize(text.encode()).decode()
    except NotJson:
        return None


def test_its_canonical_form_is_ours(tmp_path: Path) -> None:
    """Whatever is accepted becomes the same bytes, and whatever is refused is refused in both."""
    rng = random.Random(7)
    texts = TEXTS + [written(rng) for _ in range(2_000)]
    script = tmp_path / "canonical.mjs"
    script.write_text(
        f'import {{ canonicalize }} from "{EXAMPLE}/canonical.mjs";\n'
        'import { readFileSync } from "node:fs";\n'
        "const found = JSON.parse(readFileSync(0, 'utf8')).map((text) => {\n"
        "  try { return canonicalize(text); }\n"
        "  catch (error) { if (!(error instanceof SyntaxError)) throw error; return null; }\n"
        "});\n"
        "console.log(JSON.stringify(found));\n"
    )
    found = json.loads(run(str(script), stdin=json.dumps(texts)))
    assert {text: form for text, form in zip(texts, found, strict=True) if form != expected(text)} == {}
    assert sum(form is None for form in found) > 15


@pytest.fixture
def consumers(zone: Zone) -> Zone:
    """A zone with the consumers of these tests."""
    create(zone, "app-js")
    create(zone, "app-late")
    return zone


def create(zone: Zone, name: str) -> None:
    async def made() -> None:
        async with zone.admin() as operator:
            await operator.create_consumer(ConsumerSpec(name, "operational", Buffer.STORE))

    asyncio.run(made())


def started(script: str, *args: object, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["node", str(EXAMPLE / script), *map(str, args)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def killed_after(process: subprocess.Popen[str], lines: int) -> None:
    """Let a program print so many lines, then kill it."""
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()


REFUSED = """
import {{ nodeFromEnvironment }} from "{example}/produce.mjs";
import {{ Producer }} from "{example}/bsfg.mjs";
const node = nodeFromEnvironment();
const [outbox, messageId] = process.argv.slice(2);
const producer = await new Producer(node, {{ stream: "operational", toZone: "enterprise", outbox }}).start();
await producer.send({{ subject: "none", predicate: "said", object: 1 }}, {{ messageId }});
await producer.drain();
await producer.close();
node.close();
"""


def test_what_is_refused_stays_kept_aside(zone: Zone, tmp_path: Path) -> None:
    """Facts that were refused by the node in one run are there after the next one, too."""
    script, outbox = tmp_path / "refused.mjs", tmp_path / "outbox"
    script.write_text(REFUSED.format(example=EXAMPLE))
    for id in ("first", "second"):
        run(str(script), outbox, id, env=environment(zone, "producer"))
    kept = [json.loads(path.read_text()) for path in sorted((outbox / "refused").iterdir())]
    assert [json.loads(each["line"])["envelope"]["message_id"] for each in kept] == ["first", "second"]


def taken(output: Path) -> list[str]:
    return [json.loads(line)["key"] for line in output.read_text().splitlines()]


def test_every_fact_arrives_once_whoever_is_killed(consumers: Zone, tmp_path: Path) -> None:
    """Producer, node and consumer are killed in the middle and started again: each fact is taken once, in order."""
    zone, output, report = consumers, tmp_path / "taken.jsonl", tmp_path / "report.bin"
    report.write_bytes(os.urandom(3_000_000))
    producing = environment(zone, "producer", BSFG_OUTBOX=str(tmp_path / "outbox"))
    killed_after(started("produce.mjs", "B1", FACTS, env=producing), FACTS // 3)
    process = started("produce.mjs", "B1", FACTS, report, env=producing)
    assert process.stdout is not None and process.stdout.readline()
    zone.kill()
    time.sleep(0.3)
    zone.start()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert [name for name in os.listdir(tmp_path / "outbox") if name.endswith(".json")] == []
    assert os.listdir(tmp_path / "outbox" / "refused") == []
    assert len(zone.entries(Buffer.STORE)) == FACTS + 1

    consuming = environment(zone, "consumer")
    killed_after(started("consume.mjs", "app-js", output, env=consuming), FACTS // 3)
    with output.open("a") as file:
        file.write('{"key": "torn by a ki')
    process = started("consume.mjs", "app-js", output, "2", env=consuming)
    assert process.stdout is not None and process.stdout.readline()
    zone.kill()
    time.sleep(0.3)
    zone.start()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert taken(output) == [f"plant/B1/{step}" for step in range(FACTS)] + ["plant/B1/report"]
    first = json.loads(output.read_text().splitlines()[0])
    assert first["objectJson"] == '{"celsius":0.50,"step":0}'
    [copy] = [path for path in tmp_path.iterdir() if path.name.startswith("taken.jsonl.")]
    assert copy.read_bytes() == report.read_bytes()
    assert run("consume.mjs", "app-js", output, "0", env=consuming) == ""


USES = """
import { writeFileSync } from "node:fs";
import { Consumer, Producer, download, upload } from "%(example)s/bsfg.mjs";
import { nodeFromEnvironment } from "%(example)s/produce.mjs";
const node = nodeFromEnvironment();
const refused = [];
"""


def use(tmp_path: Path, code: str, env: dict[str, str]) -> object:
    """Run a few lines that use the client; they leave what they found in ``found``."""
    script = tmp_path / "use.mjs"
    script.write_text(USES % {"example": EXAMPLE} + code + "\nconsole.log(JSON.stringify(found));\nnode.close();\n")
    return json.loads(run(str(script), env=env))


def test_what_is_refused_is_kept_aside_and_stops_nobody(consumers: Zone, tmp_path: Path) -> None:
    """A taken id and a fact that breaks a rule leave the outbox with their reasons; the others arrive."""
    with Producer(endpoint(consumers), **ADDRESSED) as producer:  # type: ignore[arg-type]
        producer.append(Fact("batch:B1", "said"), message_id="taken")
    env = environment(consumers, "producer", BSFG_OUTBOX=str(tmp_path / "outbox"))
    code = """
const producer = await new Producer(node, {
  stream: "operational", toZone: "enterprise", outbox: process.env.BSFG_OUTBOX,
  onRefused: (error) => refused.push(error.code),
}).start();
const said = { subject: "batch:B1", predicate: "said", object: { a: 1 } };
await Promise.all([
  producer.send(said, { messageId: "good-1" }), producer.send(said, { messageId: "taken" }),
  producer.send({ ...said, subject: "no subject" }, { messageId: "bad" }),
  producer.send(
    { ...said, objectBytes: Buffer.from([0, 255]) },
    { messageId: "good-2", mediaType: "image/png", labels: { a: "b" } },
  ),
]);
let wrong;
try { await producer.send({ ...said, object: { a: NaN } }, { messageId: "nan" }); }
catch (error) { wrong = error.code; }
await producer.drain();
await producer.close();
const found = { refused: refused.sort(), wrong };
"""
    found = use(tmp_path, code, env)
    assert found == {"refused": ["conflicting_duplicate", "invalid_fact"], "wrong": "invalid_fact"}
    assert len(os.listdir(tmp_path / "outbox" / "refused")) == 2
    assert not any(each.stat().st_mode & 0o077 for each in (tmp_path / "outbox").rglob("*")), "facts are nobody else's"
    entries = {entry.key.message_id: entry for entry in consumers.entries(Buffer.STORE)}
    assert set(entries) == {"taken", "good-1", "good-2"}
    assert entries["good-2"].message.fact.object == b"\0\xff"


def test_gaps_refusals_and_unconfirmed_entries(consumers: Zone, tmp_path: Path) -> None:
    """What was damaged comes as a gap, what is refused leaves a record, and what is not confirmed comes again."""
    zone = consumers
    with Producer(endpoint(zone), **ADDRESSED) as producer:  # type: ignore[arg-type]
        for number in range(10):
            producer.append(Fact.of("batch:B1", "said", number), message_id=str(number))
    env = environment(zone, "consumer")
    code = """
const consumer = new Consumer(node, "app-js", { batchFacts: 2 });
const seen = [];
for await (const item of consumer.items({ idleMs: 0 })) {
  seen.push(item.offset);
  if (item.offset === 3) consumer.refuse(item, "unknown_schema", "no reader for it");
  else if (item.offset !== 5) consumer.confirm(item);
}
await consumer.close();
const again = new Consumer(node, "app-js");
for await (const item of again.items({ idleMs: 0 })) { seen.push(item.offset); again.confirm(item); }
await again.close();
const found = { seen, committed: again.committed };
"""
    found = use(tmp_path, code, env)
    assert isinstance(found, dict)
    assert found["seen"][:10] == list(range(10)) and found["seen"][10] == 5
    assert found["committed"] == 9

    zone.kill()
    [segment] = segments(zone.data)
    flip(segment, segment.read_bytes().index(b"batch:B1", segment.stat().st_size // 2))
    zone.start()
    late = """
const consumer = new Consumer(node, "app-late");
const found = [];
for await (const item of consumer.items({ idleMs: 0 })) {
  found.push(item.kind === "gap" ? [item.first, item.last, item.reason] : item.offset);
  consumer.confirm(item);
}
await consumer.close();
"""
    found = use(tmp_path, late, env)
    assert isinstance(found, list)
    [gap] = [each for each in found if isinstance(each, list)]
    assert gap[2] == "damaged"
    assert [each for each in found if each != gap] == [at for at in range(10) if not gap[0] <= at <= gap[1]]
    assert found.index(gap) == gap[0]


def test_errors_have_their_codes(consumers: Zone, tmp_path: Path) -> None:
    """Who may not is told at once; an absent node is borne as long as patience lasts, a wrong one is not believed."""
    code = """
const code = async (work) => {
  try { await work(); return null; } catch (error) { return [error.code, error.retryable]; }
};
const fetch = async (consumer) => { for await (const item of consumer.items({ idleMs: 0 })) return item; };
const away = nodeFromEnvironment();
process.env.BSFG_SERVER_NAME = "somebody-else";
const other = nodeFromEnvironment();
away.where.port = 1;
const { default: http } = await import("node:http");
const stranger = http.createServer((asked, answer) => answer.end("<html>"));
await new Promise((done) => stranger.listen(0, "127.0.0.1", done));
const wrong = new node.constructor({ host: "127.0.0.1", port: stranger.address().port });
const found = [
  await code(() => fetch(new Consumer(node, "app-none"))),
  await code(() => fetch(new Consumer(node, "not-mine"))),
  await code(() => fetch(new Consumer(away, "app-js", { patienceMs: 300 }))),
  await code(() => fetch(new Consumer(other, "app-js", { patienceMs: 0 }))),
  await code(() => fetch(new Consumer(wrong, "app-js", { patienceMs: 0 }))),
  await code(() => upload(wrong, "b", "k", process.argv[1], undefined, { patienceMs: 0 })),
  await code(() => download(node, "sha256:" + "0".repeat(64), process.env.TARGET)),
];
wrong.close();
stranger.close();
"""
    found = use(tmp_path, code, environment(consumers, "consumer", TARGET=str(tmp_path / "nothing")))
    assert not list(tmp_path.glob("nothing*"))
    assert found == [
        ["unknown_consumer", False],
        ["permission_denied", False],
        *[["peer_unreachable", True]] * 4,
        ["artifact_missing", False],
    ]


def test_a_download_goes_on(consumers: Zone, tmp_path: Path) -> None:
    """What was begun is not fetched again; what is not its beginning is dropped and said."""
    content = os.urandom(2_000_000)
    with Producer(endpoint(consumers), **ADDRESSED) as producer:  # type: ignore[arg-type]
        reference = producer.upload("reports", "B1", content)
        producer.append(Fact("batch:B1", "reported", b"{}", reference), message_id="a")
    target = tmp_path / "copy"
    part = tmp_path / f"copy.{reference.digest[7:19]}.part"
    part.write_bytes(content[:1_500_000])
    code = f"""
const asked = [];
const ask = node.ask.bind(node);
node.ask = async (...args) => {{
  const answer = await ask(...args);
  asked.push(Number(answer.headers["content-length"]));
  return answer;
}};
const found = [asked];
for (const wrong of [null, "x".repeat(100), "x".repeat(2000001)]) {{
  if (wrong !== null) writeFileSync("{part}", wrong);
  try {{ await download(node, "{reference.digest}", "{target}"); found.push("done"); }}
  catch (error) {{ found.push(error.code); }}
}}
"""
    found = use(tmp_path, code, environment(consumers, "consumer"))
    assert found == [[500_000, 1_999_900], "done", "digest_mismatch", "digest_mismatch"]
    assert target.read_bytes() == content and not part.exists()
    assert hashlib.sha256(content).hexdigest() == reference.digest[7:]
