"""Sessions over a restart of the node: who was signed in stays so, and nobody who should be out comes back."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from playwright.async_api import expect
from tests.dashboard.conftest import Stages
from tests.dashboard.stage import Stage, browsing
from tests.dashboard.test_live import Watching
from tests.dashboard.test_parts import HandClock

import bsfg
from bsfg.node.dashboard import sessions
from bsfg.node.dashboard.sessions import SessionFile, Sessions
from bsfg.stores.log.backup import copy_folder
from bsfg.stores.log.files import SESSIONS, DiskFiles
from bsfg.wire.service import Caller

HOLD = {"link": "from-enterprise", "side": "receiver", "reason": "works on the firewall"}


async def status_of(stage: Stage, headers: dict[str, str]) -> int:
    """Ask with a session, and give how it is answered."""
    return (await stage.ask("GET", "/dashboard/api/session", headers=headers)).status


def kept(stage: Stage) -> Path:
    """Give where the sessions are kept."""
    return stage.config.data_folder / SESSIONS


async def test_a_restart_signs_nobody_out(stages: Stages) -> None:
    """A display looks on, an operator acts from the page he had open; the file is worth nothing to whoever reads it."""
    stage = await stages()
    viewer, operator = await stage.sign_in("control-room"), await stage.sign_in("shift-lead")
    await stage.restart()
    assert await status_of(stage, viewer) == 200
    assert (await stage.ask("POST", "/dashboard/api/act/hold", HOLD, headers=operator)).status == 200
    assert stage.events("gate_held")[-1]["by"] == "token:shift-lead"
    assert stat.S_IMODE(kept(stage).stat().st_mode) == 0o600
    written = kept(stage).read_text()
    for headers in (viewer, operator):
        assert headers["cookie"].partition("=")[2] not in written and headers["x-bsfg-page-key"] not in written


async def test_who_signed_out_stays_out_also_after_a_kill(stages: Stages) -> None:
    """What is on the disk when the answer comes already knows of it, so that no moment of a crash brings him back."""
    stage = await stages()
    stays, leaves = await stage.sign_in("control-room"), await stage.sign_in("control-room")
    assert (await stage.ask("POST", "/dashboard/sign-out", {}, headers=leaves)).status == 200
    at_the_kill = kept(stage).read_bytes()
    http_port = stage.http_port = stage.node.http_port
    await stage.node.stop()
    kept(stage).write_bytes(at_the_kill)
    await stage.start()
    assert stage.node.http_port == http_port
    assert [await status_of(stage, each) for each in (stays, leaves)] == [200, 401]


@pytest.mark.parametrize("change", ["hash", "role", "row"])
async def test_another_token_ends_the_sessions_of_the_old_one(stages: Stages, change: str) -> None:
    """A new token, another role or no row: its sessions end over a restart, for good, and those of others do not."""
    stage = await stages()
    gone, stays = await stage.sign_in("control-room"), await stage.sign_in("shift-lead")
    before = dict(stage.tokens), dict(stage.roles)
    if change == "hash":
        stage.tokens["control-room"] = sessions.make()
    elif change == "role":
        stage.roles["control-room"] = "operator"
    else:
        del stage.roles["control-room"]
    await stage.restart()
    assert [await status_of(stage, each) for each in (gone, stays)] == [401, 200]
    stage.tokens, stage.roles = before
    await stage.restart()
    assert [await status_of(stage, each) for each in (gone, stays)] == [401, 200]


async def test_another_token_ends_the_sessions_of_the_old_one_at_once(stages: Stages) -> None:
    """When the configuration is taken up while the node runs, whoever signed in with the old token is out."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    row = replace(stage.config.tokens["control-room"], hash=sessions.hash_of(sessions.make()))
    assert stage.node.pages is not None
    async with Watching(stage, headers) as watching:
        await watching.next()
        stage.node.pages.take_tokens({**stage.config.tokens, "control-room": row})
        assert await status_of(stage, headers) == 401
        while (await watching.next())[0] != "ended":
            pass


async def test_a_backup_has_no_sessions(stages: Stages, tmp_path: Path) -> None:
    """What is restored knows of nobody who was signed in when it was copied."""
    stage = await stages()
    await stage.sign_in("control-room")
    assert kept(stage).exists()
    copy_folder(DiskFiles(stage.config.data_folder), DiskFiles(tmp_path / "copy"))
    assert not (tmp_path / "copy" / SESSIONS).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sessions": [{"token": 7}]}', b"\xff" * 100, b"null"])
async def test_a_file_that_is_none_signs_people_out_and_nothing_else(stages: Stages, content: bytes) -> None:
    """The node starts, says so, and everybody signs in again."""
    stage = await stages()
    headers = await stage.sign_in("control-room")
    stage.http_port = stage.node.http_port
    await stage.node.stop()
    kept(stage).write_bytes(content)
    await stage.start()
    assert await status_of(stage, headers) == 401
    assert [each["level"] for each in stage.events("sessions_not_kept")] == ["warning"]
    await stage.sign_in("control-room")
    await stage.restart()
    assert len(orjson.loads(kept(stage).read_bytes())["sessions"]) == 1


def opened(folder: Path, clock: HandClock, session_seconds: float = 100.0) -> Sessions:
    """Open the sessions of a folder as a node does at its start; b may act."""
    sessions = Sessions(clock, session_seconds, 40.0, SessionFile(folder))
    sessions.load(lambda name: name if name != "gone" else None, lambda caller: caller.token == "b")
    return sessions


def test_time_goes_on_while_the_node_is_away(tmp_path: Path) -> None:
    """The end stays where it was, idle time counts from the last use, and a shorter setting counts at once."""
    (tmp_path / "node").mkdir()
    clock = HandClock()
    sessions = opened(tmp_path, clock)
    viewer, _ = sessions.begin(Caller(token="a"), may_act=False, mark="a")
    operator, session = sessions.begin(Caller(token="b"), may_act=True, mark="b")
    clock.ms += 30_000
    sessions.used(session)
    sessions.keep()
    clock.ms += 39_999
    again = opened(tmp_path, clock)
    assert again.find(viewer) is not None and again.find(operator) is not None
    clock.ms += 1
    assert again.find(operator) is None and opened(tmp_path, clock).find(operator) is None
    clock.ms += 29_999
    assert opened(tmp_path, clock).find(viewer) is not None
    shorter = opened(tmp_path, clock, 0.001)
    assert shorter.find(viewer) is not None
    clock.ms += 1
    assert shorter.find(viewer) is None and opened(tmp_path, clock).find(viewer) is None


def test_a_clock_that_was_set_back_gives_no_more_than_one_session(tmp_path: Path) -> None:
    """However far the clock went back while the node was away, a session has no longer than a new one."""
    (tmp_path / "node").mkdir()
    clock = HandClock(ms=10_000_000)
    sessions = opened(tmp_path, clock)
    cookie, _ = sessions.begin(Caller(token="a"), may_act=False, mark="a")
    sessions.keep()
    clock.ms = 1_000
    again = opened(tmp_path, clock)
    clock.ms += 99_999
    assert again.find(cookie) is not None
    clock.ms += 1
    assert again.find(cookie) is None


def test_only_sessions_of_tokens_are_kept(tmp_path: Path) -> None:
    """Whoever has a certificate gets a new session by loading the page, so there is nothing to keep of him."""
    (tmp_path / "node").mkdir()
    clock = HandClock()
    sessions = opened(tmp_path, clock)
    cookie, _ = sessions.begin(Caller(), may_act=True)
    sessions.keep()
    assert opened(tmp_path, clock).find(cookie) is None


def test_what_cannot_be_written_is_not_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a sign-out cannot be written, the file that still knows the session is removed."""
    (tmp_path / "node").mkdir()
    clock = HandClock()
    sessions = opened(tmp_path, clock)
    cookie, _ = sessions.begin(Caller(token="a"), may_act=False, mark="a")
    sessions.keep()
    sessions.end(cookie)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_room)
        full.setattr(os, "fdatasync", _no_room)
        sessions.keep()
    assert opened(tmp_path, clock).find(cookie) is None


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_display_on_a_wall_goes_on_after_a_restart(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page comes back by itself, without a form and without a hand; after an upgrade it is the new page."""
    stage = await stages()
    async with browsing() as browser:
        page = await stage.signed_in(browser, "control-room")
        stage.http_port = stage.node.http_port
        await stage.node.stop()
        await expect(page.locator("#live")).to_have_text("Not connected")
        await stage.start()
        await expect(page.locator("#live")).to_have_text("Live")
        assert page.url == f"{stage.origin}/dashboard/"
        await expect(page.locator("#who-name")).to_have_text("control-room")
        await page.evaluate("document.body.dataset.old = 'yes'")
        await stage.node.stop()
        await expect(page.locator("#live")).to_have_text("Not connected")
        monkeypatch.setattr(bsfg, "__version__", "99.0")
        await stage.start()
        await expect(page.locator("body[data-old]")).to_have_count(0)
        await expect(page.locator("#foot")).to_contain_text("bsfg 99.0")
