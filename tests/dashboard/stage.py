"""One real node with its dashboard, and what calls it: requests by hand, and real browsers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import structlog
from playwright.async_api import Browser, Page, async_playwright, expect

from bsfg.config import parse
from bsfg.node.dashboard import sessions
from bsfg.node.dashboard.feed import BrowserFeed
from bsfg.node.node import Node
from bsfg.wire.certs import create_authority, issue
from bsfg.wire.tls import TlsFiles, client_context

# How long something that must happen may take before a test gives up; machines can be busy.
expect.set_options(timeout=60_000)

NAMES = ("plant-a-bsfg", "operator", "viewer", "producer", "stranger")
TOKENS = {"control-room": "viewer", "shift-lead": "operator"}

CONFIG = """
[zone]
name = "plant-a"
[storage]
reserve = "1MiB"
[listen]
grpc = "127.0.0.1:0"
http = "127.0.0.1:{http_port}"
{listen}
[tls]
ca = "certs/ca.crt"
certificate = "certs/plant-a-bsfg.crt"
key = "certs/plant-a-bsfg.key"
[identities.enterprise-bsfg]
zone = "enterprise"
roles = ["peer"]
streams = ["*"]
[identities.operator]
zone = "plant-a"
roles = ["operator"]
streams = ["*"]
[identities.viewer]
zone = "plant-a"
roles = ["viewer"]
streams = ["*"]
[identities.producer]
zone = "plant-a"
roles = ["producer"]
streams = ["*"]
[streams.operational]
[links.from-enterprise]
zone = "enterprise"
address = "127.0.0.1:9"
[serve.enterprise]
{more}
"""


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """Give a header, empty when it is not there."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def json(self) -> Any:
        """Read the body as JSON."""
        return json.loads(self.body)

    @property
    def cookie(self) -> str:
        """Give the cookie that was set, as it is sent back."""
        return self.header("set-cookie").partition(";")[0]


@dataclass
class Stage:
    """A node in this very loop, on loopback, with tokens unless they are not wanted."""

    folder: Path
    more: str = ""
    with_tokens: bool = True
    reads: bool = False
    plaintext: str | None = None
    listen: str = ""
    http_port: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)

    async def __aenter__(self) -> Stage:
        certs, now = self.folder / "certs", datetime.now(UTC)
        create_authority(certs, name="test authority", days=90, now=now)
        for name in NAMES:
            issue(certs, name, days=60, now=now, hosts=["127.0.0.1"], serves=name.endswith("-bsfg"))
        self.tokens, self.roles = {name: sessions.make() for name in TOKENS}, dict(TOKENS)
        structlog.configure(processors=[self._record])
        await self.start()
        return self

    async def start(self) -> None:
        """Start the node, with the tokens and roles as they are now."""
        rows = "".join(
            f'[tokens.{name}]\nhash = "{sessions.hash_of(self.tokens[name])}"\nrole = "{role}"\n'
            f"facts = {str(self.reads).lower()}\n"
            for name, role in self.roles.items()
        )
        listen = f'plaintext = true\nplaintext_identity = "{self.plaintext}"' if self.plaintext else self.listen
        more = (rows if self.with_tokens and not self.plaintext else "") + self.more
        self.config = parse(
            CONFIG.format(listen=listen, more=more, http_port=self.http_port), self.folder / "zone.toml"
        )
        self.node = Node(self.config)
        await self.node.start()

    async def restart(self) -> None:
        """Stop the node and start another one on the same folder and the same port, as an operator would."""
        self.http_port = self.node.http_port
        await self.node.stop()
        await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.node.stop()
        structlog.reset_defaults()

    def _record(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        self.log.append({**event, "level": name})
        raise structlog.DropEvent

    def events(self, name: str) -> list[dict[str, Any]]:
        """Give what the node has logged under a name."""
        return [each for each in self.log if each["event"] == name]

    def node_feed(self) -> BrowserFeed:
        """Give the feed of the node's dashboard."""
        return self.node.pages._feed  # type: ignore[union-attr]

    # Requests by hand.

    @property
    def origin(self) -> str:
        """Give the address of the dashboard without its path."""
        return f"{'http' if self.plaintext else 'https'}://127.0.0.1:{self.node.http_port}"

    def files(self, name: str) -> TlsFiles:
        """Name the files of a certificate."""
        certs = self.folder / "certs"
        return TlsFiles(certs / "ca.crt", certs / f"{name}.crt", certs / f"{name}.key")

    def context(self, certificate: str | None) -> ssl.SSLContext:
        """Give a TLS context with or without a certificate to show."""
        if certificate is not None:
            return client_context(self.files(certificate))
        context = ssl.create_default_context(cafile=str(self.folder / "certs" / "ca.crt"))
        context.check_hostname = False
        return context

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        certificate: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Make one request, with a certificate or without."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()

        def call() -> Answer:
            port = self.node.http_port
            connection: HTTPConnection = (
                HTTPConnection("127.0.0.1", port, timeout=30)
                if self.plaintext
                else HTTPSConnection("127.0.0.1", port, context=self.context(certificate), timeout=30)
            )
            try:
                connection.request(method, path, data, headers or {})
                response = connection.getresponse()
                return Answer(response.status, response.getheaders(), response.read())
            finally:
                connection.close()

        return await asyncio.to_thread(call)

    async def sign_in(self, name: str) -> dict[str, str]:
        """Sign in with a token and give the headers of a page that acts."""
        form = {"origin": self.origin, "content-type": "application/x-www-form-urlencoded"}
        answer = await self.ask("POST", "/dashboard/sign-in", f"token={self.tokens[name]}".encode(), headers=form)
        assert answer.status == 303, answer
        return await self.page_headers(answer.cookie)

    async def page_headers(self, cookie: str, certificate: str | None = None) -> dict[str, str]:
        """Give the headers by which our own page acts in a session."""
        found = await self.ask("GET", "/dashboard/api/session", headers={"cookie": cookie}, certificate=certificate)
        return {
            "cookie": cookie,
            "origin": self.origin,
            "x-bsfg-page-key": found.json()["page_key"],
            "content-type": "application/json",
        }

    # Browsers.

    async def signed_in(self, browser: Browser, name: str, **context: Any) -> Page:
        """Open the dashboard in a browser of its own and sign in, as a person would."""
        page = await opened(browser, self.origin, **context)
        await page.fill("#token", self.tokens[name])
        await page.press("#token", "Enter")
        await page.wait_for_selector("#live.on")
        return page


def chromium() -> str:
    """Find the browser of this machine, or say how to get one."""
    for name in (os.environ.get("BSFG_CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    raise AssertionError("the tests of the dashboard need Chromium: run `make programs`, or set BSFG_CHROMIUM")


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Give a real browser."""
    # Root cannot have Chromium's sandbox; these pages are our own.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


async def opened(browser: Browser, address: str, **context: Any) -> Page:
    """Open an address in a window of its own, in which any error of a script fails the test."""
    window = await browser.new_context(ignore_https_errors=True, **context)
    window.set_default_timeout(60_000)
    page = await window.new_page()
    errors: list[str] = []
    page.errors = errors  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: errors.append(str(error)))
    await page.goto(address)
    return page
