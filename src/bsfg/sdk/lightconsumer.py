"""A consumer that needs nothing but ``pip install bsfg``: facts come as JSON over HTTP, verified, at least once.

::

    with LightConsumer("mes", node) as consumer:
        for item in consumer.items():
            if isinstance(item, Entry):
                store(item.message.fact)     # must bear to be done twice with the same entry
            consumer.confirm(item)           # a gap record, too: it says what is missing and why
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from bsfg.canonical import parse_literals, write_literals
from bsfg.errors import BsfgError, DigestMismatch, ForeignLog, FrameInvalid, HasherUnknown, InvalidArgument
from bsfg.fact import SHA256_NAME, Entry, Message, Origin
from bsfg.frontier import Frontier, joined
from bsfg.jsonform import message_from_json
from bsfg.retention import GapReason, GapRecord
from bsfg.sdk.light import (
    BACKOFF_FIRST_SECONDS,
    LightCalls,
    LightNode,
    artifact_pieces,
    insist,
    loaded,
    path_of,
)

if TYPE_CHECKING:
    from bsfg.sdk.artifacts import ArtifactReader

log = logging.getLogger("bsfg.consumer")

OnGap = Callable[[GapRecord], None]

CONFIRM_AT = 100
"""So many confirmations go together, if nothing else sends them before."""

LIMIT_MAX = 100_000
WAIT_SECONDS = 5.0
CLOSE_SECONDS = 10.0


class LightConsumer:
    """Gives the facts of a durable consumer in order, from the HTTP port of a node; one thread uses it.

    ``name`` is the consumer that an operator made (``bsfg consumers add``). ``batch_facts`` are asked for at a time.
    A node that cannot be reached is borne for ``patience_seconds``, for ever when that is None.
    """

    def __init__(
        self,
        name: str,
        node: LightNode | str,
        *,
        batch_facts: int = 100,
        patience_seconds: float | None = None,
        on_problem: Callable[[BsfgError], None] | None = None,
    ) -> None:
        self.name, self._batch_facts = name, batch_facts
        node = LightNode(node) if isinstance(node, str) else node
        self._node, self._calls = node, LightCalls(node)
        self._patience_seconds = float("inf") if patience_seconds is None else patience_seconds
        self._on_problem = on_problem or (lambda error: None)
        self._closing = threading.Event()
        self._log_id: str | None = None
        self._gaps_token = ""
        self._ranges: list[tuple[int, int]] = []
        self._refusals: list[dict[str, Any]] = []
        self._frontier = Frontier(-1)
        self._handed = -1
        self.backlog = 0

    @property
    def committed(self) -> int:
        """The offset through which everything is confirmed; -1 when nothing is, or before the first answer."""
        return self._frontier.committed

    def items(self, *, idle_seconds: float | None = None) -> Iterator[Entry | GapRecord]:
        """Give entries and gap records in their order, from the first that is not confirmed.

        It goes on until nothing came for ``idle_seconds``, for ever when that is None. What is handed out once does
        not come again before the next call of this.
        """
        self._handed, idle_since = -1, time.monotonic()
        while not self._closing.is_set():
            left = None if idle_seconds is None else idle_seconds - (time.monotonic() - idle_since)
            wait_seconds = WAIT_SECONDS if left is None else min(WAIT_SECONDS, max(0.0, left))
            found = self._fetched(wait_seconds)
            for item in found:
                yield item
                if self._closing.is_set():
                    return
            if found:
                idle_since = time.monotonic()
            elif left is not None and left <= 0:
                return

    def entries(self, *, idle_seconds: float | None = None, on_gap: OnGap | None = None) -> Iterator[Entry]:
        """Give the entries alone; gap records go to ``on_gap`` in their place, or are logged, and are confirmed."""
        for item in self.items(idle_seconds=idle_seconds):
            if isinstance(item, GapRecord):
                (on_gap or self._log_gap)(item)
                self.confirm(item)
            else:
                yield item

    def run(
        self, handler: Callable[[Entry], object], *, idle_seconds: float | None = None, on_gap: OnGap | None = None
    ) -> int:
        """Give each entry to the handler and confirm what it finished; stop at the first failure and raise it.

        When a node is away then, what was handled comes again.
        """
        count = 0
        try:
            for entry in self.entries(idle_seconds=idle_seconds, on_gap=on_gap):
                handler(entry)
                self.confirm(entry)
                count += 1
        except BaseException:
            self._flush_briefly()
            raise
        self.flush()
        return count

    def _log_gap(self, gap: GapRecord) -> None:
        """Say what is missing where nobody else does."""
        where = f" of {gap.origin_zone}" if gap.origin_zone else ""
        says = "consumer %s: offsets %d to %d%s are not there: %s %s"
        log.warning(says, self.name, gap.first, gap.last, where, gap.reason, gap.detail)

    def confirm(self, item: Entry | GapRecord) -> None:
        """Confirm one item: it was handled, and does not come again. It is sent with others, soon."""
        first, last = (item.offset, item.offset) if isinstance(item, Entry) else (item.first, item.last)
        if isinstance(item, GapRecord) and item.origin_zone is not None:
            # It counts the offsets of another zone, and has no place in this buffer.
            return
        first = max(first, self.committed + 1)
        if first > last:
            return
        self._ranges.append((first, last))
        if len(self._ranges) >= CONFIRM_AT:
            self.flush()

    def refuse(self, entry: Entry, reason: str, detail: str = "") -> None:
        """Pass an entry that can never be handled: it counts as confirmed, and the node keeps a gap record of it."""
        if not reason.strip():
            raise InvalidArgument("refusing an entry needs a reason")
        self._refusals.append({"first": entry.offset, "last": entry.offset, "reason": reason, "detail": detail})
        self.confirm(entry)

    def flush(self) -> None:
        """Send the confirmations that wait; raises `ForeignLog` for those of a history that is gone."""
        if not self._ranges:
            return
        # A node takes so many at once.
        ranges = joined(self._ranges)
        body = {"ranges": ranges, "refusals": self._refusals, "log_id": self._log_id}
        path = path_of("consumers", self.name, "confirm")
        try:
            self._insist(lambda: self._calls.json("POST", path, orjson.dumps(body)))
            self._frontier.confirm(ranges)
        except ForeignLog:
            self._log_id = None
            raise
        finally:
            self._ranges, self._refusals = [], []

    @property
    def artifacts(self) -> ArtifactReader:
        """The artifacts that entries refer to: ``consumer.artifacts.download(entry, "report.pdf", resume=True)``."""
        # Here, because most programs have no use for what comes with it.
        from bsfg.sdk.artifacts import ArtifactReader

        return ArtifactReader(partial(artifact_pieces, self._node))

    def close(self) -> None:
        """Send the confirmations that wait and end; what cannot be sent in time comes again. Repeats are harmless."""
        if self._closing.is_set():
            return
        self._flush_briefly()
        self._closing.set()
        self._calls.close()

    def _flush_briefly(self) -> None:
        before, self._patience_seconds = self._patience_seconds, min(self._patience_seconds, CLOSE_SECONDS)
        with contextlib.suppress(BsfgError):
            self.flush()
        self._patience_seconds = before

    def __enter__(self) -> LightConsumer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _insist(self, work: Callable[[], bytes]) -> bytes:
        def told() -> bytes:
            try:
                return work()
            except BsfgError as error:
                self._on_problem(error)
                raise

        return insist(told, self._closing, time.monotonic() + self._patience_seconds)

    def _fetched(self, wait_seconds: float) -> list[Entry | GapRecord]:
        """Ask for what follows; what was confirmed goes first, because that is where the node begins."""
        self.flush()
        # What was handed out and is not confirmed yet is passed over; an older node gives it again, so that it must not
        # fill the whole answer.
        limit = min(LIMIT_MAX, self._batch_facts + max(0, self._handed - self.committed))
        asked = {
            "limit": limit,
            "wait_ms": int(wait_seconds * 1000),
            "gaps_after": self._gaps_token or None,
            "after": self._handed if self._log_id is not None and self._handed > self.committed else None,
        }
        path = path_of("consumers", self.name, "facts", **asked)
        answer = self._insist(lambda: self._calls.json("GET", path, wait_seconds=wait_seconds))
        found, lines = _read(answer)
        if self._log_id not in (None, found["log_id"]):
            before, self._log_id = self._log_id, None
            raise ForeignLog(f"the node's log is now {found['log_id']}, it was {before}")
        if self._log_id is not None and (found["start"] <= self.committed or found["end"] <= self._handed):
            had, self._log_id = max(self.committed, self._handed), None
            raise ForeignLog(f"the node's log went back: {had} was there, it starts at {found['start']}")
        if self._log_id is None:
            self._frontier = Frontier(found["start"] - 1)
        self._log_id, self._gaps_token = found["log_id"], found["gaps_token"]
        self.backlog = max(0, found["end"] - found["start"])
        try:
            items: list[Entry | GapRecord] = [gap_of(gap) for gap in found["gaps"]]
            items += [entry_of(line) for line in lines]
        except (KeyError, TypeError, ValueError) as error:
            raise FrameInvalid(f"what answered a fetch is no answer of a node: {error!r}") from None
        items = sorted((item for item in items if _place(item) > self._handed or _is_told(item)), key=_order)
        self._handed = max([self._handed, *(_place(item) for item in items if not _is_told(item))])
        if not items and found["next_offset"] > found["start"]:
            # Only what waits for its confirmation came; to ask again at once would be to ask all the time.
            self._closing.wait(min(wait_seconds, BACKOFF_FIRST_SECONDS))
        return items


def _is_told(item: Entry | GapRecord) -> bool:
    """Tell whether this is of another zone's offsets, and has no place of its own here."""
    return isinstance(item, GapRecord) and item.origin_zone is not None


def _place(item: Entry | GapRecord) -> int:
    return item.offset if isinstance(item, Entry) else item.last


def _order(item: Entry | GapRecord) -> int:
    if _is_told(item):
        return -1
    return item.offset if isinstance(item, Entry) else item.first


def _read(answer: bytes) -> tuple[Any, list[bytes]]:
    """Read an answer and give each entry as JSON of its own, with its numbers as they were written."""
    try:
        found = loaded(answer, "log_id", "start", "end", "next_offset", "gaps", "gaps_token", "entries")
        if orjson.dumps(found) == answer:
            return found, [orjson.dumps(each) for each in found["entries"]]
        return found, [write_literals(each) for each in parse_literals(answer)["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FrameInvalid(f"what answered a fetch is no answer of a node: {error}") from None


def gap_of(found: dict[str, Any]) -> GapRecord:
    """Read a gap record; ``count`` always says for how many offsets it stands."""
    count = found.get("count")
    whole = count == found["last"] - found["first"] + 1
    return GapRecord(
        found["first"],
        found["last"],
        GapReason(found["reason"]),
        found["at_unix_ms"],
        found.get("detail", ""),
        found.get("origin_zone"),
        None if whole else count,
    )


def entry_of(line: bytes) -> Entry:
    """Read an entry in its JSON form and verify its digest; raises `DigestMismatch`."""
    found, message = loaded(line), message_from_json(line)
    hasher, _, digits = found["digest"].partition(":")
    digest = bytes.fromhex(digits)
    if body_digest(message, hasher) != digest:
        raise DigestMismatch(f"the fact at offset {found['offset']} does not match its digest", offset=found["offset"])
    origin = Origin(**found["origin"]) if found.get("origin") else None
    return Entry(found["offset"], found["appended_at_unix_ms"], message, digest, origin, hasher)


def body_digest(message: Message, hasher: str = SHA256_NAME) -> bytes:
    """Give the digest of a message's body: subject, predicate, artifact digest and object, with NUL between."""
    fact = message.fact
    parts = (fact.subject.encode(), fact.predicate.encode(), (fact.artifact.digest if fact.artifact else "").encode())
    body = b"\0".join((*parts, fact.object))
    if hasher == SHA256_NAME:
        return hashlib.sha256(body).digest()
    try:
        from blake3 import blake3
    except ImportError:
        raise HasherUnknown.of(hasher, installable=hasher == "blake3") from None
    if hasher != "blake3":
        raise HasherUnknown.of(hasher, installable=False)
    digest: bytes = blake3(body).digest()
    return digest
