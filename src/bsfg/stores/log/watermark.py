"""How far a log is durable, as its writer last said: for readers in other processes, and for the next writer."""

from __future__ import annotations

import struct

import crc32c

from bsfg.stores.log.damage import is_damage
from bsfg.stores.log.files import Files

WATERMARK = struct.Struct("<16sqqI")
"""The boot, the end of the log, the size of its active segment, and a checksum."""

_WATERMARK_LOOKS = 100
"""A watermark that fails its check is being written just now, unless it fails every time."""


def boot_id() -> bytes:
    """Identify this boot of the machine: after another boot nothing is in the page cache any more."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def read_watermark(files: Files, folder: str) -> tuple[bytes, int, int] | None:
    """Read how far the writer last said the log is durable: boot, end and size of the active segment."""
    for _ in range(_WATERMARK_LOOKS):
        try:
            data = files.read_at(f"{folder}/durable", 0, WATERMARK.size)
        except FileNotFoundError:
            return None
        except OSError as error:
            if not is_damage(error):
                raise
            return None
        if len(data) < WATERMARK.size:
            return None
        boot, end, size, crc = WATERMARK.unpack(data)
        if crc32c.crc32c(data[:-4]) == crc:
            return boot, end, size
    return None


class Watermark:
    """The place where a writer says how far its log is durable; never synced, because a power loss ends its meaning."""

    def __init__(self, files: Files, folder: str) -> None:
        self._boot_id = boot_id()
        self._slot = files.slot(f"{folder}/durable", WATERMARK.size)

    def publish(self, end: int, size_bytes: int) -> None:
        """Say that everything before ``end`` is durable, in that many bytes of the active segment."""
        body = WATERMARK.pack(self._boot_id, end, size_bytes, 0)[:-4]
        self._slot.store(body + crc32c.crc32c(body).to_bytes(4, "little"))

    def close(self) -> None:
        """Release it."""
        self._slot.close()
