-- Several nodes of one zone on the same tables.

CREATE TABLE node (
    token text PRIMARY KEY,
    name text NOT NULL,
    epoch bigint,
    seen timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
COMMENT ON TABLE node IS 'The nodes of the zone that run. The active one has the epoch of the zone; the others stand by, and watch whether it is seen.';
