"""How pipelines are kept alive: pauses after failures, schedules, ends, and tables that change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bsfg.cli.pipeline import kept
from bsfg.cli.pipeline.run import ZonePipelines
from bsfg.cli.pipeline.running import FollowedFiles
from bsfg.errors import BsfgError, DiskFull, InvalidArgument, LandingDamaged, SinkAway, SinkRefused
from bsfg.sinks.flow import SinkDone
from bsfg.spark import supervise
from bsfg.spark.calls import NodeAccess
from bsfg.spark.land import lander
from bsfg.spark.land.state import Landed
from bsfg.spark.replicate.driver import Layout
from bsfg.spark.supervise import Diary, KeptTerms, PipelineKeeper, Schedule, Supervisor
from bsfg.wire.service import PipelineState

WAIT_SECONDS = 30.0
SPARK: Any = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=None)))
"""No Spark at all: whatever is asked of it fails, as of one that has ended."""


class Scripted:
    """A pipeline that does what a test says."""

    title = "a test"

    def __init__(self, *script: Callable[[Diary, threading.Event], None]) -> None:
        self.script, self.runs, self.ended = list(script), 0, 0

    def run(self, spark: Any, diary: Diary, ending: threading.Event) -> None:
        """Do the next thing, the last one again and again."""
        step = self.script[min(self.runs, len(self.script) - 1)]
        self.runs += 1
        step(diary, ending)

    def look(self, diary: Diary) -> None:
        """Nothing to add."""

    def end(self) -> None:
        """Count it."""
        self.ended += 1


def fails(diary: Diary, ending: threading.Event) -> None:
    """Fail."""
    raise InvalidArgument("this goes wrong")


def works(diary: Diary, ending: threading.Event) -> None:
    """Be done at once."""
    diary.facts += 1


def goes_on(diary: Diary, ending: threading.Event) -> None:
    """Work until it is to end."""
    diary.good()
    ending.wait(WAIT_SECONDS)


def works_then_fails(diary: Diary, ending: threading.Event) -> None:
    """Do something good before it goes wrong."""
    time.sleep(0.002)
    diary.good()
    raise InvalidArgument("this goes wrong later")


def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.002)


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Callable[..., PipelineKeeper]]:
    """Give what keeps a pipeline until the test ends."""
    kept: list[PipelineKeeper] = []

    def keep(pipeline: Scripted, **terms: Any) -> PipelineKeeper:
        quick = {"restart_after_seconds": 0.001, "restart_max_seconds": 0.004, **terms}
        keeper = PipelineKeeper("p", pipeline, KeptTerms(**quick), SPARK, Schedule(tmp_path / "schedule.json"))
        keeper.thread.start()
        kept.append(keeper)
        return keeper

    yield keep
    for keeper in kept:
        keeper.end()
        keeper.thread.join(WAIT_SECONDS)
        assert keeper.state == PipelineState.ENDED


def test_what_fails_is_begun_again(keeping: Callable[..., PipelineKeeper]) -> None:
    """The failures are counted and told, and forgotten in a row when it works; the last error stays to be read."""
    keeper = keeping(Scripted(fails, fails, goes_on))
    until(lambda: keeper.runs == 3)
    report = keeper.report()
    assert (report.state, report.runs, report.failures, report.failures_in_a_row) == (PipelineState.RUNNING, 3, 2, 2)
    assert report.last_error == "invalid_argument: this goes wrong"
    assert report.last_error_unix_ms > 0


def test_the_pause_grows_unless_it_had_worked(keeping: Callable[..., PipelineKeeper]) -> None:
    """A pipeline that worked between two failures has failed once, not twice in a row."""
    keeper = keeping(Scripted(works_then_fails))
    until(lambda: keeper.failures >= 4)
    assert keeper.failures_in_a_row <= 1
    waiting = keeping(Scripted(fails), restart_after_seconds=60.0, restart_max_seconds=600.0)
    until(lambda: waiting.state == PipelineState.FAILED)
    pause_seconds = waiting.next_unix_ms / 1000 - time.time()
    assert 25 <= pause_seconds <= 60


def test_what_ends_by_itself_though_it_should_not_has_failed(keeping: Callable[..., PipelineKeeper]) -> None:
    """Whatever is to go on for ever."""
    keeper = keeping(Scripted(works))
    until(lambda: keeper.failures >= 1)
    assert "ended by itself" in keeper.last_error


def test_a_program_that_exits_has_failed(keeping: Callable[..., PipelineKeeper]) -> None:
    """It ends no more than its run: a thread that is gone would be told of as running for ever."""

    def exits(diary: Diary, ending: threading.Event) -> None:
        raise SystemExit(3)

    keeper = keeping(Scripted(exits))
    until(lambda: keeper.failures >= 2)
    assert keeper.thread.is_alive()


def test_a_schedule_outlives_the_process(keeping: Callable[..., PipelineKeeper], tmp_path: Path) -> None:
    """The next run is due so long after the last, whoever did that, and what it found counts until then."""

    def finds(diary: Diary, ending: threading.Event) -> None:
        diary.finding = "missing ×1"

    keeper = keeping(Scripted(finds), every_seconds=3600.0, fingerprint="a")
    until(lambda: keeper.state == PipelineState.WAITING)
    assert keeper.next_unix_ms / 1000 == pytest.approx(time.time() + 3600, abs=60)
    again = keeping(Scripted(works), every_seconds=3600.0, fingerprint="a")
    until(lambda: again.state == PipelineState.WAITING)
    assert (again.runs, again.report().finding) == (0, "missing ×1")
    other = keeping(Scripted(works), every_seconds=3600.0, fingerprint="b")
    until(lambda: other.runs == 1)
    assert other.report().finding == "", "another audit has found nothing yet"
    (tmp_path / "schedule.json").write_text("[1, 2")
    assert Schedule(tmp_path / "schedule.json").last("p", "a") == (0, "")


def test_what_waits_by_itself_is_shown_as_failing(keeping: Callable[..., PipelineKeeper]) -> None:
    """A landing on a full disk runs on; nobody is to take that for working."""

    def waits(diary: Diary, ending: threading.Event) -> None:
        diary.problem = DiskFull("the disk is full")
        ending.wait(WAIT_SECONDS)

    keeper = keeping(Scripted(waits))
    until(lambda: keeper.diary.problem is not None)
    report = keeper.report()
    assert (report.state, report.failures_in_a_row) == (PipelineState.FAILED, 1)
    assert "the disk is full" in report.last_error
    keeper.diary.good()
    assert keeper.report().state == PipelineState.RUNNING


def test_other_tables_end_begin_and_leave_alone(tmp_path: Path) -> None:
    """What is the same goes on, what is changed begins again, and a table with a mistake changes nothing at all."""
    supervisor = Supervisor(SPARK, NodeAccess("127.0.0.1:9"), "here", Schedule(tmp_path / "schedule.json"))
    made: list[str] = []

    def make(name: str) -> Scripted:
        made.append(name)
        if name == "wrong":
            raise InvalidArgument("there is no such thing")
        return Scripted(goes_on)

    plain, other = KeptTerms(fingerprint="1"), KeptTerms(fingerprint="2")
    assert supervisor.keep({"a": plain, "b": plain, "c": plain}, make) == ["a: new", "b: new", "c: new"]
    before = dict(supervisor.keepers)
    with pytest.raises(InvalidArgument):
        supervisor.keep({"a": other, "wrong": plain}, make)
    assert supervisor.keepers == before
    assert supervisor.keep({"a": plain, "b": other}, make) == ["c: ended", "b: changed"]
    assert supervisor.keepers["a"] is before["a"]
    assert not before["b"].thread.is_alive()
    assert not before["c"].thread.is_alive()
    assert cast(Scripted, before["c"].pipeline).ended
    assert [each.name for each in supervisor.look()] == ["a", "b"]
    assert "peer_unreachable" in supervisor.node_away
    supervisor.stop()
    assert {keeper.state for keeper in supervisor.keepers.values()} == {PipelineState.ENDED}


def test_slow_ends_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pipelines do not end in time, the others are told of again after the time of one."""
    monkeypatch.setattr(supervise, "END_SECONDS", 0.3)
    supervisor, going_on = Supervisor(SPARK, NodeAccess("127.0.0.1:9"), "here", Schedule(tmp_path / "s")), Event()

    def stubborn(diary: Diary, ending: Event) -> None:
        going_on.wait(WAIT_SECONDS)

    supervisor.keep({name: KeptTerms() for name in "abcdefgh"}, lambda name: Scripted(stubborn))
    began = time.monotonic()
    supervisor.keep({}, lambda name: Scripted(works))
    assert time.monotonic() - began < 4 * 0.3
    going_on.set()
    supervisor.stop()


def test_links_that_begin_again_have_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that was changed moves its links at once, beside what the run before it has left."""
    folders: list[Path] = []

    @contextmanager
    def replicating(spark: Any, links: Any, folder: Path, *rest: Any) -> Iterator[Any]:
        folders.append(folder)
        yield SimpleNamespace(run=lambda look: None)

    monkeypatch.setattr(kept, "replicating", replicating)
    monkeypatch.setattr(supervise, "listening", lambda spark, diary: nullcontext())
    links: Any = None
    place = kept.RunPlace(tmp_path / "zone.toml", None, None, "local[2]", tmp_path, Layout())
    for _ in range(2):
        kept.KeptLinks("links", links, place, 0).run(SPARK, Diary(), Event())
    assert len({folder for folder in folders if folder.is_dir()}) == 2


ZONE = """
[zone]
name = "hub"
[listen]
grpc = "127.0.0.1:9"
http = "127.0.0.1:10"
plaintext = true
plaintext_identity = "hub-pipeline"
[identities.hub-pipeline]
zone = "hub"
roles = ["pipeline"]
streams = ["*"]
[streams.operational]
"""


@pytest.mark.parametrize("only", [(), ("lake",)], ids=["all", "named"])
@pytest.mark.parametrize("left", ["", '[pipelines.lake]\nenabled = false\nland = { stream = "operational" }\n'])
def test_the_last_pipeline_ends_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: tuple[str, ...], left: str
) -> None:
    """The node shows one that is not to run as off; it must not go on because it is the only one there is."""
    monkeypatch.setattr(kept, "made", lambda zone, row, place: Scripted(goes_on))
    path, place = tmp_path / "zone.toml", cast(kept.RunPlace, None)
    path.write_text(ZONE + '[pipelines.lake]\nland = { stream = "operational" }\n')
    supervisor = Supervisor(SPARK, NodeAccess("127.0.0.1:9"), "here", Schedule(tmp_path / "schedule.json"))
    pipelines = ZonePipelines(path, only, FollowedFiles(path))
    assert pipelines.keep(supervisor, place) == ["lake: new"]
    keeper = supervisor.keepers["lake"]
    path.write_text(ZONE + left)
    assert pipelines.keep(supervisor, place) == ["lake: ended"]
    assert not supervisor.keepers and not keeper.thread.is_alive()
    path.write_text(ZONE + '[pipelines.lake]\nland = { stream = "operational" }\n')
    assert pipelines.keep(supervisor, place) == ["lake: new"]
    supervisor.stop()


class LanderOfATest:
    """A landing that makes turns when it is told to."""

    def __init__(self, follow: Callable[[LanderOfATest], None]) -> None:
        self.turns, self.problem, self.done, self.has_joined = 0, None, Landed(), False
        self.ending, self._follow = Event(), follow

    def join(self, *, for_ever: bool) -> None:
        """Find out where it stands."""
        self.has_joined = True

    def follow(self) -> None:
        """Do what the test says."""
        self._follow(self)

    def end(self) -> None:
        """Have it end."""
        self.ending.set()


@pytest.fixture
def landing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[LanderOfATest], None]], kept.KeptLanding]:
    """Give a landing whose turns are the test's."""

    def make(follow: Callable[[LanderOfATest], None]) -> kept.KeptLanding:
        monkeypatch.setattr(kept, "landing_settings", lambda **given: None)
        monkeypatch.setattr(lander, "landing", lambda *given: nullcontext(LanderOfATest(follow)))
        return kept.KeptLanding({"stream": "operational", "buffer": "store", "out": "lake"})

    return make


def test_a_landing_that_hangs_does_no_good(
    landing: Callable[..., kept.KeptLanding], keeping: Callable[..., PipelineKeeper]
) -> None:
    """It has no error to tell of, so that only what it has done says whether it works."""
    at_work = list[LanderOfATest]()

    def hangs(one: LanderOfATest) -> None:
        at_work.append(one)
        one.ending.wait(WAIT_SECONDS)

    pipeline = landing(hangs)
    keeper = keeping(pipeline)
    until(lambda: at_work)
    pipeline.look(keeper.diary)
    assert keeper.report().last_good_unix_ms == 0
    at_work[0].turns += 1
    pipeline.look(keeper.diary)
    good = keeper.report().last_good_unix_ms
    assert good > 0
    time.sleep(0.01)
    pipeline.look(keeper.diary)
    assert keeper.report().last_good_unix_ms == good


def test_a_landing_that_never_lands_fails_again_and_again(
    landing: Callable[..., kept.KeptLanding], keeping: Callable[..., PipelineKeeper]
) -> None:
    """That it finds its folder each time is nothing good: its failures are in a row, and become an alert."""

    def fails(one: LanderOfATest) -> None:
        raise LandingDamaged("a file is gone")

    keeper = keeping(landing(fails))
    until(lambda: keeper.failures >= 4)
    assert keeper.failures_in_a_row >= 3


class SinkOfATest:
    """A sink that does what a test says."""

    target = SimpleNamespace(noted=dict)

    def __init__(self, work: Callable[[SinkOfATest], None]) -> None:
        self.done, self.has_caught_up, self.ending, self._work = SinkDone(), False, Event(), work
        self.problem: BsfgError | None = None

    def run(self) -> None:
        """Do it."""
        self._work(self)

    def end(self) -> None:
        """Have it end."""
        self.ending.set()


def test_a_sink_that_is_refused_each_time_fails_again_and_again(keeping: Callable[..., PipelineKeeper]) -> None:
    """That it begins is nothing good: its failures are in a row, and become an alert."""

    def refused(one: SinkOfATest) -> None:
        raise SinkRefused("the receiver is another one")

    keeper = keeping(kept.KeptSink(cast(Any, lambda: SinkOfATest(refused)), "post"))
    until(lambda: keeper.failures >= 4)
    assert keeper.failures_in_a_row >= 3
    assert keeper.report().last_good_unix_ms == 0


def test_a_sink_does_good_when_it_writes_or_has_written_everything(keeping: Callable[..., PipelineKeeper]) -> None:
    """One that hangs with its first batch has no error to tell of, and one with nothing to do works."""
    at_work = list[SinkOfATest]()

    def waits(one: SinkOfATest) -> None:
        at_work.append(one)
        one.ending.wait(WAIT_SECONDS)

    pipeline = kept.KeptSink(cast(Any, lambda: SinkOfATest(waits)), "post")
    keeper = keeping(pipeline)
    until(lambda: at_work)

    def looked() -> int:
        time.sleep(0.002)
        pipeline.look(keeper.diary)
        return keeper.report().last_good_unix_ms

    assert looked() == 0
    at_work[0].done.batches = 1
    written = looked()
    assert 0 < written == looked()
    at_work[0].has_caught_up = True
    idle = looked()
    assert written < idle < looked()
    at_work[0].problem = SinkAway("the receiver does not answer")
    before = looked()
    assert (keeper.report().state, looked()) == (PipelineState.FAILED, before)
    at_work[0].problem, at_work[0].has_caught_up = None, False
    assert (looked(), keeper.report().state) == (before, PipelineState.RUNNING)
