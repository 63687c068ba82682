"""`bsfg bench store`: the embedded log against this machine's SHA-256 and its disk, or a server against itself."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rich.table import Table
from rich.text import Text

from bsfg.cli.common import flag, option, orderly_end, run
from bsfg.cli.output import console, examples, print_json, progress_bar, table
from bsfg.errors import ExtraMissing, InvalidArgument

if TYPE_CHECKING:
    from bsfg.cli.bench.results import Aim

DEFAULT_FACTS = 400_000

Numbers = dict[str, Any]
Samples = TypeVar("Samples")

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
    from bsfg.cli.bench.results import aims_of, finished

    if backend in ("postgres", "jetstream"):
        _show_database(_database(backend, facts, dsn), json)
        return
    if backend != "log" or dsn is not None:
        raise InvalidArgument(
            f"--backend {backend} cannot be measured; log, postgres and jetstream can, --dsn belongs to the last two"
        )
    measure = partial(_measured, facts=facts)
    numbers = measured_in(folder, measure, lambda found, place, seconds: finished(found, aims_of, place, seconds))
    print_json(numbers) if json else show(numbers)


def measured_in(
    folder: Path | None, measure: Callable[[Path], Samples], results: Callable[[Samples, Path, float], Numbers]
) -> Numbers:
    """Measure in a folder of our own, so that nothing of anybody else's is ever removed, and give the numbers."""
    started = time.perf_counter()
    with orderly_end():
        try:
            place = Path(tempfile.mkdtemp(prefix="bsfg-bench-", dir=folder))
        except OSError as error:
            raise InvalidArgument(f"cannot make a folder in {folder}: {error.strerror}") from None
        try:
            return results(measure(place), place, time.perf_counter() - started)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _database(backend: str, facts: int, dsn: str | None) -> Numbers:
    """Measure a server, or one of our own."""
    from bsfg.cli.bench import servers
    from bsfg.cli.bench.results import finished

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


def _show_database(numbers: dict[str, Any], json: bool) -> None:
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
    from bsfg.cli.bench.results import aims_of

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
