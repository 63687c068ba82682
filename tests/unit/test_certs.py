"""Certificates are made fit for their use, and what is wrong with one is said before a handshake fails."""

import json
import socket
import tarfile
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st

from bsfg.cli import main
from bsfg.config import load
from bsfg.errors import CertificateInvalid, FileExists, InvalidArgument
from bsfg.wire.certcheck import (
    Expiry,
    check_files,
    describe,
    handshake_with_itself,
    lifetime,
)
from bsfg.wire.certs import create_authority, is_authority, issue, load_certificates, load_key
from bsfg.wire.peer import names_of
from bsfg.wire.tls import TlsFiles
from bsfg.wording import CheckFinding, CheckLevel

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give an authority with the certificate of a node; tests add files of their own names."""
    path = tmp_path_factory.mktemp("certs")
    create_authority(path, name="Test authority", days=1000, now=NOW)
    issue(path, "plant-a-bsfg", days=365, now=NOW, hosts=["plant.example", "127.0.0.1", "plant.example"])
    return path


def files(folder: Path, name: str = "plant-a-bsfg", *, ca: str = "ca", key: str | None = None) -> TlsFiles:
    """Name the three files of a certificate."""
    return TlsFiles(folder / f"{ca}.crt", folder / f"{name}.crt", folder / f"{key or name}.key")


def faults(found: list[CheckFinding]) -> list[tuple[str, str]]:
    """Give level and check of everything that is not right."""
    assert all(finding.do for finding in found if finding.level != CheckLevel.OK)
    return [(str(finding.level), finding.check) for finding in found if finding.level != CheckLevel.OK]


def test_authority(folder: Path) -> None:
    """The authority may sign certificates but not further authorities, and its key is the owner's alone."""
    authority = load_certificates(folder / "ca.crt")[0]
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = authority.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)
    assert (usage.key_cert_sign, usage.crl_sign, usage.digital_signature) == (True, True, False)
    assert (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert isinstance(load_key(folder / "ca.key"), ec.EllipticCurvePrivateKey)


def test_node_certificate(folder: Path) -> None:
    """A node's certificate has its name twice, its hosts and the names of the own machine, and both usages."""
    certificate = load_certificates(folder / "plant-a-bsfg.crt")[0]
    facts = describe(certificate, NOW)
    assert facts["common_name"] == "plant-a-bsfg"
    assert facts["alternative_names"] == ["plant-a-bsfg", "plant.example", "127.0.0.1", "localhost", "::1"]
    assert facts["usage"] == ["client", "server"]
    assert (facts["key"], facts["is_authority"], facts["expiry"]) == ("ECDSA secp256r1", False, "ok")
    assert certificate.serial_number != load_certificates(folder / "ca.crt")[0].serial_number
    assert (folder / "plant-a-bsfg.key").stat().st_mode & 0o777 == 0o600
    assert names_of(certificate).alternative_names == ("plant-a-bsfg", "plant.example", "localhost")
    assert names_of(certificate).telling_names == ("plant-a-bsfg", "plant.example")


def test_application_certificate_cannot_serve(folder: Path) -> None:
    """A certificate for an application is for calling only, and has no name of a machine."""
    issued = issue(folder, "mes", days=10, now=NOW, serves=False)
    assert describe(issued.certificate, NOW)["alternative_names"] == ["mes"]
    assert describe(issued.certificate, NOW)["usage"] == ["client"]
    assert faults(check_files(files(folder, "mes"), NOW, 0)) == [("error", "usage")]


def test_certificate_never_outlives_its_authority(folder: Path) -> None:
    """A longer life than the authority's is cut to it."""
    authority = load_certificates(folder / "ca.crt")[0]
    issued = issue(folder, "long", days=9999, now=NOW)
    assert issued.certificate.not_valid_after_utc == authority.not_valid_after_utc


def test_expired_authority_issues_nothing(tmp_path: Path) -> None:
    """An authority that has expired is not used."""
    create_authority(tmp_path, name="Old", days=1, now=NOW - 10 * DAY)
    with pytest.raises(CertificateInvalid, match="has expired"):
        issue(tmp_path, "x", days=1, now=NOW)


def test_a_folder_without_an_authority_names_the_step_that_makes_one(tmp_path: Path) -> None:
    """Who issues before there is an authority is told of init-ca, not of a configuration that plays no part."""
    with pytest.raises(CertificateInvalid, match="there is no authority in") as caught:
        issue(tmp_path / "none", "plant-a-bsfg", days=1, now=NOW)
    assert "bsfg certs init-ca" in str(caught.value.hint) and "[tls]" not in str(caught.value.hint)


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    """Existing files stay unless told otherwise, and then they are replaced as a whole."""
    before = (folder / "ca.key").read_bytes()
    with pytest.raises(FileExists, match="already there"):
        create_authority(folder, name="Other", days=1, now=NOW)
    with pytest.raises(FileExists):
        issue(folder, "plant-a-bsfg", days=1, now=NOW)
    assert (folder / "ca.key").read_bytes() == before
    create_authority(tmp_path, name="A", days=1, now=NOW)
    create_authority(tmp_path, name="B", days=1, now=NOW, force=True)
    assert describe(load_certificates(tmp_path / "ca.crt")[0], NOW)["common_name"] == "B"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "ca.key"]


@pytest.mark.parametrize("name", ["", "ca", "CA", "ca.", "../x", "a b", "a/b", "-x", "x" * 65, "ä", "mes."])
def test_bad_names(folder: Path, name: str) -> None:
    """A name that is not safe as a file or too long for a certificate is refused."""
    with pytest.raises(InvalidArgument):
        issue(folder, name, days=1, now=NOW)


@pytest.mark.parametrize("name", ["Plant-A-bsfg", "ENTERPRISE-BSFG", "enterprise-bsfg.", "enterprise-Bsfg"])
def test_names_that_would_be_taken_for_a_node(folder: Path, name: str) -> None:
    """A name that TLS takes for a node's, or that differs from one that is there by its case alone, is refused."""
    with pytest.raises(InvalidArgument):
        issue(folder, name, days=1, now=NOW)
    assert not (folder / f"{name}.key").exists()


def test_hosts_are_written_as_they_are_compared(folder: Path) -> None:
    """A host is written in lower case and without a dot at its end, so that one host is one name."""
    hosts = ["GW.Plant.Example.", "gw.plant.example", "10.0.0.7"]
    issued = issue(folder, "web", days=1, now=NOW, hosts=hosts, serves=False)
    assert describe(issued.certificate, NOW)["alternative_names"] == ["web", "gw.plant.example", "10.0.0.7"]


NODE_HOSTS = ["enterprise-bsfg", "ENTERPRISE-BSFG", "enterprise-bsfg.", "Enterprise-Bsfg..", "*.enterprise-bsfg"]


@pytest.mark.parametrize("host", [*NODE_HOSTS, "a b", "", "http://x", "x" * 300])
def test_bad_hosts(folder: Path, host: str) -> None:
    """A host that would let one node pose as another, or that is no host, is refused."""
    with pytest.raises(InvalidArgument):
        issue(folder, "fresh", days=1, now=NOW, hosts=[host])
    assert not (folder / "fresh.key").exists()


@pytest.mark.parametrize("days", [0, -1, 40_000])
def test_bad_lifetimes(tmp_path: Path, days: int) -> None:
    """A certificate lasts at least a day and at most a century."""
    with pytest.raises(InvalidArgument):
        create_authority(tmp_path, name="A", days=days, now=NOW)


@given(st.integers(-100, 2000), st.integers(0, 100))
def test_lifetime_against_the_calendar(day: int, warning_days: int) -> None:
    """Every moment is before, within, near the end of or after the life of a certificate."""
    life = lifetime(SHORT, NOW + day * DAY, warning_days * 86_400)
    if day > 400:
        expected = Expiry.EXPIRED
    elif day < 0:
        expected = Expiry.NOT_YET_VALID
    else:
        expected = Expiry.WARNING if 400 - day < warning_days else Expiry.OK
    assert (life.expiry, life.left_days) == (expected, 400 - day)


def signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> x509.Certificate:
    """Make a certificate by hand, for shapes that the product does not make."""
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number()).public_key(key.public_key())
    builder = builder.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
    builder = builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
    builder = builder.not_valid_before(NOW).not_valid_after(NOW + 400 * DAY)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return builder.sign(issuer_key, hashes.SHA256())


KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]
SHORT = signed("short", KEYS[0], "short", KEYS[0])


def pem(*certificates: x509.Certificate) -> bytes:
    """Write certificates one after the other."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def key_pem(key: ec.EllipticCurvePrivateKey, password: bytes | None = None) -> bytes:
    """Write a private key."""
    lock = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def three_tiers(folder: Path, path_length: int | None) -> TlsFiles:
    """Write a root, an intermediate and a leaf, all by hand."""
    root = signed("root", KEYS[0], "root", KEYS[0], x509.BasicConstraints(True, path_length))
    middle = signed("middle", KEYS[1], "root", KEYS[0], x509.BasicConstraints(True, 0))
    leaf = signed("leaf", KEYS[2], "middle", KEYS[1], x509.SubjectAlternativeName([x509.DNSName("leaf")]))
    (folder / "ca.crt").write_bytes(pem(root))
    (folder / "leaf.crt").write_bytes(pem(leaf, middle))
    (folder / "leaf.key").write_bytes(key_pem(KEYS[2]))
    (folder / "leaf.key").chmod(0o600)
    return files(folder, "leaf")


def test_good_certificate(folder: Path) -> None:
    """A certificate that the product made passes every check, a real handshake included."""
    found = check_files(files(folder), NOW)
    assert faults(found) == []
    assert [finding.check for finding in found][-1] == "handshake"
    assert handshake_with_itself(files(folder)) == "TLSv1.3"


def test_expired_and_soon(folder: Path) -> None:
    """An expired certificate is an error, one that ends within 30 days a warning."""
    issue(folder, "old", days=1, now=NOW - 10 * DAY)
    assert faults(check_files(files(folder, "old"), NOW)) == [("error", "certificate_dates")]
    issue(folder, "soon", days=29, now=NOW)
    assert faults(check_files(files(folder, "soon"), NOW)) == [("warning", "certificate_dates")]
    assert faults(check_files(files(folder, "soon"), NOW, warning_seconds=86_400)) == []


def test_not_yet_valid(folder: Path) -> None:
    """A certificate from the future points at the clock."""
    issue(folder, "future", days=90, now=NOW + 30 * DAY)
    found = check_files(files(folder, "future"), NOW)
    assert faults(found) == [("error", "certificate_dates")]
    assert any("clock" in finding.do for finding in found)


def test_wrong_authority(folder: Path, tmp_path: Path) -> None:
    """A certificate of another authority is found out, even one with the same name."""
    create_authority(tmp_path, name="Test authority", days=1000, now=NOW)
    other = TlsFiles(tmp_path / "ca.crt", folder / "plant-a-bsfg.crt", folder / "plant-a-bsfg.key")
    assert faults(check_files(other, NOW)) == [("error", "chain")]


def test_key_of_another_certificate(folder: Path) -> None:
    """A key that does not fit is named with its certificate."""
    issue(folder, "other", days=90, now=NOW)
    found = check_files(files(folder, "plant-a-bsfg", key="other"), NOW)
    assert faults(found) == [("error", "files")]
    assert "other.key is not the key of" in found[0].says


def test_key_that_others_can_read(folder: Path) -> None:
    """A key with loose rights is a warning with the command that mends it."""
    issue(folder, "loose", days=90, now=NOW)
    (folder / "loose.key").chmod(0o640)
    found = check_files(files(folder, "loose"), NOW)
    assert faults(found) == [("warning", "key_rights")]
    assert any(finding.do.startswith("chmod 600 ") for finding in found)


def test_authority_is_no_node(folder: Path) -> None:
    """The authority's own certificate cannot serve as a node's."""
    assert ("error", "usage") in faults(check_files(files(folder, "ca"), NOW))
    assert is_authority(load_certificates(folder / "ca.crt")[0])


def test_intermediates(tmp_path: Path) -> None:
    """A chain over an intermediate in the certificate's file is followed."""
    assert faults(check_files(three_tiers(tmp_path, None), NOW)) == []


def test_path_length_is_respected(tmp_path: Path) -> None:
    """An authority that may not have authorities below it does not vouch for one."""
    assert faults(check_files(three_tiers(tmp_path, 0), NOW)) == [("error", "chain")]


def test_missing_intermediate(tmp_path: Path) -> None:
    """Without its intermediate a certificate hangs in the air."""
    found = three_tiers(tmp_path, None)
    found.certificate.write_bytes(pem(load_certificates(found.certificate)[0]))
    assert faults(check_files(found, NOW)) == [("error", "chain")]


def test_keys_that_tls_has_no_use_for(tmp_path: Path) -> None:
    """A handshake that fails is told in our own words, and OpenSSL's are nowhere."""
    odd = ec.generate_private_key(ec.SECP256K1())
    root = signed("root", KEYS[0], "root", KEYS[0], x509.BasicConstraints(True, None))
    leaf = signed("leaf", odd, "root", KEYS[0], x509.SubjectAlternativeName([x509.DNSName("leaf")]))
    (tmp_path / "ca.crt").write_bytes(pem(root))
    (tmp_path / "leaf.crt").write_bytes(pem(leaf))
    (tmp_path / "leaf.key").write_bytes(key_pem(odd))
    (tmp_path / "leaf.key").chmod(0o600)
    [fault] = [each for each in check_files(files(tmp_path, "leaf"), NOW) if each.level == CheckLevel.ERROR]
    assert fault.says == "a handshake of the node with itself fails: TLS 1.3 has no use for this kind of key"


def test_name_without_dns_name(tmp_path: Path) -> None:
    """A common name that is no DNS name is a warning: callers cannot insist on it."""
    (tmp_path / "ca.crt").write_bytes(pem(signed("root", KEYS[0], "root", KEYS[0], x509.BasicConstraints(True, 0))))
    (tmp_path / "x.crt").write_bytes(pem(signed("x", KEYS[1], "root", KEYS[0])))
    (tmp_path / "x.key").write_bytes(key_pem(KEYS[1]))
    (tmp_path / "x.key").chmod(0o600)
    assert faults(check_files(files(tmp_path, "x"), NOW)) == [("warning", "names")]


def test_unreadable_files(folder: Path, tmp_path: Path) -> None:
    """Absent files, folders, garbage and locked keys are told apart."""
    (tmp_path / "bad.crt").write_text("no certificate")
    (tmp_path / "locked.key").write_bytes(key_pem(KEYS[0], b"secret"))
    with pytest.raises(CertificateInvalid, match="there is no file"):
        load_certificates(tmp_path / "absent.crt")
    with pytest.raises(CertificateInvalid, match="cannot be read"):
        load_certificates(tmp_path)
    with pytest.raises(CertificateInvalid, match="no readable certificate"):
        load_certificates(tmp_path / "bad.crt")
    with pytest.raises(CertificateInvalid, match="no readable private key"):
        load_key(tmp_path / "bad.crt")
    with pytest.raises(CertificateInvalid, match="needs a password"):
        load_key(tmp_path / "locked.key")
    bad = TlsFiles(tmp_path / "bad.crt", folder / "plant-a-bsfg.crt", folder / "plant-a-bsfg.key")
    assert faults(check_files(bad, NOW)) == [("error", "files")]


def command(name: str, *args: object) -> int:
    """Run a command about certificates and give its exit code."""
    return main(["certs", name, *map(str, args)])


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    """Run a command with --json and give its exit code and what it printed."""
    code = main([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_commands_from_authority_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that `bsfg init` names lead to a zone whose certificate passes every check."""
    zone, certs = tmp_path / "zone", tmp_path / "zone" / "certs"
    code, made = run(capsys, "init", str(zone), "--zone", "plant-a", "--peer", "enterprise=10.0.0.7:9443")
    assert (code, made["message_ids"]) == (0, "explicit")
    assert "two equal readings are two facts" in made["why"]
    for step in made["next"][:-2]:
        assert run(capsys, *step.partition("#")[0].split()[1:])[0] == 0
    code, result = run(capsys, "certs", "check", "--config", str(zone / "zone.toml"))
    assert (code, result["ok"]) == (0, True)
    assert {finding["level"] for finding in result["findings"]} == {"ok"}
    code, shown = run(capsys, "certs", "show", str(certs / "ca.crt"), str(certs / "plant-a-producer.crt"))
    assert (code, [facts["usage"] for facts in shown][1]) == (0, ["client"])


def test_check_fails_for_another_zones_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node with the certificate of a peer is told so, and the command ends with 1."""
    run(capsys, "init", str(tmp_path), "--zone", "plant-a", "--peer", "enterprise=10.0.0.7:9443")
    run(capsys, "certs", "init-ca", str(tmp_path / "certs"))
    _, made = run(capsys, "certs", "issue", str(tmp_path / "certs"), "enterprise-bsfg")
    for suffix in ("crt", "key"):
        (tmp_path / "certs" / f"enterprise-bsfg.{suffix}").rename(tmp_path / "certs" / f"plant-a-bsfg.{suffix}")
    code, result = run(capsys, "certs", "check", "--config", str(tmp_path / "zone.toml"))
    assert (code, result["ok"]) == (1, False)
    assert "is the zone 'enterprise'" in result["findings"][-1]["says"]
    assert made["common_name"] == "enterprise-bsfg"


def test_commands_print_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the commands speak plainly, and a mistake ends in a sentence with a hint."""
    assert main(["certs", "init-ca", str(tmp_path)]) == 0
    assert main(["certs", "issue", str(tmp_path), "mes", "--role-hint", "producer", "--host", "127.0.0.1"]) == 0
    assert main(["certs", "show", str(tmp_path / "mes.crt")]) == 0
    out = capsys.readouterr().out
    assert '[identities.mes]\nzone = "<zone>"\nroles = ["producer"]\nstreams = ["operational"]' in out
    assert "alternative_names  mes, 127.0.0.1" in out
    assert main(["certs", "issue", str(tmp_path), "mes"]) == 1
    assert main(["certs", "check", "--config", str(tmp_path / "zone.toml")]) == 1
    failure = capsys.readouterr().err
    assert "error[file_exists]:" in failure and "error[config_invalid]:" in failure
    assert failure.count("hint:") == 2 and "Traceback" not in failure


def test_init_refuses_to_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A zone's file is overwritten only by force, and mistakes in the arguments write nothing."""
    path = tmp_path / "new" / "zone.toml"
    assert run(capsys, "init", str(path.parent), "--zone", "a zone")[1]["code"] == "invalid_argument"
    assert run(capsys, "init", str(path.parent), "--zone", "a", "--peer", "b")[1]["code"] == "invalid_argument"
    assert run(capsys, "init", str(path.parent), "--zone", "a", "--stream", "X")[1]["code"] == "invalid_argument"
    assert run(capsys, "init", str(path.parent), "--zone", "a", "--peer", "a=h:1")[1]["code"] == "config_invalid"
    assert not path.parent.exists()
    assert run(capsys, "init", str(path.parent), "--zone", "a")[0] == 0
    path.write_text("mine")
    code, failure = run(capsys, "init", str(path.parent), "--zone", "a")
    assert (code, failure["code"], path.read_text()) == (1, "file_exists", "mine")
    assert run(capsys, "init", str(path.parent), "--zone", "a", "--force")[0] == 0
    assert 'name = "a"' in path.read_text()


def test_two_zones_on_one_machine_get_ports_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a peer on this machine nor a neighbour's file nor whoever listens shares a port with a new zone."""
    _, one = run(capsys, "init", str(tmp_path / "one"), "--zone", "one", "--peer", "two=localhost:9600")
    _, two = run(capsys, "init", str(tmp_path / "two"), "--zone", "two", "--peer", f"one=localhost:{one['grpc_port']}")
    assert len({one["grpc_port"], one["http_port"], two["grpc_port"], two["http_port"]}) == 4
    config = load(tmp_path / "two" / "zone.toml")
    assert (config.listen.grpc.host, config.listen.grpc.port) == ("127.0.0.1", two["grpc_port"])
    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        _, failure = run(capsys, "init", str(tmp_path / "x"), "--zone", "x", "--port", str(9443 - 9080 + port))
        assert failure["code"] == "invalid_argument" and "--http-port" in failure["hint"]
    _, given = run(capsys, "init", str(tmp_path / "x"), "--zone", "x", "--port", "7001", "--http-port", "7002")
    assert (given["grpc_port"], given["http_port"]) == (7001, 7002)
    assert load(tmp_path / "x" / "zone.toml").listen.grpc.host == "0.0.0.0"


def test_init_says_who_moves_the_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spark moves them unless the node is to do it by itself."""
    for engine in (["--engine", "native"], []):
        run(capsys, "init", str(tmp_path), "--zone", "a", "--peer", "b=h:9443", "--force", *engine)
        [link] = load(tmp_path / "zone.toml").links.values()
        assert str(link.engine) == (engine or ["spark"])[-1]


def test_a_bundle_issues_what_is_missing_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --issue a bundle has everybody whom `bsfg init` gives a row; what was there stays as it is."""
    folder = tmp_path / "authority"
    command("init-ca", folder)
    command("issue", folder, "plant-bsfg", "--host", "127.0.0.1")
    before = (folder / "plant-bsfg.crt").read_bytes()
    assert command("bundle", folder, "plant", tmp_path / "certs", "--issue") == 0
    names = {path.stem for path in (tmp_path / "certs").glob("*.key")}
    assert names == {f"plant-{end}" for end in ("bsfg", "producer", "consumer", "pipeline", "operator")}
    assert (tmp_path / "certs" / "plant-bsfg.crt").read_bytes() == before
    assert command("bundle", folder, "other", tmp_path / "certs", "--issue") == 1
    assert not (folder / "other-bsfg.crt").exists()


def test_a_bundle_issues_for_the_hosts_that_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --host the node's certificate carries the name, those of applications do not; without --issue it means
    nothing, and is refused."""
    folder = tmp_path / "authority"
    command("init-ca", folder)
    assert command("bundle", folder, "plant", tmp_path / "certs", "--issue", "--host", "plant.example") == 0
    node, operator = (load_certificates(folder / f"plant-{end}.crt")[0] for end in ("bsfg", "operator"))
    wanted = ["plant-bsfg", "plant.example", "localhost", "127.0.0.1", "::1"]
    assert describe(node, NOW)["alternative_names"] == wanted
    assert describe(operator, NOW)["alternative_names"] == ["plant-operator"]
    capsys.readouterr()
    assert command("bundle", folder, "plant", tmp_path / "again", "--host", "other.example") == 1
    assert "--issue" in capsys.readouterr().err
    # One that is there without the name is not what was asked for.
    assert command("bundle", folder, "plant", tmp_path / "again", "--issue", "--host", "other.example") == 1
    assert "plant-bsfg.crt" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_bundle_has_what_is_the_zones_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The authority's certificate and the zone's own pairs, for their owner only; never a key of anybody else."""
    folder = tmp_path / "authority"
    names = ("plant-bsfg", "plant-producer", "plant-mes", "plant-a-bsfg", "plant-a-operator", "enterprise-bsfg")
    command("init-ca", folder)
    for name in names:
        command("issue", folder, name)
    capsys.readouterr()
    assert command("bundle", folder, "plant", tmp_path / "plant" / "certs") == 0
    assert "Next:" in capsys.readouterr().out
    made = tmp_path / "plant" / "certs"
    own = ["ca.crt", "plant-bsfg.crt", "plant-bsfg.key", "plant-producer.crt", "plant-producer.key"]
    assert sorted(path.name for path in made.iterdir()) == own
    assert made.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o600}
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in made.iterdir())
    assert command("bundle", folder, "plant", tmp_path / "node.tar", "--node-only", "--json") == 0
    assert json.loads(capsys.readouterr().out)["files"] == own[:3]
    assert (tmp_path / "node.tar").stat().st_mode & 0o777 == 0o600
    with tarfile.open(tmp_path / "node.tar") as archive:
        found = {each.name: each.mode for each in archive}
    assert found == {"certs": 0o700} | {f"certs/{name}": 0o600 for name in own[:3]}
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for target in (made, tmp_path / "node.tar", tmp_path / "dangling"):
        assert command("bundle", folder, "plant", target) == 1
        assert "file_exists" in capsys.readouterr().err
    for zone in ("nobody", "../plant", "ca"):
        assert command("bundle", folder, zone, tmp_path / "never") == 1
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "zone", "role"),
    [
        (["plant-a-bsfg"], "plant-a", "peer"),
        (["plant-a-producer"], "plant-a", "producer"),
        (["plant-a-operator"], "plant-a", "operator"),
        (["mes"], "<zone>", "<producer, consumer, pipeline, operator or viewer>"),
        (["mes", "--role-hint", "producer"], "<zone>", "producer"),
        (["mes", "--role-hint", "producer", "--zone", "plant-a"], "plant-a", "producer"),
        (["gateway", "--role-hint", "peer", "--zone", "plant-a"], "plant-a", "peer"),
        (["plant-a-producer", "--role-hint", "viewer"], "<zone>", "viewer"),
    ],
)
def test_the_row_fits_the_name(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], zone: str, role: str
) -> None:
    """What is printed to be added to [identities] is the zone and the role that the name tells."""
    assert command("issue", folder, *arguments, "--force") == 0
    row = tomllib.loads(capsys.readouterr().out.split("\n\n")[-1])["identities"][arguments[0]]
    assert (row["zone"], row["roles"]) == (zone, [role])
    certificate = load_certificates(folder / f"{arguments[0]}.crt")[0]
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert (ExtendedKeyUsageOID.SERVER_AUTH in purposes) == (role == "peer")


def test_what_ends_soon_is_renewed_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same names, hosts and purposes with a key of its own; what lasts longer stays, unless it is named."""
    certs = tmp_path / "certs"
    now = datetime.now(UTC)
    create_authority(certs, name="Test authority", days=1000, now=now)
    issue(certs, "plant-a-bsfg", days=20, now=now, hosts=["plant.example", "10.0.0.7"])
    issue(certs, "plant-a-producer", days=20, now=now, serves=False)
    issue(certs, "plant-a-viewer", days=300, now=now, serves=False)
    before = {path.name: path.read_bytes() for path in certs.iterdir()}
    old = {name: load_certificates(certs / f"{name}.crt")[0] for name in ("plant-a-bsfg", "plant-a-producer")}
    assert main(["certs", "renew", str(certs), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [Path(each["certificate_file"]).stem for each in made] == ["plant-a-bsfg", "plant-a-producer"]
    for name, was in old.items():
        now_is = load_certificates(certs / f"{name}.crt")[0]
        assert now_is.not_valid_after_utc > was.not_valid_after_utc + 300 * DAY
        assert now_is.public_key() != was.public_key()
        assert names_of(now_is) == names_of(was)
        for kind in (x509.SubjectAlternativeName, x509.ExtendedKeyUsage):
            new, former = (each.extensions.get_extension_for_class(kind).value for each in (now_is, was))
            assert set(new) == set(former)  # type: ignore[call-overload]
    assert faults(check_files(files(certs), now, 0)) == []
    kept = ("ca.crt", "ca.key", "plant-a-viewer.crt", "plant-a-viewer.key")
    assert all((certs / name).read_bytes() == before[name] for name in kept)
    assert main(["certs", "renew", str(certs)]) == 0
    assert "None of 3 ends within 30 days." in capsys.readouterr().out
    assert main(["certs", "renew", str(certs), "plant-a-viewer"]) == 0
    assert (certs / "plant-a-viewer.crt").read_bytes() != before["plant-a-viewer.crt"]


def test_what_cannot_be_renewed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A certificate of somebody else, one that is not there, and a folder without an authority."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        create_authority(folder, name=f"Authority of {folder.name}", days=1000, now=NOW)
    issue(theirs, "plant-a-bsfg", days=10, now=NOW)
    (ours / "plant-a-bsfg.crt").write_bytes((theirs / "plant-a-bsfg.crt").read_bytes())
    for args, says in (
        ((str(ours),), "was not signed by the authority in"),
        ((str(ours), "mes"), "there is no certificate of 'mes'"),
    ):
        assert main(["certs", "renew", *args]) == 1
        assert says in capsys.readouterr().err
    (theirs / "ca.key").unlink()
    assert main(["certs", "renew", str(theirs)]) == 1
    assert "there is no authority in" in capsys.readouterr().err
