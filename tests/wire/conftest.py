"""What the tests of the wire share: sites that are closed behind them."""

from pathlib import Path
from typing import Any

import pytest
from tests.coroutines import ClosedInLoop
from tests.wire.site import Site


class Sites(ClosedInLoop):
    """Opens sites for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[Site] = []

    async def __call__(self, **settings: Any) -> Site:
        """Open a site; see `Site.open` for what can be set."""
        site = await Site.open(self._folder / f"site-{len(self._open)}", **settings)
        self._open.append(site)
        return site

    async def close(self) -> None:
        """Close all of them."""
        for site in reversed(self._open):
            await site.close()


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    """Give what opens sites; they are closed when the test ends."""
    return Sites(tmp_path)
