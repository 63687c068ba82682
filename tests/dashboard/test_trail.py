"""The audit trail on the dashboard: operators see who did what, and nobody else does."""

import json
import os
from pathlib import Path

from playwright.async_api import expect
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import browsing

HOLD = {"link": "from-enterprise", "side": "receiver", "reason": "works on the firewall"}
FORM = {"content-type": "application/x-www-form-urlencoded"}


async def test_only_operators_are_given_the_trail(stages: Stages) -> None:
    """An operator reads what was done, sign-ins included; a viewer is refused, and that is recorded as well."""
    stage = await stages()
    await stage.ask("POST", "/dashboard/sign-in", b"token=wrong", headers={**FORM, "origin": stage.origin})
    operator, viewer = await stage.sign_in("shift-lead"), await stage.sign_in("control-room")
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=operator)).status == 200
    for path in ("trail", "trail.jsonl"):
        assert (await stage.ask("GET", f"/dashboard/api/{path}")).status == 401
        assert (await stage.ask("GET", f"/dashboard/api/{path}", headers=viewer)).status == 403
    await stage.ask("POST", "/dashboard/sign-out", b"{}", headers=viewer)
    await stage.node.trail.close()
    rows = (await stage.ask("GET", "/dashboard/api/trail", headers=operator)).json()["rows"]
    seen = {(row["action"], row["identity"], row["outcome"]) for row in rows}
    assert seen >= {
        ("gate_held", "token:shift-lead", "done"),
        ("signed_in", "token:shift-lead", "done"),
        ("signed_in", "token:control-room", "done"),
        ("signed_out", "token:control-room", "done"),
        ("sign_in_refused", "stranger", "refused"),
        ("request_refused", "token:control-room", "refused"),
    }
    lines = (await stage.ask("GET", "/dashboard/api/trail.jsonl", headers=operator)).body.splitlines()
    assert [json.loads(line)["number"] for line in lines] == sorted(row["number"] for row in rows)


async def test_an_operator_looks_at_the_trail(stages: Stages, tmp_path: Path) -> None:
    """The tab is there for an operator and not for a viewer, and shows who, what and why."""
    stage = await stages()
    operator = await stage.sign_in("shift-lead")
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=operator)).status == 200
    async with browsing() as browser:
        page = await stage.signed_in(browser, "shift-lead", viewport={"width": 1280, "height": 900})
        await page.click("#trail-tab")
        held = page.locator('tr[data-trail="gate_held"]')
        await expect(held).to_contain_text("works on the firewall")
        await expect(held).to_contain_text("shift-lead")
        await page.screenshot(path=os.environ.get("BSFG_TRAIL_PICTURE", str(tmp_path / "trail.png")), full_page=True)
        assert page.errors == []  # type: ignore[attr-defined]
        other = await stage.signed_in(browser, "control-room")
        await expect(other.locator("#trail-tab")).to_be_hidden()
