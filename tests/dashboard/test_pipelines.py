"""The pipelines on the dashboard: what each does, its last error, its next run, and that nobody runs it any more."""

import pytest
from playwright.async_api import expect
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import browsing

from bsfg.node import pipelines
from bsfg.wire.service import PipelineReport, PipelineState

TABLES = """
[pipelines.lake]
land = { stream = "operational", out = "lake" }
[pipelines.proof]
audit = { link = "from-enterprise" }
"""
HOSTILE = "<img src=x onerror=alert(1)> landed"


async def test_pipelines_are_shown_and_a_dead_one_as_dead(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """As their process tells; when it tells nothing any more nothing good is said of them."""
    # However long a browser takes to start, what was told is new until the test says else.
    monkeypatch.setattr(pipelines, "STALE_MS", 3_600_000)
    stage = await stages(more=TABLES)
    board = stage.node.parts.pipelines
    good = PipelineReport("lake", PipelineState.RUNNING, HOSTILE, runs=2, facts=1_234)
    failed = PipelineReport(
        "proof", PipelineState.FAILED, failures=3, failures_in_a_row=1, last_error="peer_unreachable: away"
    )
    board.take("run here", [good, failed])
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        lake, proof = page.locator('tr[data-pipeline="lake"]'), page.locator('tr[data-pipeline="proof"]')
        for text in ("running", HOSTILE, "1,234", "land"):
            await expect(lake).to_contain_text(text)
        for text in ("failed", "peer_unreachable: away", "never"):
            await expect(proof).to_contain_text(text)
        monkeypatch.setattr(pipelines, "STALE_MS", 0)
        await expect(lake).to_contain_text("dead")
        await expect(lake).to_contain_text("run here last told of it")
        await expect(lake).not_to_contain_text("landed")
