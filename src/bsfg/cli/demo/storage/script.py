"""What the demo's processes have in common: who says what, and that nobody outlives the process that started them."""

from __future__ import annotations

import os
import sys
import threading

import orjson

STREAM = "operational"
ZONE, TARGET = "plant-a", "enterprise"


def message_id(producer: int, number: int) -> str:
    """Give the id of a producer's fact; it is the same however often the fact is sent."""
    return f"producer-{producer}-{number:06d}"


def object_of(producer: int, number: int) -> bytes:
    """Give the object of a producer's fact as canonical JSON."""
    value = {"number": number, "pressure": 100 + (37 * number + 11 * producer) % 89, "unit": "bar"}
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def line_of(producer: int, number: int) -> bytes:
    """Write a producer's fact as one line of JSON."""
    envelope = {
        "message_id": message_id(producer, number),
        "from_zone": ZONE,
        "to_zone": TARGET,
        "produced_at_unix_ms": 1_760_000_000_000 + number,
    }
    fact = {
        "subject": f"urn:{ZONE}:press-{producer}",
        "predicate": "measured",
        "object": orjson.Fragment(object_of(producer, number)),
    }
    return orjson.dumps({"envelope": envelope, "fact": fact}, option=orjson.OPT_APPEND_NEWLINE)


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however that went: its pipe to us closes then."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
