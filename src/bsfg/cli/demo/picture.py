"""The demo as people see it: a live picture on a terminal, lines anywhere else, and the verdict."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.align import Align
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bsfg.cli.demo.referee import DemoVerdict, DirectionTally, Lag
from bsfg.cli.demo.site import DemoSite
from bsfg.cli.demo.stage import DemoStage, DemoStep, LinkSeen, StepProgress, ZoneSeen
from bsfg.cli.output import count_text, table
from bsfg.wording import duration_text

ZONE_COLUMNS = 40
"""A zone beside another needs so much; with less, zones stand below each other."""

DETAIL_COLUMNS = 50
"""Details stand below each other where there is so much room for them."""

LAG_MS_WARNING, LAG_MS_ALERT, LAG_MS_TOP = 100.0, 1_000.0, 60_000.0

MODES = {"normal": "green", "autonomous": "yellow", "reconciliation": "cyan", "held": "magenta"}


class Glyphs(NamedTuple):
    """The signs that are drawn with."""

    done: str
    now: str
    ahead: str
    failed: str
    mode: str
    full: str
    empty: str
    wire: str
    ends: str
    broken: str
    levels: str
    dots: str


SIGNS = Glyphs("✔", "▶", "·", "✘", "●", "█", "░", "═", "◀▶", "╳", "▁▂▃▄▅▆▇█", "…")
ASCII = Glyphs("+", ">", ".", "x", "*", "#", "-", "=", "<>", "x", "._-~=+*#", "...")

WIRE_COLUMNS = 12


class StagePicture:
    """Draws the stage whenever the terminal asks for it, as wide as that is."""

    def __init__(self, stage: DemoStage, *, told: bool = True) -> None:
        self._stage, self._told = stage, told

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        glyphs = ASCII if options.ascii_only else SIGNS
        width, height = options.max_width, console.size.height
        beside = width >= len(self._stage.zones) * ZONE_COLUMNS + 14
        yield self._head(width)
        zones: list[RenderableType] = list(self._zones(glyphs, width, beside))
        yield zones[0] if beside else Group(*zones)
        yield self._counts(width)
        if self._told:
            used_lines = 3 + len(console.render_lines(Group(*zones), options))
            yield from story(self._stage.steps, glyphs, width, self._stage.note, max(3, height - used_lines))

    def _head(self, width: int) -> Text:
        stage = self._stage
        engine = "Spark moves the facts" if stage.site.spark else "the nodes move the facts"
        left, right = f"BSFG demo: {len(stage.zones)} zones, {engine}", f"{stage.seconds:.0f} s"
        space = " " * max(1, width - len(left) - len(right))
        return Text.assemble((left, "bold"), space, (right, "dim"))

    def _counts(self, width: int) -> Text:
        stage = self._stage
        text = Text(" ")
        for name, value in (
            ("sent", count_text(stage.sent)),
            ("arrived", count_text(stage.received)),
            ("on the way", count_text(max(0, stage.sent - stage.received))),
            ("longest append", duration_text(stage.append_ms_max / 1000)),
        ):
            part = Text.assemble((f"{name} ", "dim"), (value, "bold"), "  ")
            if text.cell_len + part.cell_len <= width:
                text.append_text(part)
        return text

    def _zones(self, glyphs: Glyphs, width: int, beside: bool) -> Iterator[RenderableType]:
        seen = list(self._stage.zones.values())
        if not beside:
            for number, zone in enumerate(seen):
                if number:
                    yield Align.center(self._wire(glyphs, number, width // 2))
                yield _panel(zone, self._inbound(zone), glyphs, width)
            return
        zone_width = (width - WIRE_COLUMNS * (len(seen) - 1)) // len(seen)
        height = 6 + 2 * max(len(self._inbound(zone)) for zone in seen)
        grid = Table.grid(expand=True)
        cells: list[RenderableType] = []
        for number, zone in enumerate(seen):
            if number:
                grid.add_column(width=WIRE_COLUMNS)
                wire = self._wire(glyphs, number, WIRE_COLUMNS)
                cells.append(Align.center(wire, vertical="middle", height=height))
            grid.add_column(ratio=1)
            cells.append(_panel(zone, self._inbound(zone), glyphs, zone_width, wide=True))
        grid.add_row(*cells)
        yield grid

    def _inbound(self, zone: ZoneSeen) -> list[LinkSeen]:
        return [link for link in self._stage.links.values() if link.link.receiver is zone.zone]

    def _wire(self, glyphs: Glyphs, number: int, width: int) -> Text:
        """Draw the network before a zone; the cut is at the plant, which is the first."""
        cut = self._stage.is_cut and number == 1
        word, end, style = (" cut ", glyphs.broken, "bold red") if cut else (" open ", "", "green")
        side = glyphs.wire * (max(3, (width - len(word)) // 2) - 1 - len(end))
        return Text(glyphs.ends[0] + side + end + word + end + side + glyphs.ends[1], style)


def _panel(zone: ZoneSeen, links: Sequence[LinkSeen], glyphs: Glyphs, width: int, *, wide: bool = False) -> Panel:
    state = _state(zone)
    inside, received = width - 4, f"received {count_text(zone.received)}  "
    lines: list[RenderableType] = [*(_tall(zone, inside, glyphs) if wide else _flat(zone))]
    for link in links:
        lines.append(_gate(link, glyphs, inside, known=zone.alive or not zone.seen))
        before = "" if wide or link is not links[0] else received
        lines.append(Text.assemble((before, "dim"), sparkline(link, glyphs, inside - len(before))))
    return Panel(
        Group(*lines),
        title=Text(zone.zone.title, "bold"),
        title_align="left",
        subtitle=state,
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="red" if zone.seen and not zone.alive and not zone.runs else "blue",
    )


_NODES = {"active": "green", "stands by": "cyan", "paused": "bold yellow", "silent": "yellow", "DOWN": "bold red"}


def _state(zone: ZoneSeen) -> Text:
    """Say whether a zone's node is up, or of several who is active."""
    if len(zone.nodes) > 1:
        parts = [(f"{node.node.title} {node.state}", _NODES[node.state]) for node in zone.nodes]
        return Text(", ").join(Text(*part) for part in parts)
    if zone.alive:
        return Text("node up", "green")
    return Text("node starts", "dim") if zone.runs or not zone.seen else Text("node DOWN", "bold red")


def _tall(zone: ZoneSeen, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Give a zone's buffers a line each."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=9)
    rows.add_column(width=8, justify="right")
    rows.add_column()
    bar_width = max(4, min(20, width - 21))
    total = max(1, zone.forwarded + zone.backlog)
    files = f"{count_text(zone.artifacts)} files" if zone.artifacts else ""
    rows.add_row("appended", _number(zone.appended), Text("store buffer", "dim"))
    rows.add_row("forwarded", _number(zone.forwarded), _bar(zone.forwarded / total, bar_width, glyphs))
    rows.add_row("backlog", _backlog(zone.backlog), "")
    rows.add_row("received", _number(zone.received), Text(files, "dim"))
    yield rows


def _flat(zone: ZoneSeen) -> Iterator[RenderableType]:
    """Give a zone's store buffer one line; what it received stands before the lag."""
    yield Text.assemble(
        ("appended ", "dim"), _number(zone.appended), ("  forwarded ", "dim"), _number(zone.forwarded),
        ("  backlog ", "dim"), _backlog(zone.backlog),
    )  # fmt: skip


def _number(value: int) -> Text:
    return Text(count_text(value), "bold")


def _backlog(value: int) -> Text:
    return Text(count_text(value), "bold yellow" if value > 100 else "bold")


def _bar(share: float, width: int, glyphs: Glyphs) -> Text:
    full = min(width, int(share * width + 0.5))
    return Text.assemble((glyphs.full * full, "green"), (glyphs.empty * (width - full), "dim"))


def mode_text(mode: str, glyphs: Glyphs = SIGNS) -> Text:
    """Write a gate's mode as a coloured word with a sign."""
    return Text(f"{glyphs.mode} {mode}", MODES.get(mode, ""))


def _gate(link: LinkSeen, glyphs: Glyphs, width: int, *, known: bool) -> Text:
    """Write how a zone's inbound gate stands; while its node is away nobody knows."""
    lag = "" if link.lag_ms is None else duration_text(link.lag_ms / 1000)
    mode = mode_text(link.mode, glyphs) if known else Text("not known", "dim")
    text = Text.assemble((f"from {link.link.sender.title} ", "dim"), mode)
    for label in ("lag ", ""):
        behind = Text.assemble((label, "dim"), (lag, _lag_style(link.lag_ms))) if lag else Text()
        if text.cell_len + behind.cell_len < width:
            text.append(" " * (width - text.cell_len - behind.cell_len))
            return text + behind
    return text


def _lag_style(lag_ms: float | None) -> str:
    if lag_ms is None:
        return ""
    return "green" if lag_ms < LAG_MS_WARNING else "yellow" if lag_ms < LAG_MS_ALERT else "red"


def sparkline(link: LinkSeen, glyphs: Glyphs, width: int) -> Text:
    """Draw the lag of a link over time, on a scale on which a millisecond and a minute both can be seen."""
    text = Text()
    for lag_ms in list(link.lags_ms)[-width:]:
        if lag_ms is None:
            text.append(" ")
            continue
        share = math.log10(max(1.0, lag_ms)) / math.log10(LAG_MS_TOP)
        level = min(len(glyphs.levels) - 1, int(share * len(glyphs.levels)))
        text.append(glyphs.levels[level], _lag_style(lag_ms))
    return text


def story(steps: Sequence[DemoStep], glyphs: Glyphs, width: int, note: str = "", lines: int = 100) -> Iterator[Text]:
    """Tell the steps, each with a tick when it is done; when there is little room, those around the present one."""
    now = next((at for at, step in enumerate(steps) if step.progress != StepProgress.DONE), len(steps) - 1)
    longest = max(len(step.title) for step in steps)
    aligned = longest if width - longest >= DETAIL_COLUMNS else 0
    told = {step.key: list(_told(step, glyphs, width, note, aligned)) for step in steps}
    room = lines - (len(told[steps[now].key]) - 1)
    first = max(0, min(now - room // 2, len(steps) - room))
    for step in steps[first : first + room]:
        yield from told[step.key]


def _told(step: DemoStep, glyphs: Glyphs, width: int, note: str, aligned: int) -> Iterator[Text]:
    """Tell one step; its detail stands beside it where it fits, and what is waited for else below."""
    signs = {
        StepProgress.AHEAD: (glyphs.ahead, "dim", "dim"),
        StepProgress.NOW: (glyphs.now, "bold yellow", "bold"),
        StepProgress.DONE: (glyphs.done, "green", ""),
        StepProgress.FAILED: (glyphs.failed, "bold red", "red"),
    }
    sign, sign_style, style = signs[step.progress]
    text = Text.assemble(" ", (sign, sign_style), " ", (step.title, style))
    detail = step.detail
    if step.progress == StepProgress.NOW and note:
        detail = f"waiting for {note} {glyphs.dots}"
    space = " " * (2 + max(0, aligned - len(step.title)))
    if text.cell_len + len(space) + len(detail) > width:
        space = "  "
    fits = text.cell_len + len(space) + len(detail) <= width
    if detail and fits:
        text.append(space + detail, "dim")
    yield text
    if detail and not fits and step.progress == StepProgress.NOW:
        yield Text(f"   {detail}", "dim", overflow="ellipsis", no_wrap=True)


REFRESHES_PER_SECOND = 5


class Silent:
    """Shows nothing of a stage; what shows something does more."""

    def begin(self, stage: DemoStage, *, told: bool = True) -> None:
        """Begin to show a stage."""

    def on_step(self, stage: DemoStage, step: DemoStep) -> None:
        """Show that a step has begun, or is over."""

    def end(self) -> None:
        """Stop showing it; repeats are harmless."""


class StoryLines(Silent):
    """Tells the story line by line: a step when it begins, and how it went."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen

    def on_step(self, stage: DemoStage, step: DemoStep) -> None:
        """Write a line."""
        text = step.title if step.progress == StepProgress.NOW else f"  {step.detail}"
        self._screen.print(Text(f"{stage.seconds:6.1f} s  {text}"), soft_wrap=True)


class Screen(Silent):
    """Draws the picture several times a second, in which steps show by themselves; the story stays when it ends."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._live: Live | None = None
        self._stage: DemoStage | None = None

    def begin(self, stage: DemoStage, *, told: bool = True) -> None:
        """Begin to draw."""
        self._stage = stage if told else None
        picture = StagePicture(stage, told=told)
        self._live = Live(
            picture,
            console=self._screen,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def end(self) -> None:
        """Take the picture away and leave the story."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._stage is not None:
            glyphs = ASCII if self._screen.options.ascii_only else SIGNS
            for line in story(self._stage.steps, glyphs, self._screen.width):
                self._screen.print(line)


def show_on(screen: Console, *, as_json: bool) -> Silent:
    """Choose what fits: a picture needs a terminal that can move its cursor, and colours to be worth it."""
    if screen.is_terminal and not screen.is_dumb_terminal and not os.environ.get("NO_COLOR"):
        return Screen(screen)
    return Silent() if as_json else StoryLines(screen)


Count = Callable[[DirectionTally], int]

COUNTS: tuple[tuple[str, Count, bool], ...] = (
    ("sent", lambda way: way.sent, False),
    ("received", lambda way: way.received, False),
    ("lost", lambda way: way.lost, True),
    ("twice", lambda way: way.twice, True),
    ("altered", lambda way: way.altered + way.artifacts_bad, True),
    ("out of order", lambda way: way.out_of_order, True),
)
"""The rows of the verdict, and whether anything but 0 is bad."""


def introduce(screen: Console, site: DemoSite) -> None:
    """Say what is about to happen."""
    if site.two_nodes:
        moved = "A Spark pipeline in each zone pulls from the other." if site.spark else "The nodes pull."
        screen.print(
            f"Plant A sends machine events to Enterprise and gets work orders with PDFs back. {moved} Plant A has two "
            "nodes on one storage server (NATS JetStream): one is active, the other stands by. The active one is "
            "killed, and then the next one paused and resumed. At the end every fact is counted."
        )
        screen.print()
        return
    over = " over an IDMZ" if site.three_zones else ""
    moved = "A Spark pipeline in each zone pulls from the next." if site.spark else "Each node pulls from the next."
    screen.print(
        f"Plant A sends machine events to Enterprise{over} and gets work orders with PDFs back. {moved} "
        "Then the network is cut and a node is killed. At the end every fact is counted."
    )
    screen.print()


def show_verdict(screen: Console, verdict: DemoVerdict) -> None:
    """Print the count and what it means."""
    screen.print(_table(verdict))
    for name, words in _sentences(verdict):
        screen.print(Text.assemble((f"{name}: ", "bold"), words))
    screen.print()
    if verdict.ok:
        screen.print(Text("Nothing was lost, and nothing is there twice.", "bold green"))
        return
    if verdict.late is not None and not verdict.late.ok:
        screen.print(Text("A node that was paused wrote when another one was active.", "red"))
    for audit in verdict.audits:
        if not audit["clean"]:
            screen.print(Text(f"The audit of {audit['link']} found {audit['counts']}.", "red"))
    screen.print(Text("A promise was broken; this is a defect. Please report it with the lines above.", "bold red"))


def _table(verdict: DemoVerdict) -> Table:
    titles = ("machine events", "work orders", "all")
    rows = table("", *titles, right=titles)
    for name, count, is_bad in COUNTS:
        values = [count(way) for way in verdict.ways]
        shown = [Text(count_text(value), "bold red" if is_bad and value else "") for value in (*values, sum(values))]
        rows.add_row(name, *shown)
    return rows


def _sentences(verdict: DemoVerdict) -> Iterator[tuple[str, str]]:
    yield f"lag before the {'first takeover' if verdict.takeovers else 'cut'}", _lag(verdict.before)
    yield f"lag after {'the last one' if verdict.takeovers else 'it healed'}", _lag(verdict.after)
    if verdict.overall is not None:
        yield f"longest way through {'a takeover' if verdict.takeovers else 'the outage'}", _span(verdict.overall.most)
    yield (
        "longest append",
        f"{_span(verdict.append_ms_max)} until the fact was on disk, in the middle {_span(verdict.append_ms_p50)}",
    )
    ended = "takeovers" if verdict.takeovers else "its restart"
    yield "longest wait for a node's answer", f"{_span(verdict.answer_ms_max)}, {ended} included"
    if verdict.takeovers:
        told = (f"{_span(1000 * each.seconds)} after the active node was {each.how}" for each in verdict.takeovers)
        yield "another node served", ", ".join(told)
    if verdict.late is not None:
        stored = f"{verdict.late.stored} of {len(verdict.late.answers)} facts that it was handed meanwhile"
        yield "the paused node wrote", f"{stored}; it answered {', '.join(sorted(set(verdict.late.answers)))}"
    yield "gates were", ", ".join(verdict.modes_seen)
    yield "artifacts", f"{count_text(verdict.total('artifacts'))} PDFs arrived with their orders"
    checks = [state for audit in verdict.audits for state in audit["checks"].values()]
    passed, facts = checks.count("passed"), sum(audit["facts"] for audit in verdict.audits)
    links = f"{len(verdict.audits)} links, {count_text(facts)} facts compared"
    yield "audit", f"{links}, {passed} of {len(checks)} checks passed, hash chains verified"
    yield "took", f"{verdict.seconds:.0f} s"


def _lag(lag: Lag | None) -> str:
    return "not measured" if lag is None else f"{_span(lag.p50)} in the middle, {_span(lag.p99)} for one in a hundred"


def _span(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10 else duration_text(milliseconds / 1000)


def show_keeping(screen: Console, site: DemoSite) -> None:
    """Say where to look while everything goes on running."""
    screen.print()
    screen.print(Text("It goes on. Open a dashboard, and sign in with the token:", "bold"))
    for zone in site.zones:
        for node in zone.nodes:
            screen.print(Text(f"  {zone.title:<11} https://127.0.0.1:{node.http_port}/dashboard/"), soft_wrap=True)
    screen.print(Text(f"  token       {site.token}"), soft_wrap=True)
    screen.print("Your browser does not know the authority of this run, and will ask whether to go on.")
    where = f" --address {site.plant.address}" if site.two_nodes else ""
    screen.print(Text(f"Or: bsfg status --config {site.plant.config}{where}"), soft_wrap=True)
    screen.print(Text("Ctrl-C ends everything and removes it.", "bold"))
    screen.print()
