"""The files that one fact passes, recorded in real nodes: which, how many calls, how often from one package to another.

`make trace` starts the nodes of two zones under mutual TLS, lets one fact through so that everything is open and
imported, and records the second one: once with the native engine, once with what a live task on Spark runs (without
Spark itself). Every process writes down each entry into a file of the product, with the leg of the journey that it
belongs to. A leg begins at a door, a function of `DOORS`, and takes along the tasks and threads that begin behind it.
What belongs to no leg (upkeep, leases, looking at gates) is not the fact's and does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import dis
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import bsfg
from bsfg.cli.app import run
from bsfg.cli.zones import LoopbackSite, LoopbackZone, leash

if TYPE_CHECKING:
    from bsfg.sdk.producer import Producer
    from bsfg.wire.adminclient import AdminClient

ROOT = Path(__file__).parents[1]
PRODUCT = Path(bsfg.__file__).parent
BESIDE = "beside"
STEPS = ("serve", "pull", "receive", "confirm")
LEGS = ("append", *STEPS, "truncate")
DOORS = {
    ("node/server.py", "append_fact"): "append",
    ("node/server.py", "append_facts"): "append",
    ("node/server.py", "fetch_facts"): "serve",
    ("node/server.py", "follow_facts"): "serve",
    ("node/server.py", "fetch_frames"): "serve",
    ("journey/handoff.py", "_loop"): "pull",
    ("journey/receive.py", "judged"): "receive",
    ("journey/receive.py", "store"): "receive",
    ("spark/replicate/carrying.py", "judge"): "receive",
    ("spark/replicate/carrying.py", "send"): "receive",
    ("spark/replicate/carrying.py", "_outcome"): "receive",
    ("node/server.py", "put_facts"): "receive",
    ("journey/pull.py", "_confirm"): "confirm",
    ("node/adminserver.py", "remember_peer"): "confirm",
    ("node/server.py", "confirm_receipt"): "confirm",
    ("node/server.py", "confirm_receipts"): "confirm",
    ("node/upkeep.py", "look"): BESIDE,
    ("node/upkeep.py", "enforce_retention"): "truncate",
}
"""Where legs begin. Inside a door another one may open; behind it the first one goes on."""


class Entry(NamedTuple):
    """One entry into a file, by a call or by a coroutine that goes on; ``caller`` is the file of ours it came from."""

    leg: str
    at_ns: int
    file: str
    function: str
    caller: str
    is_call: bool


# Recording, in every process concerned.


@dataclass(slots=True, eq=False)
class Strand:
    """What runs under one leg: a task, a thread's work, or the part of either behind a door."""

    task: object
    parent: Strand | None
    leg: str | None = None

    def found(self) -> str | None:
        """Give the leg, or that of whoever began it."""
        return self.leg or (self.parent.found() if self.parent is not None else None)


_here: contextvars.ContextVar[Strand | None] = contextvars.ContextVar("trace", default=None)


class OpenDoors(threading.local):
    """The doors that a thread has gone through and not come back from, each with what it was before."""

    def __init__(self) -> None:
        self.all: list[tuple[FrameType, Strand]] = []


class Recorder:
    """Writes down what is entered; what belongs to no leg belongs to ``otherwise``."""

    def __init__(self, otherwise: str = BESIDE) -> None:
        self._otherwise = otherwise
        self._seen: list[tuple[Strand, Entry]] = []
        self._doors = OpenDoors()

    def install(self) -> None:
        """Watch this thread and all that begin later."""
        threading.setprofile(self._hook)
        sys.setprofile(self._hook)

    def remove(self) -> None:
        """Watch this thread no more, nor those that begin later."""
        threading.setprofile(None)
        sys.setprofile(None)

    def entries(self) -> list[Entry]:
        """Give what belongs to a leg, in order."""
        found = (each._replace(leg=strand.found() or self._otherwise) for strand, each in self._seen)
        return [each for each in found if each.leg != BESIDE]

    def _hook(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return":
            doors = self._doors.all
            if doors and doors[-1][0] is frame:
                _here.set(doors.pop()[1])
        elif event == "call" and (file := _file(frame.f_code)) is not None:
            how = _how(frame)
            if how is not None:
                self._entered(frame, file, is_call=how)

    def _entered(self, frame: FrameType, file: str, *, is_call: bool) -> None:
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        strand = _here.get()
        if strand is None or strand.task is not task:
            strand = Strand(task, strand)
            _here.set(strand)
        function = frame.f_code.co_name
        leg = DOORS.get((file, function))
        if leg is not None:
            self._doors.all.append((frame, strand))
            if strand.found() is None:
                strand.leg = leg  # what a task did on its way to the door belongs to it
            strand = Strand(task, strand, leg)
            _here.set(strand)
        # Which leg it is shows later, when a task has come to a door.
        self._seen.append((strand, Entry("", time.monotonic_ns(), file, function, _caller(frame), is_call)))


@cache
def _product_file(path: str) -> str | None:
    return Path(path).relative_to(PRODUCT).as_posix() if Path(path).is_relative_to(PRODUCT) else None


def _file(code: CodeType) -> str | None:
    """Name the product's file of some code, None for what is nobody's to read: other code, comprehensions, modules."""
    is_named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
    return _product_file(code.co_filename) if is_named else None


def _how(frame: FrameType) -> bool | None:
    """Tell whether a frame begins (true), goes on after a wait (false), or is only being made (none)."""
    code = frame.f_code
    if not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return True
    return None if frame.f_lasti < 0 else frame.f_lasti <= _first_resume(code)


@cache
def _first_resume(code: CodeType) -> int:
    return next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")


def _caller(frame: FrameType) -> str:
    found = frame.f_back
    while found is not None:
        file = _file(found.f_code)
        if file is not None:
            return file
        found = found.f_back
    return ""


def keep_legs_in_threads() -> None:
    """Let work that is handed to a thread keep the leg of whoever hands it over, as `asyncio.to_thread` does."""
    from bsfg.stores.shared.committer import Workers

    run, submit = Workers.run, ThreadPoolExecutor.submit

    def run_here(self: Workers, work: Callable[[], None]) -> None:
        context = contextvars.copy_context()
        run(self, lambda: context.run(work))

    def submit_here(self: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, contextvars.copy_context().run, work, *args, **kwargs)

    for owner, name, here in ((Workers, "run", run_here), (ThreadPoolExecutor, "submit", submit_here)):
        setattr(owner, name, here)


def run_recorded(kind: str) -> None:
    """Be one of the processes, in its folder, and write down what is entered until it is stopped."""
    from bsfg.node import upkeep  # what is imported before it is watched costs half the time

    recorder = Recorder()
    keep_legs_in_threads()
    leash()
    recorder.install()
    if kind == TASK:
        _run_task(Path("zone.toml"), Path(f"{kind}-ready"))
    else:
        if kind == SENDER:
            upkeep.RETENTION_EVERY = 1  # nobody wants to wait for a minute
        run(["node", "-c", "zone.toml", "--ready-file", f"{kind}-ready"])
    Path(f"{kind}.json").write_text(json.dumps(recorder.entries()), encoding="utf-8")


def _run_task(config: Path, ready: Path) -> None:
    from bsfg.config import load
    from bsfg.sdk.endpoint import Endpoint
    from bsfg.spark.calls import NodeAccess
    from bsfg.spark.replicate.plan import plan_of, spread
    from bsfg.spark.replicate.shift import take_shift

    stops: list[int] = []  # an event has a lock, on which a signal that interrupts another would wait for ever
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    way = Endpoint.from_config(config, role="pipeline")
    own = NodeAccess(way.address, str(way.ca), str(way.certificate), str(way.key), way.server_name)
    plan = plan_of(load(config), LINK, own, "trace")
    ready.write_text("{}", encoding="utf-8")
    [bundle] = spread([plan], 1, own, plan.holder).bundles
    take_shift(bundle, lambda: bool(stops))


# The zones.

SENDER, RECEIVER, TASK = "plant", "enterprise", "task"
LINK, STREAM = "from-plant", "operational"
RETENTION_SECONDS = 5
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.05
SETTLE_SECONDS = 0.5
"""After the frontier has moved the receiver still writes down that it knows."""

UPKEEP_NS = 800_000_000
"""A little less than lies between two truncations."""

_REST = f"""
[storage]
reserve = "1MiB"
[streams.{STREAM}]
retention = "{RETENTION_SECONDS}s"
"""


class Recorded(LoopbackZone):
    """A process that writes down what is entered: the node of a zone, or a task that moves its link."""

    def command(self, ready: str) -> list[str]:
        """Run this module, which lies beside the product."""
        paths = (ROOT, PRODUCT.parent, os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(str(path) for path in paths if path)
        return ["env", f"PYTHONPATH={path}", sys.executable, "-m", "tools.trace", "--child", self.name]

    def entries(self) -> list[Entry]:
        """Stop it and give what it wrote down."""
        self.stop()
        return [Entry(*each) for each in json.loads((self.folder / f"{self.name}.json").read_bytes())]


@contextmanager
def running(root: Path, engine: str | None) -> Iterator[list[Recorded]]:
    """Run two zones, the receiver only where there is an engine, and give their processes, the sender first."""
    site = LoopbackSite(root, Recorded, SENDER, {RECEIVER: engine or ""}, _REST)
    processes = site.zones[: 1 if engine is None else 2]
    try:
        for zone in processes:
            site.start(zone)
        if engine == "spark":
            processes.append(Recorded(TASK, site.receivers[0].folder))
            processes[-1].start()
        yield processes
    finally:
        for each in reversed(processes):
            each.stop()


# One fact.


async def record(engine: str | None, *, to_the_end: bool = False) -> list[Entry]:
    """Let a fact through the zones and give what it entered; without an engine it is appended and no more."""
    from bsfg.sdk.endpoint import Endpoint
    from bsfg.sdk.producer import Producer
    from bsfg.wire.adminclient import AdminClient

    recorder, spans = Recorder("append"), Spans()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), engine) as processes:
        way = Endpoint.from_config(processes[0].folder / "zone.toml", role="crowd")
        recorder.install()
        try:
            with Producer(way, stream=STREAM, from_zone=SENDER, to_zone=RECEIVER) as producer:
                async with AdminClient(way.connect().connection) as admin:
                    for _ in range(2):  # the first one is for what happens but once
                        await spans.follow(producer, admin, moves=engine is not None)
                    if to_the_end:
                        await spans.see_removed(admin)
        finally:
            recorder.remove()
        elsewhere = [entry for each in reversed(processes) for entry in each.entries()]
    return spans.cut(recorder.entries(), elsewhere)


@dataclass
class Spans:
    """When the last fact was on its way, on the clock that all processes of a machine share."""

    offset: int = -1
    begun_ns: int = 0
    appended_ns: int = 0
    confirmed_ns: int = 0
    removed_ns: int = 0

    async def follow(self, producer: Producer, admin: AdminClient, *, moves: bool) -> None:
        """Append a fact, and where it ``moves`` wait until its sender knows that it has arrived."""
        from bsfg.fact import Fact

        number, self.begun_ns = self.offset + 1, time.monotonic_ns()
        fact = Fact.of("press:4", "temperature", {"celsius": 180 + number})
        self.offset = producer.append(fact, message_id=f"press:4/{number}").offset or 0
        self.appended_ns = time.monotonic_ns()
        while moves and (await admin.frontier(STREAM)).frontier < self.offset:
            self._look_at_the_time(self.begun_ns)
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)
        self.confirmed_ns = time.monotonic_ns()

    async def see_removed(self, admin: AdminClient) -> None:
        """Wait until the fact has left the sender's buffer."""
        while (await admin.frontier(STREAM)).start <= self.offset:
            self._look_at_the_time(self.confirmed_ns)
            await asyncio.sleep(LOOK_SECONDS)
        self.removed_ns = time.monotonic_ns()

    def cut(self, own: list[Entry], elsewhere: list[Entry]) -> list[Entry]:
        """Leave out what came before and after the fact, and of the truncations all but the one that removed it."""
        spans = {"truncate": (self.removed_ns - UPKEEP_NS, self.removed_ns)}
        rest = (self.begun_ns, self.confirmed_ns)
        found = [each for each in own if self.begun_ns <= each.at_ns <= self.appended_ns]
        for each in elsewhere:
            first_ns, last_ns = spans.get(each.leg, rest)
            if first_ns <= each.at_ns <= last_ns:
                found.append(each)
        return sorted(found, key=lambda each: (LEGS.index(each.leg), each.at_ns))

    def _look_at_the_time(self, since_ns: int) -> None:
        if time.monotonic_ns() - since_ns > WAIT_SECONDS * 1e9:
            raise SystemExit("trace: the fact did not get through")


# What it comes to.


@dataclass(frozen=True)
class Leg:
    """The figures of one leg, and its files with what is entered of them, in order.

    ``changes`` counts the pairs of files of which one calls the other in another package.
    """

    engine: str
    leg: str
    files: dict[str, list[str]]
    calls: int
    changes: int

    @staticmethod
    def of(engine: str, leg: str, entries: list[Entry]) -> Leg:
        """Count."""
        files: dict[str, dict[str, None]] = {}
        for each in entries:
            files.setdefault(each.file, {})[each.function] = None
        pairs = {(each.caller, each.file) for each in entries if each.is_call and each.caller}
        changes = sum(package(caller) != package(file) for caller, file in pairs)
        named = {file: list(functions) for file, functions in files.items()}
        return Leg(engine, leg, named, sum(each.is_call for each in entries), changes)


def package(file: str) -> str:
    """Name the package of a file; what lies beside the packages are the values."""
    first, slash, _ = file.partition("/")
    return first if slash else "values"


def legs_of(engine: str, entries: list[Entry], legs: Iterable[str]) -> list[Leg]:
    """Count every leg that must be there."""
    found = [Leg.of(engine, leg, [each for each in entries if each.leg == leg]) for leg in legs]
    if empty := [each.leg for each in found if not each.files]:
        raise SystemExit(
            f"trace: nothing was entered for {', '.join(empty)}: do the doors in tools/trace.py still exist?"
        )
    return found


def trace(*, append_only: bool = False) -> list[Leg]:
    """Record the whole way with both engines, or only what an append enters."""
    if append_only:
        return legs_of("any", asyncio.run(record(None)), ["append"])
    native = asyncio.run(record("native", to_the_end=True))
    spark = asyncio.run(record("spark"))
    spark = [each for each in spark if each.leg in STEPS]
    append, truncate = ([each for each in native if each.leg == leg] for leg in ("append", "truncate"))
    return [
        *legs_of("any", append, ["append"]),
        *legs_of("native", native, STEPS),
        *legs_of("spark", spark, STEPS),
        *legs_of("any", truncate, ["truncate"]),
        Leg.of("native", "whole way", native),
        Leg.of("spark", "whole way", [*append, *spark, *truncate]),
    ]


def show(legs: list[Leg], *, verbose: bool) -> None:
    """Print the table, and with ``verbose`` the files and functions of each leg as they are first entered."""
    print(f"{'leg':10} {'engine':7} {'files':>6} {'calls':>6} {'changes of package':>19}")
    for each in legs:
        print(f"{each.leg:10} {each.engine:7} {len(each.files):>6} {each.calls:>6} {each.changes:>19}")
    for each in legs if verbose else ():
        if each.leg != "whole way":
            print(f"\n{each.leg} ({each.engine})")
            print("\n".join(f"  {file:28} {', '.join(functions)}" for file, functions in each.files.items()))


def main(args: list[str]) -> None:
    """Run what the command line asks for."""
    if args[:1] == ["--child"]:
        run_recorded(args[1])
        return
    parser = argparse.ArgumentParser(prog="tools.trace", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="list the files and functions of each leg, as first entered"
    )
    parser.add_argument("--json", action="store_true", help="print everything for a program")
    parser.add_argument("--append", action="store_true", help="record the first leg alone")
    wanted = parser.parse_args(args)
    legs = trace(append_only=wanted.append)
    if wanted.json:
        print(json.dumps([vars(each) for each in legs], indent=2))
    else:
        show(legs, verbose=wanted.verbose)


if __name__ == "__main__":
    main(sys.argv[1:])
