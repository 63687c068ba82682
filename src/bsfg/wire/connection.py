"""A caller's connection to one node: made when it is needed, renewed when the certificate files change."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bsfg.errors import (
    BsfgError,
    FrameInvalid,
    NotReady,
    PeerUnreachable,
    StandingBy,
    StorageClosed,
    StorageTaken,
    TimedOut,
)
from bsfg.wire.messages import ADMIN, BOUNDARY, Method
from bsfg.wire.status import from_rpc_error, was_not_begun, was_not_sent
from bsfg.wire.tls import Watched, grpc_channel_credentials, grpc_channel_options

MESSAGE_BYTES = 64 << 20
PEER_MESSAGE_BYTES = 16 << 20
"""What a node of another zone may send in one message; its frames have 4 MiB and one fact at most."""

REQUEST_TIMEOUT_SECONDS = 30.0
OLD_CHANNEL_SECONDS = 120.0
"""How long calls that were under way when the certificate changed may go on."""

LOOK_SECONDS = 1.0
"""How long one look at the certificate files does: before each small call it would take a good part of the call."""

NOT_BEGUN_SECONDS = (0.02, 0.2)
"""How long a call waits that the node did not begin, at least and at most: those who wait do not come back together."""

WATCH_SECONDS, PROBE_SECONDS, SEARCH_SECONDS = 1.0, 2.0, 0.2
"""How often a node of several is asked whether it serves, how long it may take to say so, and the pause of a search."""

ELSEWHERE = (NotReady, PeerUnreachable, StandingBy, StorageClosed, StorageTaken, TimedOut)
"""What a node says, or leaves unsaid, in whose place another one of its zone may serve."""

CALLS_IN_VAIN = 8
"""How many calls in a row a node may end without having taken anything of them."""

STATUS_SECONDS = 5.0
"""How long the status of a call may follow a write that has failed."""

_METHODS: Mapping[str, Method] = {**BOUNDARY, **ADMIN}


def channel_options(message_bytes: int) -> list[tuple[str, Any]]:
    """Give the options of a caller's channel.

    gRPC's own retries are off: it does not know that an append must be repeated with the same ids.
    """
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name this is how long one attempt may take, handshake included; a slow line needs seconds.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),
        # A call goes where its address says, past whatever proxy the machine has for web pages.
        ("grpc.enable_http_proxy", 0),
    ]


class Connection:
    """The way to one node, or to whichever of a zone's nodes is active: ``address`` may list several, by commas.

    With several it asks the one it calls, from time to time and after every failure, whether it serves. When it does
    not, the calls that are under way there end as if it could not be reached, and the next ones go to the first of the
    list that does. Without ``watched`` files it is plaintext, which nodes accept on loopback only. ``server_name`` is
    the name that the node's certificate must carry. Answers of a node of another zone (``to_peer``) are read with care.
    """

    def __init__(
        self,
        address: str,
        *,
        watched: Watched | None = None,
        server_name: str | None = None,
        message_bytes: int = MESSAGE_BYTES,
        to_peer: bool = False,
        request_timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> None:
        self._addresses = address.split(",")
        self.address = self._addresses[0]
        self._watching: asyncio.Task[None] | None = None
        self._doubted = asyncio.Event()
        self._settled = asyncio.Event()
        self._without_storage = False
        self._waiters: set[asyncio.Task[Any]] = set()
        self.request_timeout_seconds = request_timeout_seconds
        self._watched, self._server_name = watched, server_name
        self._server_certificate: bytes | None = None
        self._options, self._to_peer = channel_options(message_bytes), to_peer
        self._channel: grpc.aio.Channel | None = None
        self._callables: dict[str, Any] = {}
        self._health: Any = None
        self._version = 0
        self._look_again_seconds = 0.0
        self._retiring: set[asyncio.Task[None]] = set()
        self._closed = False

    async def call(self, name: str, request: Any, *, timeout_seconds: float | None = None) -> Any:
        """Make a call with one request and one answer; raises only `BsfgError`.

        A node takes only so many calls at once over one connection; those beyond wait here, as long as they may take.
        """
        ends = time.monotonic() + (self.request_timeout_seconds if timeout_seconds is None else timeout_seconds)
        with self.telling():
            while True:
                await self._found()
                try:
                    with self.waiting():
                        answer = await self.method(name)(request, timeout=ends - time.monotonic())
                    break
                except grpc.aio.AioRpcError as error:
                    pause_seconds = random.uniform(*NOT_BEGUN_SECONDS)
                    if not self._may_again(error) or time.monotonic() + pause_seconds >= ends:
                        raise
                await asyncio.sleep(pause_seconds)
        if answer is None:
            raise unreadable(self)
        return answer

    async def _found(self) -> None:
        """Wait a while for a node that serves, where there are several: who calls once shall not call in vain."""
        if len(self._addresses) > 1 and not self._settled.is_set():
            self._renew()
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._settled.wait()

    def _may_again(self, error: grpc.aio.AioRpcError) -> bool:
        """Tell whether nothing of a call was done, so that it may be made again."""
        if was_not_begun(error):
            return True
        return len(self._addresses) > 1 and isinstance(self.translated(error), StandingBy)

    async def check_health(self) -> bool:
        """Ask the node whether it serves: the cheapest call there is, which also opens the connection."""
        self._renew()
        if self._health is None:
            self._health = health_pb2_grpc.HealthStub(self._channel).Check
        with self.telling():
            answer = await self._health(health_pb2.HealthCheckRequest(), timeout=self.request_timeout_seconds)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def method(self, name: str) -> Any:
        """Give a method of the node, to be called with what gRPC takes."""
        self._renew()
        found = self._callables.get(name)
        if found is None:
            assert self._channel is not None
            found = self._callables[name] = _METHODS[name].callable(self._channel, of_peer=self._to_peer)
        return found

    async def answers(
        self, name: str, request: Any, *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Make a call with one request and many answers; raises only `BsfgError`."""
        for in_vain in itertools.count(1):
            call, has_begun = self.method(name)(request, timeout=timeout_seconds), False
            try:
                with self.telling():
                    try:
                        async for answer in call:
                            if answer is None:
                                raise unreadable(self)
                            has_begun = True
                            yield answer
                        return
                    except grpc.aio.AioRpcError as error:
                        # Whoever has the beginning must not be given it again, whatever a node says.
                        if has_begun or in_vain > CALLS_IN_VAIN or not was_not_sent(error):
                            raise
            finally:
                call.cancel()

    def stream(self, name: str, *requests: Any) -> Any:
        """Begin a call with many requests: those of an iterator, or what is written to the call."""
        call = self.method(name)(*requests)
        call._cython_call = _StatusKept(call._cython_call)
        return call

    def insist_on(self, server_name: str, certificate: bytes | None = None) -> None:
        """Expect another name in the node's certificate from the next call on, and that very certificate if given.

        gRPC compares the DNS name and no more; who has looked at all of a certificate has it trust that one alone.
        """
        if (server_name, certificate) != (self._server_name, self._server_certificate):
            self._server_name, self._server_certificate = server_name, certificate
            self.reconnect()

    def reconnect(self) -> None:
        """Make the next call over a new connection; calls that are under way go on over the old one."""
        self._version = -1

    async def ended_with(self, call: Any) -> BsfgError | None:
        """Give what the node ended a stream with, in its own words; None when it ended in peace or was not sent."""
        code = await call.code()
        if code == grpc.StatusCode.OK:
            return None
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        error = grpc.aio.AioRpcError(code, initial, trailing, await call.details())
        return None if was_not_sent(error) else self.translated(error)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Make errors of ours of how a call fails in a block.

        Over a channel that is closed here gRPC cancels whoever waits, who would take it for his own end. That happens
        to calls that are still under way some time after the certificate has changed.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.translated(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise PeerUnreachable(f"the connection to {self.address} was closed here") from None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let a block that only waits for a call end with the connection, as `PeerUnreachable`.

        gRPC itself may wait for ever when a connection is closed here that is not yet open.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waiters.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._waiters or task.uncancel():
                raise
            raise PeerUnreachable(f"the connection to {self.address} was closed here") from None
        finally:
            self._waiters.discard(task)

    async def _hang_up(self) -> None:
        """End the channel and all calls over it."""
        channel, self._channel = self._channel, None
        waiters, self._waiters = self._waiters, set()
        for task in waiters:
            task.cancel()
        if channel is not None:
            await channel.close()

    def translated(self, error: grpc.aio.AioRpcError) -> BsfgError:
        """Give the error that a failed call stands for."""
        found = from_rpc_error(error, where=self.address)
        self.doubt(found)
        return found

    # Several addresses.

    def doubt(self, error: BsfgError) -> None:
        """Look soon whether another node serves, when an error says that this one may not."""
        if isinstance(error, ELSEWHERE):
            self._settled.clear()
            self._doubted.set()
            # Without its storage it may not know yet that another one serves.
            self._without_storage |= isinstance(error, StorageClosed)

    async def _watch(self) -> None:
        """Stay with a node that serves, for as long as the connection is open."""
        while True:
            stays = await self._serves_here() and not self._without_storage
            found = self.address if stays else await self._serving()
            if found is None:
                await asyncio.sleep(SEARCH_SECONDS)
                continue
            self._without_storage = False
            if found != self.address:
                self.address, self._version = found, -1
                await self._hang_up()
            self._settled.set()
            self._doubted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._doubted.wait()

    async def _serves_here(self) -> bool:
        with suppress(BsfgError, TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS):
                return await self.check_health()
        return False

    async def _serving(self) -> str | None:
        """Give the first address whose node serves, the present one before all others, or after them."""
        last = self._without_storage
        order = sorted(self._addresses, key=lambda each: (each != self.address) != last)
        found = await asyncio.gather(*(self._probed(each) for each in order))
        return next((address for address, serves in zip(order, found, strict=True) if serves), None)

    async def _probed(self, address: str) -> bool:
        # Not the certificate that a link insists on: each node may have its own, which is looked at before it is asked.
        channel = self._opened(address, None)
        try:
            request = health_pb2.HealthCheckRequest()
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_SECONDS)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        except grpc.aio.AioRpcError:
            return False
        finally:
            await channel.close()

    async def close(self) -> None:
        """End all calls and the connection; repeats are harmless."""
        self._closed = True
        ending = [*self._retiring, *([self._watching] if self._watching is not None else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._hang_up()

    def _renew(self) -> None:
        """Make the channel, again when the files have changed."""
        if self._closed:
            raise PeerUnreachable(f"the connection to {self.address} was closed here")
        now_seconds = time.monotonic()
        if self._channel is not None and self._version >= 0 and now_seconds < self._look_again_seconds:
            return
        self._look_again_seconds = now_seconds + LOOK_SECONDS
        version = self._watched.refresh() if self._watched else 0
        if self._channel is not None and version == self._version:
            return
        if self._channel is not None:
            task = asyncio.create_task(_retire(self._channel))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._version, self._callables, self._health = version, {}, None
        self._channel = self._opened(self.address, self._server_certificate)
        if len(self._addresses) > 1 and self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _opened(self, address: str, certificate: bytes | None) -> grpc.aio.Channel:
        if self._watched is None:
            return grpc.aio.insecure_channel(address, self._options)
        options = [*self._options, *(grpc_channel_options(self._server_name) if self._server_name else [])]
        return grpc.aio.secure_channel(address, grpc_channel_credentials(self._watched.material, certificate), options)


def unreadable(connection: Connection) -> BsfgError:
    """Give the error for a message that cannot be read; in a stream gRPC gives None for it."""
    return FrameInvalid(f"{connection.address} sent a message that cannot be read")


class _StatusKept:
    """gRPC's own side of a call, without its habit to replace a node's status by ``INTERNAL`` when a write fails.

    A node that refuses a call answers while the caller is still sending, so the write fails because of the answer
    (https://github.com/grpc/grpc/issues/36066).
    """

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def set_internal_error(self, text: str) -> None:
        """Leave the call to its true status, which is there or follows; end it when none does."""
        if not self._call.done():
            asyncio.get_running_loop().call_later(STATUS_SECONDS, self._end, text)

    def _end(self, text: str) -> None:
        if not self._call.done():
            self._call.set_internal_error(text)


async def _retire(channel: grpc.aio.Channel) -> None:
    try:
        await asyncio.sleep(OLD_CHANNEL_SECONDS)
    finally:
        await channel.close()
