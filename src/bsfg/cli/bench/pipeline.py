"""`bsfg bench pipeline`: Spark between real nodes, against the node's own handoff and against Spark without work."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bsfg.cli.bench.store import temporary, verdict, warn_of_memory
from bsfg.cli.output import console, examples, print_json, progress_bar, table

DEFAULT_FACTS = 1_000_000
PHASES = 8

EPILOG = examples(
    ("bsfg bench pipeline", "all of it, about six minutes"),
    ("bsfg bench pipeline --facts 10000000 --json", "a long backlog"),
    ("bsfg bench pipeline --seconds 20", "a short look at the lag"),
)


def pipeline(
    facts: Annotated[int, typer.Option(metavar="N", min=10_000, help="How large the backlog is.")] = DEFAULT_FACTS,
    rate: Annotated[float, typer.Option(metavar="N", min=1, help="Facts per second while lag is measured.")] = 1_000.0,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="How long lag is measured.")] = 180.0,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="D", help="Where to put the temporary folder; this disk is measured."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure the pipeline: a backlog replayed on Spark, live lag, landing and audit, all with real nodes and TLS.

    Every fact counts when it is durable at the receiver. The same facts are moved by the node's own engine first, and
    Spark carries as many bytes without any node, so that the figures can be compared wherever they were measured.
    """
    from bsfg.cli.bench.node import ended_by_signals
    from bsfg.cli.bench.pipeline_measure import PipelinePlan
    from bsfg.cli.bench.pipeline_results import results

    plan = PipelinePlan(facts, seconds, rate)
    started = time.perf_counter()
    with ended_by_signals():
        place = temporary(folder)
        try:
            samples = _measured(place, plan)
            numbers = results(samples, place, time.perf_counter() - started)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    if json:
        print_json(numbers)
    else:
        show(numbers)


def _measured(place: Path, plan: Any) -> Any:
    from bsfg.cli.bench.pipeline_measure import run
    from bsfg.cli.bench.pipeline_zones import PipelineSite
    from bsfg.cli.pipeline.running import spark_session
    from bsfg.spark.replicate.driver import local_master

    site = PipelineSite(place)
    with progress_bar("starting Spark") as bar:
        task = bar.task_ids[0]
        bar.update(task, total=PHASES)
        with spark_session("bsfg bench", local_master(1), {}, place / "spark.log") as spark:
            try:
                return run(site, spark, plan, lambda phase: bar.update(task, description=phase, advance=1))
            finally:
                site.stop()


def show(numbers: dict[str, Any]) -> None:
    """Print what was measured beside what is hoped for."""
    from bsfg.cli.bench.pipeline_results import RATES, aims_of

    out = console()
    rates = table("", "facts/s", "of SHA-256", right=("facts/s", "of SHA-256"))
    rates.add_row("SHA-256 of the objects", f"{numbers['sha256_per_second']:,.0f}", "1")
    for name in RATES:
        rate = numbers[f"{name}_per_second"]
        rates.add_row(name, f"{rate:,.0f}", f"{rate / numbers['sha256_per_second']:.3f}")
    out.print(rates)
    out.print(verdict(aims_of(numbers)))
    out.print(
        f"lag at {numbers['rate']:g} facts/s for {numbers['live_seconds']:g} s: "
        f"p50 {numbers['live_lag_ms_p50']:.1f} ms, "
        f"p99 {numbers['live_lag_ms_p99']:.1f} ms, at most {numbers['live_lag_ms_max']:.0f} ms"
    )
    where = numbers["machine"]
    out.print(f"{numbers['facts']:,} facts on {where['file_system']}, {where['cpus']} CPUs, in {numbers['seconds']} s")
    warn_of_memory(where)
