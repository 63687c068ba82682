"""Checks of the peers: whether each answers, is who it should be, and knows this zone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bsfg.cli.doctor.findings import Finding, Says, Subject
from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, TimedOut

if TYPE_CHECKING:
    from bsfg.config import Link
    from bsfg.wire.peer import PeerNames
    from bsfg.wire.tls import TlsFiles

TIMEOUT_SECONDS = 5.0

_says = Says("peers")


def peers(subject: Subject) -> Iterator[Finding]:
    """Look at the other end of every inbound link, all at once."""
    links, files = subject.config.links.values(), subject.tls_files
    if not links:
        yield _says.ok("no link is configured, so there is nobody to reach")
        return
    if files is None:
        yield _says.problem("links need a certificate", "Configure [tls].")
        return
    try:
        files.load()
    except BsfgError:
        yield _says.warning("no peer can be asked without a certificate", "Correct the certificate first.")
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    async def all_links() -> list[list[Finding]]:
        return await asyncio.gather(*(_link(subject, link, files) for link in links))

    for found in asyncio.run(all_links()):
        yield from found


async def _link(subject: Subject, link: Link, files: TlsFiles) -> list[Finding]:
    from bsfg.wire.probe import verify_server

    by_alternative_name = subject.config.tls.identity == "san"
    who = f"{link.name}: {link.expected_server} at {link.address}"
    try:
        verified = await asyncio.to_thread(
            verify_server,
            link.address.host,
            link.address.port,
            files,
            link.expected_server,
            by_alternative_name=by_alternative_name,
            vouch=_vouch(subject, link, files),
            timeout_seconds=TIMEOUT_SECONDS,
        )
    except PeerUnreachable as error:
        do = f"{error.hint} Until then facts wait on both sides; nothing is lost."
        return [_says.warning(f"{who} does not answer: {error.message}", do)]
    except CertificateInvalid as error:
        clock = " Or one of the two clocks is wrong." if "not yet valid" in error.message else ""
        return [_says.problem(f"{who}: {error.message}", f"{error.hint}{clock}")]
    except BsfgError as error:
        return [_says.problem(f"{who}: {error.message}", error.hint)]
    return await _knows_us(subject, link, files, verified.name)


def _vouch(subject: Subject, link: Link, files: TlsFiles) -> Callable[[PeerNames], None]:
    """Give what raises for a server whose authority does not speak for its zone."""
    from bsfg.config.vouching import Vouching
    from bsfg.node.reload import trust_of

    config = subject.config
    vouching = Vouching(trust_of(config, files), config.authorities)
    now_unix_ms = int(subject.now.timestamp() * 1000)
    return lambda names: vouching.check_server(names, config.identities[link.expected_server], now_unix_ms)


async def _knows_us(subject: Subject, link: Link, files: TlsFiles, server_name: str) -> list[Finding]:
    """Read an empty range: the answer shows whether the peer lets this zone read, and moves no cursor."""
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.connection import Connection
    from bsfg.wire.tls import Watched

    connection = Connection(
        str(link.address),
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
            except (PeerUnreachable, TimedOut) as error:
                found.append(_says.warning(f"{link.name}: {error.message}", error.hint))
            except BsfgError as error:
                do = f"The operators of {link.zone} must change it in their zone.toml. {error.hint}"
                found.append(_says.problem(f"{link.name}: {link.zone} refuses {stream!r}: {error.message}", do))
            took_ms = 1000 * (time.perf_counter() - start)
    if not found:
        says = f"{link.name}: {link.expected_server} at {link.address} answers in {took_ms:.0f} ms and lets us read"
        found.append(_says.ok(says))
    return found
