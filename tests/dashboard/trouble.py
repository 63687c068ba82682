"""Things an operator must look at, put into a node: facts in quarantine, gap records, and hostile texts in both."""

from __future__ import annotations

from tests.dashboard.stage import Stage

from bsfg.fact import Envelope, Fact, Message
from bsfg.ports import GapRecord
from bsfg.retention import GapReason
from bsfg.testing.facts import batch, sealed

HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
TURNED = "batch:B\u202e1042"


async def trouble(stage: Stage) -> None:
    """Put three facts into quarantine and two gap records beside them."""
    forward = await stage.node.parts.forward("operational")
    store = await stage.node.parts.store("operational")
    await store.append(batch(20, from_zone="plant-a"))
    for number, (subject, reason) in enumerate(
        ((f"machine:{HOSTILE}", "conflict"), (TURNED, "expired"), ("batch:B1042", "conflict"))
    ):
        envelope = Envelope(
            from_zone="enterprise", to_zone="plant-a", produced_at_unix_ms=1, message_id=f"order-{number}"
        )
        facts = sealed([Message(envelope, Fact.of(subject, "order_created", {"note": HOSTILE, "number": number}))])
        await forward.set_aside(facts, reason, f"kept aside: {HOSTILE}")
    await store.record_gaps(
        [
            GapRecord(0, 4, GapReason.EVICTED, 1_700_000_000_000, HOSTILE),
            GapRecord(7, 7, GapReason.SKIPPED, 1_700_000_100_000, "addressed to another zone"),
        ]
    )
