"""One fact's journey, a step per file: append, serve, pull, confirm, consume, truncate, recover."""
