"""Writes the reference page of the wire from what it is made of: protocol files, error table, routes and schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import bsfg.wire
from bsfg.columns import ENTRY_SCHEMA, FACT_FIELDS
from bsfg.config.declare import tables_of
from bsfg.config.settings import ZoneConfig
from bsfg.errors import BsfgError
from bsfg.wire.limits import WireLimits
from bsfg.wire.operations import ROUTES, TERMS
from bsfg.wire.status import STATUSES

FOLDER = Path(bsfg.wire.__file__).parent

_INTRODUCTION = """\
# The wire

A node listens on two ports: gRPC (9443 by default) for producers, consumers, peers and pipelines, and JSON over HTTP
(9080) for curl, small clients, monitors and browsers. Both speak TLS 1.3 only, both want a client certificate, and the
same table of identities decides on both. Where `[tokens]` has rows, the HTTP port also takes a token instead of a
certificate, for what viewers and operators may do: `Authorization: Bearer bsfg-…`. Health checks
(`grpc.health.v1.Health`) and reflection are on the gRPC port; the OpenAPI document is `/openapi.json` and the dashboard
`/dashboard/` on the other.

The protocol files are part of the package: `bsfg/wire/boundary.proto` and `bsfg/wire/admin.proto`. `make proto` renews
the code that is generated from them.
"""

_ARROW = """\
## Facts and entries as Arrow

A batch is one Arrow IPC stream: the schema, then one record batch, uncompressed and without dictionaries. Everything
else is refused before it is read. A batch of facts has the columns up to `digest`, which may be null when a producer
appends; a batch of entries has all of them. Texts are UTF-8; labels and artifact references are canonical JSON.
"""

_ERRORS = """\
## Errors

An error has a stable code. gRPC carries it as JSON in the trailing metadata `bsfg-error-bin` beside the status; HTTP as
a problem document (`application/problem+json`) with the fields `code`, `retryable`, `hint` and `details`; streams
inside the ack. A retryable error may be answered with the same request again, with the same ids.
"""

_DOOR = """\
## Who may call what, and with how much

Who calls is known from the connection, by certificate, session or token. He is judged by this table before anything of
his request is read: whoever may not call an operation at all gets `identity_unknown`, `identity_revoked` or
`permission_denied`, however large his request would be. What the request is about, its stream, its zones, its consumer,
is judged when it was read. A message that cannot be read is `frame_invalid`, one that is too large for its operation
`message_too_large`, a list or text that is too long `invalid_argument` with its name and the limit.

*Asks for*: a role that may do this, any row of `[identities]`, a certificate or token, a session of the dashboard, or
nothing.
"""

_LIMITS = """\
## Limits

Everything has one; those that have a key can be changed in the configuration's table `[limits]`. What is refused for a
limit says so with `overloaded`, `message_too_large` or `timed_out`. Compressed calls are not taken. The last three
follow from the ceiling of memory. An identity with a row always has a few requests of its own, however many of others
are served; callers without one share a few requests that nobody else needs, and their answers come later the more they
ask.

`concurrent_per_identity` is also how many calls one connection may have, those included that the node has answered and
not yet put away. A call beyond it is refused below gRPC, by RST_STREAM with REFUSED_STREAM, before anything of it was
looked at: gRPC's libraries show it as UNAVAILABLE without an error of BSFG. It may be sent again as it is, after a
moment or over another connection; BSFG's own client does so for calls with one request, and says `overloaded` for
others.
"""


@dataclass
class _Part:
    """A service or message of a protocol file: its comment, and per method or field a line and a comment."""

    kind: str
    name: str
    says: str
    rows: list[tuple[str, str]] = field(default_factory=list)


def _parts(text: str) -> Iterator[_Part]:
    """Read what a protocol file declares, with the comments above it."""
    says: list[str] = []
    part: _Part | None = None
    inner = False
    for line in (raw.strip() for raw in text.splitlines()):
        if line.startswith("//"):
            says.append(line[2:].strip())
            continue
        if opened := re.match(r"(service|message|enum) (\w+) \{(\})?", line):
            part = _Part(opened[1], opened[2], " ".join(says))
            if opened[3]:
                yield part
                part = None
        elif line.startswith("oneof"):
            inner = True
        elif line == "}":
            if not inner and part is not None:
                yield part
                part = None
            inner = False
        elif part is not None and line:
            part.rows.append((line.rstrip(";"), " ".join(says)))
        says = []


def _service(part: _Part) -> Iterator[str]:
    yield f"## bsfg.v1.{part.name}\n"
    yield "| Method | Takes | Gives | Meaning |"
    yield "|---|---|---|---|"
    for line, says in part.rows:
        found = re.match(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\)", line)
        assert found is not None, line
        takes, gives = (f"{'stream of ' if found[at] else ''}{found[at + 1]}" for at in (2, 4))
        yield f"| `{found[1]}` | {takes} | {gives} | {says} |"
    yield ""


def _message(part: _Part) -> Iterator[str]:
    yield f"### {part.name}\n"
    if part.says:
        yield part.says + "\n"
    if not part.rows:
        yield "It has no fields.\n"
        return
    yield "| Field | Type | Meaning |" if part.kind == "message" else "| Value | Meaning |"
    yield "|---|---|---|" if part.kind == "message" else "|---|---|"
    for line, says in part.rows:
        declared, _, number = line.partition(" = ")
        if part.kind == "enum":
            yield f"| `{declared}` = {number} | {says} |"
        else:
            kind, _, name = declared.rpartition(" ")
            yield f"| `{name}` | {kind} | {says} |"
    yield ""


def _arrow() -> Iterator[str]:
    yield _ARROW
    yield "| Column | Type | In |"
    yield "|---|---|---|"
    for each in ENTRY_SCHEMA:
        yield f"| `{each.name}` | {each.type} | {'facts and entries' if each.name in FACT_FIELDS else 'entries'} |"
    yield ""


def _errors() -> Iterator[str]:
    yield _ERRORS
    yield "| Code | gRPC | HTTP | Retry | Meaning |"
    yield "|---|---|---|---|---|"
    kinds: dict[str, type[BsfgError]] = {BsfgError.code: BsfgError, **BsfgError.registry}
    for code, (status, number) in STATUSES.items():
        kind = kinds[code]
        says = (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ") if code != BsfgError.code else "A defect."
        says = re.sub(r"\s+", " ", says).replace("``", "`")
        yield f"| `{code}` | {status.name} | {number} | {'yes' if kind.retryable else ''} | {says} |"
    yield ""


def _http() -> Iterator[str]:
    yield "## JSON over HTTP\n"
    yield "| Operation | Takes | Gives | Meaning |"
    yield "|---|---|---|---|"
    for each in ROUTES:
        takes = ", ".join(kind for kind, _ in each.bodies) or "–"
        gives = ", ".join(kind for kind, _ in each.answers)
        query = f" Query: {', '.join(f'`{one.name}`' for one in each.parameters)}." if each.parameters else ""
        yield f"| `{each.method} {each.template}` | {takes} | {gives} | {each.says}{query} |"
    yield ""


def _door() -> Iterator[str]:
    yield _DOOR
    yield "| Operation | Asks for | Largest message | Lists and texts | Cost | Recorded |"
    yield "|---|---|---|---|---|---|"
    for each in TERMS.values():
        asks = " or ".join(f"`{action}`" for action in each.actions) or each.asks
        largest = (
            "`message`" if each.message_bytes is None else f"{each.message_bytes:,}" if each.message_bytes else "–"
        )
        most = ", ".join(f"`{name}` {count:,}" for name, count in each.most.items()) or "–"
        name = f"`{each.service}/{each.name}`" if "." in each.service else f"{each.service} `{each.name}`"
        yield f"| {name} | {asks} | {largest} | {most} | {each.cost} | {'yes' if each.audited else ''} |"
    yield ""


def _limits() -> Iterator[str]:
    yield _LIMITS
    yield "| Limit | Key | Default |"
    yield "|---|---|---|"
    limits = WireLimits()
    (table,) = (table for table in tables_of(ZoneConfig) if table.name == "limits")
    keys = {item.attribute: f"`{item.name}`" for item in table.settings()}
    for name in (*WireLimits.__dataclass_fields__, "in_flight_bytes", "answer_bytes", "awaited_messages"):
        yield f"| `{name}` | {keys.get(name, '')} | {getattr(limits, name):,} |"
    yield ""


def page() -> str:
    """Write the whole page."""
    lines = [_INTRODUCTION]
    for name in ("boundary.proto", "admin.proto"):
        parts = list(_parts((FOLDER / name).read_text(encoding="utf-8")))
        lines += [line for part in parts if part.kind == "service" for line in _service(part)]
        lines += [line for part in parts if part.kind != "service" for line in _message(part)]
    lines += [*_arrow(), *_errors(), *_http(), *_door(), *_limits()]
    return "\n".join(lines).rstrip() + "\n"
