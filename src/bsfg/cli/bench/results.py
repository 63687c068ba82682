"""From samples to numbers with names, and from numbers to a verdict."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import bsfg
from bsfg.cli.doctor.machine import file_system


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


def finished(
    numbers: dict[str, Any], aims_of: Callable[[dict[str, Any]], list[Aim]], folder: Path, seconds: float
) -> dict[str, Any]:
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


def aims_of(numbers: dict[str, Any]) -> list[Aim]:
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


def machine(folder: Path) -> dict[str, Any]:
    """Describe where this was measured, as far as it matters."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "file_system": file_system(folder) or "unknown",
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "bsfg": bsfg.__version__,
    }
