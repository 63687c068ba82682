"""Append facts through an outbox: they are safe on this disk at once, and leave when the node can be reached."""

import sys

from bsfg import Fact, Producer

zone, outbox = sys.argv[1:3] if len(sys.argv) > 2 else ("plant-a", "outbox")

with Producer(stream="operational", from_zone=zone, to_zone="enterprise", outbox=outbox) as producer:
    for reading in range(1, 51):
        fact = Fact.of("machine:press-1", "stroke_counted", {"strokes": reading * 1000})
        future = producer.send(fact, message_id=f"press-1/strokes/{reading * 1000}")
        future.wait_accepted()  # on disk: neither a crash of this program nor an absent node can lose it now
    print("50 facts are safe")
    if producer.problem:
        print(f"they wait in {outbox}: {producer.problem.message}")
