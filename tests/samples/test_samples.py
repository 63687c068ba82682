"""What earlier versions wrote is read by this one, and this one goes on with it."""

from __future__ import annotations

import asyncio
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.samples import make

import bsfg
from bsfg.batch import FactBatch
from bsfg.cli import main
from bsfg.node.backup import BackupOptions, ZonePlace, back_up
from bsfg.node.restore import RestoreOptions, restore
from bsfg.node.state import NodeState
from bsfg.ports import Buffer, Confirmation, OriginSpan, Result
from bsfg.sdk.intake import LOOSE
from bsfg.sdk.outbox import Outbox
from bsfg.stores.artifacts.folder import ArtifactFolder
from bsfg.stores.log.reader import open_folder
from bsfg.stores.log.storage import LogStorage
from bsfg.stores.log.verify import verify
from bsfg.testing.facts import altered, sealed

SAMPLES = sorted(make.HERE.glob("*.tar.xz"))


@dataclass(frozen=True)
class Sample:
    """A sample, unpacked, with what it must hold."""

    folder: Path
    described: dict[str, Any]

    @property
    def data(self) -> Path:
        """Its data folder."""
        return self.folder / "data"

    @property
    def store(self) -> dict[str, Any]:
        """What its store buffer must hold."""
        found: dict[str, Any] = self.described["logs"][f"{make.STREAM}/store"]
        return found


@pytest.fixture(params=SAMPLES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
    """A copy of a sample of some version."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path / "sample", filter="data")
    text = request.param.with_name(request.param.name.replace(".tar.xz", ".json")).read_text()
    return Sample(tmp_path / "sample", json.loads(text))


def test_this_version_has_a_sample() -> None:
    """The version that is being worked on has a sample of its own, so that the next one can be held against it."""
    assert f"bsfg-{bsfg.__version__}.tar.xz" in [path.name for path in SAMPLES]


def test_it_is_sound(sample: Sample, capfd: pytest.CaptureFixture[str]) -> None:
    """`bsfg verify` finds nothing wrong with it, and `bsfg inspect` shows it."""
    assert main(["verify", str(sample.data), "--json"]) == 0
    report = orjson.loads(capfd.readouterr().out)
    assert report["ok"] and report["notes"] == []
    assert main(["inspect", str(sample.data), "--json"]) == 0
    shown = orjson.loads(capfd.readouterr().out)
    assert all(each["same_history"] for each in shown["consumers"])
    assert len(shown["consumers"]) == 3


def test_everything_in_it_is_read(sample: Sample) -> None:
    """Entries with digests, times and origins, gap records and quarantine are what they were."""
    assert orjson.loads(orjson.dumps(make.describe(sample.data))) == sample.described["logs"]


def test_it_is_opened_and_gone_on_with(sample: Sample) -> None:
    """A writer knows what is in it, truncated entries included, and appends behind its end; consumers go on."""
    asyncio.run(_go_on(sample))
    report = verify(sample.data)
    assert report.ok and report.notes == []


async def _go_on(sample: Sample) -> None:
    end = sample.store["end"]
    storage = await LogStorage.open(sample.data)
    store, forward = await storage.store(make.STREAM), await storage.forward(make.STREAM)
    assert (store.problems, forward.problems, storage.cursors.problems) == ([], [], [])
    repeated = await store.append(sealed(make.said(0, end)))
    assert repeated.count(Result.ALREADY_EXISTS) == end and repeated.offsets.tolist() == list(range(end))
    assert (await store.append(sealed(altered(make.said(0, 1))))).count(Result.CONFLICT) == 1
    fresh = await store.append(sealed(make.said(end, 5)))
    assert fresh.offsets.tolist() == list(range(end, end + 5))
    state = await storage.cursors.consumer("enterprise.operational")
    assert (state.checkpoint.committed, state.ranges) == (41, ((45, 49),))
    assert state.log_id == store.log_id
    await storage.cursors.commit("enterprise.operational", Confirmation(end + 4, log_id=store.log_id))
    await store.truncate_before(end)
    # The columns of forward buffers have become more: old and new ones lie in one log, each in segments of its own.
    count, ages = forward.end, np.array([7, 8])
    span = OriginSpan("enterprise", np.array([100, 101]), np.array([5, 6]), ages)
    assert (await forward.put_if_absent(sealed(make.said(500, 2)), span)).offsets.tolist() == [count, count + 1]
    for item in await forward.quarantine():
        await forward.release_quarantined(item.id, "looked at it")
    await storage.close()
    storage = await LogStorage.open(sample.data)
    entries = [
        entry.message
        async for frame in (await storage.store(make.STREAM)).replay(end)
        if frame.entries is not None
        for entry in frame.entries.to_entries()
    ]
    assert entries == make.said(end, 5)
    origins = [
        entry.origin
        async for frame in (await storage.forward(make.STREAM)).replay(0)
        if frame.entries is not None
        for entry in frame.entries.to_entries()
    ]
    assert [origin.age_ms for origin in origins if origin] == [None] * count + [7, 8]
    await storage.close()


def test_what_the_node_remembers(sample: Sample) -> None:
    """Positions of senders and held gates are still known."""
    state = NodeState(sample.data)
    position = asyncio.run(state.peer(make.LINK, make.STREAM).recall())
    assert (position.log_id, position.latest_start, position.acknowledged) == ("ab" * 16, 5, 4)
    assert state.held_gates()[make.LINK, "receiver"].reason == "firewall works"
    assert state.problems == []
    state.close()


def test_artifacts_are_found_by_name(sample: Sample) -> None:
    """An artifact is there under its name, whole."""

    async def content() -> bytes:
        artifacts = await ArtifactFolder.open(sample.data / "artifacts")
        stored = await artifacts.stat("reports", "7.txt")
        assert stored is not None and stored.media_type == "text/plain"
        data = b"".join([piece async for piece in artifacts.get(stored.digest)])
        await artifacts.close()
        return data

    assert asyncio.run(content()) == make.REPORT


def test_facts_in_an_outbox_are_sent_by_the_next_version(sample: Sample) -> None:
    """What a producer of the earlier version left in its outbox is read in order."""
    outbox = Outbox(sample.folder / "outbox")
    assert outbox.streams() == [make.STREAM]
    spool = outbox.lane(make.STREAM).spool
    facts = [fact for each in spool.read(0) for fact in FactBatch.from_ipc(each.blob, LOOSE).to_messages()]
    assert facts == make.said(100, sample.described["outbox"])
    assert spool.problems == []
    outbox.close()


def test_it_is_backed_up_and_restored(sample: Sample, tmp_path: Path) -> None:
    """A zone of an earlier version can be backed up by this one, and restored."""
    made = back_up(ZonePlace.of_folder(sample.data), tmp_path / "backup", BackupOptions(), lambda: 1, lambda *_: None)
    assert not made.damage and made.artifacts == 1
    restore(tmp_path / "backup", tmp_path / "new", RestoreOptions(accept_unsigned=True), lambda: 1, lambda *_: None)
    logs = make.describe(tmp_path / "new")
    assert orjson.loads(orjson.dumps(logs)) == sample.described["logs"]
    assert {log.buffer for log in open_folder(tmp_path / "new")} == set(Buffer)


def test_the_script_still_makes_samples(tmp_path: Path) -> None:
    """The script that made the samples makes one of this version, with the same description as the one kept."""
    packed, described = make.make(tmp_path)
    assert len(packed) < 20_000
    kept = json.loads((make.HERE / f"bsfg-{bsfg.__version__}.json").read_text())
    assert orjson.loads(orjson.dumps(described)) == kept
