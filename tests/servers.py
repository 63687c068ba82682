"""The servers that backends need, one of each for a whole run of a test process."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pytest

from bsfg.testing.nats import PackagedNats
from bsfg.testing.postgres import PackagedServer

_servers: list[PackagedServer] = []
_nats: list[PackagedNats] = []


def postgres() -> PackagedServer:
    """Give the server of this process."""
    if not _servers:
        _servers.append(PackagedServer())
    return _servers[0]


def jetstream() -> PackagedNats:
    """Give the NATS server of this process."""
    if not _nats:
        _nats.append(PackagedNats().start())
    return _nats[0]


async def wait_for_standby(server: PackagedServer, name: str) -> None:
    """Have every commit wait for a standby of a name, or none of them."""
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    server.execute("SELECT pg_reload_conf()")
    if name:
        # The server takes note of it in its own time.
        probing = asyncio.ensure_future(asyncio.to_thread(_commit_until_ended, server.dsn))
        [pid] = await waiting_for_standby(server)
        server.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
        await probing


def _commit_until_ended(dsn: str) -> None:
    with suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as connection:
        while True:
            connection.execute("SELECT pg_logical_emit_message(true, 'probe', 'probe')")


async def waiting_for_standby(server: PackagedServer) -> list[int]:
    """Wait until commits wait for a standby, and give the numbers of their connections."""
    for _ in range(1_000):
        if found := server.execute("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"):
            return [pid for (pid,) in found]
        await asyncio.sleep(0.02)
    raise AssertionError("no commit waits for a standby")


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    for server in _servers:
        server.stop()
    for nats in _nats:
        nats.stop()
