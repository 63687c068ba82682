"""Both listeners of a node, opened and closed together, and what answers behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from bsfg.node.administration import Administration
from bsfg.node.adminserver import AdminServicer
from bsfg.node.dashboard.dashboard import Dashboard
from bsfg.node.http import HttpBoundary
from bsfg.node.server import BoundaryServicer
from bsfg.node.service import NodeService
from bsfg.wire.connections import GrpcHandshakes, Handshakes
from bsfg.wire.grpc_calls import GrpcHandlers
from bsfg.wire.grpc_server import GrpcListener
from bsfg.wire.http_server import Fence, Hosts, HttpListener
from bsfg.wire.limits import Admission, Observer, WireLimits
from bsfg.wire.tls import Watched, grpc_server_credentials, server_context

Address = tuple[str, int]


class Listeners:
    """The gRPC and the HTTP listener of one node.

    Without ``watched`` certificate files both are plaintext; whether that is allowed is for the configuration to say.
    With ``names`` a request over HTTP must name one of them as its host, or one in the certificate.
    """

    def __init__(
        self,
        boundary: NodeService,
        admin: Administration,
        limits: WireLimits,
        *,
        zone: str,
        watched: Watched | None = None,
        observer: Observer | None = None,
        pages: Dashboard | None = None,
        names: Iterable[str] | None = None,
    ) -> None:
        self.admission = Admission(limits, observer)
        self.handshakes = Handshakes()
        begun = self._begun = GrpcHandshakes(self.handshakes, lambda: self.grpc.port)
        credentials = grpc_server_credentials(watched, begun.begin) if watched else None

        def services(calls: GrpcHandlers) -> list[tuple[str, dict[str, Any]]]:
            return [BoundaryServicer(boundary, calls).handlers(), AdminServicer(admin, calls).handlers()]

        self.grpc = GrpcListener(
            boundary,
            services,
            limits,
            admission=self.admission,
            credentials=credentials,
            called=begun.called if watched else None,
        )
        operations = HttpBoundary(boundary, admin, limits, self.admission, zone=zone, pages=pages)
        self._tails = operations.tails
        hosts = Hosts(names, watched) if names is not None else None
        fenced = Fence(operations.app(), hosts, self.admission)
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
        self._tails.close()
        await asyncio.gather(self.grpc.stop(grace_seconds), self.http.stop())
        await self._begun.stop()
