"""The node watches its own links: whatever an engine said last, that nobody moves a link is seen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bsfg.config import Alerts, Engine, Link, Serve
from bsfg.config.kinds import Address, Addresses, Start
from bsfg.gate import RECEIVER, SENDER, Event, Gate, Mode
from bsfg.node import node
from bsfg.node.alerts import AlertBoard
from bsfg.node.links import LinkRegistry
from bsfg.node.metrics import Metrics
from bsfg.node.watching import LinkWatch
from bsfg.ports import Buffer
from bsfg.testing.clock import FakeClock
from bsfg.wire.service import GateView, LinkReport

CONSUMERS = {"b.operational": "operational", "b.audit": "audit"}


def link(engine: Engine = Engine.SPARK) -> Link:
    """Make a link whose engine may be away for 30 seconds, and whose longest turn takes 50."""
    return Link(
        name="from-a",
        zone="a",
        address=Addresses((Address("127.0.0.1", 9),)),
        streams=("operational",),
        buffer=Buffer.STORE,
        carry_only=(),
        engine=engine,
        rate_limit=0,
        batch_facts=100,
        fetch_wait_seconds=10,
        request_timeout_seconds=30,
        backoff_first_seconds=1,
        backoff_max_seconds=10,
        lost_after_failures=3,
        lost_after_seconds=30,
        reconciliation_backlog=100,
        normal_backlog=10,
    )


class World:
    """A board with one link and one peer that is served, watched second by second."""

    def __init__(self, engine: Engine = Engine.SPARK, *, required: bool = True) -> None:
        self.clock, self.notes = FakeClock(), list[tuple[str, dict[str, Any]]]()
        self.board, self.metrics = LinkRegistry(self.clock), Metrics()
        self.board.add("from-a", RECEIVER)
        self.board.add("b", SENDER)
        settings = Alerts(timeout_seconds=1.0, repeat_every_seconds=3600.0)
        self.alerts = AlertBoard("here", settings, self.metrics, self.clock, self._note)
        self.watch, self.link = LinkWatch(self.board, self.alerts, self.metrics), link(engine)
        self.serve = Serve(
            zone="b",
            streams=(),
            buffers=(Buffer.STORE,),
            required=required,
            start=Start.EARLIEST,
            lost_after_seconds=30,
        )
        self.retired: set[str] = set()
        self.look()

    def _note(self, event: str, **fields: Any) -> None:
        self.notes.append((event, fields))

    def look(self) -> None:
        """Look once."""
        self.watch.look_at(self.link)
        self.watch.look_at_peer(self.serve, CONSUMERS, self.retired)

    def wait(self, seconds: int, *, engine: bool = False, says: bool = False, comes: tuple[str, ...] = ()) -> None:
        """Let time pass, with an engine that holds the lease and reports or not, and consumers that come or not."""
        for _ in range(seconds):
            self.clock.advance(1.0)
            if engine:
                self.lease = self.board.leases.renew("from-a", "token", 5_000)
            if says:
                self.board.report(LinkReport("from-a", "operational", event=Event.PEER_FOUND, lease="token"))
                self.board.report(LinkReport("from-a", "operational", event=Event.BACKLOG_CLEARED, lease="token"))
            for name in comes:
                self.board.fetched(name, 0)
            self.look()

    def mode(self, name: str = "from-a", side: str = RECEIVER) -> Mode:
        """Give the mode of a gate."""
        return self.board.gate(name, side).gate.mode

    def alert(self, name: str) -> str | None:
        """Give the text of an alert that lasts."""
        return next((each["text"] for each in self.alerts.active() if each["alert"] == name), None)

    @property
    def is_dead(self) -> bool:
        """Whether the metric says so."""
        return self.metrics.registry.get_sample_value("bsfg_link_dead", {"link": "from-a"}) == 1.0


def test_a_link_that_never_had_an_engine_is_told_so_after_the_threshold() -> None:
    """Nobody took the lease since the start: an alert that says how to change it, and not before the patience ends."""
    world = World()
    world.wait(30)
    assert (world.alert("link_dead"), world.is_dead) == (None, False)
    world.wait(2)
    text = world.alert("link_dead")
    assert text is not None
    assert "nobody has since the node started" in text
    assert 'start `bsfg pipeline replicate`, or set engine = "native"' in text
    assert world.board.trouble("from-a", RECEIVER) == text
    assert world.is_dead
    assert (world.mode(), len([event for event, _ in world.notes if event == "alert_raised"])) == (Mode.AUTONOMOUS, 2)


def test_an_engine_that_dies_turns_the_gate_and_one_that_returns_turns_it_back() -> None:
    """A vacant lease is seen although the last word was good; the gate recovers through reconciliation."""
    world = World()
    world.wait(100, engine=True, says=True)
    assert (world.mode(), world.alert("link_dead")) == (Mode.NORMAL, None)
    world.wait(29)
    assert world.mode() == Mode.NORMAL
    world.wait(10)
    assert world.mode() == Mode.AUTONOMOUS
    assert "unknown let go of it" in (world.alert("link_dead") or "")
    world.wait(1, engine=True, says=True)
    assert (world.mode(), world.alert("link_dead"), world.is_dead) == (Mode.NORMAL, None, False)
    assert world.board.trouble("from-a", RECEIVER) is None


def test_an_engine_that_keeps_the_lease_and_does_nothing_is_seen() -> None:
    """Whoever only renews and asks after the gate does not move the link; the patience covers its longest turn."""
    world = World()
    world.wait(10, engine=True, says=True)
    for _ in range(80):
        world.wait(1, engine=True)
        world.board.report(LinkReport("from-a", "", lease="token"))
    assert world.mode() == Mode.NORMAL
    world.wait(2, engine=True)
    assert world.mode() == Mode.AUTONOMOUS
    assert "holds from-a and does not move it" in (world.alert("link_dead") or "")
    world.board.spoke("from-a")
    world.look()
    assert world.alert("link_dead") is None


def test_an_engine_that_fails_is_not_a_dead_one() -> None:
    """Whoever tries and fails says so: the peer is away, but somebody looks after the link."""
    world = World()
    for _ in range(300):
        world.wait(1, engine=True)
        world.board.report(LinkReport("from-a", "", failure_code="peer_unreachable", lease="token"))
    assert world.alert("link_dead") is None


def test_a_held_gate_stays_held_and_is_not_dead() -> None:
    """What an operator holds nobody is to move; after the release an engine has its whole patience again."""
    world = World()
    world.board.hold("from-a", RECEIVER, by="operator", reason="drill")
    world.board.hold("b", SENDER, by="operator", reason="drill")
    world.wait(300)
    assert (world.mode(), world.mode("b", SENDER)) == (Mode.HELD, Mode.HELD)
    assert (world.alert("link_dead"), world.alert("peer_absent")) == (None, None)
    world.board.release("from-a", RECEIVER, by="operator", reason="done")
    world.board.release("b", SENDER, by="operator", reason="done")
    world.wait(29)
    assert (world.alert("link_dead"), world.alert("peer_absent")) == (None, None)
    world.wait(3)
    assert world.alert("link_dead") is not None
    assert world.alert("peer_absent") is not None


def test_whoever_takes_a_large_artifact_is_not_absent() -> None:
    """A peer fetches no facts before it has the artifact of the last ones; when it stops taking it, it is missed."""
    world = World()
    world.wait(5, comes=tuple(CONSUMERS))
    for _ in range(300):
        world.board.downloads("b")
        world.wait(1)
    assert (world.mode("b", SENDER), world.alert("peer_absent")) == (Mode.NORMAL, None)
    world.wait(32)
    assert world.mode("b", SENDER) == Mode.AUTONOMOUS
    assert "b has not come for operational, audit" in (world.alert("peer_absent") or "")


def test_the_nodes_own_engine_is_watched_too() -> None:
    """A link that the node itself is to move is no better off than one of a pipeline."""
    world = World(Engine.NATIVE)
    world.wait(40)
    assert "restart the node" in (world.alert("link_dead") or "")


def test_a_required_consumer_that_does_not_come_is_missed() -> None:
    """A peer that pulls one stream and leaves the other is told; its gate stays open for what it does pull."""
    world = World()
    world.wait(5, comes=tuple(CONSUMERS))
    world.wait(40, comes=("b.operational",))
    text = world.alert("peer_absent")
    assert text is not None
    assert text.startswith("b has not come for audit for 30 s")
    assert world.mode("b", SENDER) == Mode.NORMAL
    world.wait(40)
    assert (world.alert("peer_absent") or "").startswith("b has not come for operational, audit")
    assert world.mode("b", SENDER) == Mode.AUTONOMOUS
    world.wait(1, comes=tuple(CONSUMERS))
    assert (world.alert("peer_absent"), world.mode("b", SENDER)) == (None, Mode.NORMAL)


def test_two_nodes_with_one_certificate_are_noticed() -> None:
    """A process that comes back after another has come is a second one; a restart, however often, is not."""
    world = World()

    def came(instance: str, address: str = "ipv4:10.0.0.1:4711") -> str | None:
        world.board.instances.came("b.operational", instance, address, world.board.clock.monotonic_ms())
        world.wait(1, comes=tuple(CONSUMERS))
        return world.alert("certificate_shared")

    for number in range(40):
        assert came(f"start-{number}") is None
        assert came(f"start-{number}") is None
        assert came("") is None
    assert came("copy", "ipv4:10.0.0.2:4711") is None
    text = came("start-39")
    assert text is not None
    assert "from ipv4:10.0.0.2 and from ipv4:10.0.0.1" in text
    for _ in range(130):
        came("start-39")
    assert world.alert("certificate_shared") is None
    for number in range(100):
        came("x" * 1000 + str(number))
    assert len(world.board.instances._seen["b.operational"]) <= 8


def test_a_retired_consumer_is_missed_by_nobody() -> None:
    """What an operator has given up need not come; neither need a peer that is not required."""
    world = World()
    world.retired = set(CONSUMERS)
    world.wait(100)
    assert world.alert("peer_absent") is None
    optional = World(required=False)
    optional.wait(100)
    assert optional.alert("peer_absent") is None
    assert optional.mode("b", SENDER) == Mode.AUTONOMOUS


@pytest.mark.parametrize("jump_seconds", [-86_400.0, 86_400.0])
def test_a_clock_that_is_set_neither_hides_nor_makes_an_absence(jump_seconds: float) -> None:
    """Silence is measured by the clock that nobody sets."""
    world = World()
    world.wait(5, comes=tuple(CONSUMERS))
    world.clock.jump(jump_seconds)
    world.wait(1)
    assert world.mode("b", SENDER) == Mode.NORMAL
    world.wait(40)
    assert world.mode("b", SENDER) == Mode.AUTONOMOUS


def test_a_buffer_that_takes_long_to_open_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a buffer is being opened the log says so again and again, and its outcome is given on."""
    monkeypatch.setattr(node, "OPENING_SECONDS", 0.0)
    said: list[dict[str, Any]] = []
    ready = asyncio.Event()

    async def opening(failure: Exception | None) -> str:
        await ready.wait()
        if failure is not None:
            raise failure
        return "opened"

    def told(event: str, **what: Any) -> None:
        said.append({"event": event, **what})
        if len(said) == 3:
            ready.set()

    async def run() -> None:
        assert await node.said_while(opening(None), stream="s", buffer="store") == "opened"
        with pytest.raises(ValueError, match="broken"):
            await node.said_while(opening(ValueError("broken")), stream="s", buffer="store")

    monkeypatch.setattr(node.log, "info", told, raising=False)
    asyncio.run(run())
    assert {(each["event"], each["stream"], each["buffer"]) for each in said} == {("buffer_opening", "s", "store")}


def test_a_link_that_comes_back_is_new() -> None:
    """It was taken out for hours: nobody missed it meanwhile, and nobody says so when it is there again."""
    world = World()
    world.wait(100)
    assert world.alert("link_dead") and world.alert("peer_absent")
    for name, side in (("from-a", RECEIVER), ("b", SENDER)):
        world.board.remove(name, side)
        world.alerts.forget(f"{name}/{side}")
    world.watch.keep((), ())
    world.clock.advance(10_000)
    for name, side in (("from-a", RECEIVER), ("b", SENDER)):
        world.board.add(name, side)
    world.look()
    world.wait(29)
    assert (world.alert("link_dead"), world.alert("peer_absent"), world.is_dead) == (None, None, False)
    world.wait(3)
    assert world.alert("link_dead") and world.alert("peer_absent")


def test_a_link_that_is_taken_out_is_shown_no_more() -> None:
    """What it was last would stand in the metrics for good, and whoever is alarmed by it could not mend it."""
    metrics, clock = Metrics(), FakeClock()
    names = ("bsfg_gate_state", "bsfg_link_dead", "bsfg_link_backlog", "bsfg_replication_lag_seconds")

    def on_add(view: GateView) -> None:
        metrics.gate_moved(view.link, view.side, view.gate.mode, moved=False)

    def shown() -> set[tuple[str, str]]:
        families = metrics.registry.collect()
        samples = [sample for family in families for sample in family.samples if sample.name in names]
        return {(sample.name, sample.labels["link"]) for sample in samples}

    def works(name: str) -> None:
        metrics.link_dead.labels(name).set(1)
        metrics.link_backlog.labels(name, "operational").set(7)
        metrics.lagged(name, "operational", 3.0)

    board = LinkRegistry(clock, on_add=on_add, on_remove=metrics.forget_link)
    held = Gate().hold(1, by="operator", reason="works")
    for name in ("from-a", "from-b"):
        board.add(name, RECEIVER, held)
        works(name)
    board.add("from-a", SENDER)
    board.remove("from-a", RECEIVER)
    sample = metrics.registry.get_sample_value
    assert shown() == {(name, "from-b") for name in names} | {("bsfg_gate_state", "from-a")}
    assert sample("bsfg_gate_state", {"link": "from-a", "side": RECEIVER, "mode": "held"}) is None
    board.add("from-a", RECEIVER, held)
    works("from-a")
    assert shown() == {(name, link) for name in names for link in ("from-a", "from-b")}
    assert sample("bsfg_gate_state", {"link": "from-a", "side": RECEIVER, "mode": "held"}) == 1.0
