"""The oldest unconfirmed fact of a buffer is found, its age told, and an alert raised before it expires."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from bsfg.config import parse
from bsfg.node.ages import Unconfirmed
from bsfg.node.authorize import Guard, Matrix
from bsfg.node.links import LinkRegistry
from bsfg.node.parts import NodeContext, NodeSettings
from bsfg.node.status import Rates, document
from bsfg.ports import Buffer, Confirmation, ConsumerSpec
from bsfg.stores.memory import MemoryStorage
from bsfg.testing.facts import batch

DAY_MS = 86_400_000
CONFIG = """
[zone]
name = "plant"
[tls]
ca = "ca.crt"
certificate = "a.crt"
key = "a.key"
[streams.operational]
[streams.safety]
safety = "sil"
"""


@dataclass
class HandClock:
    """A clock that is moved by hand."""

    now_ms: int = 1_700_000_000_000
    moved_ms: int = field(default=0)

    def now_unix_ms(self) -> int:
        """Give the wall clock."""
        return self.now_ms + self.moved_ms

    def monotonic_ms(self) -> int:
        """Give the other clock, which moves with it."""
        return self.moved_ms


def parts() -> tuple[NodeContext, HandClock]:
    """Make a node's parts in memory."""
    clock, config = HandClock(), parse(CONFIG)
    guard = Guard(Matrix.of(config), clock, lambda decision, caller: None)
    made = NodeContext(MemoryStorage(clock=clock), NodeSettings.of(config), guard, clock, LinkRegistry(clock))
    return made, clock


async def buffers(made: NodeContext) -> dict[str, dict[str, object]]:
    """Give the status of every buffer by its name."""
    found = await document(made, Rates(), 0)
    return {f"{each['stream']}/{each['buffer']}": each for each in found["buffers"]}


async def _confirmed_step_by_step() -> None:
    made, clock = parts()
    store = await made.store("operational")
    for number in range(3):
        await store.append(batch(2, first=2 * number))
        clock.moved_ms += DAY_MS
    await made.storage.cursors.create(ConsumerSpec("app", "operational", Buffer.STORE))
    expected = {-1: 3.0, 0: 3.0, 1: 2.0, 3: 1.0, 5: None}
    for through, days in expected.items():
        if through >= 0:
            await made.storage.cursors.commit("app", Confirmation(through=through))
        clock.moved_ms += 10_000
        found = (await buffers(made))["operational/store"]
        age = found["oldest_unconfirmed_seconds"]
        assert (age is None) == (days is None)
        if days is not None:
            assert age == pytest.approx(days * 86_400, abs=60)
            assert found["first_unconfirmed"] == through + 1
        assert found["max_age_seconds"] == 7 * 86_400


def test_the_age_is_that_of_the_first_unconfirmed_entry() -> None:
    """As a required consumer confirms, the age becomes that of what it has not confirmed, and ends with the backlog."""
    asyncio.run(_confirmed_step_by_step())


async def _near() -> None:
    made, clock = parts()
    for stream in ("operational", "safety"):
        await (await made.store(stream)).append(batch(1))
    clock.moved_ms += int(5.5 * DAY_MS)
    assert not (await buffers(made))["operational/store"]["expiry_near"]
    clock.moved_ms += int(0.2 * DAY_MS)
    found = await buffers(made)
    assert found["operational/store"]["expiry_near"]
    assert found["safety/store"]["max_age_seconds"] is None
    assert not found["safety/store"]["expiry_near"]
    text = made.metrics.text().decode()
    assert 'bsfg_max_age_seconds{buffer="store",stream="operational"} 604800.0' in text
    assert 'bsfg_max_age_seconds{buffer="store",stream="safety"} +Inf' in text
    assert 'bsfg_oldest_unconfirmed_seconds{buffer="store",stream="operational"} 49' in text


def test_a_fact_that_nears_its_end_is_marked() -> None:
    """From four fifths of the maximal age on a buffer is marked; a safety stream, where nothing expires, never is."""
    asyncio.run(_near())


async def _unread_forward_buffer() -> None:
    made, clock = parts()
    await made.forward("operational")
    await (await made.store("operational")).append(batch(1))
    clock.moved_ms += DAY_MS
    found = await buffers(made)
    assert found["operational/store"]["first_unconfirmed"] == 0
    assert found["operational/forward"]["first_unconfirmed"] is None


def test_without_required_consumers_the_two_buffers_differ() -> None:
    """What nobody must confirm waits in a store buffer, and counts as read in a forward buffer."""
    asyncio.run(_unread_forward_buffer())


@pytest.mark.parametrize(
    ("age_seconds", "max_age_seconds", "text"),
    [
        (None, 100.0, None),
        (100.0, None, None),
        (79.0, 100.0, None),
        (6 * 86_400.0, 7 * 86_400.0, "is 6 days old and expires at 7 days"),
        (3_500.0, 3_600.0, "is 0.972 hours old and expires at 1 hours"),
    ],
)
def test_the_alert_says_how_old_and_how_old_it_may_get(
    age_seconds: float | None, max_age_seconds: float | None, text: str | None
) -> None:
    """An alert has both ages; there is none while there is time, nothing to confirm, or no end."""
    found = Unconfirmed(0, age_seconds, max_age_seconds).alert("a/store")
    assert (found is None) == (text is None)
    assert text is None or text in (found or "")
