"""Landing: a node's buffer as Parquet files, partitioned by date and predicate, every fact once.

Read it in this order: `lander` plans a batch, `tasks` runs `staging` on Spark, `folder` commits what was staged, and
`compaction` merges what is small.
"""
