"""`bsfg pipeline audit`: do both ends of a link hold the same facts?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bsfg.cli.common import checked_folder, flag, option, streams
from bsfg.cli.connection import DEFAULT_CONFIG, NodeChoice, resolve
from bsfg.cli.output import console, count_text, examples, print_json, range_text, stages, table
from bsfg.cli.pipeline.running import (
    AllowClearRpc,
    Conf,
    Master,
    Pack,
    SecretFile,
    ends_on_signals,
    settings_of,
    spark_session,
)
from bsfg.errors import InvalidArgument, StorageReadOnly
from bsfg.ports import Buffer
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from bsfg.spark.audit import AuditedLink
    from bsfg.spark.audit.case import Wish
    from bsfg.spark.audit.verdict import AuditFinding, StreamVerdict, Verdict


FINDINGS_MAX = 20
MARKS = {"passed": ("✓", "green"), "failed": ("✗", "bold red"), "not_checked": ("–", "yellow")}


def show(verdict: Verdict, report: Path | None) -> None:
    """Print the verdict: checks, what is wrong, what is rightly not there, and the sum of it."""
    out = console()
    for stream in verdict.streams:
        out.print(Text(f"{verdict.link}: {stream.stream}", "bold"))
        _checks(stream)
        _absences(stream)
        _findings(stream)
    if report is not None:
        out.print(Text(f"The report is {report}.", "dim"))
    facts, seconds = counted(verdict.facts, "fact"), f"{verdict.seconds:,.1f} s"
    rate = f"{count_text(round(verdict.facts_per_second))} facts/s"
    if verdict.clean:
        out.print(Text.assemble(("clean", "bold green"), f": {facts}, the same at both ends ({seconds}, {rate})"))
        return
    kinds = ", ".join(f"{kind} ×{count_text(count)}" for kind, count in sorted(verdict.counts.items()))
    out.print(Text.assemble(("not clean", "bold red"), f": {kinds} among {facts} ({seconds}, {rate})"))


def _checks(stream: StreamVerdict) -> None:
    for check in stream.checks:
        mark, style = MARKS[str(check.state)]
        text = Text.assemble("  ", (mark, style), " ", check.name)
        if check.detail:
            text.append(f"  {one_line(check.detail)}", "dim")
        console().print(text, soft_wrap=True)
    console().print()


def _absences(stream: StreamVerdict) -> None:
    from bsfg.spark.audit.report import REASONS

    absent = sorted(stream.absent.items(), key=lambda each: -each[1])
    if absent:
        rows: Any = table("rightly not there", "facts", right=("facts",))
        for reason, count in absent:
            rows.add_row(REASONS.get(reason, reason), count_text(count))
        console().print(rows)


def _findings(stream: StreamVerdict) -> None:
    from bsfg.spark.audit.verdict import MEANINGS

    if not stream.findings:
        return
    rows: Any = table("finding", "where", "offset", "at receiver", "from_zone", "message_id", "fields", "")
    for finding in stream.findings[:FINDINGS_MAX]:
        rows.add_row(*_row(finding))
    out = console()
    out.print(rows)
    more = len(stream.findings) - FINDINGS_MAX
    if more > 0:
        out.print(Text(f"  and {count_text(more)} more; --json and --report name them", "dim"))
    for kind in dict.fromkeys(finding.kind for finding in stream.findings):
        says, hint = MEANINGS[kind]
        out.print(Text.assemble((f"  {kind}: ", "bold"), f"{says} ", (hint, "dim")), soft_wrap=True)
    out.print()


def _row(finding: AuditFinding) -> list[Any]:
    last = finding.offset if finding.last is None else finding.last
    return [
        Text(str(finding.kind), "red"),
        finding.side,
        range_text(finding.offset, last),
        "" if finding.receiver_offset is None else str(finding.receiver_offset),
        Text(finding.from_zone or ""),
        Text(finding.message_id or ""),
        ", ".join(finding.fields),
        Text(finding.detail),
    ]


FOLDERS = "Folders instead of nodes"

app = typer.Typer(
    epilog=examples(
        ("bsfg pipeline audit -c zone.toml --link from-plant-a", "ask both nodes; the exit code is 1 if they differ"),
        ("bsfg pipeline audit -c zone.toml --link from-plant-a --report audit.html", "with pictures, to be filed"),
        ("bsfg pipeline audit -c zone.toml --link from-plant-a --from 5000000 --json", "a part of it, for a program"),
        ("bsfg pipeline audit --sender plant/data --receiver enterprise/data", "two folders, also long after the fact"),
    )
)


Config = Annotated[
    Path | None, option("FILE", "The receiving zone's configuration.", "--config", "-c", envvar="BSFG_CONFIG")
]
Link = Annotated[str | None, option("NAME", "The link; may be left out if there is only one.")]
Streams = Annotated[
    list[str] | None, option("NAME", "A stream; all of the link when left out.", autocompletion=streams)
]
First = Annotated[int, option("OFFSET", "The sender's first offset.", "--from", min=0)]
Last = Annotated[
    int | None, option("OFFSET", "The sender's last offset, inclusive.", "--to", min=0, show_default=False)
]
Deep = Annotated[
    bool | None,
    flag("--deep/--shallow", "Read all and hash every body here, or believe the stored digests. Left out: nodes hash."),
]
Report = Annotated[Path | None, option("FILE", "Write a page of HTML with pictures.", show_default=False)]
Json = Annotated[bool, flag("--json", "Print the verdict as JSON.")]
Identity = Annotated[str | None, option("NAME", "Call the receiver's node as this identity.", envvar="BSFG_IDENTITY")]
Address = Annotated[str | None, option("HOST:PORT", "Where the receiver's node listens.", envvar="BSFG_ADDRESS")]
Sender = Annotated[Path | None, option("DIR", "The sender's data folder.", panel=FOLDERS)]
Receiver = Annotated[Path | None, option("DIR", "The receiver's data folder.", panel=FOLDERS)]
SenderZone = Annotated[str | None, option("NAME", "Without a configuration: the sender's zone.", panel=FOLDERS)]
ReceiverZone = Annotated[str | None, option("NAME", "Likewise: the receiver's, if facts return to it.", panel=FOLDERS)]
Pulled = Annotated[Buffer, option("BUFFER", "Likewise: the buffer that was pulled.", panel=FOLDERS)]


@app.command()
def audit(
    *,
    config: Config = None,
    link: Link = None,
    stream: Streams = None,
    first: First = 0,
    last: Last = None,
    deep: Deep = None,
    report: Report = None,
    json: Json = False,
    identity: Identity = None,
    address: Address = None,
    sender: Sender = None,
    receiver: Receiver = None,
    zone: SenderZone = None,
    receiver_zone: ReceiverZone = None,
    buffer: Pulled = Buffer.STORE,
    master: Master = "local[*]",
    conf: Conf = None,
    pack: Pack = None,
    secret_file: SecretFile = None,
    allow_clear_rpc: AllowClearRpc = False,
) -> None:
    """Compare both ends of a link, fact by fact, and name what is missing, doubled, altered or out of order.

    Run it in the receiving zone: the sender is asked with the certificate of the zone's node, as the link does it.
    Every fact that both ends retain is compared, envelope and body; what one has let go is held against the digest it
    kept. What is rightly not there (in flight, refused, left out, dropped with a record) is listed with its reason.

    Nodes hash their bodies again and send sums; only ranges whose sums differ are read. --deep reads everything, and
    takes no node's word for it.

    Nothing is written at either end, and both may go on working. The exit code is 0 when the ends agree and 1 when they
    do not. With data folders in place of nodes the hash chains of the logs are verified, too.
    """
    given = dict(locals())
    from bsfg.spark.audit import audit as run

    plan = audited_link(**given)
    session = spark_session("bsfg-audit", master, settings_of(conf, pack, secret_file, allow_clear_rpc), brief=True)
    with ends_on_signals(), session as spark, stages() as progress:
        verdict = run(spark, plan, progress=progress)
    if report is not None:
        write_report(report, verdict)
    print_json(verdict.to_dict()) if json else show(verdict, report)
    if not verdict.clean:
        raise typer.Exit(1)


def audited_link(
    *,
    config: Path | None,
    link: str | None,
    stream: list[str] | None,
    first: int,
    last: int | None,
    deep: bool | None,
    report: Path | None,
    identity: str | None,
    address: str | None,
    sender: Path | None,
    receiver: Path | None,
    zone: str | None,
    receiver_zone: str | None,
    buffer: Buffer,
    master: str,
    **others: object,
) -> AuditedLink:
    """Give what the options of this command mean, on its line or in a table of the zone's file."""
    from bsfg.spark.audit.case import Folders, Wish, plan_folders
    from bsfg.spark.cluster import is_local

    for folder in (sender, receiver):
        if folder is not None:
            checked_folder(folder)
    if report is not None:
        _check_writable(report)
    wish = Wish(stream or (), first, last, deep, sender, receiver, shipped=not is_local(master))
    if config is None and link is None and sender is not None and receiver is not None:
        return plan_folders(Folders(sender, receiver, zone, receiver_zone, buffer), wish)
    return _of_config(config or DEFAULT_CONFIG, link, identity, address, wish)


def _of_config(path: Path, link: str | None, identity: str | None, address: str | None, wish: Wish) -> AuditedLink:
    """Plan the audit of a link of a zone, whose own node is asked as its pipeline."""
    from bsfg.config import load
    from bsfg.spark.audit.case import plan_link

    if not path.is_file():
        hint = "Give --config zone.toml and --link, or --sender and --receiver with two data folders."
        raise InvalidArgument(f"there is no configuration {path}", hint=hint)
    own = None
    if wish.receiver is None:
        own = resolve(NodeChoice(config=path, identity=identity, address=address), ("pipeline",)).access()
    return plan_link(load(path), link, own, wish)


def _check_writable(path: Path) -> None:
    """Find out before the work that there will be no place for its report."""
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidArgument(f"the report {path} cannot be written", hint="Name a file in a folder that is there.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StorageReadOnly(f"the report {path} cannot be written", hint="Name a file that this user can write.")


def write_report(path: Path, verdict: Verdict) -> None:
    """Write the page about an audit."""
    from bsfg.spark.audit.report import page

    try:
        path.write_text(page(verdict), encoding="utf-8")
    except OSError as error:
        raise StorageReadOnly(f"{path} cannot be written: {error.strerror}") from None
