"""One fact's journey, a step per file: append, serve, pull, receive, confirm, truncate, handoff, backfill, recover."""
