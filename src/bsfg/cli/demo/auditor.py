"""The auditor of the demo: compares both ends of every link, on a Spark of its own or without one.

Run as `python -m bsfg.cli.demo.auditor ENGINE FOLDER SETTINGS LINK…`, a link as `sender:receiver:name`. It prints the
verdicts as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from bsfg.cli.zones import leash


def verdicts(root: Path, links: list[str], spark: Any = None) -> list[dict[str, Any]]:
    """Audit links one after the other, from the data folders, so that the hash chains are verified, too."""
    from bsfg.config import load
    from bsfg.spark.audit import audit, audit_with
    from bsfg.spark.audit.case import Wish, plan_link
    from bsfg.spark.audit.runner import LocalRunner

    found = []
    for text in links:
        sender, receiver, name = text.split(":")
        wish = Wish(sender=root / sender / "data", receiver=root / receiver / "data")
        plan = plan_link(load(root / receiver / "zone.toml"), name, None, wish)
        verdict = audit_with(LocalRunner(), plan) if spark is None else audit(spark, plan)
        found.append(
            {
                "link": f"{receiver}/{name}",
                "clean": verdict.clean,
                "facts": verdict.facts,
                "counts": verdict.counts,
                "seconds": round(verdict.seconds, 2),
                "checks": {each.name: each.state for stream in verdict.streams for each in stream.checks},
            }
        )
    return found


def main(engine: str, root: Path, settings: dict[str, str], links: list[str]) -> list[dict[str, Any]]:
    """Audit with the engine that is wanted."""
    if engine != "spark":
        return verdicts(root, links)
    from bsfg.spark.session import end, session

    spark = session("bsfg-demo-audit", "local[2]", settings)
    try:
        return verdicts(root, links, spark)
    finally:
        end(spark)


if __name__ == "__main__":
    leash()
    answer = main(sys.argv[1], Path(sys.argv[2]), orjson.loads(sys.argv[3]), sys.argv[4:])
    sys.stdout.write(orjson.dumps(answer).decode() + "\n")
