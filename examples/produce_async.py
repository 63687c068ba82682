"""Append facts from asyncio, a whole batch at once and single ones, with a document that one of them refers to."""

import asyncio
import sys
import time

from bsfg import AsyncProducer, Envelope, Fact, FactBatch, Message

zone = sys.argv[1] if len(sys.argv) > 1 else "plant-a"


async def main() -> None:
    async with AsyncProducer(stream="operational", from_zone=zone, to_zone="enterprise") as producer:
        now = time.time_ns() // 1_000_000
        envelopes = [Envelope(zone, "enterprise", now, message_id=f"B1043/sample/{n}") for n in range(1000)]
        facts = [Fact.of("batch:B1043", "sample_taken", {"sample": n}) for n in range(1000)]
        batch = FactBatch.from_messages(map(Message, envelopes, facts))
        receipt = await (await producer.send_batch(batch))
        print(f"{len(receipt.offsets)} facts, the last at offset {receipt.offsets[-1]}")
        report = await producer.upload("batch-files", "B1043/report.txt", b"all good", media_type="text/plain")
        fact = Fact("batch:B1043", "report_released", b"null", artifact=report)
        print(await producer.append(fact, message_id="B1043/report/released", labels={"classification": "GMP"}))


asyncio.run(main())
