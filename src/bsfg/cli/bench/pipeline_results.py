"""From the samples of a pipeline to numbers with names, and from numbers to a verdict."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bsfg.cli.bench.pipeline_measure import PipelineSamples, numbers_of
from bsfg.cli.bench.results import Aim, finished, percentile

RATES = ("native_handoff", "spark_ceiling", "replay", "land", "audit")


def results(samples: PipelineSamples, folder: Path, seconds: float) -> dict[str, Any]:
    """Give every number of one run by its stable name."""
    plan = samples.plan
    numbers: dict[str, Any] = {
        "facts": plan.facts,
        "object_bytes": plan.object_bytes,
        "rate": plan.rate,
        "live_seconds": plan.seconds,
        "sha256_per_second": median(samples.sha256_rates),
        **numbers_of(samples),
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
    return finished(numbers, aims_of, folder, seconds)


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
