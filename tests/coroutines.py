"""Runs tests that are coroutines, each in an event loop of its own, and closes there what was opened there."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

import pytest


class ClosedInLoop(ABC):
    """What a fixture gives to a test, and must be closed before the event loop of the test ends."""

    @abstractmethod
    async def close(self) -> None:
        """Close everything that was opened."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; others are not our business."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        async with AsyncExitStack() as closing:
            for value in arguments.values():
                if isinstance(value, ClosedInLoop):
                    closing.push_async_callback(value.close)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run())
    return True
