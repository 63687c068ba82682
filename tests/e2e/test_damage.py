"""A node whose folder is damaged starts, says so, and serves what is sound."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.zones import Zone, pair

from bsfg.errors import BsfgError
from bsfg.ports import Buffer
from bsfg.retention import GapReason
from bsfg.stores.shared.frame import FRAME_HEADER_BYTES, decode_frame_header, decode_segment_header, encode_frame
from bsfg.testing.facts import batch

PER_BATCH = 12


def poison(path: Path) -> int:
    """Replace the content of the second frame by what no Arrow reader takes, under right checksums; give its place."""
    data = path.read_bytes()
    first = decode_segment_header(data).size_bytes
    at = first + decode_frame_header(data, first).frame_bytes
    header = decode_frame_header(data, at)
    parts, _ = encode_frame(
        random.Random(1).randbytes(header.payload_bytes),
        base=header.base,
        count=header.count,
        appended_at_unix_ms=header.appended_at_unix_ms,
        log_id=header.log_id,
        chain_before=header.chain_before,
    )
    assert header.frame_bytes == sum(map(len, parts)) > FRAME_HEADER_BYTES
    path.write_bytes(data[:at] + b"".join(map(bytes, parts)) + data[at + header.frame_bytes :])
    return at


async def append(zone: Zone, first: int, stream: str = "operational") -> None:
    """Store one batch."""
    async with zone.client() as producer:
        await producer.append(stream, batch(PER_BATCH, first=first, from_zone="plant-a"))


async def test_a_frame_that_cannot_be_decoded_does_not_stop_the_node(zones: tuple[Zone, Zone]) -> None:
    """One poisoned frame of a store buffer is a gap; the node starts, names it, serves the rest and takes more."""
    plant, _ = zones
    plant.start()
    for number in range(3):
        await append(plant, number * PER_BATCH)
    plant.stop()
    [path] = (plant.data / "streams/operational/store").glob("*.seg")
    at = poison(path)
    plant.start()
    await append(plant, 3 * PER_BATCH)
    await plant.seen("storage_problem", stream="operational", buffer="store")
    assert any(f"{path.name} at byte {at}" in event["problem"] for event in plant.events("storage_problem"))
    [gap] = [gap for gap in plant.gaps(Buffer.STORE) if gap.reason == GapReason.DAMAGED]
    assert (gap.first, gap.last) == (PER_BATCH, 2 * PER_BATCH - 1)
    there = [entry.offset for entry in plant.entries(Buffer.STORE)]
    assert there == [*range(PER_BATCH), *range(2 * PER_BATCH, 4 * PER_BATCH)]


async def test_a_stream_that_cannot_open_is_alone_out_of_service(tmp_path: Path, cleanup: Cleanup) -> None:
    """Its callers are refused with a code of its own, an alert lasts, and the other stream works as ever."""
    plant, enterprise = pair(tmp_path, streams="[streams.operational]\n[streams.audit]\n")
    plant, _ = cleanup.zone(plant), cleanup.zone(enterprise)
    plant.start()
    await append(plant, 0, "audit")
    plant.stop()
    folder = plant.data / "streams/audit/store"
    kept = tmp_path / "kept"
    shutil.move(folder, kept)
    folder.write_bytes(b"no folder")
    plant.start()
    await append(plant, 0)
    with pytest.raises(BsfgError) as refused:
        await append(plant, PER_BATCH, "audit")
    assert refused.value.code == "stream_unavailable"
    assert refused.value.retryable
    await plant.seen("alert_raised", alert="stream_unavailable", about="audit/store")
    async with plant.admin("viewer") as viewer:
        status = await viewer.status()
    assert [(each["alert"], each["about"]) for each in status["alerts"]] == [("stream_unavailable", "audit/store")]
    assert {(each["stream"], each["buffer"]) for each in status["buffers"]} == {
        ("operational", "store"), ("operational", "forward"), ("audit", "forward"),
    }  # fmt: skip
    plant.stop()
    folder.unlink()
    shutil.move(kept, folder)
    plant.start()
    await append(plant, PER_BATCH, "audit")
    assert plant.end(Buffer.STORE, "audit") == 2 * PER_BATCH
