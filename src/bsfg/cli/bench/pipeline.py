"""`bsfg bench pipeline`: Spark between real nodes, against the node's own handoff and Spark without work."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from bsfg.cli.bench.store import Aim, measured_in, percentile, show_all, verdict
from bsfg.cli.common import flag, option
from bsfg.cli.output import console, examples, print_json

if TYPE_CHECKING:
    from bsfg.cli.bench.node_measure import BenchSamples

RATES = ("native_handoff", "spark_ceiling", "replay", "land", "audit")


def numbers_of(samples: BenchSamples) -> dict[str, Any]:
    """Give every number of one run by its stable name."""
    plan = samples.plan
    numbers: dict[str, Any] = {
        "facts": plan.facts,
        "object_bytes": plan.object_bytes,
        "rate": plan.rate,
        "live_seconds": plan.seconds,
        "sha256_per_second": median(samples.sha256_rates),
        **{f"{name}_per_second": rate.per_second for name, rate in samples.rates.items()},
        **samples.more,
        "live_lag_ms_p50": percentile(samples.lag_ms, 50),
        "live_lag_ms_p99": percentile(samples.lag_ms, 99),
        "live_lag_ms_max": max(samples.lag_ms),
    }
    numbers["replay_of_native"] = numbers["replay_per_second"] / numbers["native_handoff_per_second"]
    numbers["replay_of_ceiling"] = numbers["replay_per_second"] / numbers["spark_ceiling_per_second"]
    for who in ("driver", "worker"):
        start, end = numbers[f"{who}_rss_mb_start"], numbers[f"{who}_rss_mb_end"]
        numbers[f"{who}_rss_growth"] = end / start - 1 if start else 0.0
    parts = numbers["replay_us_per_fact_by_tenth"]
    numbers["replay_last_to_first_tenth"] = parts[-1] / parts[0] if parts and parts[0] else 0.0
    return numbers


def aims_of(numbers: dict[str, Any]) -> list[Aim]:
    """Hold the numbers against what is hoped for."""
    return [
        Aim("replay_of_native", numbers["replay_of_native"], 0.6, "of the node's own handoff"),
        Aim("replay_per_second", numbers["replay_per_second"], 100_000, "facts/s"),
        Aim("live_lag_ms_p50", numbers["live_lag_ms_p50"], 5.0, "ms", False),
        Aim("live_lag_ms_p99", numbers["live_lag_ms_p99"], 30.0, "ms", False),
        Aim("driver_rss_growth", numbers["driver_rss_growth"], 0.05, "from start to end", False),
        Aim("worker_rss_growth", numbers["worker_rss_growth"], 0.05, "from start to end", False),
        Aim("replay_last_to_first_tenth", numbers["replay_last_to_first_tenth"], 1.1, "cost per fact", False),
    ]


DEFAULT_FACTS = 1_000_000

EPILOG = examples(
    ("bsfg bench pipeline", "all of it, about six minutes"),
    ("bsfg bench pipeline --facts 10000000 --json", "a long backlog"),
    ("bsfg bench pipeline --seconds 20", "a short look at the lag"),
    ("bsfg bench pipeline --links 100 --seconds 30", "what many links cost, and nothing else"),
    ("bsfg bench pipeline --starts 3", "how long it takes until a command has done its first work"),
)


def pipeline(
    facts: Annotated[int, option("N", "How large the backlog is.", min=10_000)] = DEFAULT_FACTS,
    rate: Annotated[float, option("N", "Facts per second while lag is measured.", min=1)] = 1_000.0,
    seconds: Annotated[float, option("S", "How long lag is measured.", min=1)] = 180.0,
    links: Annotated[
        int | None,
        option(
            "N",
            "Measure so many links of one zone instead: memory, processes, processor time at rest, lag at 1,000 "
            "and 10,000 facts per second in total, and how long it takes until all of them move.",
            min=1,
        ),
    ] = None,
    starts: Annotated[
        int | None,
        option(
            "N",
            "Measure instead, so many times, how long commands take of which the start of Spark is the most: until the "
            "first fact is replicated, to audit one, to ingest five rows, to land a thousand facts.",
            min=1,
        ),
    ] = None,
    folder: Annotated[
        Path | None, option("D", "Where to put the temporary folder; this disk is measured.", "--dir")
    ] = None,
    json: Annotated[bool, flag("--json", "Print the numbers as JSON.")] = False,
) -> None:
    """Measure the pipeline: a backlog replayed on Spark, live lag, landing and audit, all with real nodes and TLS.

    Every fact counts when it is durable at the receiver. The same facts are moved by the node's own engine first, and
    Spark carries as many bytes without any node, so that the figures can be compared wherever they were measured.
    """
    if starts is not None:
        from bsfg.cli.bench.pipeline_measure import aims_of_starts, measure_starts, numbers_of_starts

        begun = measured_in(folder, lambda place: numbers_of_starts(measure_starts(place, starts)), aims_of_starts)
        print_json(begun) if json else show_starts(begun)
        return
    if links is not None:
        from bsfg.cli.bench import pipeline_links

        many = measured_in(folder, lambda place: pipeline_links.measure(place, links, seconds), pipeline_links.aims_of)
        print_json(many) if json else show_many(many)
        return
    from bsfg.cli.bench.node_measure import BenchPlan
    from bsfg.cli.bench.pipeline_measure import run

    plan = BenchPlan(facts, seconds=seconds, rate=rate)
    numbers = measured_in(folder, lambda place: numbers_of(run(place, plan)), aims_of)
    print_json(numbers) if json else show(numbers)


def show_starts(numbers: dict[str, Any]) -> None:
    """Print how long starts take beside what is hoped for."""
    from bsfg.cli.bench.pipeline_measure import aims_of_starts

    out, where = console(), numbers["machine"]
    out.print(verdict(aims_of_starts(numbers)))
    out.print(f"a bare session of PySpark that counts one row: {numbers['bare_seconds']:.1f} s")
    out.print(f"the middle of {numbers['rounds']} on {where['file_system']}, {where['cpus']} CPUs")


def show_many(numbers: dict[str, Any]) -> None:
    """Print what many links cost beside what is hoped for."""
    from bsfg.cli.bench.pipeline_links import RATES, aims_of

    out, where = console(), numbers["machine"]
    out.print(verdict(aims_of(numbers)))
    for rate, suffix in RATES.items():
        p50, p99 = (numbers[f"lag_ms_{name}{suffix}"] for name in ("p50", "p99"))
        out.print(f"lag at {rate:,} facts/s in total: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    out.print(f"{numbers['links']} links on {where['file_system']}, {where['cpus']} CPUs, in {numbers['seconds']} s")


def show(numbers: dict[str, Any]) -> None:
    """Print what was measured beside what is hoped for."""
    show_all(
        numbers,
        [(name, numbers[f"{name}_per_second"]) for name in RATES],
        aims_of(numbers),
        f"lag at {numbers['rate']:g} facts/s for {numbers['live_seconds']:g} s: "
        f"p50 {numbers['live_lag_ms_p50']:.1f} ms, "
        f"p99 {numbers['live_lag_ms_p99']:.1f} ms, at most {numbers['live_lag_ms_max']:.0f} ms",
    )
