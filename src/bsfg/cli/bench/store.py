"""`bsfg bench store`: the embedded log against this machine's SHA-256 and its disk, or a server against itself."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from rich.table import Table
from rich.text import Text

import bsfg
from bsfg.cli.common import flag, option, orderly_end, run
from bsfg.cli.doctor.machine import file_system
from bsfg.cli.output import console, examples, print_json, progress_bar, table
from bsfg.errors import ExtraMissing, InvalidArgument

DEFAULT_FACTS = 400_000

Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Aim:
    """What is hoped for in one respect, and what was measured; ``at_least`` tells the direction."""

    name: str
    measured: float
    aim: float
    unit: str
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the measurement reaches the aim."""
        return self.measured >= self.aim if self.at_least else self.measured <= self.aim


AimsOf = Callable[[Numbers], list[Aim]]


def finished(numbers: Numbers, aims_of: AimsOf, folder: Path, seconds: float) -> Numbers:
    """Round the numbers and put to them what they are held against and where they were measured."""
    shown = {name: rounded(value) for name, value in numbers.items()}
    aims = [
        {
            "name": aim.name,
            "measured": aim.measured,
            "aim": f"{'>=' if aim.at_least else '<='} {aim.aim:g}",
            "met": aim.met,
        }
        for aim in aims_of(shown)
    ]
    return shown | {"aims": aims, "seconds": round(seconds, 1), "machine": machine(folder)}


def aims_of(numbers: Numbers) -> list[Aim]:
    """Hold the numbers against what is hoped for."""
    aims = [
        Aim("append_ratio", numbers["append_ratio"], 0.2, "of SHA-256"),
        Aim("put_if_absent_ratio", numbers["put_if_absent_ratio"], 0.2, "of SHA-256"),
        Aim("duplicates_ratio", numbers["duplicates_ratio"], 0.1, "of SHA-256"),
        Aim("replay_ratio", numbers["replay_ratio"], 1.0, "of SHA-256"),
        Aim("single_append_ms_p50", numbers["single_append_ms_p50"], numbers["single_append_limit_ms"], "ms", False),
        Aim("reopen_seconds", numbers["reopen_seconds"], 5.0, "s", False),
        Aim("reopen_trickled_seconds", numbers["reopen_trickled_seconds"], 2.0, "s", False),
        Aim("bytes_per_trickled_fact", numbers["bytes_per_trickled_fact"], 500.0, "bytes", False),
        Aim("index_bytes_per_key", numbers["index_bytes_per_key"], 24.0, "bytes", False),
    ]
    if numbers["last_to_first_million_ratio"] is not None:
        aims.append(Aim("last_to_first_million_ratio", numbers["last_to_first_million_ratio"], 0.7, "of the first"))
    return aims


def percentile(samples: list[float], percent: float) -> float:
    """Give the value below which so many percent of the samples lie."""
    return float(np.percentile(samples, percent))


def rounded(value: Any) -> Any:
    """Keep what a measurement can mean: four digits."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine(folder: Path) -> Numbers:
    """Describe where this was measured, as far as it matters."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "file_system": file_system(folder) or "unknown",
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "bsfg": bsfg.__version__,
    }


EPILOG = examples(
    ("bsfg bench store", "a first impression, well under a minute"),
    ("bsfg bench store --facts 10000000 --json > bench.json", "how it is with ten million keys"),
    ("bsfg bench store --dir data-disk", "measure another disk"),
    ("bsfg bench store --backend postgres --dsn 'host=db.example dbname=plant'", "measure a zone's database"),
    ("bsfg bench store --backend jetstream --json", "measure JetStream, on a server of its own"),
)


def store(
    facts: Annotated[int, option("N", "How many facts to append.", min=1)] = DEFAULT_FACTS,
    folder: Annotated[
        Path | None, option("D", "Where to put the temporary data folder; this disk is measured.", "--dir")
    ] = None,
    backend: Annotated[str, option("NAME", "What to measure: log, postgres or jetstream.")] = "log",
    dsn: Annotated[
        str | None,
        option("DSN", "With postgres or jetstream: the server; without, one of its own in a temporary folder."),
    ] = None,
    json: Annotated[bool, flag("--json", "Print the numbers as JSON.")] = False,
) -> None:
    """Measure the embedded log: append, put-if-absent, repeats, replay, latency, and coming back after a kill.

    Facts have 200-byte JSON objects and come in prebuilt batches of 2,000. Everything a producer waits for is timed:
    validation, the canonical check, digest, dedupe, hash chain and fdatasync. The yardstick is hashlib's SHA-256 over
    the same objects on the same machine, so that results of different machines can be compared. The data folder is
    removed at the end.

    With --backend postgres the yardstick is the same server, used by hand: COPY into a temporary table and INSERT … ON
    CONFLICT, in turns with the storage. It works in a schema of its own, which is removed at the end. With --backend
    jetstream it is atomic batches of messages with a subject for each key, in streams that are removed likewise.
    """
    if backend in ("postgres", "jetstream"):
        _show_database(_database(backend, facts, dsn), json)
        return
    if backend != "log" or dsn is not None:
        raise InvalidArgument(
            f"--backend {backend} cannot be measured; log, postgres and jetstream can, --dsn belongs to the last two"
        )
    numbers = measured_in(folder, lambda place: _measured(place, facts), aims_of)
    print_json(numbers) if json else show(numbers)


def measured_in(folder: Path | None, measure: Callable[[Path], Numbers], aims_of: AimsOf) -> Numbers:
    """Measure in a folder of our own, so that nothing of anybody else's is ever removed, and give the numbers."""
    started = time.perf_counter()
    with orderly_end():
        try:
            place = Path(tempfile.mkdtemp(prefix="bsfg-bench-", dir=folder))
        except OSError as error:
            raise InvalidArgument(f"cannot make a folder in {folder}: {error.strerror}") from None
        try:
            numbers = measure(place)
            return finished(numbers, aims_of, place, time.perf_counter() - started)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _database(backend: str, facts: int, dsn: str | None) -> Numbers:
    """Measure a server, or one of our own."""
    from bsfg.cli.bench import servers

    started = time.perf_counter()
    measure = servers.run_postgres if backend == "postgres" else servers.run_jetstream
    with orderly_end(), steps(servers.planned(facts)) as step:
        try:
            numbers = {"backend": backend, **run(measure(dsn, facts, step))}
        except ImportError as error:
            raise ExtraMissing.behind(error, f"--backend {backend}") or error from None
    return finished(numbers, servers.aims_of, Path(tempfile.gettempdir()), time.perf_counter() - started)


@contextmanager
def steps(total: int, text: str = "starting") -> Iterator[Callable[..., None]]:
    """Show progress while a block runs; give what is told of the phase and, unless it is one, how many are done."""
    with progress_bar(text) as bar:
        bar.update(bar.task_ids[0], total=total)
        yield lambda phase, done=1: bar.update(bar.task_ids[0], description=phase, advance=done)


def _show_database(numbers: Numbers, json: bool) -> None:
    from bsfg.cli.bench.servers import aims_of

    if json:
        print_json(numbers)
        return
    out = console()
    rates = table("", "facts/s", "one, ms", right=("facts/s", "one, ms"))
    for name, rate, single in (("by hand", "direct", "direct_single"), ("append", "append", "single_append")):
        rates.add_row(name, f"{numbers[f'{rate}_per_second']:,.0f}", f"{numbers[f'{single}_ms_p50']:.2f}")
    for name in ("duplicates", "replay"):
        rates.add_row(name, f"{numbers[f'{name}_per_second']:,.0f}", "")
    out.print(rates)
    out.print(verdict(aims_of(numbers)))
    where = f"{numbers['facts']:,} facts in {numbers['backend']}, {numbers['machine']['cpus']} CPUs"
    out.print(f"{where}, in {numbers['seconds']} s")


def _measured(place: Path, facts: int) -> Numbers:
    from bsfg.cli.bench import measure
    from bsfg.cli.bench.measure import reopen_seconds, trickled

    with steps(measure.planned(facts)) as step:
        numbers = run(measure.run(place / "data", facts, step))
        step("killing and reopening", 0)
        numbers["reopen_seconds"] = reopen_seconds(place / "data")
        step("one by one, killing and reopening", 0)
        size, seconds = trickled(place / "trickled", facts)
    return numbers | {"reopen_trickled_seconds": seconds, "bytes_per_trickled_fact": size}


def show(numbers: Numbers) -> None:
    """Print what was measured beside what is hoped for."""
    names = ("append", "put_if_absent", "duplicates", "replay", "concurrent_append")
    rates = [(name, numbers[f"{name}_per_second"]) for name in names]
    for number, rate in enumerate(numbers["append_per_second_by_million"], 1):
        if len(numbers["append_per_second_by_million"]) > 1:
            rates.append((f"  append, million {number}", rate))
    one = f"one append: p50 {numbers['single_append_ms_p50']:.2f} ms, p99 {numbers['single_append_ms_p99']:.2f} ms; "
    show_all(numbers, rates, aims_of(numbers), f"{one}bare fdatasync: p50 {numbers['fdatasync_ms_p50']:.2f} ms")


def show_all(
    numbers: Numbers,
    rates: Iterable[tuple[str, float]],
    aims: Sequence[Aim],
    *lines: str,
    cost: Callable[[str], str] | None = None,
) -> None:
    """Print rates and what each costs, what was hoped for, and where it was measured."""
    out, sha256 = console(), numbers["sha256_per_second"]
    more = ("processor time per fact",) if cost else ()
    rows = table("", "facts/s", "of SHA-256", *more, right=("facts/s", "of SHA-256"))
    rows.add_row("SHA-256 of the objects", f"{sha256:,.0f}", "1")
    for name, rate in rates:
        rows.add_row(name, f"{rate:,.0f}", f"{rate / sha256:.3f}", *((cost(name),) if cost else ()))
    out.print(rows)
    out.print(verdict(aims))
    where = numbers["machine"]
    seen = f"{numbers['facts']:,} facts on {where['file_system']}, {where['cpus']} CPUs, in {numbers['seconds']} s"
    for line in (*lines, seen):
        out.print(line)
    if where["file_system"] in ("tmpfs", "ramfs"):
        text = "This folder is memory: fdatasync costs nothing here. Give --dir on a real disk."
        out.print(Text(text, "yellow"))


def verdict(aims: Sequence[Aim]) -> Table:
    """Lay out what was measured beside what is hoped for."""
    rows = table("", "measured", "aim", "", right=("measured", "aim"))
    for aim in aims:
        mark = Text("✓", "green") if aim.met else Text("✗", "red")
        sign = "≥" if aim.at_least else "≤"
        rows.add_row(aim.name, f"{aim.measured:.4g}", f"{sign} {aim.aim:.4g} {aim.unit}", mark)
    return rows
