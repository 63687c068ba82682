"""Takes up new tables of who may call, while the node runs: [authorities], [identities], [tokens] and revocation lists.

The files are looked at once a second, and upon SIGHUP. What is new is checked as a whole, together with what the node
goes on with, before any of it counts; then it counts all at once, for open connections too. A file with a mistake
changes nothing and is an alert until it is corrected. Every other table waits for a restart, and is named.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from bsfg.config import Token, ZoneConfig, load
from bsfg.config.checks import problems_of
from bsfg.errors import BsfgError, ConfigInvalid
from bsfg.node.alerts import AlertBoard, Note
from bsfg.node.authorize import Matrix
from bsfg.node.parts import NodeContext
from bsfg.trail import FAILED, NODE, TrailEvent
from bsfg.wire.tls import TlsFiles, file_stamp

if TYPE_CHECKING:
    from bsfg.wire.certs import Trust

LOOK_SECONDS = 1.0
TAKEN = ("authorities", "identities", "tokens")

TakeTokens = Callable[[Mapping[str, Token]], bool]
"""Gives the door of the dashboard its tokens; tells whether they can be used before a restart."""


class Reload:
    """Follows the files of one node."""

    def __init__(
        self,
        config: ZoneConfig,
        parts: NodeContext,
        alerts: AlertBoard,
        note: Note,
        files: TlsFiles | None = None,
        take_tokens: TakeTokens = lambda rows: not rows,
    ) -> None:
        self._started_with = self._running = config
        self._parts, self._alerts, self._note = parts, alerts, note
        self._files, self._take_tokens = files, take_tokens
        self._loaded = self._seen = self._stamp()
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self._tell()

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def ask(self) -> None:
        """Look at the files at once, whether they have changed or not."""
        self._asked.set()

    async def look(self) -> None:
        """Take up what has changed since it was last taken up; a file that is being written is left alone."""
        before, self._seen = self._seen, self._stamp()
        if self._seen != self._loaded and self._seen == before:
            await self.take()
        self._tell()

    async def take(self) -> None:
        """Read everything, check it as a whole, and let it count; or leave everything as it is and say why."""
        self._loaded = self._seen = self._stamp()
        running, path = self._running, self._running.source
        try:
            given, digest = await asyncio.to_thread(_read, running)
            config = _checked(running, given)
            trust = await asyncio.to_thread(self._trust, config)
        except BsfgError as error:
            self._note("access_not_reloaded", file=str(path), **error.to_dict())
            refused = TrailEvent("config_loaded", NODE, about=str(path), outcome=FAILED, rule=error.code)
            self._parts.trail.counted(dataclasses.replace(refused, reason=error.message))
            self._alerts.update(
                "access_not_reloaded", path.name, f"what counts is older than the files: {error.message}"
            )
            return
        self._alerts.update("access_not_reloaded", path.name, None)
        # One assignment: nobody is decided by half of the new tables.
        self._parts.guard = dataclasses.replace(self._parts.guard, matrix=Matrix.of(config, trust))
        self._running = config
        waiting = _waiting(self._started_with, given)
        if not self._take_tokens(config.tokens):
            waiting.append("tokens")
        fields = {"identities": len(config.identities), "authorities": len(config.authorities)}
        self._note("access_reloaded", file=str(path), digest=digest, **fields, waiting_for_restart=waiting)
        loaded = {"digest": digest, **fields}
        self._parts.trail.record(TrailEvent("config_loaded", NODE, about=str(path), reason="reloaded", details=loaded))

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_SECONDS)
            try:
                if self._asked.is_set():
                    self._asked.clear()
                    await self.take()
                await self.look()
            except Exception as error:
                self._note("access_not_reloaded", exc_info=error)

    def _tell(self) -> None:
        vouching, zone = self._parts.guard.matrix.vouching, self._running.zone.name
        self._alerts.update("authority_unbound", zone, vouching.unbound(), severity="warning")
        self._alerts.update("crl_stale", zone, vouching.stale(self._parts.clock.now_unix_ms()))

    def _trust(self, config: ZoneConfig) -> Trust | None:
        return trust_of(config, self._files, self._parts.guard.matrix.vouching.trust)

    def _stamp(self) -> tuple[object, ...]:
        tls = () if self._files is None else self._files.stamp()
        crl = self._running.tls.crl
        return (
            file_stamp(self._running.source),
            *tls,
            None if crl is None else file_stamp(self._running.path(crl)),
        )


def trust_of(config: ZoneConfig, files: TlsFiles | None, before: Trust | None = None) -> Trust | None:
    """Read the authorities and revocation lists of a configuration; None without TLS."""
    from bsfg.wire.certs import load_trust

    crl = config.tls.crl
    return None if files is None else load_trust(files, None if crl is None else config.path(crl), before)


def digest_of(config: ZoneConfig) -> str:
    """Give the digest of the file of a configuration as it is now; empty when it cannot be read."""
    try:
        return "sha256:" + hashlib.sha256(config.source.read_bytes()).hexdigest()
    except OSError:
        return ""


def _read(running: ZoneConfig) -> tuple[ZoneConfig, str]:
    return load(running.source), digest_of(running)


def _checked(running: ZoneConfig, given: ZoneConfig) -> ZoneConfig:
    """Give what the node goes on with, the new tables in it, or raise `ConfigInvalid` if they contradict each other."""
    tables = {name: getattr(given, name) for name in TAKEN}
    config = dataclasses.replace(running, tls=dataclasses.replace(running.tls, crl=given.tls.crl), **tables)
    problems = problems_of(config)
    if problems:
        listed = "; ".join(f"{each.key}: {each.says}" for each in problems)
        hint = "Restart the node to take up the other tables as well, or correct these."
        raise ConfigInvalid(f"{running.source} does not go with what the node runs with: {listed}", hint=hint)
    return config


def _waiting(started_with: ZoneConfig, given: ZoneConfig) -> list[str]:
    """Name the tables that differ from those the node was started with and are not taken up."""
    given = dataclasses.replace(given, tls=dataclasses.replace(given.tls, crl=started_with.tls.crl))
    names = [each.name for each in dataclasses.fields(ZoneConfig) if each.name not in (*TAKEN, "source")]
    return [name for name in names if getattr(started_with, name) != getattr(given, name)]
