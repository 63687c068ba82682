"""`bsfg append`: give facts to a zone's node, as JSON Lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO
from uuid import uuid4

import orjson
import typer
from rich.text import Text

from bsfg.cli.common import Json, argument, flag, option
from bsfg.cli.common import streams as known_streams
from bsfg.cli.connection import Target, connects, told_once
from bsfg.cli.output import console, count_text, examples, json_line, print_json, progress_bar
from bsfg.errors import (
    OF_ONE_FACT,
    BsfgError,
    FactTooLarge,
    InvalidArgument,
    InvalidFact,
    PeerUnreachable,
    StorageUnreadable,
    TimedOut,
)
from bsfg.wording import counted, one_line

if TYPE_CHECKING:
    from bsfg.fact import Message
    from bsfg.journey.link import AppendedFact
    from bsfg.sdk.futures import FactFuture
    from bsfg.sdk.producer import Producer

STANDARD = "-"
LINE_BYTES_MAX = 64 << 20
SHOWN_REFUSALS = 20
_WAITING_MAX = 20_000
_BOM = b"\xef\xbb\xbf"

app = typer.Typer(
    epilog=examples(
        ("bsfg append facts.jsonl --stream operational --to-zone enterprise", "append a file of facts"),
        (
            "bsfg append --stream operational --subject asset:press-1 --predicate speed_set --object 7.5",
            "one fact",
        ),
        ("my-export | bsfg append --stream audit", "from a pipe, as the lines come"),
        ("bsfg append facts.jsonl --stream operational --results > results.jsonl", "with a result per line"),
        ("bsfg append facts.jsonl --stream operational --outbox outbox", "kept on this disk until the node has them"),
    )
)


@dataclass(slots=True)
class LineTally:
    """What became of the lines."""

    facts: int = 0
    inserted: int = 0
    already_exists: int = 0
    kept: int = 0
    refused: int = 0
    refusals: list[dict[str, Any]] = field(default_factory=list)
    fatal: BsfgError | None = None

    def as_dict(self, stream: str) -> dict[str, Any]:
        """Give the form for programs."""
        counts = {"facts": self.facts, "inserted": self.inserted, "already_exists": self.already_exists}
        return {"stream": stream, **counts, "kept": self.kept, "refused": self.refused, "refusals": self.refusals}

    def sentence(self) -> str:
        """Give the form for people."""
        if self.fatal is not None and not self.facts:
            return "Nothing was stored."
        parts = [f"{count_text(self.inserted)} stored"]
        were = "was" if self.already_exists == 1 else "were"
        parts += [f"{count_text(self.already_exists)} {were} there already"] if self.already_exists else []
        parts += [f"{count_text(self.kept)} kept in the outbox"] if self.kept else []
        parts += [f"{count_text(self.refused)} refused"] if self.refused else []
        return f"{counted(self.facts, 'fact')}: {', '.join(parts)}."


@app.command()
@connects("producer")
def append(
    node: Target,
    file: Annotated[
        Path | None, argument("FILE", "A file of JSON Lines; -, or nothing, reads standard input.", show_default=False)
    ] = None,
    *,
    stream: Annotated[str, option("S", "The stream.", autocompletion=known_streams, show_default=False)],
    from_zone: Annotated[
        str | None, option("Z", "from_zone of lines without one. Default: the configuration's zone.")
    ] = None,
    to_zone: Annotated[str | None, option("Z", "to_zone of lines without one.")] = None,
    subject: Annotated[str | None, option("TEXT", "Append one fact, this its subject, instead of a file.")] = None,
    predicate: Annotated[str | None, option("TEXT", "The predicate of that fact.")] = None,
    object_: Annotated[str | None, option("JSON", "Its object; null when left out.", "--object")] = None,
    message_id: Annotated[str | None, option("ID", "Its message_id; a random one when left out.")] = None,
    results: Annotated[bool, flag("--results", "Print a JSON line per fact with its result.")] = False,
    outbox: Annotated[Path | None, option("DIR", "Keep facts in this folder until the node has them.")] = None,
    timeout: Annotated[float, option("SECONDS", "How long to try when the node does not answer.", min=0)] = 15.0,
    json: Json = False,
) -> None:
    """Append facts to a stream of the zone; each is durable when it is counted as stored.

    A line is {"envelope": {…}, "fact": {"subject", "predicate", "object"}} as `bsfg fetch` writes it. Envelope fields
    that are left out come from the options; produced_at_unix_ms is then the present. A line that is refused does not
    stop the others: it is named with its number, and the exit code is 1. To repeat the command does no harm, because
    what is stored is recognised by its message_id.

    With --subject and --predicate it is one fact, made of the options.

    With --outbox the facts are safe once they are in that folder. What the node has not taken within --timeout stays
    there, for the next `bsfg append --outbox` with the same folder, or any producer.
    """
    if results and json:
        raise InvalidArgument("--results and --json both want to print", hint="Choose one.")
    zones = {"from_zone": from_zone or node.zone, "to_zone": to_zone}
    defaults = {name: value for name, value in zones.items() if value is not None}
    tally = LineTally()
    one = _one_fact(file, subject, predicate, object_, message_id)
    lines = _source(file) if one is None else nullcontext(BytesIO(one))
    with lines as source, _producer(node, stream, outbox, timeout) as producer:
        _append(source, producer, tally, defaults, results, timeout if outbox is not None else None)
    _report(tally, stream, results, json)
    if tally.fatal is not None:
        error = tally.fatal
        raise node.explained(error) if isinstance(error, PeerUnreachable) else error
    if tally.refused:
        raise typer.Exit(1)


def _one_fact(
    file: Path | None, subject: str | None, predicate: str | None, text: str | None, message_id: str | None
) -> bytes | None:
    """Give the line of the fact that the options name, None when they name none."""
    if subject is None and predicate is None:
        if text is not None or message_id is not None:
            raise InvalidArgument("--object and --message-id belong to one fact", hint="Add --subject and --predicate.")
        return None
    if subject is None or predicate is None or file is not None:
        wrong = "and a file both say what to append" if file is not None else "need each other"
        raise InvalidArgument(f"--subject and --predicate {wrong}", hint="A fact has both; a file has its own.")
    try:
        value = None if text is None else orjson.loads(text)
    except orjson.JSONDecodeError:
        hint = """Quote it for the shell: --object '{"value": 21.5}', or --object '"running"' for a text."""
        raise InvalidArgument(f"--object {text!r} is not JSON", hint=hint) from None
    envelope = {"message_id": message_id or str(uuid4())}
    return orjson.dumps({"envelope": envelope, "fact": {"subject": subject, "predicate": predicate, "object": value}})


@contextmanager
def _source(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or str(file) == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        with file.open("rb") as source:
            yield source
    except OSError as error:
        raise StorageUnreadable(f"{file} cannot be read: {error.strerror}", hint="Check the path.") from None


@contextmanager
def _producer(node: Target, stream: str, outbox: Path | None, timeout: float) -> Iterator[Producer]:
    from bsfg.sdk.producer import Producer

    deadline = None if outbox is not None else timeout
    problem, where = told_once(), node.endpoint()
    with Producer(where, stream=stream, outbox=outbox, deadline_seconds=deadline, on_problem=problem) as producer:
        yield producer
        if outbox is not None:
            with suppress(TimedOut):
                producer.drain(timeout)


def _append(
    source: BinaryIO,
    producer: Producer,
    tally: LineTally,
    defaults: dict[str, Any],
    results: bool,
    outbox_seconds: float | None,
) -> None:
    """Send line by line, while another thread waits for the answers in their order."""
    waiting: Queue[tuple[int, FactFuture | BsfgError] | None] = Queue(_WAITING_MAX)
    stopping = Event()
    with progress_bar("appending") as bar:
        answers = _Answers(tally, results, outbox_seconds, stopping, lambda: bar.update(bar.task_ids[0], advance=1))
        reader = Thread(target=answers.take, args=(waiting,), daemon=True)
        reader.start()
        try:
            for number, line in _lines(source):
                if stopping.is_set():
                    break
                waiting.put((number, _sent(producer, number, line, defaults)))
        finally:
            waiting.put(None)
            reader.join()


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Give the lines that are not blank, with their numbers from 1."""
    number = 0
    while line := source.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            raise FactTooLarge(f"line {number}: has more than {LINE_BYTES_MAX} bytes", line=number)
        if line.strip() and line != _BOM:
            yield number, line.removeprefix(_BOM) if number == 1 else line


def _sent(producer: Producer, number: int, line: bytes, defaults: dict[str, Any]) -> FactFuture | BsfgError:
    try:
        return producer.send(_message(line, defaults))
    except (InvalidFact, FactTooLarge) as error:
        return error


def _message(line: bytes, defaults: dict[str, Any]) -> Message:
    from bsfg.jsonform import message_from_json

    return message_from_json(line, produced_at_unix_ms=time.time_ns() // 1_000_000, **defaults)


@dataclass(slots=True)
class _Answers:
    """Takes the answers in the order of the lines, counts them, and prints them when that is wanted."""

    tally: LineTally
    results: bool
    outbox_seconds: float | None
    stopping: Event
    advance: Any

    def take(self, waiting: Queue[tuple[int, FactFuture | BsfgError] | None]) -> None:
        """Take answers until there are none left."""
        while (item := waiting.get()) is not None:
            number, future = item
            if self.tally.fatal is not None:
                continue
            self.tally.facts += 1
            try:
                if isinstance(future, BsfgError):
                    raise future
                self._stored(number, self._answer(future))
            except BsfgError as error:
                self._failed(number, error)
            self.advance()

    def _answer(self, future: FactFuture) -> AppendedFact | None:
        """Wait for the node's answer; with an outbox not longer than it was asked to, because the fact is safe."""
        if self.outbox_seconds is None:
            return future.result()
        future.wait_accepted()
        left, began = self.outbox_seconds, time.monotonic()
        try:
            return future.result(left)
        except TimedOut:
            return None
        finally:
            self.outbox_seconds = max(0.0, left - (time.monotonic() - began))

    def _stored(self, number: int, appended: AppendedFact | None) -> None:
        if appended is None:
            self.tally.kept += 1
            self._print({"line": number, "result": "kept_in_outbox"})
            return
        name = appended.result.name.lower()
        if name == "inserted":
            self.tally.inserted += 1
        else:
            self.tally.already_exists += 1
        answer = {"line": number, "result": name, "offset": appended.offset}
        self._print({**answer, "message_id": appended.message_id, "digest": appended.digest_text})

    def _failed(self, number: int, error: BsfgError) -> None:
        if error.code not in OF_ONE_FACT:
            self.tally.facts -= 1
            self.tally.fatal = error
            self.stopping.set()
            return
        self.tally.refused += 1
        refusal = {"line": number, "error": error.to_dict()}
        if len(self.tally.refusals) < SHOWN_REFUSALS:
            self.tally.refusals.append(refusal)
            what = (f"line {number}: error[{error.code}]:", "bold red")
            console(stderr=True).print(Text.assemble(what, f" {one_line(error.message)}"), soft_wrap=True)
        self._print({"line": number, "result": "refused", "error": error.to_dict()})

    def _print(self, answer: dict[str, Any]) -> None:
        if self.results:
            sys.stdout.buffer.write(json_line(answer))
            sys.stdout.buffer.flush()


def _report(tally: LineTally, stream: str, results: bool, json: bool) -> None:
    if json and tally.fatal is None:
        print_json(tally.as_dict(stream))
    else:
        console(stderr=results or json or tally.fatal is not None).print(tally.sentence())
