"""What the tests of the dashboard share: coroutines as tests, nodes and browsers that are closed behind them."""

import asyncio
import inspect
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.dashboard.stage import Stage


class Stages:
    """Opens nodes for one test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.stack = AsyncExitStack()

    async def __call__(self, **settings: object) -> Stage:
        """Open a node; see `Stage` for what can be set."""
        self._count += 1
        return await self.stack.enter_async_context(Stage(self._folder / f"stage-{self._count}", **settings))  # type: ignore[arg-type]


@pytest.fixture
def stages(tmp_path: Path) -> Stages:
    """Give what opens nodes; they are closed when the test ends."""
    return Stages(tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_run(pyfuncitem.obj, arguments))
    return True


async def _run(test: object, arguments: dict[str, object]) -> None:
    async with AsyncExitStack() as stack:
        for value in arguments.values():
            if isinstance(value, Stages):
                await stack.enter_async_context(value.stack)
        await test(**arguments)  # type: ignore[operator]
