"""From the samples of a node to numbers with names, and from numbers to a verdict."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bsfg.cli.bench.node_measure import NodeSamples
from bsfg.cli.bench.results import Aim, finished, percentile

RATES = ("append_batches", "append_facts", "handoff")


def results(samples: NodeSamples, folder: Path, seconds: float) -> dict[str, Any]:
    """Give every number of one run by its stable name."""
    plan, rates = samples.plan, samples.rates
    sha256 = median(samples.sha256_rates)
    floor_ms, fdatasync_ms = percentile(samples.floor_ms, 50), percentile(samples.fdatasync_ms, 50)
    numbers: dict[str, Any] = {
        "facts": plan.facts,
        "object_bytes": plan.object_bytes,
        "clients": plan.clients,
        "rate": plan.rate,
        "sha256_per_second": sha256,
        **{f"{name}_per_second": rates[name].per_second for name in RATES},
        "append_ms_p50": percentile(samples.append_ms, 50),
        "append_ms_p99": percentile(samples.append_ms, 99),
        "rpc_floor_ms_p50": floor_ms,
        "fdatasync_ms_p50": fdatasync_ms,
        "lag_ms_p50": percentile(samples.lag_ms, 50),
        "lag_ms_p99": percentile(samples.lag_ms, 99),
        "bystander_ms_p50": percentile(samples.bystander_ms, 50),
        "bystander_ms_p99": percentile(samples.bystander_ms, 99),
        "bystander_large_facts": samples.crowd["large"],
        "bystander_confirmations": samples.crowd["confirmations"],
        "bystander_removed_facts": samples.crowd["removed"],
        **{f"{name}_ratio": rates[name].per_second / sha256 for name in RATES},
        "append_limit_ms": 1.5 * (floor_ms + fdatasync_ms),
        **{
            f"{name}_{who}_cpu_us_per_fact": rate.cpu_us_per_fact(who)
            for name, rate in rates.items()
            for who in rate.cpu_seconds
        },
    }
    return finished(numbers, aims_of, folder, seconds)


def aims_of(numbers: dict[str, Any]) -> list[Aim]:
    """Hold the numbers against what is hoped for."""
    return [
        Aim("append_batches_ratio", numbers["append_batches_ratio"], 0.15, "of SHA-256"),
        Aim("append_facts_ratio", numbers["append_facts_ratio"], 0.06, "of SHA-256"),
        Aim("append_ms_p50", numbers["append_ms_p50"], numbers["append_limit_ms"], "ms", False),
        Aim("handoff_ratio", numbers["handoff_ratio"], 0.12, "of SHA-256"),
        Aim("lag_ms_p99", numbers["lag_ms_p99"], 20.0, "ms", False),
        Aim("bystander_ms_p99", numbers["bystander_ms_p99"], 50.0, "ms", False),
    ]
