"""Why a peer does not answer: gRPC says only that it is not there, which may also mean that somebody else is.

A handshake of its own tells an absent server, which is waited for, from one that shows the certificate of another
node, which must hold the link. And where calls run out of time although a new connection is answered, the network has
lost the old one without saying so.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, ServerIdentityMismatch, TimedOut
from bsfg.node.config.kinds import Address
from bsfg.wire.connection import Connection
from bsfg.wire.probe import verify_server
from bsfg.wire.tls import Watched

PROBE_SECONDS = 3.0


class Reach:
    """Looks at the server of one link after a call has failed."""

    def __init__(
        self,
        address: Address,
        expected: str,
        watched: Watched | None,
        connection: Connection,
        *,
        by_alternative_name: bool = False,
    ) -> None:
        self._address, self._expected, self._watched = address, expected, watched
        self._connection, self._by_alternative_name = connection, by_alternative_name
        # A thread of its own: an address that swallows everything must not keep one from those who seal and encode.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reach")
        self._looking = False

    async def explained(self, error: BsfgError) -> BsfgError:
        """Give the error that says what is really wrong; the same one when the server is merely not there."""
        unclear = isinstance(error, PeerUnreachable | CertificateInvalid | ServerIdentityMismatch | TimedOut)
        if self._watched is None or not unclear or self._looking:
            return error
        self._looking = True
        try:
            name = await asyncio.get_running_loop().run_in_executor(self._thread, self._verify, self._watched)
        except PeerUnreachable:
            return error
        except BsfgError as found:
            return found
        finally:
            self._looking = False
        # The right server: its authority may have tied the identity to another name than its own.
        self._connection.insist_on(name)
        if isinstance(error, TimedOut):
            self._connection.reconnect()
        if isinstance(error, ServerIdentityMismatch):
            return PeerUnreachable(f"{self._address} is {self._expected}, its certificate is for {name}")
        return error

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _verify(self, watched: Watched) -> str:
        return verify_server(
            self._address.host,
            self._address.port,
            watched.files,
            self._expected,
            by_alternative_name=self._by_alternative_name,
            timeout_seconds=PROBE_SECONDS,
        )
