"""The pipeline `ingest`: Parquet, JSON Lines and CSV files become facts of a zone, in order, once, nothing dropped.

Read it in the order in which a row travels: `files` finds the files, `survey` looks through each of them once
(digest, rows, chunks), `work` remembers them and how far they are done, `reading` reads a chunk as columns,
`mapped` makes facts of columns and splits off the rows that are none, `task` does both inside Spark, `run` leads the
steps. `plan` holds what a user asked for. Only `task` and `run` need Spark, so that a dry run starts at once.
"""
