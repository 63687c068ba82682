"""What a landing is told to do, and what it has done."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bsfg.errors import InvalidArgument
from bsfg.spark.calls import Access
from bsfg.spark.land.columns import By
from bsfg.spark.options import Position

FILE_SIZE_BYTES = 128_000_000
MAX_FACTS_PER_BATCH = 4_000_000
EVERY_SECONDS = 10.0
RETRY_SECONDS = 60.0

# A path object has made one slash of the two already.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@dataclass(frozen=True, slots=True)
class Settings:
    """One landing: which buffer, into which folder, and how."""

    out: Path
    access: Access
    stream: str
    buffer: str = "store"
    by: By = By.PRODUCED_AT
    consumer: str | None = None
    starting: Position | None = None
    max_facts_per_batch: int = MAX_FACTS_PER_BATCH
    file_size_bytes: int = FILE_SIZE_BYTES
    every_seconds: float = EVERY_SECONDS
    compact: bool = True
    retry_seconds: float = RETRY_SECONDS


@dataclass(slots=True)
class Landed:
    """What a run has done so far. ``next`` is the first offset that is not landed.

    ``seconds`` were spent on landing, ``merging_seconds`` on merging small files.
    """

    facts: int = 0
    missing: int = 0
    batches: int = 0
    files: int = 0
    size_bytes: int = 0
    merged_files: int = 0
    merged_into: int = 0
    next: int = 0
    backlog: int = 0
    seconds: float = 0.0
    merging_seconds: float = 0.0

    @property
    def facts_per_second(self) -> float:
        """How fast facts were landed."""
        return self.facts / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Give the form that ``--json`` prints."""
        times = {"seconds": round(self.seconds, 3), "merging_seconds": round(self.merging_seconds, 3)}
        return {**asdict(self), **times, "facts_per_second": round(self.facts_per_second, 1)}


def folder_of(out: str | Path) -> Path:
    """Give the landing folder as an absolute path, made if need be; raises `InvalidArgument` for an address."""
    if _ADDRESS.match(str(out)):
        hint = "Give a folder of the file system, mounted on all machines; object stores cannot rename."
        raise InvalidArgument(f"{out} is not a folder", hint=hint)
    folder = Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be made: {error.strerror}") from None
    return folder
