"""The package as somebody installs it: the core alone, and with everything."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.packaging.environments import Environment, Outcome, clean_environment, installed_bytes, required

import bsfg
from bsfg.testing.ports import free_port

pytestmark = pytest.mark.campaign

APPEND = """
import asyncio
from bsfg import Fact, FactBatch, Message
from bsfg.fact import Envelope
from bsfg.sealing import seal
from bsfg.stores.log.storage import LogStorage

async def main():
    storage = await LogStorage.open("data")
    store = await storage.store("operational")
    envelope = lambda n: Envelope("lab", "plant", 1_700_000_000_000 + n, f"m-{n}")
    facts = [Message(envelope(n), Fact.of("asset:press-1", "temperature_measured", n)) for n in range(10)]
    await store.append(seal(FactBatch.from_messages(facts)))
    await storage.close()

asyncio.run(main())
"""

READ = """
from bsfg import Buffer, LocalReader
reader = LocalReader("data", buffer=Buffer.STORE)
print(reader.latest("asset:press-1", "temperature_measured").message.fact.object.decode())
"""

PLAINTEXT = """
[zone]
name = "lab"
[listen]
grpc = "127.0.0.1:{port}"
http_enabled = false
plaintext = true
plaintext_identity = "trial"
[identities.trial]
zone = "lab"
roles = ["producer", "consumer", "operator"]
streams = ["*"]
[streams.operational]
"""


def check(outcome: Outcome) -> Outcome:
    """Insist that a command went well."""
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.err
    return outcome


def test_a_folder_is_served_without_a_node(local: Environment, tmp_path: Path) -> None:
    """After `pip install 'bsfg[log]'`: facts are stored, read, verified, inspected, backed up and restored."""
    assert check(local.run("bsfg", "--version", cwd=tmp_path)).out == f"bsfg {bsfg.__version__}\n"
    assert check(local.run("python", "-m", "bsfg", "--version", cwd=tmp_path)).out == f"bsfg {bsfg.__version__}\n"
    assert check(local.run("bsfg", "help", "configuration", cwd=tmp_path)).out.startswith("# Configuration\n")
    check(local.run("bsfg", "init", "lab", "--zone", "lab", cwd=tmp_path))
    check(local.run("python", "-c", APPEND, cwd=tmp_path))
    assert check(local.run("python", "-c", READ, cwd=tmp_path)).out == "9\n"
    assert json.loads(check(local.run("bsfg", "verify", "data", "--json", cwd=tmp_path)).out)["ok"]
    entries = check(local.run("bsfg", "inspect", "data", "--stream", "operational", "--export", cwd=tmp_path)).out
    assert len(entries.splitlines()) == 10
    check(local.run("bsfg", "backup", "copy", "--data", "data", cwd=tmp_path))
    check(local.run("bsfg", "restore", "copy", "restored", "--accept-unsigned", cwd=tmp_path))
    check(local.run("bsfg", "verify", "restored", cwd=tmp_path))


def test_a_zone_with_a_key_is_backed_up_without_a_node(local: Environment, tmp_path: Path) -> None:
    """Where a zone has a key and nothing that could sign with it, its backup is made unsigned and says so."""
    check(local.run("bsfg", "init", "lab", "--zone", "lab", cwd=tmp_path))
    check(local.run("python", "-c", APPEND, cwd=tmp_path))
    (tmp_path / "data").rename(tmp_path / "lab" / "data")
    (tmp_path / "lab" / "certs").mkdir()
    for name in ("ca.crt", "lab-bsfg.crt", "lab-bsfg.key"):
        (tmp_path / "lab" / "certs" / name).write_text("what nobody here can read")
    made = check(local.run("bsfg", "backup", "copy", "--config", "lab/zone.toml", cwd=tmp_path))
    assert "It is not signed" in made.out
    assert not (tmp_path / "copy" / "backup.sig").exists()


def test_the_core_has_nothing_but_its_own(core: Environment, tmp_path: Path) -> None:
    """The core alone really is alone, and its requirements fit together."""
    heavy = "('grpc', 'numpy', 'pyarrow', 'pyspark', 'starlette', 'structlog')"
    code = f"import importlib.util as u; print([m for m in {heavy} if u.find_spec(m)])"
    assert check(core.run("python", "-c", code, cwd=tmp_path)).out == "[]\n"
    for command in (("--version",), ("help", "configuration"), ("--help",)):
        check(core.run("bsfg", *command, cwd=tmp_path))
    outcome = core.run("bsfg", "verify", "data", cwd=tmp_path)
    assert outcome.err.startswith("error[extra_missing]: bsfg verify needs ")
    assert "'bsfg[log]'" in outcome.err


LIGHT = """
import json, sys, time
began = time.process_time()
from bsfg import Entry, Fact, GapRecord, LightConsumer, LightNode, LightProducer
seconds = time.process_time() - began
print(json.dumps([seconds, sorted(name for name in sys.modules if name.startswith("bsfg.")), sorted(sys.modules)]))
"""


def test_the_light_client_is_light(core: Environment, wheel: Path, tmp_path: Path) -> None:
    """`pip install bsfg` takes at most 120 MB, and a producer and a consumer are imported within 0.3 s."""
    own = [info.file_size for info in ZipFile(wheel).infolist()]
    # What Python compiles of a module is about as large as its source.
    sizes = {"bsfg": 2 * sum(own)} | {name: installed_bytes(there) for name, there in required(wheel, ()).items()}
    assert sum(sizes.values()) <= 120e6, sizes
    outcomes = [json.loads(check(core.run("python", "-c", LIGHT, cwd=tmp_path)).out) for _ in range(5)]
    assert min(seconds for seconds, _, _ in outcomes) <= 0.3
    _, ours, loaded = outcomes[0]
    assert not {"grpc", "numpy", "pyarrow", "pyspark", "rich", "starlette", "typer"} & set(loaded)
    assert not [name for name in ours if name.startswith(("bsfg.node", "bsfg.wire", "bsfg.config", "bsfg.journey"))]


def test_the_light_client_works_alone(core: Environment, full: Environment, tmp_path: Path) -> None:
    """With nothing but `pip install bsfg` a program says facts to a node of another installation, and takes them."""
    port, http_port = free_port(), free_port()
    config = PLAINTEXT.format(port=port).replace("http_enabled = false", f'http = "127.0.0.1:{http_port}"')
    (tmp_path / "zone.toml").write_text(config)
    code = f"""
from bsfg import Fact, LightConsumer, LightProducer
with LightProducer("127.0.0.1:{http_port}", stream="operational", to_zone="plant", outbox="outbox") as producer:
    producer.send(Fact.of("batch:B1", "said", {{"v": 1.5}}), message_id="a")
    producer.drain(30)
with LightConsumer("trial", "127.0.0.1:{http_port}") as consumer:
    print([(entry.key.message_id, entry.message.fact.value()) for entry in consumer.entries(idle_seconds=0)])
"""
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(
            [full.folder / "bin" / "bsfg", "node"], cwd=tmp_path, stderr=log, env=clean_environment(full.folder)
        )
    try:
        check(full.run("bsfg", "status", "--wait", "60", cwd=tmp_path))
        made = full.run(
            "bsfg", "consumers", "add", "trial", "--stream", "operational", "--buffer", "store", cwd=tmp_path
        )
        assert made.code == 0, made
        assert check(core.run("python", "-c", code, cwd=tmp_path)).out == "[('a', {'v': 1.5})]\n"
    finally:
        node.terminate()
        assert node.wait(30) == 0, (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ("node", "--config", "lab/zone.toml"),
        ("append", "facts.jsonl", "--stream", "operational", "--address", "127.0.0.1:1"),
        ("fetch", "app", "--address", "127.0.0.1:1"),
        ("status", "--address", "127.0.0.1:1"),
        ("certs", "init-ca", "certs"),
    ],
    ids=lambda command: command[0],
)
def test_a_missing_extra_is_named(local: Environment, tmp_path: Path, command: tuple[str, ...]) -> None:
    """A command of the node says which extra it needs and how to get it, in two lines or as JSON."""
    (tmp_path / "facts.jsonl").touch()
    check(local.run("bsfg", "init", "lab", "--zone", "lab", cwd=tmp_path))
    outcome = local.run("bsfg", *command, cwd=tmp_path)
    assert outcome.code == 1, outcome
    first, second = outcome.err.splitlines()
    assert first.startswith(f"error[extra_missing]: bsfg {command[0]} needs ")
    assert second == "hint: pip install 'bsfg[node]'"


def test_a_missing_extra_in_a_program(local: Environment, tmp_path: Path) -> None:
    """A program that imports a producer without the extra is told how to get it."""
    outcome = local.run("python", "-c", "from bsfg import Producer", cwd=tmp_path)
    # Which of the two is missed first is a matter of the order of imports.
    assert outcome.err.splitlines()[-1] in [
        f"ImportError: bsfg.Producer needs {module}, which is not installed; pip install 'bsfg[node]'"
        for module in ("grpc", "protobuf")
    ]
    assert local.run("bsfg", "doctor", "--config", "zone.toml", cwd=tmp_path).code == 1


def test_shells_complete_the_installed_command(core: Environment, tmp_path: Path) -> None:
    """In a real bash the script of `bsfg completion` offers commands and options of the installed command."""
    script = """
eval "$(bsfg completion bash)"
offer() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _bsfg_completion bsfg; echo "${COMPREPLY[@]}"; }
offer bsfg ver
offer bsfg backup --with
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env=clean_environment(core.folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines() == ["verify", "--with-keys"], done


def test_everything_is_there_with_the_extras(full: Environment, tmp_path: Path) -> None:
    """After `pip install 'bsfg[spark]'` a node runs and takes facts, and Spark finds the data source."""
    port = free_port()
    (tmp_path / "zone.toml").write_text(PLAINTEXT.format(port=port))
    fact = {"subject": "asset:press-1", "predicate": "temperature_measured", "object": 21.5}
    (tmp_path / "facts.jsonl").write_text(
        json.dumps({"envelope": {"message_id": "1", "to_zone": "plant"}, "fact": fact})
    )
    check(full.run("bsfg", "certs", "init-ca", "certs", cwd=tmp_path))
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(
            [full.folder / "bin" / "bsfg", "node"], cwd=tmp_path, stderr=log, env=clean_environment(full.folder)
        )
    try:
        appended = full.run("bsfg", "append", "facts.jsonl", "--stream", "operational", "--json", cwd=tmp_path)
        assert json.loads(check(appended).out)["inserted"] == 1
        check(full.run("bsfg", "status", cwd=tmp_path))
    finally:
        node.terminate()
        assert node.wait(30) == 0, (tmp_path / "log").read_text()
    code = (
        "import bsfg.spark.source, bsfg.spark.session, pyspark_bsfg\n"
        "from importlib.resources import files\n"
        "print(files('bsfg.spark').joinpath('log4j2.properties').is_file(), pyspark_bsfg.DefaultSource.name())"
    )
    assert check(full.run("python", "-c", code, cwd=tmp_path)).out == "True bsfg\n"
