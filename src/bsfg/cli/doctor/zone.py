"""Checks of the zone: its setup and certificates, its ports and data folder, and its peers."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import bsfg
from bsfg.cli.doctor.machine import Subject, existing_parent
from bsfg.cli.output import size_text
from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, StandingBy, TimedOut
from bsfg.wording import CheckFinding, CheckLevel, Says, counted

if TYPE_CHECKING:
    from bsfg.cli.inspect.gather import FolderInfo
    from bsfg.config import Address, Link
    from bsfg.stores.log.verify import Progress
    from bsfg.wire.peer import PeerNames
    from bsfg.wire.tls import TlsFiles


_certificates_says = Says("certificates")


def certificates(subject: Subject) -> Iterator[CheckFinding]:
    """Look at chain, dates, key, usage and names of the node's certificate, and at the dates of its users'."""
    from bsfg.cli.certs import check_config

    for found in check_config(subject.config, subject.now):
        level = CheckLevel.PROBLEM if found.level == CheckLevel.ERROR else found.level
        yield replace(found, level=level, check=_certificates_says.check)
    yield from _users(subject)


def _users(subject: Subject) -> Iterator[CheckFinding]:
    from bsfg.wire.certcheck import Expiry, lifetime
    from bsfg.wire.certs import load_certificates

    config, files = subject.config, subject.config.tls_files
    if files is None:
        return
    checked = 0
    for name in config.identities:
        path = files.certificate.parent / f"{name}.crt"
        if not path.is_file() or path == files.certificate:
            continue
        try:
            life = lifetime(load_certificates(path)[0], subject.now, config.tls.expiry_warning_seconds)
        except BsfgError as error:
            yield _certificates_says.warning(error.message, error.hint)
            continue
        checked += 1
        renew = f"bsfg certs issue {path.parent} {name} --force, or have your authority renew it."
        if life.expiry == Expiry.EXPIRED:
            yield _certificates_says.warning(f"the certificate of {name} has expired", renew)
        elif life.expiry == Expiry.WARNING:
            yield _certificates_says.warning(
                f"the certificate of {name} expires in {counted(life.left_days, 'day')}", renew
            )
        elif life.expiry == Expiry.NOT_YET_VALID:
            yield _certificates_says.warning(
                f"the certificate of {name} is not valid yet", "Check this machine's clock."
            )
    if checked:
        yield _certificates_says.ok(f"{counted(checked, 'certificate')} of callers beside the node's can be read")


NEEDED = ("cryptography", "google.protobuf", "grpc", "prometheus_client", "starlette", "structlog", "uvicorn")

TABLES = (("streams", "stream"), ("links", "link"), ("identities", "identity"))

_software, _config = Says("software"), Says("configuration")


def software() -> Iterator[CheckFinding]:
    """Look whether everything a node needs is installed."""
    missing = [name for name in NEEDED if not _installed(name)]
    if missing:
        yield _software.problem(f"not installed: {', '.join(missing)}", "pip install 'bsfg[node]'")
    else:
        yield _software.ok(f"bsfg {bsfg.__version__} on Python {platform.python_version()}")


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def configuration(subject: Subject) -> Iterator[CheckFinding]:
    """Look at what a correct file may still leave out."""
    from bsfg.config import Engine, Role, doubts_of

    config = subject.config
    counts = (counted(len(getattr(config, what)), one) for what, one in TABLES)
    yield _config.ok(f"{config.source}: zone {config.zone.name}, {', '.join(counts)}")
    for doubt in doubts_of(config):
        yield _config.warning(f"{doubt.key}: {doubt.says}", f"Correct the row in {config.source}.")
    roles = {role for row in config.identities.values() if not row.revoked for role in row.roles}
    if Role.OPERATOR not in roles:
        row = f'[identities.{config.zone.name}-operator] with roles = ["operator"] and streams = ["*"]'
        do = f"Add {row}, and issue its certificate."
        yield _config.warning("no identity is an operator, so nobody could hold a gate or settle quarantine", do)
    if not roles & {Role.PRODUCER, Role.PEER} and not config.links:
        yield _config.warning("nobody may append, and nothing is pulled", "Add a producer or a link.")
    for name, token in config.tokens.items():
        if token.expires_unix_ms is None:
            do = "Add expires, such as the date that `bsfg token` writes, or make a new token."
            yield _config.warning(f"the token of {name} never expires", do)
    spark = [name for name, link in config.links.items() if link.engine == Engine.SPARK]
    if spark and find_spec("pyspark") is None:
        do = "pip install 'bsfg[spark]' where the pipeline runs, or set engine = \"native\" to let the node pull."
        yield _config.warning(f"{', '.join(spark)} is moved by Spark, which is not installed here", do)


_ports_says = Says("ports")

_LISTENING = "0A"


def ports(subject: Subject) -> Iterator[CheckFinding]:
    """Look at the addresses of both listeners."""
    listen = subject.config.listen
    yield from _port(subject, "gRPC", listen.grpc)
    if listen.http_enabled:
        yield from _port(subject, "HTTP", listen.http)


def _port(subject: Subject, what: str, address: Address) -> Iterator[CheckFinding]:
    if not address.port:
        yield _ports_says.ok(f"{what} takes any free port")
        return
    try:
        _bind(address)
    except OSError as error:
        yield _refused(subject, what, address, error)
        return
    if subject.writer_pid is not None:
        do = "Was the file changed since the node was started? Restart the node, or look at its log."
        yield _ports_says.warning(f"the node runs (process {subject.writer_pid}) but {what} is not on {address}", do)
    else:
        yield _ports_says.ok(f"{what} {address} is free")


def _bind(address: Address) -> None:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        # Somebody who listens on all addresses only shows when we would listen too.
        probe.listen(1)


def _refused(subject: Subject, what: str, address: Address, error: OSError) -> CheckFinding:
    if error.errno == errno.EADDRINUSE:
        return _in_use(subject, what, address)
    if error.errno == errno.EACCES:
        do = "Use a port of 1024 or above, or allow the node's user to use lower ones."
        return _ports_says.problem(f"{what} {address} is not allowed for this user", do)
    if isinstance(error, socket.gaierror):
        return _ports_says.problem(
            f"{what}: nobody knows the host {address.host!r}", "Give an address of this machine."
        )
    do = "Use an address of this machine, or 0.0.0.0 for all of them."
    return _ports_says.problem(f"{what} {address}: {error.strerror or error}", do)


def _in_use(subject: Subject, what: str, address: Address) -> CheckFinding:
    pid = listener_of(address.port)
    if pid is not None and pid == subject.writer_pid:
        return _ports_says.ok(f"{what} {address} is used by the zone's own node (process {pid})")
    if pid is None and _is_our_node(subject, address):
        return _ports_says.ok(f"{what} {address} is used by a node with this zone's certificate")
    who = f"process {pid} ({command_of(pid)})" if pid is not None else "another process"
    do = f"Stop it, or choose another port in [listen]; `ss -ltnp 'sport = :{address.port}'` shows it."
    return _ports_says.problem(f"{what} {address} is used by {who}", do)


def _is_our_node(subject: Subject, address: Address) -> bool:
    """Tell whether whoever listens shows this zone's own certificate."""
    from bsfg.wire.certcheck import names_in_file
    from bsfg.wire.probe import probe

    files = subject.config.tls_files
    if files is None:
        return False
    try:
        return probe(address.reachable.host, address.port, files).names == names_in_file(files.certificate)
    except BsfgError:
        return False


def listener_of(port: int) -> int | None:
    """Give the process that listens on a port, None when nobody does or it cannot be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{words[9]}]")
    return next((pid for pid in _processes() if inodes & set(_links(pid))), None) if inodes else None


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _links(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            yield os.readlink(f"{folder}/{name}")
    except OSError:
        return


def command_of(pid: int) -> str:
    """Give the command line of a process, shortened."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "unknown"
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= 60 else text[:59] + "…"


VERIFIED_BYTES_MAX = 64 << 20
"""A folder up to this size is verified as a whole, which takes some seconds; a larger one only in its structure."""

_folder_says = Says("data")


def folder(subject: Subject) -> Iterator[CheckFinding]:
    """Look at the data folder."""
    path = subject.config.data_folder
    if not path.exists():
        yield _new(path)
        return
    if not os.access(path, os.W_OK):
        do = "Give it to the user that runs the node (chown), or run this check as that user."
        yield _folder_says.problem(f"{path} cannot be written by this user", do)
    yield from _readers(path, group_reads=subject.config.storage.group_reads)
    if subject.config.storage.backend != "log":
        return
    if not os.listdir(path):
        yield _folder_says.ok(f"{path} is empty; the node fills it when it first starts")
        return
    try:
        info = subject.data
    except BsfgError as error:
        yield _folder_says.problem(f"{path}: {error.message}", error.hint)
        return
    yield _writer(subject)
    yield from _whole(info, path, subject.progress)
    yield from _fits(subject, info)


_storage_says = Says("storage")


def storage(subject: Subject) -> Iterator[CheckFinding]:
    """Look at what keeps the facts, where that is not the data folder."""
    from bsfg.node.backends import looked_at

    backend = subject.config.storage.backend
    if backend == "log":
        return
    try:
        found = looked_at(subject.config, VERIFIED_BYTES_MAX)
        yield _storage_says.ok(found.said)
        for text in found.wrong:
            do = "What is stored was touched by hand, or the server's disk decays: compare with a backup or the peers."
            yield _storage_says.problem(text, do)
    except BsfgError as error:
        yield _storage_says.problem(error.message, error.hint)
    if backend == "memory":
        yield _storage_says.warning("facts are in memory: a restart loses them", 'Set [storage] backend = "log".')
    else:
        says = f"{backend}: `bsfg backup`, `verify` and local readers do not reach its facts"
        yield _storage_says.ok(f"{says}; back them up with the storage's own tools")


def _readers(path: Path, *, group_reads: bool) -> Iterator[CheckFinding]:
    """Look whether others than the node's account can look into the folder, which earlier versions let them."""
    mode = path.stat().st_mode
    wanted = 0o750 if group_reads else 0o700
    if mode & 0o777 & ~wanted & 0o077:
        who = "everybody on this machine" if mode & 0o007 else "its group"
        yield _folder_says.warning(f"{path} can be looked into by {who}", f"chmod {wanted:o} {path}")


def _new(path: Path) -> CheckFinding:
    parent = existing_parent(path)
    if not os.access(parent, os.W_OK):
        return _folder_says.problem(
            f"{path} is not there and cannot be made", f"Make {parent} writable for the node's user."
        )
    return _folder_says.ok(f"{path} is not there yet; the node makes it when it first starts")


def _writer(subject: Subject) -> CheckFinding:
    pid, path = subject.writer_pid, subject.config.data_folder
    if pid is None:
        return _folder_says.ok(f"{path} is written by nobody: the node does not run")
    return _folder_says.ok(f"{path} is written by process {pid} ({command_of(pid)})")


def _whole(info: FolderInfo, path: Path, progress: Progress | None) -> Iterator[CheckFinding]:
    from bsfg.cli.verify import ADVICE
    from bsfg.stores.log.verify import verify

    for log in info.logs:
        if log.error is not None:
            yield _folder_says.problem(f"{log.stream}/{log.buffer}: {log.error['message']}", str(log.error["hint"]))
    for text in info.problems:
        yield _folder_says.problem(f"{text}", f"bsfg verify {path}")
    if info.size_bytes > VERIFIED_BYTES_MAX:
        says = f"{size_text(info.size_bytes)} in {counted(len(info.logs), 'log')}, looked at from outside"
        yield _folder_says.ok(f"{says}; `bsfg verify {path}` reads every byte")
        return
    report = verify(path, progress=progress)
    for problem in report.problems:
        yield _folder_says.problem(f"{problem.code} in {problem.where}: {problem.detail}", ADVICE.get(problem.code, ""))
    if report.ok:
        facts = sum(log.facts for log in report.logs)
        yield _folder_says.ok(f"{counted(facts, 'fact')} in {counted(len(report.logs), 'log')}, every byte verified")


def _fits(subject: Subject, info: FolderInfo) -> Iterator[CheckFinding]:
    streams = subject.config.streams
    for stream in sorted({log.stream for log in info.logs} - set(streams)):
        do = f"Add [streams.{stream}] again, or remove its folder when nobody needs it any more."
        yield _folder_says.warning(
            f"the stream {stream!r} is on disk but not configured, so nobody is served from it", do
        )
    for consumer in info.consumers:
        if not consumer.same_history and consumer.retired_reason is None:
            do = "The folder was restored or mixed: reconcile this consumer, or retire it with a reason."
            yield _folder_says.problem(f"the consumer {consumer.name} belongs to another history of the log", do)
    quarantined = sum(len(log.quarantine) for log in info.logs)
    if quarantined:
        yield _folder_says.warning(f"{counted(quarantined, 'fact')} in quarantine", "bsfg quarantine list")


TIMEOUT_SECONDS = 5.0

_peers_says = Says("peers")


def peers(subject: Subject) -> Iterator[CheckFinding]:
    """Look at the other end of every inbound link, all at once."""
    links, files = subject.config.links.values(), subject.config.tls_files
    if not links:
        yield _peers_says.ok("no link is configured, so there is nobody to reach")
        return
    if files is None:
        yield _peers_says.problem("links need a certificate", "Configure [tls].")
        return
    try:
        files.load()
    except BsfgError:
        yield _peers_says.warning("no peer can be asked without a certificate", "Correct the certificate first.")
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    async def all_links() -> list[list[CheckFinding]]:
        asked = [(link, address) for link in links for address in link.address.each]
        return await asyncio.gather(*(_link(subject, link, address, files) for link, address in asked))

    for found in asyncio.run(all_links()):
        yield from found


async def _link(subject: Subject, link: Link, address: Address, files: TlsFiles) -> list[CheckFinding]:
    from bsfg.wire.probe import verify_server

    by_alternative_name = subject.config.tls.identity == "san"
    who = f"{link.name}: {link.expected_server} at {address}"
    try:
        verified = await asyncio.to_thread(
            verify_server,
            address.host,
            address.port,
            files,
            link.expected_server,
            by_alternative_name=by_alternative_name,
            vouch=_vouch(subject, link, files),
            timeout_seconds=TIMEOUT_SECONDS,
        )
    except PeerUnreachable as error:
        do = f"{error.hint} Until then facts wait on both sides; nothing is lost."
        return [_peers_says.warning(f"{who} does not answer: {error.message}", do)]
    except CertificateInvalid as error:
        clock = " Or one of the two clocks is wrong." if "not yet valid" in error.message else ""
        return [_peers_says.problem(f"{who}: {error.message}", f"{error.hint}{clock}")]
    except BsfgError as error:
        return [_peers_says.problem(f"{who}: {error.message}", error.hint)]
    return await _knows_us(subject, link, address, files, verified.name)


def _vouch(subject: Subject, link: Link, files: TlsFiles) -> Callable[[PeerNames], None]:
    """Give what raises for a server whose authority does not speak for its zone."""
    from bsfg.config.vouching import Vouching
    from bsfg.node.reload import trust_of

    config = subject.config
    vouching = Vouching(trust_of(config, files), config.authorities)
    now_unix_ms = int(subject.now.timestamp() * 1000)
    return lambda names: vouching.check_server(names, config.identities[link.expected_server], now_unix_ms)


async def _knows_us(
    subject: Subject, link: Link, address: Address, files: TlsFiles, server_name: str
) -> list[CheckFinding]:
    """Read an empty range: the answer shows whether the peer lets this zone read, and moves no cursor."""
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.connection import Connection
    from bsfg.wire.tls import Watched

    connection = Connection(
        str(address),
        watched=Watched(files),
        server_name=server_name,
        request_timeout_seconds=TIMEOUT_SECONDS,
    )
    found, took_ms = [], 0.0
    async with BoundaryClient(connection) as client:
        for stream in subject.config.streams_of(link):
            start = time.perf_counter()
            try:
                async for _ in client.read_offsets(stream, 0, 0, buffer=link.buffer):
                    pass
            except StandingBy as error:
                return [_peers_says.ok(f"{link.name}: {error.message}")]
            except (PeerUnreachable, TimedOut) as error:
                found.append(_peers_says.warning(f"{link.name}: {error.message}", error.hint))
            except BsfgError as error:
                do = f"The operators of {link.zone} must change it in their zone.toml. {error.hint}"
                found.append(_peers_says.problem(f"{link.name}: {link.zone} refuses {stream!r}: {error.message}", do))
            took_ms = 1000 * (time.perf_counter() - start)
    if not found:
        says = f"{link.name}: {link.expected_server} at {address} answers in {took_ms:.0f} ms and lets us read"
        found.append(_peers_says.ok(says))
    return found
