"""One shift of a live task: wait for the lease, move facts, report to the node, and give way to the other task."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from bsfg.errors import BsfgError, LeaseHeld, LeaseLost
from bsfg.gate import Event, Gate, Mode
from bsfg.journey.handoff import Handoff
from bsfg.journey.receive import PullProgress
from bsfg.spark.calls import calls
from bsfg.spark.daemon import DAEMON_PID
from bsfg.spark.replicate.carrying import TaskPull
from bsfg.spark.replicate.plan import LEASE_TTL_MS, LinkTaskPlan

if TYPE_CHECKING:
    from bsfg.wire.adminclient import AdminClient
    from bsfg.wire.service import LeaseView, LinkReport


TELL_EVERY_SECONDS = 0.25
SILENT_SECONDS_MAX = 1.0
"""After this time a task asks after the gate although it has nothing to tell."""


@dataclass(frozen=True, slots=True)
class TurnTally:
    """What the turns of one stream achieved."""

    inserted: int = 0
    repeated: int = 0
    refused: int = 0
    backlog: int = 0
    lag_seconds: float | None = None

    def with_turn(self, progress: PullProgress) -> TurnTally:
        """Add a turn."""
        return TurnTally(
            self.inserted + progress.inserted,
            self.repeated + progress.repeated,
            self.refused + progress.refused_facts,
            progress.backlog,
            self.lag_seconds if progress.lag_seconds is None else progress.lag_seconds,
        )


class RemoteReporter:
    """Gathers what is to be told and tells it every so often, gate events and faults at once."""

    def __init__(self, admin: AdminClient, link: str, lease: str, mode: str) -> None:
        self._admin, self._link, self._lease = admin, link, lease
        self._gate = Gate(Mode(mode))
        self._urgent: list[LinkReport] = []
        self._news: dict[str, TurnTally] = {}
        self.totals: dict[str, TurnTally] = {}
        self._something = asyncio.Event()
        self._came_at = float("-inf")
        self.moves = True

    def may_move(self) -> bool:
        """Tell whether the task still has the lease."""
        return self.moves

    def gate(self) -> Gate:
        """Give the gate as it was last heard of, with what was told since."""
        return self._gate

    def tell(self, event: Event, reason: str = "") -> None:
        """Tell what happened to the gate, if it changes anything."""
        moved = self._gate.on(event, 0, reason)
        if moved.mode != self._gate.mode:
            self._gate = moved
            self._add(event=event, reason=reason)

    def hold(self, reason: str, stream: str = "", log_id: str = "") -> None:
        """Close the gate."""
        if self._gate.mode != Mode.HELD:
            code, _, detail = reason.partition(": ")
            self._gate = Gate(Mode.HELD, reason=reason)
            self._add(hold_code=code, hold_detail=detail, hold_stream=stream, hold_log_id=log_id)

    def report(self, stream: str, progress: PullProgress) -> None:
        """Add what a turn achieved."""
        self._news[stream] = self._news.get(stream, TurnTally()).with_turn(progress)
        self.totals[stream] = self.totals.get(stream, TurnTally()).with_turn(progress)

    def failed(self, code: str) -> None:
        """Count a turn that failed."""
        self._add(failure_code=code)

    def came(self) -> None:
        """Tell now and then that the sender gives something, though no turn ends: an artifact may take long."""
        now = time.monotonic()
        if now - self._came_at > SILENT_SECONDS_MAX:
            self._came_at = now
            self._add(event=Event.PEER_FOUND)

    def distrust(self, text: str | None) -> None:
        """The reason of the gate says it already."""

    async def run(self) -> None:
        """Tell what there is, until the task ends."""
        heard_at = time.monotonic()
        while True:
            try:
                if await self.flush() or time.monotonic() - heard_at > SILENT_SECONDS_MAX:
                    heard_at = time.monotonic()
            except BsfgError as error:
                # The lease is another's, or the node is away; the next turn finds that out by itself. What was gathered
                # waits, urgent or not: told again at once, it would be refused again at once.
                self.moves = self.moves and not isinstance(error, LeaseLost)
                await asyncio.sleep(TELL_EVERY_SECONDS)
            self._something.clear()
            if not self._urgent:
                try:
                    await asyncio.wait_for(self._something.wait(), TELL_EVERY_SECONDS)
                except TimeoutError:
                    if time.monotonic() - heard_at > SILENT_SECONDS_MAX and not self._news:
                        self._news.setdefault("", TurnTally())

    async def flush(self) -> bool:
        """Tell everything now; False when there was nothing."""
        told = False
        while self._urgent:
            gate = await self._admin.report_link(self._urgent[0])
            self._urgent.pop(0)
            self._heard(gate)
            told = True
        for stream in list(self._news):
            tally = self._news.pop(stream)
            try:
                self._heard(await self._admin.report_link(self._report(stream, tally)))
            except BsfgError:
                self._news.setdefault(stream, tally)
                raise
            told = True
        return told

    def _heard(self, gate: Gate) -> None:
        # What waits to be told will change the gate; until then what was told here counts, unless somebody holds it.
        if not self._urgent or gate.mode == Mode.HELD:
            self._gate = gate

    def _report(self, stream: str, tally: TurnTally) -> LinkReport:
        from bsfg.wire.service import LinkReport

        return LinkReport(
            link=self._link,
            stream=stream,
            backlog=tally.backlog,
            inserted=tally.inserted,
            repeated=tally.repeated,
            refused=tally.refused,
            lag_seconds=tally.lag_seconds,
            lease=self._lease,
        )

    def _add(self, **fields: object) -> None:
        report = self._report("", TurnTally())
        self._urgent.append(replace(report, **fields))  # type: ignore[arg-type]
        self._something.set()


HOLD_SECONDS_MIN, HOLD_SECONDS_MAX = 60.0, 180.0
"""How long a task moves a link before it lets the other one, and how long at most; facts wait at each change."""

WAIT_SECONDS = 5.0
AWAY_SECONDS = 0.5
KEEP_SECONDS = 1.5
SETTLE_SECONDS = 2.0

TURN, URGENT = 1, 2
"""What `LeaseView.wanted` means."""


@dataclass(frozen=True, slots=True)
class ShiftReceipt:
    """What a task has moved of one stream in one shift."""

    link: str
    stream: str
    inserted: int
    repeated: int
    refused: int
    backlog: int
    seconds: float


def orphaned() -> Callable[[], bool]:
    """Give what tells whether the process that started this one is gone: then nobody wants this task's work.

    It may have gone before this is asked for, so its number comes from itself where it is ours.
    """
    parent = int(os.environ.get(DAEMON_PID) or os.getppid())
    return lambda: os.getppid() != parent


def take_shift(plan: LinkTaskPlan, gone: Callable[[], bool] | None = None) -> list[ShiftReceipt]:
    """Wait for the lease and move the link for a while; give the receipts."""
    return calls().run(_take_shift(plan, gone or orphaned()))


async def _take_shift(plan: LinkTaskPlan, gone: Callable[[], bool]) -> list[ShiftReceipt]:
    from bsfg.wire.adminclient import AdminClient

    admin = AdminClient(calls().connection(plan.own))
    lease = await _leased(admin, plan, gone)
    if lease is None:
        return []
    since = time.monotonic()
    desk = await _move(plan, admin, lease, gone)
    seconds = time.monotonic() - since
    return [
        ShiftReceipt(plan.name, stream, done.inserted, done.repeated, done.refused, done.backlog, seconds)
        for stream, done in desk.totals.items()
        if stream
    ]


async def _leased(admin: AdminClient, plan: LinkTaskPlan, gone: Callable[[], bool]) -> LeaseView | None:
    """Wait for the lease, however long somebody else has it or the node is away."""
    while not gone():
        try:
            return await admin.acquire_lease(plan.name, plan.holder, LEASE_TTL_MS, wait_seconds=WAIT_SECONDS)
        except LeaseHeld as held:
            if held.details.get("holder") != plan.holder:
                await asyncio.sleep(AWAY_SECONDS)
        except BsfgError:
            await asyncio.sleep(AWAY_SECONDS)
    return None


async def _move(plan: LinkTaskPlan, admin: AdminClient, lease: LeaseView, gone: Callable[[], bool]) -> RemoteReporter:
    from bsfg.wire.client import BoundaryClient
    from bsfg.wire.reach import ConnectionDiagnosis

    own = BoundaryClient(calls().connection(plan.own))
    connection = calls().connection(plan.peer)
    connection.request_timeout_seconds = plan.link.request_timeout_seconds
    peer = BoundaryClient(connection)
    desk = RemoteReporter(admin, plan.name, lease.token, lease.mode)
    pulls = [TaskPull(plan, each, peer, own, admin, lease.token, desk.came) for each in plan.streams]
    watched = plan.peer.watched
    watched = watched if hasattr(watched, "files") else None
    reach = ConnectionDiagnosis(
        plan.link.expected_server,
        watched,
        connection,
        by_alternative_name=plan.by_alternative_name,
        vouch=plan.vouch(watched),
    )
    handoff = Handoff(plan.link, desk, pulls, note=_note, way=reach)
    telling = asyncio.create_task(desk.run())
    await handoff.start()
    try:
        await _keep(admin, plan, lease, desk, gone)
        await _settle(pulls)
    finally:
        await handoff.stop()
        telling.cancel()
        reach.close()
        peer.hang_up()
        with suppress(BsfgError):
            await asyncio.gather(*(pull.close() for pull in pulls))
        with suppress(BsfgError):
            await desk.flush()
        with suppress(BsfgError):
            await admin.release_lease(plan.name, lease.token)
    return desk


async def _keep(
    admin: AdminClient, plan: LinkTaskPlan, lease: LeaseView, desk: RemoteReporter, gone: Callable[[], bool]
) -> None:
    """Keep the lease until it is another's shift, or it is lost."""
    since = time.monotonic()
    while desk.may_move() and not gone():
        held_seconds = time.monotonic() - since
        ripe = held_seconds >= HOLD_SECONDS_MIN
        wait_seconds = min(KEEP_SECONDS, max(0.05, HOLD_SECONDS_MIN - held_seconds)) if not ripe else KEEP_SECONDS
        try:
            lease = await admin.renew_lease(
                plan.name, lease.token, LEASE_TTL_MS, wait_seconds=wait_seconds, seen=0 if ripe else TURN
            )
        except LeaseLost:
            desk.moves = False
            return
        except BsfgError:
            await asyncio.sleep(AWAY_SECONDS)
            continue
        held_seconds = time.monotonic() - since
        if lease.wanted == URGENT or held_seconds >= HOLD_SECONDS_MAX:
            return
        if lease.wanted == TURN and held_seconds >= HOLD_SECONDS_MIN:
            return


async def _settle(pulls: list[TaskPull]) -> None:
    """Give what was put a moment to be confirmed, so that the next task need not fetch it again."""
    with suppress(BsfgError, TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            for pull in pulls:
                await pull.settle()


def _note(event: str, **fields: Any) -> None:
    """Print what nobody expected; all else shows in the node's own log, metrics and gate."""
    error = fields.get("exc_info")
    if isinstance(error, BaseException):
        import traceback

        traceback.print_exception(error)


FORMAT = "bsfg-live"

RECEIPTS = pa.schema(
    [
        ("link", pa.string()),
        ("stream", pa.string()),
        ("inserted", pa.int64()),
        ("repeated", pa.int64()),
        ("refused", pa.int64()),
        ("backlog", pa.int64()),
        ("seconds", pa.float64()),
    ]
)


@dataclass(frozen=True)
class Shift(InputPartition):
    """One shift of one link."""

    plan: LinkTaskPlan


class LiveReader(DataSourceStreamReader):
    """Counts shifts."""

    def __init__(self, plan: Path) -> None:
        self._plan = plan

    def initialOffset(self) -> dict[str, Any]:
        """Begin to count."""
        return {"turn": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any = None) -> dict[str, Any]:
        """There is always one more shift."""
        return {"turn": int(start["turn"]) + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One task has the shift, however many shifts a restarted query believes it has missed."""
        return [Shift(LinkTaskPlan.read(self._plan))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Take the shift and give its receipts."""
        assert isinstance(partition, Shift)
        receipts = take_shift(partition.plan)
        yield pa.RecordBatch.from_pylist([asdict(receipt) for receipt in receipts], RECEIPTS)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing depends on it."""


class LiveSource(DataSource):
    """The source of live queries; its option ``plan`` names the file with the plan of the link."""

    @classmethod
    def name(cls) -> str:
        """Give the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Give the columns of receipts."""
        return from_arrow_schema(RECEIPTS)

    def streamReader(self, schema: StructType) -> LiveReader:
        """Give the reader."""
        return LiveReader(Path(self.options["plan"]))
