"""A second node with the certificate of a zone is noticed at the sender, and nothing is lost over it unseen."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.e2e.cleanup import Cleanup
from tests.e2e.test_dead_links import findings, status
from tests.e2e.zones import RecordsRead, pair
from tests.sdk.conftest import endpoint

from bsfg import Fact, Producer
from bsfg.testing.ports import free_port


async def test_a_copy_of_a_node_is_noticed(tmp_path: Path, cleanup: Cleanup) -> None:
    """Two nodes pull as one zone: the sender says so within seconds, in its log, as an alert and in its status."""
    plant, enterprise = pair(tmp_path)
    copy = replace(enterprise, root=tmp_path / "copy", records=RecordsRead(), port=free_port(), http_port=free_port())
    copy.write()
    for zone in (plant, enterprise, copy):
        cleanup.zone(zone)
        zone.start()
    with Producer(endpoint(plant), stream="operational", from_zone="plant-a", to_zone="enterprise") as producer:
        for number in range(20):
            await asyncio.to_thread(producer.append, Fact.of("batch:B1", "said", number), message_id=str(number))
            await asyncio.sleep(0.05)
    raised = await plant.seen("alert_raised", alert="certificate_shared", about="enterprise/sender")
    assert "two nodes fetch with the certificate of enterprise" in raised["text"]
    code, document = status(plant)
    assert (code, document["health"]) == (1, "alert")
    assert findings(document, "certificate_shared")
    copy.kill()
    enterprise.restart()
