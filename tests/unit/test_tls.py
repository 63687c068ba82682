"""Both listeners speak TLS 1.3 only, check both sides, and take new files up without a restart."""

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, ServerIdentityMismatch
from bsfg.wire import SUITES, VARIABLE
from bsfg.wire.certs import create_authority, issue
from bsfg.wire.peer import PeerNames, names_in_auth_context, names_in_ssl_object
from bsfg.wire.probe import probe, verify_server
from bsfg.wire.tls import (
    TlsFiles,
    Watched,
    client_context,
    failure_of,
    grpc_channel_credentials,
    grpc_channel_options,
    grpc_server_credentials,
    server_context,
)

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give two authorities, each with a node, an application and an expired application."""
    root = tmp_path_factory.mktemp("pki")
    for authority in ("good", "other"):
        folder = root / authority
        create_authority(folder, name=f"The {authority} one", days=90, now=NOW)
        issue(folder, "plant-a-bsfg", days=30, now=NOW)
        issue(folder, "Plant_B.x-bsfg", days=30, now=NOW)
        issue(folder, "app", days=30, now=NOW, serves=False)
        issue(folder, "old", days=1, now=NOW - timedelta(days=3), serves=False)
    return root


def files_of(folder: Path, name: str) -> TlsFiles:
    """Name the three files of a certificate."""
    return TlsFiles(folder / "ca.crt", folder / f"{name}.crt", folder / f"{name}.key")


class Live:
    """The files of a running node, exchanged as a careful administrator would: each in one step."""

    def __init__(self, folder: Path, pki: Path) -> None:
        self.pki = pki
        self.files = files_of(folder, "node")
        self.problems: list[BsfgError] = []
        self.reloads = 0
        self.put("good", "plant-a-bsfg")
        self.watched = Watched(self.files, self.problems.append, self._count)

    def _count(self, _: object) -> None:
        self.reloads += 1

    def put(self, authority: str, name: str) -> None:
        """Exchange all three files."""
        source = files_of(self.pki / authority, name)
        for old, new in (
            (self.files.ca, source.ca),
            (self.files.certificate, source.certificate),
            (self.files.key, source.key),
        ):
            fresh = old.with_suffix(".new")
            shutil.copy(new, fresh)
            fresh.replace(old)


@pytest.fixture
def live(tmp_path: Path, pki: Path) -> Live:
    """Give a node's files, at first of the good authority."""
    return Live(tmp_path, pki)


class _WhoAmI(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, _: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: str(names_in_auth_context(context.auth_context())).encode()
        )


@contextmanager
def grpc_server(credentials: grpc.ServerCredentials) -> Iterator[int]:
    """Run a gRPC server that tells callers who they are."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((_WhoAmI(),))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def https_server(context: ssl.SSLContext, shaken: list[str] | None = None) -> Iterator[int]:
    """Run a TLS listener of the standard library that tells callers who they are and notes every handshake."""
    listener = socket.create_server(("127.0.0.1", 0))
    closing = threading.Event()

    def serve() -> None:
        while not closing.is_set():
            plain, _ = listener.accept()
            with plain:
                try:
                    with context.wrap_socket(plain, server_side=True) as secured:
                        if shaken is not None:
                            shaken.append(str(secured.version()))
                        secured.sendall(str(names_in_ssl_object(secured)).encode())
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    port = listener.getsockname()[1]
    try:
        yield port
    finally:
        closing.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join()
        listener.close()


def call(port: int, files: TlsFiles, server_name: str) -> str:
    """Ask a gRPC server who the caller is, or give the code of the failure."""
    credentials = grpc_channel_credentials(files.load())
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, grpc_channel_options(server_name)) as channel:
        try:
            answer: bytes = channel.unary_unary("/who/AmI")(b"", timeout=20)
        except grpc.RpcError as error:
            return str(error.code().name)
        return answer.decode()


def shake(port: int, context: ssl.SSLContext) -> str:
    """Shake hands with a server; give the TLS version if it then says something, else the kind of failure."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain, context.wrap_socket(plain) as secured:
            version = secured.version()
            return str(version) if secured.recv(1) else "closed"
    except (ssl.SSLError, ConnectionError):
        return "refused"


def speaking(files: TlsFiles, version: ssl.TLSVersion, *, protocol: str = "") -> ssl.SSLContext:
    """Give a client that speaks one TLS version only."""
    context = client_context(files)
    context.minimum_version = context.maximum_version = version
    if protocol:
        context.set_alpn_protocols([protocol])
    return context


def test_grpc_names_the_caller(live: Live, pki: Path) -> None:
    """A caller with a certificate of the right authority is let in and known by its name."""
    with grpc_server(grpc_server_credentials(live.watched)) as port:
        assert call(port, files_of(pki / "good", "app"), "plant-a-bsfg") == "app"


@pytest.mark.parametrize(
    ("authority", "name", "server_name"),
    [("other", "app", "plant-a-bsfg"), ("good", "old", "plant-a-bsfg"), ("good", "app", "enterprise-bsfg")],
    ids=["wrong authority", "expired", "not the server that is meant"],
)
def test_grpc_refuses(live: Live, pki: Path, authority: str, name: str, server_name: str) -> None:
    """A foreign or expired caller, and a server of another name, get no call through."""
    with grpc_server(grpc_server_credentials(live.watched)) as port:
        assert call(port, files_of(pki / authority, name), server_name) == "UNAVAILABLE"


def test_grpc_refuses_a_caller_of_another_authority_that_trusts_the_server(live: Live, pki: Path) -> None:
    """It is the server that refuses a foreign caller, even one that would accept the server."""
    mixed = TlsFiles(pki / "good" / "ca.crt", pki / "other" / "app.crt", pki / "other" / "app.key")
    with grpc_server(grpc_server_credentials(live.watched)) as port:
        assert call(port, mixed, "plant-a-bsfg") == "UNAVAILABLE"


def test_grpc_refuses_callers_without_certificate_or_tls(live: Live) -> None:
    """No certificate, no call; no TLS, no call."""
    with grpc_server(grpc_server_credentials(live.watched)) as port:
        bare = grpc.ssl_channel_credentials(live.files.ca.read_bytes())
        options = grpc_channel_options("plant-a-bsfg")
        for channel in (
            grpc.secure_channel(f"127.0.0.1:{port}", bare, options),
            grpc.insecure_channel(f"127.0.0.1:{port}"),
        ):
            with channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/who/AmI")(b"", timeout=20)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def rsa_files(folder: Path) -> TlsFiles:
    """Write certificates with RSA keys, as other authorities make them."""
    authority = trustme.CA(key_type=trustme.KeyType.RSA)
    leaf = authority.issue_cert("plant-a-bsfg", common_name="plant-a-bsfg", key_type=trustme.KeyType.RSA)
    files = files_of(folder, "rsa")
    authority.cert_pem.write_to_path(files.ca)
    leaf.cert_chain_pems[0].write_to_path(files.certificate)
    leaf.private_key_pem.write_to_path(files.key)
    return files


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_grpc_server_refuses_tls_1_2(live: Live, tmp_path: Path, kind: str) -> None:
    """A gRPC server shakes hands in TLS 1.3 and refuses 1.2, whatever kind of key its certificate has."""
    files = live.files if kind == "ecdsa" else rsa_files(tmp_path)
    with grpc_server(grpc_server_credentials(Watched(files))) as port:
        assert shake(port, speaking(files, ssl.TLSVersion.TLSv1_2, protocol="h2")) == "refused"
        assert shake(port, speaking(files, ssl.TLSVersion.TLSv1_3, protocol="h2")) == "TLSv1.3"


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_grpc_client_refuses_tls_1_2(live: Live, tmp_path: Path, kind: str) -> None:
    """A gRPC caller does not talk to a server that offers TLS 1.2 only."""
    files = live.files if kind == "ecdsa" else rsa_files(tmp_path)
    context = server_context(Watched(files))
    context.sni_callback = None
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    shaken: list[str] = []
    with https_server(context, shaken) as port:
        assert shake(port, speaking(files, ssl.TLSVersion.TLSv1_2)) == "TLSv1.2"
        assert call(port, files, "plant-a-bsfg") == "UNAVAILABLE"
    assert shaken == ["TLSv1.2"]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, check=False
    )


LOADS = "from bsfg.wire import require_hardened; require_hardened()"


@pytest.mark.parametrize(
    ("code", "environment", "refused"),
    [
        (f"import grpc; {LOADS}", {}, True),
        (f"import grpc; {LOADS}", {VARIABLE: SUITES}, False),
        (f"import bsfg.wire, grpc; {LOADS}", {}, False),
        (f"import bsfg.wire, grpc; {LOADS}", {VARIABLE: "ECDHE-RSA-AES128-GCM-SHA256"}, False),
    ],
    ids=["grpc first", "set from outside", "bsfg first", "overrides a weaker list"],
)
def test_order_of_imports(code: str, environment: dict[str, str], refused: bool) -> None:
    """A process that loaded gRPC too early to be hardened makes no credentials; any other does."""
    result = python(code, **environment)
    assert ("TlsNotHardened" in result.stderr) == (result.returncode != 0) == refused, result.stderr


def test_http_refuses_tls_1_2(live: Live, pki: Path) -> None:
    """The HTTP listener shakes hands in TLS 1.3 and refuses 1.2."""
    app = files_of(pki / "good", "app")
    with https_server(server_context(live.watched)) as port:
        assert shake(port, speaking(app, ssl.TLSVersion.TLSv1_2)) == "refused"
        assert shake(port, speaking(app, ssl.TLSVersion.TLSv1_3)) == "TLSv1.3"


def test_http_demands_a_certificate(live: Live, pki: Path) -> None:
    """The HTTP listener refuses callers without a certificate, of another authority, or with an expired one."""
    bare = ssl.create_default_context(cafile=str(live.files.ca))
    bare.check_hostname = False
    mixed = TlsFiles(pki / "good" / "ca.crt", pki / "other" / "app.crt", pki / "other" / "app.key")
    with https_server(server_context(live.watched)) as port:
        for context in (bare, client_context(mixed), client_context(files_of(pki / "good", "old"))):
            assert shake(port, context) == "refused"
        assert shake(port, client_context(files_of(pki / "good", "app"))) == "TLSv1.3"


def test_http_never_resumes_a_session(live: Live, pki: Path) -> None:
    """No session is handed out that would let a caller skip the check of its certificate later."""
    context = client_context(files_of(pki / "good", "app"))
    with (
        https_server(server_context(live.watched)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain) as secured,
    ):
        assert secured.recv(16) == b"app"
        assert secured.session is None or not secured.session.has_ticket


Connect = Callable[[str, str], bool]


def connector(kind: str, port: int, pki: Path) -> Connect:
    """Give a way to find out whether an application of an authority gets in at a server of some name."""

    def connect(authority: str, server_name: str) -> bool:
        files = files_of(pki / authority, "app")
        if kind == "grpc":
            return call(port, files, server_name) == "app"
        return shake(port, client_context(files)) == "TLSv1.3"

    return connect


@contextmanager
def running(kind: str, live: Live) -> Iterator[int]:
    """Run one of the two listeners."""
    if kind == "grpc":
        with grpc_server(grpc_server_credentials(live.watched)) as port:
            yield port
    else:
        with https_server(server_context(live.watched)) as port:
            yield port


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_reload(live: Live, pki: Path, kind: str) -> None:
    """New files count from the next connection on: new certificate, new authority, and the old one no longer."""
    with running(kind, live) as port:
        connect = connector(kind, port, pki)
        assert connect("good", "plant-a-bsfg") and not connect("other", "plant-a-bsfg")
        live.put("other", "Plant_B.x-bsfg")
        assert connect("other", "Plant_B.x-bsfg")
        assert not connect("good", "Plant_B.x-bsfg")
        live.put("good", "plant-a-bsfg")
        assert connect("good", "plant-a-bsfg") and not connect("other", "plant-a-bsfg")
    assert (live.reloads, live.problems) == (2, [])


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_bad_files_do_not_interrupt(live: Live, pki: Path, kind: str) -> None:
    """Files that cannot be used leave the old ones in use and are reported once, until good ones come."""
    with running(kind, live) as port:
        connect = connector(kind, port, pki)
        live.files.key.write_text("half a fi")
        assert connect("good", "plant-a-bsfg") and connect("good", "plant-a-bsfg")
        assert [problem.code for problem in live.problems] == ["certificate_invalid"]
        live.files.key.unlink()
        assert connect("good", "plant-a-bsfg")
        assert len(live.problems) == 2
        live.put("other", "plant-a-bsfg")
        assert connect("other", "plant-a-bsfg")
    assert live.reloads == 1


def test_key_of_another_certificate_is_refused(live: Live, pki: Path) -> None:
    """A node does not start with a key that is not its certificate's."""
    files = TlsFiles(live.files.ca, live.files.certificate, pki / "good" / "app.key")
    with pytest.raises(CertificateInvalid, match="is not the key of"):
        Watched(files)


def test_touching_a_file_changes_nothing(live: Live) -> None:
    """A file that is written again with the same content is no new version."""
    live.files.ca.write_bytes(live.files.ca.read_bytes())
    assert live.watched.refresh() == 1
    live.put("other", "app")
    assert live.watched.refresh() == live.watched.refresh() == 2


def test_probe_sees_the_server(live: Live, pki: Path) -> None:
    """A probe gives the names in the server's certificate."""
    with grpc_server(grpc_server_credentials(live.watched)) as port:
        seen = probe("127.0.0.1", port, files_of(pki / "good", "app"))
        assert seen.names == PeerNames(("plant-a-bsfg",), ("plant-a-bsfg", "localhost"))


def test_verify_server(live: Live, pki: Path) -> None:
    """The right server is confirmed; wrong name, wrong authority and our own refusal are told apart."""
    app = files_of(pki / "good", "app")
    with grpc_server(grpc_server_credentials(live.watched)) as port:
        assert verify_server("127.0.0.1", port, app, "plant-a-bsfg").name == "plant-a-bsfg"
        assert verify_server("127.0.0.1", port, app, "plant-a-bsfg", by_alternative_name=True).name == "plant-a-bsfg"
        with pytest.raises(
            ServerIdentityMismatch, match=f"127.0.0.1:{port} is plant-a-bsfg, not enterprise-bsfg"
        ) as caught:
            verify_server("127.0.0.1", port, app, "enterprise-bsfg")
        assert not caught.value.retryable
        with pytest.raises(CertificateInvalid, match="is refused: no authority that is known has signed it"):
            verify_server("127.0.0.1", port, files_of(pki / "other", "app"), "plant-a-bsfg")
        with pytest.raises(CertificateInvalid, match="when it saw our certificate"):
            verify_server("127.0.0.1", port, files_of(pki / "good", "old"), "plant-a-bsfg")


def test_verify_server_with_a_name_in_cn_only(tmp_path: Path) -> None:
    """A server whose identity is its common name alone is pinned by the DNS name that its authority gave it."""
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    leaf = authority.issue_cert("gw.example", common_name="plant-a-bsfg", key_type=trustme.KeyType.ECDSA)
    files = files_of(tmp_path, "gw")
    authority.cert_pem.write_to_path(files.ca)
    leaf.cert_chain_pems[0].write_to_path(files.certificate)
    leaf.private_key_pem.write_to_path(files.key)
    with grpc_server(grpc_server_credentials(Watched(files))) as port:
        assert call(port, files, "plant-a-bsfg") == "UNAVAILABLE"
        name = verify_server("127.0.0.1", port, files, "plant-a-bsfg").name
        assert (name, call(port, files, name)) == ("gw.example", "plant-a-bsfg")
        with pytest.raises(ServerIdentityMismatch):
            verify_server("127.0.0.1", port, files, "plant-a-bsfg", by_alternative_name=True)


@pytest.mark.parametrize("pause_seconds", [0.0, 0.05], ids=["without end", "slowly"])
def test_probe_of_a_talker(pki: Path, pause_seconds: float) -> None:
    """A server that goes on talking and never answers keeps nobody: who it is is known from its certificate."""
    ping = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + bytes(8)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = files_of(pki / "good", "plant-a-bsfg")
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    ended = threading.Event()

    def talk(listener: socket.socket) -> None:
        with listener.accept()[0] as plain, context.wrap_socket(plain, server_side=True) as secured:
            secured.settimeout(30)
            while not ended.wait(pause_seconds):
                secured.sendall(ping if pause_seconds else ping * 1_000)

    with socket.create_server(("127.0.0.1", 0)) as listener, futures.ThreadPoolExecutor(2) as threads:
        talking = threads.submit(talk, listener)
        app = files_of(pki / "good", "app")
        seen = threads.submit(probe, "127.0.0.1", listener.getsockname()[1], app, 2.0)
        try:
            assert seen.result(timeout=60).names.common_names == ("plant-a-bsfg",)
        finally:
            ended.set()
            with suppress(OSError):
                talking.result(timeout=60)


def test_probe_of_nobody(pki: Path) -> None:
    """An absent server is unreachable, which may pass; one that speaks no TLS is not what it should be.

    One that is gone in the middle of the handshake is absent, too: no certificate has to be looked into.
    """
    app = files_of(pki / "good", "app")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up(last_words: bytes) -> None:
            with listener.accept()[0] as plain:
                plain.recv(65_536)
                plain.sendall(last_words)

        for last_words, error, says in (
            (b"220 mail server ready\r\n", CertificateInvalid, r"no TLS 1\.3 handshake"),
            (b"", PeerUnreachable, "ended the connection before a handshake"),
        ):
            thread = threading.Thread(target=hang_up, args=(last_words,))
            thread.start()
            with pytest.raises(error, match=says):
                probe("127.0.0.1", port, app)
            thread.join()
    with pytest.raises(PeerUnreachable, match="cannot be reached") as caught:
        probe("127.0.0.1", port, app)
    assert caught.value.retryable
    with pytest.raises(PeerUnreachable):
        probe("no-such-host.invalid", 1, app)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SSLV3_ALERT_CERTIFICATE_UNKNOWN", "the other side does not accept the certificate that it was shown"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "the other side asks for a certificate"),
        ("tlsv1 alert decode error", "TLS failed: alert decode error"),
        (None, "TLS failed: no reason"),
    ],
)
def test_words_for_a_failure(name: str | None, says: str) -> None:
    """What OpenSSL has a name for is told in our words, without the version of TLS that had the name first."""
    error = ssl.SSLError(1, "whatever OpenSSL says")
    error.reason = name  # type: ignore[assignment]
    assert failure_of(error) == says


def test_names_are_the_same_on_both_listeners(live: Live, pki: Path) -> None:
    """A caller is read alike from gRPC's context and from a connection of the standard library; no TLS is nobody."""
    pem = (pki / "good" / "app.crt").read_bytes()
    assert names_in_auth_context({"x509_pem_cert": [pem]}) == PeerNames(("app",), ("app",))
    assert names_in_auth_context({}) is None
    assert names_in_ssl_object(None) is None
    with (
        https_server(server_context(live.watched)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        client_context(files_of(pki / "good", "app")).wrap_socket(plain) as secured,
    ):
        assert secured.recv(16) == b"app"
        assert names_in_ssl_object(secured) == PeerNames(("plant-a-bsfg",), ("plant-a-bsfg", "localhost"))
