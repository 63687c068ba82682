"""What a node must remember besides its buffers: senders, gates, and how its message ids come about."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bsfg.batch import EntryBatch
from bsfg.clock import SystemClock
from bsfg.digest import SHA256, hasher_named
from bsfg.errors import BsfgError, ConfigInvalid, ForeignLog, HasherUnknown, MigrationUnfinished, StorageMoved
from bsfg.gate import Gate, Mode
from bsfg.journey.link import PeerPosition, Release
from bsfg.ports import StoreBuffer
from bsfg.sealing import LABEL, IdStrategy, MessageIds, functions_of, plain
from bsfg.stores.log.damage import make_folder
from bsfg.stores.log.files import DiskFiles, Files, translated
from bsfg.stores.log.journal import Journal, Record
from bsfg.stores.log.reserve import Reserve
from bsfg.stores.log.storage import has_begun, remember_begun
from bsfg.together import Together

if TYPE_CHECKING:
    # A backup reads this state without the libraries of the wire, which those need.
    from bsfg.node.parts import NodeContext, NodeSettings

STATE = "node/state.journal"
_PEER, _GATE, _RELEASE = "peer", "gate", "release"
_MOVED = ("storage", "migration")

StateValues = Mapping[tuple[str, str], dict[str, Any]]
"""Values by kind and name."""


@runtime_checkable
class StateKeeper(Protocol):
    """What makes the values of a node durable; ``is_lost`` when some that were there are not any more."""

    @property
    def problems(self) -> Sequence[str]:
        """What was wrong when they were read."""

    @property
    def is_lost(self) -> bool:
        """Whether values that were there are lost."""

    def load(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Read all values, by kind and name; called once, before anything is kept."""

    def keep(self, values: StateValues) -> None:
        """Replace some values, all of them or none, and return when they are durable."""

    def close(self) -> None:
        """Release what it holds."""


class StateJournal:
    """Values in a journal of the data folder."""

    def __init__(self, where: Path | Files, reserve: Reserve | None = None) -> None:
        self._where = where
        self._files: Files = DiskFiles(where) if isinstance(where, Path) else where
        self._values: dict[tuple[str, str], dict[str, Any]] = {}
        self._journal = Journal(self._files, STATE, self._snapshot, begins=True)
        self._with_room = (reserve or Reserve(self._files, 0, SystemClock())).with_room

    @property
    def problems(self) -> list[str]:
        """What was wrong with the journal when it was opened."""
        return [f"{STATE}: {text}" for text in self._journal.problems]

    @property
    def is_lost(self) -> bool:
        """Whether values that were there are lost: which gates were held, and what was known of the senders."""
        return self._journal.is_damaged

    def load(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Open the journal and read it."""
        files = self._files
        try:
            existed = files.exists("node") and bool(files.list("streams"))
            if kept := make_folder(files, "node"):
                self._journal.problems.append(f"its folder was none, and is kept as {kept}")
            files.sync_folder("")
            begun = has_begun(files, STATE)
            for record in self._with_room(lambda: self._journal.open(expected=existed, begun=begun)):
                try:
                    self._values[record.head["kind"], record.head["name"]] = record.head["value"]
                except KeyError:
                    self._journal.problems.append("a record without kind, name or value is left out")
            remember_begun(files, STATE)
        except OSError as error:
            raise translated(error, f"opening the state of the node in {self._where}") from None
        return dict(self._values)

    def keep(self, values: StateValues) -> None:
        """Append a record for each value, with one sync."""
        self._with_room(lambda: self._journal.append(_records(values)))
        self._values.update(values)
        if self._journal.wants_compaction:
            self._journal.compact()

    def close(self) -> None:
        """Release the journal."""
        self._journal.close()

    def _snapshot(self) -> Iterator[Record]:
        yield from _records(self._values)


def _records(values: StateValues) -> list[Record]:
    return [Record({"kind": kind, "name": name, "value": value}) for (kind, name), value in values.items()]


@dataclass(frozen=True, slots=True)
class MovedMark:
    """What a storage says of the migration that it is, or was, a side of: as which, with which backend, and when.

    Both sides of a migration have its ``token``.
    """

    side: str
    other: str
    at_unix_ms: int
    token: str
    is_done: bool = False

    @property
    def is_target(self) -> bool:
        """Whether facts were brought here."""
        return self.side == "target"


class NodeState:
    """The durable values of one node; open it before anything else of the node starts."""

    def __init__(self, where: Path | Files | StateKeeper, reserve: Reserve | None = None) -> None:
        self._keeper = where if isinstance(where, StateKeeper) else StateJournal(where, reserve)
        self._lock = threading.Lock()
        self._values = self._keeper.load()
        self._together = Together(self._put_together)

    @property
    def problems(self) -> Sequence[str]:
        """What was wrong with the values when they were read."""
        return self._keeper.problems

    @property
    def is_lost(self) -> bool:
        """Whether values that were there are lost: which gates were held, and what was known of the senders."""
        return self._keeper.is_lost

    def peer(self, link: str, stream: str) -> StoredMemory:
        """Give the memory of one stream of a link."""
        return StoredMemory(self, f"{link}/{stream}")

    def accept(self, link: str, held: Gate) -> None:
        """Remember that an operator accepts what held a link, until its engine has acted upon that in every stream.

        The finding was made in one stream. If it was another history, the other streams have one too, and the next one
        that they show is meant; if facts were left out, only their own history is.
        """
        code = held.reason.partition(":")[0]
        for (kind, name), value in list(self._values.items()):
            if kind == _PEER and name.startswith(f"{link}/"):
                known = "" if code == ForeignLog.code else value["log_id"] or ""
                log_id = held.held_log_id if name == f"{link}/{held.held_stream}" else known
                self.put(_RELEASE, name, asdict(Release(code, log_id)))

    def released(self, name: str) -> Release | None:
        """Give what was accepted and not acted upon yet."""
        value = self._values.get((_RELEASE, name))
        return Release(**value) if value else None

    def settle(self, name: str, release: Release | None) -> None:
        """Forget what was accepted, if it is this."""
        if release is not None and release == self.released(name):
            self.put(_RELEASE, name, {})

    def begin_at_least(self, link: str, stream: str, position: PeerPosition) -> None:
        """Take a position for the one of a sender that nothing is known of yet."""
        name = f"{link}/{stream}"
        if (self._values.get((_PEER, name)) or {}).get("latest_start") is None:
            self.put(_PEER, name, _position_value(position))

    def held_gates(self) -> dict[tuple[str, str], Gate]:
        """Give the gates that were held when the node last ran, by link and side."""
        result = {}
        for (kind, name), value in self._values.items():
            if kind == _GATE and value["mode"] == Mode.HELD:
                link, _, side = name.rpartition("/")
                result[link, side] = Gate(**{**value, "mode": Mode.HELD})
        return result

    def keep_gate(self, link: str, side: str, gate: Gate) -> None:
        """Remember a gate that an operator holds, or that it is held no more."""
        name, held = (_GATE, f"{link}/{side}"), gate.mode == Mode.HELD
        if held or self._values.get(name, {}).get("mode") == Mode.HELD:
            self.put(*name, {**asdict(gate), "mode": str(gate.mode)})

    def moved(self) -> MovedMark | None:
        """Give what is known of a migration from or to this storage."""
        value = self._values.get(_MOVED)
        return MovedMark(**value) if value else None

    def mark_moved(self, mark: MovedMark) -> None:
        """Remember a migration from or to this storage."""
        self.put(*_MOVED, asdict(mark))

    def check_settled(self) -> None:
        """Raise when the zone's facts were moved away from here, or are not all here yet."""
        mark = self.moved()
        if mark is None or (mark.is_target and mark.is_done):
            return
        if mark.is_target:
            raise MigrationUnfinished(f"the zone is being moved here from {mark.other}, and is not all there yet")
        raise StorageMoved(f"the facts of the zone were moved to {mark.other}", moved_unix_ms=mark.at_unix_ms)

    def values(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Give all values, by kind and name."""
        return dict(self._values)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Give a value."""
        return self._values.get((kind, name))

    def put(self, kind: str, name: str, value: dict[str, Any]) -> None:
        """Replace a value and return when it is durable."""
        self._put({(kind, name): value})

    async def put_with_others(self, kind: str, name: str, value: dict[str, Any]) -> None:
        """Replace a value and return when it is durable, by the same sync as what others replace meanwhile.

        A hundred links that confirm in the same second would else wait for as many syncs, one after the other.
        """
        await self._together.ask(((kind, name), value))

    async def _put_together(self, asked: Sequence[tuple[tuple[str, str], dict[str, Any]]]) -> Sequence[None]:
        await asyncio.to_thread(self._put, dict(asked))
        return [None] * len(asked)

    def _put(self, values: StateValues) -> None:
        with self._lock:
            self._keeper.keep(values)
            self._values.update(values)

    def close(self) -> None:
        """Release what keeps the values."""
        with self._lock:
            self._keeper.close()


class StoredMemory:
    """The `PeerMemory` of one stream of a link, kept in the state of the node."""

    def __init__(self, state: NodeState, name: str) -> None:
        self._state, self._name = state, name

    async def recall(self) -> PeerPosition:
        """Give the position."""
        value = self._state.get(_PEER, self._name)
        if value is None:
            return PeerPosition()
        head, released = value["chain_head"], self._state.released(self._name)
        return PeerPosition(**{**value, "chain_head": bytes.fromhex(head) if head else None}, released=released)

    async def remember(self, position: PeerPosition, settles: Release | None = None) -> None:
        """Keep the position; the same one again costs nothing."""
        value = _position_value(position)
        if value != self._state.get(_PEER, self._name):
            await self._state.put_with_others(_PEER, self._name, value)
        if settles is not None:
            await asyncio.to_thread(self._state.settle, self._name, settles)


def _position_value(position: PeerPosition) -> dict[str, Any]:
    head = position.chain_head
    value = {**asdict(position), "chain_head": head.hex() if head else None}
    del value["released"]  # is kept apart: an engine that knows nothing of it yet must not write over it
    return value


async def check_ids(parts: NodeContext, zone: str) -> None:
    """Raise `ConfigInvalid` when ids would be derived otherwise than those which the zone's newest facts have.

    What was stored and is sent again would then be taken for something new, so it is for the operator to say what is
    meant. Ids that producers give themselves come from nowhere else.
    """
    if parts.settings.ids.strategy == IdStrategy.EXPLICIT:
        return
    for stream in parts.settings.streams:
        try:
            newest = await _newest(await parts.store(stream), zone)
        except BsfgError:
            # Recovery says what is wrong with it; the other streams serve meanwhile.
            continue
        if newest is not None:
            _check_function(newest, stream, parts.settings)
            _check_formula(newest, stream, parts.settings.ids)


def _check_function(newest: EntryBatch, stream: str, settings: NodeSettings) -> None:
    """Refuse to derive ids by another digest function than before."""
    before, now = functions_of(newest)[0], settings.hasher.name
    if before == now:
        return
    try:
        found = settings.ids.derived(plain(newest), newest.digests(), hasher_named(before))
    except HasherUnknown:
        found = newest.values("message_id")
    if found == newest.values("message_id"):
        raise ConfigInvalid(
            f'hasher = "{now}" gives other ids than those of the facts in {stream}, which {before} gave',
            hint=f'Write hasher = "{before}" in [zone] to go on with them. `bsfg help upgrading` tells how to change.',
            stream=stream,
        )


def _check_formula(newest: EntryBatch, stream: str, ids: MessageIds) -> None:
    """Refuse ``semantic`` where ids are of version 0.1, in which it was another formula."""
    if ids.strategy != IdStrategy.SEMANTIC or any(name.startswith(LABEL) for name in ids.fields):
        return
    older = MessageIds(IdStrategy.SEMANTIC_V1, ids.fields)
    if older.derived(newest, newest.digests(), SHA256) == newest.values("message_id"):
        raise ConfigInvalid(
            f'message_ids = "semantic" gives other ids than those of the facts in {stream}',
            hint='Their ids are of version 0.1: write message_ids = "semantic-v1" in [zone] to go on with them. '
            "`bsfg help upgrading` tells how to change.",
            stream=stream,
        )


async def _newest(store: StoreBuffer, zone: str) -> EntryBatch | None:
    """Give the newest entry of a buffer if it was said by this zone."""
    stats = await store.stats()
    if stats.end <= stats.start:
        return None
    async for frame in store.replay(stats.end - 1, end=stats.end):
        if frame.entries is not None and frame.entries.values("from_zone")[-1] == zone:
            return frame.entries.slice(len(frame.entries) - 1)
    return None
