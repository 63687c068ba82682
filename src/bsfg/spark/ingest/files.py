"""Which files are meant by paths, folders and patterns, in which order, and of which format each is."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bsfg.errors import InvalidArgument
from bsfg.spark.ingest.survey import CSV, FORMATS, JSONL, PARQUET

EXTENSIONS = {
    ".csv": CSV,
    ".tsv": CSV,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
    ".parquet": PARQUET,
    ".pq": PARQUET,
}
_PATTERN = "*?["


@dataclass(frozen=True, slots=True)
class Source:
    """One file, by its whole path, and the format in which it is read."""

    path: str
    format: str


@dataclass(frozen=True, slots=True)
class Sources:
    """The files in the order in which they are ingested, and those in folders that no format fits."""

    files: list[Source]
    left_out: list[str]


def find(given: Sequence[str], format: str | None = None) -> Sources:
    """Find files: as they were given, and by name inside each folder and pattern; each file once.

    In folders hidden files and those that begin with an underscore are left out, as Spark itself leaves them out.
    """
    if format is not None and format not in FORMATS:
        raise InvalidArgument(f"the format must be one of {', '.join(FORMATS)}, not {format!r}")
    files: dict[str, Source] = {}
    left_out: list[str] = []
    for text in given:
        for path, by_name in _expanded(text):
            found = format or EXTENSIONS.get(Path(path).suffix.lower())
            if found is not None:
                files.setdefault(path, Source(path, found))
            elif by_name:
                hint = "Say it with --format csv, jsonl or parquet."
                raise InvalidArgument(f"the format of {path} does not show in its name", hint=hint)
            else:
                left_out.append(path)
    if not files:
        raise InvalidArgument(f"there is no file to ingest in {', '.join(given)}")
    return Sources(list(files.values()), left_out)


def _expanded(text: str) -> list[tuple[str, bool]]:
    """Give the files that a text means, each with whether it was named itself."""
    path = Path(text)
    if path.is_dir():
        return [(found, False) for found in _in_folder(path)]
    if path.exists():
        return [(_checked(path), True)]
    if any(mark in text for mark in _PATTERN):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise InvalidArgument(f"no file matches {text!r}")
        named = [(os.path.abspath(match), True) for match in matches if os.path.isfile(match)]
        return named or [(found, False) for match in matches for found in _in_folder(Path(match))]
    raise InvalidArgument(f"there is no file {text!r}", hint="Give paths, folders or patterns such as 'in/*.csv'.")


def _checked(path: Path) -> str:
    if not path.is_file():
        hint = "It must be possible to read it again: write what a pipe gives to a file first."
        raise InvalidArgument(f"{path} is not a regular file", hint=hint)
    return os.path.abspath(path)


def _in_folder(folder: Path) -> list[str]:
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        found += [os.path.abspath(os.path.join(where, name)) for name in names if name[0] not in "._"]
    return sorted(path for path in found if os.path.isfile(path))
