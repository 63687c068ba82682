"""`bsfg init`: write the configuration of a new zone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from bsfg.cli.output import console, examples, print_json
from bsfg.errors import FileExists, InvalidArgument, StorageReadOnly
from bsfg.rules import ZONE, check_name

FILE = "zone.toml"
LOCAL_ROLES = ("producer", "consumer", "pipeline", "operator")

_PREAMBLE = """\
Configuration of the zone {zone}. Every key is described in docs/reference/configuration.md.
Keys that are commented out show their defaults or an example.
The node checks this file at its start: bsfg node --config {file}"""

WHY_EXPLICIT = (
    'message_ids = "explicit": each fact carries the id its producer gave it, so two equal readings are two facts. '
    "Derive the id from the event (such as order and step), never from clock or chance, and repeat it on a retry."
)


app = typer.Typer()

EPILOG = examples(
    ("bsfg init plant-a --zone plant-a --peer enterprise=10.0.0.7:9443", "a zone that exchanges facts with another"),
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
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    json_mode: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a commented zone.toml for a new zone.

    Its message ids are explicit: each fact carries the id its producer gave it, so two equal readings are two facts.
    """
    from bsfg.node.config import parse

    check_name("zone", zone, ZONE)
    peers = dict(_peer(text) for text in peer or [])
    streams = [check_name("stream", name) for name in stream or ["operational"]]
    path = folder / FILE
    text = zone_file(zone, peers, streams)
    parse(text, path)
    if path.exists() and not force:
        raise FileExists(f"{path} is already there", path=str(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageReadOnly(f"{path} cannot be written: {error.strerror}", hint="Choose another folder.") from None
    steps = _next_steps(folder, zone)
    result = {"file": str(path), "zone": zone, "message_ids": "explicit", "why": WHY_EXPLICIT, "next": steps}
    if json_mode:
        print_json(result)
        return
    shown = "\n".join((f"Wrote {path}.", "", WHY_EXPLICIT, "", "Next:", *(f"  {step}" for step in steps)))
    console().print(shown, soft_wrap=True)


def zone_file(zone: str, peers: dict[str, str], streams: list[str]) -> str:
    """Give the text of a new zone's file."""
    from bsfg.node.config.document import commented_file

    # Nobody has a stream that is not written down, so one that is added later is nobody's at first.
    identities: dict[str, dict[str, Any]] = {
        f"{name}-bsfg": {"zone": name, "roles": ["peer"], "streams": streams} for name in peers
    }
    for role in LOCAL_ROLES:
        identities[f"{zone}-{role}"] = {"zone": zone, "roles": [role], "streams": streams}
    certificate = f"certs/{zone}-bsfg"
    return commented_file(
        _PREAMBLE.format(zone=zone, file=FILE),
        {
            "zone": {"name": zone, "message_ids": "explicit"},
            "listen": {"grpc": "0.0.0.0:9443", "http": "0.0.0.0:9080"},
            "tls": {"ca": "certs/ca.crt", "certificate": f"{certificate}.crt", "key": f"{certificate}.key"},
            "identities": identities,
            "streams": {name: {"store_capacity": "10GiB", "retention": "7d"} for name in streams},
            "links": {f"from-{name.lower()}": {"zone": name, "address": address} for name, address in peers.items()},
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
        f"bsfg certs issue {authority} {zone}-bsfg",
        *(f"bsfg certs issue {authority} {zone}-{role}" for role in LOCAL_ROLES),
        f"bsfg certs bundle {authority} {zone} {folder / 'certs'}",
        f"bsfg certs check --config {folder / FILE}",
        f"bsfg node --config {folder / FILE}",
    ]
