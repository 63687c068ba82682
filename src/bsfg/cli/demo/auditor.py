"""The auditor of the demo: compares both ends of every link, on a Spark of its own or without one.

Run as `python -m bsfg.cli.demo.auditor ENGINE SETTINGS LINK…`, a link as the JSON that the director writes. It prints
the verdicts as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from bsfg.cli.zones import leash


def verdicts(links: list[dict[str, Any]], spark: Any = None) -> list[dict[str, Any]]:
    """Audit links one after the other, from the data folders, so that the hash chains are verified, too.

    Where a zone's facts are at a server its nodes are asked, and the server's own copy is verified beside that.
    """
    from bsfg.cli.connection import NodeChoice, resolve
    from bsfg.config import load
    from bsfg.node.backends import looked_at
    from bsfg.spark.audit import audit, audit_with
    from bsfg.spark.audit.case import Wish, plan_link
    from bsfg.spark.audit.runner import LocalRunner

    found = []
    for link in links:
        sender, receiver = (Path(link[end]) if link[end] else None for end in ("sender", "receiver"))
        config = Path(link["config"])
        own = NodeChoice(config=config, identity=link["identity"], address=link["address"])
        access = resolve(own, ("pipeline",)).access() if receiver is None else None
        plan = plan_link(load(config), link["name"], access, Wish(sender=sender, receiver=receiver))
        verdict = audit_with(LocalRunner(), plan) if spark is None else audit(spark, plan)
        checks = {each.name: str(each.state) for stream in verdict.streams for each in stream.checks}
        broken: list[str] = []
        if link["at_server"]:
            broken = looked_at(load(Path(link["at_server"])), sys.maxsize).wrong
            checks["chain_at_server"] = "failed" if broken else "passed"
        found.append(
            {
                "link": link["key"],
                "clean": verdict.clean and not broken,
                "facts": verdict.facts,
                "counts": {**verdict.counts, **({"chain_broken": len(broken)} if broken else {})},
                "seconds": round(verdict.seconds, 2),
                "checks": checks,
            }
        )
    return found


def main(engine: str, settings: dict[str, str], links: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Audit with the engine that is wanted."""
    if engine != "spark":
        return verdicts(links)
    from bsfg.spark.session import end, session

    spark = session("bsfg-demo-audit", "local[2]", settings)
    try:
        return verdicts(links, spark)
    finally:
        end(spark)


if __name__ == "__main__":
    leash()
    answer = main(sys.argv[1], orjson.loads(sys.argv[2]), [orjson.loads(link) for link in sys.argv[3:]])
    sys.stdout.write(orjson.dumps(answer).decode() + "\n")
