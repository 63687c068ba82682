"""What the pages say is so: numbers as `bsfg status` has them, times with date and zone, nothing that nobody knows."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.async_api import Page, expect
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import Stage, browsing
from tests.dashboard.trouble import trouble

from bsfg import wording
from bsfg.gate import RECEIVER, Event
from bsfg.wire.service import LinkReport

LINK, STREAM = "from-enterprise", "operational"
LAGS = [0, 0.0004, 0.0123, 0.0995, 0.0996, 0.1, 0.9994, 0.9996, 1, 1.004, 1.005, 1.238, 9.994, 9.996, 10, 119, 119.6]
SPANS = [120, 7_199, 7_200, 172_799, 172_800, 1e6, 1e9]
FIGURES: dict[str, tuple[Callable[[Any], str], list[float]]] = {
    "count": (wording.count_text, [0, 7, 999, 1_000, 12_345, 999_999, 1_000_000, 10**15]),
    "span": (wording.duration_text, [*LAGS, *SPANS]),
    "hours": (
        wording.hours_text,
        [0, 0.001, 0.25, 0.99, 1, 1.25, 2.5, 9.94, 9.96, 10, 10.5, 95.9, 96, 100, 87_599, 87_601],
    ),
    "rate": (wording.rate_text, [0, 0.001, 0.049, 0.05, 0.25, 0.5, 9.96, 10, 10.5, 999.5, 1_234.5, 1e6]),
    "bytes": (wording.size_text, [0, 1, 1023, 1024, 1280, 1536, 10 << 20, 10 << 30, 3 << 40, 5 << 50]),
    "percent": (wording.percent_text, [0, 0.01, 0.049, 0.05, 0.25, 1, 9.95, 12.34, 50, 99.96, 100]),
    "moment": (wording.time_text, [0, 1, 1_700_000_000_000, 1_800_000_000_999, 10**17]),
}
WRITTEN = """async ([name, values]) => {
    const written = await import('/dashboard/static/js/format.js');
    return values.map((value) => written[name](value));
}"""
TIME = re.compile(r"\d\d:\d\d:\d\d")
WHOLE_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( [+−]\d\d:\d\d|Z)")
BOXES = """(all) => all.map((each) => {
    const { left, right, top, bottom } = each.getBoundingClientRect();
    return { left, right, top, bottom };
})"""


async def test_numbers_are_those_of_the_command_line(stages: Stages) -> None:
    """Every figure of the pages is written as `bsfg status` writes it: groups, digits, units, and times in UTC."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room", timezone_id="UTC")
        for name, (text, values) in FIGURES.items():
            assert await page.evaluate(WRITTEN, [name, values]) == [text(value) for value in values], name


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/St_Johns", "UTC"])
async def test_every_time_has_its_date_and_its_zone(stages: Stages, zone: str) -> None:
    """Whoever reads a time knows of which day and zone it is; the axes say so once for all of them."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead", timezone_id=zone)
        offset = {"Asia/Kolkata": " +05:30", "UTC": "Z"}.get(zone)
        for view, place in (
            ("overview", "#gates"),
            ("records", "#gaps"),
            ("trail", "#trail"),
            ("certificates", "#certificates"),
        ):
            await page.goto(f"{stage.origin}/dashboard/#{view}")
            await expect(page.locator(place)).to_contain_text(WHOLE_TIME)
            text = "\n".join(await page.locator("#foot, #tiles, main article:not(:has(#charts))").all_inner_texts())
            assert len(TIME.findall(text)) == len(list(WHOLE_TIME.finditer(text))), text
            assert offset is None or all(found.group(1) == offset for found in WHOLE_TIME.finditer(text))
        await page.goto(f"{stage.origin}/dashboard/#overview")
        await expect(page.locator("#charts-note")).to_have_text(re.compile(r"\d{4}-\d\d-\d\d.*([+−]\d\d:\d\d|UTC)"))


def moves(stage: Stage, **report: Any) -> None:
    """Have an engine move the link and report."""
    board = stage.node.parts.links
    lease = board.leases.acquire(LINK, "an engine", 300_000)
    for event in (Event.PEER_FOUND, Event.BACKLOG_CLEARED):
        board.on(LINK, RECEIVER, event)
    board.report(LinkReport(LINK, STREAM, lease=lease.token, **report))


def lag_and_left(page: Page) -> tuple[Any, Any]:
    """Give the cells of the link's lag and of what is to come."""
    row = page.locator(f'#gates tr[data-link="{LINK}"][data-side="receiver"]')
    return row.locator(".lag"), row.locator(".left")


async def test_the_lag_is_judged_by_the_number_that_is_shown(stages: Stages) -> None:
    """Tile, table and findings say the same; a turn that brings nothing does not turn a bad lag into a good one."""
    stage = await stages()
    moves(stage, lag_seconds=0.15)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        tile = page.locator('[data-tile="lag"]')
        for seconds, text, level in (
            (None, "150 ms", "warning"),
            (0.0996, "100 ms", "warning"),
            (1.5, "1.5 s", "alert"),
        ):
            stage.node.parts.links.report(LinkReport(LINK, STREAM, lag_seconds=seconds, lease=lease_of(stage)))
            await expect(tile.locator(".value")).to_have_text(text)
            await expect(tile).to_have_class(f"tile {level}")
            lag, left = lag_and_left(page)
            await expect(lag).to_have_text(text)
            await expect(lag.locator(f".{level}-text")).to_have_count(1)
            await expect(left).to_have_text("0")


def lease_of(stage: Stage) -> str:
    """Give the token of the link's lease."""
    held = stage.node.parts.links.leases.live(LINK)
    assert held is not None
    return held.token


@pytest.mark.parametrize("end", ["held", "left", "absent"])
async def test_what_nobody_knows_is_unknown(stages: Stages, end: str) -> None:
    """A link that is held, that nobody moves, or whose sender is away has neither a good lag nor nothing to come."""
    stage = await stages()
    moves(stage, lag_seconds=0.005)
    board = stage.node.parts.links
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        tile = page.locator('[data-tile="lag"]')
        await expect(tile).to_have_class("tile ok")
        if end == "held":
            board.hold(LINK, RECEIVER, by="somebody", reason="works")
        elif end == "left":
            board.leases.give_back(LINK, lease_of(stage))
        else:
            board.on(LINK, RECEIVER, Event.PEER_LOST, "no answer")
        await expect(tile.locator(".value")).to_have_text("unknown")
        await expect(tile).to_have_class("tile warning")
        await expect(tile).to_contain_text(re.compile(r"last told .* (ms|s) ago"))
        lag, left = lag_and_left(page)
        for cell in (lag, left):
            await expect(cell).to_contain_text("unknown")
        await expect(lag).to_contain_text(re.compile(r"(ms|s) ago"))
        await expect(page.locator("#map")).not_to_contain_text("5 ms")


async def test_rates_name_their_window(stages: Stages) -> None:
    """Throughput and what comes in are the rates that `bsfg status` shows, of the last minute."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        tile = page.locator('[data-tile="throughput"]')
        await expect(tile).to_contain_text("in the last minute")
        await expect(tile.locator(".value")).to_have_text(re.compile(r"^[\d.,]+k?/s$"))
        await page.goto(f"{stage.origin}/dashboard/#buffers")
        await expect(page.locator("#buffers")).to_contain_text("Coming in, last minute")


@pytest.mark.parametrize("width", [1280, 800, 390])
async def test_labels_stand_beside_the_curves(stages: Stages, width: int) -> None:
    """The words of a limit are right of everything that is drawn, within the chart, and apart from each other."""
    stage = await stages()
    history = stage.node.pages._watch.history  # type: ignore[union-attr]
    now = stage.node.clock.now_unix_ms()
    for number in range(60):
        values: dict[tuple[str, ...], float] = {
            ("lag", LINK, STREAM): (0.02, 0.11, 0.9, 1.1)[number % 4],
            ("fill", STREAM, "store"): 45.0 + number,
        }
        history.add(now - 300_000 + 5_000 * number, values)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room", viewport={"width": width, "height": 900})
        charts = page.locator(".chart")
        await expect(charts.locator("text.warning")).to_have_count(2)
        for index in (1, 3):
            chart = charts.nth(index)
            # Curves are cut where the plot ends, which begins right of the numbers of its axis.
            assert await chart.locator("svg.area").evaluate("(area) => getComputedStyle(area).overflow") == "hidden"
            assert await chart.locator("svg.plot > .curve").count() == 0
            limits = await chart.locator("svg.plot .limit").evaluate_all(BOXES)
            ticks = await chart.locator('text[text-anchor="end"]').evaluate_all(BOXES)
            assert all(tick["right"] <= limit["left"] for tick in ticks for limit in limits)
            [plot] = await chart.locator("svg.plot").evaluate_all(BOXES)
            curves = await chart.locator("svg.plot .curve, svg.plot .limit").evaluate_all(BOXES)
            labels = await chart.locator("text.warning, text.alert").evaluate_all(BOXES)
            assert len(labels) == 2
            for label in labels:
                assert all(curve["right"] <= label["left"] for curve in curves)
                assert label["right"] <= plot["right"] + 1 and label["top"] >= plot["top"] - 1
            first, second = sorted(labels, key=lambda box: box["top"])
            assert first["bottom"] <= second["top"] + 1


async def test_words_are_those_of_people(stages: Stages) -> None:
    """One record is not records, a command that is named looks like one, a unit stays with its number."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead", viewport={"width": 390, "height": 844})
        written = """async () => {
            const { counted, whole } = await import('/dashboard/static/js/format.js');
            const { said } = await import('/dashboard/static/js/dom.js');
            const shown = said("see `bsfg quarantine`, ` or not").map((each) => each.outerHTML).join("");
            return [counted(1, "gap record"), counted(1000, "gap record"), whole("1.5 KiB of 10 GiB"), shown];
        }"""
        one, many, size, shown = await page.evaluate(written)
        assert (one, many, size) == ("1 gap record", "1,000 gap records", "1.5\u00a0KiB of 10\u00a0GiB")
        assert shown == "<bdi>see </bdi><code><bdi>bsfg quarantine</bdi></code><bdi>, ` or not</bdi>"


async def test_on_a_phone_a_card_is_read_from_top_to_bottom(stages: Stages) -> None:
    """What a view is for stands below its name, and all fields of a search begin at one place."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead", viewport={"width": 390, "height": 844})
        for view in ("records", "history", "trail", "certificates"):
            await page.goto(f"{stage.origin}/dashboard/#{view}")
            section = page.locator(f'section[data-of="{view}"]')
            await expect(section).to_be_visible()
            [name, *_] = await section.locator("h2").evaluate_all(BOXES)
            [note, *_] = await section.locator("header p.note").evaluate_all(BOXES)
            assert note["top"] >= name["bottom"] and note["left"] == name["left"], view
            fields = await section.locator(".choices :is(input, select)").evaluate_all(BOXES)
            assert len({field["left"] for field in fields}) <= 1, view
