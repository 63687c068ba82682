"""`bsfg tail`: look at the newest facts of a stream, and watch them come."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bsfg.cli.common import Json, argument, flag, moment, option
from bsfg.cli.common import streams as known_streams
from bsfg.cli.connection import Target, connects, told_once
from bsfg.cli.output import console, examples, json_line, range_text, say, time_text
from bsfg.errors import BsfgError, InvalidArgument
from bsfg.ports import Buffer
from bsfg.wording import one_line

if TYPE_CHECKING:
    from bsfg.cli.inspect.view import EntryChoice
    from bsfg.ports import Frame
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.connection import Connection

LAST = 10
LOOK_SECONDS = 0.25
_STEP, _STEP_MAX = 1_000, 64_000
_FACTS = 2_000
_ALWAYS_UNIX_MS = 1 << 50

app = typer.Typer(
    epilog=examples(
        ("bsfg tail operational", "the newest ten facts"),
        ("bsfg tail operational --follow --predicate 'alarm_*'", "alarms, as they come"),
        ("bsfg tail operational --buffer forward --from-zone plant-a -n 100", "what plant-a sent last"),
        ("bsfg tail audit --since 30m --json | jq .fact.object", "half an hour of objects, for a program"),
    )
)


@app.command()
@connects("consumer", "pipeline")
def tail(
    node: Target,
    stream: Annotated[str, argument("STREAM", "The stream.", autocompletion=known_streams)],
    *,
    buffer: Annotated[
        Buffer | None,
        typer.Option(help="store: what this zone said; forward: what others sent. Default: store, if ever used."),
    ] = None,
    subject: Annotated[str | None, option("TEXT", "Only this subject; * stands for any text.")] = None,
    predicate: Annotated[str | None, option("TEXT", "Only this predicate; * stands for any text.")] = None,
    from_zone: Annotated[str | None, option("Z", "Only what this zone said.")] = None,
    last: Annotated[
        int | None, option("N", f"Begin with the newest N that fit. Default: {LAST}.", "--last", "-n", min=0)
    ] = None,
    since: Annotated[str | None, option("TIME", "Begin here instead: 30m, 24h … ago, or 2026-06-30T12:00:00Z.")] = None,
    follow: Annotated[bool, flag("--follow", "Go on with what comes, until Ctrl-C.", "-f")] = False,
    json: Json = False,
) -> None:
    """Show the newest facts of a stream, and with --follow those that come.

    It needs no durable consumer and leaves no trace: nothing is confirmed, and nothing is kept for it. It shows what
    the caller's streams allow. Into a pipe, or with --json, a fact is one JSON object a line, as `bsfg fetch` writes
    it; a range that is not there is a line {"gap": …}.
    """
    from bsfg.cli.inspect.view import EntryChoice

    if last is not None and since is not None:
        raise InvalidArgument("--last and --since both say where to begin", hint="Choose one.")
    choice = EntryChoice(subject=subject, predicate=predicate, from_zone=from_zone)
    begin = moment("--since", since)
    show = _write_lines if json or not sys.stdout.isatty() else _show

    async def look(connection: Connection) -> None:
        from bsfg.wire.client import BoundaryClient

        client = BoundaryClient(connection)
        watched = await _watched(client, stream, buffer, choice)
        async for frame in watched.newest(LAST if last is None else last) if begin is None else watched.since(begin):
            show(frame)
        tell = told_once()
        while follow:
            try:
                async for frame in watched.news():
                    show(frame)
            except BsfgError as error:
                if not error.retryable:
                    raise
                tell(error)
            await asyncio.sleep(LOOK_SECONDS)

    node.run(look)


@dataclass(slots=True)
class WatchedBuffer:
    """A buffer that somebody looks at; ``at`` is the offset of what was not shown yet."""

    client: BoundaryClient
    stream: str
    buffer: Buffer
    choice: EntryChoice
    at: int

    async def newest(self, count: int) -> AsyncIterator[Frame]:
        """Give frames with the newest so many entries that fit, looking further and further back for them."""
        first, step, found, left = self.at, max(_STEP, count), list["Frame"](), count
        while left > 0 and first > 0:
            end, first = first, max(0, first - step)
            older = [frame async for frame in self._frames(first, end)]
            found, step = older + found, min(2 * step, _STEP_MAX)
            left -= sum(len(frame.entries) for frame in older if frame.entries is not None)
        for frame in found:
            over = 0 if frame.entries is None else min(max(0, -left), len(frame.entries))
            left += over
            if frame.entries is None:
                if left >= 0:
                    yield frame
            elif over < len(frame.entries):
                yield replace(frame, entries=frame.entries.slice(over))

    async def since(self, unix_ms: int) -> AsyncIterator[Frame]:
        """Give what became durable from a moment on."""
        times = self.client.read_times(self.stream, unix_ms, _ALWAYS_UNIX_MS, buffer=self.buffer, max_facts=_FACTS)
        async for frame in times:
            self.at = max(self.at, frame.last + 1)
            yield self._fitting(frame)

    async def news(self) -> AsyncIterator[Frame]:
        """Give what came since the last look."""
        end = await self.client.end(self.stream, self.buffer)
        if end < self.at:
            say("The buffer ends before what was shown: it was restored. Going on from its end.")
            self.at = end
        async for frame in self._frames(self.at, end):
            self.at = frame.last + 1
            yield frame

    async def _frames(self, first: int, end: int) -> AsyncIterator[Frame]:
        frames = self.client.read_offsets(self.stream, first, end, buffer=self.buffer, max_facts=_FACTS)
        async for frame in frames:
            yield self._fitting(frame)

    def _fitting(self, frame: Frame) -> Frame:
        from bsfg.cli.inspect.view import fitting_entries

        return frame if frame.entries is None else replace(frame, entries=fitting_entries(frame.entries, self.choice))


async def _watched(client: BoundaryClient, stream: str, buffer: Buffer | None, choice: EntryChoice) -> WatchedBuffer:
    end = await client.end(stream, buffer or Buffer.STORE)
    if buffer is None and not end:
        buffer, end = Buffer.FORWARD, await client.end(stream, Buffer.FORWARD)
    return WatchedBuffer(client, stream, buffer or Buffer.STORE, choice, end)


def _write_lines(frame: Frame) -> None:
    from bsfg.jsonform import entry_to_dict

    if frame.entries is None:
        sys.stdout.buffer.write(json_line({"gap": frame.gap}))
    else:
        sys.stdout.buffer.writelines(json_line(entry_to_dict(entry)) for entry in frame.entries.to_entries())
    sys.stdout.buffer.flush()


def _show(frame: Frame) -> None:
    from bsfg.cli.inspect.view import object_text

    out = console()
    if frame.entries is None:
        assert frame.gap is not None
        text = f"{range_text(frame.first, frame.last)}  not here: {frame.gap.reason} {frame.gap.detail}"
        out.print(Text(one_line(text), "yellow"), soft_wrap=True)
        return
    for entry in frame.entries.to_entries():
        fact, envelope = entry.message.fact, entry.message.envelope
        line = Text.assemble(
            (f"{entry.offset:>10,}  {time_text(entry.appended_at_unix_ms)}  ", "dim"),
            (f"{envelope.from_zone}  ", "cyan"),
            (one_line(fact.subject), "bold"),
            f" {one_line(fact.predicate)}  ",
            (one_line(object_text(fact.object, envelope.object_media_type)), "green"),
        )
        out.print(line, no_wrap=True, overflow="ellipsis", crop=True)
