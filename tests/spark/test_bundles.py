"""How links are spread over bundles, how many bundles and replays fit the slots, and when a query starts again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.errors import InvalidArgument
from bsfg.gate import Mode
from bsfg.journey.link import Fetched
from bsfg.spark.calls import NodeAccess
from bsfg.spark.replicate import driver, replay
from bsfg.spark.replicate.driver import (
    MEND_SECONDS,
    MEND_SECONDS_MOST,
    Layout,
    LinkState,
    LiveQuery,
    MovingEngine,
    Replication,
    default_bundles,
    local_master,
    slots_for,
    slots_of,
)
from bsfg.spark.replicate.plan import LinkTaskPlan, RunPlan, spread

OWN = NodeAccess("127.0.0.1:1")
NAMES = st.lists(st.integers(0, 60).map(lambda number: f"from-plant-{number}"), unique=True, max_size=40)


def link(name: str) -> LinkTaskPlan:
    """Give as much of a link's plan as its place in a bundle depends on."""
    plan: Any = SimpleNamespace(name=name)
    found: LinkTaskPlan = plan
    return found


def names(plan: RunPlan) -> list[list[str]]:
    """Give the links of each bundle."""
    return [[each.name for each in bundle.links] for bundle in plan.bundles]


@given(NAMES, st.integers(1, 8))
def test_every_link_is_in_one_bundle_and_bundles_are_even(wanted: list[str], most: int) -> None:
    """No task has more than one link more than another, and there is always one, be it for nothing."""
    plan = spread([link(name) for name in wanted], most, OWN, "us")
    sizes = [len(bundle) for bundle in names(plan)]
    assert sorted(name for bundle in names(plan) for name in bundle) == sorted(wanted)
    assert len(sizes) == max(1, min(most, len(wanted)))
    assert max(sizes) - min(sizes) <= 1


@given(NAMES, NAMES, st.integers(1, 8))
def test_a_changed_plan_leaves_links_where_they_are(before: list[str], after: list[str], most: int) -> None:
    """What is added or removed moves no other link from task to task, as far as bundles stay even."""
    old = spread([link(name) for name in before], most, OWN, "us")
    new = spread([link(name) for name in after], most, OWN, "us", old.number + 1, old.places)
    assert sorted(name for bundle in names(new) for name in bundle) == sorted(after)
    assert new.number == old.number + 1
    same = spread([link(name) for name in after], most, OWN, "us", new.number + 1, new.places)
    assert same.places == new.places
    grown = spread([link(name) for name in [*after, "one-more"]], most, OWN, "us", 9, new.places)
    if len(grown.bundles) == len(new.bundles):
        assert {name: at for name, at in grown.places.items() if name != "one-more"} == new.places


def test_slots_decide_on_bundles_and_replays() -> None:
    """Each bundle takes two slots and each replay one; what does not fit is said with the number that would."""
    assert local_master(3, 2) == "local[8,50]"
    assert default_bundles(1) == 1
    assert default_bundles(8) == 4
    assert Layout.fitting(slots_for(3, 2), 100, 3) == Layout(3, 2)
    assert Layout.fitting(7, 100) == Layout(3, 1)
    assert Layout.fitting(64, 2) == Layout(2, 2), "more bundles than links are of no use"
    assert Layout.fitting(2, 100) == Layout(1, 0), "without a slot for replays everything is moved live"
    with pytest.raises(InvalidArgument, match="2 bundles of links need 5") as refused:
        Layout.fitting(3, 100, 2)
    assert refused.value.details["needed"] == 5


@pytest.mark.parametrize(("master", "slots"), [("local", 1), ("local[3]", 3), ("local[ 4 , 9 ]", 4)])
def test_local_masters_say_how_many_tasks_they_run(master: str, slots: int) -> None:
    """Nobody needs to be asked."""
    spark: Any = None
    assert slots_of(spark, master, 1) == slots


def replication(folder: Path, links: list[str], layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Replication:
    """Give a run without Spark and without a node."""
    spark: Any = None
    plans: Any = [task_plan(name) for name in links]
    monkeypatch.setattr(Replication, "_tell_tasks", lambda self, plan: None)
    return Replication(spark, OWN, plans, folder, 100, layout)


def task_plan(name: str, setting: int = 0) -> Any:
    """Give as much of a link's plan as a run looks at."""
    link = SimpleNamespace(rate_limit=0, bandwidth=None)
    return SimpleNamespace(name=name, holder="us", own=OWN, setting=setting, streams=(), link=link)


def test_a_run_goes_on_with_other_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added, changed and removed is said; what stays keeps its state, and tasks find the plan by its number."""
    run = replication(tmp_path, ["one", "two", "three"], Layout(2), monkeypatch)
    before = {link.plan.name: link for link in run.links}
    before["one"].replays = 7
    plans = [task_plan("one"), task_plan("two", 1), task_plan("four")]
    assert run.replan(plans) == ["three: no longer moved", "two: changed", "four: new"]
    assert [link.plan.name for link in run.links] == ["one", "two", "four"]
    assert run.links[0].replays == 7
    assert before["three"].is_removed
    assert run.links[1].plan is plans[1]
    plan = RunPlan.read(tmp_path / "plan")
    assert (plan.number, set(plan.places)) == (2, {"one", "two", "four"})
    assert run.replan(plans) == []
    assert RunPlan.read(tmp_path / "plan").number == 2
    assert (tmp_path / "plan").stat().st_mode & 0o077 == 0, "it may hold keys"


def test_backlogs_take_turns_at_the_places_for_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more are replayed than there are places, those first that were replayed the longest ago."""
    run = replication(tmp_path, ["a", "b", "c", "d"], Layout(1, 2), monkeypatch)
    begun: list[str] = []

    class Begun:
        """A thread that is never there."""

        def __init__(self, *, target: object, args: tuple[LinkState], daemon: bool) -> None:
            begun.append(args[0].plan.name)

        def start(self) -> None:
            """Do nothing."""

    monkeypatch.setattr("bsfg.spark.replicate.driver.threading.Thread", Begun)
    reports = [{"stream": "s", "holder": "us", "backlog": 500}]
    for number, link in enumerate(run.links):
        link.look({"mode": str(Mode.RECONCILIATION), "reason": "", "lease": "us", "reports": reports}, 0.0)
        link.replayed_at = float(-number)
    run._replay_some()
    assert begun == ["d", "c"]
    assert run._replays_wait, "others wait for a place"
    run._replay_some()
    assert begun == ["d", "c"], "there are two places"
    run.links[3].engine, run.links[3].replayed_at = MovingEngine.LIVE, 1.0
    run._replay_some()
    assert begun == ["d", "c", "b"]
    run.links[2].engine, run.links[2].replayed_at = MovingEngine.LIVE, 2.0
    run._replay_some()
    run._replay_some()
    assert begun == ["d", "c", "b", "a"]


class Streams:
    """As much of Spark as starts a stream: notes which sources were registered, and which of them each side uses."""

    def __init__(self) -> None:
        self.dataSource = self.readStream = self.writeStream = self
        self.registered: list[str] = []
        self.used: list[tuple[str, int]] = []

    def register(self, source: Any) -> None:
        """Take note of a source."""
        self.registered.append(source.name())

    def format(self, name: str) -> Any:
        """Take note of what a side uses, and how many sources there were by then."""
        if name != "noop":
            self.used.append((name, len(self.registered)))
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self


def test_streams_that_start_together_share_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark writes into a registered source without a lock when a stream of it starts; a broken one stays broken.

    So each half of the pair has its own, and a new one when it is started again; and so has each replay.
    """
    run, spark = replication(tmp_path, ["one"], Layout(), monkeypatch), Streams()
    run._spark = spark  # type: ignore[assignment]
    run.start()
    run._complete()
    assert spark.used == [("bsfg-live-a", 1)], "the second waits until the first one moves links"
    run.links[0].ours_at = 0.0
    for _ in range(2):
        run._complete()
    run._start_live("a")
    assert spark.used == [("bsfg-live-a", 1), ("bsfg-live-b", 2), ("bsfg-live-a", 3)]
    assert spark.registered == [name for name, _ in spark.used]

    spark, head = Streams(), Fetched("log", 0, 10, b"")
    monkeypatch.setattr(replay, "calls", lambda: SimpleNamespace(run=lambda work: work.close() or head))
    to: Any = SimpleNamespace(options=lambda prefix="": {})
    carried = SimpleNamespace(carry_only=(), subjects=(), predicates=())
    plan: Any = SimpleNamespace(name="one", peer=to, own=to, buffer="store", link=carried)
    for stream in ("s", "t"):
        of: Any = SimpleNamespace(stream=stream, consumer="c")
        assert replay.start_replay(spark, plan, of, "lease", tmp_path / "r") is not None  # type: ignore[arg-type]
    assert spark.registered == ["bsfg-replay-one-s", "bsfg-replay-one-t"]
    assert spark.used == [("bsfg-replay-one-s", 1)] * 2 + [("bsfg-replay-one-t", 2)] * 2


@pytest.mark.parametrize("change", ["removed", "changed", "stopped"])
def test_a_replay_ends_with_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """A link that is removed, changed or stopped while it is replayed begins no further stream by the old plan.

    Until its replay has ended it keeps its place: no other one begins without a slot.
    """
    run = replication(tmp_path, ["one", "two"], Layout(1, 1), monkeypatch)
    link, other = run.links
    plan: Any = link.plan
    plan.streams = (SimpleNamespace(stream="s"), SimpleNamespace(stream="t"))
    reports = [{"stream": "s", "holder": "us", "backlog": 500}]
    other.look({"mode": str(Mode.RECONCILIATION), "reason": "", "lease": "us", "reports": reports}, 0.0)
    begun: list[str] = []
    given_back: list[str] = []

    def start_replay(spark: Any, plan: Any, of: Any, lease: str, folder: Path) -> Any:
        begun.append(of.stream)
        return SimpleNamespace(query=SimpleNamespace(stop=lambda: begun.append("end")), batches=1)

    def ended(query: Any, seconds: float) -> bool:
        assert len(begun) == 1, "the replay goes on"
        if change == "removed":
            run.replan([task_plan("two")])
        elif change == "changed":
            run.replan([task_plan("one", 1), task_plan("two")])
        else:
            run._stopping.set()
        run._replay_some()
        assert other.thread is None, "its place is not free yet"
        return False

    monkeypatch.setattr(driver, "start_replay", start_replay)
    monkeypatch.setattr(driver, "ended", ended)
    monkeypatch.setattr(driver, "activate", lambda spark: None)
    monkeypatch.setattr(run, "_take", lambda link, seconds: SimpleNamespace(token="token"))
    monkeypatch.setattr(run, "_renew", lambda link, token: None)
    monkeypatch.setattr(run, "_report_backlog", lambda plan, of, token: None)
    monkeypatch.setattr(run, "_give_back", lambda link, token: given_back.append(token))
    run.replay(link)
    assert begun == ["s", "end"]
    assert given_back == ["token"]
    assert link.problem == ""


def test_a_live_query_that_keeps_failing_is_tried_less_and_less_often() -> None:
    """The pause doubles up to a limit, failures are counted, and a query that had worked starts again soon."""
    live = LiveQuery(None, began=0.0)  # type: ignore[arg-type]
    pauses = []
    for _ in range(8):
        live.fail(0.1, worked=False)
        pauses.append(live.pause)
        live = live.restarted(None, 0.1)  # type: ignore[arg-type]
    assert pauses[:3] == [MEND_SECONDS, 2 * MEND_SECONDS, 4 * MEND_SECONDS]
    assert pauses[-1] == MEND_SECONDS_MOST
    assert live.failures == 8
    live.fail(100.0, worked=True)
    assert (live.pause, live.again, live.failures) == (MEND_SECONDS, 100.0 + MEND_SECONDS, 1)
