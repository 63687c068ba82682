"""What the tests of the dashboard share: nodes and browsers that are closed behind them."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.coroutines import ClosedInLoop
from tests.dashboard.stage import Stage


class Stages(ClosedInLoop):
    """Opens nodes for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._stack = AsyncExitStack()

    async def __call__(self, **settings: object) -> Stage:
        """Open a node; see `Stage` for what can be set."""
        self._count += 1
        return await self._stack.enter_async_context(Stage(self._folder / f"stage-{self._count}", **settings))  # type: ignore[arg-type]

    async def close(self) -> None:
        """Close them, the last first."""
        await self._stack.aclose()


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    """Give what opens nodes; they are closed when the test ends."""
    return Stages(tmp_path)
