"""Names in a landing folder: partitions as Hive writes them, files by the offsets they span, and where work goes on.

Readers of such folders pass over names that begin with ``_`` or ``.``, and most look for ``.parquet`` alone. Nothing
that is not landed yet has a name that either kind would take.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

WORK = "_bsfg"
STATE = f"{WORK}/state.json"
LOCK = f"{WORK}/lock"
STAGING = f"{WORK}/staging"
SWAP = f"{WORK}/.swap"
GAPS = "_gaps.jsonl"
"""One line of JSON for every range of facts that could not be landed, and why."""

STAGED_SUFFIX = ".staged"
DATE, PREDICATE = "date", "predicate"

EMPTY = "__HIVE_DEFAULT_PARTITION__"
VALUE_BYTES_MAX = 200
"""How long the escaped value of a partition may be; a name of the file system has 255 bytes."""

_SPECIAL = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^<>|]")
_CUT = re.compile(r"%[0-9A-F]?$")
_FILE = re.compile(r"part-(\d{15,19})-(\d{15,19})-(\d{8,})\.parquet")
_DATE = re.compile(r"date=[^/]+")
_PREDICATE = re.compile(r"predicate=[^/]+")


def escaped(value: str) -> str:
    """Write a value so that it is one safe name, as Hive, Spark and Arrow all read it.

    Only characters that a name cannot have, or that these take for something else, are replaced by ``%XX``. Spark
    reads an escape as one character and Arrow as one byte, so whatever is not ASCII stays as it is.
    """
    if not value:
        return EMPTY
    text = _SPECIAL.sub(lambda found: f"%{ord(found[0]):02X}", value)
    data = text.encode()
    if len(data) <= VALUE_BYTES_MAX:
        return text
    # No predicate that a node takes is as long as this. The file itself tells the whole value.
    start = _CUT.sub("", data[: VALUE_BYTES_MAX - 33].decode("utf-8", "ignore"))
    return f"{start}~{hashlib.sha256(value.encode()).hexdigest()[:32]}"


class Partition(NamedTuple):
    """The facts of one predicate on one date."""

    date: str
    predicate: str

    @property
    def path(self) -> str:
        """The folder of the partition, relative to the landing folder."""
        return f"{DATE}={escaped(self.date)}/{PREDICATE}={escaped(self.predicate)}"


def is_date_folder(name: str) -> bool:
    """Tell whether a name in the landing folder holds the partitions of a date."""
    return _DATE.fullmatch(name) is not None


def is_predicate_folder(name: str) -> bool:
    """Tell whether a name in the folder of a date is a partition."""
    return _PREDICATE.fullmatch(name) is not None


def file_name(first: int, last: int, sequence: int) -> str:
    """Name a landed file: the offsets between which its facts lie, and the number of the commit that brought it."""
    return f"part-{first:015}-{last:015}-{sequence:08}.parquet"


def file_range(name: str) -> tuple[int, int] | None:
    """Give the offsets that a file's name tells, or None when it is not one of ours."""
    found = _FILE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
