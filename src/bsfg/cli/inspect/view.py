"""A data folder as tables: first all logs, then what is worth knowing of each, down to single entries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from rich.text import Text

from bsfg.cli.inspect.gather import ConsumerInfo, FolderInfo, LogInfo, QuarantineInfo, SegmentInfo
from bsfg.cli.output import (
    CellLines,
    console,
    count_text,
    fitting,
    json_line,
    pairs,
    print_failure,
    range_text,
    size_text,
    table,
    time_text,
)
from bsfg.errors import InvalidArgument
from bsfg.fact import is_json
from bsfg.journey.look import FactChoice
from bsfg.jsonform import entry_to_dict
from bsfg.ports import Buffer, Frame, GapRecord
from bsfg.stores.log.reader import LogFolder
from bsfg.wording import offset_text, one_line

SHOWN_ENTRIES = 50
_FRAME_FACTS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryChoice(FactChoice):
    """Which entries are wanted: offsets (both inclusive), and what their facts must fit."""

    first: int | None = None
    last: int | None = None

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


def frames(folder: LogFolder, choice: EntryChoice) -> Iterator[Frame]:
    """Give the wanted entries and every gap among them; filters drop entries, never gaps."""
    if choice.first is not None and choice.last is not None and choice.last < choice.first:
        raise InvalidArgument(f"--to {choice.last} lies before --from {choice.first}")
    end = None if choice.last is None else choice.last + 1
    for frame in folder.frames(choice.first, end, _FRAME_FACTS):
        if frame.entries is None:
            yield frame
            continue
        entries = choice.fitting(frame.entries)
        if len(entries):
            yield Frame(frame.first, frame.last, entries)


def export(folder: LogFolder, choice: EntryChoice, *, with_gaps: bool = True) -> None:
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


def as_dicts(folder: LogFolder, choice: EntryChoice) -> list[dict[str, Any]]:
    """Give the wanted entries and gaps in their JSON form."""
    result: list[dict[str, Any]] = []
    for frame in frames(folder, choice):
        if frame.entries is None:
            result.append({"gap": frame.gap})
        else:
            result += [entry_to_dict(entry) for entry in frame.entries.to_entries()]
    return result


def show_entries(folder: LogFolder, choice: EntryChoice) -> None:
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
            text = Text(object_text(fact.object, entry.message.envelope.object_media_type))
            subject, predicate = Text(fact.subject), Text(fact.predicate)
            rows.add_row(str(entry.offset), time_text(entry.appended_at_unix_ms), subject, predicate, text)
    out = console()
    if shown:
        out.print(rows)
    else:
        out.print("No entry fits.")
    if left:
        out.print(f"{count_text(left)} more; --export writes all of them as JSON Lines.")


def object_text(data: bytes, media_type: str) -> str:
    """Give the object of a fact for a line of a table."""
    if not is_json(media_type):
        return f"{len(data)} bytes of {media_type}"
    text = data.decode(errors="replace")
    return text if len(text) <= 80 else text[:79] + "…"


Row = tuple[str, ...]

_ROOMS = (True, False)
LISTED = 12
"""Longer lists show their first and last rows; `--json` has them all."""


def show(info: FolderInfo) -> None:
    """Print everything."""
    out = console()
    out.print(_folder(info))
    out.print()
    if not info.logs:
        out.print("No log yet: nothing was appended here.")
    else:
        out.print(fitting(partial(_logs, info), _ROOMS))
    if info.consumers:
        out.print(fitting(partial(_consumers, info), _ROOMS, prose=("state",)))
    for log in info.logs:
        _details(log)
    for text in info.problems:
        out.print(Text(one_line(f"damaged: {text}; run `bsfg verify {info.folder}`"), "red"), soft_wrap=True)
    for log in info.logs:
        if log.error is not None:
            print_failure(log.error)


def _folder(info: FolderInfo) -> Any:
    writer = f"process {info.writer_pid}" if info.writer_pid is not None else "nobody"
    rows = {
        "size": size_text(info.size_bytes),
        "written by": writer,
        "format": f"{info.format}, chained by {info.hasher}",
    }
    return pairs(info.folder, rows)


def _logs(info: FolderInfo, wide: bool) -> Any:
    extra = ("size", "gaps", "aside", "newest") if wide else ()
    result = table(
        "log", "offsets", "entries", "segments", *extra, right=("entries", "segments", "size", "gaps", "aside")
    )
    for log in info.logs:
        name = f"{log.stream}/{log.buffer}"
        if log.error is not None:
            result.add_row(name, Text(f"✗ {log.error['code']}", "red"))
            continue
        row = [
            name,
            range_text(log.start, log.end - 1),
            count_text(log.end - log.start),
            count_text(len(log.segments)),
        ]
        if extra:
            row += [
                size_text(log.size_bytes),
                str(len(log.gaps)),
                str(len(log.quarantine)),
                time_text(log.newest_unix_ms),
            ]
        result.add_row(*row)
    return result


def _consumers(info: FolderInfo, wide: bool) -> Any:
    columns = ("of", "committed", "lag", "ranges", "kind", "state") if wide else ("committed", "lag", "state")
    result = table("consumer", *columns, right=("committed", "lag", "ranges"))
    for item in info.consumers:
        name, where = item.name, f"{item.stream}/{item.buffer}"
        row: list[str | Text] = [name, where] if wide else [CellLines(name, f"  {where}")]
        row.append(offset_text(item.committed))
        row.append("–" if item.lag is None else count_text(item.lag))
        if wide:
            row += [str(len(item.ranges)), "required" if item.required else "optional"]
        result.add_row(*row, _state(item, wide))
    return result


def _state(item: ConsumerInfo, wide: bool) -> Text:
    if item.retired_reason is not None:
        return Text(f"retired: {item.retired_reason}" if wide else "retired", "dim")
    if not item.same_history:
        return Text("of another log_id", "red")
    return Text("waits", "yellow") if item.lag else Text("up to date", "green")


def _details(log: LogInfo) -> None:
    """Print the parts of one log that have something in them."""
    name = f"{log.stream}/{log.buffer}"
    _list(f"{name}: segments", ("file", "offsets", "size", "newest"), [_segment(item) for item in log.segments])
    _list(
        f"{name}: key segments of what was truncated",
        ("file", "offsets", "size"),
        [(item.file, range_text(item.first, item.last), size_text(item.size_bytes)) for item in log.key_segments],
    )
    _list(
        f"{name}: key index",
        ("file", "offsets", "keys", "size"),
        [
            (item.file, range_text(item.first, item.last), count_text(item.keys), size_text(item.size_bytes))
            for item in log.index
        ],
    )
    _list(
        f"{name}: restored from earlier histories",
        ("log_id", "up to offset", "restored"),
        [(item.log_id, str(item.end - 1), time_text(item.restored_unix_ms)) for item in log.lineage],
    )
    _list(f"{name}: gap records", ("offsets", "reason", "recorded", "detail"), [_gap(gap) for gap in log.gaps])
    _list(
        f"{name}: quarantine",
        ("id", "reason", "key", "stored at", "refused"),
        [_quarantined(item) for item in log.quarantine],
    )
    _list(
        f"{name}: bytes kept aside",
        ("name", "size"),
        [(item.file, size_text(item.size_bytes)) for item in log.aside],
    )


def _segment(item: SegmentInfo) -> Row:
    newest = "MISSING" if item.missing else "active" if item.active else time_text(item.newest_unix_ms)
    return item.file, range_text(item.first, item.last), size_text(item.size_bytes), newest


def _gap(gap: GapRecord) -> Row:
    detail = gap.detail if gap.origin_zone is None else f"{gap.detail} (offsets of {gap.origin_zone})".strip()
    if gap.offsets <= gap.last - gap.first:
        detail = f"{count_text(gap.offsets)} of them: {detail}"
    return range_text(gap.first, gap.last), str(gap.reason), time_text(gap.at_unix_ms), detail


def _quarantined(item: QuarantineInfo) -> Row:
    key = f"{item.from_zone} {item.message_id}"
    return str(item.id), item.reason, key, str(item.existing_offset), time_text(item.at_unix_ms)


def _list(title: str, columns: Row, rows: list[Row]) -> None:
    """Print a list when there is anything in it; a narrow terminal does without names of files, and without times."""
    if rows:
        console().print(Text(title, "bold"))
        console().print(fitting(partial(_listed, columns, rows), _ROOMS, prose=("detail", "key")))


def _listed(columns: Row, rows: list[Row], wide: bool) -> Any:
    if not wide:
        kept = [at for at, name in enumerate(columns) if name not in ("file", "recorded", "refused")]
        columns, rows = tuple(columns[at] for at in kept), [tuple(row[at] for at in kept) for row in rows]
    result = table(*columns, right=("size", "keys"))
    shown = rows if len(rows) <= LISTED else [*rows[: LISTED // 2], *rows[-LISTED // 2 :]]
    for at, row in enumerate(shown):
        if len(rows) > LISTED and at == LISTED // 2:
            result.add_row(f"… {count_text(len(rows) - LISTED)} more", *[""] * (len(columns) - 1))
        result.add_row(*(Text(cell) for cell in row))
    return result
