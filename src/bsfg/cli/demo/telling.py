"""What the demo says before and after the story: what is about to happen, the verdict, and where the dashboards are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bsfg.cli.demo.referee import Lag, Way
from bsfg.cli.demo.site import Site
from bsfg.cli.demo.verdict import Verdict
from bsfg.cli.output import count_text, table
from bsfg.figures import duration_text

Count = Callable[[Way], int]

COUNTS: tuple[tuple[str, Count, bool], ...] = (
    ("sent", lambda way: way.sent, False),
    ("received", lambda way: way.received, False),
    ("lost", lambda way: way.lost, True),
    ("twice", lambda way: way.twice, True),
    ("altered", lambda way: way.altered + way.artifacts_bad, True),
    ("out of order", lambda way: way.out_of_order, True),
)
"""The rows of the verdict, and whether anything but 0 is bad."""


def introduce(screen: Console, site: Site) -> None:
    """Say what is about to happen."""
    over = " over an IDMZ" if site.three_zones else ""
    moved = "A Spark pipeline in each zone pulls from the next." if site.spark else "Each node pulls from the next."
    screen.print(
        f"Plant A sends machine events to Enterprise{over} and gets work orders with PDFs back. {moved} "
        "Then the network is cut and a node is killed. At the end every fact is counted."
    )
    screen.print()


def show_verdict(screen: Console, verdict: Verdict) -> None:
    """Print the count and what it means."""
    screen.print(_table(verdict))
    for name, words in _sentences(verdict):
        screen.print(Text.assemble((f"{name}: ", "bold"), words))
    screen.print()
    if verdict.ok:
        screen.print(Text("Nothing was lost, and nothing is there twice.", "bold green"))
        return
    for audit in verdict.audits:
        if not audit["clean"]:
            screen.print(Text(f"The audit of {audit['link']} found {audit['counts']}.", "red"))
    screen.print(Text("A promise was broken; this is a defect. Please report it with the lines above.", "bold red"))


def _table(verdict: Verdict) -> Table:
    titles = ("machine events", "work orders", "all")
    rows = table("", *titles, right=titles)
    for name, count, is_bad in COUNTS:
        values = [count(way) for way in verdict.ways]
        shown = [Text(count_text(value), "bold red" if is_bad and value else "") for value in (*values, sum(values))]
        rows.add_row(name, *shown)
    return rows


def _sentences(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "lag before the cut", _lag(verdict.before)
    yield "lag after it healed", _lag(verdict.after)
    if verdict.overall is not None:
        yield "longest way through the outage", _span(verdict.overall.most)
    yield (
        "longest append",
        f"{_span(verdict.append_ms_max)} until the fact was on disk, in the middle {_span(verdict.append_ms_p50)}",
    )
    yield "longest wait for a node's answer", f"{_span(verdict.answer_ms_max)}, its restart included"
    yield "gates were", ", ".join(verdict.modes_seen)
    yield "artifacts", f"{count_text(verdict.artifacts)} PDFs arrived with their orders"
    checks = [state for audit in verdict.audits for state in audit["checks"].values()]
    passed, facts = checks.count("passed"), sum(audit["facts"] for audit in verdict.audits)
    links = f"{len(verdict.audits)} links, {count_text(facts)} facts compared"
    yield "audit", f"{links}, {passed} of {len(checks)} checks passed, hash chains verified"
    yield "took", f"{verdict.seconds:.0f} s"


def _lag(lag: Lag | None) -> str:
    return "not measured" if lag is None else f"{_span(lag.p50)} in the middle, {_span(lag.p99)} for one in a hundred"


def _span(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else duration_text(milliseconds / 1000)


def show_keeping(screen: Console, site: Site) -> None:
    """Say where to look while everything goes on running."""
    screen.print()
    screen.print(Text("It goes on. Open a dashboard, and sign in with the token:", "bold"))
    for zone in site.zones:
        screen.print(Text(f"  {zone.title:<11} https://127.0.0.1:{zone.http_port}/dashboard/"), soft_wrap=True)
    screen.print(Text(f"  token       {site.token}"), soft_wrap=True)
    screen.print("Your browser does not know the authority of this run, and will ask whether to go on.")
    screen.print(Text(f"Or: bsfg status --config {site.plant.config}"), soft_wrap=True)
    screen.print(Text("Ctrl-C ends everything and removes it.", "bold"))
    screen.print()
