"""The references to artifacts are known exactly, although only what is new is read."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from random import Random
from typing import cast

import pytest
from tests.journey.test_artifacts import naming, reference
from tests.journey.zones import Zone, origin_span

from bsfg.fact import ArtifactRef
from bsfg.journey.artifacts import BufferReferences, References, all_buffers, decoded, encoded
from bsfg.ports import Buffer, ForwardBuffer, Frame, Replayable
from bsfg.testing.facts import altered, batch, messages, sealed

MakeZone = Callable[[str], Zone]

POOL = [reference(str(number).encode(), f"key-{number}") for number in range(6)]


@dataclass
class Remembered:
    """What scans have remembered last."""

    references: bytes | None = None

    async def recall(self) -> bytes | None:
        """Give it."""
        return self.references

    async def remember(self, data: bytes) -> None:
        """Keep this instead."""
        self.references = data


class Watched:
    """A buffer that notes how many entries were read from it."""

    def __init__(self, buffer: Replayable) -> None:
        self._buffer = buffer
        self.entries_read = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._buffer, name)

    async def replay(self, start: int, *, end: int | None = None, max_facts: int = 10_000) -> AsyncIterator[Frame]:
        """Replay and count."""
        async for frame in self._buffer.replay(start, end=end, max_facts=max_facts):
            self.entries_read += len(frame.entries) if frame.entries is not None else 0
            yield frame


async def put(forward: ForwardBuffer, first: int, *artifacts: ArtifactRef | None) -> None:
    """Put facts with these artifacts, numbered from ``first``."""
    facts = sealed([naming(artifact, first + number) for number, artifact in enumerate(artifacts)])
    await forward.put_if_absent(facts, origin_span("plant", first, len(facts)))


async def naive(zone: Zone) -> set[str]:
    """Find what is named by reading everything."""
    found = set()
    for buffer in await all_buffers(await zone.storage()):
        async for frame in buffer.replay(0):
            for entry in frame.entries.to_entries() if frame.entries is not None else ():
                if entry.message.fact.artifact is not None:
                    found.add(entry.message.fact.artifact.digest)
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_a_scan_knows_what_a_full_reading_finds(make_zone: MakeZone, seed: int) -> None:
    """After any appends, truncations, restarts and losses of memory a scan gives what reading everything gives."""
    zone, random = make_zone("enterprise"), Random(seed)
    medium = Remembered()
    references, end = References(medium), 0
    for _ in range(60):
        forward = await zone.forward()
        match random.choice(("put", "put", "truncate", "restart", "forget", "scan", "scan")):
            case "put":
                artifacts = [random.choice([None, None, *POOL]) for _ in range(random.randrange(1, 5))]
                await put(forward, end, *artifacts)
                end += len(artifacts)
            case "truncate":
                await forward.truncate_before(random.randint(0, end))
            case "restart":
                await zone.restart()
                references = References(medium)
            case "forget":
                medium.references = random.choice((None, b"", b"{}", b'{"format": 1, "buffers": {"x": 1}}'))
                references = References(medium)
            case "scan":
                found = await references.scan(await all_buffers(await zone.storage()))
                # A storage may keep entries below its start in one unit with others; it does not give them.
                assert found == await naive(zone)


async def test_only_what_is_new_is_read(make_zone: MakeZone) -> None:
    """A second scan, also by another process, reads what came since the first and the entry it stopped at."""
    zone = make_zone("enterprise")
    forward = await zone.forward()
    await put(forward, 0, *([POOL[0]] * 100))
    medium = Remembered()
    for first, references in ((100, References(medium)), (103, References(medium))):
        await references.scan([forward])
        await put(forward, first, POOL[1], None, None)
        watched = Watched(forward)
        assert await references.scan([cast(Replayable, watched)]) == {POOL[0].digest, POOL[1].digest}
        assert watched.entries_read == 4


async def test_a_replaced_history_is_read_anew(make_zone: MakeZone) -> None:
    """When the log is another one, or an older copy that went on differently, nothing remembered is trusted."""
    zone = make_zone("enterprise")
    forward = await zone.forward()
    await put(forward, 0, POOL[0], None, POOL[1])
    log_id = forward.log_id
    real = sealed([naming(POOL[1], 2)]).digests()[0].hex()
    remembered = [
        BufferReferences("another log", 3, 2, real, {POOL[5].digest: 0}),
        BufferReferences(log_id, 3, 2, "00" * 32, {POOL[5].digest: 0}),
        BufferReferences(log_id, 9, 8, real, {POOL[5].digest: 0}),
        BufferReferences(log_id, 3, -1, "", {POOL[5].digest: 0}),
    ]
    for seen in remembered:
        medium = Remembered(references=encoded({"forward/operational": seen}))
        assert await References(medium).scan([forward]) == {POOL[0].digest, POOL[1].digest}
    right = BufferReferences(log_id, 3, 2, real, {POOL[0].digest: 0, POOL[1].digest: 2})
    assert decoded(medium.references or b"") == {"forward/operational": right}


async def test_quarantined_facts_count(make_zone: MakeZone) -> None:
    """What a quarantined fact names is kept, because an operator may still let the fact pass."""
    zone = make_zone("enterprise")
    forward = await zone.forward()
    await put(forward, 0, POOL[0])
    (taken,) = altered(messages(1))
    taken = replace(taken, fact=replace(taken.fact, artifact=POOL[1]))
    await forward.put_if_absent(sealed([taken]), origin_span("plant", 0, 1))
    references = References()
    assert await references.scan([forward]) == {POOL[0].digest, POOL[1].digest}
    (item,) = await forward.quarantine()
    await forward.release_quarantined(item.id, "settled")
    assert await references.scan([forward]) == {POOL[0].digest}


async def test_all_buffers_are_looked_at(make_zone: MakeZone) -> None:
    """Streams that nobody opened since the start are found too."""
    zone = make_zone("plant")
    storage = await zone.storage()
    other = await storage.store("audit")
    await other.append(sealed([naming(POOL[2])]))
    await put(await zone.forward(), 0, POOL[3])
    await zone.restart()
    storage = await zone.storage()
    buffers = await all_buffers(storage)
    assert {(each.stream, each.buffer) for each in buffers} == {
        ("audit", Buffer.STORE),
        ("operational", Buffer.FORWARD),
    }
    assert await References().scan(buffers) == {POOL[2].digest, POOL[3].digest}


async def test_nothing_is_written_when_nothing_changed(make_zone: MakeZone) -> None:
    """A scan that finds nothing new leaves the memory alone."""
    zone = make_zone("enterprise")
    forward = await zone.forward()
    await forward.put_if_absent(batch(3), origin_span("plant", 0, 3))
    medium = Remembered()
    references = References(medium)
    assert await references.scan([forward]) == frozenset()
    kept, medium.references = medium.references, None
    await references.scan([forward])
    assert medium.references is None
    await put(forward, 3, POOL[0])
    await references.scan([forward])
    assert medium.references not in (None, kept)
