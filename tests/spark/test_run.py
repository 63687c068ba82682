"""`bsfg pipeline run`: all pipelines of a zone in one process, whatever happens to one of them, or to the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from tests.e2e.cleanup import Cleanup
from tests.spark.nodes import SparkZone, facts, ids, zone_pair
from tests.spark.replicating import Pipeline, wait_until

from bsfg.batch import FactBatch
from bsfg.ports import Buffer, OriginSpan
from bsfg.retention import Policy
from bsfg.sealing import seal
from bsfg.stores.log.storage import LogStorage

TABLES = """
[pipelines.links]
replicate = {}

[pipelines.lake]
land = { stream = "operational", buffer = "forward", out = "lake", every = 0.5 }

[pipelines.proof]
audit = { link = "from-plant-a" }
every = "2s"

[pipelines.inbox]
every = "1s"
settled = "500ms"
[pipelines.inbox.ingest]
files = ["inbox"]
stream = "operational"
to_zone = "plant-a"
map = { subject = "machine:{machine}" }
set = { predicate = "measured", produced_at = "2026-03-01T06:00:00Z" }
id = "{machine}/{number}"

[pipelines.later]
ingest = { files = ["later"], mapping = "later.toml" }
every = "1s"
restart_after = "1s"
restart_max = "1s"
"""


MAPPING = """
stream = "operational"
to_zone = "plant-a"
map = { subject = "machine:{machine}" }
set = { predicate = "measured", produced_at = "2026-03-01T06:00:00Z" }
"""


def rows(first: int, count: int) -> str:
    """Write a file of some rows."""
    return "machine,number\n" + "".join(f"press-{number % 3},{number}\n" for number in range(first, first + count))


def status(zone: SparkZone) -> dict[str, Any]:
    """Ask the node how it is."""

    async def work() -> dict[str, Any]:
        async with zone.admin("operator") as admin:
            return await admin.status()

    return asyncio.run(work())


def shown(zone: SparkZone, name: str) -> dict[str, Any]:
    """Give what the node shows of a pipeline."""
    return next(each for each in status(zone)["pipelines"] if each["pipeline"] == name)


def alerts(zone: SparkZone) -> set[tuple[str, str]]:
    """Give the alerts that last."""
    return {(each["alert"], each["about"]) for each in status(zone)["alerts"]}


def landed(zone: SparkZone) -> list[str]:
    """Give the ids of all facts that are landed."""
    return sorted(ds.dataset(zone.folder / "lake", format="parquet").to_table(["message_id"])["message_id"].to_pylist())


def forward(zone: SparkZone) -> list[str]:
    """Give the ids of all facts that links have brought."""
    return sorted(map(str, ids(zone.messages(Buffer.FORWARD))))


@pytest.fixture
def ending() -> Iterator[ExitStack]:
    """Give what ends processes behind a test."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.campaign
def test_one_process_runs_everything_and_survives_what_befalls_it(
    tmp_path: Path, cleanup: Cleanup, ending: ExitStack
) -> None:
    """A link, a landing, an audit and two watched folders; one fails and goes on, the process is killed and goes on."""
    plant, enterprise = zone_pair(tmp_path)
    enterprise.links += TABLES
    enterprise.write()
    (enterprise.folder / "inbox").mkdir()
    (enterprise.folder / "later.toml").write_text(MAPPING)
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    run = Pipeline(enterprise, job="run")
    ending.callback(run.kill)
    plant.produce(facts(500))
    (enterprise.folder / "inbox" / "one.csv").write_text(rows(0, 20))

    run.until(lambda: enterprise.end(Buffer.FORWARD) == 500, "the link")
    run.until(lambda: run.pipelines["lake"]["facts"] == 500, "the landing")
    run.until(lambda: run.pipelines["inbox"]["facts"] == 20, "the ingest")
    run.until(lambda: run.pipelines["proof"]["progress"] == "clean: 500 facts, the same at both ends", "the audit")
    run.until(lambda: run.pipelines["later"]["failures"] >= 2, "two failures")
    assert "there is no file" in run.pipelines["later"]["last_error"]
    wait_until(lambda: ("pipeline_failing", "later") in alerts(enterprise), "the warning")
    (enterprise.folder / "later").mkdir()
    (enterprise.folder / "later" / "two.csv").write_text(rows(100, 5))
    run.until(lambda: run.pipelines["later"]["facts"] == 5, "the folder that came later")
    wait_until(lambda: ("pipeline_failing", "later") not in alerts(enterprise), "the end of the warning")
    found = {each["pipeline"]: each for each in status(enterprise)["pipelines"]}
    assert {name: each["state"] for name, each in found.items() if name in ("links", "lake")} == {
        "links": "running",
        "lake": "running",
    }
    assert found["proof"]["next_unix_ms"] or found["proof"]["state"] == "running"
    assert "1 link: 1 normal" in found["links"]["progress"]

    run.kill()
    plant.produce(facts(300, first=500))
    wait_until(lambda: shown(enterprise, "lake")["state"] == "dead", "what is dead to be shown as that")
    assert {each["state"] for each in status(enterprise)["pipelines"]} == {"dead"}
    assert shown(enterprise, "lake")["progress"] == ""

    enterprise.offline(_with_a_fact_that_nobody_sent)
    again = Pipeline(enterprise, job="run")
    ending.callback(again.kill)
    again.until(lambda: enterprise.end(Buffer.FORWARD) == 801, "what was sent meanwhile")
    again.until(lambda: again.pipelines["lake"]["facts"] == 301, "what was not landed yet")
    again.until(lambda: "extra" in again.pipelines["proof"]["finding"], "an audit that is not clean")
    wait_until(lambda: ("audit_not_clean", "proof") in alerts(enterprise), "the alert")
    assert landed(enterprise) == forward(enterprise)
    assert len(forward(enterprise)) == len(set(forward(enterprise))) == 801
    assert again.pipelines["inbox"]["facts"] == 0, "nothing is ingested twice"

    # A table that is changed, one that is new and one that is gone, without a restart.
    text = (enterprise.folder / "zone.toml").read_text()
    text = text.replace("[pipelines.later]", "[pipelines.other]").replace("every = 0.5", "every = 0.25")
    (enterprise.folder / "zone.toml").write_text(text)
    again.until(lambda: {"other"} <= again.pipelines.keys() - {"later"}, "the new table")
    wait_until(lambda: "other" in {each["pipeline"] for each in status(enterprise)["pipelines"]}, "the node's view")
    plant.produce(facts(10, first=800))
    again.until(lambda: landed(enterprise) == forward(enterprise) and len(forward(enterprise)) == 811, "the landing")
    assert again.stop() == 0
    assert not again.processes()


@pytest.mark.campaign
def test_when_spark_is_gone_so_is_the_command(plant: SparkZone, ending: ExitStack) -> None:
    """In a sentence, with an exit code that a service manager understands, and with nothing left behind."""
    text = '[pipelines.lake]\nland = { stream = "operational", out = "lake" }\n'
    (plant.folder / "zone.toml").write_text((plant.folder / "zone.toml").read_text() + text)
    plant.produce(facts(20))
    run = Pipeline(plant, job="run")
    ending.callback(run.kill)
    run.until(lambda: run.pipelines.get("lake", {}).get("facts") == 20, "the landing")
    [java] = run.pids("org.apache.spark.deploy.SparkSubmit")
    os.kill(java, signal.SIGKILL)
    assert run.process.wait(60) == 1
    assert "error[spark_failed]: Spark has ended" in run.log_path.read_text()
    wait_until(lambda: not run.processes(), "its processes to end")


async def _with_a_fact_that_nobody_sent(storage: LogStorage) -> None:
    """Put a fact into the forward buffer that the sender does not have."""
    buffer = await storage.forward("operational", Policy())
    one = seal(FactBatch.from_messages(facts(1, first=70_000)))
    await buffer.put_if_absent(one, OriginSpan("plant-a", np.array([250]), np.array([1]), None))
