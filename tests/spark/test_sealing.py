"""On a cluster Spark's calls are sealed, or the command ends: by settings, by a secret, and in words."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from bsfg.config import load
from bsfg.errors import ClusterInClear, InvalidArgument
from bsfg.spark.calls import NodeAccess
from bsfg.spark.cluster import ALLOW_CLEAR, NOT_HERE, SEALED, SECRET_FILE, SECRET_VARIABLE, secret_in_use
from bsfg.spark.land.lander import SparkWhenNeeded
from bsfg.spark.replicate.driver import Replication
from bsfg.spark.replicate.plan import RunPlan, plan_of
from bsfg.spark.session import settings

STANDALONE = "spark://host:7077"
SECRET = "a secret of the tests, long enough"
ZONE = """
[zone]
name = "hub"
[listen]
grpc = "127.0.0.1:9"
[tls]
ca = "ca.crt"
certificate = "hub.crt"
key = "hub.key"
[streams.operational]
[identities.hub-pipeline]
zone = "hub"
roles = ["pipeline"]
streams = ["*"]
[identities.plant-bsfg]
zone = "plant"
roles = ["peer"]
streams = ["*"]
[links.from-plant]
zone = "plant"
address = "127.0.0.1:9"
"""


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the secrets of whoever runs the tests."""
    for name in (SECRET_VARIABLE, "BSFG_SPARK_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Give a file with a secret."""
    path = tmp_path / "spark.secret"
    path.write_text(f"{SECRET}\n")
    return path


def test_a_local_master_needs_none_of_it() -> None:
    """Nobody else can reach it."""
    for master in ("local", "local[*]", "local[2,4]"):
        assert not set(settings(master)) & set(SEALED)


@pytest.mark.parametrize("master", ["yarn", "k8s://https://api:6443"])
def test_where_spark_makes_a_secret_for_each_run_nothing_is_asked_for(master: str) -> None:
    """Authentication and encryption are on, and the secret is Spark's own."""
    found = settings(master)
    assert {name: found[name] for name in SEALED} == SEALED
    assert "spark.authenticate.secret" not in found
    with secret_in_use(master, {}):
        assert SECRET_VARIABLE not in os.environ


def test_the_secret_of_a_standalone_cluster_is_in_the_environment_alone(secret: Path) -> None:
    """While Spark starts, and not in a setting, which processes and logs would show."""
    conf = {SECRET_FILE: str(secret), "spark.executor.memory": "1g"}
    found = settings(STANDALONE, conf)
    assert {name: found[name] for name in SEALED} == SEALED
    assert found["spark.authenticate.secret"] == NOT_HERE
    assert found["spark.executor.memory"] == "1g"
    assert not any(SECRET in value or value == str(secret) for value in found.values())
    with secret_in_use(STANDALONE, conf):
        assert os.environ[SECRET_VARIABLE] == SECRET
    assert SECRET_VARIABLE not in os.environ


def test_a_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
    """By the name of a file, or as Spark itself hands it to executors."""
    monkeypatch.setenv(SECRET_VARIABLE, "b" * 32)
    with secret_in_use(STANDALONE, {}):
        assert os.environ[SECRET_VARIABLE] == "b" * 32
    monkeypatch.setenv("BSFG_SPARK_SECRET_FILE", str(secret))
    with secret_in_use(STANDALONE, {}):
        assert os.environ[SECRET_VARIABLE] == SECRET
    assert os.environ[SECRET_VARIABLE] == "b" * 32


def test_without_a_secret_nothing_starts() -> None:
    """The error has its code, and says what to do; who declines all of it gets none of it."""
    with pytest.raises(ClusterInClear, match="without the secret") as found:
        settings(STANDALONE)
    assert found.value.code == "cluster_in_clear"
    assert "--secret-file" in found.value.hint
    declined = settings(STANDALONE, {ALLOW_CLEAR: "true"})
    assert not set(declined) & {*SEALED, "spark.authenticate.secret", ALLOW_CLEAR}
    with secret_in_use(STANDALONE, {ALLOW_CLEAR: "true"}):
        assert SECRET_VARIABLE not in os.environ


@pytest.mark.parametrize(
    "off",
    [
        "spark.authenticate=false",
        "spark.network.crypto.enabled=false",
        "spark.network.crypto.saslFallback=true",
        "spark.io.encryption.enabled=false",
    ],
)
def test_a_setting_cannot_switch_it_off_by_itself(secret: Path, off: str) -> None:
    """It takes the option that says so."""
    name, _, value = off.partition("=")
    with pytest.raises(ClusterInClear, match=name):
        settings(STANDALONE, {SECRET_FILE: str(secret), name: value})
    assert settings(STANDALONE, {ALLOW_CLEAR: "true", name: value})[name] == value


def test_secrets_that_are_none(tmp_path: Path) -> None:
    """One that is short, one that is not there, and one that everybody could read in the list of processes."""
    short, other = tmp_path / "short", tmp_path / "other"
    short.write_text("guess me\n")
    other.write_bytes(b"\xff\xfe\x00" * 20)
    with pytest.raises(InvalidArgument, match="8 characters, 16 are the least"):
        settings(STANDALONE, {SECRET_FILE: str(short)})
    with pytest.raises(InvalidArgument, match="no text"):
        settings(STANDALONE, {SECRET_FILE: str(other)})
    with pytest.raises(InvalidArgument, match="cannot be read"):
        settings(STANDALONE, {SECRET_FILE: str(tmp_path / "nothing")})
    for master in (STANDALONE, "yarn", "local[*]"):
        with pytest.raises(InvalidArgument, match="lists processes"):
            settings(master, {"spark.authenticate.secret": SECRET})


def test_the_command_says_it_before_spark_starts(tmp_path: Path) -> None:
    """In a sentence with its code, and within the time that Python takes."""
    for name in ("ca.crt", "hub.crt", "hub.key", "hub-pipeline.crt", "hub-pipeline.key"):
        (tmp_path / name).write_text("-----BEGIN ONE-----")
    (tmp_path / "zone.toml").write_text(ZONE)
    given = ["-c", str(tmp_path / "zone.toml"), "--master", STANDALONE, "--address", "127.0.0.1:9"]
    command = [sys.executable, "-m", "bsfg", "pipeline", "replicate", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "cluster_in_clear" in done.stderr
    assert "--secret-file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_landing_says_it_before_it_has_facts_to_land(secret: Path) -> None:
    """It starts Spark when there is work: a service that cannot do any must not look as if it went on."""
    with pytest.raises(ClusterInClear):
        SparkWhenNeeded("bsfg-land", STANDALONE, {})
    assert not SparkWhenNeeded("bsfg-land", STANDALONE, {SECRET_FILE: str(secret)}).is_started


def test_tasks_elsewhere_need_no_file_of_this_machine(tmp_path: Path) -> None:
    """Not for the sender, not for this zone's own node: the plan of a run has the certificates, and no path."""
    for name in ("ca.crt", "hub.crt", "hub.key"):
        (tmp_path / name).write_text(f"-----BEGIN {name}-----")
    (tmp_path / "zone.toml").write_text(ZONE)
    ca, certificate, key = (str(tmp_path / name) for name in ("ca.crt", "hub.crt", "hub.key"))
    own = NodeAccess("127.0.0.1:9", ca, certificate, key)
    plan = plan_of(load(tmp_path / "zone.toml"), "from-plant", own, "me").shipped()
    replication = Replication(None, own, [plan], tmp_path / "work", 1)  # type: ignore[arg-type]
    replication._plan.write(tmp_path / "plan")
    [bundle] = RunPlan.read(tmp_path / "plan").bundles
    for access in (bundle.own, *(each.own for each in bundle.links), *(each.peer for each in bundle.links)):
        assert access.key == "-----BEGIN hub.key-----"
        assert str(tmp_path).encode() not in pickle.dumps(access)
