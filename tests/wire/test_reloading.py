"""A reload that breaks off half way says so, and is tried again until all of it counts."""

from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import CONFIG

from bsfg.config import ZoneConfig, parse
from bsfg.errors import StorageUnavailable
from bsfg.node.alerts import AlertBoard
from bsfg.node.authorize import Matrix
from bsfg.node.reload import Reload


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
    path.write_text(text + '[identities.newcomer]\nzone = "plant"\nroles = ["viewer"]\n')
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
