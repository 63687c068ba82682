"""What a process tells of its pipelines, and what the node shows of them when it tells nothing any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.wire.conftest import Sites
from tests.wire.site import Site

from bsfg.config import parse
from bsfg.errors import BsfgError, InvalidArgument, PermissionRefused
from bsfg.node.alerts import AlertBoard
from bsfg.node.metrics import Metrics
from bsfg.node.pipelines import ABSENT_MS, STALE_MS, PipelineBoard, PipelineWatch
from bsfg.testing.clock import FakeClock
from bsfg.wire.service import PIPELINES_MAX, PipelineReport, PipelineState

MORE = """
[pipelines.lake]
land = { stream = "operational", out = "lake" }
[pipelines.proof]
audit = { link = "from-north" }
[pipelines.old]
audit = { link = "from-north" }
enabled = false
"""


def report(name: str = "lake", state: PipelineState = PipelineState.RUNNING, **more: Any) -> PipelineReport:
    """Make a report."""
    return PipelineReport(name, state, **more)


async def opened(sites: Sites) -> Site:
    """Open a site with pipelines, and call it as its pipeline."""
    site = await sites(more=MORE)
    site.act_as("pipeline")
    return site


async def test_what_is_told_is_shown(sites: Sites) -> None:
    """Every field of a report is in the status, what the configuration does not have is named and not shown."""
    site = await opened(sites)
    told = report(
        progress="landing\nnow", runs=3, failures=2, facts=70, backlog=5, next_unix_ms=9, last_error="no: disk"
    )
    assert await site.admin_client().report_pipelines("run here", [told, report("strange")]) == ["strange"]
    found = {each["pipeline"]: each for each in (await site.admin_client().status())["pipelines"]}
    assert {name: each["state"] for name, each in found.items()} == {
        "lake": "running",
        "proof": "unknown",
        "old": "off",
    }
    lake = found["lake"]
    assert (lake["kind"], lake["run"], lake["progress"], lake["backlog"]) == ("land", "run here", "landing now", 5)
    assert (lake["runs"], lake["failures"], lake["facts"], lake["last_error"]) == (3, 2, 70, "no: disk")
    assert found["proof"]["run"] is None


async def test_who_may_tell(sites: Sites) -> None:
    """Pipelines tell; producers, consumers and operators do not."""
    site = await opened(sites)
    for who in ("app", "operator"):
        site.act_as(who)
        with pytest.raises(PermissionRefused):
            await site.admin_client().report_pipelines("run", [report()])


async def test_the_limits_of_a_report(sites: Sites) -> None:
    """So many pipelines and no more, texts are cut, and a state that is none is refused."""
    site = await opened(sites)
    admin = site.admin_client()
    many = [report(f"p{number}") for number in range(PIPELINES_MAX)]
    assert len(await admin.report_pipelines("run", many)) == PIPELINES_MAX
    with pytest.raises(BsfgError) as caught:
        await admin.report_pipelines("run", [*many, report("one-more")])
    assert caught.value.code in ("invalid_argument", "too_large", "request_too_large", "frame_invalid")
    await admin.report_pipelines("h" * 1000, [report(progress="x" * 3000)])
    [lake, *_] = (await admin.status())["pipelines"]
    assert (len(lake["run"]), len(lake["progress"])) == (200, 500)
    with pytest.raises(InvalidArgument, match="no state"):
        await admin.report_pipelines("run", [report(state="happy")])  # type: ignore[arg-type]


class World:
    """A board with a clock that a test moves, and the alerts that follow from it."""

    def __init__(self) -> None:
        zone = '[zone]\nname = "plant"\n[listen]\ngrpc = "127.0.0.1:9"\nhttp = "127.0.0.1:10"\n'
        zone += 'plaintext = true\nplaintext_identity = "me"\n[streams.operational]\n'
        zone += '[identities.me]\nzone = "plant"\nroles = ["operator"]\n' + MORE
        self.config = parse(zone)
        self.clock, self.metrics = FakeClock(), Metrics()
        self.board = PipelineBoard(self.clock, self.metrics, self.config.pipelines)
        self.alerts = AlertBoard("plant", self.config.alerts, self.metrics, self.clock, lambda *args, **fields: None)
        self.watch = PipelineWatch(self.board, self.alerts, self.metrics)

    def after(self, ms: int) -> dict[tuple[str, str], str]:
        """Let time pass; give the alerts that last then, with their severities."""
        self.clock.advance(ms / 1000)
        self.watch.look()
        return {(each["alert"], each["about"]): each["severity"] for each in self.alerts.active()}

    def metric(self, name: str, pipeline: str = "lake") -> float | None:
        """Give the value of a metric."""
        return self.metrics.registry.get_sample_value(f"bsfg_pipeline_{name}", {"pipeline": pipeline})


def test_a_process_that_is_gone_never_looks_healthy() -> None:
    """It is dead as soon as it has told nothing for some seconds, an alert a little later, and alive when it tells."""
    world = World()
    world.board.take("run 1", [report(progress="landing", next_unix_ms=5)])
    assert world.after(STALE_MS) == {}
    assert (world.board.state("lake"), world.metric("up")) == ("running", 1.0)
    world.after(1)
    assert (world.board.state("lake"), world.metric("up")) == ("dead", 0.0)
    lake = world.board.documents()[0]
    assert (lake["state"], lake["progress"], lake["next_unix_ms"]) == ("dead", "", 0)
    assert set(world.after(ABSENT_MS)) == {("pipeline_dead", "lake"), ("pipeline_dead", "proof")}
    world.board.take("run 2", [report()])
    assert set(world.after(1)) == {("pipeline_dead", "proof")}
    world.board.take("run 2", [report(state=PipelineState.ENDED)], last=True)
    assert world.board.state("lake") == "dead", "one that ended in order does not run either"


@pytest.mark.parametrize("enabled", [None, False], ids=["taken out", "not enabled"])
def test_a_pipeline_that_is_not_to_run_is_shown_no_more(enabled: bool | None) -> None:
    """Neither as one that does not work nor with what it found last; when it is there again, it is new."""
    world = World()
    world.board.take("run 1", [report("proof", finding="missing", last_good_unix_ms=9), report()])
    world.after(1)
    tables = dict(world.board.tables)
    proof = tables.pop("proof")
    others = tables if enabled is None else {**tables, "proof": replace(proof, enabled=enabled)}
    world.board.configure(others)
    world.board.take("run 1", [report("proof", finding="missing", last_good_unix_ms=9), report()])
    assert ("audit_not_clean", "proof") not in world.after(1)
    shown = ("up", "clean", "backlog", "batch_seconds", "last_good_timestamp_seconds")
    assert [world.metric(name, "proof") for name in shown] == [None] * 5
    assert world.metric("up", "lake") == 1.0
    world.board.configure({**tables, "proof": proof})
    world.board.take("run 1", [report("proof", last_good_unix_ms=10)])
    world.after(1)
    assert [world.metric(name, "proof") for name in ("up", "clean")] == [1.0, 1.0]


def test_failures_and_findings_are_alerts() -> None:
    """A first failure is a warning, the third an alert; an audit that is not clean is one until it is clean."""
    world = World()
    world.board.take("run", [report(state=PipelineState.FAILED, failures_in_a_row=1, last_error="no: disk")])
    assert world.after(1) == {("pipeline_failing", "lake"): "warning"}
    world.board.take("run", [report(state=PipelineState.FAILED, failures_in_a_row=3, last_error="no: disk")])
    assert world.after(1) == {("pipeline_failing", "lake"): "alert"}
    assert "no: disk" in world.alerts.active()[0]["text"]
    world.board.take(
        "run", [report(), report("proof", PipelineState.WAITING, finding="missing ×2", last_good_unix_ms=1)]
    )
    assert world.after(1) == {("audit_not_clean", "proof"): "alert"}
    assert world.metric("clean", "proof") == 0.0
    assert ("audit_not_clean", "proof") in world.after(STALE_MS + ABSENT_MS), "nobody has shown that it is mended"
    world.board.take("run elsewhere", [report("proof", PipelineState.STARTING)])
    assert ("audit_not_clean", "proof") in world.after(1), "nor has one that has only begun"
    world.board.take("run elsewhere", [report("proof", PipelineState.WAITING, last_good_unix_ms=2)])
    assert ("audit_not_clean", "proof") not in world.after(1)
    assert world.metric("clean", "proof") == 1.0


def test_counts_are_those_of_all_processes() -> None:
    """A process counts from zero; a new one adds to what the last has done, and a report that comes twice does not."""
    world = World()
    for holder, facts in (("run 1", 10), ("run 1", 15), ("run 1", 15)):
        world.board.take(holder, [report(facts=facts, runs=1)])
    world.clock.advance(STALE_MS / 1000 + 1)
    world.board.take("run 2", [report(facts=4, runs=1)])
    assert (world.metric("facts_total"), world.metric("runs_total")) == (19.0, 2.0)


def test_a_second_process_does_not_speak_for_the_first() -> None:
    """While the first works; one that works is heard instead of one that fails."""
    world = World()
    world.board.take("run 1", [report()])
    world.board.take("run 2", [report(state=PipelineState.FAILED)])
    assert world.board.documents()[0]["run"] == "run 1"
    world.board.take("run 1", [report(state=PipelineState.FAILED)])
    world.board.take("run 2", [report()])
    assert world.board.documents()[0]["run"] == "run 2"


def test_other_tables_are_taken_up() -> None:
    """What is no longer configured is no longer shown, nor an alert; what is new is waited for."""
    world = World()
    world.board.take("run", [report(state=PipelineState.FAILED, failures_in_a_row=9)])
    assert ("pipeline_failing", "lake") in world.after(1)
    rest = {name: row for name, row in world.config.pipelines.items() if name != "lake"}
    world.board.configure(rest)
    assert world.after(1) == {}
    assert (world.metric("up"), world.metric("up", "old")) == (None, None), "what is not to run is not down"
    assert [each["pipeline"] for each in world.board.documents()] == ["proof", "old"]
    world.board.configure(world.config.pipelines)
    assert world.board.state("lake") == "unknown"
