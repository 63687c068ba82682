"""From a zone's configuration, or from two folders, to the plan of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bsfg.errors import InvalidArgument
from bsfg.ports import Buffer
from bsfg.spark.audit.case import LinkPlan, StreamPlan
from bsfg.spark.audit.ends import FolderEnd, NodeEnd
from bsfg.spark.audit.evidence import End
from bsfg.spark.calls import Access
from bsfg.stores.log.reader import LogFolder, open_folder

if TYPE_CHECKING:
    from bsfg.config import Link, ZoneConfig


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be audited of a link: some of its streams, some of its offsets (both ends inclusive), how deeply.

    With folders, the ends are read from there instead of from the nodes.
    """

    streams: Sequence[str] = ()
    first: int = 0
    last: int | None = None
    deep: bool = True
    sender: Path | None = None
    receiver: Path | None = None
    shipped: bool = False

    def __post_init__(self) -> None:
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise InvalidArgument(f"{self.first} to {self.last} is not a range of offsets")


def plan_link(config: ZoneConfig, name: str | None, own: Access | None, wish: Wish) -> LinkPlan:
    """Plan the audit of a link of a zone; ``own`` calls the zone's node, None when its folder is read."""
    link = _chosen(config, name)
    known = config.streams_of(link)
    streams = [_known(stream, known, link.name) for stream in wish.streams] or list(known)
    return LinkPlan(
        link.name,
        link.zone,
        config.zone.name,
        [_stream(config, link, stream, own, wish) for stream in streams],
    )


def _chosen(config: ZoneConfig, name: str | None) -> Link:
    names = ", ".join(config.links) or "none"
    if name is None and len(config.links) == 1:
        return next(iter(config.links.values()))
    if name is None:
        raise InvalidArgument("which link is not said", hint=f"Give --link; {config.source} has {names}.")
    if name not in config.links:
        raise InvalidArgument(f"{config.source} has no link {name!r}", hint=f"There are {names}.")
    return config.links[name]


def _known(stream: str, known: Sequence[str], where: str) -> str:
    if stream not in known:
        hint = f"There are {', '.join(known) or 'none'}."
        raise InvalidArgument(f"{where} has no stream {stream!r}", hint=hint)
    return stream


def _stream(config: ZoneConfig, link: Link, stream: str, own: Access | None, wish: Wish) -> StreamPlan:
    other = Buffer.STORE if link.buffer == Buffer.FORWARD else Buffer.FORWARD
    shared = any(
        each.zone == link.zone and each.buffer == other and stream in config.streams_of(each)
        for each in config.links.values()
    )
    return StreamPlan(
        stream,
        _sender(config, link, stream, link.buffer, wish),
        _receiver(link, stream, own, wish),
        link.zone,
        config.zone.name,
        frozenset(link.carry_only),
        link.buffer == Buffer.FORWARD,
        _sender(config, link, stream, other, wish) if shared else None,
        wish.first,
        wish.last,
        wish.deep,
    )


def _sender(config: ZoneConfig, link: Link, stream: str, buffer: Buffer, wish: Wish) -> End:
    from bsfg.config.access import consumer_name
    from bsfg.spark.replicate.plan import peer_access

    consumer = consumer_name(config.zone.name, stream, buffer)
    if wish.sender is not None:
        return FolderEnd(str(wish.sender.absolute()), stream, buffer, consumer=consumer)
    access = peer_access(config, link)
    return NodeEnd(access.with_contents() if wish.shipped else access, stream, buffer, consumer=consumer)


def _receiver(link: Link, stream: str, own: Access | None, wish: Wish) -> End:
    if wish.receiver is not None:
        return FolderEnd(str(wish.receiver.absolute()), stream, Buffer.FORWARD, link=link.name)
    assert own is not None
    return NodeEnd(own.with_contents() if wish.shipped else own, stream, Buffer.FORWARD, link=link.name)


@dataclass(frozen=True, slots=True)
class Folders:
    """Two data folders without a configuration: whose they are, and which of the sender's buffers was pulled."""

    sender: Path
    receiver: Path
    zone: str | None = None
    receiver_zone: str | None = None
    buffer: Buffer = Buffer.STORE
    carry_only: frozenset[str] = frozenset()


def plan_folders(folders: Folders, wish: Wish) -> LinkPlan:
    """Plan the audit of two folders; all streams that both have are meant unless some are named."""
    mine = {log.stream: log for log in open_folder(folders.receiver) if log.buffer == Buffer.FORWARD}
    theirs = [log.stream for log in open_folder(folders.sender) if log.buffer == folders.buffer]
    known = [stream for stream in theirs if stream in mine]
    streams = [_known(stream, known, "the pair of folders") for stream in wish.streams] or known
    if not streams:
        raise InvalidArgument(f"no stream has a {folders.buffer} buffer in {folders.sender} and is forwarded to")
    zone = folders.zone or _only_origin([mine[stream] for stream in streams])
    plans = [
        StreamPlan(
            stream,
            FolderEnd(str(folders.sender.absolute()), stream, folders.buffer),
            FolderEnd(str(folders.receiver.absolute()), stream, Buffer.FORWARD),
            zone,
            folders.receiver_zone,
            folders.carry_only,
            folders.buffer == Buffer.FORWARD,
            None,
            wish.first,
            wish.last,
            wish.deep,
        )
        for stream in streams
    ]
    return LinkPlan(f"{folders.sender.name} to {folders.receiver.name}", zone, folders.receiver_zone or "", plans)


def _only_origin(logs: Sequence[LogFolder]) -> str:
    """Find out whose facts a folder holds, when they are all of one zone as far as the first of them tell."""
    zones: set[str] = set()
    for log in logs:
        for frame in log.frames():
            if frame.entries is not None:
                zones |= {zone for zone in frame.entries.column("origin_zone").unique().to_pylist() if zone}
                break
    if len(zones) == 1:
        return zones.pop()
    found = f"it holds facts from {', '.join(sorted(zones))}" if zones else "it holds no facts"
    raise InvalidArgument(
        f"whose folder the sender's is cannot be told from the receiver's: {found}", hint="Give --zone."
    )
