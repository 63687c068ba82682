"""A reload that breaks off half way says so, and is tried again until all of it counts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import CONFIG

from bsfg.config import ZoneConfig, load, parse, text_digest
from bsfg.errors import StorageUnavailable
from bsfg.node.alerts import AlertBoard
from bsfg.node.authorize import Matrix
from bsfg.node.reload import Reload, stamp_of
from bsfg.node.running import _as_it_is


async def test_what_could_not_be_opened_is_an_alert_and_tried_again(sites: Sites) -> None:
    """The storage is away while consumers are made: nobody is told that all is well, and nobody need touch the file."""
    site = await sites()
    path, text = site.folder / "zone.toml", CONFIG.format(stream="")
    path.write_text(text)
    config, taken, away = parse(text, path), list[ZoneConfig](), True

    async def apply(config: ZoneConfig, matrix: Matrix) -> None:
        if away:
            raise StorageUnavailable("the server is away")
        taken.append(config)

    def note(event: str, **fields: Any) -> None:
        pass

    alerts = AlertBoard("plant", config.alerts, site.parts.metrics, site.parts.clock, note)
    reload = Reload(config, site.parts, alerts, note, apply=apply)
    path.write_text(text + NEWCOMER)
    with pytest.raises(StorageUnavailable):
        await reload.take("operator")
    assert reload.status()["problem"] == "the server is away"
    assert [each["alert"] for each in alerts.active()] == ["access_not_reloaded"]
    for _ in range(2):
        await reload.look()
    assert not taken
    away = False
    for _ in range(2):
        await reload.look()
    assert [list(each.identities)[-1] for each in taken] == ["newcomer"]
    assert reload.status()["problem"] is None and not alerts.active()


NEWCOMER = '[identities.newcomer]\nzone = "plant"\nroles = ["viewer"]\n'


@pytest.mark.parametrize("when", ["before it began", "while it began"])
async def test_what_changes_before_the_node_is_up_is_taken_up(sites: Sites, when: str) -> None:
    """A node may read for minutes before it follows its files: until then it tells of the text that it went by."""
    site = await sites()
    path, text = site.folder / "zone.toml", CONFIG.format(stream="")
    path.write_text(text)
    config, taken = parse(text, path), list[ZoneConfig]()
    begun = stamp_of(config, None) if when == "while it began" else None
    path.write_text(text + NEWCOMER)

    async def apply(config: ZoneConfig, matrix: Matrix) -> None:
        taken.append(config)

    def note(event: str, **fields: Any) -> None:
        pass

    alerts = AlertBoard("plant", config.alerts, site.parts.metrics, site.parts.clock, note)
    reload = Reload(config, site.parts, alerts, note, apply=apply, begun=begun)
    assert reload.status()["digest"] == config.digest == text_digest(text.encode())
    await reload.look()
    assert [list(each.identities)[-1] for each in taken] == ["newcomer"]
    assert reload.status()["digest"] == text_digest((text + NEWCOMER).encode())
    await reload.look()
    await reload.look()
    assert len(taken) == 1


async def test_other_files_that_change_while_a_node_begins_are_taken_up(sites: Sites) -> None:
    """The stamp of the files is from before the first of them was read, a list of revoked certificates among them."""
    site = await sites()
    path, text = site.folder / "zone.toml", CONFIG.format(stream="")
    path.write_text(text)
    config, taken = parse(text, path), list[ZoneConfig]()

    async def apply(config: ZoneConfig, matrix: Matrix) -> None:
        taken.append(config)

    def note(event: str, **fields: Any) -> None:
        pass

    alerts = AlertBoard("plant", config.alerts, site.parts.metrics, site.parts.clock, note)
    begun = (*stamp_of(config, None)[:-1], "another list")
    reload = Reload(config, site.parts, alerts, note, apply=apply, begun=begun)
    await reload.look()
    assert len(taken) == 1


def test_a_node_that_stood_by_reads_its_file_again(tmp_path: Path) -> None:
    """One that cannot be used changes nothing; the node says so when it is up."""
    path, text = tmp_path / "zone.toml", CONFIG.format(stream="")
    path.write_text(text)
    config = load(path)
    path.write_text(text + NEWCOMER)
    assert "newcomer" in _as_it_is(config).identities
    path.write_text(text + "[nonsense")
    assert _as_it_is(config) is config


async def test_a_reload_is_done_to_its_end_though_whoever_asked_goes_away(sites: Sites) -> None:
    """An operator hangs up in the middle: what has begun to count counts as a whole, and nobody has to ask again."""
    site = await sites()
    path, text = site.folder / "zone.toml", CONFIG.format(stream="")
    path.write_text(text)
    config, begun, goes_on, taken = parse(text, path), asyncio.Event(), asyncio.Event(), list[ZoneConfig]()

    async def apply(config: ZoneConfig, matrix: Matrix) -> None:
        begun.set()
        await goes_on.wait()
        taken.append(config)

    def note(event: str, **fields: Any) -> None:
        pass

    alerts = AlertBoard("plant", config.alerts, site.parts.metrics, site.parts.clock, note)
    reload = Reload(config, site.parts, alerts, note, apply=apply)
    before = reload.status()["digest"]
    path.write_text(text + NEWCOMER)
    asking = asyncio.create_task(reload.take("operator"))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    goes_on.set()
    await asyncio.wait_for(reload.take("operator"), 30)
    assert [list(each.identities)[-1] for each in taken] == ["newcomer", "newcomer"]
    assert reload.status()["digest"] != before


async def test_a_reload_ends_with_the_node(sites: Sites) -> None:
    """A node that stops waits for no reload."""
    site = await sites()
    path, text = site.folder / "zone.toml", CONFIG.format(stream="")
    path.write_text(text)
    config, begun = parse(text, path), asyncio.Event()

    async def apply(config: ZoneConfig, matrix: Matrix) -> None:
        begun.set()
        await asyncio.Event().wait()

    def note(event: str, **fields: Any) -> None:
        pass

    alerts = AlertBoard("plant", config.alerts, site.parts.metrics, site.parts.clock, note)
    reload = Reload(config, site.parts, alerts, note, apply=apply)
    reload.start()
    reload.ask()
    await begun.wait()
    await asyncio.wait_for(reload.stop(), 30)
