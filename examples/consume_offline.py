"""Handle facts through an inbox: they are brought to this disk first, so that handling goes on without the node."""

import sys

from bsfg import Consumer

name, inbox = sys.argv[1:3] if len(sys.argv) > 2 else ("mes", "inbox")

with Consumer(name, inbox=inbox) as consumer:
    for entry in consumer.entries(idle_seconds=2):
        print(f"{entry.offset}: {entry.message.fact.subject} {entry.message.fact.predicate}")
        consumer.confirm(entry)
    print(f"handled through offset {consumer.committed}")
