"""Read the last known state from a zone's folder: no network, no certificate, and no node that must be alive."""

import sys
from datetime import UTC, datetime

from bsfg import Buffer, LocalReader

folder = sys.argv[1] if len(sys.argv) > 1 else "data"
buffer = Buffer(sys.argv[2]) if len(sys.argv) > 2 else Buffer.FORWARD

reader = LocalReader(folder, buffer=buffer)
for (subject, predicate), entry in reader.latest_all().items():
    stored = datetime.fromtimestamp(entry.appended_at_unix_ms / 1000, UTC)
    print(f"{subject} {predicate} = {entry.message.fact.object.decode()} ({stored:%H:%M:%S})")
for gap in reader.gaps:
    print(f"offsets {gap.first} to {gap.last} cannot be read: {gap.reason}")
