"""Where a node listens and who calls it: the one thing that producers and consumers must know of the network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bsfg.errors import CertificateInvalid, InvalidArgument

if TYPE_CHECKING:
    from bsfg.config import ZoneConfig
    from bsfg.wire.client import BoundaryClient

ADDRESS, CONFIG, CA, CERTIFICATE, KEY, SERVER_NAME = (
    "BSFG_ADDRESS",
    "BSFG_CONFIG",
    "BSFG_CA",
    "BSFG_CERT",
    "BSFG_KEY",
    "BSFG_SERVER_NAME",
)
"""The environment variables that describe a node to applications and to the command line."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A node's address, and the certificate by which it knows the caller.

    With ``ca``, ``certificate`` and ``key`` (paths of PEM files) the connection is mutual TLS 1.3, and the files are
    read again when they change. Without them it is plaintext, which is allowed on loopback only. ``server_name`` is the
    name that the node's certificate must carry, such as ``plant-a-bsfg``; it defaults to the host of the address.

    A zone may have several nodes, of which one is active: ``address`` is then a list, or a text with commas between.
    Whoever calls moves over by himself when another one becomes active.
    """

    address: str
    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None
    request_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        from bsfg.config.kinds import Addresses

        addresses = Addresses.of(self.address)
        object.__setattr__(self, "address", str(addresses))
        files = (self.ca, self.certificate, self.key)
        if any(files) and not all(files):
            raise InvalidArgument("TLS needs all three files: ca, certificate and key")
        if not addresses.is_loopback and not any(files):
            raise InvalidArgument(
                f"{self.address} is not on loopback, so it needs TLS", hint="Give ca, certificate and key."
            )

    @property
    def secure(self) -> bool:
        """Whether the connection uses TLS."""
        return self.ca is not None

    def connect(self) -> BoundaryClient:
        """Make a client; nothing is sent before its first call. It belongs to the running event loop."""
        from bsfg.wire.client import BoundaryClient
        from bsfg.wire.connection import Connection
        from bsfg.wire.tls import TlsFiles, Watched

        watched = None
        if self.ca is not None and self.certificate is not None and self.key is not None:
            watched = Watched(TlsFiles(Path(self.ca), Path(self.certificate), Path(self.key)))
        connection = Connection(
            self.address,
            watched=watched,
            server_name=self.server_name,
            request_timeout_seconds=self.request_timeout_seconds,
        )
        return BoundaryClient(connection)

    @staticmethod
    def of(where: Where, *, role: str = "producer") -> Endpoint:
        """Take what an application gives: an endpoint, addresses on loopback, or nothing for the environment's."""
        from bsfg.config.kinds import Addresses

        if isinstance(where, Endpoint):
            return where
        return Endpoint.from_environment(role=role) if where is None else Endpoint(str(Addresses.of(where)))

    @staticmethod
    def from_environment(*, role: str = "producer", environment: Mapping[str, str] | None = None) -> Endpoint:
        """Read BSFG_ADDRESS, BSFG_CA, BSFG_CERT, BSFG_KEY and BSFG_SERVER_NAME, or the file that BSFG_CONFIG names."""
        found = os.environ if environment is None else environment
        if found.get(CONFIG):
            return Endpoint.from_config(Path(found[CONFIG]), role=role)
        if not found.get(ADDRESS):
            raise InvalidArgument(
                "no node is named", hint=f"Give an endpoint, or set {ADDRESS} (host:port) or {CONFIG} (zone.toml)."
            )
        return Endpoint(
            found[ADDRESS],
            found.get(CA) or None,
            found.get(CERTIFICATE) or None,
            found.get(KEY) or None,
            found.get(SERVER_NAME) or None,
        )

    @staticmethod
    def from_config(path: str | Path, *, role: str = "producer", identity: str | None = None) -> Endpoint:
        """Take the address and the certificates from a zone's own configuration, as a program beside its node does.

        The certificate is the one that ``bsfg init`` plans for the role: ``<zone>-<role>`` beside the node's own.
        ``identity`` names another.
        """
        from bsfg.config import load

        config = load(Path(path))
        address = str(config.listen.grpc.reachable)
        if config.listen.plaintext:
            return Endpoint(address)
        name = identity or f"{config.zone.name}-{role}"
        return _with_certificate(config, address, name)


Where: TypeAlias = Endpoint | str | Sequence[str] | None
"""What names a node to producers and consumers; see `Endpoint.of`."""


def _with_certificate(config: ZoneConfig, address: str, name: str) -> Endpoint:
    from bsfg.wire.certcheck import names_in_file

    tls = config.tls
    if tls.ca is None or tls.certificate is None:
        raise CertificateInvalid(f"{config.source} names no certificate in [tls]")
    own = config.path(tls.certificate)
    certificate, key = own.with_name(f"{name}.crt"), own.with_name(f"{name}.key")
    for file in (certificate, key):
        if not file.exists():
            hint = f"Issue it with `bsfg certs issue {own.parent} {name}`, or name another certificate and its key."
            raise CertificateInvalid(f"there is no {file}", hint=hint)
    names = names_in_file(own)
    server_name = next(iter(names.alternative_names or names.common_names), None)
    return Endpoint(address, config.path(tls.ca), certificate, key, server_name)
