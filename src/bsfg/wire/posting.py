"""One POST to somebody else's server: for alerts, and for facts that a webhook is given.

It goes where it is told to go and nowhere else, in plaintext by no proxy, and takes no longer than its time. What
answers may be anybody's: it is not followed elsewhere, little of its body is read, and one that gives a byte at a time
is cut off.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import URLError

ANSWER_BYTES_MAX = 4_096


@dataclass(frozen=True, slots=True)
class PostAnswer:
    """What was answered: the status, when to come again if it says so, and how the body of a refusal begins."""

    status: int
    retry_after: str | None
    begins: bytes

    @property
    def is_good(self) -> bool:
        """Whether what was posted is taken."""
        return 200 <= self.status < 300


def trusting(authorities: Path | None = None) -> ssl.SSLContext:
    """Give what checks certificates by a file of authorities, or by the system's.

    To read the system's takes as long as a dozen deliveries, so it is read again when it is another file. Raises an
    `OSError` when a file holds no certificate.
    """
    paths = ssl.get_default_verify_paths()
    files = [paths.cafile, paths.capath] if authorities is None else [authorities]
    return _trusting(authorities, *(_state_of(file) for file in files if file is not None))


@lru_cache(maxsize=8)
def _trusting(authorities: Path | None, *states: object) -> ssl.SSLContext:
    del states  # another state of the files is another question
    return ssl.create_default_context(cafile=None if authorities is None else os.fspath(authorities))


def _state_of(file: str | Path) -> object:
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Posting:
    """One delivery over HTTP; certificates are checked by the ``authorities`` of a file, or by the system's."""

    def __init__(self, timeout_seconds: float, authorities: Path | None = None) -> None:
        self._timeout_seconds, self._authorities = timeout_seconds, authorities
        self._connections: list[HTTPConnection] = []
        self._late = False

    def post(self, url: str, data: bytes, headers: Mapping[str, str] | None = None) -> PostAnswer:
        """Deliver JSON and give the answer, whatever it is; raises an `OSError` when there is none."""
        opener = urllib.request.OpenerDirector()
        if url.lower().startswith("http:"):
            # Plaintext is for this machine, and none of a proxy's business.
            handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _Http(self._opened)]
        else:
            trust = trusting(self._authorities)
            handlers = [urllib.request.ProxyHandler(), _Http(self._opened), _Https(self._opened, trust)]
        for handler in handlers:
            opener.add_handler(handler)
        sent = {"Content-Type": "application/json", **(headers or {}), "Connection": "close"}
        watch = threading.Timer(self._timeout_seconds, self._cut)
        watch.daemon = True
        watch.start()
        try:
            with opener.open(urllib.request.Request(url, data, sent), timeout=self._timeout_seconds) as answer:
                refused = not 200 <= answer.status < 300
                begins = answer.read(ANSWER_BYTES_MAX) if refused else b""
                found = PostAnswer(answer.status, answer.headers.get("Retry-After"), begins)
        except (OSError, HTTPException) as error:
            if self._late:
                raise TimeoutError("there was no answer in time") from None
            if isinstance(error, URLError) and isinstance(error.reason, OSError):
                raise error.reason from None
            raise OSError(f"{type(error).__name__}: {error}") from None
        finally:
            watch.cancel()
        if self._late:
            # Headers that were cut off look like headers that ended.
            raise TimeoutError("there was no answer in time")
        return found

    def _opened(self, connection: HTTPConnection) -> None:
        self._connections.append(connection)

    def _cut(self) -> None:
        self._late = True
        for connection in self._connections:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _kept(kind: type[HTTPConnection], opened: Callable[[HTTPConnection], None]) -> Any:
    def make(host: str, **options: Any) -> HTTPConnection:
        connection = kind(host, **options)
        opened(connection)
        return connection

    return make


class _Http(urllib.request.HTTPHandler):
    def __init__(self, opened: Callable[[HTTPConnection], None]) -> None:
        super().__init__()
        self._opened = opened

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_kept(HTTPConnection, self._opened), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, opened: Callable[[HTTPConnection], None], trust: ssl.SSLContext) -> None:
        super().__init__()
        self._opened, self._trust = opened, trust

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_kept(HTTPSConnection, self._opened), req, context=self._trust)
