"""The servers that backends need, one of each for a whole run of a test process."""

from collections.abc import Iterator

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


@pytest.fixture(scope="session", autouse=True)
def _servers_end() -> Iterator[None]:
    yield
    for server in _servers:
        server.stop()
    for nats in _nats:
        nats.stop()
