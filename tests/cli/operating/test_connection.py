"""Which node a command calls, and as whom: options, variables and the zone's file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.cli.operating.conftest import Cli

from bsfg.cli.connection import NodeChoice, resolve
from bsfg.errors import BsfgError, InvalidArgument
from bsfg.wire.certs import create_authority, issue

FILE = """
[zone]
name = "plant-a"
[listen]
grpc = "0.0.0.0:9443"
[tls]
ca = "certs/ca.crt"
certificate = "certs/plant-a-bsfg.crt"
key = "certs/plant-a-bsfg.key"
[identities.gone]
zone = "plant-a"
roles = ["operator"]
streams = ["*"]
revoked = true
reason = "laptop lost"
[identities.ops-1]
zone = "plant-a"
roles = ["operator"]
streams = ["*"]
[identities.ops-2]
zone = "plant-a"
roles = ["operator", "producer"]
streams = ["*"]
[identities.eyes]
zone = "plant-a"
roles = ["viewer"]
streams = ["*"]
[identities.enterprise-bsfg]
zone = "enterprise"
roles = ["peer"]
streams = ["*"]
[streams.operational]
"""


@pytest.fixture
def zone(tmp_path: Path) -> Path:
    """The file of a zone whose node, revoked and second operator, and viewer have certificates."""
    path = tmp_path / "zone.toml"
    path.write_text(FILE)
    certs, now = tmp_path / "certs", datetime.now(UTC)
    create_authority(certs, name="test", days=10, now=now)
    for name in ("plant-a-bsfg", "gone", "ops-2", "eyes"):
        issue(certs, name, days=5, now=now)
    return path


def refusal(choice: NodeChoice, *roles: str) -> BsfgError:
    """Give the error that a choice ends in."""
    with pytest.raises(InvalidArgument) as caught:
        resolve(choice, roles or ("operator",))
    return caught.value


def test_the_file_says_where_the_node_is_and_whose_certificate_is_meant(zone: Path) -> None:
    """The first fitting identity in force that has a certificate beside the node's is taken."""
    target = resolve(NodeChoice(config=zone), ("operator",))
    assert target.address == "127.0.0.1:9443"
    assert target.server_name == "plant-a-bsfg"
    assert target.files is not None
    assert target.files.certificate == zone.parent / "certs" / "ops-2.crt"
    assert target.files.ca == zone.parent / "certs" / "ca.crt"


def test_roles_are_tried_in_order(zone: Path) -> None:
    """A command that a viewer may give is given as one, also where an operator stands first in the file."""
    target = resolve(NodeChoice(config=zone), ("viewer", "operator"))
    assert target.files is not None
    assert target.files.certificate.name == "eyes.crt"


def test_options_go_before_the_file(zone: Path) -> None:
    """What an option says replaces what the file says, and leaves the rest."""
    choice = NodeChoice(
        config=zone, address="10.0.0.7:9000", ca=Path("a"), cert=Path("b"), key=Path("c"), server_name="other"
    )
    target = resolve(choice, ("operator",))
    assert target.files is not None
    assert (target.address, target.server_name) == ("10.0.0.7:9000", "other")
    assert (target.files.ca, target.files.certificate, target.files.key) == (Path("a"), Path("b"), Path("c"))


def test_an_identity_can_be_named(zone: Path) -> None:
    """A named identity is used whatever its roles are: the node decides what it may."""
    target = resolve(NodeChoice(config=zone, identity="eyes"), ("operator",))
    assert target.files is not None
    assert target.files.certificate.name == "eyes.crt"


def test_an_unknown_identity_gets_a_suggestion(zone: Path) -> None:
    """A misspelt identity is answered with the one that was probably meant, and with all there are."""
    error = refusal(NodeChoice(config=zone, identity="ops1"))
    assert "did you mean 'ops-1'?" in error.message
    assert "eyes" in error.hint


def test_a_missing_certificate_says_how_to_make_one(zone: Path) -> None:
    """Without a certificate the hint is the command that issues it."""
    error = refusal(NodeChoice(config=zone, identity="ops-1"))
    assert "no certificate of the identity ops-1" in error.message
    assert "certs ops-1 --role-hint operator" in error.hint
    error = refusal(NodeChoice(config=zone), "consumer")
    assert "an identity with the role consumer" in error.message
    assert "[identities.plant-a-consumer]" in error.hint


def test_without_any_word_the_file_here_is_meant(zone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zone.toml in the current folder is used by itself; where there is none, all ways are named."""
    monkeypatch.chdir(zone.parent)
    assert resolve(NodeChoice(), ("operator",)).address == "127.0.0.1:9443"
    monkeypatch.chdir(zone.parent / "certs")
    assert "--address" in refusal(NodeChoice()).hint


def test_an_address_alone_is_plaintext_on_loopback_only() -> None:
    """Without a certificate only this machine can be called."""
    assert resolve(NodeChoice(address="127.0.0.1:9443"), ()).files is None
    assert resolve(NodeChoice(address="[::1]:9443"), ()).address == "[::1]:9443"
    assert "a certificate is needed" in refusal(NodeChoice(address="plant-a.example:9443")).message


@pytest.mark.parametrize("address", ["plant-a", ":9443", "host:port", "::1:9443", "host:70000", ""])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    """Anything else is refused with the form that is expected."""
    assert (
        '"host:port"' in refusal(NodeChoice(address=address)).message
        or "must not be empty" in refusal(NodeChoice(address=address)).message
    )


def test_tls_needs_all_three_files() -> None:
    """The files that are missing are named."""
    error = refusal(NodeChoice(address="127.0.0.1:1", ca=Path("ca.crt")))
    assert error.message == "--cert and --key are missing"
    assert refusal(NodeChoice(address="127.0.0.1:1", ca=Path("a"), cert=Path("b"))).message == "--key is missing"


def test_a_node_on_any_free_port_needs_an_address(zone: Path) -> None:
    """Port 0 in the file says nothing about where the node is."""
    zone.write_text(FILE.replace(":9443", ":0"))
    assert "--address" in refusal(NodeChoice(config=zone)).hint


def test_a_plaintext_zone_is_called_without_a_certificate(zone: Path) -> None:
    """A zone for trials needs no files."""
    plain = '"127.0.0.1:9443"\nhttp_enabled = false\nplaintext = true\nplaintext_identity = "eyes"'
    zone.write_text(FILE.replace('"0.0.0.0:9443"', plain))
    target = resolve(NodeChoice(config=zone), ("operator",))
    assert (target.address, target.files) == ("127.0.0.1:9443", None)


def test_variables_stand_for_options(cli: Cli, zone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BSFG_CONFIG and BSFG_IDENTITY say what --config and --identity say, and an option goes before them."""
    monkeypatch.setenv("BSFG_CONFIG", str(zone))
    monkeypatch.setenv("BSFG_IDENTITY", "nobody")
    assert "'nobody' has no row in [identities]" in cli("gate").err
    assert "'someone' has no row in [identities]" in cli("gate", "--identity", "someone").err


def test_a_certificate_that_is_not_the_keys_is_refused_before_any_call(cli: Cli, zone: Path) -> None:
    """The two files that do not belong together are named."""
    certs = zone.parent / "certs"
    done = cli("gate", "-c", zone, "--cert", certs / "eyes.crt", "--key", certs / "ops-2.key")
    assert done.code == 1
    assert "error[certificate_invalid]" in done.err
    assert "ops-2.key is not the key of" in done.err
