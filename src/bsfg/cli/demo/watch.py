"""Looks at the nodes of the demo several times a second, as somebody with a dashboard would."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from bsfg.cli.demo.site import Link, Site, Zone
from bsfg.cli.demo.stage import Stage
from bsfg.errors import BsfgError
from bsfg.gate import Mode
from bsfg.ports import Buffer
from bsfg.wire.adminclient import AdminClient
from bsfg.wire.connection import Connection

LOOK_SECONDS = 0.4
CALL_SECONDS = 5.0

Document = dict[str, Any]


class Watch:
    """Keeps a stage up to date from what the nodes say of themselves."""

    def __init__(self, site: Site, stage: Stage) -> None:
        self._site, self._stage = site, stage
        self._connections: dict[str, Connection] = {}
        self._documents: dict[str, Document] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        self._connections = {zone.name: zone.connection("viewer") for zone in self._site.zones}
        try:
            while True:
                await asyncio.gather(*(self._look(zone) for zone in self._site.zones))
                for link in self._site.links:
                    self._take_link(link)
                self._stage.tell()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for connection in self._connections.values():
                with contextlib.suppress(Exception):
                    await connection.close()

    async def _look(self, zone: Zone) -> None:
        connection, seen = self._connections[zone.name], self._stage.zones[zone.name]
        if not seen.pid:
            seen.alive = False
            return
        try:
            found = await asyncio.wait_for(AdminClient(connection).status(), CALL_SECONDS)
        except (BsfgError, TimeoutError):
            connection.reconnect()
            seen.alive = False
            return
        self._documents[zone.name] = found
        seen.alive = seen.seen = bool(seen.pid)
        mine = [link for link in self._site.links if link.sender is zone]
        seen.appended = sum(each["end"] for each in found["buffers"] if each["buffer"] == Buffer.STORE)
        seen.received = sum(each["end"] for each in found["buffers"] if each["buffer"] == Buffer.FORWARD)
        seen.backlog = sum(_consumer(found, link).get("backlog", 0) for link in mine)
        seen.forwarded = sum(_consumer(found, link).get("committed", -1) + 1 for link in mine)
        seen.artifacts = (found["artifacts"] or {}).get("artifacts", 0)

    def _take_link(self, link: Link) -> None:
        seen = self._stage.links[link.key]
        sender, receiver = self._documents.get(link.sender.name), self._documents.get(link.receiver.name)
        if receiver is not None:
            gate = _gate(receiver, link.name, "receiver")
            seen.mode, seen.moved_by = gate.get("mode", seen.mode), gate.get("lease")
        if sender is not None:
            seen.sender_mode = _gate(sender, link.receiver.name, "sender").get("mode", seen.sender_mode)
            seen.backlog = _consumer(sender, link).get("backlog", 0)
        seen.lag_ms = self._lag_ms(link, seen.mode)
        seen.lags_ms.append(seen.lag_ms)

    def _lag_ms(self, link: Link, mode: str) -> float | None:
        """Give how far behind a link is: what the last fact took, or how long the oldest has waited already."""
        sender, receiver = self._documents.get(link.sender.name), self._documents.get(link.receiver.name)
        if mode != Mode.NORMAL and sender is not None:
            for buffer in sender["buffers"]:
                if (buffer["stream"], buffer["buffer"]) == (link.stream, link.buffer):
                    waited = buffer["oldest_unconfirmed_seconds"]
                    return None if waited is None else 1000 * float(waited)
        reports = _gate(receiver, link.name, "receiver").get("reports", []) if receiver is not None else []
        lags = [each["lag_seconds"] for each in reports if each["stream"] == link.stream]
        return 1000 * float(lags[0]) if lags and lags[0] is not None else None


def _gate(document: Document, link: str, side: str) -> Document:
    found: list[Document] = [each for each in document["links"] if (each["link"], each["side"]) == (link, side)]
    return found[0] if found else {}


def _consumer(document: Document, link: Link) -> Document:
    found: list[Document] = [each for each in document["consumers"] if each["name"] == link.consumer]
    return found[0] if found else {}
