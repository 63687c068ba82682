"""A peer that lies: its link is held with the right code, an operator hears of it, and nothing of it is stored."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.liar import Answers, Liar, RawServer, entries_of, frame, head
from tests.e2e.nursery import rss_bytes
from tests.e2e.zones import pair, settled, until

from bsfg.errors import ForeignLog
from bsfg.fact import Message
from bsfg.ports import Buffer
from bsfg.stores.log.identity import read_identity
from bsfg.testing.facts import altered, batch, message, messages
from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.status import encoded

LINK = "from-plant-a"
LOG_ID = "f0" * 16
GOOD = messages(10, from_zone="plant-a")


def wrong_digest(log_id: str) -> Answers:
    """Facts whose bodies were exchanged, under the digests of the true ones."""
    truth = entries_of(GOOD)
    return [head(log_id), frame(entries_of(altered(GOOD), digest=truth.column("digest")))]


def wrong_from_zone(log_id: str) -> Answers:
    """Facts of a zone for which the peer may not speak."""
    return [head(log_id), frame(entries_of(messages(10, from_zone="elsewhere")))]


def jumping_frames(log_id: str) -> Answers:
    """A hole between two frames."""
    return [
        head(log_id, end=30),
        frame(entries_of(GOOD)),
        frame(entries_of(messages(5, first=10, from_zone="plant-a"), 15)),
    ]


def jumping_entries(log_id: str) -> Answers:
    """Entries that do not have the offsets of their frame."""
    return [head(log_id), frame(entries_of(GOOD, 3), first=0)]


def beyond_the_end(log_id: str) -> Answers:
    """More entries than the log is said to have."""
    return [head(log_id), frame(entries_of(messages(15, from_zone="plant-a")))]


def garbage(log_id: str) -> Answers:
    """Bytes that are no Arrow stream."""
    return [head(log_id), pb.FetchFrame(first=0, last=9, entries=b"garbage" * 50)]


def huge_arrow(log_id: str) -> Answers:
    """An Arrow stream whose first header claims 4 GiB."""
    return [head(log_id), pb.FetchFrame(first=0, last=9, entries=struct.pack("<Ii", 0xFFFFFFFF, -1) + b"\x00" * 100)]


def headless(log_id: str) -> Answers:
    """An answer without a head."""
    return [frame(entries_of(GOOD))]


def foreign_gap(log_id: str) -> Answers:
    """A gap record of a zone for which the peer may not speak."""
    gap = pb.GapRecord(first=0, last=5, reason="evicted", at_unix_ms=1, origin_zone="elsewhere")
    return [head(log_id, gaps=[gap])]


def endless(log_id: str) -> Iterator[pb.FetchFrame]:
    """Gap records without end, each of them small."""
    yield head(log_id, end=1 << 60)
    gap = pb.GapRecord(first=0, last=0, reason="skipped", at_unix_ms=1, detail="x" * 100_000)
    for number in range(1 << 40):
        yield pb.FetchFrame(first=number, last=number, gap=gap)


LIES: dict[str, tuple[Callable[[str], Answers], str]] = {
    "wrong digest": (wrong_digest, "digest_mismatch"),
    "wrong from_zone": (wrong_from_zone, "zone_not_allowed"),
    "frames that jump": (jumping_frames, "frame_invalid"),
    "entries that jump": (jumping_entries, "frame_invalid"),
    "beyond the end": (beyond_the_end, "frame_invalid"),
    "garbage": (garbage, "frame_invalid"),
    "a 4 GiB length in Arrow": (huge_arrow, "frame_invalid"),
    "no head": (headless, "frame_invalid"),
    "a foreign gap record": (foreign_gap, "zone_not_allowed"),
    "an endless answer": (endless, "frame_invalid"),
}


class Victim:
    """The receiver of a link, and what its operator sees."""

    def __init__(self, root: Path, cleanup: Cleanup) -> None:
        self.plant, self.enterprise = pair(root)
        cleanup.zone(self.plant)
        cleanup.zone(self.enterprise)
        self.holds = 0
        # The true sender has been here before, so that its history is known to whoever poses as it.
        self.plant.start()
        self.plant.stop()
        log = self.plant.log(Buffer.STORE)
        identity = read_identity(log.files, log.path)
        assert identity is not None
        self.log_id = identity.log_id.hex()
        self.enterprise.start()

    async def held(self, code: str) -> None:
        """Wait until the link is held, and insist on the reason and on an alert."""
        self.holds += 1
        event = await self.enterprise.seen("link_held", count=self.holds)
        assert event["code"] == code, event
        alert = await self.enterprise.seen("alert_raised", count=self.holds, alert="gate_held")
        assert alert["text"].startswith(f"{LINK} is held by bsfg: {code}"), alert
        await until(lambda: self.enterprise.modes(LINK)[-1:] == ["held"])

    async def release(self) -> None:
        """Open the link again as the operator, once the alert has been seen."""
        async with self.enterprise.admin() as operator:
            await operator.release_gate(LINK, "the peer was looked at")
        await self.enterprise.seen("alert_cleared", count=self.holds, alert="gate_held")

    async def goes_on(self, expected: list[Message] | None = None) -> None:
        """Insist that an honest sender in the liar's place is believed again."""
        self.plant.start()
        async with self.plant.client() as producer:
            await producer.append("operational", batch(30, seed=5, from_zone="plant-a"))
        await settled(self.plant, self.enterprise)
        stored = self.enterprise.messages(Buffer.FORWARD)
        assert stored == (expected or []) + messages(30, seed=5, from_zone="plant-a")


@pytest.fixture
def victim(tmp_path: Path, cleanup: Cleanup) -> Victim:
    """Give a receiver whose sender is a liar."""
    return Victim(tmp_path, cleanup)


@asynccontextmanager
async def lying(victim: Victim, answer: Callable[[str], Answers]) -> AsyncIterator[Liar]:
    """Answer every fetch with the same lie."""
    async with Liar(victim.plant) as liar:
        liar.answer = lambda request: answer(victim.log_id)
        yield liar


async def test_lies_hold_the_link(victim: Victim) -> None:
    """Each lie holds the link with its code and leaves nothing behind; an honest sender is believed afterwards."""
    for name, (lie, code) in LIES.items():
        async with lying(victim, lie) as liar:
            await victim.held(code)
            assert not liar.confirmed, name
        assert victim.enterprise.end(Buffer.FORWARD) == 0, name
        assert not victim.enterprise.gaps(Buffer.FORWARD), name
        assert rss_bytes(victim.enterprise.pid or 0) < 300 << 20, name
        await victim.release()
    await victim.goes_on()


async def test_an_answer_of_millions_of_fields(victim: Victim) -> None:
    """12 MiB in which every other byte is a field are given up before they become objects, and hold the link."""
    for bomb in (b"\x32\x00", b"\x08\x00", b"\x1a\x00"):
        async with lying(victim, lambda log_id, bomb=bomb: [bomb * (6 << 20)]):  # type: ignore[misc]
            await victim.held("frame_invalid")
        assert rss_bytes(victim.enterprise.pid or 0) < 300 << 20
        await victim.release()
    await victim.goes_on()


async def test_length_of_four_gigabytes(victim: Victim) -> None:
    """A message that claims 4 GiB is refused before anything is allocated for it, and holds the link."""
    async with RawServer(victim.plant, b"\x00\xff\xff\xff\xff" + b"\x00" * 1000) as raw:
        await victim.held("message_too_large")
        assert raw.calls == 1
    assert rss_bytes(victim.enterprise.pid or 0) < 300 << 20
    assert victim.enterprise.end(Buffer.FORWARD) == 0
    await victim.release()
    await victim.goes_on()


@pytest.mark.parametrize("lie", ["another log", "an older copy", "a cursor that went back", "a confirm refused"])
async def test_another_history(victim: Victim, lie: str) -> None:
    """A sender whose history is another one is held; after the release its new history is learned from the start."""
    one_more = message("x", from_zone="plant-a")
    later = {
        "another log": [head("ab" * 16, start=10)],
        "an older copy": [head(LOG_ID, start=5, end=5)],
        "a cursor that went back": [head(LOG_ID, start=5), frame(entries_of(GOOD[5:], 5))],
        "a confirm refused": [
            head(LOG_ID, start=10, end=11),
            frame(entries_of([message("x", from_zone="plant-a")], 10)),
        ],
    }[lie]
    async with Liar(victim.plant) as liar:

        def answer(request: pb.FetchFramesRequest) -> Answers:
            if not liar.confirmed:
                # Who asks ahead of his confirmation is told that there is nothing more yet.
                ahead = request.consumer.after == 9
                return [head(LOG_ID, start=10)] if ahead else [head(LOG_ID), frame(entries_of(GOOD))]
            liar.refuse_confirm = encoded(ForeignLog("this is another log"))
            return later

        liar.answer = answer
        await victim.held("foreign_log")
        assert liar.confirmed == [9]
    known = GOOD if lie != "a confirm refused" else [*GOOD, one_more]
    assert victim.enterprise.messages(Buffer.FORWARD) == known
    victim.enterprise.kill()
    victim.enterprise.start()
    assert victim.enterprise.modes(LINK)[-1] == "held"
    await victim.release()
    if lie != "a confirm refused":
        # The log of the true plant is yet another one, and the operator has accepted the one that was shown.
        victim.plant.start()
        await victim.held("foreign_log")
        victim.plant.stop()
        await victim.release()
    await victim.goes_on(known)
