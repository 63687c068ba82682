"""Errors of pipelines, which run on Spark."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class JavaMissing(BsfgError):
    """Spark needs Java, and none was found that is new enough."""

    code = "java_missing"
    default_hint = "Install Java 17 or newer and set JAVA_HOME, or install `bsfg[spark]`, which brings one."


class FactsMissing(BsfgError):
    """A range that was to be read holds a gap record instead of facts."""

    code = "facts_missing"
    default_hint = 'Read on with .option("gaps", "rows"): then each gap record is a row of its own.'


class LinkStopped(BsfgError):
    """The node refused what a link brought until an operator has looked."""

    code = "link_stopped"
    default_hint = "Look at the link in `bsfg status`; release it with a reason when the cause is settled."


class SpoolNotShared(BsfgError):
    """A part that a task wrote cannot be read where it is to be published."""

    code = "spool_not_shared"
    default_hint = 'Name a folder that all machines share with .option("spool", ...), or write one partition.'


class LandingDamaged(BsfgError):
    """A landing folder lacks what its own state says is there."""

    code = "landing_damaged"
    default_hint = "Somebody changed the folder by hand: restore it from a copy, or land into a new folder."


class WorkersUnfit(BsfgError):
    """The Python processes of Spark cannot run tasks of ours: no such interpreter, or one without this package."""

    code = "workers_unfit"
    default_hint = (
        "Install bsfg[node,spark] in the same folder on every machine of the cluster, this one included, and name its "
        "interpreter with --conf, as in spark.pyspark.python=/opt/bsfg/bin/python."
    )


class SparkFailed(BsfgError):
    """A job of Spark failed for a reason that is not ours, or Spark itself has ended."""

    code = "spark_failed"
    default_hint = "Start the command again: it goes on where it was. BSFG_DEBUG=1 shows what Spark says."
