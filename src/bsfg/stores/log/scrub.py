"""Re-reading what is sealed: segments, key segments and artifacts, in small steps, for whoever paces them.

Nothing here waits or keeps more than a part of a file. A segment that fails a check is read once more as a whole, as an
opening would read it, to say which entries are meant; what fails only once was no damage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import crc32c

from bsfg.errors import FormatUnsupported
from bsfg.ports import Buffer
from bsfg.stores.log import keysegments
from bsfg.stores.log.damage import is_damage, is_folder, readable, uncovered
from bsfg.stores.log.files import Files
from bsfg.stores.log.notes import Notes
from bsfg.stores.log.segments import read_segment_header, scan_segment, segment_bases, segment_name, stand_in
from bsfg.stores.log.storage import listed_logs, log_folder
from bsfg.stores.log.writer import FORWARD_SCHEMA, STORE_SCHEMA
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, Damaged, Torn, decode_frame_header, decode_segment_header

CHUNK_BYTES = 256 << 10
ARTIFACTS = "artifacts"
_HEADER_BYTES = 16_384

Log = tuple[str, Buffer]


@dataclass(frozen=True, slots=True)
class Rot:
    """Damage in a file at rest; entries that gap records account for already are ``known``."""

    where: str
    position: int
    why: str
    first: int | None = None
    last: int | None = None
    known: bool = False

    @property
    def text(self) -> str:
        """File, byte and what is wrong there."""
        entries = f", entries {self.first} to {self.last}" if self.first is not None else ""
        return f"{self.where} at byte {self.position}{entries}: {self.why}"


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """Some bytes of a file that were read; the last step of a file has ``rot``, which is empty for a sound one."""

    path: str
    size_bytes: int
    log: Log | None = None
    rot: tuple[Rot, ...] | None = None


_Reading = Generator[int, None, list[Rot]]


def walk(files: Files, artifacts: Files, after: str = "") -> Iterator[ScrubStep]:
    """Re-read everything that is sealed whose path follows another one, in the order of paths.

    A folder that cannot be listed is damage, too, and keeps nobody from reading the others.
    """
    for path, rot in _contents(artifacts):
        if f"{ARTIFACTS}/{path}" > after:
            reading = _content(artifacts, path) if rot is None else _found(rot)
            yield from _steps(f"{ARTIFACTS}/{path}", None, reading)
    for stream, buffer in sorted(listed_logs(files)):
        for path, rot in _sealed(files, log_folder(stream, buffer)):
            if path > after:
                reading = _found(rot) if rot is not None else _reading(files, path, buffer)
                yield from _steps(path, (stream, buffer), reading)


def sealed_bytes(files: Files, artifacts: Files) -> int:
    """Give about how many bytes a walk reads."""
    total = 0
    paths = [(artifacts, path) for path, rot in _contents(artifacts) if rot is None]
    for log in listed_logs(files):
        paths += [(files, path) for path, rot in _sealed(files, log_folder(*log)) if rot is None]
    for where, path in paths:
        try:
            total += where.size(path)
        except OSError:
            continue
    return total


def _sealed(files: Files, folder: str) -> list[tuple[str, Rot | None]]:
    """List what is sealed in the folder of a log, in the order of paths, or say that it cannot be listed."""
    try:
        names = [segment_name(base) for base in segment_bases(files, folder)[:-1]]
        names += [f"keys/{name.file_name}" for name in keysegments.listed(files, folder)]
    except OSError as error:
        return [(folder, _unlisted(folder, error))]
    return [(path, None) for path in sorted(f"{folder}/{name}" for name in names)]


def _unlisted(path: str, error: OSError) -> Rot:
    """Say what is wrong with a folder; what may pass is no damage."""
    if not is_damage(error):
        raise error
    return Rot(path, 0, f"the folder cannot be listed: {error.strerror}")


def _reading(files: Files, path: str, buffer: Buffer) -> _Reading:
    return _segment(files, path, buffer) if path.endswith(".seg") else _keys(files, path)


def _found(rot: Rot) -> _Reading:
    yield 0
    return [rot]


def _steps(path: str, log: Log | None, reading: _Reading) -> Iterator[ScrubStep]:
    """Turn the reading of a file into steps; a file that has left meanwhile is sound."""
    try:
        while True:
            yield ScrubStep(path, next(reading), log)
    except StopIteration as ended:
        yield ScrubStep(path, 0, log, tuple(ended.value))
    except FileNotFoundError:
        yield ScrubStep(path, 0, log, ())
    except OSError as error:
        if not is_damage(error):
            raise
        yield ScrubStep(path, 0, log, (Rot(path, 0, f"cannot be read: {error.strerror}"),))


def _contents(artifacts: Files) -> Iterator[tuple[str, Rot | None]]:
    """List the contents of artifacts, and folders that cannot be listed; a file among the folders is none of ours."""
    for shard in artifacts.list("content"):
        try:
            names = artifacts.list(f"content/{shard}")
        except OSError as error:
            if not is_folder(error):
                yield f"content/{shard}", _unlisted(f"{ARTIFACTS}/content/{shard}", error)
            continue
        for name in names:
            if len(name) == 64:
                yield f"content/{shard}/{name}", None


def _content(artifacts: Files, path: str) -> _Reading:
    digest, at = hashlib.sha256(), 0
    while chunk := artifacts.read_at(path, at, CHUNK_BYTES):
        digest.update(chunk)
        at += len(chunk)
        yield len(chunk)
    sound = digest.hexdigest() == path.rpartition("/")[2]
    return [] if sound else [Rot(f"{ARTIFACTS}/{path}", 0, "the content has another digest than its name says")]


def _keys(files: Files, path: str) -> _Reading:
    head = files.read_at(path, 0, 16)
    crc, at = 0, 16
    while chunk := files.read_at(path, at, CHUNK_BYTES):
        crc = crc32c.crc32c(chunk, crc)
        at += len(chunk)
        yield len(chunk)
    sound = head[:8] == keysegments.MAGIC and crc == int.from_bytes(head[8:12], "little")
    return [] if sound else [Rot(path, 0, "the key segment fails its checks")]


def _segment(files: Files, path: str, buffer: Buffer) -> _Reading:
    """Hop from frame to frame; at the first thing that is wrong the whole segment is read."""
    try:
        header = decode_segment_header(files.read_at(path, 0, _HEADER_BYTES))
        at, expected, chain, size = header.size_bytes, header.base, header.chain_before, files.size(path)
        yield min(size, _HEADER_BYTES)
        while at < size:
            raw = files.read_at(path, at, FRAME_HEADER_BYTES)
            frame = decode_frame_header(raw)
            if (frame.base, frame.log_id, frame.chain_before) != (expected, header.log_id, chain):
                raise Damaged("the frame is out of place")
            crc, digest = 0, hashlib.sha256(raw)
            for start in range(at + FRAME_HEADER_BYTES, at + FRAME_HEADER_BYTES + frame.payload_bytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, at + FRAME_HEADER_BYTES + frame.payload_bytes - start)
                chunk = files.read_at(path, start, count)
                crc = crc32c.crc32c(chunk, crc)
                digest.update(chunk)
                yield len(chunk)
            if crc != frame.payload_crc:
                raise Damaged("the frame fails its CRC")
            at, expected, chain = at + frame.frame_bytes, frame.end, digest.digest()
    except FormatUnsupported:
        return []
    except (Torn, Damaged):
        pass
    except OSError as error:
        if not is_damage(error):
            raise
    else:
        return []
    return _harm(files, path, buffer)


def _harm(files: Files, path: str, buffer: Buffer) -> list[Rot]:
    """Read a whole segment again and name everything that is wrong with it; nothing, if it now passes."""
    data, bad = readable(files, path)
    folder, _, name = path.rpartition("/")
    found = [Rot(path, 0, text) for text in bad]
    try:
        header = read_segment_header(files, path)
    except (Torn, Damaged, OSError) as error:
        found.append(Rot(path, 0, str(error)))
        schema = STORE_SCHEMA if buffer == Buffer.STORE else FORWARD_SCHEMA
        made_up = stand_in(data, int(name.removesuffix(".seg")), schema)
        if made_up is None:
            return found
        header = made_up
    notes = Notes(files, folder)
    notes.read()
    scan = scan_segment(data, header, tail_may_be_torn=False)
    for hole in [*scan.holes, *scan.unchained]:
        known = hole in scan.holes and not list(uncovered(hole.first, hole.last, notes.book.own()))
        known = known or hole.last < notes.start
        found.append(Rot(path, hole.position, hole.why, hole.first, hole.last, known and hole.last >= hole.first))
    return found
