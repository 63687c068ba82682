"""The two ways to an end of a link: a data folder, and a node over the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from bsfg.errors import ForeignLog, FrameInvalid, HasherUnknown, LogDamaged, RemoteError, UnknownStream
from bsfg.gaps import listed
from bsfg.journey.link import PeerPosition
from bsfg.journey.sums import AuditScope
from bsfg.ports import Buffer, ConsumerState, Frame, Quarantined
from bsfg.spark.audit.scope import End, Evidence, SetAside, Span, Summed
from bsfg.spark.calls import BufferSource, CallRetry, NodeAccess, calls, check_history
from bsfg.stores.log import keysegments
from bsfg.stores.log.journal import read_journal
from bsfg.stores.log.reader import LogFolder, open_folder
from bsfg.stores.log.storage import CURSORS, cursor_from
from bsfg.stores.log.view import kept_ranges, restores_of

if TYPE_CHECKING:
    from bsfg.stores.log.view import LogView
    from bsfg.wire.convert import SumOutcome

__all__ = ["End", "FolderEnd", "NodeEnd"]

FRAME_FACTS = 20_000
STATE = "node/state.journal"


@dataclass(frozen=True, slots=True)
class FolderEnd:
    """A log in a data folder, with or without a node that writes to it.

    ``link`` names the receiver's link, to find what it remembers of the sender; ``consumer`` the sender's consumer,
    to find what it keeps of the receiver. Left out, the only one there is is meant.
    """

    path: str
    stream: str
    buffer: Buffer
    link: str | None = None
    consumer: str | None = None

    @property
    def name(self) -> str:
        """Its folder."""
        return self.path

    def folder(self) -> LogFolder:
        """Open the log for reading."""
        for found in open_folder(Path(self.path)):
            if (found.stream, found.buffer) == (self.stream, self.buffer):
                return found
        raise UnknownStream(f"{self.path} has no {self.buffer} buffer of the stream {self.stream!r}")

    def evidence(self, heads: Sequence[bytes] = ()) -> Evidence:
        """Read notes, cursors and the node's memory; heads are looked for while the chain is verified."""
        folder = self.folder()
        # What is remembered and confirmed is read before the log, so that the log is never the older of the two.
        position, cursor = self._position(folder), self._cursor(folder)
        view, notes = folder.look()
        return Evidence(
            log_id=_log_id(folder, view),
            start=view.start,
            end=view.end,
            chain_head=_chain_head(view),
            gaps=notes.gaps,
            kept=list(kept_ranges(notes)),
            set_aside=[_set_aside(item) for item in notes.quarantine.all()],
            position=position,
            cursor=cursor,
            restores=restores_of(folder.files, folder.path),
        )

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Read a range from the files."""
        folder = self.folder()
        if _log_id(folder) != log_id:
            raise ForeignLog(f"{self.path} holds another log than it did")
        return folder.frames(first, end, FRAME_FACTS)

    def summed(self, side: str, bounds: Span, log_id: str, scope: AuditScope) -> None:
        """Nothing: there is nobody who would do it."""

    def kept_keys(self, first: int, last: int) -> pa.RecordBatch | None:
        """Read a key segment."""
        folder = self.folder()
        return keysegments.read(folder.files, folder.path, keysegments.KeySegmentName(first, last))

    def _position(self, folder: LogFolder) -> PeerPosition | None:
        """Find what the zone's node remembers of the sender."""
        found: dict[str, PeerPosition] = {}
        for record in read_journal(folder.files, STATE)[0]:
            link, _, stream = record.head.get("name", "").rpartition("/")
            if record.head.get("kind") == "peer" and stream == self.stream:
                value = record.head["value"]
                head = value["chain_head"]
                found[link] = PeerPosition(**{**value, "chain_head": bytes.fromhex(head) if head else None})
        if self.link is not None:
            return found.get(self.link)
        return next(iter(found.values())) if len(found) == 1 else None

    def _cursor(self, folder: LogFolder) -> ConsumerState | None:
        """Find the consumer by which the receiver pulls."""
        found = {}
        for record in read_journal(folder.files, CURSORS)[0]:
            cursor = cursor_from(record)
            if (cursor.spec.stream, cursor.spec.buffer) == (self.stream, self.buffer):
                found[cursor.spec.name] = cursor.state()
        if self.consumer is not None:
            return found.get(self.consumer)
        pulled = [cursor for cursor in found.values() if cursor.peer_head is not None]
        return pulled[0] if len(pulled) == 1 else None


def _log_id(folder: LogFolder, view: LogView | None = None) -> str:
    segments = (view or folder.view()).segments
    if not segments:
        raise LogDamaged(f"{folder.path} has no segment that can be read")
    # A log that was restored begins with the segments of the history that it goes on from.
    return segments[-1].header.log_id.hex()


def _chain_head(view: LogView) -> bytes:
    """Give the chain value at the end of a log, empty when its last frame cannot be read."""
    from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, chain_after

    if not view.segments:
        return b""
    last = view.segments[-1]
    if not last.frames:
        return last.header.chain_before
    ref = last.frames[-1]
    data = last.files.read_at(last.path, ref.position, FRAME_HEADER_BYTES + ref.header.payload_bytes)
    return chain_after(data[:FRAME_HEADER_BYTES], data[FRAME_HEADER_BYTES:])


@dataclass(frozen=True, slots=True)
class NodeEnd:
    """A log of a running node, read over the wire, or summed up by the node itself unless ``reads_all``.

    With ``link`` it is the receiver's, whose administration the caller may see.
    """

    access: NodeAccess
    stream: str
    buffer: Buffer
    retry_seconds: float = 60.0
    link: str | None = None
    consumer: str | None = None
    reads_all: bool = False

    @property
    def name(self) -> str:
        """Its address."""
        return self.access.address

    def frames(self, first: int, end: int, log_id: str) -> Iterator[Frame]:
        """Read a range, trying again for as long as the node cannot be reached."""
        return BufferSource(self.access, self.stream, str(self.buffer), self.retry_seconds).frames(first, end, log_id)

    def summed(self, side: str, bounds: Span, log_id: str, scope: AuditScope) -> list[Summed] | None:
        """Have the node do it, some at a time; None when it cannot, and then what is wrong shows when it is read."""
        from bsfg.wire.streams import is_unimplemented

        first, end = bounds
        found, patience = list[Summed](), CallRetry(self.retry_seconds)
        if self.reads_all:
            return None
        while first < end:
            try:
                outcome = patience.made(partial(self._sum, side, first, end, scope))
            except (FrameInvalid, HasherUnknown):
                return None
            except RemoteError as error:
                if not is_unimplemented(error):
                    raise
                return None
            check_history(outcome.log_id, outcome.log_end, log_id, end)
            found.append((outcome.found, outcome.keys))
            first = outcome.found.end
        return found

    async def _sum(self, side: str, first: int, end: int, scope: AuditScope) -> SumOutcome:
        from bsfg.wire.client import BoundaryClient
        from bsfg.wire.convert import SumCall

        client = BoundaryClient(calls().connection(self.access))
        return await client.sum_facts(SumCall(self.stream, self.buffer, side, first, end, scope))

    def kept_keys(self, first: int, last: int) -> None:
        """Nothing: keys of entries that have left are not served."""

    def evidence(self, heads: Sequence[bytes] = ()) -> Evidence:
        """Ask the node; what it remembers of the sender is asked before what it has."""
        return CallRetry(self.retry_seconds).made(lambda: self._asked(heads))

    async def _asked(self, heads: Sequence[bytes]) -> Evidence:
        from bsfg.wire.adminclient import AdminClient
        from bsfg.wire.client import BoundaryClient

        connection = calls().connection(self.access)
        position, set_aside = None, []
        if self.link is not None:
            admin = AdminClient(connection)
            position = await admin.recall_peer(self.link, self.stream)
            set_aside = [
                _set_aside(view.quarantined)
                for view in await admin.quarantine(self.stream)
                if view.buffer == self.buffer
            ]
        found = await BoundaryClient(connection).evidence(self.stream, self.buffer, heads)
        return Evidence(
            log_id=found.log_id,
            start=found.start,
            end=found.end,
            chain_head=found.chain_head,
            gaps=listed(found.gaps),
            kept=found.history.kept,
            set_aside=set_aside,
            position=position,
            cursor=next((state for state in found.cursors if state.spec.name == self.consumer), None),
            heads=dict(found.history.heads),
            restores=found.history.restores,
        )


def _set_aside(item: Quarantined) -> SetAside:
    origin = item.origin.offset if item.origin is not None else None
    return SetAside(item.reason, item.key.from_zone, item.key.message_id, item.at_unix_ms, item.detail, origin)
