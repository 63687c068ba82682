"""Confirmation as soon as a micro-batch is done, for streams that read for durable consumers.

Spark tells a source that a batch is done when it plans the next one. It tells a listener at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import orjson
from pyspark.sql.streaming.listener import StreamingQueryListener

from bsfg.errors import BsfgError, InvalidArgument
from bsfg.spark.calls import BufferSource
from bsfg.spark.fanin import Origins, SourceQuestions, confirm_offsets, confirmation
from bsfg.spark.options import READ_STREAM, parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("bsfg.spark")


def confirm_batches(spark: SparkSession, query: StreamingQuery, options: Mapping[str, str]) -> ConfirmingListener:
    """Confirm every micro-batch of a query when it is done, with the options that its source was read with.

    >>> query = facts.writeStream.format("parquet").option("checkpointLocation", "...").start("lake")
    >>> with confirm_batches(spark, query, options):
    ...     query.awaitTermination()
    """
    listener = ConfirmingListener(spark, query, options)
    spark.streams.addListener(listener)
    listener.confirm_last()
    return listener


class ConfirmingListener(StreamingQueryListener):
    """Hears of every micro-batch of one query that is done, and confirms for the consumers what it ended with.

    A node that is away is told with a later batch. A confirmation never runs ahead of Spark: its checkpoint knows that
    the batch is done before anybody hears of it.
    """

    def __init__(self, spark: SparkSession, query: StreamingQuery, options: Mapping[str, str]) -> None:
        self._options = parse(options, READ_STREAM)
        if self._options["consumer"] is None and not any(each.consumer for each in self._options["sources"] or ()):
            raise InvalidArgument(
                "there is nobody to confirm for: the option consumer is missing",
                hint="Give the options that the stream was read with.",
            )
        self._spark, self._query, self._id = spark, query, str(query.id)
        self._origins = Origins(self._options) if self._options.several else None
        self._questions, self._confirmed = SourceQuestions(), dict[str, int]()
        self._confirming = Lock()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Take no note of a start."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Confirm what the batch ended with."""
        if str(event.progress.id) == self._id:
            self._confirm([source.endOffset for source in event.progress.sources])

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Take no note of idle times."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Take no note of the end: `close` sees to what was heard of last."""

    def confirm_last(self) -> None:
        """Confirm the last batch that the query tells of."""
        progress = self._query.lastProgress
        if progress is not None:
            self._confirm([source["endOffset"] for source in progress["sources"]])

    def close(self) -> None:
        """Confirm the last batch, and hear no more."""
        self.confirm_last()
        self._spark.streams.removeListener(self)

    def __enter__(self) -> ConfirmingListener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _confirm(self, ends: list[Any]) -> None:
        """Confirm up to the ends of the query's sources; what other formats have for an end is theirs."""
        found = [orjson.loads(told) if isinstance(told, str) else told for told in ends]
        mark = "log_id" if self._origins is None else "log_ids"
        for end in _least([end for end in found if isinstance(end, dict) and mark in end]):
            with self._confirming:
                try:
                    self._confirm_end(end)
                except BsfgError as error:
                    log.warning("a batch of %s is not confirmed: %s: %s", self._id, error.code, error.message)

    def _confirm_end(self, end: dict[str, Any]) -> None:
        if self._origins is not None:
            self._origins.refresh()
            confirm_offsets(self._origins, end, self._questions, self._confirmed)
        elif end["offset"] > self._confirmed.get("", 0):
            options = self._options
            source = BufferSource(options.access, options["stream"], options["buffer"], options["retrySeconds"])
            told = confirmation(source, options["consumer"], end["log_id"], end["offset"])
            self._confirmed.update(self._questions.ask("confirm", {"": told}))


def _least(ends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give ends no further than every log is processed: a query that reads one twice may be ahead in one place."""
    least: dict[tuple[str, str], int] = {}
    for end in ends:
        for key, log_id in _logs(end).items():
            least[key, log_id] = min(end[key], least.get((key, log_id), end[key]))
    return [{**end, **{key: least[key, log_id] for key, log_id in _logs(end).items()}} for end in ends]


def _logs(end: dict[str, Any]) -> dict[str, str]:
    found = end["log_ids"] if "log_ids" in end else {"offset": end["log_id"]}
    pairs = found.items() if isinstance(found, dict) else ()
    return {key: str(log_id) for key, log_id in pairs if isinstance(end.get(key), int)}
