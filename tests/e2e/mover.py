"""A small process that does with a link what a pipeline does: it holds the lease and reports, until it is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.zones import Zone

from bsfg.errors import BsfgError, LeaseHeld
from bsfg.gate import Event
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.certs import issue
from bsfg.wire.connection import Connection
from bsfg.wire.service import LinkReport
from bsfg.wire.tls import TlsFiles, Watched

TTL_MS = 1_000
TURN_SECONDS = 0.2


class Mover:
    """The process; ``says`` is whether it reports what it does, or only keeps the lease."""

    def __init__(self, zone: Zone, link: str, *, says: bool = True) -> None:
        files = zone.files(f"{zone.name}-pipeline")
        names = (zone.port, zone.name, link, files.ca, files.certificate, files.key, int(says))
        self._process = subprocess.Popen([sys.executable, "-m", "tests.e2e.mover", *map(str, names)])

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


def allow_mover(zone: Zone) -> None:
    """Give a zone the identity that the process calls with."""
    name = f"{zone.name}-pipeline"
    issue(zone.certs, name, days=60, now=datetime.now(UTC), serves=False)
    zone.identities += f'\n[identities.{name}]\nzone = "{zone.name}"\nroles = ["pipeline"]\nstreams = ["*"]\n'


async def move(admin: AdminClient, link: str, says: bool) -> None:
    """Hold the lease of a link and report, for ever."""
    token = ""
    while True:
        with suppress(BsfgError):
            if not token:
                with suppress(LeaseHeld):
                    token = (await admin.acquire_lease(link, "mover", TTL_MS)).token
            await admin.renew_lease(link, token, TTL_MS)
            if says:
                await admin.report_link(LinkReport(link, "operational", event=Event.PEER_FOUND, lease=token))
                await admin.report_link(LinkReport(link, "operational", event=Event.BACKLOG_CLEARED, lease=token))
        await asyncio.sleep(TURN_SECONDS)


async def main() -> None:
    """Move the link that the arguments name."""
    port, zone, link, ca, certificate, key, says = sys.argv[1:]
    files = TlsFiles(Path(ca), Path(certificate), Path(key))
    connection = Connection(f"127.0.0.1:{port}", watched=Watched(files), server_name=f"{zone}-bsfg")
    async with AdminClient(connection) as admin:
        await move(admin, link, says == "1")


if __name__ == "__main__":
    asyncio.run(main())
