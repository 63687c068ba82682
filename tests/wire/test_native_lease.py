"""The native engine's hold on its link: a bad moment of the board does not end it."""

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import CONFIG, until

from bsfg.node import native
from bsfg.node.board import Board
from bsfg.node.config import parse
from bsfg.node.native import NativeHandoff


async def test_a_lease_that_could_not_be_kept_is_kept_again(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw is told, and the lease is renewed the next time; else the link would stand still."""
    monkeypatch.setattr(native, "LEASE_RENEW_SECONDS", 0.001)
    site = await sites()
    board, renewed, noted = site.parts.board, [], list[str]()
    renew = Board.renew

    def unlucky(*given: object) -> object:
        renewed.append(given)
        if len(renewed) == 2:
            raise OSError(28, "no space left on device")
        return renew(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Board, "renew", unlucky)
    [link] = parse(CONFIG.format(stream=""), site.folder / "zone.toml").links.values()
    handoff = NativeHandoff(link, site.parts, [], note=lambda event, **fields: noted.append(event))
    await handoff.start()
    try:
        await until(lambda: len(renewed) >= 4)
        assert board.holder(link.name) == "native"
        assert noted == ["lease_taken", "link_failed"]
    finally:
        await handoff.stop()
    assert board.holder(link.name) is None
