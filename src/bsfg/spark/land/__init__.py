"""Landing: a node's buffer as a table of Parquet files, plain or of Delta Lake, every fact once.

Read it in this order: `lander` plans a batch, `tasks` runs `staging` on Spark, which lays facts out as `state` and
`columns` say, `folder` commits what was staged, `places` or `delta` makes it visible, and `upkeep` merges small files.
"""
