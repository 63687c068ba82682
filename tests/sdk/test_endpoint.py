"""Endpoints: from arguments, from the environment, and from a zone's own configuration."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import bsfg
from bsfg.cli.init import zone_file
from bsfg.errors import CertificateInvalid, InvalidArgument
from bsfg.sdk.endpoint import Endpoint
from bsfg.wire.certs import create_authority, issue


def test_plaintext_is_for_loopback_only() -> None:
    """Without certificates only this machine may be called."""
    for address in ("127.0.0.1:9443", "localhost:9443", "[::1]:9443"):
        assert not Endpoint(address).secure
    for address in ("10.0.0.1:9443", "plant.example:9443", "0.0.0.0:9443"):
        with pytest.raises(InvalidArgument, match="needs TLS"):
            Endpoint(address)
        assert Endpoint(address, "ca", "crt", "key").secure


@pytest.mark.parametrize("address", ["", "host", "host:", ":9443", "host:port"])
def test_addresses_are_checked(address: str) -> None:
    """An address is host:port."""
    with pytest.raises(InvalidArgument, match="address must"):
        Endpoint(address)


def test_a_zone_may_have_several_addresses() -> None:
    """They are a list, or a text with commas; all must be sound, and on loopback unless there are certificates."""
    assert (
        Endpoint.of(["127.0.0.1:1", "[::1]:2"]) == Endpoint("127.0.0.1:1, [::1]:2") == Endpoint("127.0.0.1:1,[::1]:2")
    )
    for wrong in ("127.0.0.1:1,", "127.0.0.1:1,b", "127.0.0.1:1,127.0.0.1:1", [], [1]):
        with pytest.raises(InvalidArgument, match="address"):
            Endpoint.of(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="needs TLS"):
        Endpoint("127.0.0.1:1,plant.example:9443")


def test_the_environment_names_the_node() -> None:
    """The variables are those of the command line; without any the hint names them."""
    found = {"BSFG_ADDRESS": "h:1", "BSFG_CA": "a", "BSFG_CERT": "b", "BSFG_KEY": "c", "BSFG_SERVER_NAME": "plant-bsfg"}
    assert Endpoint.from_environment(environment=found) == Endpoint("h:1", "a", "b", "c", "plant-bsfg")
    with pytest.raises(InvalidArgument, match="no node is named") as nothing:
        Endpoint.from_environment(environment={})
    assert "BSFG_ADDRESS" in nothing.value.hint


def test_a_zones_configuration_names_its_node(tmp_path: Path) -> None:
    """A program beside the node needs only the zone's file: address, authority, certificate by role, server name."""
    (tmp_path / "zone.toml").write_text(zone_file("plant-a", {}, ["operational"]))
    certs, now = tmp_path / "certs", datetime.now(UTC)
    create_authority(certs, name="x", days=5, now=now)
    issue(certs, "plant-a-bsfg", days=2, now=now)
    with pytest.raises(CertificateInvalid, match=r"plant-a-consumer\.crt") as missing:
        Endpoint.from_config(tmp_path / "zone.toml", role="consumer")
    assert "bsfg certs issue" in missing.value.hint
    for name in ("plant-a-consumer", "mes"):
        issue(certs, name, days=2, now=now, serves=False)
    environment = {"BSFG_CONFIG": str(tmp_path / "zone.toml")}
    found = Endpoint.from_environment(role="consumer", environment=environment)
    assert (found.address, found.server_name) == ("127.0.0.1:9443", "plant-a-bsfg")
    assert found.certificate == certs / "plant-a-consumer.crt"
    assert Endpoint.from_config(tmp_path / "zone.toml", identity="mes").key == certs / "mes.key"


def test_importing_the_package_is_light() -> None:
    """`import bsfg` loads no library; what it offers is found by name, and only that."""
    code = "import sys, bsfg; print(sorted({'grpc', 'numpy', 'pyarrow', 'orjson'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for name in bsfg._HOMES:
        assert getattr(bsfg, name).__name__ == name
        assert name in dir(bsfg)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = bsfg.nonsense
