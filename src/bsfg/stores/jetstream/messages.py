"""The messages of one buffer: how a change is written into them, and read again.

A change is one message, or several when it is too large for one or when its parts stay for different times. The last
of them makes the change; without it the others are void.

By subject: ``frame`` has a frame and the hashes of its keys; ``bulk`` the keys of what left and the newest entries
among it; ``meta.note`` and ``meta.aside`` records and refused facts; ``meta.mark`` says who writes; ``meta.keys`` sums
up the frames before it, so that an opening does not read them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import orjson

from bsfg.stores.shared.keeper import BufferHead, Change

CHANGE, HEAD, EXPECTED = "Bsfg-Change", "Bsfg-Head", "Nats-Expected-Last-Sequence"
FRAME_SUBJECT, NOTE, ASIDE, KEYS, MARK = "frame", "meta.note", "meta.aside", "meta.keys", "meta.mark"
GONE, LATEST = "bulk.gone", "bulk.latest"


class StoredMessage(NamedTuple):
    """One message of a stream."""

    seq: int
    subject: str
    headers: Mapping[str, str]
    data: bytes


def stored(headers: Mapping[str, str], data: bytes) -> StoredMessage:
    """Read a message as a server gives it to a reader."""
    return StoredMessage(int(headers["Nats-Sequence"]), headers["Nats-Subject"], headers, data)


def written(subject: str, reply: str, data: bytes, headers: Mapping[str, str]) -> bytes:
    """Write a message as it goes to the server, with where to answer."""
    head = "".join(["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items()), "\r\n"]).encode()
    command = f"HPUB {subject} {reply} {len(head)} {len(head) + len(data)}\r\n".encode()
    return b"".join([command, head, data, b"\r\n"])


def parsed(headers: bytes) -> dict[str, str]:
    """Read the headers of a message."""
    pairs = (line.partition(":") for line in headers.decode().split("\r\n")[1:] if line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def head_text(head: BufferHead) -> str:
    """Write a head for the header of a message."""
    return ",".join([*map(str, head[:5]), head.chain.hex()])


def head_of(message: StoredMessage) -> BufferHead:
    """Read the head that a message leaves behind."""
    *numbers, chain = message.headers[HEAD].split(",")
    start, end, used_bytes, keys, newest_unix_ms = map(int, numbers)
    return BufferHead(start, end, used_bytes, keys, newest_unix_ms, bytes.fromhex(chain))


class ChangePart(NamedTuple):
    """Which part of which change a message is."""

    id: str
    number: int
    of_all: int

    @staticmethod
    def of(message: StoredMessage) -> ChangePart:
        """Read it from the header."""
        id_, number, count = message.headers[CHANGE].split(";")
        return ChangePart(id_, int(number), int(count))

    @property
    def is_last(self) -> bool:
        """Whether it makes the change."""
        return self.number == self.of_all


class MessageBody(NamedTuple):
    """Some content of a change: under which subject, in which messages, and how it reads."""

    kind: str
    seq: int
    parts: int
    data: bytes


def pack(meta: Mapping[str, Any], *blobs: bytes) -> bytes:
    """Write a document and some bytes into one."""
    head = orjson.dumps({**meta, "sizes": [len(each) for each in blobs]})
    return b"".join([struct.pack(">I", len(head)), head, *blobs])


def unpack(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Read what `pack` wrote."""
    at = 4 + struct.unpack_from(">I", data)[0]
    meta, blobs = orjson.loads(data[4:at]), []
    for size in meta["sizes"]:
        blobs.append(data[at : at + size])
        at += size
    return meta, blobs


def bodies_of(change: Change, piece_bytes: int) -> list[tuple[str, bytes]]:
    """Write a change, what goes first before what stays; a note is last, unless there is one thing alone."""
    bodies: list[tuple[str, bytes]] = []
    if (new := change.frame) is not None:
        row = new.row
        frame = [row.base, row.count, row.appended_at_unix_ms, row.chain_before.hex()]
        hashes = new.hashes[np.argsort(new.offsets)].astype("<i8").tobytes()
        bodies.append((FRAME_SUBJECT, pack({"frame": frame}, row.content, hashes)))
    if change.latest is not None:
        bodies.append((LATEST, change.latest))
    if change.departed is not None:
        bodies.append((GONE, change.departed.keys))
    if change.aside:
        rows = [[row.id, row.same, len(row.head.encode()), len(row.fact)] for row in change.aside]
        content = b"".join(part for row in change.aside for part in (row.head.encode(), row.fact))
        bodies.append((ASIDE, pack({"rows": rows}, content)))
    note, blobs = _note_of(change, bodies, piece_bytes)
    if note or len(bodies) != 1:
        bodies.append((NOTE, pack(note, *blobs)))
    return bodies


def _note_of(
    change: Change, bodies: Sequence[tuple[str, bytes]], piece_bytes: int
) -> tuple[dict[str, Any], list[bytes]]:
    note: dict[str, Any] = {}
    blobs: list[bytes] = []
    parts: dict[str, int] = {}
    if change.latest is not None or change.departed is not None:
        parts = {kind: len(pieces(data, piece_bytes)) for kind, data in bodies}
    back = dict(zip(parts, np.cumsum(list(parts.values())[::-1])[::-1].tolist(), strict=True)) if parts else {}
    if change.latest is not None:
        note["latest"] = [back[LATEST], parts[LATEST]]
    if (gone := change.departed) is not None:
        kept = gone.kept
        note["departed"] = [kept.first, kept.last, kept.range_digest, kept.chain_before.hex(), kept.chain_after.hex()]
        note["gone"] = [gone.newest_unix_ms, len(gone.keys), back[GONE], parts[GONE]]
    if change.forgotten is not None:
        note["forgotten"] = change.forgotten.first
    if (released := change.released) is not None:
        note["released"] = [released.id, released.reason, released.at_unix_ms]
    if change.gaps or change.gaps_anew:
        note["gaps"] = [[str(gap.reason), gap.detail, gap.origin_zone, gap.since_unix_ms] for gap in change.gaps]
        note["anew"] = change.gaps_anew
        blobs = [gap.ranges.encode() for gap in change.gaps]
    return note, blobs


def pieces(data: bytes, piece_bytes: int) -> list[bytes]:
    """Cut what is too large for one message."""
    return [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)] or [b""]


@dataclass(slots=True)
class ChangeAttempt:
    """A change on its way: its messages, and how many of them are known to be stored."""

    change: Change
    bodies: list[MessageBody]
    messages: list[tuple[str, bytes]]
    id: str = field(default_factory=lambda: uuid4().hex)
    done: int = 0

    @staticmethod
    def of(change: Change, after_seq: int, piece_bytes: int) -> ChangeAttempt:
        """Write a change as the messages that follow one."""
        bodies: list[MessageBody] = []
        messages: list[tuple[str, bytes]] = []
        for kind, data in bodies_of(change, piece_bytes):
            cut = pieces(data, piece_bytes)
            bodies.append(MessageBody(kind, after_seq + 1 + len(messages), len(cut), data))
            messages += [(kind, piece) for piece in cut]
        return ChangeAttempt(change, bodies, messages)

    def move(self, by: int) -> None:
        """Follow a later message than was thought."""
        self.bodies = [body._replace(seq=body.seq + by) for body in self.bodies]


def joined(group: Sequence[StoredMessage], base: str) -> list[MessageBody]:
    """Give what the messages of one change hold."""
    bodies: list[list[StoredMessage]] = []
    for message in group:
        if bodies and bodies[-1][0].subject == message.subject:
            bodies[-1].append(message)
        else:
            bodies.append([message])
    return [
        MessageBody(each[0].subject[len(base) + 1 :], each[0].seq, len(each), b"".join(one.data for one in each))
        for each in bodies
    ]
