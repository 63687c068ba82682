"""One buffer in one stream: every change is a message that follows the last one known, or is refused.

That is atomicity, order and fencing at once: whoever takes the zone over writes a mark into the stream, and the
message of a writer that was overtaken does not follow the last one any more.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from uuid import uuid4

import numpy as np

from bsfg.digest import KeptRange
from bsfg.errors import BsfgError, OutcomeUnknown, StorageFailed, StorageTaken
from bsfg.stores.jetstream.memory import KnownBuffer, LeftRange, page_of
from bsfg.stores.jetstream.messages import (
    ASIDE,
    CHANGE,
    EXPECTED,
    FRAME_SUBJECT,
    GONE,
    HEAD,
    KEYS,
    LATEST,
    MARK,
    ChangeAttempt,
    ChangePart,
    MessageBody,
    StoredMessage,
    head_of,
    head_text,
    joined,
    pack,
    pieces,
    unpack,
)
from bsfg.stores.jetstream.server import ApiRefusal, Away, JetStreamServer, WrongLastSequence
from bsfg.stores.shared.keeper import (
    PAGE_BYTES,
    AsideRow,
    BufferFound,
    BufferHead,
    BufferKeeper,
    Change,
    FrameInfo,
    FrameRow,
    KeptKeys,
    NewBuffer,
    touched,
)

SUMMED_FRAMES, SUMMED_BYTES = 2_000, 16 << 20
"""After so much the keys and places of frames are summed up in a message."""

_READ_BYTES = 4 * PAGE_BYTES
_SCATTERED = 4
_TOUCHED = "Messages were removed by hand: restore the stream from a copy; facts in other streams are not concerned."


async def mark(
    server: JetStreamServer, name: str, base: str, new: BufferHead, still_ours: Callable[[], Awaitable[None]]
) -> StoredMessage:
    """Be the one writer of a stream: whatever another one sends does not follow the last message any more."""
    while True:
        seq = (await server.api(f"STREAM.INFO.{name}"))["state"]["last_seq"]
        # In this order: a mark of whoever claims the zone from now on is behind ours, or keeps ours off.
        await still_ours()
        last = await server.get(name, seq=seq) if seq else None
        if seq and (last is None or HEAD not in last.headers):
            raise StorageFailed(f"the last message of {name}, which says where it ends, is missing", hint=_TOUCHED)
        headers = {
            EXPECTED: str(seq),
            CHANGE: f"{uuid4().hex};1;1",
            HEAD: last.headers[HEAD] if last is not None else head_text(new),
        }
        with suppress(WrongLastSequence):
            seq = await server.publish(f"{base}.{MARK}", b"", headers)
            return StoredMessage(seq, f"{base}.{MARK}", headers, b"")


class JetStreamFrames(BufferKeeper):
    """The stream of one buffer; what it holds is known in memory, content alone is asked for."""

    def __init__(
        self,
        server: JetStreamServer,
        name: str,
        base: str,
        place: str,
        made_of: NewBuffer,
        marked: StoredMessage,
        *,
        reads_only: bool = False,
    ) -> None:
        """Open the stream behind our mark, or, to read only, as its last message leaves it."""
        self._server, self._name, self._base, self._place, self._made_of = server, name, base, place, made_of
        self._seq, self._head = marked.seq, head_of(marked)
        self._doubt: ChangeAttempt | None = None
        self._beside, self._numbers = uuid4().hex, itertools.count()
        """How the ids of our sums and marks begin: one whose answer was lost is known by it, however late it comes."""
        self._lock = threading.Lock()
        self._reads_only = reads_only
        self._known = server.run(f"opening {place}", self._loaded)
        if self._known.unsummed and not reads_only:
            self._sum_up()
        if not reads_only:
            self._clean(None)

    # Opening.

    async def _loaded(self) -> KnownBuffer:
        """Read what is to be known of the stream: records, sums, and the frames that no sum has."""
        known = KnownBuffer()
        unread: list[tuple[int, int, int]] = []
        async for body in self._scan("meta.*", 1, self._seq):
            if body.kind == KEYS:
                since, end = known.summed_seq, known.summed_end
                summed_since, begin = known.take_summary(body)
                if (since, end) != (summed_since, begin):
                    unread.append((since + 1, summed_since, begin))
            else:
                known.take(body)
        ranges = [(first, last) for first, last, begin in unread if begin > known.first_key]
        for first, last in (*ranges, (known.summed_seq + 1, self._seq)):
            async for body in self._scan(">", first, last):
                if body.kind == FRAME_SUBJECT:
                    known.take(body)
        known.settle(self._head.start)
        return known

    async def _scan(self, subject: str, first: int, last: int) -> AsyncIterator[MessageBody]:
        """Give what the changes between two messages hold; one without its last message was never made."""
        group: list[StoredMessage] = []
        async for message in self._messages(f"{self._base}.{subject}", first, last):
            part = ChangePart.of(message)
            if group and ChangePart.of(group[-1]).id != part.id:
                group = []
            group.append(message)
            if part.is_last:
                for body in joined(group, self._base):
                    yield body
                group = []

    async def _messages(self, subject: str, first: int, last: int) -> AsyncIterator[StoredMessage]:
        while first <= last:
            page = await self._server.page(self._name, subject, first, 1 << 30, _READ_BYTES)
            for message in page:
                if message.seq <= last:
                    yield message
                first = message.seq + 1
            if not page and last == self._seq and not self._reads_only:
                # Our mark is there, but not yet at the server that answers.
                raise Away("a server is behind the others")
            if not page:
                break

    def found(self) -> BufferFound:
        """Give what is known, as soon as it is known what became of the last change."""
        attempt = self._doubt
        if attempt is not None:
            made = self._server.run(f"opening {self._place}", lambda: self._resolved(attempt), changes=True)
            self._doubt = None
            if made:
                self._made(attempt)
        with self._lock:
            known, new = self._known, self._made_of
            size = sum(row.head_bytes + row.fact_bytes for row in known.aside.values())
            aside = len(known.aside), size, known.last_aside_id
            return BufferFound(new.log_id, new.secret, self._head, list(known.gaps), *aside)

    async def _resolved(self, attempt: ChangeAttempt) -> bool:
        """Tell whether a change was made; if it was not, it cannot be any more."""
        await self._look_for(attempt)
        if attempt.done == len(attempt.messages):
            return True
        try:
            # What is still on its way is to follow the last message, which now is another one.
            headers = self._headers(self._id_beside(), 1, 1, self._head)
            self._seq = await self._server.publish(f"{self._base}.{MARK}", b"", headers)
        except WrongLastSequence:
            raise Away("a message came late") from None
        return False

    # Changing.

    def commit(self, change: Change) -> bool:
        """Make a change by a message that must be the next one."""
        new = change.frame
        if new is not None and new.only_if_new and len(self.known(new.hashes)):
            return False
        if change.before != self._head:
            raise touched(self._place, self._head, change.before)
        attempt = self._doubt = ChangeAttempt.of(change, self._seq, self._server.piece_bytes)
        doing = f"writing {self._place}"
        try:
            unsure = self._send_once(doing, attempt)
            if attempt.done < len(attempt.messages):
                self._server.run(doing, lambda: self._send(attempt), changes=True, unsure=unsure)
        except OutcomeUnknown:
            raise
        except BsfgError:
            self._doubt = None
            raise
        self._doubt = None
        self._made(attempt)
        return True

    def _send_once(self, doing: str, attempt: ChangeAttempt) -> bool:
        """Send a change of one message without a detour; tell whether it may have been made, and nobody knows."""
        if len(attempt.messages) > 1:
            return False
        try:
            seq = self._server.publish_once(*self._next_message(attempt))
        except (Away, WrongLastSequence):
            return False  # what that means is found out with patience
        except ApiRefusal as refusal:
            raise refusal.translated(doing) from None
        if seq is not None:
            self._seq, attempt.done = seq, 1
        return seq is None

    def _next_message(self, attempt: ChangeAttempt) -> tuple[str, bytes, dict[str, str]]:
        kind, data = attempt.messages[attempt.done]
        number, count = attempt.done + 1, len(attempt.messages)
        head = attempt.change.after if number == count else attempt.change.before
        return f"{self._base}.{kind}", data, self._headers(attempt.id, number, count, head)

    async def _send(self, attempt: ChangeAttempt) -> None:
        while attempt.done < len(attempt.messages):
            try:
                self._seq = await self._server.publish(*self._next_message(attempt))
                attempt.done += 1
            except WrongLastSequence:
                if not await self._look_for(attempt):
                    raise Away("a message is still on its way") from None

    def _id_beside(self) -> str:
        return f"{self._beside}.{next(self._numbers)}"

    def _headers(self, id_: str, number: int, count: int, head: BufferHead) -> dict[str, str]:
        return {EXPECTED: str(self._seq), CHANGE: f"{id_};{number};{count}", HEAD: head_text(head)}

    async def _look_for(self, attempt: ChangeAttempt) -> bool:
        """Find out how much of a change is stored, and whether that is news; raise when another one wrote behind us."""
        last = await self._unknown_last(attempt.id)
        if last is None:
            return False
        if (part := ChangePart.of(last)).id == attempt.id:
            attempt.done = part.number
        else:
            attempt.move(last.seq - self._seq)
        self._seq = last.seq
        return True

    async def _unknown_last(self, ours: str = "") -> StoredMessage | None:
        """Give the last message when it is not the one that is known; raise when it is not ours."""
        seq = (await self._server.api(f"STREAM.INFO.{self._name}"))["state"]["last_seq"]
        if seq == self._seq:
            return None
        last = await self._server.get(self._name, seq=seq)
        if last is None or CHANGE not in last.headers:
            raise StorageTaken(f"the last message of {self._name} is not one that a node wrote", hint=_TOUCHED)
        if (id_ := ChangePart.of(last).id) == ours or id_.startswith(self._beside):
            return last
        if last.subject.endswith(MARK):
            raise StorageTaken(f"another node has taken over {self._place}")
        raise touched(self._place, head_of(last), self._head)

    def _made(self, attempt: ChangeAttempt) -> None:
        change = attempt.change
        with self._lock:
            for body in attempt.bodies:
                self._known.take(body)
            self._head = change.after
        if len(self._known.unsummed) >= SUMMED_FRAMES or self._known.unsummed_bytes >= SUMMED_BYTES:
            self._sum_up()
        if change.departed or change.released or change.forgotten:
            self._clean(change)

    # Tidying: what is not done now is done another time.

    def _sum_up(self) -> None:
        """Write what is known of the frames since the last time into one message."""
        meta, blobs = self._known.summary()
        meta["through"] = self._seq
        cut = pieces(pack(meta, *blobs), self._server.piece_bytes)
        with suppress(BsfgError):
            first = self._server.run(f"summing up {self._place}", lambda: self._send_summary(cut), patience_seconds=0)
            self._known.summed(first, meta["through"], meta["end"])

    async def _send_summary(self, cut: Sequence[bytes]) -> int:
        id_, first = self._id_beside(), self._seq + 1
        try:
            for number, piece in enumerate(cut, 1):
                headers = self._headers(id_, number, len(cut), self._head)
                self._seq = await self._server.publish(f"{self._base}.{KEYS}", piece, headers)
        except (Away, WrongLastSequence):
            # A part of it may be there: the next change must know where the stream ends.
            if (last := await self._unknown_last()) is not None:
                self._seq = last.seq
            raise Away("the sum broke off") from None
        return first

    def _clean(self, change: Change | None) -> None:
        """Remove the messages that nobody needs any more, as far as a change, or all until now, has left some."""
        purges: dict[str, int] = {}
        with self._lock:
            known = self._known
            if change is None or change.departed:
                # The keys of a frame outlive it: while they are in no sum, it stays.
                rows = known.frames.rows
                first = int(rows["seq"][0]) if len(rows) else self._seq
                purges[FRAME_SUBJECT] = min(first, known.summed_seq + 1) if known.unsummed else first
                purges[LATEST] = known.latest[0] if known.latest else self._seq
            if change is None or change.forgotten:
                purges[GONE] = next((left.seq for left in known.left if left.seq), self._seq)
                purges[KEYS] = next((each.seq for each in known.summaries if each.end > known.first_key), self._seq)
            if change is None or change.released:
                purges[ASIDE] = min((row.seq for row in known.aside.values()), default=self._seq)
            if change is None:
                purges[MARK] = self._seq
        with suppress(BsfgError):
            self._server.run(f"tidying {self._place}", lambda: self._purge(purges), patience_seconds=0)

    async def _purge(self, purges: Mapping[str, int]) -> None:
        for kind, seq in purges.items():
            await self._server.purge(self._name, f"{self._base}.{kind}", seq)

    # Reading.

    def known(self, hashes: np.ndarray) -> np.ndarray:
        """Look hashes up in memory."""
        with self._lock:
            return self._known.keys.find(hashes)

    def infos(self, at: int, most: int) -> list[FrameInfo]:
        """Give what is known of frames without asking."""
        with self._lock:
            rows = self._known.frames.since(at, None, most)
        return [FrameInfo(*row) for row in rows[["base", "count", "size_bytes", "unix_ms"]].tolist()]

    def frames(self, at: int, until: int, most: int) -> list[FrameRow]:
        """Read frames that follow each other."""
        with self._lock:
            rows = self._known.frames.since(at, until, most)
        return self._read(rows)

    def holding(self, offsets: np.ndarray) -> list[FrameRow]:
        """Read the frames that hold offsets."""
        with self._lock:
            rows = self._known.frames.holding(offsets)
        return self._read(rows)

    def _read(self, rows: np.ndarray) -> list[FrameRow]:
        """Read a page of frames; what is lost is passed over, since there may be more behind it."""
        while len(rows):
            page = page_of(rows, PAGE_BYTES)
            bodies = self._bodies(FRAME_SUBJECT, page[["seq", "parts"]].tolist())
            found = [_frame(row, data) for row, data in zip(page.tolist(), bodies, strict=True)]
            if None in found:
                lost = [row for row, frame in zip(page["base"].tolist(), found, strict=True) if frame is None]
                with self._lock:
                    self._known.frames.drop(np.array(lost))
            if any(found):
                return [frame for frame in found if frame is not None]
            rows = rows[len(page) :]
        return []

    def _bodies(self, kind: str, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Read what some messages hold, told by the first of each and how many they are; None for what is gone."""
        return self._server.run(f"reading {self._place}", lambda: self._fetch(kind, places)) if places else []

    async def _fetch(self, kind: str, places: Sequence[tuple[int, int]]) -> list[bytes | None]:
        wanted = [seq + part for seq, parts in places for part in range(parts)]
        found: dict[int, bytes | None] = {}
        while missing := [seq for seq in wanted if seq not in found]:
            for page in await self._pages(f"{self._base}.{kind}", missing):
                found.update((message.seq, message.data) for message in page)
            if missing[0] not in found:
                # The leader knows whether it is gone, or only not yet at the server that answered.
                message = await self._server.get(self._name, seq=missing[0])
                found[missing[0]] = message.data if message is not None else None
        joined_parts = []
        for seq, parts in places:
            data = [each for part in range(parts) if (each := found[seq + part]) is not None]
            joined_parts.append(b"".join(data) if len(data) == parts else None)
        return joined_parts

    async def _pages(self, subject: str, seqs: Sequence[int]) -> list[list[StoredMessage]]:
        """Ask for messages together when they lie together, else each for itself."""
        span = seqs[-1] - seqs[0] + 1
        if span <= _SCATTERED * len(seqs):
            return [await self._server.page(self._name, subject, seqs[0], span, _READ_BYTES)]
        asked = [self._server.page(self._name, subject, seq, 1, _READ_BYTES) for seq in seqs]
        return list(await asyncio.gather(*asked))

    def keys_holding(self, offsets: np.ndarray) -> list[KeptKeys]:
        """Read the keys of ranges that left."""
        with self._lock:
            ranges = [left for left in self._known.left if left.seq]
        at = np.searchsorted([left.kept.first for left in ranges], offsets, side="right") - 1
        lasts = np.array([left.kept.last for left in ranges] or [-1])
        chosen: list[LeftRange] = []
        for number in np.unique(at[(at >= 0) & (offsets <= lasts[at])]).tolist():
            chosen.append(ranges[number])
            if sum(left.size_bytes for left in chosen) > PAGE_BYTES:
                break
        return self._kept(chosen)

    def _kept(self, chosen: Sequence[LeftRange]) -> list[KeptKeys]:
        bodies = self._bodies(GONE, [(left.seq, left.parts) for left in chosen])
        pairs = zip(chosen, bodies, strict=True)
        return [KeptKeys(left.kept.first, left.kept.last, data) for left, data in pairs if data is not None]

    def oldest_keys(self, before_unix_ms: int) -> KeptKeys | None:
        """Give the keys that are to be forgotten next; who was overtaken is told so, also when there are none."""
        self._server.run(f"reading {self._place}", self._unknown_last)
        with self._lock:
            left = next((left for left in self._known.left if left.seq), None)
        if left is None or left.newest_unix_ms >= before_unix_ms:
            return None
        if not (kept := self._kept([left])):
            says = f"the keys of {left.kept.first} to {left.kept.last} are missing in {self._name}"
            raise StorageFailed(says, hint=_TOUCHED)
        return kept[0]

    @property
    def first_chain(self) -> bytes:
        """The chain value before the first frame."""
        return self._made_of.chain

    def history(self, heads: Sequence[bytes]) -> tuple[list[KeptRange], Mapping[bytes, int]]:
        """Give what is known of what left, and where chain values are."""
        with self._lock:
            return [left.kept for left in self._known.left], self._known.frames.places(heads)

    def latest(self) -> bytes | None:
        """Read the newest entries of what left."""
        with self._lock:
            place = self._known.latest
        return self._bodies(LATEST, [place])[0] if place is not None else None

    def aside(
        self, after: int | None, limit: int, *, newest_first: bool = False, same: Sequence[int] | None = None
    ) -> list[AsideRow]:
        """Read refused facts."""
        with self._lock:
            chosen = self._known.refused(after, limit, newest_first, same)
        places = sorted({(row.seq, row.parts) for row in chosen.values()})
        bodies = zip(places, self._bodies(ASIDE, places), strict=True)
        contents = {seq: unpack(data)[1][0] for (seq, _), data in bodies if data is not None}
        return [row.row(id_, contents[row.seq]) for id_, row in chosen.items() if row.seq in contents]


def _frame(row: tuple[int, int, int, int, int, int, bytes], data: bytes | None) -> FrameRow | None:
    base, count, _, _, unix_ms, _, chain = row
    try:
        return FrameRow(base, count, unix_ms, chain, unpack(data)[1][0]) if data is not None else None
    except (struct.error, ValueError, LookupError):
        return None
