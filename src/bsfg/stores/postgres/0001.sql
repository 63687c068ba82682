-- The first version of the tables of one zone. Each file in this folder is one version; they are applied in order,
-- each in a transaction of its own, and none is ever changed once it was released.

CREATE TABLE zone (
    only_one boolean PRIMARY KEY DEFAULT true CHECK (only_one),
    name text NOT NULL,
    hasher text NOT NULL,
    epoch bigint NOT NULL DEFAULT 0
);
COMMENT ON COLUMN zone.epoch IS 'Counted up by every node that opens the zone; whoever knows a lower one writes nothing.';

CREATE TABLE buffer (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream text NOT NULL,
    kind text NOT NULL,
    log_id bytea NOT NULL,
    secret bytea NOT NULL,
    epoch bigint NOT NULL,
    start_offset bigint NOT NULL DEFAULT 0,
    end_offset bigint NOT NULL DEFAULT 0,
    used_bytes bigint NOT NULL DEFAULT 0,
    keys bigint NOT NULL DEFAULT 0,
    newest_unix_ms bigint NOT NULL DEFAULT 0,
    chain bytea NOT NULL,
    UNIQUE (stream, kind)
) WITH (fillfactor = 50);
COMMENT ON TABLE buffer IS 'One row per buffer. Its lock orders all commits, so that offsets are given in the order in which they appear.';

CREATE TABLE frame (
    buffer_id integer NOT NULL,
    base bigint NOT NULL,
    count integer NOT NULL,
    appended_at_unix_ms bigint NOT NULL,
    chain_before bytea NOT NULL,
    size_bytes integer NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY (buffer_id, base)
);
ALTER TABLE frame ALTER COLUMN content SET STORAGE EXTERNAL;
COMMENT ON TABLE frame IS 'What was stored with one commit: header and payload as the embedded log writes them, each with the digest of the one before.';

CREATE TABLE key (
    buffer_id integer NOT NULL,
    hash bigint NOT NULL,
    at bigint NOT NULL,
    PRIMARY KEY (buffer_id, hash, at)
);
COMMENT ON TABLE key IS 'Where a fact of (from_zone, message_id) may be; the fact itself tells whether it is.';

CREATE TABLE departed (
    buffer_id integer NOT NULL REFERENCES buffer,
    first bigint NOT NULL,
    last bigint NOT NULL,
    newest_unix_ms bigint NOT NULL,
    chain_before bytea NOT NULL,
    chain_after bytea NOT NULL,
    range_digest text NOT NULL,
    keys bytea,
    PRIMARY KEY (buffer_id, first)
);
COMMENT ON TABLE departed IS 'What stays of frames that left: the digest over their entries, the chain, and for the key horizon their keys.';

CREATE TABLE latest (
    buffer_id integer PRIMARY KEY REFERENCES buffer,
    entries bytea NOT NULL
);

CREATE TABLE gap (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    buffer_id integer NOT NULL REFERENCES buffer,
    reason text NOT NULL,
    detail text NOT NULL,
    origin_zone text,
    since_unix_ms bigint NOT NULL,
    ranges bytea NOT NULL
);
CREATE INDEX gap_by_buffer ON gap (buffer_id, id);

CREATE TABLE aside (
    buffer_id integer NOT NULL REFERENCES buffer,
    id bigint NOT NULL,
    same bigint NOT NULL,
    size_bytes integer NOT NULL,
    head text NOT NULL,
    fact bytea NOT NULL,
    PRIMARY KEY (buffer_id, id)
);
CREATE INDEX aside_by_identity ON aside (buffer_id, same);

CREATE TABLE released (
    buffer_id integer NOT NULL REFERENCES buffer,
    id bigint NOT NULL,
    reason text NOT NULL,
    at_unix_ms bigint NOT NULL,
    PRIMARY KEY (buffer_id, id)
);

CREATE TABLE consumer (
    name text PRIMARY KEY,
    stream text NOT NULL,
    buffer text NOT NULL,
    start text NOT NULL,
    start_value bigint NOT NULL,
    required boolean NOT NULL,
    committed bigint NOT NULL,
    ranges bigint[] NOT NULL,
    log_id text NOT NULL,
    created_unix_ms bigint NOT NULL,
    retired_reason text,
    peer_head bytea
);

CREATE SEQUENCE artifact_upload;

CREATE TABLE artifact_chunk (
    upload bigint NOT NULL,
    part integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (upload, part)
);
ALTER TABLE artifact_chunk ALTER COLUMN data SET STORAGE EXTERNAL;
COMMENT ON TABLE artifact_chunk IS 'The pieces of uploads. Those of an upload that no content names are of one that is under way, or that broke off.';

CREATE TABLE artifact_content (
    digest text PRIMARY KEY,
    size_bytes bigint NOT NULL,
    upload bigint NOT NULL,
    needed_unix_ms bigint NOT NULL
);

CREATE TABLE artifact_name (
    bucket text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    digest text NOT NULL REFERENCES artifact_content,
    size_bytes bigint NOT NULL,
    media_type text NOT NULL,
    created_unix_ms bigint NOT NULL,
    PRIMARY KEY (bucket, key)
);
CREATE INDEX artifact_name_by_digest ON artifact_name (digest);

CREATE TABLE remembered (
    name text PRIMARY KEY,
    value bytea NOT NULL
);

CREATE TABLE state (
    kind text NOT NULL,
    name text NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (kind, name)
);
COMMENT ON TABLE state IS 'What the node remembers beside its buffers, as JSON: held gates, and where it stands with its senders.';
