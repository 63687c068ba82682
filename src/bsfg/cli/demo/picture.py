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
from bsfg.cli.status.view import duration_text

ZONE_COLUMNS = 36
"""A zone beside another needs so much; with less, zones stand below each other."""

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
    levels: str
    dots: str


SIGNS = Glyphs("✔", "▶", "·", "✘", "●", "█", "░", "═", "▁▂▃▄▅▆▇█", "…")
ASCII = Glyphs("+", ">", ".", "x", "*", "#", "-", "=", "._-~=+*#", "...")


class Picture:
    """Draws the stage whenever the terminal asks for it, as wide as that is."""

    def __init__(self, stage: Stage, *, told: bool = True) -> None:
        self._stage, self._told = stage, told

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        glyphs = ASCII if options.ascii_only else SIGNS
        width, height = options.max_width, console.size.height
        beside = width >= len(self._stage.zones) * ZONE_COLUMNS + 14
        yield self._head(width)
        zones: list[RenderableType] = list(self._zones(glyphs, width, beside, height))
        yield zones[0] if beside else Group(*zones)
        yield self._counts(width)
        if self._told:
            used_lines = 5 + (9 if beside else sum(6 if isinstance(each, Panel) else 1 for each in zones))
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

    def _zones(self, glyphs: Glyphs, width: int, beside: bool, height: int) -> Iterator[RenderableType]:
        stage, seen = self._stage, list(self._stage.zones.values())
        if not beside:
            tight = height < 12 + 6 * len(seen) + len(stage.steps) // 2
            for number, zone in enumerate(seen):
                if number:
                    yield Align.center(self._wire(glyphs, number, width // 2))
                yield _panel(zone, self._inbound(zone), glyphs, width, tight=tight)
            return
        wires = len(seen) - 1
        zone_width = (width - 12 * wires) // len(seen)
        grid = Table.grid(expand=True)
        cells: list[RenderableType] = []
        for number, zone in enumerate(seen):
            if number:
                grid.add_column(width=12)
                cells.append(Align.center(self._wire(glyphs, number, 10), vertical="middle", height=9))
            grid.add_column(ratio=1)
            cells.append(_panel(zone, self._inbound(zone), glyphs, zone_width, wide=True))
        grid.add_row(*cells)
        yield grid

    def _inbound(self, zone: ZoneSeen) -> list[LinkSeen]:
        return [link for link in self._stage.links.values() if link.link.receiver is zone.zone]

    def _wire(self, glyphs: Glyphs, number: int, width: int) -> Text:
        """Draw the network before a zone; the cut is at the plant, which is the first."""
        cut = self._stage.is_cut and number == 1
        word, style = (" cut ", "bold red") if cut else (" open ", "green")
        side = max(1, (width - len(word)) // 2)
        lines = (" " if cut else glyphs.wire) * (side - 1)
        ends = glyphs.wire
        left, right = (ends + lines, lines + ends) if not cut else (ends * max(1, side // 2), ends * max(1, side // 2))
        return Text(left + word + right, style)


def _panel(
    zone: ZoneSeen, links: Sequence[LinkSeen], glyphs: Glyphs, width: int, *, wide: bool = False, tight: bool = False
) -> Panel:
    if zone.alive:
        state = Text("node up", "green")
    else:
        state = Text("node starts", "dim") if zone.pid or not zone.seen else Text("node DOWN", "bold red")
    inside = width - 4
    body = _tall(zone, inside, glyphs) if wide else _flat(zone, inside)
    lines: list[RenderableType] = [*body]
    for link in links:
        lines.append(_gate(link, glyphs, inside))
        if not tight:
            lines.append(sparkline(link, glyphs, inside))
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


def _flat(zone: ZoneSeen, width: int) -> Iterator[RenderableType]:
    """Give a zone's buffers as few lines as they need."""
    yield Text.assemble(
        ("appended ", "dim"), _number(zone.appended), ("  forwarded ", "dim"), _number(zone.forwarded),
        ("  backlog ", "dim"), _backlog(zone.backlog), ("  received ", "dim"), _number(zone.received),
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


def _gate(link: LinkSeen, glyphs: Glyphs, width: int) -> Text:
    lag = "" if link.lag_ms is None else duration_text(link.lag_ms / 1000)
    text = Text.assemble((f"from {link.link.sender.title} ", "dim"), mode_text(link.mode, glyphs))
    behind = Text.assemble(("lag ", "dim"), (lag, _lag_style(link.lag_ms))) if lag else Text()
    text.append(" " * max(1, width - text.cell_len - behind.cell_len))
    text.append_text(behind)
    text.truncate(width)
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
    first = max(0, min(now - lines // 2, len(steps) - lines))
    for step in steps[first : first + lines]:
        yield _told(step, glyphs, width, note)


def _told(step: Step, glyphs: Glyphs, width: int, note: str) -> Text:
    signs = {
        Progress.AHEAD: (glyphs.ahead, "dim", "dim"),
        Progress.NOW: (glyphs.now, "bold yellow", "bold"),
        Progress.DONE: (glyphs.done, "green", ""),
        Progress.FAILED: (glyphs.failed, "bold red", "red"),
    }
    sign, sign_style, style = signs[step.progress]
    text = Text.assemble(" ", (sign, sign_style), " ", (step.title, style))
    detail = step.detail
    if step.progress == Progress.NOW:
        detail = f"waiting for {note} {glyphs.dots}" if note else glyphs.dots
    room = width - text.cell_len - 3
    if detail and len(detail) <= room:
        text.append(f"   {detail}", "dim")
    return text
