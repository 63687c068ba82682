"""Facts as JSON to somebody's web server, in order and at least once, with keys by which a repeat is known.

A batch is one POST. What the receiver refuses because of its content is cut in halves until one item is to blame, and
that is set aside in a file as soon as the receiver has taken another one: a receiver that refuses everything refuses
the sink and not the facts. Whatever else it answers with is waited for, or ends the sink; no fact is left out for it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from bsfg import disk
from bsfg.config.kinds import URL, Address, WrongValue
from bsfg.errors import BsfgError, InvalidArgument, SinkAway, SinkRefused, StorageUnreadable
from bsfg.fact import Entry
from bsfg.jsonform import entry_to_dict
from bsfg.sdk.consuming import Item
from bsfg.sinks.flow import SinkBatch, last_offset, place
from bsfg.wire.posting import PostAnswer, Posting, trusting
from bsfg.wording import one_line

OF_THE_CONTENT = frozenset({400, 409, 413, 422})
"""Answers that blame what was sent; all others blame the sender or the receiver itself."""

PASSING = frozenset({408, 425, 429})
"""Answers below 500 after which the same is sent again."""

REFUSED_IN_A_ROW_MAX = 10
"""So many items may be refused one after the other; then it is the receiver that is wrong, and none of them."""

HEADER_NAME, HEADER_VALUE = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII), re.compile(r"[\t -~]+")
OF_THE_BODY = frozenset({"content-length", "transfer-encoding"})
"""Headers that say how long a body is: with another length than ours a receiver would take a part of it for all."""

RETRY_AFTER_SECONDS_MAX = 3_600.0
TIMEOUT_SECONDS_MAX = 3_600
SECRET_BYTES_MIN = 16
SECRET_PREFIX = b"whsec_"
WORDS_MAX = 300


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Where facts are posted to, and what shows the receiver who does it; the files are read for every request.

    ``secret`` signs each body (HMAC with SHA-256), ``headers`` has lines such as ``Authorization: Bearer …``, ``trust``
    the authorities that the receiver's certificate may be of instead of the system's. ``aside`` takes what the receiver
    refuses.
    """

    url: str
    aside: Path
    secret: Path | None = None
    headers: Path | None = None
    trust: Path | None = None
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_seconds <= TIMEOUT_SECONDS_MAX:
            raise InvalidArgument(f"--timeout must be above 0 and at most {TIMEOUT_SECONDS_MAX} seconds")
        try:
            parts = urlsplit(URL.read(self.url))
        except WrongValue as problem:
            raise InvalidArgument(f"--url {problem}") from None
        if parts.scheme == "http" and not Address(parts.hostname or "", 0).is_loopback:
            raise InvalidArgument("--url must start with https:// unless it is on this machine")
        if parts.username is not None or parts.password is not None:
            hint = "Write `Authorization: …` into a file, and name it with --headers."
            raise InvalidArgument("--url holds a name or a password, which everybody could read", hint=hint)

    def check_trust(self) -> None:
        """Look whether the receiver's certificate can be checked, where it has one."""
        if self.trust is None and self.url.lower().startswith("http:"):
            return
        try:
            trusting(self.trust)
        except OSError as error:
            hint = "Give a file of certificates in PEM form."
            why = "it holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
            raise InvalidArgument(f"--trust {self.trust} cannot be used: {why}", hint=hint) from None

    def signing_key(self) -> bytes | None:
        """Read the secret: as it stands, or what a text that begins with whsec_ stands for."""
        if self.secret is None:
            return None
        key = _read(self.secret, "--secret").strip()
        if key.startswith(SECRET_PREFIX):
            try:
                key = base64.b64decode(key.removeprefix(SECRET_PREFIX), validate=True)
            except binascii.Error:
                key = b""
        if len(key) < SECRET_BYTES_MIN:
            hint = "Make one with `openssl rand -hex 32 > FILE`, and give the receiver the same."
            raise InvalidArgument(f"--secret {self.secret} has no {SECRET_BYTES_MIN} bytes of secret", hint=hint)
        return key

    def own_headers(self) -> dict[str, str]:
        """Read the headers that the receiver wants besides ours."""
        if self.headers is None:
            return {}
        try:
            lines = [line for line in _read(self.headers, "--headers").decode("ascii").splitlines() if line.strip()]
        except UnicodeDecodeError:
            lines = [""]
        found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        is_right = all(HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(found[name]) for name in found)
        if not is_right or not OF_THE_BODY.isdisjoint(map(str.lower, found)):
            hint = "Write a line such as `Authorization: Bearer …`, in ASCII, for each header."
            raise InvalidArgument(f"--headers {self.headers} has a line that is no header", hint=hint)
        return found


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise disk.unreadable(error, f"{option} {path}") from None


def item_form(item: Item, batch: SinkBatch) -> dict[str, Any]:
    """Give the JSON form of an item, with the key by which a repeat of it is known."""
    if isinstance(item, Entry):
        key = f"{item.key.from_zone}/{batch.stream}/{item.key.message_id}"
        return {"idempotency_key": key, **entry_to_dict(item)}
    whose = item.origin_zone or batch.log_id
    return {"idempotency_key": f"gap/{whose}/{batch.stream}/{item.first}-{item.last}/{item.reason}", "gap": item}


@dataclass(slots=True)
class Webhook:
    """The receiver of a webhook."""

    settings: WebhookSettings
    _batch: SinkBatch | None = None
    _parts: list[Sequence[Item]] = field(default_factory=list)
    """What of the batch is still to be sent, the next part last."""
    _refused: list[tuple[Item, SinkBatch, str]] = field(default_factory=list)
    """What was refused since the receiver last took something."""
    _guilty: list[tuple[Item, SinkBatch, str]] = field(default_factory=list)
    """What is to be set aside before anything else happens."""
    _aside: int = 0

    def open(self) -> None:
        """Look whether everything is there that a request needs; the receiver is not asked."""
        self.settings.check_trust()
        self.settings.signing_key()
        self.settings.own_headers()

    def write(self, batch: SinkBatch) -> int | None:
        """Send a batch, the rest of it if it was begun; give the offset before what is not settled yet."""
        if self._batch is not batch:
            self._batch, self._parts = batch, [batch.items]
        try:
            self._send(batch)
        except SinkRefused as error:
            error.details["through"] = self._settled(batch)
            raise
        return self._settled(batch)

    def _send(self, batch: SinkBatch) -> None:
        self._set_aside()
        while self._parts:
            part = self._parts[-1]
            refusal = self._post(part, batch)
            self._parts.pop()
            if refusal is None:
                self._guilty, self._refused = self._refused, []
                self._set_aside()
            elif len(part) > 1:
                middle = len(part) // 2
                self._parts += [part[middle:], part[:middle]]
            else:
                self._refused.append((part[0], batch, refusal))
                if len(self._refused) >= REFUSED_IN_A_ROW_MAX:
                    self.finish()

    def _settled(self, batch: SinkBatch) -> int | None:
        """Give the offset through which everything was taken or set aside."""
        refused = [item for item, _, _ in (*self._refused, *self._guilty)]
        unsettled = [*refused, *(item for part in self._parts for item in part)]
        pending = [found[0] for found in map(place, unsettled) if found is not None]
        return min(pending) - 1 if pending else last_offset(batch.items)

    def finish(self) -> None:
        """Raise when the receiver has refused something and taken nothing since: nobody knows who is to blame."""
        if self._refused:
            count, refusal = len(self._refused), self._refused[-1][2]
            raise SinkRefused(f"{self._where} has taken nothing since it refused {count} in a row: {refusal}")

    def close(self) -> None:
        """Forget what is not settled; it comes again."""
        self._batch, self._parts, self._refused, self._guilty = None, [], [], []

    def noted(self) -> dict[str, int]:
        """Count what was set aside, and what nobody knows yet whether to blame."""
        return {"aside": self._aside, "refused": len(self._refused)}

    @property
    def _where(self) -> str:
        """The receiver, without what its address may carry as a secret."""
        parts = urlsplit(self.settings.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def _post(self, items: Sequence[Item], batch: SinkBatch) -> str | None:
        """Send items; give None when they are taken and the receiver's words when it refuses their content."""
        settings, forms = self.settings, [item_form(item, batch) for item in items]
        body = orjson.dumps({"stream": batch.stream, "log_id": batch.log_id, "items": forms})
        try:
            headers = {**settings.own_headers(), **signed_headers(body, settings.signing_key(), int(time.time()))}
            settings.check_trust()
        except (InvalidArgument, StorageUnreadable) as error:
            # They were good when the sink began: somebody is putting new ones in their place.
            raise SinkAway(error.message, hint=error.hint) from None
        try:
            answer = Posting(settings.timeout_seconds, settings.trust).post(settings.url, body, headers)
        except ssl.SSLCertVerificationError as error:
            hint = "Check --url; name the authority of its certificate with --trust if it is one of your own."
            raise SinkRefused(f"{self._where} is not trusted: {error.verify_message}", hint=hint) from None
        except OSError as error:
            raise SinkAway(f"{self._where} does not answer: {error}") from None
        if answer.is_good:
            return None
        if answer.status in OF_THE_CONTENT:
            return _said(answer)
        raise self._failed(answer)

    def _failed(self, answer: PostAnswer) -> BsfgError:
        says = f"{self._where} answers {_said(answer)}"
        if 300 <= answer.status < 400:
            return SinkRefused(says, hint="It sends the sink elsewhere, where it does not go: give that as --url.")
        if answer.status not in PASSING and answer.status < 500:
            return SinkRefused(says)
        return SinkAway(says, retry_after_seconds=retry_after(answer.retry_after, time.time()))

    def _set_aside(self) -> None:
        """Write down what is to blame, so that it is there whatever happens next."""
        if not self._guilty:
            return
        path, now_unix_ms = self.settings.aside, time.time_ns() // 1_000_000
        lines = [
            orjson.dumps(
                {"at_unix_ms": now_unix_ms, "refused": why, "stream": batch.stream, "item": item_form(item, batch)}
            )
            for item, batch, why in self._guilty
        ]
        try:
            disk.add_lines(path, lines)
        except OSError as error:
            raise disk.translated(error, f"setting a fact aside in {path}") from None
        self._aside += len(self._guilty)
        self._guilty = []


def _said(answer: PostAnswer) -> str:
    words = one_line(answer.begins.decode(errors="replace"))[:WORDS_MAX]
    return f"{answer.status}: {words}" if words else str(answer.status)


def signed_headers(body: bytes, key: bytes | None, at_unix_seconds: int) -> dict[str, str]:
    """Give the headers of a body: its id, which is the same for the same body, and a signature if there is a key."""
    number = hashlib.sha256(body).hexdigest()
    found = {"User-Agent": "bsfg", "Idempotency-Key": number}
    if key is not None:
        signed = hmac.new(key, f"{number}.{at_unix_seconds}.".encode() + body, hashlib.sha256).digest()
        found |= {
            "webhook-id": number,
            "webhook-timestamp": str(at_unix_seconds),
            "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
        }
    return found


def retry_after(said: str | None, now_unix_seconds: float) -> float:
    """Give for how many seconds a receiver wants to be left alone; 0 when it does not say, or nobody can read it."""
    if said is None:
        return 0.0
    try:
        wanted = float(said) if said.strip().isdigit() else parsedate_to_datetime(said).timestamp() - now_unix_seconds
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(0.0, wanted), RETRY_AFTER_SECONDS_MAX)
