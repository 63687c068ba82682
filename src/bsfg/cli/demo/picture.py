"""The demo as a picture: the zones with their buffers and gates, the network between them, and the story below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.align import Align
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bsfg.cli.demo.stage import LinkSeen, Progress, Stage, Step, ZoneSeen
from bsfg.cli.output import count_text
from bsfg.figures import duration_text

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


class Picture:
    """Draws the stage whenever the terminal asks for it, as wide as that is."""

    def __init__(self, stage: Stage, *, told: bool = True) -> None:
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
    if zone.alive:
        state = Text("node up", "green")
    else:
        state = Text("node starts", "dim") if zone.pid or not zone.seen else Text("node DOWN", "bold red")
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
        border_style="red" if zone.seen and not zone.alive and not zone.pid else "blue",
    )


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


def story(steps: Sequence[Step], glyphs: Glyphs, width: int, note: str = "", lines: int = 100) -> Iterator[Text]:
    """Tell the steps, each with a tick when it is done; when there is little room, those around the present one."""
    now = next((at for at, step in enumerate(steps) if step.progress != Progress.DONE), len(steps) - 1)
    longest = max(len(step.title) for step in steps)
    aligned = longest if width - longest >= DETAIL_COLUMNS else 0
    told = {step.key: list(_told(step, glyphs, width, note, aligned)) for step in steps}
    room = lines - (len(told[steps[now].key]) - 1)
    first = max(0, min(now - room // 2, len(steps) - room))
    for step in steps[first : first + room]:
        yield from told[step.key]


def _told(step: Step, glyphs: Glyphs, width: int, note: str, aligned: int) -> Iterator[Text]:
    """Tell one step; its detail stands beside it where it fits, and what is waited for else below."""
    signs = {
        Progress.AHEAD: (glyphs.ahead, "dim", "dim"),
        Progress.NOW: (glyphs.now, "bold yellow", "bold"),
        Progress.DONE: (glyphs.done, "green", ""),
        Progress.FAILED: (glyphs.failed, "bold red", "red"),
    }
    sign, sign_style, style = signs[step.progress]
    text = Text.assemble(" ", (sign, sign_style), " ", (step.title, style))
    detail = step.detail
    if step.progress == Progress.NOW and note:
        detail = f"waiting for {note} {glyphs.dots}"
    space = " " * (2 + max(0, aligned - len(step.title)))
    if text.cell_len + len(space) + len(detail) > width:
        space = "  "
    fits = text.cell_len + len(space) + len(detail) <= width
    if detail and fits:
        text.append(space + detail, "dim")
    yield text
    if detail and not fits and step.progress == Progress.NOW:
        yield Text(f"   {detail}", "dim", overflow="ellipsis", no_wrap=True)
