"""`bsfg bench node`: two real nodes and their producers against this machine's SHA-256, disk and loopback."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from bsfg.cli.bench.store import Aim, measured_in, percentile, show_all
from bsfg.cli.common import flag, option
from bsfg.cli.output import examples, print_json

if TYPE_CHECKING:
    # Its producers are processes of this package, which must not have loaded them already.
    from bsfg.cli.bench.node_measure import BenchSamples

RATES = ("append_batches", "append_facts", "handoff")


def numbers_of(samples: BenchSamples) -> dict[str, Any]:
    """Give every number of one run by its stable name."""
    plan, rates, more = samples.plan, samples.rates, samples.more
    sha256 = median(samples.sha256_rates)
    floor_ms, fdatasync_ms = percentile(more["floor_ms"], 50), percentile(more["fdatasync_ms"], 50)
    return {
        "facts": plan.facts,
        "object_bytes": plan.object_bytes,
        "clients": plan.clients,
        "rate": plan.rate,
        "sha256_per_second": sha256,
        **{f"{name}_per_second": rates[name].per_second for name in RATES},
        "append_ms_p50": percentile(more["append_ms"], 50),
        "append_ms_p99": percentile(more["append_ms"], 99),
        "rpc_floor_ms_p50": floor_ms,
        "fdatasync_ms_p50": fdatasync_ms,
        "lag_ms_p50": percentile(samples.lag_ms, 50),
        "lag_ms_p99": percentile(samples.lag_ms, 99),
        "bystander_ms_p50": percentile(more["bystander_ms"], 50),
        "bystander_ms_p99": percentile(more["bystander_ms"], 99),
        "bystander_large_facts": more["crowd"]["large"],
        "bystander_confirmations": more["crowd"]["confirmations"],
        "bystander_removed_facts": more["crowd"]["removed"],
        **{f"{name}_ratio": rates[name].per_second / sha256 for name in RATES},
        "append_limit_ms": 1.5 * (floor_ms + fdatasync_ms),
        **{
            f"{name}_{who}_cpu_us_per_fact": rate.cpu_us_per_fact(who)
            for name, rate in rates.items()
            for who in rate.cpu_seconds
        },
    }


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


DEFAULT_FACTS = 400_000
OBJECT_BYTES, OBJECT_BYTES_MIN = 200, 64

EPILOG = examples(
    ("bsfg bench node", "all of it, about a minute"),
    ("bsfg bench node --seconds 120", "two minutes of live facts"),
    ("bsfg bench node --rate 5000 --size 1000 --json", "larger facts, five times as many"),
)


def node(
    facts: Annotated[
        int, option("N", "How many facts to append as batches; half as many one by one.", min=1)
    ] = DEFAULT_FACTS,
    size: Annotated[
        int, option("BYTES", "The size of each fact's object.", min=OBJECT_BYTES_MIN, max=1 << 20)
    ] = OBJECT_BYTES,
    clients: Annotated[int, option("N", "Producers at once, each a process.", min=1)] = 1,
    rate: Annotated[float, option("N", "Facts per second while lag is measured.", min=1)] = 1_000.0,
    seconds: Annotated[float, option("S", "How long lag is measured.", min=1)] = 20.0,
    folder: Annotated[
        Path | None, option("D", "Where to put the temporary folder; this disk is measured.", "--dir")
    ] = None,
    json: Annotated[bool, flag("--json", "Print the numbers as JSON.")] = False,
) -> None:
    """Measure nodes: appends under mutual TLS, the handoff from zone to zone, and how long a fact takes to cross.

    Nodes and producers are processes of their own on loopback, with certificates made for this run. Every fact counts
    when it is durable. The yardstick is hashlib's SHA-256 over the same objects; the latency of a single append is
    held against a call that does nothing and a bare fdatasync of the same run. Lag is the time from durable in one
    zone to durable in the other. At last one producer appends single facts while others send facts of 1 MiB, confirm
    8,000 ranges at a time and remove all facts of the run so far: what it waits is the bystander's time. Everything
    is removed at the end.
    """
    from bsfg.cli.bench.node_measure import BenchPlan, run

    plan = BenchPlan(facts=facts, seconds=seconds, rate=rate, clients=clients, object_bytes=size)
    numbers = measured_in(folder, lambda place: numbers_of(run(place, plan)), aims_of)
    print_json(numbers) if json else show(numbers)


def show(numbers: dict[str, Any]) -> None:
    """Print what was measured beside what is hoped for."""

    def cost(name: str) -> str:
        return ", ".join(
            f"{key.removeprefix(f'{name}_').removesuffix('_cpu_us_per_fact')} {value:.1f} µs"
            for key, value in numbers.items()
            if key.startswith(f"{name}_") and key.endswith("_cpu_us_per_fact")
        )

    show_all(
        numbers,
        [(name, numbers[f"{name}_per_second"]) for name in RATES],
        aims_of(numbers),
        f"one append: p50 {numbers['append_ms_p50']:.2f} ms, p99 {numbers['append_ms_p99']:.2f} ms; "
        f"a call that does nothing: p50 {numbers['rpc_floor_ms_p50']:.2f} ms; "
        f"bare fdatasync: p50 {numbers['fdatasync_ms_p50']:.2f} ms",
        f"lag at {numbers['rate']:g} facts/s: p50 {numbers['lag_ms_p50']:.1f} ms, p99 {numbers['lag_ms_p99']:.1f} ms",
        f"a bystander's append: p50 {numbers['bystander_ms_p50']:.1f} ms, p99 {numbers['bystander_ms_p99']:.1f} ms, "
        f"beside {numbers['bystander_large_facts']:,} facts of 1 MiB, {numbers['bystander_confirmations']:,} "
        f"confirmations of many ranges, and the removal of {numbers['bystander_removed_facts']:,} facts",
        cost=cost,
    )
