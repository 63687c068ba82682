"""What the tests of the wire share: coroutines as tests, and sites that are closed behind them."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.wire.site import Site


class Sites:
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(_run(pyfuncitem.obj, arguments))
    return True


async def _run(test: Callable[..., object], arguments: dict[str, object]) -> None:
    try:
        await test(**arguments)  # type: ignore[misc]
    finally:
        for value in arguments.values():
            if isinstance(value, Sites):
                await value.close()
