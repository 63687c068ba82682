"""Both listeners of a node, opened and closed together, with one count of what is being served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from bsfg.wire.fence import Fence, Hosts
from bsfg.wire.grpclisten import GrpcListener
from bsfg.wire.handshakes import GrpcHandshakes, Handshakes
from bsfg.wire.http import HttpBoundary, HttpService, Pages
from bsfg.wire.httplisten import HttpListener
from bsfg.wire.limits import Admission, Observer, WireLimits
from bsfg.wire.service import BoundaryService
from bsfg.wire.tls import Watched, grpc_server_credentials, server_context

Address = tuple[str, int]


class Listeners:
    """The gRPC and the HTTP listener of one node.

    Without ``watched`` certificate files both are plaintext; whether that is allowed is for the configuration to say.
    With ``names`` a request over HTTP must name one of them as its host, or one in the certificate.
    """

    def __init__(
        self,
        boundary: BoundaryService,
        admin: HttpService,
        limits: WireLimits,
        *,
        zone: str,
        watched: Watched | None = None,
        observer: Observer | None = None,
        pages: Pages | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        self.admission = Admission(limits, observer)
        self.handshakes = Handshakes()
        begun = self._begun = GrpcHandshakes(self.handshakes, lambda: self.grpc.port)
        credentials = grpc_server_credentials(watched, begun.begin) if watched else None
        self.grpc = GrpcListener(
            boundary,
            admin,
            limits,
            admission=self.admission,
            credentials=credentials,
            called=begun.called if watched else None,
        )
        app = HttpBoundary(boundary, admin, limits, self.admission, zone=zone, pages=pages).app()
        hosts = Hosts(names, watched) if names is not None else None
        fenced = Fence(app, hosts, lambda code: self.admission.answered("http_host", 0.0, code))
        optional = pages is not None and pages.takes_tokens
        context = server_context(watched, certificates_optional=optional) if watched else None
        self.http = HttpListener(fenced, limits, context=context, handshakes=self.handshakes)

    async def start(self, grpc: Address, http: Address | None) -> None:
        """Open the listeners; their ports are then ``grpc.port`` and ``http.port``."""
        host, port = grpc
        await self.grpc.start(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._begun.start()
        if http is not None:
            try:
                await self.http.start(*http)
            except BaseException:
                await self.grpc.stop(0)
                raise

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Take no more requests, let those under way finish for a while, and close."""
        await asyncio.gather(self.grpc.stop(grace_seconds), self.http.stop())
        await self._begun.stop()
