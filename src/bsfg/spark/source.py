"""The data source ``bsfg``: facts of a node as a Spark DataFrame, and DataFrames as facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from bsfg.errors import InvalidArgument
from bsfg.spark.mapping import FRAME_SCHEMA, REQUIRED, SPARK_SCHEMA, WHOLE, missing_columns, schema_of
from bsfg.spark.options import READ, READ_STREAM, WRITE, WRITE_STREAM, Options, documentation, parse
from bsfg.spark.reader import FactsReader, FactsStreamReader
from bsfg.spark.sink import FactsStreamWriter, FactsWriter
from bsfg.spark.told import told

FRAME_COLUMNS = ("first", "last", "entries", "gap")


class FactsSource(DataSource):
    """Facts of a node, found by Spark as ``format("bsfg")`` without registration.

    >>> facts = spark.read.format("bsfg").options(**node).option("stream", "operational").load()
    >>> facts.where("predicate = 'temperature_measured'").select("subject", "object_text").show()

    A stream of what is appended, each fact once per checkpoint:

    >>> facts = spark.readStream.format("bsfg").options(**node).option("stream", "operational").load()
    >>> facts.writeStream.format("parquet").option("checkpointLocation", "...").start("facts")

    ``node`` holds ``address`` and, for TLS, ``ca``, ``cert``, ``key`` and ``serverName``.

    Options:

    """

    __doc__ += documentation()

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return "bsfg"

    @told
    def schema(self) -> StructType:
        """Give the columns: all of them, or those that the options name."""
        options = parse(self.options, READ, READ_STREAM)
        return from_arrow_schema(FRAME_SCHEMA if options["rows"] == "frames" else schema_of(options.columns))

    @told
    def reader(self, schema: StructType) -> FactsReader:
        """Give what reads a range at once."""
        options = parse(self.options, READ)
        return FactsReader(options, _columns(schema, options))

    @told
    def streamReader(self, schema: StructType) -> FactsStreamReader:
        """Give what reads a stream."""
        options = parse(self.options, READ_STREAM)
        return FactsStreamReader(options, _columns(schema, options))

    @told
    def writer(self, schema: StructType, overwrite: bool) -> FactsWriter:
        """Give what writes a DataFrame once."""
        return FactsWriter(_writing(self.options, schema, WRITE, overwrite))

    @told
    def streamWriter(self, schema: StructType, overwrite: bool) -> FactsStreamWriter:
        """Give what writes a stream."""
        return FactsStreamWriter(_writing(self.options, schema, WRITE_STREAM, overwrite))


def _writing(given: Mapping[str, str], schema: StructType, use: str, overwrite: bool) -> Options:
    """Check what is to be written, and how."""
    options = parse(given, use)
    if overwrite:
        raise InvalidArgument("facts are never overwritten", hint='Write with mode("append").')
    names = schema.fieldNames()
    needed: Sequence[str] = REQUIRED
    if options["mode"] == "put":
        needed = FRAME_COLUMNS if "entries" in names else WHOLE
    missing = missing_columns(names, needed)
    if missing:
        raise InvalidArgument(f"the column {missing[0]} is missing", hint=f"Needed are {', '.join(needed)}.")
    _check_types(schema, FRAME_SCHEMA if needed is FRAME_COLUMNS else SPARK_SCHEMA)
    if options["mode"] == "put" and "log_id" not in names and options["logId"] is None:
        raise InvalidArgument("put needs the column log_id, or the option logId")
    return options


def _columns(schema: StructType, options: Options) -> list[str]:
    """Give the columns of a schema, or raise `InvalidArgument` when it asks for something that there is not."""
    frames = options["rows"] == "frames"
    _check_types(schema, FRAME_SCHEMA if frames else SPARK_SCHEMA)
    names: list[str] = schema.fieldNames()
    if "gap" in names and options["gaps"] != "rows" and not frames:
        raise InvalidArgument('the column gap needs the option gaps = "rows"')
    return names


def _check_types(schema: StructType, kind: pa.Schema) -> None:
    """Raise `InvalidArgument` unless every column is one that there is, with its type."""
    known = kind.names
    for field in schema:
        if field.name not in known:
            raise InvalidArgument(f"there is no column {field.name!r}", hint=f"There are {', '.join(known)}.")
        wanted, found = _spark_type(kind.field(field.name)), field.dataType.simpleString()
        if found != wanted:
            raise InvalidArgument(f"the column {field.name} must be of type {wanted}, not {found}")


def _spark_type(field: pa.Field) -> str:
    found: StructType = from_arrow_schema(pa.schema([field]))
    return str(found[0].dataType.simpleString())
