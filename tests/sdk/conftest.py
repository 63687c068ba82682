"""What the tests of the SDK share: coroutines as tests, sites inside this process, and zones as processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, certificates
from tests.wire.conftest import Sites

from bsfg.sdk.endpoint import Endpoint


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    """Give what opens nodes inside this process; they are closed when the test ends."""
    return Sites(tmp_path)


@pytest.fixture
def zone(tmp_path: Path) -> Iterator[Zone]:
    """Give a zone with a node in a process of its own, under mutual TLS; it runs."""
    cleanup = Cleanup()
    made = Zone("plant", tmp_path, certificates(tmp_path, "plant"))
    made.write()
    cleanup.zone(made)
    made.start()
    yield made
    cleanup.run()


def endpoint(zone: Zone, role: str = "producer") -> Endpoint:
    """Give the way to a zone's node as one of its users."""
    files = zone.files(f"{zone.name}-{role}")
    return Endpoint(f"127.0.0.1:{zone.port}", files.ca, files.certificate, files.key, f"{zone.name}-bsfg")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(_run(pyfuncitem.obj, arguments))
    return True


async def _run(test: Callable[..., object], arguments: dict[str, object]) -> None:
    try:
        await test(**arguments)  # type: ignore[misc]
    finally:
        for value in arguments.values():
            if isinstance(value, Sites):
                await value.close()
