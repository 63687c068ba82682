"""What stands around all of the HTTP service: by which names it may be called, and headers that every answer carries.

A browser does what the page of anybody tells it, with its user's certificate or cookie. A page cannot choose the name
that its own requests carry, but it can have that name point here after it was loaded. So a request must name a host
that this node is really called by. And whatever is answered is data for whoever asked: unless an answer says otherwise
it is no page, runs nothing, is framed by nobody, and is kept nowhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote, urlsplit

from bsfg.errors import HostUnknown
from bsfg.printable import one_line
from bsfg.wire.answering import problem
from bsfg.wire.peer import names_in_pem
from bsfg.wire.tls import Watched

OPEN_PATHS = ("/healthz", "/readyz")
"""Monitors and load balancers ask these by whatever name or address they like; they tell nothing."""

NOSNIFF = ("x-content-type-options", "nosniff")
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
DATA_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": DATA_POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?", re.DOTALL)


class Hosts:
    """The names by which this node may be called: its own, those of its certificate, and those that were configured.

    With TLS an address is good, too: nobody can make an address lead elsewhere. Without TLS only this machine calls.
    """

    def __init__(self, names: Iterable[str], watched: Watched | None = None) -> None:
        self._names = frozenset(_plain(name) for name in names if name)
        self._watched = watched

    def knows(self, host_header: str) -> bool:
        """Tell whether a request with this ``Host`` is meant for this node; its port does not matter."""
        try:
            host = _plain(urlsplit(f"//{host_header}").hostname or "")
        except ValueError:
            return False
        if not host or "@" in host_header:
            return False
        try:
            return ipaddress.ip_address(host).is_loopback or self._watched is not None or host in self._names
        except ValueError:
            return host == "localhost" or any(_fits(host, name) for name in (*self._names, *self._certified()))

    def _certified(self) -> Iterable[str]:
        """Give the names in the certificate that is in use now."""
        if self._watched is None:
            return ()
        self._watched.refresh()
        found = _PEM.search(self._watched.material.certificate)
        return map(_plain, names_in_pem(found[0]).alternative_names) if found else ()


class Fence:
    """The ASGI application around all others."""

    def __init__(self, app: Any, hosts: Hosts | None, refused: Callable[[str], None] = lambda code: None) -> None:
        self._app, self._hosts, self._refused = app, hosts, refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on a request that is meant for this node, and complete the headers of the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in DATA_HEADERS.items()]
                headers = [*message["headers"], *(pair for pair in more if pair[0] not in given)]
                message = {**message, "headers": headers}
            await send(message)

        app = self._app if self._is_meant(scope) else self._misdirected(scope)
        await app(scope, receive, send_safely)

    def _is_meant(self, scope: Any) -> bool:
        return self._hosts is None or scope["path"] in OPEN_PATHS or self._hosts.knows(_host(scope))

    def _misdirected(self, scope: Any) -> Any:
        self._refused(HostUnknown.code)
        return problem(HostUnknown(f"this node is not called {one_line(_host(scope))[:100]!r}"))


def attachment(name: str) -> str:
    """Give the ``Content-Disposition`` of content that somebody else made: it is kept as a file, never shown."""
    own = re.split(r"[/\\]", one_line(name))[-1].strip(". ")[:200] or "content"
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", own)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(own, safe='')}"


def _host(scope: Any) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")


def _plain(name: str) -> str:
    return name.strip().rstrip(".").lower()


def _fits(host: str, name: str) -> bool:
    """Compare with a name; a star at its beginning stands for one label."""
    if name.startswith("*."):
        label, _, rest = host.partition(".")
        return bool(label) and rest == name[2:]
    return host == name
