"""The metrics of a node, in the words of the alarm list.

Names and labels are part of the product: dashboards and alarms are built on them. Labels only ever take values that
are configured or counted by the node itself, never a caller's words.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bsfg.gate import RECEIVER, Mode
from bsfg.node.ages import Unconfirmed
from bsfg.ports import Buffer, BufferStats, Receipt, Result
from bsfg.wire.limits import Admission

SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LAG_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 300.0, 3600.0, 86400.0)

_FILL = {Buffer.STORE: "bsfg_store_buffer_fill_percent", Buffer.FORWARD: "bsfg_forward_buffer_fill_percent"}


def _labelled(metric: Any, *labels: str) -> Any:
    return metric.labels(*labels)


class PipelineMetrics:
    """What `bsfg pipeline run` tells of the pipelines of a zone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, says: str) -> Counter:
            return Counter(f"bsfg_pipeline_{name}_total", says, ("pipeline",), registry=registry)

        def gauge(name: str, says: str) -> Gauge:
            return Gauge(f"bsfg_pipeline_{name}", says, ("pipeline",), registry=registry)

        self.up = gauge("up", "1 while a pipeline works or waits for its next run; 0 when it fails or is dead.")
        self.runs = counter("runs", "Runs that were begun.")
        self.failures = counter("failures", "Runs that failed.")
        self.facts = counter("facts", "Facts moved in bulk, landed, made or compared.")
        self.backlog = gauge("backlog", "Facts that wait for a pipeline; NaN where nobody knows.")
        self.batches = counter("batches", "Micro-batches and jobs of Spark that were done for it.")
        self.batch_seconds = gauge("batch_seconds", "How long the last of them took.")
        self.last_good = gauge(
            "last_good_timestamp_seconds",
            "When a run last ended well, or what never ends last worked; 0 when it has not.",
        )
        self.clean = gauge("clean", "1 when the last audit was clean.")

    def forget(self, name: str) -> None:
        """Show a pipeline no more that is not to run: what it found last is nothing that lasts."""
        for each in (self.up, self.backlog, self.batch_seconds, self.last_good, self.clean):
            with suppress(KeyError):
                each.remove(name)


class Metrics:
    """All counters, gauges and histograms of one node, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._highest_lag: dict[tuple[str, str], float] = {}
        self._worst_lags: dict[tuple[str, str], float] = {}
        # For what is counted with every request: to find a metric by its labels takes longer than to count.
        self._labelled = lru_cache(maxsize=1024)(_labelled)

        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(name, says, labels, registry=registry)

        def gauge(name: str, says: str, *labels: str) -> Gauge:
            return Gauge(name, says, labels, registry=registry)

        def histogram(name: str, says: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, says, labels, registry=registry, buckets=buckets)

        self.append_requests = counter("bsfg_append_requests_total", "Appends asked for.", "stream")
        self.append_failures = counter("bsfg_append_failures_total", "Appends refused or failed.", "stream", "code")
        self.append_latency = histogram("bsfg_append_latency_seconds", "From request to durable.", "stream")
        self.facts = counter("bsfg_facts_total", "Facts by what became of them.", "stream", "buffer", "result")
        self.fetch_requests = counter("bsfg_fetch_requests_total", "Fetches served.", "stream", "buffer")
        self.fetched_facts = counter("bsfg_fetched_facts_total", "Facts given to consumers.", "stream", "buffer")
        self.confirm_requests = counter("bsfg_confirm_requests_total", "Confirmations taken.", "stream", "buffer")
        self.refusals = counter("bsfg_refused_requests_total", "Requests that were not allowed.", "rule")
        self.handshakes = counter(
            "bsfg_tls_handshakes_total",
            "TLS handshakes by what became of them: begun, refused, and on gRPC called, which had a call after it.",
            "listener",
            "outcome",
        )
        self.request_failures = counter("bsfg_request_failures_total", "Requests that ended in an error.", "code")
        self.request_latency = histogram("bsfg_request_seconds", "Answering a request, waits included.", "operation")
        self.fsync_latency = histogram("bsfg_fsync_latency_seconds", "Making a write durable.")
        self.lag = gauge(
            "bsfg_replication_lag_seconds", "From append at the sender until durable here.", "link", "stream"
        )
        self.lag_high = gauge("bsfg_replication_lag_high_watermark", "The worst lag since start.", "link", "stream")
        self.lags = histogram("bsfg_replication_lags_seconds", "All lags.", "link", "stream", buckets=LAG_SECONDS)
        self.link_failures = counter("bsfg_link_failures_total", "Turns of a link that failed.", "link", "code")
        self.link_backlog = gauge("bsfg_link_backlog", "Facts the sender has left.", "link", "stream")
        self.link_dead = gauge("bsfg_link_dead", "1 while nobody moves a link.", "link")
        self.gate_state = gauge("bsfg_gate_state", "1 for the mode a gate is in.", "link", "side", "mode")
        self.gate_moves = counter("bsfg_gate_transitions_total", "Changes of mode.", "link", "side", "mode")
        self.pipelines = PipelineMetrics(registry)
        self.frontier = gauge("bsfg_frontier_offset", "Confirmed through, by consumer.", "consumer")
        self.backlog = gauge("bsfg_consumer_backlog", "Facts not confirmed, by consumer.", "consumer")
        self.fill = {buffer: gauge(name, f"Fill of the {buffer} buffer.", "stream") for buffer, name in _FILL.items()}
        self.end = gauge("bsfg_buffer_end_offset", "The offset the next entry gets.", "stream", "buffer")
        self.gaps = gauge("bsfg_gap_records", "Gap records.", "stream", "buffer")
        self.quarantined = gauge("bsfg_quarantined", "Facts in quarantine.", "stream", "buffer")
        self.oldest = gauge(
            "bsfg_oldest_unconfirmed_seconds", "Age of the oldest unconfirmed fact.", "stream", "buffer"
        )
        self.max_age = gauge("bsfg_max_age_seconds", "Age at which an unconfirmed fact expires.", "stream", "buffer")
        self.in_flight = gauge("bsfg_requests_in_flight", "Requests being served.")
        self.autonomy = gauge("bsfg_autonomy_hours", "Hours until the store buffer is full at this rate.", "stream")
        self.alerts = counter("bsfg_alerts_total", "Alerts raised.", "alert")
        self.certificate_expiry = gauge("bsfg_certificate_expiry_seconds", "Time left.", "certificate")

    def handshake(self, listener: str, outcome: str) -> None:
        """Count what became of a handshake; gRPC's threads do so too."""
        self._labelled(self.handshakes, listener, outcome).inc()

    def append_asked(self, stream: str) -> None:
        """Count one append that was asked for."""
        self._labelled(self.append_requests, stream).inc()

    def appended(self, stream: str, receipt: Receipt, seconds: float) -> None:
        """Count one append that was answered."""
        self._labelled(self.append_latency, stream).observe(seconds)
        self.stored(stream, Buffer.STORE, receipt)

    def stored(self, stream: str, buffer: Buffer, receipt: Receipt) -> None:
        """Count facts by their results."""
        if not receipt.results.any():
            self.put(stream, buffer, inserted=len(receipt.results))
            return
        for result in Result:
            if count := receipt.count(result):
                self._labelled(self.facts, stream, buffer.value, result.name.lower()).inc(count)

    def put(self, stream: str, buffer: Buffer, *, inserted: int, repeated: int = 0) -> None:
        """Count facts that were new, and those that were there already."""
        for result, count in (("inserted", inserted), ("already_exists", repeated)):
            if count:
                self._labelled(self.facts, stream, buffer.value, result).inc(count)

    def served(self, stream: str, buffer: Buffer, facts: int) -> None:
        """Count one fetch that was answered."""
        self._labelled(self.fetch_requests, stream, buffer.value).inc()
        self._labelled(self.fetched_facts, stream, buffer.value).inc(facts)

    def confirmed(self, stream: str, buffer: Buffer, consumer: str, through: int) -> None:
        """Count one confirmation that was taken."""
        self._labelled(self.confirm_requests, stream, buffer.value).inc()
        self._labelled(self.frontier, consumer).set(through)

    def lagged(self, link: str, stream: str, seconds: float) -> None:
        """Note the lag of a link and stream."""
        self._labelled(self.lag, link, stream).set(seconds)
        self._labelled(self.lags, link, stream).observe(seconds)
        self._worst_lags[link, stream] = max(seconds, self._worst_lags.get((link, stream), 0.0))
        if seconds > self._highest_lag.get((link, stream), -1.0):
            self._highest_lag[link, stream] = seconds
            self.lag_high.labels(link, stream).set(seconds)

    def take_worst_lags(self) -> dict[tuple[str, str], float]:
        """Give the worst lag of each link and stream since this was last asked; it has one asker."""
        taken, self._worst_lags = self._worst_lags, {}
        return taken

    def gate_moved(self, link: str, side: str, mode: Mode, *, moved: bool = True) -> None:
        """Note the mode of a gate."""
        for each in Mode:
            self.gate_state.labels(link, side, str(each)).set(1 if each == mode else 0)
        if moved:
            self.gate_moves.labels(link, side, str(mode)).inc()

    def forget_link(self, link: str, side: str) -> None:
        """Show a side of a link no more that was taken out: what it was last is nothing that lasts."""
        gauges = [self.gate_state]
        if side == RECEIVER:
            gauges += [self.link_dead, self.link_backlog, self.lag, self.lag_high]
            for lags in (self._highest_lag, self._worst_lags):
                for of in [each for each in lags if each[0] == link]:
                    del lags[of]
        for gauge in gauges:
            shown = [sample.labels for family in gauge.collect() for sample in family.samples]
            for labels in shown:
                if labels["link"] == link and labels.get("side", side) == side:
                    gauge.remove(*labels.values())
        # Else a link that comes back would be counted where nobody looks.
        self._labelled.cache_clear()

    def buffer_seen(self, stats: BufferStats) -> None:
        """Note what a buffer holds."""
        labels = (stats.stream, str(stats.buffer))
        self.fill[stats.buffer].labels(stats.stream).set(stats.fill_percent)
        self.end.labels(*labels).set(stats.end)
        self.gaps.labels(*labels).set(stats.gaps)
        self.quarantined.labels(*labels).set(stats.quarantined)

    def unconfirmed_seen(self, stats: BufferStats, unconfirmed: Unconfirmed) -> None:
        """Note how old the oldest unconfirmed fact of a buffer is; 0 when there is none."""
        labels = (stats.stream, str(stats.buffer))
        self.oldest.labels(*labels).set(unconfirmed.age_seconds or 0.0)
        most = unconfirmed.max_age_seconds
        self.max_age.labels(*labels).set(float("inf") if most is None else most)

    def answered(self, operation: str, seconds: float, code: str | None) -> None:
        """Note how a request went."""
        self._labelled(self.request_latency, operation).observe(seconds)
        if code is not None:
            self.request_failures.labels(code).inc()

    def watch(self, admission: Admission) -> None:
        """Show how many requests are under way, whenever somebody looks."""
        self.in_flight.set_function(lambda: admission.serving)

    def text(self, part: Any = None) -> bytes:
        """Write everything, or the part of it that somebody may see, in the form that Prometheus reads."""
        return generate_latest(part or self.registry)
