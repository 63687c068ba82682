"""`bsfg fetch`: read the next facts of a durable consumer, as JSON Lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from bsfg.cli.common import argument, flag, option
from bsfg.cli.common import consumers as known_consumers
from bsfg.cli.connection import Target, connects, told_once
from bsfg.cli.output import console, count_text, examples, json_line
from bsfg.errors import CertificateInvalid, InvalidArgument, PeerUnreachable

if TYPE_CHECKING:
    from bsfg.sdk.consumer import Consumer
    from bsfg.sdk.consuming import ConsumerSettings, Item

_FLUSH_ITEMS = 256

app = typer.Typer(
    epilog=examples(
        ("bsfg fetch historian", "look at the next 100 facts; the same come again next time"),
        ("bsfg fetch historian --limit 1000 --confirm > facts.jsonl", "take them: they do not come again"),
        ("bsfg fetch historian --follow --confirm | my-import", "go on for ever, as facts arrive"),
        ("bsfg fetch historian | jq -r .fact.subject | sort | uniq -c", "what is waiting, by subject"),
    )
)


@app.command()
@connects("consumer")
def fetch(
    node: Target,
    consumer: Annotated[str, argument("CONSUMER", "The durable consumer.", autocompletion=known_consumers)],
    *,
    limit: Annotated[
        int | None, option("N", "At most so many facts. Default: 100, or no limit to follow.", min=1)
    ] = None,
    wait: Annotated[float, option("SECONDS", "How long to wait when there is nothing (more).", min=0)] = 0.0,
    follow: Annotated[bool, flag("--follow", "Go on for ever; needs --confirm.", "-f")] = False,
    confirm: Annotated[
        bool, flag("--confirm", "Confirm what was written to stdout, so that it does not come again.")
    ] = False,
    timeout: Annotated[float, option("SECONDS", "How long to try when the node does not answer.", min=0)] = 15.0,
) -> None:
    """Write the next facts of a consumer to stdout, one JSON object a line.

    The node decides where it starts: after the last confirmed fact. Without --confirm nothing moves. A range that is
    not there is a line {"gap": …} that says why; with --confirm it is passed like a fact. With --confirm, lines count
    as taken once they are written out, so a reader that breaks off gets some of them again.
    """
    from bsfg.sdk.consumer import Consumer

    if follow and not confirm:
        raise InvalidArgument(
            "--follow needs --confirm", hint="Without it the node would give the same facts again and again."
        )
    most = limit if limit is not None else (sys.maxsize if follow else 100)
    idle = None if follow else wait
    options: ConsumerSettings = {"prefetch_facts": min(most, 2_000), "on_problem": told_once()}
    if not follow:
        options["deadline_seconds"] = timeout
    try:
        with Consumer(consumer, node.endpoint(), **options) as reading:
            count = _write(reading, most, idle, confirm)
    except (PeerUnreachable, CertificateInvalid) as error:
        raise node.explained(error) from None
    if sys.stderr.isatty():
        taken = "taken" if confirm else "shown; they come again until they are confirmed"
        console(stderr=True).print(f"{count_text(count)} {taken}.")


def _write(consumer: Consumer, most: int, idle_seconds: float | None, confirm: bool) -> int:
    """Write items until there are enough or none came for a while; what is confirmed was written out before."""
    written: list[Item] = []
    count = 0
    for item in consumer.items(idle_seconds=idle_seconds):
        sys.stdout.buffer.write(_line(item))
        written.append(item)
        count += 1
        if len(written) >= _FLUSH_ITEMS or count >= most or idle_seconds is None:
            _settle(consumer, written, confirm)
        if count >= most:
            break
    _settle(consumer, written, confirm)
    return count


def _settle(consumer: Consumer, written: list[Item], confirm: bool) -> None:
    sys.stdout.buffer.flush()
    if confirm:
        for item in written:
            consumer.confirm(item)
    written.clear()


def _line(item: Item) -> bytes:
    from bsfg.fact import Entry
    from bsfg.jsonform import entry_to_dict

    form = entry_to_dict(item) if isinstance(item, Entry) else {"gap": item}
    return json_line(form)
