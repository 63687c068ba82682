"""What a task must know to move its links, in a form that reaches it wherever it runs."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bsfg.disk import replace_file
from bsfg.errors import InvalidArgument
from bsfg.ports import Buffer
from bsfg.spark.calls import NodeAccess

if TYPE_CHECKING:
    from bsfg.config import Authority, Identity, Link, ZoneConfig
    from bsfg.wire.peer import PeerNames
    from bsfg.wire.tls import TlsFiles, Watched

LEASE_TTL_MS = 5_000


@dataclass(frozen=True, slots=True)
class StreamTaskPlan:
    """One stream of a link: the sender's consumer, and how much the forward buffer holds."""

    stream: str
    consumer: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Voucher:
    """What tells whether the authority behind a sender's certificate counts, where the files are at hand."""

    row: Identity
    authorities: Mapping[str, Authority]
    crl: Path | None

    def vouch(self, files: TlsFiles) -> Callable[[PeerNames], None]:
        """Read the authorities, and give what raises for a server that they do not stand for."""
        from bsfg.clock import SystemClock
        from bsfg.config.vouching import Vouching
        from bsfg.wire.certs import load_trust

        vouching, clock = Vouching(load_trust(files, self.crl), self.authorities), SystemClock()
        return lambda names: vouching.check_server(names, self.row, clock.now_unix_ms())


@dataclass(frozen=True, slots=True)
class LinkTaskPlan:
    """One inbound link: how to reach both nodes, and under which name its lease is held.

    ``own`` calls this zone's node as its pipeline, ``peer`` the sender's as this zone's node does.
    """

    zone: str
    link: Link
    streams: tuple[StreamTaskPlan, ...]
    own: NodeAccess
    peer: NodeAccess
    holder: str
    by_alternative_name: bool = False
    voucher: Voucher | None = None

    @property
    def name(self) -> str:
        """The name of the link."""
        return self.link.name

    @property
    def buffer(self) -> Buffer:
        """The sender's buffer that is pulled."""
        return self.link.buffer

    def vouch(self, watched: Watched | None) -> Callable[[PeerNames], None]:
        """Give what raises for a server whose authority does not count; nothing can be said without the files."""
        if watched is None or self.voucher is None:
            return lambda names: None
        return self.voucher.vouch(watched.files)

    def shipped(self) -> LinkTaskPlan:
        """Give the plan with the certificates themselves instead of their paths, for tasks on other machines."""
        return replace(self, own=_once(self.own.with_contents()), peer=_once(self.peer.with_contents()))


def _once(access: NodeAccess) -> NodeAccess:
    """Have all links share one copy of a certificate, which so travels once in a plan of hundreds of them."""
    parts = (access.ca, access.certificate, access.key)
    ca, certificate, key = (None if part is None else sys.intern(part) for part in parts)
    return replace(access, ca=ca, certificate=certificate, key=key)


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """The links that one task carries; ``number`` is that of the run's plan, which grows with every change of it."""

    number: int
    own: NodeAccess
    holder: str
    links: tuple[LinkTaskPlan, ...]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All links of a run, spread over bundles."""

    bundles: tuple[BundlePlan, ...]

    @property
    def number(self) -> int:
        """The number of the plan."""
        return self.bundles[0].number

    @property
    def places(self) -> dict[str, int]:
        """In which bundle each link is, by its name."""
        return {link.name: at for at, bundle in enumerate(self.bundles) for link in bundle.links}

    def write(self, path: Path) -> None:
        """Write the plan to a file that nobody else can read: it may hold keys. Who reads meanwhile has the old one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, pickle.dumps([pickle.dumps(bundle) for bundle in self.bundles]), 0o600)

    @staticmethod
    def read(path: Path) -> RunPlan:
        """Read a plan that this user's own driver wrote."""
        return RunPlan(tuple(map(pickle.loads, pickle.loads(path.read_bytes()))))


def spread(
    links: Sequence[LinkTaskPlan],
    most: int,
    own: NodeAccess,
    holder: str,
    number: int = 1,
    before: Mapping[str, int] | None = None,
) -> RunPlan:
    """Spread links over at most so many bundles, evenly; where a link was ``before`` it stays.

    There is always a bundle, be it an empty one: a query without a task would begin its next turn at once.
    """
    count = max(1, min(most, len(links)))
    bundles: list[list[LinkTaskPlan]] = [[] for _ in range(count)]
    staying = {name: at for name, at in (before or {}).items() if at < count}
    room = -(-len(links) // count)
    moving = []
    for link in links:
        at = staying.get(link.name)
        if at is None or len(bundles[at]) >= room:
            moving.append(link)
        else:
            bundles[at].append(link)
    for link in moving:
        min(bundles, key=len).append(link)
    return RunPlan(tuple(BundlePlan(number, own, holder, tuple(bundle)) for bundle in bundles))


def plan_of(config: ZoneConfig, name: str, own: NodeAccess, holder: str) -> LinkTaskPlan:
    """Make the plan of one link of a zone's configuration."""
    from bsfg.config.access import consumer_name
    from bsfg.config.kinds import IdentityFrom

    link = config.links.get(name)
    if link is None:
        raise InvalidArgument(
            f"{config.source} has no link {name!r}", hint=f"There are {', '.join(config.links) or 'none'}."
        )
    streams = tuple(
        StreamTaskPlan(
            stream,
            consumer_name(config.zone.name, stream, link.buffer),
            config.streams[stream].forward_policy.capacity_bytes,
        )
        for stream in config.streams_of(link)
    )
    peer = replace(peer_access(config, link), to_peer=True)
    by_alternative_name = config.tls.identity == IdentityFrom.SAN
    crl = None if config.tls.crl is None else config.path(config.tls.crl).absolute()
    voucher = Voucher(config.identities[link.expected_server], config.authorities, crl)
    return LinkTaskPlan(config.zone.name, link, streams, own, peer, holder, by_alternative_name, voucher)


def peer_access(config: ZoneConfig, link: Link) -> NodeAccess:
    """Give the way to the sender of a link, with the certificate of this zone's node."""
    files = None if config.listen.plaintext else config.tls_files
    return NodeAccess.of(str(link.address), files, link.expected_server)
