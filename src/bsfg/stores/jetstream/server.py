"""The connection to the servers of one zone: made, checked, lost and made again; and the server's errors as ours.

A thread of its own runs the client. A call that meets a lost connection is made again on another one, for as long as
patience lasts; who changes something looks first at what became of the first attempt.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.request import urlopen

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bsfg.errors import (
    BsfgError,
    DiskFull,
    ExtraMissing,
    FormatUnsupported,
    OutcomeUnknown,
    StorageFailed,
    StorageReadOnly,
    StorageUnavailable,
    StorageUnreadable,
    StorageUnsafe,
)
from bsfg.stores.jetstream.messages import StoredMessage, parsed, stored, written

Found = TypeVar("Found")

OLDEST_SERVER = (2, 12)
PATIENCE_SECONDS = 20.0
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 2
PAGE_MESSAGES = 1_000
SAFE_REPLICAS = 3
_HEADERS_BYTES = 4096
_PIECE_BYTES = 8 << 20
_PAUSE_SECONDS = 0.1
_RESETS_MOST, _RESET = 5, os.strerror(errno.ECONNRESET)
_WRONG_LAST = 10071
_BUSY = 10164
"""Another message with a condition on the same subject is on its way through the servers; nothing was compared."""
_FULL = frozenset({10002, 10023, 10028, 10047})
_FOR_GOOD = _FULL | {10039, 10076, 10077}
"""What a server says with the code of one that is not ready, but means."""
_ABSENT = (10014, 10037, 10059)


@dataclass(frozen=True, slots=True)
class JetStreamSettings:
    """Where a zone's streams are, how they are kept, and how long servers may be away before callers are told."""

    servers: Sequence[str]
    prefix: str = "bsfg"
    replicas: int = 1
    monitor_url: str | None = None
    credentials: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    allow_unsafe: bool = False
    patience_seconds: float = PATIENCE_SECONDS
    node_name: str = ""


class Away(Exception):
    """No server answered."""


class WrongLastSequence(Exception):
    """A message was refused, because the last one is not the one that it was to follow."""


class ApiRefusal(Exception):
    """A server said no, by one of its numbers."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("description", "no reason given")))
        self.number = int(error.get("err_code", 0))

    @property
    def is_absent(self) -> bool:
        """Whether what was asked for is not there."""
        return self.number in _ABSENT

    def translated(self, doing: str) -> BsfgError:
        """Give it as an error of ours."""
        says = f"{doing}: {self}"
        if self.number in _FULL or any(word in str(self) for word in ("maximum bytes", "maximum messages", "no space")):
            return DiskFull(says, hint="Free space for JetStream, or raise the limit of the account or the stream.")
        if "sealed" in str(self):
            return StorageReadOnly(says, hint="The stream was sealed by hand, which cannot be undone: restore a copy.")
        return StorageFailed(says, hint="Look at the server's own log; then restart the node.")


class _Answer:
    """What waits for one answer, or for several with an end: a task of the loop, or a thread."""

    __slots__ = ("future", "parts", "subject")

    def __init__(self, subject: str, future: asyncio.Future[Any] | Future[Any], parts: list[Msg] | None = None) -> None:
        self.subject, self.future, self.parts = subject, future, parts

    def take(self, message: Msg) -> None:
        """Note a message, and say when it was the last one."""
        if self.future.done():
            return
        if self.parts is not None and "Status" not in (message.headers or {}):
            self.parts.append(message)
        else:
            self.future.set_result([*(self.parts or ()), message])

    def fail(self, error: Exception) -> None:
        """Say that nothing comes any more."""
        if not self.future.done():
            self.future.set_exception(error)


class JetStreamServer:
    """One connection to the servers of a zone; any thread may use it."""

    def __init__(self, settings: JetStreamSettings, on_sync: Callable[[float], None] = lambda seconds: None) -> None:
        self.settings, self._on_sync = settings, on_sync
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bsfg-nats", daemon=True)
        self._client: Client | None = None
        self._answering = ""
        self.standing: dict[str, float] = {}  # when each node that stands by has last asked
        self._subscribed: Subscription | None = None
        self._waiting: dict[str, _Answer] = {}
        self._tokens = itertools.count()
        self._inbox = ""
        self._last_error = ""
        self._given_up = False
        self._closed = False
        self._submitting = threading.Lock()
        self._staying: asyncio.Task[None] | None = None
        self._turn = 0
        self.piece_bytes = 0  # the most that one message carries

    # Connecting.

    def open(self) -> None:
        """Connect once; raises `StorageUnavailable` when there is no server, `StorageUnreadable` when it refuses."""
        if not self._thread.is_alive():
            self._thread.start()
        self.wait(self._connect_any())

    async def _connect_any(self) -> None:
        """Connect to the first server that lets us in, beginning with another one each time."""
        servers, self._turn = list(self.settings.servers), self._turn + 1
        for number in range(len(servers)):
            try:
                await self._heard(servers[(number + self._turn) % len(servers)])
                return
            except StorageUnavailable:
                if number == len(servers) - 1:
                    raise

    async def _heard(self, url: str) -> None:
        """Connect, and again when the line is reset: a server that refuses may hang up before its words are read."""
        for _ in range(_RESETS_MOST):
            try:
                return await self._connect(url)
            except ConnectionResetError:
                continue
        raise _unreached(url, "the connection was reset")

    async def _connect(self, url: str) -> None:
        settings, lost = self.settings, asyncio.Event()
        self._last_error = ""

        async def told(error: Exception) -> None:
            self._last_error = str(error)
            if "permissions violation" in self._last_error.lower():
                self._forbidden(self._last_error)

        async def ended() -> None:
            lost.set()
            if self._client is client:
                self._lost()

        client = Client()
        try:
            await client.connect(
                url,
                name="bsfg",
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_SECONDS,
                ping_interval=5,
                max_outstanding_pings=2,
                pending_size=256 << 20,
                error_cb=told,
                disconnected_cb=ended,
                closed_cb=ended,
                tls=_tls(settings),
                user_credentials=str(settings.credentials) if settings.credentials else None,
            )
            self._inbox = client.new_inbox()
            await client.subscribe(
                f"{self._inbox}.*", cb=self._answered, pending_msgs_limit=1 << 30, pending_bytes_limit=1 << 40
            )
            if self._answering:
                await self._answer_at(client)
            if lost.is_set():
                raise Away("the connection was lost at once")
        except (TimeoutError, OSError, nats.errors.Error, Away) as error:
            lost.set()
            with suppress(nats.errors.Error):
                await client.close()
            unreached = _unreached(url, self._last_error or str(error) or type(error).__name__)
            raise ConnectionResetError if _RESET in unreached.message else unreached from None
        except (ValueError, ssl.SSLError) as error:
            raise StorageUnreadable(f"{url} cannot be used: {error}", hint=_ADDRESS) from None
        except ModuleNotFoundError as error:
            raise ExtraMissing(f"credentials needs {error.name}, which is not installed", hint=_NKEYS) from None
        self._client = client
        self.piece_bytes = min(client.max_payload, _PIECE_BYTES) - _HEADERS_BYTES

    async def _answered(self, message: Msg) -> None:
        if (waiting := self._waiting.get(message.subject.rpartition(".")[2])) is not None:
            waiting.take(message)

    def _lost(self) -> None:
        self._client = None
        self._fail_all(Away(self._last_error or "the connection was lost"))
        if not self._closed and (self._staying is None or self._staying.done()):
            self._staying = self._loop.create_task(self._come_back())

    async def _come_back(self) -> None:
        """Connect again, for as long as it takes: who asks whether the zone's node is alive must find it so."""
        while self._client is None and not self._closed:
            with suppress(Exception):  # whatever it is: nobody else tries again
                await self._connect_any()
            await asyncio.sleep(_PAUSE_SECONDS)

    def _fail_all(self, error: Exception) -> None:
        for waiting in list(self._waiting.values()):
            waiting.fail(error)

    def _forbidden(self, says: str) -> None:
        """Tell who may not publish, and nobody else; without the right to hear answers that is everybody."""
        for waiting in list(self._waiting.values()):
            if "publish to" not in says.lower() or f'"{waiting.subject}"'.lower() in says.lower():
                waiting.fail(StorageUnreadable(says, hint=_PERMISSIONS))

    async def answer_at(self, subject: str) -> None:
        """Say our name to whoever asks at a subject who is there, from now on."""
        self._answering = subject
        await self._answer_at(self._connected())

    async def _answer_at(self, client: Client) -> None:
        async def here(message: Msg) -> None:
            if message.data:
                self.standing[message.data.decode(errors="replace")] = time.monotonic()
            with suppress(nats.errors.Error):
                await message.respond(self.settings.node_name.encode())

        try:
            self._subscribed = await client.subscribe(self._answering, cb=here)
            await client.flush(CONNECT_SECONDS)
        except nats.errors.Error as error:
            raise Away(str(error)) from None

    async def answer_no_more(self) -> None:
        """Be silent again."""
        self._answering = ""
        subscribed, self._subscribed = self._subscribed, None
        if subscribed is not None and self._client is not None:
            with suppress(nats.errors.Error):
                await subscribed.unsubscribe()

    def close(self) -> None:
        """End the connection and its thread."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
        if not self._thread.is_alive():
            self._loop.close()
            return
        with suppress(Exception):
            self.wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CONNECT_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        if self._staying is not None:
            self._staying.cancel()
            await asyncio.gather(self._staying, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        # Whoever waits for a server hears that the storage is closed; without the loop he would hear nothing.
        if waiting := asyncio.all_tasks() - {asyncio.current_task()}:
            _, waiting = await asyncio.wait(waiting, timeout=CONNECT_SECONDS)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    # Use.

    def wait(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Let the thread of the client do something, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def run(
        self,
        doing: str,
        work: Callable[[], Awaitable[Found]],
        *,
        changes: bool = False,
        patience_seconds: float | None = None,
        unsure: bool = False,
    ) -> Found:
        """Do some work, and again when no server answers; what changes something looks for its first attempt itself.

        What changes something and cannot be made again in time has an unknown outcome. ``unsure`` says that it may
        have been made before.
        """
        patience = self.settings.patience_seconds if patience_seconds is None else patience_seconds
        begun = time.perf_counter()
        with self._submitting:
            if self._closed:
                raise StorageUnavailable(f"{doing}: the storage is closed")
            insisting = self._insist(doing, work, changes, patience, unsure)
            running = asyncio.run_coroutine_threadsafe(insisting, self._loop)
        try:
            found = running.result()
        except CancelledError:
            raise (OutcomeUnknown if changes else StorageUnavailable)(f"{doing}: the storage was closed") from None
        if changes:
            self._on_sync(time.perf_counter() - begun)
        return found

    async def _insist(
        self, doing: str, work: Callable[[], Awaitable[Found]], changes: bool, patience: float, unsure: bool
    ) -> Found:
        deadline = 0.0
        while True:
            reached = self._client is not None
            try:
                found = await work()
                self._given_up = False
                return found
            except Away as away:
                unsure = changes and (unsure or reached)
                deadline = deadline or time.monotonic() + (0.0 if self._given_up else patience)
                if time.monotonic() >= deadline or self._closed:
                    # Who had less patience than others says nothing for them.
                    self._given_up = self._given_up or patience >= self.settings.patience_seconds
                    if unsure:
                        raise OutcomeUnknown(f"{doing}: the server went away meanwhile: {away}") from None
                    raise StorageUnavailable(f"{doing}: {away}") from None
                await asyncio.sleep(_PAUSE_SECONDS)
            except (ApiRefusal, StorageUnreadable) as refusal:
                if unsure:
                    # This attempt was refused; an earlier one may have been heard.
                    raise OutcomeUnknown(f"{doing}: the server went away, then refused: {refusal}") from None
                raise refusal.translated(doing) if isinstance(refusal, ApiRefusal) else refusal from None

    def _connected(self) -> Client:
        if self._client is not None and self._client.is_closed:
            # One whose last bytes could not be sent closes without a word.
            self._lost()
        if self._client is None:
            raise Away(self._last_error or "no server can be reached")
        return self._client

    async def ask(
        self,
        subject: str,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        many: bool = False,
        seconds: float = ANSWER_SECONDS,
    ) -> list[Msg]:
        """Send a message and give the answer, or several and the status at their end."""
        client, token = self._connected(), str(next(self._tokens))
        future: asyncio.Future[list[Msg]] = asyncio.get_running_loop().create_future()
        self._waiting[token] = _Answer(subject, future, [] if many else None)
        try:
            await client.publish(subject, data, f"{self._inbox}.{token}", headers)
            async with asyncio.timeout(seconds):
                return await future
        except (TimeoutError, nats.errors.Error) as error:
            raise Away(str(error) or f"no answer within {seconds:g} seconds") from None
        finally:
            del self._waiting[token]

    async def who_answers(self, subject: str, seconds: float, asks: str = "") -> str | None:
        """Give the name of whoever answers at a subject, told who ``asks``; None when nobody is there who can."""
        try:
            (answer,) = await self.ask(subject, asks.encode(), seconds=seconds)
        except Away:
            await self.api("INFO")  # else it is the server that does not answer
            return None
        return None if (answer.headers or {}).get("Status") == "503" else answer.data.decode(errors="replace")

    async def api(self, what: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask the server about its streams; raises `ApiRefusal` when it says no."""
        (answer,) = await self.ask(f"$JS.API.{what}", orjson.dumps(document) if document is not None else b"")
        return _document(answer)

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> int:
        """Store a message; give its sequence number when it is durable."""
        (answer,) = await self.ask(subject, data, headers)
        return _stored_as(answer)

    def publish_once(self, subject: str, data: bytes, headers: dict[str, str]) -> int | None:
        """Store a message from a writer's thread, by one step of the loop; raises `Away` only when it was not sent.

        Gives its sequence number when it is durable, None when nobody knows what became of it.
        """
        token, future, begun = str(next(self._tokens)), Future[list[Msg]](), time.perf_counter()

        def send() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                transport: Any = self._connected()._transport
            except Away as away:
                future.set_exception(away)
                return
            self._waiting[token] = _Answer(subject, future)
            # The client's own task would send it a turn of the loop later.
            transport.write(written(subject, f"{self._inbox}.{token}", data, headers))

        with self._submitting:
            if self._closed:
                raise Away("the storage is closed")
            self._loop.call_soon_threadsafe(send)
        try:
            (answer,) = future.result(ANSWER_SECONDS)
            seq = _stored_as(answer)
        except (Away, TimeoutError):
            if future.cancel() or token not in self._waiting:
                raise Away(self._last_error or "no server can be reached") from None
            return None
        finally:
            self._waiting.pop(token, None)
        self._given_up = False
        self._on_sync(time.perf_counter() - begun)
        return seq

    async def get(self, stream: str, **which: int | str) -> StoredMessage | None:
        """Give one message, by ``seq`` or ``last_by_subj``, as the stream's leader has it; None when there is none."""
        try:
            found = (await self.api(f"STREAM.MSG.GET.{stream}", which))["message"]
        except ApiRefusal as refusal:
            if refusal.is_absent:
                return None
            raise
        headers = parsed(b64decode(found.get("hdrs", "")))
        return StoredMessage(found["seq"], found["subject"], headers, b64decode(found.get("data", "")))

    async def page(self, stream: str, subject: str, seq: int, most: int, max_bytes: int) -> list[StoredMessage]:
        """Give messages from a sequence number on, as one of the servers has them now."""
        asked = {"seq": seq, "batch": min(most, PAGE_MESSAGES), "max_bytes": max_bytes, "next_by_subj": subject}
        found = await self.ask(f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(asked), many=True)
        status = (found[-1].headers or {}).get("Status")
        if status not in ("204", "404"):
            raise Away(f"the server answers {status} to a reader")
        return [stored(each.headers or {}, each.data) for each in found[:-1]]

    async def subjects(self, stream: str, subject: str) -> set[str]:
        """List the subjects below one that have messages, as the stream's leader has them."""
        found: set[str] = set()
        while True:
            asked = {"subjects_filter": subject, "offset": len(found)}
            answer = await self.api(f"STREAM.INFO.{stream}", asked)
            page = answer["state"].get("subjects") or {}
            found |= page.keys()
            if not page or len(found) >= answer.get("total", 0):
                return found

    async def purge(self, stream: str, subject: str, before_seq: int) -> None:
        """Remove the messages of a subject before a sequence number."""
        await self.api(f"STREAM.PURGE.{stream}", {"filter": subject, "seq": before_seq})

    # What a server must be.

    async def check(self) -> str:
        """Say what server this is; raises when it cannot keep a zone's facts safely."""
        client = self._connected()
        version = client.connected_server_version
        if (version.major, version.minor) < OLDEST_SERVER:
            hint = "Use nats-server {}.{} or newer.".format(*OLDEST_SERVER)
            raise FormatUnsupported(f"the server is nats-server {version}", hint=hint)
        unsafe = not self.settings.allow_unsafe and self.settings.replicas < SAFE_REPLICAS
        if unsafe and client._server_info.get("cluster"):
            says = "the server is one of a cluster: each of them may keep a stream, and be the only one"
            raise StorageUnsafe(says, hint=_UNSYNCED)
        try:
            await self.api("INFO")
        except (ApiRefusal, Away) as error:
            self._connected()
            hint = "Turn JetStream on in the server's configuration, and for the node's account."
            raise StorageUnreadable(f"the server has no JetStream for the node: {error}", hint=hint) from None
        if unsafe:
            await asyncio.to_thread(self._check_synced, client._server_info.get("server_id"))
        return f"nats-server {version}"

    def _check_synced(self, server_id: str | None) -> None:
        url = self.settings.monitor_url
        if url is None:
            raise StorageUnsafe("whether the server syncs what it acknowledges is not known", hint=_UNKNOWN)
        try:
            with urlopen(f"{url.rstrip('/')}/varz", timeout=ANSWER_SECONDS) as answer:
                said = orjson.loads(answer.read())
            always = bool(said["jetstream"]["config"].get("sync_always"))
        except (URLError, OSError, ValueError, KeyError, TypeError) as error:
            raise StorageUnsafe(f"{url} does not say how the server syncs: {error}", hint=_UNKNOWN) from None
        if said.get("server_id") != server_id:
            raise StorageUnsafe(f"{url} is the monitor of another server", hint=_UNKNOWN)
        if not always:
            raise StorageUnsafe("sync_interval of the server is not always", hint=_UNSYNCED)


_ADDRESS = "Check servers, credentials and certificates in [storage.jetstream]."
_NKEYS = "pip install 'nats-py[nkeys]'"
_PERMISSIONS = "Let the node's account publish and subscribe below its prefix, $JS.API and _INBOX."
_UNSYNCED = (
    "Set sync_interval: always in the jetstream block of a server of its own, or use three servers and replicas = 3; "
    "allow_unsafe = true in [storage.jetstream] accepts the loss of facts."
)
_UNKNOWN = (
    "Give monitor_url in [storage.jetstream], the server's http address, so that the node can see it. " + _UNSYNCED
)


def _tls(settings: JetStreamSettings) -> ssl.SSLContext | None:
    if settings.ca is None and settings.certificate is None:
        return None
    context = ssl.create_default_context(cafile=str(settings.ca) if settings.ca else None)
    if settings.certificate is not None:
        context.load_cert_chain(str(settings.certificate), str(settings.key) if settings.key else None)
    return context


def _unreached(url: str, text: str) -> BsfgError:
    url = url.rpartition("@")[2]
    if "uthoriz" in text or "uthentic" in text:
        return StorageUnreadable(f"the server at {url} refuses the node: {text}", hint=_ADDRESS)
    return StorageUnavailable(f"the server at {url} cannot be reached: {text}")


def _document(answer: Msg) -> dict[str, Any]:
    if (answer.headers or {}).get("Status") == "503":
        raise Away("no server answers for the stream")
    document: dict[str, Any] = orjson.loads(answer.data)
    if error := document.get("error"):
        if error.get("code") == 503 and error.get("err_code") not in _FOR_GOOD:
            raise Away(str(error.get("description")))
        raise ApiRefusal(error)
    return document


def _stored_as(answer: Msg) -> int:
    """Give the sequence number of a message that was stored."""
    try:
        return int(_document(answer)["seq"])
    except ApiRefusal as refusal:
        if refusal.number == _WRONG_LAST:
            raise WrongLastSequence(str(refusal)) from None
        if refusal.number == _BUSY:
            raise Away(str(refusal)) from None
        raise
