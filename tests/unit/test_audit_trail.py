"""The audit trail of a node: acts are durable before they are answered, floods are counted, failures stop nobody."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable

import pytest

from bsfg.config.kinds import Action
from bsfg.errors import GateHeld, PermissionRefused
from bsfg.node import trail as module
from bsfg.node.authorize import Decision, Request, Rule
from bsfg.node.trail import AuditTrail, Counting
from bsfg.stores.log.trailcheck import check_trail
from bsfg.stores.log.trailfile import Keeping, TrailWriter, oldest_first, tell
from bsfg.testing.clock import FakeClock
from bsfg.testing.disk import SimulatedDisk
from bsfg.trail import TrailEvent, TrailQuery
from bsfg.wire.peer import PeerNames
from bsfg.wire.service import Caller

PATIENCE_SECONDS = 60.0
ERROR = PermissionRefused("it may not")


def disk() -> SimulatedDisk:
    """Give an empty disk."""
    made = SimulatedDisk()
    made.make_folder("")
    return made


def started(files: SimulatedDisk, clock: FakeClock | None = None, keeping: Keeping | None = None) -> AuditTrail:
    """Start a trail on a disk."""
    trail = AuditTrail(TrailWriter(files, keeping or Keeping()), clock or FakeClock())
    trail.start()
    return trail


def events(files: SimulatedDisk) -> list[TrailEvent]:
    """Read what was recorded, leaving out the beginning."""
    return [record.event for record in oldest_first(files, TrailQuery())][1:]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def refusal(identity: str, rule: Rule = Rule.ROLE) -> Decision:
    """Make a refusal."""
    return Decision(identity, None, Request(Action.APPEND, "operational"), rule, ERROR)


def caller(number: int = 1) -> Caller:
    """Give somebody who calls."""
    return Caller(PeerNames(("x",), ()), f"ipv4:10.0.0.{number % 250}:{4_000 + number}")


def test_an_act_is_durable_before_it_is_answered() -> None:
    """When an operator's act returns its record survives a power loss, with who, from where, what, and why."""
    files = disk()

    async def run() -> None:
        trail = started(files)
        async with trail.act("op", caller(), "gate_held", "from-x/receiver", "works") as details:
            details["until_unix_ms"] = 5
        found = events(files.killed())
        assert [(each.action, each.identity, each.address) for each in found] == [("gate_held", "op", "10.0.0.1:4001")]
        assert (found[0].about, found[0].outcome, found[0].reason) == ("from-x/receiver", "done", "works")
        assert found[0].details == {"until_unix_ms": 5}
        await trail.close()

    asyncio.run(run())


def test_an_act_that_fails_is_recorded_as_such() -> None:
    """What could not be done is there with its code, and the error goes on to whoever asked."""
    files = disk()

    async def run() -> None:
        trail = started(files)
        with pytest.raises(GateHeld):
            async with trail.act("op", caller(), "gate_released", "from-x/receiver", "works"):
                raise GateHeld("it is held")
        with pytest.raises(ZeroDivisionError):
            async with trail.act("op", caller(), "gate_released", "from-x/receiver", "works"):
                raise ZeroDivisionError
        await trail.close()

    asyncio.run(run())
    assert [(each.outcome, each.rule) for each in events(files)] == [
        ("failed", "gate_held"),
        ("failed", "ZeroDivisionError"),
    ]


def test_a_flood_of_refusals_is_counted() -> None:
    """The first refusal of a kind is recorded, the others once a minute with their number; strangers are one kind."""
    files, clock = disk(), FakeClock()

    async def run() -> None:
        trail = started(files, clock)
        for minute in range(3):
            for number in range(5_000):
                trail.refused(refusal(f"stranger-{number}", Rule.UNKNOWN), caller(number), known=False)
                trail.refused(refusal("plant-a-viewer"), caller(number), known=True)
            clock.advance(61)

            def recorded(wanted: int = 2 * (minute + 2)) -> bool:
                return len(events(files)) == wanted

            wait_for(recorded)
        await trail.close()

    asyncio.run(run())
    found = events(files)
    strangers = [each for each in found if each.identity == "stranger"]
    assert [each.details.get("count") for each in strangers] == [None, 4_999, 5_000, 5_000]
    assert strangers[0].details["name"] == "stranger-0"
    assert len(strangers[1].details["addresses"]) == 8
    assert [each.details.get("count") for each in found if each.identity == "plant-a-viewer"] == [
        None,
        4_999,
        5_000,
        5_000,
    ]
    assert {(each.action, each.about, each.outcome) for each in found} == {
        ("request_refused", "append operational", "refused")
    }


def test_names_without_end_cannot_fill_the_trail() -> None:
    """However many names and rules somebody invents, there are only so many kinds; and no text is without end."""
    counting, clock = Counting(FakeClock()), FakeClock()
    told = [counting.take(TrailEvent("request_refused", f"name-{number}", rule="r"), 1) for number in range(5_000)]
    assert sum(each is not None for each in told) <= module.KINDS_MAX + 1
    files = disk()
    trail = started(files, clock)
    long = Decision(
        "n" * 10**6, None, Request(Action.APPEND, "s" * 10**6), Rule.UNKNOWN, PermissionRefused("m" * 10**6)
    )
    trail.refused(long, Caller(None, "a" * 10**6), known=False)
    asyncio.run(trail.close())
    assert sum(len(data) for name, data in files.content().items() if name.endswith(".trail")) < 4_000


def test_a_kind_that_has_gone_quiet_is_new_again() -> None:
    """After a minute without any the next one is recorded at once, and a count is never given twice."""
    clock = FakeClock()
    counting, event = Counting(clock), TrailEvent("request_refused", "x", rule="r")
    assert counting.take(event, 1) is not None
    assert counting.take(event, 1) is None
    clock.advance(61)
    assert [each.details["count"] for each in counting.due()] == [1]
    assert counting.take(event, 1) is None
    clock.advance(61)
    assert [each.details["count"] for each in counting.due()] == [1]
    clock.advance(61)
    assert counting.due() == []
    assert counting.take(event, 1) is not None


def test_counts_are_written_at_the_end() -> None:
    """What was only counted is there when the node has stopped in order."""
    files = disk()
    trail = started(files)
    for number in range(10):
        trail.refused(refusal("x"), caller(number), known=True)
    asyncio.run(trail.close())
    assert [each.details.get("count") for each in events(files)] == [None, 9]


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_disk_that_fails_stops_nobody(call: str) -> None:
    """An act is answered although its record cannot be written; that is a failure to tell of, until it is written."""
    files = disk()

    async def run() -> None:
        trail = started(files)
        files.fail(call, error=errno.EIO, times=10**6)
        async with trail.act("op", caller(), "gate_held", "a/receiver", "works"):
            pass
        assert trail.failure is not None
        files.repair()
        wait_for(lambda: trail.failure is None)
        async with trail.act("op", caller(), "gate_released", "a/receiver", "done"):
            pass
        await trail.close()

    asyncio.run(run())
    assert [each.action for each in events(files)] == ["gate_held", "gate_released"]
    assert check_trail(files).problems == []


def test_what_had_to_be_given_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can be written only so much waits in memory; how much was given up is a record of its own."""
    monkeypatch.setattr(module, "WAITING_MAX", 5)
    files = disk()
    trail = started(files)
    files.fail("write", error=errno.ENOSPC, times=10**6)
    for number in range(20):
        trail.record(TrailEvent("signed_in", f"somebody-{number}"))
    wait_for(lambda: trail.failure is not None)
    files.repair()
    wait_for(lambda: trail.failure is None)
    asyncio.run(trail.close())
    found = events(files)
    assert [each.identity for each in found[:5]] == [f"somebody-{number}" for number in range(5)]
    assert [(each.action, each.details) for each in found[5:]] == [("events_lost", {"count": 15})]


def test_a_trail_that_cannot_be_opened_comes_later() -> None:
    """A node starts without its trail, and the trail begins when the disk lets it."""
    files = disk()
    files.fail("make_folder", error=errno.EACCES, times=10**6)
    trail = started(files)
    assert trail.failure is not None
    trail.record(TrailEvent("node_started", "node"))
    files.repair()
    wait_for(lambda: trail.failure is None)
    asyncio.run(trail.close())
    assert [each.action for each in events(files)] == ["node_started"]


def test_what_commands_tell_is_taken_in_while_the_node_runs() -> None:
    """A command beside the node leaves word, and it becomes a record without anybody asking."""
    files = disk()
    trail = started(files)
    trail.record(TrailEvent("node_started", "node"))
    tell(files, TrailEvent("backup_made", "user:root", about="b1", at_unix_ms=7))
    wait_for(lambda: "backup_made" in [each.action for each in events(files)])
    asyncio.run(trail.close())


def test_damage_is_recorded_at_the_start() -> None:
    """A node that finds its trail cut says so in the trail, and to whoever started it."""
    files = disk()

    async def run() -> None:
        trail = started(files)
        for number in range(3):
            await trail.recorded(TrailEvent("signed_in", f"somebody-{number}"))
        await trail.close()

    asyncio.run(run())
    path = "audit/00000000000000000001.trail"
    file = files.open_append(path)
    file.truncate(files.size(path) - 10)
    file.close()
    again = AuditTrail(TrailWriter(files, Keeping()), FakeClock())
    problems = again.start()
    assert any("missing at its end" in text for text in problems)
    asyncio.run(again.close())
    assert events(files)[-1].action == "trail_damaged"


def test_a_trail_that_is_too_large_says_so() -> None:
    """Files that must leave before their time are counted, so that an alert can be made of it."""
    files = disk()
    trail = started(files, keeping=Keeping(max_bytes=5_000, file_bytes=1_000))
    for number in range(60):
        asyncio.run(trail.recorded(TrailEvent("signed_in", f"somebody-{number}")))
    wait_for(lambda: trail.trimmed_early > 0)
    asyncio.run(trail.close())
    assert check_trail(files).problems == []


def test_without_a_folder_there_is_no_trail() -> None:
    """A trail without a writer takes everything and keeps nothing."""

    async def run() -> None:
        trail = AuditTrail()
        assert trail.start() == []
        trail.record(TrailEvent("signed_in", "x"))
        trail.refused(refusal("x"), caller(), known=True)
        async with trail.act("op", caller(), "gate_held", "x"):
            pass
        await trail.close()
        assert trail.failure is None

    asyncio.run(run())
