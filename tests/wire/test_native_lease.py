"""The native engine's hold on its link: a bad moment of the board or of a call does not end it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from tests.wire.conftest import Sites
from tests.wire.site import CONFIG, STREAM, until

from bsfg.batch import EntryBatch
from bsfg.config import parse
from bsfg.errors import DiskFull, GateHeld, IdentityRevoked, LeaseHeld
from bsfg.gate import RECEIVER, Gate, Mode
from bsfg.journey import handoff
from bsfg.journey.link import Fetched, FetchRequest, Refusal, SessionMemory
from bsfg.journey.receive import LinkRules, PullProgress
from bsfg.node import links, native
from bsfg.node.links import Leases
from bsfg.node.native import NativeHandoff, StreamPull
from bsfg.node.objects import ArtifactFetcher
from bsfg.ports import Confirmation, Frame, GapRecord, GapSet
from bsfg.retention import GapReason
from bsfg.testing.facts import messages, sealed
from bsfg.wire.service import GateView


async def test_a_lease_that_could_not_be_kept_is_kept_again(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw is told, and the lease is renewed the next time; else the link would stand still."""
    monkeypatch.setattr(native, "LEASE_RENEW_SECONDS", 0.001)
    site = await sites()
    board, renewed, noted = site.parts.links, [], list[str]()
    renew = Leases.renew

    def unlucky(*given: object) -> object:
        renewed.append(given)
        if len(renewed) == 2:
            raise OSError(28, "no space left on device")
        return renew(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Leases, "renew", unlucky)
    [link] = parse(CONFIG.format(stream=""), site.folder / "zone.toml").links.values()
    engine = NativeHandoff(link, site.parts, [], note=lambda event, **fields: noted.append(event))
    await engine.start()
    try:
        await until(lambda: len(renewed) >= 4)
        assert board.leases.holder(link.name) == "native"
        assert noted == ["lease_taken", "link_failed"]
    finally:
        await engine.stop()
    assert board.leases.holder(link.name) is None


class Interrupted:
    """Turns of which the first is cancelled by somebody else than whoever stops the link."""

    stream, capacity_bytes = "operational", 1 << 20

    def __init__(self) -> None:
        self.turns = 0

    async def turn(self, request: FetchRequest) -> PullProgress:
        """Fail once, then bring nothing."""
        self.turns += 1
        if self.turns == 1:
            raise asyncio.CancelledError
        await asyncio.sleep(0)
        return PullProgress()

    async def make_good(self) -> PullProgress | None:
        """Nothing was released."""
        return None

    def reset(self) -> None:
        """Nothing is under way."""


async def test_a_call_that_was_cancelled_does_not_end_the_loop(sites: Sites) -> None:
    """A loop that took it for its own end would leave a link that stands still and says nothing."""
    site, noted = await sites(), list[str]()
    [link] = parse(CONFIG.format(stream=""), site.folder / "zone.toml").links.values()
    pull = Interrupted()
    engine = NativeHandoff(link, site.parts, [pull], note=lambda event, **fields: noted.append(event))  # type: ignore[list-item]
    await engine.start()
    try:
        await until(lambda: pull.turns >= 3)
        assert "fetch_failed" in noted
    finally:
        await asyncio.wait_for(engine.stop(), 60)


class Revoked(Interrupted):
    """Turns of which the first is refused for good."""

    async def turn(self, request: FetchRequest) -> PullProgress:
        """Be refused once, then bring nothing."""
        self.turns += 1
        if self.turns == 1:
            raise IdentityRevoked("this identity is revoked")
        await asyncio.sleep(0)
        return PullProgress()


async def test_a_finding_that_cannot_be_written_down_does_not_end_the_loop(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when a link is to be held, and when an operator's hold ends by itself: then the link moves."""
    monkeypatch.setattr(handoff, "HELD_LOOK_SECONDS", 0.001)
    site, noted, failed = await sites(), list[str](), list[str]()

    def on_move(view: GateView, before: Gate) -> None:
        if (view.gate.mode == Mode.HELD) != (before.mode == Mode.HELD):
            failed.append(view.gate.mode)
            raise DiskFull(f"cannot write down that the gate is {view.gate.mode}")

    board = site.parts.links
    board.on_move = on_move
    [link] = parse(CONFIG.format(stream=""), site.folder / "zone.toml").links.values()
    pull = Revoked()
    engine = NativeHandoff(link, site.parts, [pull], note=lambda event, **fields: noted.append(event))  # type: ignore[list-item]
    await engine.start()
    try:
        await until(lambda: bool(failed))
        until_unix_ms = board.clock.now_unix_ms() + 100
        board.hold(link.name, RECEIVER, by="operator", reason="work", until_unix_ms=until_unix_ms)
        await until(lambda: pull.turns >= 3)
        assert (failed[0], len(failed), noted.count("link_failed")) == (Mode.HELD, 2, 2)
    finally:
        await asyncio.wait_for(engine.stop(), 60)


class Quiet(Interrupted):
    """Turns that bring nothing, and the first of which waits until it may."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream, self.may_turn = stream, asyncio.Event()

    async def turn(self, request: FetchRequest) -> PullProgress:
        """Bring nothing, with nothing left to bring."""
        await self.may_turn.wait()
        await asyncio.sleep(0)
        self.turns += 1
        return PullProgress()


async def test_a_link_is_normal_when_all_its_streams_are(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that has not told its backlog may have the largest: until it has, the link is catching up."""
    monkeypatch.setattr(handoff, "HELD_LOOK_SECONDS", 0.001)
    site = await sites()
    [link] = parse(CONFIG.format(stream=""), site.folder / "zone.toml").links.values()
    first, second = Quiet("operational"), Quiet("audit")
    engine = NativeHandoff(link, site.parts, [first, second], note=lambda event, **fields: None)  # type: ignore[list-item]
    await engine.start()
    try:
        first.may_turn.set()
        await until(lambda: first.turns >= 3)
        assert site.parts.links.gate(link.name).gate.mode == Mode.RECONCILIATION
        second.may_turn.set()
        await until(lambda: site.parts.links.gate(link.name).gate.mode == Mode.NORMAL)
    finally:
        await asyncio.wait_for(engine.stop(), 60)


async def test_a_pipeline_that_asks_gets_the_link(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's own engine stands back for a pipeline, and goes on when the pipeline is gone."""
    monkeypatch.setattr(native, "LEASE_RENEW_SECONDS", 0.001)
    monkeypatch.setattr(links, "ABOUT_MS", 500)
    site, noted = await sites(), list[str]()
    board = site.parts.links
    [link] = parse(CONFIG.format(stream=""), site.folder / "zone.toml").links.values()
    engine = NativeHandoff(link, site.parts, [], note=lambda event, **fields: noted.append(event))
    await engine.start()
    try:
        await until(lambda: board.leases.holder(link.name) == "native")
        with pytest.raises(LeaseHeld):
            board.leases.acquire(link.name, "pipeline", 60_000)
        await until(lambda: board.leases.holder(link.name) is None)
        taken = board.leases.acquire(link.name, "pipeline", 60_000)
        await until(lambda: "lease_waited_for" in noted)
        board.leases.check(link.name, taken.token)
        board.leases.give_back(link.name, taken.token)
        await until(lambda: board.leases.holder(link.name) == "native")
    finally:
        await engine.stop()
    assert noted == ["lease_taken", "lease_waited_for", "lease_taken"]


LOST = GapRecord(0, 2, GapReason.EVICTED, 1)
RELAYED = GapRecord(5, 9, GapReason.EVICTED, 1, "", "idmz")


def too_old() -> Frame:
    """Give facts that were appended long ago."""
    facts = sealed(messages(3, from_zone="enterprise"))
    return Frame(0, 2, EntryBatch.of(facts.record_batch, np.arange(3), 1))


@dataclass
class Late:
    """A sender whose answer comes when the gate was held meanwhile."""

    answer: Fetched
    hold: Callable[[], object]
    zone: str = "enterprise"
    confirmed: list[Confirmation] = field(default_factory=list)

    async def fetch(self, request: FetchRequest) -> Fetched:
        """Let an operator hold the gate, then answer."""
        self.hold()
        return self.answer

    async def confirm(self, confirmation: Confirmation, refusals: Sequence[Refusal] = ()) -> int:
        """Take note of it."""
        self.confirmed.append(confirmation)
        return confirmation.through or 0


@pytest.mark.parametrize("what", ["a gap", "a skipped range", "gaps of others", "facts that expired"])
async def test_nothing_that_was_asked_for_before_passes_a_held_gate(sites: Sites, what: str) -> None:
    """A fetch may wait for long. What it brings is neither stored nor confirmed once the gate is held, facts or not."""
    site = await sites(storage="log")
    link, board = "from-enterprise", site.parts.links
    skipped = GapSet.of(GapRecord(0, 2, GapReason.SKIPPED, 1, "left out"))
    frames: dict[str, list[Frame]] = {
        "a gap": [Frame(0, 2, gap=LOST)],
        "a skipped range": [Frame(0, 2, skips=(skipped,))],
        "gaps of others": [],
        "facts that expired": [too_old()],
    }
    gaps = [RELAYED] if what == "gaps of others" else []
    answer = Fetched("log", 0, 3, b"", frames[what], gaps=gaps, served_at_unix_ms=site.parts.clock.now_unix_ms())
    peer = Late(answer, lambda: board.hold(link, RECEIVER, by="operator", reason="drill"))
    fetcher = ArtifactFetcher(site.parts, link, STREAM, site.client())
    rules = LinkRules("plant", frozenset({"enterprise", "idmz"}), max_age_seconds=60.0)
    pull = StreamPull(STREAM, peer, SessionMemory(), rules, fetcher, site.parts)
    with pytest.raises(GateHeld):
        await pull.turn(FetchRequest())
    pull.reset()
    forward = await site.parts.forward(STREAM)
    assert (await forward.gap_sets(), await forward.quarantine(), peer.confirmed) == ([], [], [])
