"""What the dashboard shows beyond numbers: facts, links in their hundreds, what happened, and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import expect
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import browsing
from tests.dashboard.trouble import HOSTILE, TURNED, trouble

from bsfg.fact import Envelope, Fact, Message
from bsfg.node.dashboard.pages import rendered
from bsfg.testing.facts import sealed
from bsfg.wording import help_folder

MANY = "".join(
    f'[identities.plant-{number:03}-bsfg]\nzone = "plant-{number:03}"\nroles = ["peer"]\nstreams = ["*"]\n'
    f'[links.from-plant-{number:03}]\nzone = "plant-{number:03}"\naddress = "127.0.0.1:9"\n'
    for number in range(200)
)


def fact(number: int, subject: str, value: object) -> Message:
    """Make a fact of this zone."""
    return Message(
        Envelope("plant-a", "enterprise", 1_700_000_000_000, f"id-{number}"), Fact.of(subject, "seen", value)
    )


async def test_facts_are_shown_live_and_as_text(stages: Stages) -> None:
    """A reader sees the newest, filters them, opens an object with its numbers as written, and sees what comes."""
    stage = await stages(reads=True)
    store = await stage.node.parts.store("operational")
    value = {
        "note": HOSTILE,
        "big": 12345678901234567890,
        "list": [1, {"a": []}],
        "text": "long enough to be folded away",
    }
    await store.append(sealed([fact(1, f"machine:{HOSTILE}", value), fact(2, TURNED, 1)]))
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        await page.get_by_role("link", name="Facts").click()
        # What is looked at first is a buffer with something in it.
        await expect(page.locator("#facts-of")).to_have_value("operational/store")
        await expect(page.locator("#facts tbody tr")).to_have_count(2)
        await page.select_option("#facts-of", "operational/forward")
        await expect(page.locator("#facts")).to_have_text("No fact is in this buffer.")
        await page.select_option("#facts-of", "operational/store")
        await page.locator("#facts summary").first.click()
        await expect(page.locator("#facts pre").first).to_contain_text('"big": 12345678901234567890')
        await store.append(sealed([fact(3, "pump:7", 3)]))
        await expect(page.locator("#facts tbody tr").first).to_contain_text("pump:7")
        await page.fill("#facts-subject", "pump:*")
        await page.press("#facts-subject", "Enter")
        await expect(page.locator("#facts tbody tr")).to_have_count(1)
        assert await page.title() != "owned"
        assert page.errors == []  # type: ignore[attr-defined]


MOVED = """() => { window.moved = 0; new MutationObserver((changes) => {
  for (const change of changes) window.moved += change.addedNodes.length + change.removedNodes.length;
}).observe(document.querySelector("#facts tbody"), { childList: true }); }"""


async def test_rows_that_stay_are_not_touched(stages: Stages) -> None:
    """A fact that comes is one row more, and one less when there are too many: a busy stream stops no browser."""
    stage = await stages(reads=True)
    store = await stage.node.parts.store("operational")
    await store.append(sealed([fact(0, "pump:0", 0)]))
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        await page.get_by_role("link", name="Facts").click()
        rows = page.locator("#facts tbody tr")
        await expect(rows).to_have_count(1)
        await page.evaluate(MOVED)
        for number in range(1, 6):
            await store.append(
                sealed([fact(number * 120 + each, f"pump:{number * 120 + each}", 0) for each in range(120)])
            )
            await expect(rows.first).to_contain_text(f"pump:{number * 120 + 119}")
        await expect(rows).to_have_count(500)
        assert await page.evaluate("window.moved") == 600 + 101


async def test_who_may_not_read_is_told_what_it_takes(stages: Stages) -> None:
    """Somebody who only views is shown no fact, by the page or behind it."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    answer = await stage.ask("GET", "/dashboard/api/facts/operational?buffer=store", headers=headers)
    assert (answer.status, answer.json()["code"]) == (403, "permission_denied")
    session = await stage.ask("GET", "/dashboard/api/session", headers=headers)
    assert session.json()["reads"] == []


async def test_two_hundred_links_are_a_table(stages: Stages) -> None:
    """All are listed, the worst first; a search and a column find one; the overview stays small."""
    stage = await stages(more=MANY)
    stage.node.parts.links.hold("from-plant-123", "receiver", by="operator", reason="works")
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        assert await page.locator("#gates tbody tr").count() <= 12
        await expect(page.locator("#map")).to_contain_text("more zones")
        await page.get_by_role("link", name="Links").first.click()
        await expect(page.locator("#links tbody tr")).to_have_count(202)
        await expect(page.locator("#links tbody tr").first).to_contain_text("from-plant-123")
        await page.get_by_role("button", name="Link").first.click()
        await expect(page.locator("#links tbody tr").first).to_contain_text("enterprise")
        await page.fill("#links-text", "plant-07")
        await expect(page.locator("#links tbody tr")).to_have_count(10)
        assert page.errors == []  # type: ignore[attr-defined]


async def test_an_alarm_leads_to_the_runbook_of_this_node(stages: Stages) -> None:
    """What needs attention has a link to its entry, which the node itself serves; the history has it, too."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        link = page.locator('[data-finding="quarantine"] a')
        await expect(link).to_have_attribute("href", "/dashboard/docs/runbook#quarantine")
        await page.get_by_role("link", name="History").click()
        await expect(page.locator("#history")).to_contain_text("quarantine raised")
        await page.fill("#history-text", "no such thing")
        await expect(page.locator("#history")).to_contain_text("Nothing fits.")
        await page.goto(f"{stage.origin}/dashboard/docs/runbook#quarantine")
        await expect(page.locator("code#quarantine")).to_be_in_viewport()
        await page.get_by_role("link", name="The dashboard").first.click()
        await expect(page.locator("h1")).to_have_text("The dashboard")
        await page.set_viewport_size({"width": 390, "height": 844})
        for name in ("runbook", "reference/errors"):
            await page.goto(f"{stage.origin}/dashboard/docs/{name}")
            tables = page.locator(".doc table")
            widths = await tables.evaluate_all("(all) => all.map((each) => each.scrollWidth - each.clientWidth)")
            assert widths and max(widths) <= 0, f"what to do is read without moving a table aside: {name} {widths}"
        assert page.errors == []  # type: ignore[attr-defined]


async def test_the_trail_is_searched_by_the_node(stages: Stages) -> None:
    """An operator asks for one action, one identity, one outcome."""
    stage = await stages()
    headers = await stage.sign_in("shift-lead")
    await stage.ask(
        "POST", "/dashboard/api/act/hold", {"link": "none", "side": "receiver", "reason": "x"}, headers=headers
    )
    every = (await stage.ask("GET", "/dashboard/api/trail", headers=headers)).json()
    started = (await stage.ask("GET", "/dashboard/api/trail?action=node_started", headers=headers)).json()
    assert {row["action"] for row in started["rows"]} == {"node_started"}
    assert len(started["rows"]) < len(every["rows"]) and started["total"] == every["total"]
    none = (await stage.ask("GET", "/dashboard/api/trail?identity=nobody&outcome=failed", headers=headers)).json()
    assert none["rows"] == []


async def test_pages_are_for_those_who_are_in(stages: Stages) -> None:
    """Without a session a page leads to the sign-in; no path leads out of the documentation."""
    stage = await stages()
    assert (await stage.ask("GET", "/dashboard/docs/runbook")).status == 303
    headers = await stage.sign_in("control-room")
    for path in ("../../../pyproject.toml", "%2e%2e/%2e%2e/pyproject.toml", "//etc/passwd", "site.css"):
        assert (await stage.ask("GET", f"/dashboard/docs/{path}", headers=headers)).status == 404, path
    image = await stage.ask("GET", "/dashboard/docs/images/dashboard-records.png", headers=headers)
    assert (image.status, image.header("content-type")) == (200, "image/png")


ALERTS = re.compile(r'(?:alerts\.(?:update|event)|HealthFinding)\(\s*(?:HealthLevel\.\w+,\s*|level,\s*)?f?"([a-z_]+)"')


def test_every_alarm_has_its_entry() -> None:
    """Each name by which the node raises or shows something is a place in the runbook."""
    source = Path(__file__).parents[2] / "src/bsfg/node"
    names = {name for path in source.rglob("*.py") for name in ALERTS.findall(path.read_text())}
    names |= {
        "link_autonomous",
        "link_reconciliation",
        "link_dead",
        "peer_absent",
        "stream_unavailable",
        "hash_collision",
    }
    assert len(names) > 25
    page = rendered((help_folder() / "runbook.md").read_text(), "runbook")
    assert sorted(name for name in names - {"link_"} if f'<code id="{name}">' not in page) == []


@pytest.mark.parametrize("path", sorted(help_folder().rglob("*.md")), ids=lambda path: path.stem)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    """Every link of a page to another page, and to a heading in it, is one that the node serves."""
    folder = help_folder()
    pages = {each.relative_to(folder).as_posix().removesuffix(".md"): each for each in folder.rglob("*.md")}
    page = rendered(path.read_text(), path.relative_to(folder).as_posix().removesuffix(".md"))
    for target in re.findall(r'href="/dashboard/docs/([^"]+)"', page):
        name, _, part = target.partition("#")
        assert name in pages, target
        if part:
            assert f'id="{part}"' in rendered(pages[name].read_text(), name), target


def test_an_option_stays_whole() -> None:
    """A line does not end behind the hyphens of an option; a longer piece of code may break."""
    made = rendered("`--with-keys`, `bsfg status --json`", "index")
    assert '<code class="whole">--with-keys</code>' in made and "<code>bsfg status --json</code>" in made


def test_a_cell_says_what_it_is() -> None:
    """On a phone, where columns are not beside each other, a cell has the name of its own; the first needs none."""
    made = rendered(
        "| Key | Default | `Kind` |\n|---|---|---|\n| a | 1 | |\n\n| Word | Meaning |\n|---|---|\n| b | c |\n", "index"
    )
    assert '<td>a</td>\n<td data-label="Default">1</td>\n<td></td>' in made and "<td>b</td>\n<td>c</td>" in made


def test_markup_in_a_page_stays_text() -> None:
    """A page brings no HTML of its own."""
    made = rendered("# A\n\n<script>x</script> <b>y</b>\n\n[x](javascript:alert(1))\n", "index")
    assert "<script>" not in made and "<b>" not in made and 'href="javascript' not in made
