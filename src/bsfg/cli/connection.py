"""The options by which a command finds a node and shows it a certificate, and the call itself.

A command takes a `Target` and is decorated with `connects`, which puts the options in its place::

    @app.command()
    @connects("operator", "viewer")
    def status(node: Target) -> None:
        document = node.run(lambda connection: AdminClient(connection).status())

The roles say which certificate is meant when the options leave it open: that of the first identity of the zone's file
with the first of these roles whose certificate lies beside the node's, as `bsfg certs issue` puts it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bsfg.cli.common import Complete, identities
from bsfg.cli.output import say
from bsfg.errors import BsfgError, CertificateInvalid, InvalidArgument, PeerUnreachable, ServerIdentityMismatch

if TYPE_CHECKING:
    from bsfg.config import ZoneConfig
    from bsfg.sdk.endpoint import Endpoint
    from bsfg.spark.calls import NodeAccess
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.connection import Connection
    from bsfg.wire.tls import TlsFiles

T = TypeVar("T")

DEFAULT_CONFIG = Path("zone.toml")
PANEL = "Which node, and as whom"

CONNECTION_ERRORS = (PeerUnreachable, CertificateInvalid, ServerIdentityMismatch)
"""What a connection that cannot be made ends in; `Target.explained` finds out more."""


def _option(*names: str, env: str, says: str, metavar: str, complete: Complete | None = None) -> Any:
    return typer.Option(
        *names,
        envvar=env,
        help=says,
        metavar=metavar,
        rich_help_panel=PANEL,
        show_default=False,
        autocompletion=complete,
    )


_OPTIONS: dict[str, Any] = {
    "config": Annotated[
        Path | None,
        _option(
            "--config",
            "-c",
            env="BSFG_CONFIG",
            metavar="FILE",
            says="The zone's configuration, which says where its node is. Default: zone.toml, if it is here.",
        ),
    ],
    "identity": Annotated[
        str | None,
        _option(
            "--identity",
            env="BSFG_IDENTITY",
            metavar="NAME",
            complete=identities,
            says="Call as this row of the configuration's [identities]; its certificate lies beside the node's.",
        ),
    ],
    "address": Annotated[
        str | None,
        _option("--address", env="BSFG_ADDRESS", metavar="HOST:PORT", says="Where the node listens for gRPC."),
    ],
    "ca": Annotated[
        Path | None,
        _option("--ca", env="BSFG_CA", metavar="FILE", says="The authority that signed the node's certificate."),
    ],
    "cert": Annotated[
        Path | None, _option("--cert", env="BSFG_CERT", metavar="FILE", says="The certificate to call with.")
    ],
    "key": Annotated[Path | None, _option("--key", env="BSFG_KEY", metavar="FILE", says="Its private key.")],
    "server_name": Annotated[
        str | None,
        _option(
            "--server-name",
            env="BSFG_SERVER_NAME",
            metavar="NAME",
            says="The name that the node's certificate must carry, such as plant-a-bsfg.",
        ),
    ],
}


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """What a user said of the node and of himself; None where he left it open."""

    config: Path | None = None
    identity: str | None = None
    address: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """A node and the certificate to call it with; without files the call is plaintext, for loopback only.

    ``zone`` is the zone of the configuration that was given, if one was.
    """

    address: str
    files: TlsFiles | None = None
    server_name: str | None = None
    zone: str | None = None

    def endpoint(self) -> Endpoint:
        """Give the node in the form that producers and consumers take."""
        # Keep gRPC from writing its own lines to stderr; it reads this when it is loaded.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        from bsfg.sdk.endpoint import Endpoint

        files = self.files
        if files is None:
            return Endpoint(self.address)
        return Endpoint(self.address, files.ca, files.certificate, files.key, self.server_name)

    def access(self) -> NodeAccess:
        """Give the node in the form that Spark's tasks take."""
        from bsfg.spark.calls import NodeAccess

        return NodeAccess.of(self.address, self.files, self.server_name)

    def connection(self) -> Connection:
        """Make a connection; whoever asks closes it."""
        return self.endpoint().connect().connection

    def run(self, call: Callable[[Connection], Awaitable[T]]) -> T:
        """Connect, make calls, and disconnect; a failure to connect says what is really wrong."""

        connection = self.connection()

        async def connected() -> T:
            try:
                return await call(connection)
            finally:
                await connection.close()

        try:
            return asyncio.run(connected())
        except CONNECTION_ERRORS as error:
            raise self.explained(error) from None

    def explained(self, error: BsfgError) -> BsfgError:
        """Find out by a handshake of its own why a connection failed, since gRPC says "unavailable" to everything."""
        from bsfg.config.kinds import Addresses
        from bsfg.wire.probe import probe, verify_server

        first = Addresses.of(self.address).each[0]
        host, port = first.host, first.port
        try:
            if self.files is None:
                _knock(host, port)
                hint = "It probably wants TLS: give --ca, --cert and --key, or --config."
                return PeerUnreachable(f"{self.address} does not answer calls without TLS", hint=hint)
            if self.server_name is None:
                probe(host, port, self.files)
            else:
                _verify(verify_server, host, port, self.files, self.server_name)
        except BsfgError as found:
            return found
        return error


def admin_of(connection: Connection) -> AdminClient:
    """Give the calls of administration, whose module is loaded only for them."""
    from bsfg.wire.adminclient import AdminClient

    return AdminClient(connection)


def told_once() -> Callable[[BsfgError], None]:
    """Give what tells on stderr, once, that something is waited for; for commands that try again by themselves."""
    told: set[str] = set()

    def tell(error: BsfgError) -> None:
        if error.retryable and error.code not in told:
            told.add(error.code)
            say(f"waiting: {error.message}")

    return tell


def _verify(verify: Callable[..., object], host: str, port: int, files: TlsFiles, name: str) -> None:
    """Check the server's name as TLS does: among the alternative names, or else as the common name."""
    try:
        verify(host, port, files, name, by_alternative_name=True)
    except BsfgError as error:
        if error.code != "server_identity_mismatch":
            raise
        verify(host, port, files, name)


def _knock(host: str, port: int) -> None:
    import socket

    from bsfg.wire.status import reason_of

    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError as error:
        raise PeerUnreachable(f"{host}:{port} cannot be reached: {reason_of(error)}") from None


def connects(*roles: str, unless: str | None = None) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a command the options that name a node, and the command the `Target` that they mean as ``node``.

    ``unless`` is a flag of the command with which it needs no node; ``node`` is then None.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        own = inspect.signature(function, eval_str=True)
        parameters = [parameter for name, parameter in own.parameters.items() if name != "node"]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in _OPTIONS.items()]

        @wraps(function)
        def command(**given: Any) -> T:
            choice = NodeChoice(**{name: given.pop(name) for name in _OPTIONS})
            needless = unless is not None and given[unless]
            return function(**given, node=None if needless else resolve(choice, roles))

        described: Any = command
        described.__signature__ = own.replace(parameters=parameters)
        described.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def resolve(choice: NodeChoice, roles: Sequence[str]) -> Target:
    """Find the node and the certificate that a choice means; what an option says goes before the zone's file."""
    if choice.config is None and (choice.address is None or choice.identity is not None):
        if not DEFAULT_CONFIG.is_file():
            hint = "Give --config zone.toml, or --address with --ca, --cert and --key; BSFG_CONFIG and so on work too."
            raise InvalidArgument("which node is not said, and there is no zone.toml here", hint=hint)
        choice = replace(choice, config=DEFAULT_CONFIG)
    if choice.config is not None:
        return _from_config(choice, roles)
    from bsfg.config.kinds import Addresses

    assert choice.address is not None
    address, given = Addresses.of(choice.address, "--address"), (choice.ca, choice.cert, choice.key)
    if any(given):
        return Target(str(address), _files(choice, *given), choice.server_name)
    if not address.is_loopback:
        hint = "Give --ca, --cert and --key. Nodes answer without TLS on loopback only, for trials."
        raise InvalidArgument(f"{choice.address} is not on this machine, so a certificate is needed", hint=hint)
    return Target(str(address))


def _from_config(choice: NodeChoice, roles: Sequence[str]) -> Target:
    from bsfg.config import load
    from bsfg.config.kinds import Addresses

    assert choice.config is not None
    config = load(choice.config)
    address = str(Addresses.of(choice.address, "--address")) if choice.address else _own_address(config)
    if config.listen.plaintext and not (choice.ca or choice.cert or choice.key):
        return Target(address, zone=config.zone.name)
    tls = config.tls
    ca = choice.ca or (config.path(tls.ca) if tls.ca else None)
    cert, key = choice.cert, choice.key
    if cert is None and key is None:
        cert, key = _identity_files(config, choice.identity, roles)
    server_name = choice.server_name or _server_name(config)
    return Target(address, _files(choice, ca, cert, key), server_name, config.zone.name)


def _own_address(config: ZoneConfig) -> str:
    listen = config.listen.grpc
    if not listen.port:
        hint = "Give --address with the port that the node's log names."
        raise InvalidArgument(f"{config.source} lets the node take any free port", hint=hint)
    return str(listen.reachable)


def _identity_files(config: ZoneConfig, wanted: str | None, roles: Sequence[str]) -> tuple[Path, Path]:
    """Give certificate and key of the identity that is meant: one that was named, or one with a fitting role."""
    from bsfg.config.kinds import nearest

    folder = config.path(config.tls.certificate).parent if config.tls.certificate else config.source.parent
    if wanted is not None and wanted not in config.identities:
        hint = f"There are {', '.join(config.identities) or 'none'}."
        says = f"{wanted!r} has no row in [identities] of {config.source}{nearest(wanted, config.identities)}"
        raise InvalidArgument(says, hint=hint)
    names = [wanted] if wanted is not None else [*_fitting(config, roles)]
    for name in names:
        files = folder / f"{name}.crt", folder / f"{name}.key"
        if all(path.is_file() for path in files):
            return files
    who = f"the identity {wanted}" if wanted else f"an identity with the role {' or '.join(roles)}"
    name = names[0] if names else f"{config.zone.name}-{roles[0]}"
    role = config.identities[name].roles[0] if name in config.identities else roles[0]
    row = "" if names else f", after adding [identities.{name}] to {config.source}"
    hint = f"Give --cert and --key, or issue one: bsfg certs issue {folder} {name} --role-hint {role}{row}"
    raise InvalidArgument(f"no certificate of {who} lies in {folder}", hint=hint)


def _fitting(config: ZoneConfig, roles: Sequence[str]) -> list[str]:
    rows = [row for row in config.identities.values() if not row.revoked and row.zone == config.zone.name]
    return list(dict.fromkeys(row.name for role in roles for row in rows if role in row.roles))


def _server_name(config: ZoneConfig) -> str:
    """Give the name by which TLS can insist on the node of a zone."""
    from bsfg.wire.certcheck import names_in_file

    usual = f"{config.zone.name}-bsfg"
    if config.tls.certificate is None:
        return usual
    try:
        names = names_in_file(config.path(config.tls.certificate))
    except BsfgError:
        return usual
    known = [name for name in (usual, *names.common_names) if name in names.alternative_names]
    return (known or [*names.alternative_names, usual])[0]


def _files(choice: NodeChoice, ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles:
    from bsfg.wire.tls import TlsFiles

    missing = [name for name, path in (("--ca", ca), ("--cert", cert), ("--key", key)) if path is None]
    if ca is None or cert is None or key is None:
        hint = "TLS needs all three: the authority, a certificate and its key."
        raise InvalidArgument(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", hint=hint)
    return TlsFiles(ca, cert, key)
