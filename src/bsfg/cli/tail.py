"""`bsfg tail`: look at the newest facts of a stream, and watch them come."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
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
    from bsfg.journey.look import FactChoice, WatchedBuffer
    from bsfg.ports import Frame
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.connection import Connection

LAST = 10
WIDE_COLUMNS = 100
LOOK_SECONDS = 0.25
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
    from bsfg.journey.look import FactChoice

    if last is not None and since is not None:
        raise InvalidArgument("--last and --since both say where to begin", hint="Choose one.")
    choice = FactChoice(subject=subject, predicate=predicate, from_zone=from_zone)
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
                before = watched.restored
                async for frame in watched.news():
                    show(frame)
                if watched.restored > before:
                    say("The buffer is not the one that was shown: it was restored. Going on from its end.")
            except BsfgError as error:
                if not error.retryable:
                    raise
                tell(error)
            await asyncio.sleep(LOOK_SECONDS)

    node.run(look)


@dataclass(slots=True)
class RemoteBuffer:
    """A buffer of a node that is looked at over the wire; ``log_id`` is the history that it last turned out to have."""

    client: BoundaryClient
    stream: str
    buffer: Buffer
    log_id: str = ""

    async def end(self) -> int:
        """Give the offset behind its last entry."""
        head = await self.client.head(self.stream, self.buffer)
        self.log_id = head.log_id
        return head.end

    def offsets(self, first: int, end: int) -> AsyncIterator[Frame]:
        """Give a range of offsets."""
        return self.client.read_offsets(self.stream, first, end, buffer=self.buffer, max_facts=_FACTS)

    def times(self, since_unix_ms: int) -> AsyncIterator[Frame]:
        """Give what became durable from a moment on."""
        until = _ALWAYS_UNIX_MS
        return self.client.read_times(self.stream, since_unix_ms, until, buffer=self.buffer, max_facts=_FACTS)


async def _watched(client: BoundaryClient, stream: str, buffer: Buffer | None, choice: FactChoice) -> WatchedBuffer:
    from bsfg.journey.look import WatchedBuffer

    looked_at = RemoteBuffer(client, stream, buffer or Buffer.STORE)
    end = await looked_at.end()
    if buffer is None and not end:
        looked_at = RemoteBuffer(client, stream, Buffer.FORWARD)
        end = await looked_at.end()
    return WatchedBuffer(looked_at, choice, end)


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
        said = Text(one_line(object_text(fact.object, envelope.object_media_type)), "green")
        is_wide = out.width >= WIDE_COLUMNS
        line = Text.assemble(
            (f"{entry.offset:>{10 if is_wide else 1},}  {time_text(entry.appended_at_unix_ms)}  ", "dim"),
            (f"{envelope.from_zone}  ", "cyan"),
            (one_line(fact.subject), "bold"),
            f" {one_line(fact.predicate)}  ",
        )
        # Where there is no room beside them, what was said of what stands below when and where.
        lines = [line.append(said)] if is_wide else [line, Text("    ").append(said)]
        for each in lines:
            out.print(each, no_wrap=True, overflow="ellipsis", crop=True)
