"""A zone's buffers and cursors in PostgreSQL: for a zone that runs a database already, or whose machine may die."""
