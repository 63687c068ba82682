"""The handoff of a zone's inbound links on Spark.

*Live*: for each link two streaming queries whose tasks live for many seconds and take turns. A task fetches, puts and
confirms by itself, and gives Spark only receipts, so that a fact takes milliseconds (`live`, `turn`).
*Replay*: a DataFrame from the sender's buffer into this zone's, for backlogs (`replay`).

`driver` starts both, and decides which one runs; the lease of the link keeps them apart. What is known of the sender
and what was confirmed is in the nodes alone, so a checkpoint that is lost or stale changes nothing.
"""
