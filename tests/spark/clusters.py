"""A standalone cluster on loopback, its calls sealed by a secret or not, and who listens to them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyspark
from tests.spark.replicating import wait_until

from bsfg.spark.cluster import SEALED
from bsfg.spark.session import java_in_use
from bsfg.testing.ports import free_port

CLASSES = "org.apache.spark.deploy"
SECRET = "0123456789abcdef-a-secret-of-tests-alone"
HIDDEN_HOST = "127.0.0.1"


@dataclass
class Cluster:
    """A master and its workers, each in a process group of its own with its executors."""

    url: str
    folder: Path
    secret_file: Path | None
    master: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def recipe(self, *more: str) -> list[str]:
        """Give the options that the guide names for a standalone cluster, and what a small machine needs."""
        sealed = ["--allow-clear-rpc"] if self.secret_file is None else ["--secret-file", str(self.secret_file)]
        small = ["--conf", "spark.executor.memory=512m", "--conf", "spark.driver.host=127.0.0.1"]
        return ["--master", self.url, *sealed, *small, *more]

    def kill_worker(self) -> None:
        """Kill a worker and its executors, as a machine that is gone."""
        kill(self.workers.pop())


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


@contextmanager
def standalone(
    folder: Path, *, sealed: bool = True, environment: Mapping[str, str] | None = None, cores: int = 2
) -> Iterator[Cluster]:
    """Run a master and two workers; ``environment`` is all that they have of the machine's."""
    port, home = free_port(), Path(pyspark.__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    with java_in_use():
        java = {"JAVA_HOME": os.environ["JAVA_HOME"]}
    given = {**(os.environ if environment is None else environment), **java}
    given |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    settings = folder / "spark-defaults.conf"
    settings.write_text("".join(f"{name} {value}\n" for name, value in SEALED.items()) if sealed else "")
    secret_file = None
    if sealed:
        secret_file = folder / "secret"
        secret_file.write_text(f"{SECRET}\n")
        with settings.open("a") as file:
            file.write(f"spark.authenticate.secret {SECRET}\n")
    for path in folder.iterdir():
        path.chmod(0o600)

    def start(name: str, log: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(home / "bin" / "spark-class"), f"{CLASSES}.{name}", *arguments]
        command += ["--properties-file", str(settings)]
        with (folder / log).open("wb") as said:
            return subprocess.Popen(command, env=given, stdout=said, stderr=said, start_new_session=True, cwd=folder)

    where = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    cluster = Cluster(f"spark://127.0.0.1:{port}", folder, secret_file, start("master.Master", "master.log", *where))
    try:
        for number in range(2):
            work = ["--webui-port", "0", "--work-dir", str(folder / f"worker-{number}")]
            size = ["--cores", str(cores), "--memory", "1g"]
            cluster.workers.append(start("worker.Worker", f"worker-{number}.log", cluster.url, *size, *work))
        # One that is slow to be answered registers again.
        known, log = re.compile(r"Registering worker (\S+)"), folder / "master.log"
        wait_until(lambda: len(set(known.findall(log.read_text()))) == 2, "the workers to register")
        yield cluster
    finally:
        for process in (*cluster.workers, cluster.master):
            kill(process)


class Listener:
    """Stands between a driver and everybody who calls it, passes all bytes on, and keeps them."""

    HOST = "127.0.0.2"

    def __init__(self, *ports: int) -> None:
        self.heard = bytearray()
        self.calls = 0
        self._doors = [socket.create_server((self.HOST, port)) for port in ports]
        self._ends = list[socket.socket]()
        self._threads = list[threading.Thread]()
        for door in self._doors:
            self._begin(self._serve, door)

    def _begin(self, work: Callable[..., None], *given: object) -> None:
        self._threads.append(threading.Thread(target=work, args=given, daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Let nobody in any more, and hang up."""
        for each in (*self._doors, *self._ends):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(10)
        for each in (*self._doors, *self._ends):
            each.close()

    def _serve(self, door: socket.socket) -> None:
        port = door.getsockname()[1]
        with suppress(OSError):
            while True:
                caller, _ = door.accept()
                self._ends.append(caller)
                self.calls += 1
                try:
                    driver = socket.create_connection((HIDDEN_HOST, port))
                except OSError:
                    caller.close()
                    continue
                self._ends.append(driver)
                for source, target in ((caller, driver), (driver, caller)):
                    self._begin(self._pass, source, target)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
