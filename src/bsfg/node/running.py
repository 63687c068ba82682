"""Runs the node of a zone until it is told to stop: active, or standing by for another node of the zone that is.

This is the one place that knows of both. What is active is a whole `Node`; what stands by has the same listeners and
nothing behind them. A node that was overtaken ends as a whole and stands by, in the same process.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from bsfg.config import ZoneConfig, load
from bsfg.errors import BsfgError, ConfigInvalid, StandingBy, StorageTaken, StorageUnavailable
from bsfg.node.backends import can_be_watched, node_name, watch_of
from bsfg.node.listeners import Listeners
from bsfg.node.node import Node
from bsfg.node.parts import NodeSettings
from bsfg.node.tail import Tails
from bsfg.wire.http_server import caller_of, problem
from bsfg.wire.limits import Admission
from bsfg.wire.service import Caller
from bsfg.wire.tls import Watched

log = structlog.get_logger("bsfg.node")

SWITCH_SECONDS = 0.0005
"""How long a thread that works on somebody's many bytes keeps the interpreter from the event loop.

Python's own 5 ms are added to every step of every other caller, and an append has a dozen of them."""

LOOK_SECONDS = 10.0
"""How long one that stands by waits for an answer of the server before it calls again."""

LEAVE_SECONDS = 30.0
"""How long a node that was overtaken may take to end its work; beyond it the process ends, to be started again."""


class Standby:
    """A node that stands by: whoever calls is told so, and who is active."""

    def __init__(self, config: ZoneConfig, active: str) -> None:
        self.active = active
        self._config = config
        listen = config.listen
        watched = None if listen.plaintext or config.tls_files is None else Watched(config.tls_files)
        limits = NodeSettings.of(config).limits
        door: Any = self
        names = (listen.http.host, *listen.http_names)
        self._listeners = Listeners(door, door, limits, zone=config.zone.name, watched=watched, pages=door, names=names)

    async def __aenter__(self) -> Standby:
        listen = self._config.listen
        http = (listen.http.host, listen.http.port) if listen.http_enabled else None
        await self._listeners.start((listen.grpc.host, listen.grpc.port), http)
        await self._listeners.grpc.serving(False)
        log.warning("standing_by", zone=self._config.zone.name, node=node_name(self._config), active=self.active)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._listeners.stop(0)

    def error(self) -> StandingBy:
        """Give what every caller is told."""
        who = f"{self.active} is active" if self.active else "no node is known to be active"
        return StandingBy(f"{node_name(self._config)} of {self._config.zone.name} stands by; {who}", active=self.active)

    # What the listeners ask of a node, as far as they come.

    def admit(self, caller: Caller, actions: tuple[str, ...]) -> str:
        """Refuse everybody."""
        raise self.error()

    def known(self, caller: Caller) -> str | None:
        """Let anybody ask for health."""
        return str(caller)

    async def ready(self) -> None:
        """Say that the node does not serve."""
        raise self.error()

    @property
    def takes_tokens(self) -> bool:
        """Let browsers without a certificate come as far as they would at the active node."""
        return bool(self._config.tokens)

    caller = staticmethod(caller_of)

    def routes(self, admission: Admission, tails: Tails) -> Sequence[BaseRoute]:
        """Tell browsers, too."""

        async def told(request: Request) -> Response:
            return problem(self.error())

        return [Route("/{path:path}", told)]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def refused(*args: object, **options: object) -> Any:
            raise self.error()

        return refused


async def _stand_by(config: ZoneConfig, active: str, stopping: asyncio.Event) -> None:
    """Stand by until the place of the active node is free, or the process is to stop."""
    watch, problem_code = watch_of(config), ""
    try:
        async with Standby(config, active) as standby:
            while not stopping.is_set():
                overdue = asyncio.get_running_loop().call_later(LOOK_SECONDS, watch.interrupt)
                try:
                    found = await asyncio.to_thread(watch.look)
                except BsfgError as error:
                    if error.code != problem_code:
                        log.warning("storage_not_watched", **error.to_dict())
                    problem_code = error.code
                else:
                    if found is None:
                        return
                    standby.active, problem_code = found, ""
                finally:
                    overdue.cancel()
                await _first(stopping.wait(), asyncio.sleep(watch.interval_seconds))
    finally:
        await asyncio.to_thread(watch.close)


async def _first(*waits: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _started(node: Node, stopping: asyncio.Event) -> bool:
    """Start a node; tell whether it has, or was told to stop before: a storage may keep it waiting for ever."""
    starting = asyncio.ensure_future(node.start())
    await _first(stopping.wait(), starting)
    await asyncio.wait([starting])
    if starting.cancelled():
        return False
    starting.result()
    return True


async def _serve(node: Node, stopping: asyncio.Event, ready: Callable[[Node], None]) -> None:
    """Be active until the process is to stop or another node has taken over."""
    try:
        ready(node)
        # What is here now stays: a search for garbage that goes through it holds everybody up for a twentieth second.
        gc.freeze()
        await _first(stopping.wait(), node.overtaken())
    finally:
        gc.unfreeze()
        is_overtaken = sys.exc_info()[0] is None and not stopping.is_set()
        if is_overtaken:
            log.error("overtaken", zone=node.config.zone.name)
        try:
            async with asyncio.timeout(LEAVE_SECONDS if is_overtaken else None):
                await node.stop()
        except TimeoutError:
            hint = "Let whatever runs the node start it again; it stands by then."
            raise StorageTaken("the node was overtaken, and could not end its work", hint=hint) from None


def _as_it_is(config: ZoneConfig) -> ZoneConfig:
    """Read the file of a configuration again: a node may stand by for weeks, in which somebody was revoked.

    With a file that cannot be used the node is what it was. It says so, and takes it up when it is mended.
    """
    try:
        return load(config.source)
    except ConfigInvalid as error:
        log.warning("access_not_reloaded", file=str(config.source), **error.to_dict())
        return config


async def run(config: ZoneConfig, ready: Callable[[Node], None] = lambda node: None) -> None:
    """Run a node until it is told to stop by SIGINT or SIGTERM."""
    sys.setswitchinterval(SWITCH_SECONDS)
    stopping, has_run = asyncio.Event(), False
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    while not stopping.is_set():
        config = _as_it_is(config) if has_run else config
        node = Node(config)
        loop.add_signal_handler(signal.SIGHUP, node.reload)
        try:
            if not await _started(node, stopping):
                return
        except (StorageTaken, StorageUnavailable) as error:
            # At its first start a node does not wait for a server that is away: whatever starts it tries again.
            if not can_be_watched(config) or (not has_run and isinstance(error, StorageUnavailable)):
                raise
            has_run = True
            await _stand_by(config, str(error.details.get("active", "")), stopping)
            continue
        has_run = True
        await _serve(node, stopping, ready)
