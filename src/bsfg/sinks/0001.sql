-- The tables of a sink. Columns, indexes and views of others may be added; rows are only ever added by the sink.

CREATE TABLE facts (
    from_zone text NOT NULL,
    stream text NOT NULL,
    message_id text NOT NULL,
    to_zone text NOT NULL,
    subject text NOT NULL,
    predicate text NOT NULL,
    object json, -- not jsonb: that refuses some of JSON, and writes numbers otherwise than they were said
    object_bytes bytea, -- of an object that is not JSON
    object_media_type text NOT NULL,
    object_schema text,
    produced_at timestamptz NOT NULL,
    correlation_id text,
    causation_id text,
    labels json,
    signature text,
    artifact json,
    digest text NOT NULL,
    log_id text NOT NULL,
    "offset" bigint NOT NULL,
    appended_at timestamptz NOT NULL,
    origin_zone text,
    origin_offset bigint,
    PRIMARY KEY (from_zone, stream, message_id)
);

CREATE INDEX facts_in_order ON facts (log_id, "offset");

-- Facts whose key is taken by one with another digest, such as an id that was used again after a long time.
CREATE TABLE conflicts (LIKE facts);

-- What was not there to be written, and why.
CREATE TABLE gaps (
    log_id text NOT NULL,
    stream text NOT NULL,
    origin_zone text NOT NULL, -- empty, or the zone whose offsets these are
    first bigint NOT NULL,
    last bigint NOT NULL,
    offsets bigint NOT NULL,
    reason text NOT NULL,
    detail text NOT NULL,
    at timestamptz NOT NULL,
    PRIMARY KEY (log_id, origin_zone, first, last, reason)
);

-- How far each log is written, committed together with what was.
CREATE TABLE positions (
    log_id text PRIMARY KEY,
    stream text NOT NULL,
    next bigint NOT NULL,
    tail_offset bigint,
    tail_digest text,
    written_at timestamptz NOT NULL
);
