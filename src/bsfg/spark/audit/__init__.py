"""The audit of a link: both ends compared range by range on Spark, and a verdict.

>>> verdict = audit(spark, link_plan)
>>> verdict.clean, verdict.facts, verdict.findings
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bsfg.spark.audit.case import AuditedLink, AuditedStream
from bsfg.spark.audit.ends import FolderEnd, NodeEnd
from bsfg.spark.audit.job import audit_stream
from bsfg.spark.audit.runner import Progress, Runner, SparkRunner
from bsfg.spark.audit.verdict import AuditFinding, FindingKind, StreamVerdict, Verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "AuditFinding",
    "AuditedLink",
    "AuditedStream",
    "FindingKind",
    "FolderEnd",
    "NodeEnd",
    "StreamVerdict",
    "Verdict",
    "audit",
]


def audit(spark: SparkSession, plan: AuditedLink, *, progress: Progress = lambda title, done, total: None) -> Verdict:
    """Compare both ends of a link and give the verdict; nothing is written at either end."""
    return audit_with(SparkRunner(spark, progress), plan)


def audit_with(runner: Runner, plan: AuditedLink) -> Verdict:
    """Audit with a runner of one's own."""
    started_unix_ms, started = time.time_ns() // 1_000_000, time.monotonic()
    streams = tuple(audit_stream(stream, runner) for stream in plan.streams)
    seconds = time.monotonic() - started
    return Verdict(plan.link, plan.sender_zone, plan.receiver_zone, started_unix_ms, seconds, streams)
