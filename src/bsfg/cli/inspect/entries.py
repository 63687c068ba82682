"""The entries of one log: chosen by range and filter, written as JSON Lines or shown as a table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.text import Text

from bsfg.batch import EntryBatch
from bsfg.cli.output import console, count_text, json_line, range_text, table, time_text
from bsfg.errors import InvalidArgument
from bsfg.fact import is_json
from bsfg.jsonform import entry_to_dict
from bsfg.ports import Buffer, Frame
from bsfg.stores.log.reader import LogFolder

SHOWN_ENTRIES = 50
_FRAME_FACTS = 2_000


@dataclass(frozen=True, slots=True)
class Choice:
    """Which entries are wanted: offsets (both inclusive) and patterns in which `*` stands for any text."""

    first: int | None = None
    last: int | None = None
    subject: str | None = None
    predicate: str | None = None
    from_zone: str | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in astuple(self))


def the_log(folders: list[LogFolder], stream: str | None, buffer: Buffer | None) -> LogFolder:
    """Give the one log that the options name, or say which ones there are."""
    found = [folder for folder in folders if stream in (None, folder.stream) and buffer in (None, folder.buffer)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"--stream {folder.stream} --buffer {folder.buffer}" for folder in found or folders)
    what = "several logs fit" if found else f"there is no log {stream or '*'}/{buffer or '*'}"
    if not folders:
        raise InvalidArgument("the folder holds no log yet", hint="Append a fact first.")
    raise InvalidArgument(f"{what}; entries are read from one", hint=f"Choose one of: {names}")


def frames(folder: LogFolder, choice: Choice) -> Iterator[Frame]:
    """Give the wanted entries and every gap among them; filters drop entries, never gaps."""
    if choice.first is not None and choice.last is not None and choice.last < choice.first:
        raise InvalidArgument(f"--to {choice.last} lies before --from {choice.first}")
    end = None if choice.last is None else choice.last + 1
    for frame in folder.frames(choice.first, end, _FRAME_FACTS):
        if frame.entries is None:
            yield frame
            continue
        entries = frame.entries
        for name in ("subject", "predicate", "from_zone"):
            entries = _matching(entries, name, getattr(choice, name))
        if len(entries):
            yield Frame(frame.first, frame.last, entries)


def _matching(entries: EntryBatch, name: str, pattern: str | None) -> EntryBatch:
    if pattern is None:
        return entries
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    fits = pc.match_substring_regex(entries.column(name), rf"(?s)\A{expression}\z")
    return entries.take(np.flatnonzero(fits.to_numpy(zero_copy_only=False)))


def export(folder: LogFolder, choice: Choice, *, with_gaps: bool = True) -> None:
    """Write entries to stdout as JSON Lines, gap records as lines of their own."""
    out = sys.stdout.buffer
    for frame in frames(folder, choice):
        if frame.entries is None and not with_gaps:
            continue
        if frame.entries is None:
            out.write(json_line({"gap": frame.gap}))
            continue
        for entry in frame.entries.to_entries():
            out.write(json_line(entry_to_dict(entry)))
    out.flush()


def as_dicts(folder: LogFolder, choice: Choice) -> list[dict[str, Any]]:
    """Give the wanted entries and gaps in their JSON form."""
    result: list[dict[str, Any]] = []
    for frame in frames(folder, choice):
        if frame.entries is None:
            result.append({"gap": frame.gap})
        else:
            result += [entry_to_dict(entry) for entry in frame.entries.to_entries()]
    return result


def show(folder: LogFolder, choice: Choice) -> None:
    """Show the first of the wanted entries as a table."""
    rows = table("offset", "stored", "subject", "predicate", "object", right=("offset",))
    shown = left = 0
    for frame in frames(folder, choice):
        room = SHOWN_ENTRIES - shown
        count = 1 if frame.entries is None else len(frame.entries)
        left += max(0, count - room)
        shown += min(count, room)
        if room <= 0:
            continue
        if frame.entries is None:
            assert frame.gap is not None
            text = Text(f"not here: {frame.gap.reason} {frame.gap.detail}".rstrip(), "yellow")
            rows.add_row(range_text(frame.first, frame.last), time_text(frame.gap.at_unix_ms), "", "", text)
            continue
        for entry in frame.entries.slice(0, room).to_entries():
            fact = entry.message.fact
            text = Text(_object_text(fact.object, entry.message.envelope.object_media_type))
            subject, predicate = Text(fact.subject), Text(fact.predicate)
            rows.add_row(str(entry.offset), time_text(entry.appended_at_unix_ms), subject, predicate, text)
    out = console()
    if shown:
        out.print(rows)
    else:
        out.print("No entry fits.")
    if left:
        out.print(f"{count_text(left)} more; --export writes all of them as JSON Lines.")


def _object_text(data: bytes, media_type: str) -> str:
    if not is_json(media_type):
        return f"{len(data)} bytes of {media_type}"
    text = data.decode(errors="replace")
    return text if len(text) <= 80 else text[:79] + "…"
