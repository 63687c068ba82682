"""Handle the facts of a durable consumer: in order, at least once, stopping at the first that fails."""

import sys

from bsfg import Consumer, Entry, GapRecord

name = sys.argv[1] if len(sys.argv) > 1 else "mes"


def handle(entry: Entry) -> None:
    # Must bear to be done twice with the same entry: after a crash, what was not confirmed comes again.
    fact = entry.message.fact
    print(f"{entry.offset}: {fact.subject} {fact.predicate} {fact.object.decode()}")


def missing(gap: GapRecord) -> None:
    print(f"{gap.first} to {gap.last} were not delivered: {gap.reason}. {gap.detail}")


with Consumer(name, on_gap=missing) as consumer:
    count = consumer.run(handle, idle_seconds=2)  # without idle_seconds it goes on for ever
    print(f"{count} handled, {consumer.backlog} left")
