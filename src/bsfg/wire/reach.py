"""Whether the server of a link is the node that is meant, and why it does not answer.

gRPC compares the DNS name of a server and no more. So before anything is asked of it, a handshake of its own looks at
all of the certificate: the identity and the authority behind it. From then on gRPC accepts that very certificate and no
other, until it is renewed. The same handshake tells an absent server, which is waited for, from one that shows the
certificate of another node, which must hold the link. And where calls run out of time although a new connection is
answered, the network has lost the old one without saying so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bsfg.errors import BsfgError, CertificateInvalid, PeerUnreachable, ServerIdentityMismatch, TimedOut
from bsfg.wire.connection import Connection
from bsfg.wire.peer import PeerNames
from bsfg.wire.probe import ServerVerified, verify_server
from bsfg.wire.tls import Watched

PROBE_SECONDS = 3.0


class ConnectionDiagnosis:
    """Looks at the server of one link after a call has failed."""

    def __init__(
        self,
        expected: str,
        watched: Watched | None,
        connection: Connection,
        *,
        by_alternative_name: bool = False,
        vouch: Callable[[PeerNames], None] = lambda names: None,
    ) -> None:
        self._expected, self._watched = expected, watched
        self._connection, self._by_alternative_name, self._vouch = connection, by_alternative_name, vouch
        self._verified: ServerVerified | None = None
        self._verified_at = ""
        self._looked = asyncio.Lock()
        self._found: BsfgError | None = None
        # A thread of its own: an address that swallows everything must not keep one from those who seal and encode.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reach")
        self._looking = False

    async def ready(self) -> None:
        """Insist on the right server before anything is asked of it; once it is known, this is a look at its dates."""
        if self._watched is None or self._stands():
            return
        async with self._looked:
            if not self._stands():
                try:
                    self._insist(await self._look(self._watched))
                except BsfgError as error:
                    self._found = error
                    raise

    async def explained(self, error: BsfgError) -> BsfgError:
        """Give the error that says what is really wrong; the same one when the server is merely not there."""
        unclear = isinstance(error, PeerUnreachable | CertificateInvalid | ServerIdentityMismatch | TimedOut)
        if self._watched is None or not unclear or self._looking or error is self._found:
            return error
        self._looking = True
        try:
            verified = await self._look(self._watched)
        except PeerUnreachable:
            return error
        except BsfgError as found:
            return found
        finally:
            self._looking = False
        # The right server: its certificate may be a new one, or tied to another name than the identity.
        self._insist(verified)
        if isinstance(error, TimedOut):
            self._connection.reconnect()
        if isinstance(error, ServerIdentityMismatch | CertificateInvalid):
            return PeerUnreachable(
                f"{self._connection.address} is {self._expected}, by another certificate than before"
            )
        return error

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _stands(self) -> bool:
        """Tell whether the certificate that was seen still counts: it may have ended, or its authority have gone.

        Another node that answers in the place of the first has to show its own.
        """
        if self._verified is None or self._verified_at != self._connection.address:
            return False
        try:
            self._vouch(self._verified.names)
        except BsfgError:
            self._verified = None
            self._connection.reconnect()
            return False
        return True

    def _insist(self, verified: ServerVerified) -> None:
        self._verified, self._verified_at = verified, self._connection.address
        self._connection.insist_on(verified.name, verified.certificate)

    async def _look(self, watched: Watched) -> ServerVerified:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._verify, watched)

    def _verify(self, watched: Watched) -> ServerVerified:
        host, _, port = self._connection.address.rpartition(":")
        return verify_server(
            host.strip("[]"),
            int(port),
            watched.files,
            self._expected,
            by_alternative_name=self._by_alternative_name,
            vouch=self._vouch,
            timeout_seconds=PROBE_SECONDS,
        )
