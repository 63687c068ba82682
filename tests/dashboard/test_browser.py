"""The dashboard in a real browser: what people see, what they may do, and what nobody can do to them."""

import asyncio
import re
from pathlib import Path

import pytest
from playwright.async_api import Page, expect
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import browsing, opened
from tests.dashboard.trouble import HOSTILE, trouble

from bsfg.gate import Mode
from bsfg.node.dashboard.feed import SeriesHistory
from bsfg.testing.facts import batch

SCROLLED = """async () => {
    for (let frame = 0; frame < 4; frame += 1) await new Promise(requestAnimationFrame);
    return scrollY;
}"""
WIDTHS = "(all) => all.map((each) => [each.scrollWidth, each.clientWidth])"

HEIGHTS = "(all) => all.map((each) => each.offsetHeight)"
SCALES = """async () => {
    const { linearScale, logScale } = await import('/dashboard/static/js/chart.js');
    const wrong = [];
    const check = (name, values, scale, room) => {
        const shares = values.map(scale.share);
        if (shares.some((share) => !(share >= 0 && share <= 1))) wrong.push([name, values, shares]);
        if (scale.ticks.length < 2 || scale.ticks.length > 8) wrong.push([name, values, scale.ticks]);
        if (values.some((value) => value > scale.ticks.at(-1) * room)) wrong.push([name, values, 'above']);
    };
    for (const values of [[], [0], [1e-9], [0.004, 3], [99], [100], [101], [1e15], [0, 5, 1e6], [86400, 0.001]]) {
        check('linear', values, linearScale(values, 1), 1.0001);
        check('log', values, logScale(values), 1e5);
    }
    return wrong;
}"""
EVIL = """<body><script>
async function attack(target) {
  const body = JSON.stringify({link: 'from-enterprise', side: 'receiver', reason: 'evil'});
  for (const headers of [{}, {'content-type': 'text/plain'}]) {
    try {
      await fetch(target, { method: 'POST', credentials: 'include', mode: 'no-cors', headers, body });
    } catch { }
  }
  const form = document.createElement('form');
  Object.assign(form, { method: 'post', action: target, enctype: 'text/plain' });
  document.body.append(form);
  form.submit();
}
</script></body>"""


async def hold(page: Page, link: str, reason: str) -> None:
    """Hold a gate as an operator does."""
    await page.click(f'button[data-act="hold"][data-link="{link}"]')
    await page.fill("#dialog-reason", reason)
    await page.click("#dialog-confirm")


def settled(page: Page) -> None:
    """Insist that no script of the page failed."""
    assert page.errors == []  # type: ignore[attr-defined]


async def test_somebody_without_a_certificate_signs_in_with_a_token(stages: Stages) -> None:
    """The browser shows a form instead of an error of TLS; a wrong token is told so, a right one opens the page."""
    stage = await stages()
    async with browsing() as browser:
        page = await opened(browser, stage.origin)
        assert page.url == f"{stage.origin}/dashboard/sign-in"
        await expect(page.get_by_role("heading", name="plant-a")).to_be_visible()
        await page.fill("#token", "bsfg-wrong")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_have_text("That is not a token of this zone.")
        await page.fill("#token", stage.tokens["control-room"])
        await page.press("#token", "Enter")
        await expect(page.locator("#live")).to_have_text("Live")
        assert page.url == f"{stage.origin}/dashboard/"
        await expect(page.locator("#who-name")).to_have_text("control-room")
        await expect(page.locator("#who-role")).to_have_text("viewer")
        # The cookie is out of reach of any script.
        assert await page.evaluate("document.cookie") == ""
        settled(page)


async def test_a_certificate_needs_no_token(stages: Stages) -> None:
    """A browser with an operator's certificate is in at once; one with a producer's is told what it lacks."""
    stage = await stages(with_tokens=False)

    def shown(name: str) -> list[dict[str, str]]:
        files = stage.files(name)
        return [{"origin": stage.origin, "certPath": str(files.certificate), "keyPath": str(files.key)}]

    async with browsing() as browser:
        page = await opened(browser, stage.origin, client_certificates=shown("operator"))
        await expect(page.locator("#live")).to_have_text("Live")
        await expect(page.locator("#who")).to_contain_text("operator")
        await hold(page, "from-enterprise", "by certificate")
        await expect(page.locator("#toast")).to_have_text("from-enterprise is held.")
        assert stage.events("gate_held")[0]["by"] == "operator"
        settled(page)
        page = await opened(browser, stage.origin, client_certificates=shown("producer"))
        await expect(page.get_by_role("alert")).to_contain_text("it would need")
        await expect(page.locator("#token")).to_be_hidden()


async def judged_by(page: Page, expiry: str, days_left: int, hours_left: int) -> list[str]:
    """Ask the page what it makes of a certificate."""
    given = {"expiry": expiry, "days_left": days_left, "not_after_unix_ms": hours_left * 3_600_000}
    found: list[str] = await page.evaluate(
        """async (given) => {
            const [judge, format] = await Promise.all(
                ["judge", "format"].map((name) => import(`/dashboard/static/js/${name}.js`)));
            return [judge.certificateLevel(given), format.lifetime(given, 0)];
        }""",
        given,
    )
    return found


async def test_a_viewer_sees_everything_and_can_act_nowhere(stages: Stages) -> None:
    """All views are filled, and there is no button that would change something."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        for tile in ("autonomy", "lag", "throughput", "unconfirmed", "quarantine", "certificate"):
            await expect(page.locator(f'[data-tile="{tile}"]')).to_be_visible()
        await expect(page.locator("#map svg")).to_have_attribute(
            "aria-label", re.compile("from enterprise is autonomous")
        )
        await expect(page.locator("#gates tbody tr")).to_have_count(2)
        await expect(page.locator("#gates-note")).to_contain_text("for operators")
        await expect(page.locator(".chart")).to_have_count(4)
        await expect(page.locator('[data-finding="quarantine"]')).to_be_visible()
        await page.get_by_role("link", name="Buffers").click()
        await expect(page.locator(".lane-part")).to_have_count(2)
        await expect(page.locator("#consumers")).to_contain_text("enterprise.operational")
        await page.get_by_role("link", name="Records").click()
        await expect(page.locator(".record")).to_have_count(3)
        await expect(page.locator("#gaps tbody tr")).to_have_count(2)
        await page.get_by_role("link", name="Certificates").click()
        await expect(page.locator('[data-certificate="plant-a-bsfg"]')).to_contain_text("59 days")
        assert await judged_by(page, "ok", 0, 7) == ["ok", "7.0 h"], "what ends too soon is configured at the node"
        assert await judged_by(page, "warning", 80, 80 * 24) == ["alert", "80 days"]
        assert await judged_by(page, "expired", -1, -24) == ["alert", "expired"]
        assert await page.locator("[data-act]").count() == 0
        settled(page)


async def test_an_operator_holds_and_releases_with_a_reason(stages: Stages) -> None:
    """A hold without a reason is not accepted; with one it is carried out, shown at once, and recorded."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead")
        other = await stage.signed_in(browser, "control-room")
        await page.click('button[data-act="hold"][data-link="from-enterprise"]')
        await expect(page.get_by_role("dialog")).to_contain_text("This node stops pulling from enterprise.")
        await page.fill("#dialog-reason", "   ")
        await page.click("#dialog-confirm")
        await expect(page.locator("#dialog-problem")).to_contain_text("Say why")
        await page.fill("#dialog-reason", "firewall works until noon")
        await page.select_option("#dialog-duration", "7200")
        await page.click("#dialog-confirm")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        row = '#gates tr[data-link="from-enterprise"]'
        # Everybody who watches sees it, without loading anything again.
        for each in (page, other):
            await expect(each.locator(f"{row} .pill")).to_have_text("held")
            await expect(each.locator(row)).to_contain_text("firewall works until noon")
            await expect(each.locator(row)).to_contain_text("held by token:shift-lead, until")
            await expect(each.locator('[data-finding="gate_held"]')).to_be_visible()
            await expect(each.locator("#health")).to_have_text("1 alert")
        gate = stage.node.parts.links.gate("from-enterprise").gate
        assert (gate.mode, gate.reason, gate.held_by) == (Mode.HELD, "firewall works until noon", "token:shift-lead")
        await page.click('button[data-act="release"][data-link="from-enterprise"]')
        await page.fill("#dialog-reason", "done")
        await page.press("#dialog-reason", "Tab")
        await page.click("#dialog-confirm")
        await expect(other.locator(f"{row} .pill")).to_have_text("autonomous")
        assert [each["reason"] for each in stage.events("gate_held")] == ["firewall works until noon"]
        assert [(each["by"], each["reason"]) for each in stage.events("gate_released")] == [
            ("token:shift-lead", "done")
        ]
        settled(page)
        settled(other)


async def test_what_the_node_refuses_is_said_in_the_dialog(stages: Stages) -> None:
    """When somebody else was quicker, the dialog says what the node answered, and stays."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead")
        await hold(page, "from-enterprise", "first")
        await page.click('button[data-act="release"][data-link="from-enterprise"]')
        stage.node.parts.links.release("from-enterprise", "receiver", by="somebody", reason="quicker")
        await page.fill("#dialog-reason", "too late")
        await page.click("#dialog-confirm")
        await expect(page.locator("#dialog-problem")).to_contain_text("the gate is not held")
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        settled(page)


async def test_facts_appear_without_loading_the_page_again(stages: Stages) -> None:
    """What is appended shows within the next event, in numbers and in the charts' data."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        await page.evaluate("window.sameDocument = true")
        await page.get_by_role("link", name="Buffers").click()
        store = await stage.node.parts.store("operational")
        for number in range(3):
            await store.append(batch(500, first=500 * number, from_zone="plant-a"))
            await expect(page.locator("#buffers")).to_contain_text(f"0–{500 * (number + 1) - 1}")
        assert await page.evaluate("window.sameDocument")
        settled(page)


async def test_history_survives_a_reload(stages: Stages) -> None:
    """A page that is loaded again has its charts filled at once, from what the node kept."""
    stage = await stages()
    now = stage.node.clock.now_unix_ms()
    # The node may have noted its first moment already; these come before it, in a history of their own.
    history = stage.node.pages._watch.history = SeriesHistory()  # type: ignore[union-attr]
    for number in range(60):
        history.add(now - 5_000 * (60 - number), {("end", "operational", "store"): float(10 * number)})
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        curve = page.locator(".chart .plot path.s0").first
        await expect(curve).to_have_attribute("d", re.compile(r"(L[\d. ]+){50,}"))
        await page.reload()
        await expect(curve).to_have_attribute("d", re.compile(r"(L[\d. ]+){50,}"))


async def test_hostile_texts_are_shown_as_text(stages: Stages) -> None:
    """Markup in subjects, ids, details and reasons does nothing; what would hide or turn text is made visible."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead")
        await hold(page, "from-enterprise", HOSTILE)
        row = page.locator('#gates tr[data-link="from-enterprise"]')
        await expect(row).to_contain_text(HOSTILE)
        await expect(page.locator("#findings")).to_contain_text(HOSTILE)
        await page.get_by_role("link", name="Records").click()
        records = page.locator("#quarantine")
        await expect(records).to_contain_text(f"machine:{HOSTILE}")
        await expect(records).to_contain_text("batch:B\\u202e1042")
        await expect(page.locator("#gaps")).to_contain_text(HOSTILE)
        await page.locator(".record summary").first.click()
        await page.locator('.record button[data-act="drop"]').first.click()
        for frame in page.frames:
            assert await frame.locator("img[src=x]").count() == 0
        assert "owned" not in await page.title()
        assert await page.evaluate("document.querySelectorAll('main script').length") == 0
        settled(page)


async def test_the_browser_itself_refuses_foreign_scripts(stages: Stages) -> None:
    """Even if markup came in, the page's policy would run no script of it and load nothing from elsewhere."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        made = """() => { try { document.body.innerHTML = '<b>x</b>'; return 'made' } catch (e) { return e.name } }"""
        assert await page.evaluate(made) == "TypeError"
        loaded = """() => new Promise((done) => { const s = document.createElement('img');
            s.onerror = () => done('refused'); s.onload = () => done('loaded'); s.src = 'https://a.example/x.png'; })"""
        assert await page.evaluate(loaded) == "refused"
        outside = await opened(browser, "about:blank")
        await outside.set_content(f'<iframe src="{stage.origin}/dashboard/sign-in"></iframe>')
        frame = outside.frames[-1]
        await outside.wait_for_timeout(300)
        assert await frame.locator("#token").count() == 0


@pytest.mark.parametrize("origin", ["https://evil.example", "https://127.0.0.1:1"])
async def test_a_page_of_another_origin_cannot_act_for_an_operator(stages: Stages, origin: str) -> None:
    """Another site in the same browser, even one on the same machine, gets nothing done with the operator's cookie."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead")
        evil = await page.context.new_page()
        await evil.route(f"{origin}/**", lambda route: route.fulfill(body=EVIL, content_type="text/html"))
        await evil.goto(f"{origin}/")
        await evil.evaluate("(target) => void attack(target)", f"{stage.origin}/dashboard/api/act/hold")
        # The last of the attempts is a form that takes the whole window along.
        await evil.wait_for_url(f"{stage.origin}/**")
        assert "permission_denied" in await evil.content()
        await page.bring_to_front()
        await hold(page, "enterprise", "the real one")
        await expect(page.locator("#toast")).to_have_text("enterprise is held.")
        assert [each["reason"] for each in stage.events("gate_held")] == ["the real one"]


async def test_an_ended_session_leads_back_to_the_form(stages: Stages) -> None:
    """When its time is over the page leaves for the form and says why."""
    stage = await stages(more='[dashboard]\nsession = "3s"\n')
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        await page.wait_for_url("**/dashboard/sign-in?ended")
        await expect(page.get_by_role("alert")).to_have_text("Your session has ended.")


async def test_signing_out_leads_back_to_the_form(stages: Stages) -> None:
    """Whoever signs out is out: the page is the form, and the dashboard does not open again."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        await page.locator("#who summary").click()
        await page.get_by_role("button", name="Sign out").click()
        await page.wait_for_url("**/dashboard/sign-in")
        await page.goto(f"{stage.origin}/dashboard/")
        assert page.url.endswith("/dashboard/sign-in")


async def test_a_node_that_goes_away_is_not_shown_as_alive(stages: Stages) -> None:
    """When the node stops, the page keeps the last state, says since when, and looks stale."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        await stage.node.stop()
        await expect(page.locator("#live")).to_have_text("Not connected")
        await expect(page.locator("#health")).to_have_text("Unknown")
        await expect(page.locator("#banner")).to_contain_text("the last known state")
        await expect(page.locator("#gates")).to_contain_text("from-enterprise")
        settled(page)


async def test_quarantine_is_settled_in_the_browser(stages: Stages) -> None:
    """A retried fact is stored, a dropped one is gone; each leaves the list, and is recorded with its reason."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead")
        await page.get_by_role("link", name="Records").click()
        for act, left in (("retry", 2), ("drop", 1)):
            await page.locator(f'.record button[data-act="{act}"]').first.click()
            await page.fill("#dialog-reason", f"to {act}")
            await page.click("#dialog-confirm")
            await expect(page.locator(".record")).to_have_count(left)
        await expect(page.locator("#records-count")).to_have_text("1")
        assert [each["reason"] for each in stage.events("quarantine_retried")] == ["to retry"]
        assert [each["by"] for each in stage.events("quarantine_dropped")] == ["token:shift-lead"]
        assert (await (await stage.node.parts.forward("operational")).stats()).end == 1
        settled(page)


async def test_everything_works_with_the_keyboard_alone(stages: Stages) -> None:
    """From the form to a held gate without a mouse; the focus stays where it is while the page renews itself."""
    stage = await stages()
    async with browsing() as browser:
        page = await opened(browser, stage.origin)
        await page.keyboard.type(stage.tokens["shift-lead"])
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#gates button")
        for _ in range(30):
            await page.keyboard.press("Tab")
            if await page.evaluate("document.activeElement.dataset.act === 'hold'"):
                break
        await asyncio.gather(*(stage.node.pages._watch.greeting() for _ in range(2)))  # type: ignore[union-attr]
        before = await page.evaluate("document.querySelector('#foot').textContent")
        await expect(page.locator("#foot")).not_to_have_text(before)
        assert await page.evaluate("document.activeElement.dataset.act") == "hold"
        await page.keyboard.press("Enter")
        await page.keyboard.type("without a mouse")
        for _ in range(3):
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("#toast")).to_contain_text("is held.")
        chart = page.locator(".chart svg.plot").first
        await chart.focus()
        await page.keyboard.press("End")
        await expect(chart).to_have_attribute("aria-label", re.compile(r"Throughput, \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ?"))
        settled(page)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("tablet", {"viewport": {"width": 810, "height": 1080}, "has_touch": True, "color_scheme": "light"}),
        ("tablet-dark", {"viewport": {"width": 1080, "height": 810}, "has_touch": True, "color_scheme": "dark"}),
        ("phone", {"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "light"}),
    ],
)
async def test_it_fits_a_tablet_in_light_and_dark(
    stages: Stages, tmp_path: Path, name: str, context: dict[str, object]
) -> None:
    """Nothing is wider than the screen, buttons are large enough for fingers, and dark is dark."""
    stage = await stages()
    await trouble(stage)
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead", **context)
        for view in ("overview", "links", "buffers", "records", "history", "trail", "certificates"):
            await page.goto(f"{stage.origin}/dashboard/#{view}")
            await expect(page.locator(f'section[data-of="{view}"]')).to_be_visible()
            if view == "records":
                await expect(page.locator(".record")).to_have_count(3)
            assert await page.evaluate(SCROLLED) == 0, f"{view} begins where it is called by its name"
            width = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert width[0] <= width[1], (view, width)
            cut = page.locator(".map:visible, .scroll:visible")
            widths = await cut.evaluate_all(WIDTHS)
            assert all(wide <= room for wide, room in widths), (view, widths)
            heights = await page.locator("main button:visible, main .button:visible").evaluate_all(HEIGHTS)
            assert all(height >= 38 for height in heights)
            picture = tmp_path / f"{name}-{view}.png"
            assert len(await page.screenshot(path=picture, full_page=True)) > 10_000
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = max(int(part) for part in re.findall(r"\d+", ground)[:3]) < 64
        assert dark == (context["color_scheme"] == "dark")
        settled(page)


async def test_colours_can_be_chosen(stages: Stages) -> None:
    """The button goes from the system's colours to light to dark, and the choice is kept."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room", color_scheme="light")
        for expected in ("light", "dark"):
            await page.click("#theme")
            await expect(page.locator("html")).to_have_attribute("data-theme", expected)
        await page.reload()
        await expect(page.locator("html")).to_have_attribute("data-theme", "dark")


async def test_scales_hold_every_value(stages: Stages) -> None:
    """Axes have a few round ticks and hold what they show, from nothing to a lot, straight and by powers of ten."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        assert await page.evaluate(SCALES) == []


async def test_no_page_asks_for_anything_from_elsewhere(stages: Stages) -> None:
    """A plant has no internet: whatever the pages ask for is the node's own."""
    stage = await stages()
    async with browsing() as browser:
        page = await opened(browser, "about:blank")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(stage.origin)
        await page.fill("#token", stage.tokens["control-room"])
        await page.press("#token", "Enter")
        await page.wait_for_selector("#live.on")
        assert len(asked) > 20
        assert all(address.startswith(f"{stage.origin}/") for address in asked)
