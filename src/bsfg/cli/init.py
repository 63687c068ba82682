"""`bsfg init`: write the configuration of a new zone."""

from __future__ import annotations

import re
import socket
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from bsfg.cli.common import flag, option
from bsfg.cli.output import console, examples, print_json
from bsfg.config.declare import ConfigTable, dotted, tables_of, toml
from bsfg.config.kinds import Engine
from bsfg.config.settings import ZoneConfig
from bsfg.errors import FileExists, InvalidArgument, StorageReadOnly
from bsfg.rules import ZONE, check_name

FILE = "zone.toml"
LOCAL_ROLES = ("producer", "consumer", "pipeline", "operator")
GRPC_PORT, HTTP_PORT = 9443, 9080
PORTS_TRIED = 200
_PORT_MAX = 65_535

_PREAMBLE = """\
Configuration of the zone {zone}. `bsfg help configuration` describes every key.
Keys that are commented out show their defaults or an example.
The node checks this file at its start: bsfg node --config {file}"""

WHY_EXPLICIT = (
    'message_ids = "explicit": each fact carries the id its producer gave it, so two equal readings are two facts. '
    "Derive the id from the event (such as order and step), never from clock or chance, and repeat it on a retry."
)


app = typer.Typer()


EPILOG = examples(
    ("bsfg init plant-a --zone plant-a --peer enterprise=10.0.0.7:9443", "a zone that exchanges facts with another"),
    ("bsfg init two --zone two --port 9444 --peer one=localhost:9443", "a second zone on the same machine"),
    ("bsfg init lab --zone lab --stream operational --stream audit", "a zone of its own with two streams"),
)


@app.command(epilog=EPILOG)
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write zone.toml.")] = Path(),
    *,
    zone: Annotated[str, typer.Option("--zone", help="The zone's name, such as plant-a.")],
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="Another zone and its node: enterprise=host:9443. Repeatable.")
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option("--stream", help="A stream; repeatable. Default: operational.")
    ] = None,
    port: Annotated[
        int | None,
        option(
            "N",
            f"Where the node listens for gRPC. Default: {GRPC_PORT}, or the next that is free on this machine.",
            min=1,
            max=_PORT_MAX,
            show_default=False,
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        option(
            "N",
            f"Where it listens for HTTP. Default: as far from {HTTP_PORT} as --port is from {GRPC_PORT}.",
            min=1,
            max=_PORT_MAX,
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="What moves the links: Spark, in a process beside the node, or the node itself.")
    ] = Engine.SPARK,
    force: Annotated[bool, flag("--force", "Overwrite a file that is there.")] = False,
    json_mode: Annotated[bool, flag("--json", "Print the result as JSON.")] = False,
) -> None:
    """Write a commented zone.toml for a new zone.

    Its message ids are explicit: each fact carries the id its producer gave it, so two equal readings are two facts.

    A port counts as taken when somebody listens on it, when it is that of a peer on this machine, or when the zone.toml
    of a neighbouring folder names it. When all peers are on this machine the node listens on 127.0.0.1 alone.
    """
    from bsfg.config import parse

    check_name("zone", zone, ZONE)
    peers = dict(_peer(text) for text in peer or [])
    streams = [check_name("stream", name) for name in stream or ["operational"]]
    path = folder / FILE
    ports = chosen_ports(port, http_port, taken=_taken(folder, peers.values()))
    text = zone_file(zone, peers, streams, ports=ports, engine=engine)
    parse(text, path)
    if path.exists() and not force:
        raise FileExists(f"{path} is already there", path=str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageReadOnly(f"{path} cannot be written: {error.strerror}", hint="Choose another folder.") from None
    steps = _next_steps(folder, zone)
    result = {"file": str(path), "zone": zone, "grpc_port": ports[0], "http_port": ports[1]}
    if json_mode:
        print_json({**result, "message_ids": "explicit", "why": WHY_EXPLICIT, "next": steps})
        return
    wrote = f"Wrote {path}. The node will listen on port {ports[0]} for gRPC and on {ports[1]} for HTTP."
    shown = "\n".join((wrote, "", WHY_EXPLICIT, "", "Next:", *(f"  {step}" for step in steps)))
    console().print(shown, soft_wrap=True)


def chosen_ports(port: int | None, http_port: int | None, *, taken: set[int]) -> tuple[int, int]:
    """Give the pair of ports: those that were asked for, or the first two of the same distance that are free."""
    if port is not None:
        beside = HTTP_PORT + port - GRPC_PORT
        usual = beside if 0 < beside <= _PORT_MAX else HTTP_PORT
        if http_port is None and not _free(usual, taken | {port}):
            raise InvalidArgument(
                f"port {usual} for HTTP is taken on this machine", hint="Choose one with --http-port, such as 8080."
            )
        return port, http_port or usual
    for step in range(PORTS_TRIED):
        pair = GRPC_PORT + step, http_port or HTTP_PORT + step
        if _free(pair[0], taken) and (http_port is not None or _free(pair[1], taken)) and pair[0] != pair[1]:
            return pair
    raise InvalidArgument(
        f"no port from {GRPC_PORT} to {GRPC_PORT + PORTS_TRIED - 1} is free", hint="Choose with --port and --http-port."
    )


def _free(port: int, taken: set[int]) -> bool:
    if port in taken:
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _taken(folder: Path, addresses: Iterable[str]) -> set[int]:
    """Give the ports of this machine that somebody will listen on, though perhaps not yet."""
    here = {int(address.rpartition(":")[2]) for address in addresses if _is_here(address)}
    return here | set(_neighbours(folder))


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _neighbours(folder: Path) -> Iterator[int]:
    """Read the ports of zones whose folders lie beside a folder; a file that cannot be read is nobody's."""
    for path in folder.absolute().parent.glob(f"*/{FILE}"):
        with suppress(OSError, ValueError, AttributeError):
            listen = tomllib.loads(path.read_text(encoding="utf-8")).get("listen", {})
            if path.parent != folder.absolute():
                yield from (int(str(listen[key]).rpartition(":")[2]) for key in ("grpc", "http") if key in listen)


def zone_file(
    zone: str,
    peers: dict[str, str],
    streams: list[str],
    *,
    ports: tuple[int, int] = (GRPC_PORT, HTTP_PORT),
    engine: Engine = Engine.SPARK,
) -> str:
    """Give the text of a new zone's file."""
    # Nobody has a stream that is not written down, so one that is added later is nobody's at first.
    identities: dict[str, dict[str, Any]] = {
        f"{name}-bsfg": {"zone": name, "roles": ["peer"], "streams": streams} for name in peers
    }
    for role in LOCAL_ROLES:
        identities[f"{zone}-{role}"] = {"zone": zone, "roles": [role], "streams": streams}
    certificate = f"certs/{zone}-bsfg"
    host = "127.0.0.1" if peers and all(map(_is_here, peers.values())) else "0.0.0.0"
    moved = {"engine": str(engine)} if engine != Engine.SPARK else {}
    links = {f"from-{name.lower()}": {"zone": name, "address": address, **moved} for name, address in peers.items()}
    return commented_file(
        _PREAMBLE.format(zone=zone, file=FILE),
        {
            "zone": {"name": zone, "message_ids": "explicit"},
            "listen": {"grpc": f"{host}:{ports[0]}", "http": f"{host}:{ports[1]}"},
            "tls": {"ca": "certs/ca.crt", "certificate": f"{certificate}.crt", "key": f"{certificate}.key"},
            "identities": identities,
            "streams": {name: {"store_capacity": "10GiB", "retention": "7d"} for name in streams},
            "links": links,
            "serve": {name: {"streams": streams, "required": True} for name in peers},
        },
    )


def _peer(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not re.search(r".:\d+$", address):
        raise InvalidArgument(
            f"--peer {text!r} is not of the form zone=host:port", hint="For example: --peer enterprise=10.0.0.7:9443"
        )
    return check_name("peer", name, ZONE), address


def _next_steps(folder: Path, zone: str) -> list[str]:
    # Not inside the zone's folder: whoever has the authority's key can be any zone.
    authority = folder.parent / "authority"
    return [
        f"bsfg certs init-ca {authority}    # once for all zones, on one machine; or use your own authority",
        f"bsfg certs bundle {authority} {zone} {folder / 'certs'} --issue",
        f"bsfg certs check --config {folder / FILE}",
        f"bsfg node --config {folder / FILE}",
    ]


WIDTH = 110


def commented_file(preamble: str, values: Mapping[str, Mapping[str, Any]]) -> str:
    """Give a configuration file that explains itself.

    ``values`` holds what is known, by table; for a named table, by row and then by key. Every other key stands there
    as a comment with its default. Of a named table the first row explains its keys and the others are brief.
    """
    lines = [*_comment(preamble)]
    for table in tables_of(ZoneConfig):
        lines += ["", "", *_comment(table.says)]
        given = values.get(table.name, {})
        if table.named is None:
            lines += _block(table, None, given, explained=True)
        elif not given:
            lines += _example_block(table)
        for number, (name, row) in enumerate(given.items() if table.named else ()):
            lines += [""] * bool(number)
            lines += _block(table, name, row, explained=number == 0)
    return "\n".join(lines) + "\n"


def _header(table: ConfigTable, name: str | None) -> str:
    return dotted((*table.path, name) if name else table.path)


def _block(table: ConfigTable, name: str | None, values: Mapping[str, Any], *, explained: bool) -> Iterator[str]:
    yield f"[{_header(table, name)}]"
    for item in table.settings():
        if item.name in values:
            if explained:
                yield from _comment(item.says)
            yield f"{item.name} = {toml(values[item.name])}"
        elif explained:
            yield from _comment(item.says)
            yield f"# {item.name} = {toml(item.example if item.default is None else item.default)}"


def _example_block(table: ConfigTable) -> Iterator[str]:
    """A row that is only an example, wholly in comments."""
    yield f"# [{_header(table, table.example_name)}]"
    for item in table.settings():
        if item.required or item.example is not None:
            yield f"# {item.name} = {toml(item.example)}"


def _comment(text: str) -> list[str]:
    return [
        f"# {line}".rstrip()
        for paragraph in text.splitlines() or [""]
        for line in textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False) or [""]
    ]
