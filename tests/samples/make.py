"""Makes the sample of this version: everything that BSFG keeps on disk, small, with a description of what is in it.

Run `python -m tests.samples.make` from the top of the repository when a version is released, and add what it writes.
Samples of earlier versions stay as they are: later versions must read them.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

import bsfg
from bsfg import Producer
from bsfg.fact import Message
from bsfg.gate import Gate, Mode
from bsfg.journey.link import PeerPosition
from bsfg.jsonform import entry_to_dict
from bsfg.node.backup import BackupOptions, ZonePlace, back_up
from bsfg.node.restore import RestoreOptions, restore
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, ConsumerSpec, GapRecord, OriginSpan
from bsfg.retention import GapReason
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.writer import LogOptions
from bsfg.testing.clock import START_UNIX_MS, FakeClock
from bsfg.testing.facts import altered, message, sealed

HERE = Path(__file__).parent
STREAM = "operational"
OPTIONS = LogOptions(segment_bytes=16_384, index_run_keys=20)
REPORT = b"certificate of analysis"
LINK = "from-enterprise"


def said(first: int, count: int, zone: str = "plant-a") -> list[Message]:
    """Give numbered facts of a zone; they are alike, so that the sample is small."""
    return [message(f"{zone}-{number}", {"value": number}, from_zone=zone) for number in range(first, first + count)]


async def write(folder: Path, clock: FakeClock) -> None:
    """Write a data folder with segments, keys of truncated ones, gap records, quarantine and consumers."""
    storage = await LogStorage.open(folder, clock=clock, options=OPTIONS)
    store, forward = await storage.store(STREAM), await storage.forward(STREAM)
    for first in range(0, 60, 10):
        await store.append(sealed(said(first, 10)))
        clock.advance(1)
    offsets = np.arange(5)
    times = np.full(5, START_UNIX_MS)
    await forward.put_if_absent(sealed(said(0, 5, "enterprise")), OriginSpan("enterprise", offsets, times))
    await forward.put_if_absent(
        sealed(altered(said(2, 1, "enterprise"))), OriginSpan("enterprise", offsets[:1] + 9, times[:1])
    )
    await forward.set_aside(sealed(said(7, 1, "enterprise")), "expired", "older than 1 h")
    await forward.record_gaps([GapRecord(5, 6, GapReason.EVICTED, START_UNIX_MS, "", "enterprise")])
    await storage.cursors.create(ConsumerSpec("enterprise.operational", STREAM))
    await storage.cursors.create(ConsumerSpec("historian", STREAM, Buffer.FORWARD, required=False))
    await storage.cursors.create(ConsumerSpec("old", STREAM, required=False))
    await storage.cursors.commit("enterprise.operational", Confirmation(41, [(45, 49)], peer_head=b"\1" * 32))
    await storage.cursors.commit("historian", Confirmation(1))
    await storage.cursors.retire("old", "replaced")
    await store.truncate_before(42)
    await storage.close()


async def go_on(folder: Path, clock: FakeClock) -> None:
    """Append a little more."""
    storage = await LogStorage.open(folder, clock=clock, options=OPTIONS)
    await (await storage.store(STREAM)).append(sealed(said(60, 3)))
    await storage.close()


async def add_artifact(folder: Path, clock: FakeClock) -> None:
    """Store an artifact under a name."""

    async def content() -> AsyncIterator[bytes]:
        yield REPORT

    artifacts = await ArtifactFolder.open(folder, clock=clock)
    await artifacts.put("reports", "7.txt", content(), media_type="text/plain")
    await artifacts.close()


def remember(folder: Path) -> None:
    """Write what a node remembers: a sender's position, and a gate that is held."""
    state = NodeState(folder)
    position = PeerPosition("ab" * 16, 5, 4, 9, b"\2" * 32, None, "enterprise:5-6:evicted")
    asyncio.run(state.peer(LINK, STREAM).remember(position))
    state.keep_gate(LINK, "receiver", Gate(Mode.HELD, START_UNIX_MS, "firewall works", "operator", None))
    state.close()


def fill_outbox(folder: Path) -> None:
    """Leave facts in the outbox of a producer whose node is away."""
    with Producer("127.0.0.1:1", stream=STREAM, outbox=folder) as producer:
        for fact in said(100, 3):
            producer.send(fact).wait_accepted()


def describe(folder: Path) -> dict[str, Any]:
    """Say what is in a data folder, in words that later versions can be held against."""
    logs = {}
    for log in open_folder(folder):
        view, notes = log.look()
        entries = [entry for frame in log.frames() if frame.entries is not None for entry in frame.entries.to_entries()]
        logs[f"{log.stream}/{log.buffer}"] = {
            "start": view.start,
            "end": view.end,
            "entries": [entry_to_dict(entry) for entry in entries],
            "gaps": [[gap.first, gap.last, str(gap.reason), gap.detail, gap.origin_zone] for gap in notes.gaps],
            "quarantine": [[each.id, each.reason, each.key.message_id] for each in notes.quarantine.all()],
        }
    return logs


def make(work: Path) -> tuple[bytes, dict[str, Any]]:
    """Make the sample in a folder; give it packed, and its description."""
    clock, top = FakeClock(), work / "sample"
    asyncio.run(write(work / "first", clock))
    remember(work / "first")
    # A zone that was restored has a log of two histories, which must be read as well.
    back_up(ZonePlace.of_folder(work / "first"), work / "backup", BackupOptions(), clock.now_unix_ms, lambda *_: None)
    restore(work / "backup", top / "data", RestoreOptions(accept_unsigned=True), clock.now_unix_ms, lambda *_: None)
    asyncio.run(go_on(top / "data", clock))
    asyncio.run(add_artifact(top / "data" / "artifacts", clock))
    fill_outbox(top / "outbox")
    described = {"version": bsfg.__version__, "logs": describe(top / "data"), "outbox": 3}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        archive.add(top, arcname=".", filter=_anonymous)
    return packed.getvalue(), described


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = START_UNIX_MS // 1000
    return entry


def main() -> None:
    """Write the sample of this version beside this file."""
    work = Path(tempfile.mkdtemp(prefix="bsfg-sample-"))
    try:
        packed, described = make(work)
    finally:
        shutil.rmtree(work)
    name = f"bsfg-{bsfg.__version__}"
    (HERE / f"{name}.tar.xz").write_bytes(packed)
    text = json.dumps(json.loads(_plain(described)), indent=1, sort_keys=True)
    (HERE / f"{name}.json").write_text(text + "\n")


def _plain(described: dict[str, Any]) -> bytes:
    """Write a description with the library that knows fragments of JSON."""
    import orjson

    return orjson.dumps(described)


if __name__ == "__main__":
    main()
