"""`bsfg doctor`: is this machine ready for a zone's node, and if not, what is to be done?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from bsfg.cli.common import flag
from bsfg.cli.output import advance, console, examples, print_json, progress_bar
from bsfg.errors import BsfgError, ConfigInvalid
from bsfg.wording import CheckFinding, CheckLevel, Says, counted

if TYPE_CHECKING:
    from bsfg.cli.doctor.machine import Subject

app = typer.Typer()

EPILOG = examples(
    ("bsfg doctor --config plant/zone.toml", "before the first start, after a change, and when something is odd"),
    ("bsfg doctor --json | jq '.findings[] | select(.level != \"ok\")'", "only what needs attention, for a program"),
)

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@app.command(epilog=EPILOG)
def doctor(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="The zone's configuration.", envvar="BSFG_CONFIG")
    ] = Path("zone.toml"),
    json: Annotated[bool, flag("--json", "Print the findings as JSON.")] = False,
) -> None:
    """Check everything a node needs: configuration, certificates, clock, disk, ports, peers, data folder, limits.

    Each line says ok, warning or problem, and what to do next. It changes nothing, and can run beside the node: then
    ports and folder are expected to be its. The disk check writes and syncs a small temporary file. Of the clocks of
    peers it sees only what their certificates show. The exit code is 1 if there is a problem; warnings do not count.
    """
    found: list[CheckFinding] = []
    for name, findings in examine(config, lambda done, total: advance(bar, done, total)):
        with progress_bar(f"checking {name}") as bar:
            new = list(findings)
        found += new
        for finding in new if not json else ():
            console().print(_line(finding))
    bad = any(finding.level == "problem" for finding in found)
    if json:
        print_json({"ok": not bad, "findings": [finding.to_dict() for finding in found]})
    else:
        console().print(_summary(found), soft_wrap=True)
    if bad:
        raise typer.Exit(1)


def examine(
    path: Path, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, Iterator[CheckFinding]]]:
    """Give every check by name, to be run in order; those that need what failed before are left out.

    ``progress`` is told how many bytes of the data folder were verified, and how many there are.
    """
    from bsfg.cli.doctor.zone import software

    found = list(software())
    yield "software", iter(found)
    if any(finding.level == CheckLevel.PROBLEM for finding in found):
        return
    try:
        subject = _subject(path, progress)
    except ConfigInvalid as error:
        yield "configuration", _invalid(path, error)
        return
    for name, check in _checks():
        yield name, _guarded(name, check(subject))


def _invalid(path: Path, error: ConfigInvalid) -> Iterator[CheckFinding]:
    """Give a finding for every line that is wrong, or for the file as a whole."""
    says = Says("configuration")
    rows = error.details.get("problems", [])
    for row in rows:
        key = f"{row['key']}: " if row["key"] else ""
        do = "Correct the line; `bsfg help configuration` describes every key."
        yield says.problem(f"{path}, line {row['line']}: {key}{row['problem']}", do)
    if not rows:
        yield says.problem(error.message, error.hint)


def _subject(path: Path, progress: Callable[[int, int], None] | None) -> Subject:
    from bsfg.cli.doctor.machine import Subject
    from bsfg.cli.inspect.gather import writer_of
    from bsfg.config import load

    config = load(path)
    return Subject(config, datetime.now(UTC), writer_of(config.data_folder), progress)


def _checks() -> list[tuple[str, Any]]:
    from bsfg.cli.doctor.machine import clock, disk, limits
    from bsfg.cli.doctor.zone import certificates, configuration, folder, peers, ports, storage

    return [
        ("configuration", configuration),
        ("certificates", certificates),
        ("clock", clock),
        ("disk", disk),
        ("ports", ports),
        ("peers", peers),
        ("data", folder),
        ("storage", storage),
        ("limits", limits),
    ]


def _guarded(name: str, findings: Iterator[CheckFinding]) -> Iterator[CheckFinding]:
    """Let a check that cannot go on be a finding, so that the others still run."""
    try:
        yield from findings
    except BsfgError as error:
        yield Says(name).problem(error.message, error.hint)
    except OSError as error:
        yield Says(name).problem(
            f"cannot be checked: {error.filename}: {error.strerror}", "Run it as the user that runs the node."
        )


def _line(finding: CheckFinding) -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_column(width=7)
    line.add_column(width=13)
    line.add_column(overflow="fold")
    text = Text(finding.says)
    if finding.do:
        text.append("\ndo: ", "bold").append(finding.do)
    line.add_row(Text(finding.level, STYLES[finding.level]), finding.check, text)
    return line


def _summary(found: list[CheckFinding]) -> Text:
    counts = Counter(str(finding.level) for finding in found)
    if counts["problem"]:
        text = f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}"
        return Text(text, STYLES["problem"])
    if counts["warning"]:
        return Text(f"no problem, {counted(counts['warning'], 'warning')}", STYLES["warning"])
    return Text("all is well", STYLES["ok"])
