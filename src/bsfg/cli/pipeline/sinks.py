"""`bsfg pipeline sql` and `bsfg pipeline webhook`: the facts of a durable consumer to a database or a web server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bsfg.cli.common import flag, option
from bsfg.cli.connection import Target, connects, told_once
from bsfg.cli.output import examples
from bsfg.cli.pipeline.running import SinkConsumer, SinkMaxFacts, SinkOnce, run_sink
from bsfg.errors import BsfgError, InvalidArgument

if TYPE_CHECKING:
    from bsfg.sinks.flow import Sink

DSN_HINT = "Write it into a file that nobody else can read and give --dsn-file, or use libpq's own password file."

sql_app = typer.Typer(
    epilog=examples(
        ("bsfg consumers add historian --stream operational", "first: a consumer of what other zones sent"),
        (
            "bsfg pipeline sql --consumer historian --dsn 'host=db dbname=plant user=bsfg sslmode=verify-full'",
            "write its facts as they come, until it is stopped",
        ),
        ("bsfg pipeline sql --consumer historian --dsn-file dsn --once", "what is there now, then leave"),
        ("bsfg pipeline sql --consumer historian --dsn-file dsn --latest", "also the newest of each subject"),
        ("psql -c 'SELECT subject, object->>$$value$$ FROM bsfg_facts.latest'", "read it as any table"),
    )
)


@sql_app.command()
@connects("consumer")
def sql(
    node: Target,
    *,
    consumer: SinkConsumer,
    dsn: Annotated[
        str | None,
        option(
            "TEXT",
            "How the server is reached, as libpq has it: host, dbname, user, sslmode; no password.",
            show_default=False,
        ),
    ] = None,
    dsn_file: Annotated[
        Path | None, option("FILE", "A file that holds it instead, with a password if need be.", show_default=False)
    ] = None,
    schema: Annotated[str, option("NAME", "The schema that has the tables; it is made if need be.")] = "bsfg_facts",
    latest: Annotated[
        bool, flag("--latest", "Keep a table `latest`, too: the newest fact of each subject and predicate.")
    ] = False,
    once: SinkOnce = False,
    max_facts_per_batch: SinkMaxFacts = 1_000,
    json: Annotated[bool, flag("--json", "Print what was done as JSON.")] = False,
) -> None:
    """Write the facts of a consumer into tables of PostgreSQL: every fact once, in order. No Spark is needed.

    Rows and the position behind them are committed together, and the node is told afterwards: kill what you like, every
    fact is written once. `facts` has a row for each fact, its key is the fact's own; `gaps` what was not there to be
    written and why; `conflicts` facts whose key another one has; `positions` how far each log is. Columns, indexes and
    views of your own are left alone.

    Without --once it goes on until it is stopped, and waits for a node or server that is away.
    """
    sink = sql_sink(**dict(locals()), tell=told_once())
    run_sink(sink, node, f"the schema {schema}", once=once, json=json)


def sql_sink(
    *,
    node: Target,
    consumer: str,
    dsn: str | None,
    dsn_file: Path | None,
    schema: str,
    latest: bool,
    max_facts_per_batch: int,
    tell: Callable[[BsfgError], None] = lambda error: None,
    **others: object,
) -> Sink:
    """Make the sink that the options of this command mean, on its line or in a table of the zone's file."""
    from psycopg import Error
    from psycopg.conninfo import conninfo_to_dict

    from bsfg.config.kinds import SCHEMA_NAME, WrongValue
    from bsfg.disk import unreadable
    from bsfg.sinks.flow import Sink
    from bsfg.sinks.sql import SqlSettings, SqlTarget

    if (dsn is None) == (dsn_file is None):
        raise InvalidArgument("how the server is reached is not said, or twice", hint="Give --dsn or --dsn-file.")
    try:
        text = dsn if dsn_file is None else dsn_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(error, f"--dsn-file {dsn_file}") from None
    try:
        SCHEMA_NAME.read(schema)
        if {"password", "sslpassword"} & conninfo_to_dict(text or "").keys() and dsn is not None:
            raise InvalidArgument("--dsn holds a password, which everybody could read", hint=DSN_HINT)
    except WrongValue as problem:
        raise InvalidArgument(f"--schema {problem}") from None
    except Error:
        option = "--dsn" if dsn_file is None else "--dsn-file"
        raise InvalidArgument(f"{option} is no connection string of PostgreSQL") from None
    target = SqlTarget(SqlSettings(text or "", schema, latest))
    return Sink(node.endpoint(), consumer, target, max_facts_per_batch, tell=tell)


BODY_BYTES = 1 << 20

webhook_app = typer.Typer(
    epilog=examples(
        ("bsfg consumers add tickets --stream operational", "first: a consumer of what other zones sent"),
        ("openssl rand -hex 32 > secret", "what the receiver knows us by"),
        (
            "bsfg pipeline webhook --consumer tickets --url https://tickets.example/facts --secret secret",
            "post its facts as they come, until it is stopped",
        ),
        (
            "bsfg pipeline webhook --consumer tickets --url https://tickets.example/facts --headers headers --once",
            "with lines such as `Authorization: Bearer …`; what is there now",
        ),
        ("jq .refused tickets-aside.jsonl", "what the receiver refused, and why"),
    )
)


@webhook_app.command()
@connects("consumer")
def webhook(
    node: Target,
    *,
    consumer: SinkConsumer,
    url: Annotated[str, option("URL", "Where facts are posted to; https:// unless on this machine.")],
    secret: Annotated[
        Path | None,
        option("FILE", "A secret that the receiver has, too: it signs each body (HMAC, SHA-256).", show_default=False),
    ] = None,
    headers: Annotated[
        Path | None, option("FILE", "Lines such as `Authorization: Bearer …` to send as well.", show_default=False)
    ] = None,
    trust: Annotated[
        Path | None,
        option("FILE", "The authority of the receiver's certificate. Default: the system's.", show_default=False),
    ] = None,
    aside: Annotated[
        Path | None,
        option(
            "FILE",
            "Where facts go that the receiver refuses. Default: NAME-aside.jsonl, NAME being the consumer.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, option("SECONDS", "How long the receiver may take for one batch.", min=0.1)] = 30.0,
    once: SinkOnce = False,
    max_facts_per_batch: SinkMaxFacts = 100,
    json: Annotated[bool, flag("--json", "Print what was done as JSON.")] = False,
) -> None:
    """Post the facts of a consumer to a web server as JSON, in order and in batches, at least once. No Spark is needed.

    A fact may come twice, after a crash or an answer that was lost: each has an idempotency_key that stays the same,
    and each body an Idempotency-Key. What the receiver answers decides. 2xx: it has the batch, and the node is told.
    408, 425, 429, 5xx, or nothing: the same is sent again after a pause, or after what Retry-After says. 400, 409, 413,
    422: something in the batch is wrong; it is cut in halves until one fact is to blame, which is set aside in a file
    when the receiver takes the next. Anything else, a redirect too, ends the command with an error, and nothing is
    left out.

    Without --once it goes on until it is stopped, and waits for a node or receiver that is away.
    """
    sink = webhook_sink(**dict(locals()), tell=told_once())
    run_sink(sink, node, url.partition("?")[0], once=once, json=json)


def webhook_sink(
    *,
    node: Target,
    consumer: str,
    url: str,
    secret: Path | None,
    headers: Path | None,
    trust: Path | None,
    aside: Path | None,
    timeout: float,
    max_facts_per_batch: int,
    folder: Path = Path(),
    tell: Callable[[BsfgError], None] = lambda error: None,
    **others: object,
) -> Sink:
    """Make the sink that the options of this command mean, on its line or in a table of the zone's file."""
    from bsfg.sinks.flow import Sink
    from bsfg.sinks.webhook import Webhook, WebhookSettings

    settings = WebhookSettings(url, aside or folder / f"{consumer}-aside.jsonl", secret, headers, trust, timeout)
    return Sink(node.endpoint(), consumer, Webhook(settings), max_facts_per_batch, BODY_BYTES, tell=tell)
