"""Takes up new tables while the node runs: who may call, what is served and pulled, streams, thresholds and alerts.

Which pipelines there are to be is taken up with them: another process runs them, and follows the same file.

The files are looked at once a second, upon SIGHUP, and when an operator asks for it. What is new is checked as a whole,
together with what the node goes on with, before any of it counts; then it counts all at once, for open connections too.
A file with a mistake changes nothing and is an alert until it is corrected. Every other table waits for a restart, and
is named.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bsfg.config import Token, ZoneConfig, load, text_digest
from bsfg.config.access import Stream
from bsfg.config.checks import problems_of
from bsfg.errors import BsfgError, ConfigInvalid, unforeseen
from bsfg.node.alerts import AlertBoard, Note
from bsfg.node.authorize import Matrix
from bsfg.node.parts import NodeContext, NodeSettings
from bsfg.trail import FAILED, NODE, TrailEvent
from bsfg.wire.tls import TlsFiles, file_stamp

if TYPE_CHECKING:
    from bsfg.wire.certs import Trust

LOOK_SECONDS = 1.0
TAKEN = ("authorities", "identities", "tokens", "links", "serve", "alerts", "pipelines")
OF_A_STREAM = (
    "warning_fill_percent",
    "alert_fill_percent",
    "latest_max_age_seconds",
    "plausible_past_seconds",
    "plausible_future_seconds",
)
"""What can change of a stream that is there; the rest of it belongs to its files."""

Apply = Callable[[ZoneConfig, Matrix], Awaitable[None]]
"""Lets a configuration count that was checked."""


TakeTokens = Callable[[Mapping[str, Token]], bool]
"""Gives the door of the dashboard its tokens; tells whether they can be used before a restart."""


Stamp = tuple[object, ...]


def stamp_of(config: ZoneConfig, files: TlsFiles | None) -> Stamp:
    """Give something that changes whenever one of the files changes that a node goes by."""
    crl = config.tls.crl
    return (
        file_stamp(config.source),
        *(() if files is None else files.stamp()),
        None if crl is None else file_stamp(config.path(crl)),
    )


class Reload:
    """Follows the files of one node.

    ``begun`` is the stamp that they had before the node read any of them: to start may take long, and what has changed
    meanwhile is taken up like everything else. So is a file that is not the one which the configuration was read from.
    """

    def __init__(
        self,
        config: ZoneConfig,
        parts: NodeContext,
        alerts: AlertBoard,
        note: Note,
        files: TlsFiles | None = None,
        take_tokens: TakeTokens = lambda rows: not rows,
        *,
        apply: Apply,
        begun: Stamp | None = None,
    ) -> None:
        self._running = config
        self._parts, self._alerts, self._note = parts, alerts, note
        self._files, self._take_tokens, self._apply = files, take_tokens, apply
        self._one_at_a_time = asyncio.Lock()
        self._loaded_unix_ms, self._digest = parts.clock.now_unix_ms(), digest_of(config)
        is_same = file_digest(config) in ("", self._digest)
        self._waiting = list[str]()
        self._problem: str | None = None
        parts.configuration, parts.reload = self.status, self.take
        self._seen = self._stamp()
        self._loaded = (begun or self._seen) if is_same else ()
        self._task: asyncio.Task[None] | None = None
        self._taking: set[asyncio.Task[list[str]]] = set()
        self._asked = asyncio.Event()
        self._tell()

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End it."""
        tasks = [*self._taking, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ask(self) -> None:
        """Look at the files at once, whether they have changed or not."""
        self._asked.set()

    async def look(self) -> None:
        """Take up what has changed since it was last taken up; a file that is being written is left alone."""
        before, self._seen = self._seen, self._stamp()
        if self._seen != self._loaded and self._seen == before:
            await self._take_by_itself()
        self._tell()

    async def _take_by_itself(self) -> None:
        with suppress(BsfgError):
            await self.take()

    def status(self) -> dict[str, Any]:
        """Tell which configuration counts, since when, and what of the file does not yet."""
        return {
            "digest": self._digest,
            "loaded_unix_ms": self._loaded_unix_ms,
            "waiting_for_restart": list(self._waiting),
            "problem": self._problem,
        }

    async def take(self, by: str = NODE) -> list[str]:
        """Read everything, check it as a whole, and let it count, or leave everything as it is and raise why.

        Gives the tables that were taken up and differ from before. Whoever asked may go away meanwhile: what was begun
        is done to its end, since half of a configuration is none.
        """
        taking = asyncio.create_task(self._take(by))
        self._taking.add(taking)
        taking.add_done_callback(self._is_over)
        return await asyncio.shield(taking)

    def _is_over(self, taking: asyncio.Task[list[str]]) -> None:
        self._taking.discard(taking)
        if not taking.cancelled():
            taking.exception()  # whoever asked was told, and so were the log and the alerts

    async def _take(self, by: str) -> list[str]:
        async with self._one_at_a_time:
            self._loaded = self._seen = self._stamp()
            running, path = self._running, self._running.source
            try:
                given = await asyncio.to_thread(load, running.source)
                config = _checked(running, given, self._parts.settings)
                trust = await asyncio.to_thread(self._trust, config)
            except BsfgError as error:
                self._refused(path, error, by)
                raise
            works = self._take_tokens(config.tokens)
            try:
                await self._apply(config, Matrix.of(config, trust))
            except Exception as error:
                # Who may call is decided by the new tables already. What could not be opened is tried at every look.
                self._loaded = ()
                self._refused(path, unforeseen(error, "reloading"), by)
                raise
            self._alerts.update("access_not_reloaded", path.name, None)
            changed = [name for name in (*TAKEN, "streams") if getattr(config, name) != getattr(running, name)]
            self._running, self._digest, self._problem = config, config.digest, None
            self._loaded_unix_ms, self._waiting = self._parts.clock.now_unix_ms(), _waiting(config, given)
            if not works:
                self._waiting.append("tokens")
            fields = {"identities": len(config.identities), "authorities": len(config.authorities), "changed": changed}
            told = {"digest": config.digest, **fields}
            self._note("access_reloaded", file=str(path), **told, waiting_for_restart=self._waiting)
            self._parts.trail.record(TrailEvent("config_loaded", by, about=str(path), reason="reloaded", details=told))
            return changed

    def _refused(self, path: Path, error: BsfgError, by: str) -> None:
        """Say that the files cannot be used, until they can."""
        self._problem = error.message
        self._note("access_not_reloaded", file=str(path), **error.to_dict())
        refused = TrailEvent("config_loaded", by, about=str(path), outcome=FAILED, rule=error.code)
        self._parts.trail.counted(dataclasses.replace(refused, reason=error.message))
        self._alerts.update("access_not_reloaded", path.name, f"what counts is older than the files: {error.message}")

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_SECONDS)
            try:
                if self._asked.is_set():
                    self._asked.clear()
                    await self._take_by_itself()
                await self.look()
            except Exception as error:
                self._note("access_not_reloaded", exc_info=error)

    def _tell(self) -> None:
        vouching, zone = self._parts.guard.matrix.vouching, self._running.zone.name
        self._alerts.update("authority_unbound", zone, vouching.unbound(), severity="warning")
        self._alerts.update("crl_stale", zone, vouching.stale(self._parts.clock.now_unix_ms()))

    def _trust(self, config: ZoneConfig) -> Trust | None:
        return trust_of(config, self._files, self._parts.guard.matrix.vouching.trust)

    def _stamp(self) -> Stamp:
        return stamp_of(self._running, self._files)


def trust_of(config: ZoneConfig, files: TlsFiles | None, before: Trust | None = None) -> Trust | None:
    """Read the authorities and revocation lists of a configuration; None without TLS."""
    from bsfg.wire.certs import load_trust

    crl = config.tls.crl
    return None if files is None else load_trust(files, None if crl is None else config.path(crl), before)


def digest_of(config: ZoneConfig) -> str:
    """Give the digest of the text that a configuration was read from, or of its file where nobody knows."""
    return config.digest or file_digest(config)


def file_digest(config: ZoneConfig) -> str:
    """Give the digest of the file of a configuration as it is now; empty when it cannot be read."""
    try:
        return text_digest(config.source.read_bytes())
    except OSError:
        return ""


def _checked(running: ZoneConfig, given: ZoneConfig, settings: NodeSettings) -> ZoneConfig:
    """Give what the node goes on with, the new tables in it, or raise `ConfigInvalid` if they contradict each other."""
    tables = {name: getattr(given, name) for name in TAKEN}
    tls = dataclasses.replace(running.tls, crl=given.tls.crl)
    streams, digest = _streams(running, given), given.digest
    config = dataclasses.replace(running, tls=tls, streams=streams, digest=digest, **tables)
    listed = [f"{each.key}: {each.says}" for each in problems_of(config)]
    if NodeSettings.of(config).limits.message_bytes > settings.limits.message_bytes:
        listed.append("streams: a new one allows facts that need larger messages than the node was started with")
    if listed:
        hint = "Restart the node to take up the other tables as well, or correct these."
        says = f"{running.source} does not go with what the node runs with: {'; '.join(listed)}"
        raise ConfigInvalid(says, hint=hint)
    return config


def _streams(running: ZoneConfig, given: ZoneConfig) -> dict[str, Stream]:
    """Give the streams that are there with their new thresholds, and those that are new, in the order of the file."""
    kept = {
        name: dataclasses.replace(stream, **{key: getattr(given.streams.get(name, stream), key) for key in OF_A_STREAM})
        for name, stream in running.streams.items()
    }
    return {**kept, **{name: stream for name, stream in given.streams.items() if name not in kept}}


def _waiting(config: ZoneConfig, given: ZoneConfig) -> list[str]:
    """Name the tables of the file that differ from what the node goes on with."""
    names = [each.name for each in dataclasses.fields(ZoneConfig) if each.name not in ("source", "digest")]
    return [name for name in names if getattr(config, name) != getattr(given, name)]
