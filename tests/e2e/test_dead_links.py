"""No link looks healthy because nobody is left who would say otherwise: the node watches its own links."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.liar import Liar, entries_of, frame, head
from tests.e2e.mover import Mover, allow_mover
from tests.e2e.test_artifacts import described, download, naming, reference
from tests.e2e.zones import Zone, link_to, pair, until

from bsfg.wire import boundary_pb2 as pb
from bsfg.wire.tls import client_context

LINK = "from-plant-a"
IMPATIENT = 'lost_after = "2s"\nrequest_timeout = "1s"\n'


def spark_pair(root: Path, cleanup: Cleanup) -> tuple[Zone, Zone]:
    """Make two zones; that the receiver's link is moved is somebody else's task."""
    plant, enterprise = map(cleanup.zone, pair(root))
    enterprise.links = link_to(plant, more=IMPATIENT).replace('"native"', '"spark"')
    allow_mover(enterprise)
    enterprise.write()
    return plant, enterprise


def status(zone: Zone) -> tuple[int, dict[str, Any]]:
    """Ask as a person does: give the exit code and the document."""
    command = [sys.executable, "-m", "bsfg.cli", "status", "--json", "-c", str(zone.folder / "zone.toml")]
    command += ["--identity", f"{zone.name}-viewer"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, orjson.loads(done.stdout)


def findings(document: dict[str, Any], alert: str) -> list[dict[str, Any]]:
    """Give the findings of one kind."""
    return [each for each in document["findings"] if each["alert"] == alert]


@pytest.mark.campaign
async def test_a_killed_engine_and_a_killed_sender_are_seen_by_the_node(tmp_path: Path, cleanup: Cleanup) -> None:
    """The gate turns by itself, status ends with 1, an alert is raised; with the engine it all comes back."""
    plant, enterprise = spark_pair(tmp_path, cleanup)
    plant.start()
    enterprise.start()
    mover = cleanup.closing(Mover(enterprise, LINK))
    await enterprise.mode(LINK, "normal")
    mover.close()
    plant.kill()
    await enterprise.mode(LINK, "autonomous")
    alert = await enterprise.seen("alert_raised", alert="link_dead", about=f"{LINK}/receiver")
    assert alert["severity"] == "alert"
    assert "mover" in alert["text"]
    await enterprise.seen("alert_raised", alert="peer_absent", about="plant-a/sender")
    code, document = status(enterprise)
    assert (code, document["health"]) == (1, "alert")
    [finding] = findings(document, "link_dead")
    assert "bsfg pipeline replicate" in finding["says"]
    assert findings(document, "peer_absent")
    assert not findings(document, "link_autonomous")
    [link] = [each for each in document["links"] if each["side"] == "receiver"]
    assert (link["mode"], link["lease"], link["engine"]) == ("autonomous", None, "spark")
    assert link["trouble"] == finding["says"]
    assert f'bsfg_link_dead{{link="{LINK}"}} 1.0' in metrics(enterprise)
    cleanup.closing(Mover(enterprise, LINK))
    await enterprise.mode(LINK, "normal")
    assert enterprise.modes(LINK)[-3:] == ["autonomous", "reconciliation", "normal"]
    await enterprise.seen("alert_cleared", alert="link_dead")


def metrics(zone: Zone) -> str:
    """Read the metrics of a node."""
    context = client_context(zone.files(f"{zone.name}-viewer"))
    connection = HTTPSConnection("127.0.0.1", zone.http_port, context=context, timeout=60)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


async def test_a_link_that_nobody_ever_moved_is_told(tmp_path: Path, cleanup: Cleanup) -> None:
    """After the threshold the node says that nobody moves the link, and how that can be changed."""
    _, enterprise = spark_pair(tmp_path, cleanup)
    enterprise.start()
    alert = await enterprise.seen("alert_raised", alert="link_dead")
    assert "nobody has since the node started: start `bsfg pipeline replicate`" in alert["text"]
    code, document = status(enterprise)
    assert code == 1
    assert len(findings(document, "link_dead")) == 1


async def test_an_artifact_that_comes_slowly_is_no_dead_link(tmp_path: Path, cleanup: Cleanup) -> None:
    """As long as pieces of it come, somebody moves the link, however long no turn ends."""
    plant, enterprise = map(cleanup.zone, pair(tmp_path))
    enterprise.links = link_to(plant, more='lost_after = "4s"\nrequest_timeout = "4s"\n')
    enterprise.write()
    content = Random(6).randbytes(15_000)

    def slowly(request: pb.GetObjectRequest) -> Iterator[pb.GetObjectResponse]:
        yield described(request.digest)
        for at in range(0, len(content), 1_000):
            time.sleep(1)
            yield pb.GetObjectResponse(chunk=content[at : at + 1_000])

    async with Liar(plant) as liar:
        liar.answer = lambda request: [head("ab" * 16, end=1), frame(entries_of([naming(reference(content))]))]
        liar.object = slowly
        enterprise.start()
        await until(lambda: liar.confirmed == [0])
    assert await download(enterprise, reference(content)) == content
    assert not enterprise.events("alert_raised", alert="link_dead")
