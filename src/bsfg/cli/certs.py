"""`bsfg certs`: make a development authority and zone certificates, show and check existing ones."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import Json, argument, flag
from bsfg.cli.init import LOCAL_ROLES
from bsfg.cli.output import CellLines, console, examples, pairs, print_json, table
from bsfg.config.kinds import Role
from bsfg.errors import BsfgError, FileExists, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bsfg.config import ZoneConfig
    from bsfg.wire.certs import Issued
    from bsfg.wire.tls import TlsFiles
    from bsfg.wording import CheckFinding

app = typer.Typer(
    no_args_is_help=True,
    help="Make a development authority and certificates, show and check existing ones.",
    epilog=examples(
        ("bsfg certs init-ca certs", "make an authority, once for all zones"),
        ("bsfg certs issue certs plant-a-bsfg --host plant.example", "a certificate for the node of plant-a"),
        ("bsfg certs bundle certs plant-a plant-a.tar --issue", "all that the machine of plant-a needs, and no more"),
        ("bsfg certs issue certs mes --role-hint producer --zone plant-a", "a certificate for an application"),
        ("bsfg certs signing-key line-7.key", "a key by which a producer signs its facts"),
        ("bsfg certs renew certs", "issue anew what ends within thirty days, without an interruption"),
        ("bsfg certs show certs/*.crt", "see names and dates"),
        ("bsfg certs check --config zone.toml", "find out what is wrong before others do"),
    ),
)

DAYS = 365
Folder = Annotated[Path, typer.Argument(help="The folder of the authority: ca.crt, ca.key and what it issues.")]
HOST_HELP = "A host name or address by which curl and browsers reach the node, such as plant.example."
Force = Annotated[bool, flag("--force", "Overwrite files that are there.")]


@app.command("init-ca")
def init_ca(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", help="The authority's name.")] = "BSFG development authority",
    days: Annotated[int, typer.Option("--days", help="How long it lasts.")] = 3650,
    force: Force = False,
    json_mode: Json = False,
) -> None:
    """Make a certificate authority for development and small sites.

    Whoever has ca.key can make a certificate for every zone: keep it off the nodes.
    """
    from bsfg.wire.certs import create_authority

    made = create_authority(folder, name=name, days=days, now=datetime.now(UTC), force=force)
    _print_made(made, json_mode, f"Keep {made.key_path} off the nodes; give every zone {made.certificate_path}.")


@app.command("issue")
def issue(
    folder: Folder,
    name: Annotated[
        str, typer.Argument(help="The certificate's name: <zone>-bsfg for a node, any for an application.")
    ],
    role_hint: Annotated[
        Role | None, typer.Option("--role-hint", help="What the holder will be; shown in the row to add.")
    ] = None,
    zone: Annotated[
        str | None, typer.Option("--zone", help="The holder's zone, where its name does not say it; for the row.")
    ] = None,
    host: Annotated[list[str] | None, typer.Option("--host", help=f"{HOST_HELP} Repeatable.")] = None,
    days: Annotated[int, typer.Option("--days", help="How long it lasts.")] = DAYS,
    force: Force = False,
    json_mode: Json = False,
) -> None:
    """Issue a certificate for a node or an application.

    Its name is both common name, which [identities] knows, and DNS name, so that callers can insist on it. That of a
    node also carries localhost, 127.0.0.1 and ::1, and the hosts given here, so that curl and browsers accept it.
    """
    from bsfg.wire.certs import issue as make

    serves = (role_hint or _guessed(name)[1]) == Role.PEER
    made = make(folder, name, days=days, now=datetime.now(UTC), hosts=host or [], serves=serves, force=force)
    where = "in the zones it may call" if serves else "in the zone.toml of its zone, unless `bsfg init` did"
    _print_made(made, json_mode, f"Give it a row {where}:\n\n{_row(name, role_hint, zone)}")


@app.command("renew")
def renew(
    folder: Folder,
    names: Annotated[
        list[str] | None, argument("NAME...", "Only these. Default: all that end within --within.", show_default=False)
    ] = None,
    within: Annotated[int, typer.Option("--within", help="How many days before its end one is renewed.", min=0)] = 30,
    days: Annotated[int, typer.Option("--days", help="How long the new ones last.")] = DAYS,
    json_mode: Json = False,
) -> None:
    """Issue certificates anew before they end: the same names and hosts, a new key.

    The old ones stay valid until their end, so nothing is interrupted: bring the new files to the machine of their
    zone, where node and programs take them up by themselves. Named ones are renewed however long they last.
    """
    from bsfg.wire.certcheck import describe
    from bsfg.wire.certs import load_certificates
    from bsfg.wire.certs import renew as make

    now = datetime.now(UTC)
    there = sorted(path.stem for path in folder.glob("*.crt") if path.stem != "ca")
    if absent := [name for name in names or () if name not in there]:
        hint = f"There are: {', '.join(there)}." if there else f"`bsfg certs issue {folder} {absent[0]}` makes one."
        raise InvalidArgument(f"there is no certificate of {absent[0]!r} in {folder}", hint=hint)
    made = [
        make(folder, name, days=days, now=now)
        for name in names or there
        if names or load_certificates(folder / f"{name}.crt")[0].not_valid_after_utc <= now + timedelta(days=within)
    ]
    if json_mode:
        rows = [(str(each.certificate_path), str(each.key_path), describe(each.certificate, now)) for each in made]
        print_json([{"certificate_file": crt, "key_file": key, **facts} for crt, key, facts in rows])
        return
    out = console()
    for each in made:
        out.print(f"Renewed {each.certificate_path}, valid until {each.certificate.not_valid_after_utc:%Y-%m-%d}.")
    if not made:
        out.print(f"None of {len(there)} ends within {within} days.")
    else:
        out.print(f"\nBring them to their zones: `bsfg certs bundle {folder} ZONE TARGET` gathers what each needs.")


@app.command("bundle")
def bundle(
    folder: Folder,
    zone: Annotated[str, typer.Argument(help="The zone.")],
    target: Annotated[
        Path, typer.Argument(help="A new folder, such as plant/certs, or a new file that ends with .tar.")
    ],
    node_only: Annotated[
        bool, flag("--node-only", "Leave out the certificates of the zone's own applications.")
    ] = False,
    issue_first: Annotated[
        bool, flag("--issue", "Issue first what is not there of those that `bsfg init` gives a row.")
    ] = False,
    host: Annotated[list[str] | None, typer.Option("--host", help=f"With --issue: {HOST_HELP} Repeatable.")] = None,
    json_mode: Json = False,
) -> None:
    """Gather what belongs on the machine of one zone: its own certificates with their keys, and ca.crt.

    These are ZONE-bsfg, and ZONE-producer, -consumer, -pipeline, -operator and -viewer as far as there are any. The
    authority's key and whatever is another zone's stay where they are.
    """
    from bsfg.wire.certs import check_target, make_bundle

    check_target(target)
    roles = () if node_only else tuple(str(role) for role in Role if role != Role.PEER)
    if issue_first:
        _issue_missing(folder, zone, () if node_only else LOCAL_ROLES, host or [])
    elif host:
        raise InvalidArgument("--host is for certificates that are issued", hint="Give --issue, too, or leave it out.")
    files = make_bundle(folder, zone, target, roles)
    steps = _bundle_steps(target, zone)
    if json_mode:
        print_json({"bundle": str(target), "zone": zone, "files": files, "next": steps})
        return
    lines = [f"Wrote {target}, for its owner only:", *(f"  {name}" for name in files), "", "Next:"]
    console().print("\n".join([*lines, *(f"  {step}" for step in steps)]), soft_wrap=True)


def _issue_missing(folder: Path, zone: str, roles: Sequence[str], hosts: Sequence[str]) -> None:
    """Issue the certificates of a zone's node and of its own applications, as far as they are not there.

    A node's that is there already would not get the hosts that are asked for, which is said now and not by a browser.
    """
    from bsfg.rules import ZONE, check_name
    from bsfg.wire.certs import issue as make

    check_name("zone", zone, ZONE)
    node = folder / f"{zone}-bsfg.crt"
    if hosts and node.exists():
        hint = f"Issue it anew with `bsfg certs issue {folder} {node.stem} --force --host …`, or leave --host out."
        raise FileExists(f"{node} is already there, and would not get other hosts", hint=hint, path=str(node))
    for end in ("bsfg", *roles):
        name, serves = f"{zone}-{end}", end == "bsfg"
        if not (folder / f"{name}.crt").exists():
            make(folder, name, days=DAYS, now=datetime.now(UTC), hosts=hosts if serves else (), serves=serves)


def _bundle_steps(target: Path, zone: str) -> list[str]:
    if target.suffix == ".tar":
        return [
            f"bring {target} to the machine of {zone} on a way that others do not read, and remove it here",
            f"there: tar xf {target.name} -C FOLDER, where FOLDER has the zone.toml, and remove {target.name}",
            "there: bsfg certs check --config FOLDER/zone.toml",
        ]
    return [
        f"let it be the folder certs beside the zone.toml of {zone}, on that machine alone",
        "bsfg certs check --config zone.toml",
    ]


@app.command("signing-key")
def signing_key(
    path: Annotated[Path, typer.Argument(help="The private key; its public key lies beside it as .pub.pem.")],
    json_mode: Json = False,
) -> None:
    """Make a key by which a producer signs its facts, or show the public key of the one that is there.

    Its name is the file's, without what follows the last dot. A key that is there is never replaced.
    """
    from bsfg.sdk.signing import create_key, public_key_text

    public = path.with_suffix(".pub.pem")
    if not path.exists():
        create_key(path)
    text = public_key_text(public, path.stem)
    if json_mode:
        print_json({"key_file": str(path), "public_key_file": str(public), "key": text})
        return
    says = f"The private key is {path} (owner only), the public one {public}."
    row = f'[signing.<zone>]\nkeys = ["{text}"]'
    console().print(f"{says} Nodes check the zone's facts with:\n\n{row}", soft_wrap=True)


@app.command("show")
def show(
    files: Annotated[list[Path], argument("FILE...", "Certificates in PEM form.")],
    json_mode: Json = False,
) -> None:
    """Show what certificates say."""
    from bsfg.wire.certcheck import describe
    from bsfg.wire.certs import load_certificates

    now = datetime.now(UTC)
    found = [
        {"file": str(path), **describe(certificate, now)} for path in files for certificate in load_certificates(path)
    ]
    if json_mode:
        print_json(found)
        return
    for facts in found:
        rows = {name: _shown(value) for name, value in facts.items() if name != "file"}
        console().print(pairs(str(facts["file"]), rows), "")


@app.command("check")
def check(
    config: Annotated[Path, typer.Option("--config", help="The zone's configuration.")] = Path("zone.toml"),
    json_mode: Json = False,
) -> None:
    """Check a zone's certificate: chain, dates, key, names, usage; says what to do.

    Ends with 1 if something must be corrected.
    """
    from bsfg.config import load

    findings = check_config(load(config), datetime.now(UTC))
    bad = any(finding.level == "error" for finding in findings)
    if json_mode:
        print_json({"ok": not bad, "findings": [finding.to_dict() for finding in findings]})
    else:
        shown = table("", "check", "found")
        for finding in findings:
            style = {"ok": "green", "warning": "yellow", "error": "bold red"}[finding.level]
            says = CellLines(finding.says, *([f"do: {finding.do}"] if finding.do else []))
            shown.add_row(Text(finding.level, style), finding.check, says)
        console().print(shown)
    if bad:
        raise typer.Exit(1)


def check_config(config: ZoneConfig, now: datetime) -> list[CheckFinding]:
    """Check the certificate that a configuration names, and that peers would know it."""
    from bsfg.wire.certcheck import check_files, says_of

    files = config.tls_files
    if files is None:
        return [says_of("files").ok("the node serves without TLS, on loopback only")]
    findings = check_files(files, now, config.tls.expiry_warning_seconds)
    if findings[0].level != "error":
        findings += [*_authorities(config, files, now), _zone_name(config, files.certificate)]
    return findings


def _authorities(config: ZoneConfig, files: TlsFiles, now: datetime) -> Iterator[CheckFinding]:
    """Tell whether every authority speaks for somebody, and whether their revocation lists can be used."""
    from bsfg.config.vouching import Vouching
    from bsfg.node.reload import trust_of
    from bsfg.wire.certcheck import says_of

    try:
        vouching = Vouching(trust_of(config, files), config.authorities)
    except BsfgError as error:
        yield says_of("crl").problem(error.message, error.hint)
        return
    if unbound := vouching.unbound():
        do = "Add a row for each with its key and its zones, or take it out of the file."
        yield says_of("authorities").warning(unbound, do)
    else:
        yield says_of("authorities").ok("every authority of [tls] ca speaks for a zone")
    if stale := vouching.stale(int(now.timestamp() * 1000)):
        yield says_of("crl").problem(
            stale,
            "Fetch the current list from the authority into the file of [tls] crl.",
        )
    elif config.tls.crl is not None:
        yield says_of("crl").ok("the revocation lists are signed and up to date")


def _zone_name(config: ZoneConfig, certificate: Path) -> CheckFinding:
    """Tell whether peers that follow the naming rule would take the node for its zone."""
    from bsfg.wire.certcheck import names_in_file, says_of

    names, usual = names_in_file(certificate), f"{config.zone.name}-bsfg"
    found = names.common_names if config.tls.identity == "cn" else names.telling_names
    for name in found:
        row = config.identities.get(name)
        if row is not None and row.zone != config.zone.name:
            says = f"[identities] says that {name!r} is the zone {row.zone!r}, but this is {config.zone.name!r}"
            return says_of("zone").problem(says, "Use this zone's own certificate, or correct the row.")
    if usual in found:
        return says_of("zone").ok(f"peers know this node as {usual}")
    do = f'Peers need server_identity = "{found[0] if found else usual}" in their link, or issue {usual}.'
    return says_of("zone").warning(f"the certificate does not carry the usual name {usual}", do)


def _guessed(name: str) -> tuple[str, Role | None]:
    """Tell from a name its zone and what its holder is, as far as it follows the rule: ZONE-bsfg or ZONE-role."""
    zone, _, end = name.rpartition("-")
    if zone and end == "bsfg":
        return zone, Role.PEER
    roles = {str(role): role for role in Role if role != Role.PEER}
    return (zone, roles[end]) if zone and end in roles else ("", None)


def _row(name: str, hint: Role | None, zone: str | None) -> str:
    said, role = _guessed(name)
    # A hint that contradicts the name says that the name follows no rule.
    zone = zone or (said if said and hint in (None, role) else "<zone>")
    role_text = str(hint or role or "<producer, consumer, pipeline, operator or viewer>")
    header = name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
    return f'[identities.{header}]\nzone = "{zone}"\nroles = ["{role_text}"]\nstreams = ["operational"]'


def _print_made(made: Issued, json_mode: bool, advice: str) -> None:
    from bsfg.wire.certcheck import describe

    facts: dict[str, Any] = describe(made.certificate, datetime.now(UTC))
    if json_mode:
        print_json({"certificate_file": str(made.certificate_path), "key_file": str(made.key_path), **facts})
        return
    wrote = f"Wrote {made.certificate_path} and {made.key_path} (owner only), valid until {facts['not_after']}."
    console().print(f"{wrote}\n\n{advice}", soft_wrap=True)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
