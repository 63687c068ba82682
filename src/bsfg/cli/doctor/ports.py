"""Checks of the ports: free, or used by the zone's own node."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bsfg.cli.doctor.findings import Finding, Says, Subject

if TYPE_CHECKING:
    from bsfg.config import Address

_says = Says("ports")

_LISTENING = "0A"


def ports(subject: Subject) -> Iterator[Finding]:
    """Look at the addresses of both listeners."""
    listen = subject.config.listen
    yield from _port(subject, "gRPC", listen.grpc)
    if listen.http_enabled:
        yield from _port(subject, "HTTP", listen.http)


def _port(subject: Subject, what: str, address: Address) -> Iterator[Finding]:
    if not address.port:
        yield _says.ok(f"{what} takes any free port")
        return
    try:
        _bind(address)
    except OSError as error:
        yield _refused(subject, what, address, error)
        return
    if subject.writer_pid is not None:
        do = "Was the file changed since the node was started? Restart the node, or look at its log."
        yield _says.warning(f"the node runs (process {subject.writer_pid}) but {what} is not on {address}", do)
    else:
        yield _says.ok(f"{what} {address} is free")


def _bind(address: Address) -> None:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        # Somebody who listens on all addresses only shows when we would listen too.
        probe.listen(1)


def _refused(subject: Subject, what: str, address: Address, error: OSError) -> Finding:
    if error.errno == errno.EADDRINUSE:
        return _in_use(subject, what, address)
    if error.errno == errno.EACCES:
        do = "Use a port of 1024 or above, or allow the node's user to use lower ones."
        return _says.problem(f"{what} {address} is not allowed for this user", do)
    if isinstance(error, socket.gaierror):
        return _says.problem(f"{what}: nobody knows the host {address.host!r}", "Give an address of this machine.")
    do = "Use an address of this machine, or 0.0.0.0 for all of them."
    return _says.problem(f"{what} {address}: {error.strerror or error}", do)


def _in_use(subject: Subject, what: str, address: Address) -> Finding:
    pid = listener_of(address.port)
    if pid is not None and pid == subject.writer_pid:
        return _says.ok(f"{what} {address} is used by the zone's own node (process {pid})")
    if pid is None and _is_our_node(subject, address):
        return _says.ok(f"{what} {address} is used by a node with this zone's certificate")
    who = f"process {pid} ({command_of(pid)})" if pid is not None else "another process"
    do = f"Stop it, or choose another port in [listen]; `ss -ltnp 'sport = :{address.port}'` shows it."
    return _says.problem(f"{what} {address} is used by {who}", do)


def _is_our_node(subject: Subject, address: Address) -> bool:
    """Tell whether whoever listens shows this zone's own certificate."""
    from bsfg.errors import BsfgError
    from bsfg.wire.certcheck import names_in_file
    from bsfg.wire.probe import probe

    files = subject.tls_files
    if files is None:
        return False
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    try:
        return probe(host, address.port, files).names == names_in_file(files.certificate)
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
