"""A zone that is stopped, moved to another storage and started again: its links go on, each fact once and in order."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.e2e.cleanup import Cleanup
from tests.e2e.homes import ServerZone
from tests.e2e.producing import Insistent, calm, check_sound, expected, history
from tests.e2e.zones import Zone, bsfg, pair, until

from bsfg.ports import Buffer


@dataclass
class MovingZone(ServerZone):
    """A zone that is on the log or in a database, in a folder that changes with it."""

    where: str = "data"
    in_tables: bool = False

    @property
    def data(self) -> Path:
        """Where its node keeps its files."""
        return self.folder / self.where

    def write(self) -> None:
        """Write its configuration."""
        super().write()
        if not self.in_tables:
            self.storage = ""
            Zone.write(self)
        path = self.folder / "zone.toml"
        path.write_text(path.read_text().replace("[zone]\n", f'[zone]\ndata_folder = "{self.where}"\n', 1))

    def log(self, buffer: Buffer, stream: str = "operational") -> Any:
        """Open one of its buffers for reading."""
        return super().log(buffer, stream) if self.in_tables else Zone.log(self, buffer, stream)

    def move(self, where: str, *, in_tables: bool) -> dict[str, Any]:
        """Move it as an operator would; give what the command says."""
        old, new = self.folder / "zone-old.toml", self.folder / "zone.toml"
        shutil.copy(new, old)
        self.where, self.in_tables = where, in_tables
        self.write()
        found: dict[str, Any] = json.loads(bsfg("migrate", "--config", str(old), "--to", str(new), "--json"))
        return found


@pytest.mark.timeout(1_200)  # nodes and commands, one after the other; a busy machine takes its time
async def test_a_link_goes_on_when_a_zone_was_moved(tmp_path: Path, cleanup: Cleanup) -> None:
    """A zone goes from the log into a database and back to a log, while another zone and both producers go on."""
    plain, enterprise = pair(tmp_path)
    plant = MovingZone(plain.name, plain.root, plain.certs, port=plain.port, http_port=plain.http_port)
    plant.links, plant.identities, plant.serve = plain.links, plain.identities, plain.serve
    plant.write()
    cleanup.closing(SimpleNamespace(close=plant.server.stop))
    for zone in (plant, enterprise):
        cleanup.zone(zone)
        zone.start()
    producers = [Insistent(zone, seed=3, batch_facts=50, pause_seconds=0.1) for zone in (plant, enterprise)]
    running = [asyncio.ensure_future(producer.run()) for producer in producers]
    for where, in_tables in (("data-tables", True), ("data-home", False)):
        before = [producer.count for producer in producers]
        await until(lambda: all(p.count > b + 30 for p, b in zip(producers, before, strict=True)), "facts")  # noqa: B023
        await until(lambda: plant.end(Buffer.FORWARD) > 20, "facts of the other zone")
        plant.stop()
        told = await asyncio.to_thread(plant.move, where, in_tables=in_tables)
        assert {each["stream"] for each in told["buffers"]} == {"operational"} and not told["was_done"]
        # Whoever starts the old one by mistake is told.
        asked = [sys.executable, "-m", "bsfg.cli", "node", "-c", str(plant.folder / "zone-old.toml")]
        refused = await asyncio.to_thread(subprocess.run, asked, capture_output=True, timeout=120, check=False)
        assert refused.returncode == 1 and b"storage_moved" in refused.stderr, refused.stderr[-2000:]
        plant.start()
    before = [producer.count for producer in producers]
    await until(lambda: all(p.count > b + 30 for p, b in zip(producers, before, strict=True)), "facts")
    for producer in producers:
        producer.stop()
    await asyncio.gather(*running)
    await asyncio.gather(calm(plant, enterprise), calm(enterprise, plant))
    for producer, receiver in zip(producers, (enterprise, plant), strict=True):
        wanted = expected(producer)
        assert history(producer.zone, Buffer.STORE) == wanted
        assert history(receiver, Buffer.FORWARD) == wanted
    for zone, link in ((plant, "from-enterprise"), (enterprise, "from-plant-a")):
        assert "held" not in zone.modes(link)
        assert not zone.gaps(Buffer.STORE) and not zone.gaps(Buffer.FORWARD)
    plant.stop()
    enterprise.stop()
    check_sound(plant, enterprise)
