"""The one Arrow schema of facts and entries, in log, wire and pipeline."""

from __future__ import annotations

import pyarrow as pa

DIGEST_BYTES = 32

FACT_SCHEMA = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("from_zone", pa.string()),
        pa.field("to_zone", pa.string()),
        pa.field("produced_at_unix_ms", pa.int64()),
        pa.field("correlation_id", pa.string()),
        pa.field("causation_id", pa.string()),
        pa.field("labels", pa.string()),
        pa.field("object_media_type", pa.string()),
        pa.field("object_schema", pa.string()),
        pa.field("signature", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("predicate", pa.string()),
        pa.field("object", pa.binary()),
        pa.field("artifact", pa.string()),
        pa.field("artifact_digest", pa.string()),
        pa.field("digest", pa.binary(DIGEST_BYTES)),
    ]
)
"""Labels and artifact reference are canonical JSON texts, null when absent; the digest is null until sealed."""

ORIGIN_FIELDS = [
    pa.field("origin_zone", pa.string()),
    pa.field("origin_offset", pa.int64()),
    pa.field("origin_appended_at_unix_ms", pa.int64()),
    pa.field("origin_age_ms", pa.int64()),
]
"""Where an entry was pulled from: zone, offset and time there, and how old it was by then, all hops before added up."""

STORED_SCHEMA = pa.schema([*FACT_SCHEMA, *ORIGIN_FIELDS])
"""What a forward buffer keeps of each fact; offsets and times stand once per frame."""

ENTRY_SCHEMA = pa.schema(
    [
        *FACT_SCHEMA,
        pa.field("offset", pa.int64()),
        pa.field("appended_at_unix_ms", pa.int64()),
        *ORIGIN_FIELDS,
    ]
)
"""What a stored fact adds: its offset, when it became durable, and where it was pulled from."""

AGELESS_ENTRY_SCHEMA = ENTRY_SCHEMA.remove(len(ENTRY_SCHEMA) - 1)
"""Entries as nodes before 0.2 write and expect them: they know no age."""

FACT_FIELDS: tuple[str, ...] = tuple(FACT_SCHEMA.names)
AT = {name: index for index, name in enumerate(ENTRY_SCHEMA.names)}
"""Where each field stands in a row."""
