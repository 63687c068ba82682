"""The handoff of a zone's inbound links on Spark.

*Live*: for each link two streaming queries whose tasks live for many seconds and take turns. A task fetches, puts and
confirms by itself, and gives Spark only receipts, so that a fact takes milliseconds (`shift`, `carrying`).
*Replay*: a DataFrame from the sender's buffer into this zone's, for backlogs (`replay`).

`driver` starts both, and decides which one runs; the lease of the link keeps them apart. What is known of the sender
and what was confirmed is in the nodes alone, so a checkpoint that is lost or stale changes nothing.

A worker that dies: its open `RenewLease` breaks, and the node ends the lease within a third of a second
(`bsfg.node.links.Leases.keep`). The task of the link's other query takes it, recalls the position from the node, and
fetches from the sender's cursor; what was put and not confirmed comes again and is known by its key. Spark starts the
dead task again, and `driver` a query that ended.
"""
