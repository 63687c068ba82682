"""Handshakes that are refused leave a trace: a count on both listeners, where they came from, and on HTTP why."""

import asyncio
import socket
import ssl
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import STREAM, Site, certificates, files_of, until

from bsfg.testing.facts import message
from bsfg.wire import connections as module
from bsfg.wire.certs import issue
from bsfg.wire.connections import HandshakePace, PacedConnection, connected, host_of, plain_address
from bsfg.wire.probe import probe
from bsfg.wire.tls import TlsFiles, client_context


class Noticed:
    """What a site noticed of handshakes."""

    def __init__(self, site: Site) -> None:
        self.refused: list[tuple[str, str, str]] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        site.listeners.handshakes.tell(lambda *what: self.refused.append(what), self._counted)

    def _counted(self, listener: str, what: str) -> None:
        self.counts[listener, what] += 1


def attempts(site: Site) -> dict[str, tuple[ssl.SSLContext | None, str]]:
    """Give ways to fail, and what HTTP says of each."""
    (site.folder / "foreign").mkdir()
    foreign = certificates(site.folder / "foreign")
    issue(site.folder, "late", days=1, now=datetime(2024, 1, 1, tzinfo=UTC), force=True)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    late = client_context(files_of(site.folder, "late"))
    old = client_context(files_of(site.folder, "app"))
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    other = client_context(TlsFiles(site.folder / "ca.crt", foreign.certificate, foreign.key))
    return {
        "bare": (bare, "no certificate was shown"),
        "old": (old, "it did not offer TLS 1.3"),
        "foreign": (other, "its certificate was refused: "),
        "expired": (late, "its certificate was refused: it has expired"),
        "plaintext": (None, "it did not speak TLS"),
    }


async def test_http_tells_who_and_why(sites: Sites) -> None:
    """Every refused handshake is told with address and reason, and one that is served is not."""
    site = await sites(tls=True)
    noticed = Noticed(site)
    for context, says in attempts(site).values():
        address = await asyncio.to_thread(_knock, site.listeners.http.port, context)
        await until(lambda: len(noticed.refused) > 0)
        listener, where, reason = noticed.refused.pop()
        assert (listener, where) == ("http", address)
        assert reason.startswith(says)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port)
    host, port = writer.get_extra_info("sockname")
    writer.close()
    await until(lambda: noticed.refused == [("http", f"{host}:{port}", "it went before the end")])
    del reader
    assert (await site.http("GET", "/healthz", name="app")).status == 200
    assert noticed.counts == {("http", "begun"): 7, ("http", "refused"): 6}


async def test_a_handshake_that_takes_too_long_is_told(sites: Sites) -> None:
    """Who connects to HTTP and says nothing is told as such when patience ends."""
    site = await sites(tls=True, handshake_timeout_seconds=0.2)
    noticed = Noticed(site)
    _, writer = await asyncio.open_connection("127.0.0.1", site.listeners.http.port)
    await until(lambda: [reason for _, _, reason in noticed.refused] == ["it took too long"])
    writer.close()


async def test_grpc_tells_who_went_without_a_call(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """On gRPC every refused handshake is counted and told with its address; callers and probes are not."""
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    site = await sites(tls=True)
    noticed = Noticed(site)
    await site.client("app").append_fact(STREAM, message("honest"))
    await asyncio.to_thread(probe, "127.0.0.1", site.listeners.grpc.port, files_of(site.folder, "app"))
    for context, _ in attempts(site).values():
        address = await asyncio.to_thread(_knock, site.listeners.grpc.port, context)
        await until(lambda: len(noticed.refused) > 0)
        assert noticed.refused.pop()[:2] == ("grpc", address)
    assert noticed.counts["grpc", "begun"] == 7
    assert noticed.counts["grpc", "called"] == 2
    assert noticed.counts["grpc", "refused"] == 5


async def test_the_table_of_connections_is_read(tmp_path: Path) -> None:
    """Both kinds of addresses are found, as gRPC writes them, and a system without the table tells nothing."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as server:
            port = server.getsockname()[1]
            with socket.create_connection((host, port)) as client:
                accepted, _ = server.accept()
                own = client.getsockname()[1]
                written = f"ipv4:{host}:{own}" if family == socket.AF_INET else f"ipv6:%5B{host}%5D:{own}"
                assert connected(port) == {plain_address(written)} == {f"{host}:{own}"}
                accepted.close()
    assert plain_address("unix:/somewhere") == "unix:/somewhere"


def _knock(port: int, context: ssl.SSLContext | None) -> str:
    """Try to come in, wait until it has failed, and give where it came from."""
    with socket.create_connection(("127.0.0.1", port)) as plain:
        host, own = plain.getsockname()
        try:
            if context is None:
                plain.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                while plain.recv(1_000):
                    pass
            else:
                context.set_alpn_protocols(["h2"])
                with context.wrap_socket(plain) as secured:
                    while secured.recv(1_000):
                        pass
        except (ssl.SSLError, ConnectionError):
            pass
        return f"{host}:{own}"


class Connected:
    """A connection that only notes when its handshake begins."""

    def __init__(self, name: str, begun: list[str]) -> None:
        self.name, self._begun = name, begun
        self.is_given_up = False

    def begin(self) -> None:
        """Note it."""
        self._begun.append(self.name)

    def give_up(self) -> None:
        """Note it."""
        self.is_given_up = True


async def test_handshakes_begin_at_a_pace_and_hosts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few begin at once; of those who wait, one host's many do not come before another's one."""
    monkeypatch.setattr(module, "BEGUN_AT_ONCE", 3)
    pace, begun = HandshakePace(60.0), list[str]()
    for number in range(30):
        pace.wait(cast(PacedConnection, Connected(f"many-{number}", begun)), "10.0.0.1")
    pace.wait(cast(PacedConnection, Connected("one", begun)), "10.0.0.2")
    at_once = len(begun)
    assert 3 <= at_once <= 4
    await until(lambda: len(begun) == 31)
    assert begun.index("one") <= at_once + 1
    assert [name for name in begun if name != "one"] == [f"many-{number}" for number in range(30)]


async def test_who_waits_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection for which there was no turn in time is closed, and so are all when the listener ends."""
    monkeypatch.setattr(module, "BEGUN_PER_SECOND", 2.0)
    monkeypatch.setattr(module, "BEGUN_AT_ONCE", 0)
    pace, begun = HandshakePace(0.6), list[str]()
    waiting = [Connected(str(number), begun) for number in range(5)]
    for each in waiting:
        pace.wait(cast(PacedConnection, each), "10.0.0.1")
    await until(lambda: any(each.is_given_up for each in waiting))
    assert begun and len(begun) < 5
    pace.close()
    assert all(each.is_given_up or each.name in begun for each in waiting)


async def test_a_flood_of_handshakes_is_told_and_served_in_the_end(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers beyond the pace wait and are served; a node that stops closes those who still wait."""
    monkeypatch.setattr(module, "BEGUN_AT_ONCE", 2)
    site = await sites(tls=True)
    answers = await asyncio.gather(*(site.http("GET", "/healthz", name="app") for _ in range(12)))
    assert [answer.status for answer in answers] == [200] * 12
    monkeypatch.setattr(module, "BEGUN_PER_SECOND", 0.1)
    noticed = Noticed(site)
    opened = [await asyncio.open_connection("127.0.0.1", site.listeners.http.port) for _ in range(4)]
    await site.listeners.http.stop()
    for reader, writer in opened:
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
    assert ("http", "begun") in noticed.counts
    assert any(reason == "too many others began one" for _, _, reason in noticed.refused)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        (("10.0.0.7", 1), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::ffff:10.0.0.7", 1, 0, 0), "10.0.0.7"),
        (None, "somewhere"),
    ],
)
def test_who_counts_as_one_host(name: object, host: str) -> None:
    """An address of the old kind is a host, and a network of the new, in which one host has as many as it likes."""
    assert host_of(name) == host
