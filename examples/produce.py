"""Append facts and wait for the node's word. Which node: BSFG_ADDRESS and so on, or BSFG_CONFIG=zone.toml."""

import sys

from bsfg import BsfgError, Fact, Producer

zone = sys.argv[1] if len(sys.argv) > 1 else "plant-a"

with Producer(stream="operational", from_zone=zone, to_zone="enterprise") as producer:
    futures = []
    for step in range(1, 101):
        fact = Fact.of("batch:B1042", "step_completed", {"step": step, "temperature": 71.5})
        # The id says which event this is. Running the program again repeats the ids, so nothing is stored twice.
        futures.append(producer.send(fact, message_id=f"B1042/{step}/completed"))
    for step, future in enumerate(futures, 1):
        try:
            appended = future.result(timeout_seconds=60)
            print(f"step {step}: {appended.result.name.lower()} at offset {appended.offset}")
        except BsfgError as error:
            print(f"step {step}: {error.code}: {error.message}. {error.hint}")
