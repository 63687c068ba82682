"""Lets Spark find ``format("bsfg")`` by itself: it looks into modules whose names begin with ``pyspark_``."""

from bsfg.spark.source import FactsSource as DefaultSource

__all__ = ["DefaultSource"]
