"""A zone with something of everything that survives a restart, in any storage, and what can be seen of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tests.servers import jetstream, postgres

from bsfg.batch import FactBatch
from bsfg.config import ZoneConfig, parse
from bsfg.fact import ArtifactRef, Fact, Message
from bsfg.gate import Gate, Mode
from bsfg.journey.link import PeerPosition
from bsfg.node.backends import lock_folder, open_artifacts, open_state, open_storage
from bsfg.node.state import NodeState
from bsfg.ports import (
    ArtifactStore,
    Buffer,
    Confirmation,
    ConsumerSpec,
    GapRecord,
    OriginSpan,
    Result,
    Storage,
)
from bsfg.retention import GapReason, Policy
from bsfg.testing.clock import START_UNIX_MS, FakeClock
from bsfg.testing.facts import altered, batch, message, messages, sealed

ZONE = """
[zone]
name = "plant"
data_folder = "{data}"
[listen]
plaintext = true
plaintext_identity = "tester"
grpc = "127.0.0.1:9443"
http = "127.0.0.1:9444"
[identities.tester]
zone = "plant"
roles = ["operator"]
streams = ["*"]
[streams.operational]
{more}
[storage]
reserve = "1MiB"
{storage}
"""

SQLITE = Path(__file__).parents[2] / "examples" / "bsfg-sqlite"
DAY_SECONDS = 24 * 3600
STORE = Policy(retention_seconds=DAY_SECONDS, max_age_seconds=DAY_SECONDS, key_horizon_seconds=3 * DAY_SECONDS)
FORWARD = replace(STORE, keep_latest=True)

_places = count()


def install_sqlite(where: Path) -> list[str]:
    """Make the example of a backend known as an installed package would be; give what belongs on the path."""
    about = where / "bsfg_sqlite-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bsfg-sqlite\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[bsfg.backends]\nsqlite = bsfg_sqlite:open_sqlite\n")
    return [str(where), str(SQLITE)]


def storage_table(backend: str) -> str:
    """Give the table of a storage that nothing is in yet."""
    place = f"m{next(_places)}"
    if backend == "postgres":
        return f'backend = "postgres"\n[storage.postgres]\ndsn = "{postgres().dsn}"\nschema = "{place}"\n'
    if backend == "jetstream":
        server = jetstream()
        where = f'servers = ["{server.url}"]\nmonitor_url = "{server.monitor_url}"\nprefix = "{place}"\n'
        return f'backend = "jetstream"\n[storage.jetstream]\n{where}'
    return f'backend = "{backend}"\n'


def zone_file(folder: Path, name: str, backend: str, more: str = "") -> Path:
    """Write a zone's file with a storage of its own that nothing is in yet."""
    path = folder / f"{name}.toml"
    path.write_text(ZONE.format(data=f"data-{name}", storage=storage_table(backend), more=more))
    return path


def config_of(folder: Path, name: str, backend: str, more: str = "") -> ZoneConfig:
    """Give the configuration of such a zone."""
    path = zone_file(folder, name, backend, more)
    return parse(path.read_text(), path)


@dataclass
class Opened:
    """A zone's storage and what belongs to it."""

    storage: Storage
    state: NodeState
    artifacts: ArtifactStore


@asynccontextmanager
async def opened(config: ZoneConfig, clock: FakeClock) -> AsyncIterator[Opened]:
    """Open what a node opens."""
    async with AsyncExitStack() as stack:
        if config.storage.backend != "log":
            stack.callback(lock_folder(config.data_folder))
        storage = await open_storage(config, clock, lambda seconds: None)
        stack.push_async_callback(storage.close)
        state = open_state(config, storage, clock)
        stack.callback(state.close)
        state.check_settled()
        artifacts = await open_artifacts(config, storage, clock)
        stack.push_async_callback(artifacts.close)
        yield Opened(storage, state, artifacts)


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    """Give content piece by piece."""
    for part in parts:
        yield part


def origin_of(facts: FactBatch, first: int) -> OriginSpan:
    """Say that facts come from another zone."""
    offsets = np.arange(first, first + len(facts))
    return OriginSpan("enterprise", offsets, START_UNIX_MS + offsets, np.full(len(facts), 5))


def naming(number: int, digest: str) -> Message:
    """Make a fact that names an artifact."""
    plain = message(f"doc-{number}")
    return replace(plain, fact=Fact.of("document:report", "filed", {"n": number}, artifact=ArtifactRef(digest=digest)))


async def fill(zone: Opened, clock: FakeClock) -> None:
    """Put something of everything into a zone."""
    await _fill_store(zone, clock)
    await _fill_forward(zone, clock)
    zone.state.keep_gate("to-enterprise", "receiver", Gate(Mode.HELD, 7, "a reason", "somebody"))
    await zone.state.peer("from-enterprise", "operational").remember(
        PeerPosition("ab" * 16, latest_start=7, acknowledged=6, end=9, chain_head=b"\5" * 32)
    )


async def _fill_store(zone: Opened, clock: FakeClock) -> None:
    storage, artifacts = zone.storage, zone.artifacts
    store = await storage.store("operational", STORE)
    await storage.cursors.create(ConsumerSpec("enterprise.operational", "operational"))
    await storage.cursors.create(ConsumerSpec("gone", "operational", required=False))
    # What left so long ago that its keys are forgotten, and what left and is still known.
    for first, days in ((0, 4), (100, 2), (200, 0)):
        for facts in (batch(60, first=first), batch(1, first=first + 60), batch(39, first=first + 61)):
            await store.append(facts)
        await storage.cursors.commit("enterprise.operational", Confirmation(through=first + 99))
        clock.advance(days * DAY_SECONDS)
        await store.enforce_retention(link_open=True)
    await storage.cursors.commit("enterprise.operational", Confirmation(through=249, peer_head=b"\7" * 32))
    await storage.cursors.commit("enterprise.operational", Confirmation(ranges=[(260, 262), (270, 270)]))
    await storage.cursors.retire("gone", "it never came back")
    await store.truncate_before(230)
    for each in messages(5, first=300):
        await store.append(sealed([each]))
    named = await artifacts.put(
        "reports", "a/b.pdf", pieces(b"of a report ", b"the content"), media_type="application/pdf"
    )
    nameless = await artifacts.add(pieces(b"without a name"))
    await store.append(sealed([naming(1, named.digest), naming(2, nameless.digest)]))
    await store.record_gaps([GapRecord(280, 283, GapReason.SKIPPED, clock.now_unix_ms(), "to others")])
    await store.record_gaps([GapRecord(5, 9, GapReason.EVICTED, 77, "there", "enterprise")])
    await store.set_aside(batch(1, first=900), "fact_expired", "too old")


async def _fill_forward(zone: Opened, clock: FakeClock) -> None:
    storage = zone.storage
    forward = await storage.forward("operational", FORWARD)
    await storage.cursors.create(ConsumerSpec("app", "operational", Buffer.FORWARD))
    for first in (0, 40):
        facts = batch(40, seed=5, first=first, from_zone="enterprise")
        await forward.put_if_absent(facts, origin_of(facts, first))
    await storage.cursors.commit("app", Confirmation(through=39))
    await forward.truncate_before(40)
    other = sealed(altered(messages(3, seed=5, first=50, from_zone="enterprise")))
    receipt = await forward.put_if_absent(other, origin_of(other, 80))
    assert receipt.count(Result.CONFLICT) == 3
    refused = await forward.quarantine()
    # The last one is dropped: its number must not be given again.
    await forward.release_quarantined(refused[-1].id, "seen, and not needed")
    await storage.forward("documents", FORWARD)  # which nothing was ever put into


async def seen(zone: Opened) -> dict[str, Any]:
    """Give all that can be seen of a zone through its ports."""
    found: dict[str, Any] = {"consumers": await zone.storage.cursors.consumers()}
    for stream, kind in await zone.storage.streams():
        buffer: Any = await (
            zone.storage.store(stream, STORE) if kind == Buffer.STORE else zone.storage.forward(stream, FORWARD)
        )
        stats = await buffer.stats()
        frames = [frame async for frame in buffer.replay(0)]
        entries = [entry for frame in frames if frame.entries is not None for entry in frame.entries.to_entries()]
        gaps = [(frame.first, frame.last, str(frame.gap.reason), frame.gap.detail) for frame in frames if frame.gap]
        aside = [(each.id, each.reason, each.key, each.detail, each.origin) for each in await buffer.quarantine()]
        history = await buffer.history([stats.chain_head])
        numbers = (stats.log_id, stats.start, stats.end, stats.chain_head, stats.newest_unix_ms)
        latest = (await buffer.kept_latest()).to_entries() if kind == Buffer.FORWARD else []
        found[f"{stream}/{kind}"] = {
            "numbers": numbers,
            "entries": entries,
            "not there": gaps,
            "gaps": sorted(map(str, await buffer.gaps())),
            "aside": aside,
            "kept": history.kept,
            "head": history.heads,
            "latest": latest,
        }
    found["state"] = {key: value for key, value in zone.state.values().items() if key[0] not in ("storage", "scrub")}
    found["names"] = [name async for name in zone.artifacts.names()]
    digests = {name.digest for name in found["names"]} | {
        entry.message.fact.artifact.digest
        for entry in found["operational/store"]["entries"]
        if entry.message.fact.artifact is not None
    }
    found["contents"] = {digest: b"".join([piece async for piece in zone.artifacts.get(digest)]) for digest in digests}
    return found


def alike(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Tell whether a zone is as it was.

    A log that lets go of whole files keeps what was truncated inside one; elsewhere that has left, with its digest.
    """
    assert before.keys() == after.keys()
    for name, value in before.items():
        now = after[name]
        if "/" in name:
            old, new = value["kept"], now["kept"]
            assert new[: len(old)] == old
            assert all(each.last < now["numbers"][1] for each in new)
            value, now = {**value, "kept": None}, {**now, "kept": None}
        assert now == value
    return True


async def goes_on(zone: Opened) -> None:
    """Show that a zone goes on as the one that it was: repeats are known, also of what left, and offsets follow."""
    store = await zone.storage.store("operational", STORE)
    forward = await zone.storage.forward("operational", FORWARD)
    before = (await store.stats()).end
    for first, expected in ((100, Result.ALREADY_EXISTS), (200, Result.ALREADY_EXISTS)):
        receipt = await store.append(batch(100, first=first))
        assert set(receipt.results.tolist()) == {int(expected)}
        assert receipt.offsets.tolist() == list(range(first, first + 100))
    other = await store.append(sealed(altered(messages(2, first=100))))
    assert other.count(Result.CONFLICT) == 2 and other.offsets.tolist() == [100, 101]
    known = batch(80, seed=5, from_zone="enterprise")
    again = await forward.put_if_absent(known, origin_of(known, 0))
    assert again.count(Result.ALREADY_EXISTS) == 80 and again.offsets.tolist() == list(range(80))
    # Those whose keys are beyond the horizon are new.
    receipt = await store.append(batch(3, first=0))
    assert receipt.offsets.tolist() == [before, before + 1, before + 2] and receipt.count(Result.INSERTED) == 3
    ids = [each.id for each in await forward.quarantine()]
    await forward.set_aside(batch(1, first=901), "fact_expired")
    assert (await forward.quarantine())[-1].id == ids[-1] + 2
    await zone.storage.cursors.commit("enterprise.operational", Confirmation(through=before))
    await store.truncate_before(before)
    await store.enforce_retention(link_open=True)
    assert (await store.append(batch(100, first=200))).count(Result.ALREADY_EXISTS) == 100
