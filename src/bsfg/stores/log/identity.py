"""Who a log is: its id, the secret of its key index, and the histories that it goes on from.

A log that is restored from a backup is a new history: what was appended after the backup was made may have been seen by
others under offsets that will now be given to other facts. So it gets a new id, and the old one becomes an *ancestor*
that ends where the new history begins. Segments of both stay as they were written, and the chain runs through them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import crc32c
import orjson
import pyarrow as pa

from bsfg.columns import FACT_SCHEMA
from bsfg.errors import FormatUnsupported
from bsfg.stores.log.damage import is_damage, readable
from bsfg.stores.log.files import Files, write_whole
from bsfg.stores.log.segments import read_segment_header, segment_bases, segment_name, stand_in
from bsfg.stores.shared.frame import Damaged, SegmentHeader, Torn

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A history that was left when a backup was restored: its id, where it was left (exclusive), and when."""

    log_id: bytes
    end: int
    restored_unix_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Who a log is; ``lineage`` are the histories it goes on from, oldest first."""

    log_id: bytes
    secret: bytes
    lineage: tuple[Ancestor, ...] = ()

    @property
    def index_owner(self) -> bytes:
        """Name the log and the secret its keys are hashed with, without giving either away."""
        return hashlib.blake2b(self.log_id, digest_size=16, key=self.secret, person=b"index").digest()

    def owner_at(self, base: int) -> bytes:
        """Give the id that a segment beginning at an offset must carry."""
        return next((each.log_id for each in self.lineage if base < each.end), self.log_id)

    def restored(self, end: int, now_unix_ms: int) -> LogIdentity:
        """Give the identity of a new history that goes on from this one at ``end``."""
        ancestor = Ancestor(self.log_id, end, now_unix_ms)
        return LogIdentity(secrets.token_bytes(16), secrets.token_bytes(32), (*self.lineage, ancestor))


def read_identity(files: Files, folder: str) -> LogIdentity | None:
    """Read the identity of a log; None when it was never written or cannot be read."""
    path = f"{folder}/log.json"
    try:
        text = bytes(files.read(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_damage(error):
            raise
        return None
    try:
        data = orjson.loads(text)
        if not passes_check(data):
            return None
        if data["format"] > FORMAT:
            raise FormatUnsupported(f"{path} has format {data['format']}, this version reads up to {FORMAT}")
        lineage = tuple(
            Ancestor(bytes.fromhex(each["log_id"]), int(each["end"]), int(each["restored_unix_ms"]))
            for each in data.get("lineage", ())
        )
        return LogIdentity(bytes.fromhex(data["log_id"]), bytes.fromhex(data["index_secret"]), lineage)
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError, AttributeError):
        return None


def write_identity(files: Files, folder: str, identity: LogIdentity) -> None:
    """Make the identity of a log durable."""
    content: dict[str, object] = {
        "format": FORMAT,
        "log_id": identity.log_id.hex(),
        "index_secret": identity.secret.hex(),
    }
    if identity.lineage:
        content["lineage"] = [
            {"log_id": each.log_id.hex(), "end": each.end, "restored_unix_ms": each.restored_unix_ms}
            for each in identity.lineage
        ]
    write_whole(files, f"{folder}/log.json", checked(content))


def checked(content: Mapping[str, object]) -> bytes:
    """Write a small document with a checksum of what it says."""
    return orjson.dumps({**content, "check": _check(content)}, option=orjson.OPT_INDENT_2)


def passes_check(content: Mapping[str, object]) -> bool:
    """Tell whether a document says what it said when it was written; those of earlier versions have no checksum."""
    rest = {name: value for name, value in content.items() if name != "check"}
    return "check" not in content or content["check"] == _check(rest)


def _check(content: Mapping[str, object]) -> str:
    return f"{crc32c.crc32c(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)):08x}"


def identity_from_segments(files: Files, folder: str) -> LogIdentity | None:
    """Find out from the segments who a log is whose own record is lost; None when no segment tells."""
    found: list[tuple[int, bytes]] = []
    for base in segment_bases(files, folder):
        header = header_at(files, f"{folder}/{segment_name(base)}", base, FACT_SCHEMA)
        if header is not None:
            found.append((base, header.log_id))
    if not found:
        return None
    lineage = [Ancestor(log_id, base) for (_, log_id), (base, later) in pairwise(found) if log_id != later]
    return LogIdentity(found[-1][1], secrets.token_bytes(32), tuple(lineage))


def header_at(files: Files, path: str, base: int, schema: pa.Schema) -> SegmentHeader | None:
    """Read the header of a segment, or make one up by its first sound frame as the writer does; None without any."""
    try:
        return read_segment_header(files, path)
    except (Torn, Damaged):
        pass
    except OSError as error:
        if not is_damage(error):
            raise
    return stand_in(readable(files, path)[0], base, schema)
