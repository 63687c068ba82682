"""Writes the reference page of the configuration from the declarations of its tables."""

from __future__ import annotations

from bsfg.config.declare import ConfigKey, ConfigTable, dotted, tables_of, toml
from bsfg.config.kinds import MEANINGS, ROLE_ACTIONS
from bsfg.config.settings import ZoneConfig

_INTRODUCTION = """\
# Configuration

One TOML file describes one zone. `bsfg init` writes a commented one. The node reads it at its start and refuses to run
with anything it does not understand: it lists every problem with its key and line. What has changed
in it, and in certificate files and revocation lists, is taken up without a restart as far as it can be, by itself, upon
SIGHUP or by `bsfg reload`; [deployment](../deployment.md) says what waits for one.

How values are written:

| Type | Written as |
|---|---|
| duration | a number with its unit: `"500ms"`, `"30s"`, `"15m"`, `"12h"`, `"7d"`, `"4w"`, `"7y"`, also `"1d12h"` |
| size | `"10GiB"`, `"500MB"`, or a whole number of bytes |
| path | relative to the folder of the configuration file, or absolute |
| host:port | `"plant-a.example:9443"`, `"10.0.0.7:9443"`, `"[fd00::7]:9443"` |
| date or time | `2027-06-30` (through that day in UTC) or `2027-06-30T12:00:00Z` |
| list | `["operational", "audit"]`; `"*"` stands for all where it is allowed |
"""

_CERTIFICATES = """\
## Certificates

- **Names.** A node's certificate has the name `<zone>-bsfg` as common name and as DNS name. The common name is looked
  up in `[identities]`. The DNS name lets a caller insist on the server it means, at whatever address: TLS itself
  refuses a server without it. `bsfg certs issue` writes both. The hosts beside them (`localhost`, `127.0.0.1`, `::1`
  and what `--host` adds) are for browsers and curl; `localhost` is nobody's identity, with `identity = "san"` neither.
- **Other authorities.** A certificate that has the identity as common name only can be used too: the caller then
  checks the common name once and insists on the DNS name beside it.
- **Versions.** Only TLS 1.3 is spoken, and both sides show a certificate. gRPC takes its settings when it is loaded, so
  a program that uses the SDK imports `bsfg` before `grpc`.
- **Renewal.** Replace the files, best by renaming new ones over them. The next connection uses them. Files that cannot
  be used are reported and leave the old ones in use.
- **Authorities.** A name counts only if its authority speaks for the zone of its row. One authority in `[tls] ca`
  speaks for all zones. Of several, without a row in `[authorities]`, only that of the node's own certificate speaks,
  for all zones; with rows, each speaks for the zones of its row and those without a row for nobody. A row of an
  identity can name its authority. Of an authority and one below it in the same file, the nearest that has a row
  decides. Intermediates that callers show are not seen by the gRPC service: where several authorities are trusted,
  put them into `[tls] ca` too.
- **Names** are compared exactly, byte by byte. Rows that could be taken for each other (case, a dot at the end,
  spaces, compatible characters) are refused, as are such names by `bsfg certs issue`.
- **Revocation.** Set `revoked = true` with a `reason` in every zone that knows the identity, or name the authorities'
  revocation lists in `[tls] crl`. Both count within seconds, for open connections and streams too, as does the end of
  a certificate. A list must be signed by an authority of `[tls] ca`; one that is out of date still counts, and is an
  alert.

"""

_ROLES = """\
## What each role may do

Anything that is not in this table is refused, and every refusal is recorded with the rule that refused it.

"""


def page() -> str:
    """Write the whole page."""
    parts = [_INTRODUCTION]
    for table in tables_of(ZoneConfig):
        heading = f"## `{table.title}`\n\n{table.says}\n\n"
        rows = "".join(_reference_row(item) for item in table.settings())
        parts.append(
            f"{heading}| Key | Type | Default | Meaning |\n|---|---|---|---|\n{rows}{_reference_example(table)}"
        )
    parts.append(_CERTIFICATES + _ROLES + _roles())
    return "\n".join(parts)


def _reference_row(item: ConfigKey) -> str:
    default = "required" if item.required else "not set" if item.default is None else f"`{toml(item.default)}`"
    return f"| `{item.name}` | {_cell(item.kind.name)} | {default} | {_cell(item.says)} |\n"


def _reference_example(table: ConfigTable) -> str:
    header = dotted((*table.path, table.example_name) if table.example_name else table.path)
    shown = [item for item in table.settings() if item.example is not None]
    if not shown:
        return ""
    lines = [f"[{header}]", *(f"{item.name} = {toml(item.example)}" for item in shown)]
    return "\n```toml\n" + "\n".join(lines) + "\n```\n"


def _roles() -> str:
    head = f"| Action | {' | '.join(ROLE_ACTIONS)} |\n|---|{'---|' * len(ROLE_ACTIONS)}\n"
    rows = []
    for action, says in MEANINGS.items():
        marks = " | ".join("yes" if action in may else "" for may in ROLE_ACTIONS.values())
        rows.append(f"| {_cell(says)} (`{action}`) | {marks} |\n")
    return head + "".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
