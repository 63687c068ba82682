"""The alert rules for Prometheus and the dashboard for Grafana fit the metrics that a real node exposes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.dashboard.conftest import Stages
from tests.dashboard.trouble import trouble

from bsfg.node import status
from bsfg.node.ages import NEAR_SHARE
from bsfg.node.metrics import Metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = yaml.safe_load((EXAMPLES / "prometheus" / "bsfg-alerts.yml").read_text(encoding="utf-8"))
GRAFANA = json.loads((EXAMPLES / "grafana" / "bsfg.json").read_text(encoding="utf-8"))
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
PANELS = [panel for panel in GRAFANA["panels"] if panel["type"] != "row"]

SCRAPED = frozenset({"instance", "job", "le"})
"""Labels that Prometheus adds by itself."""


def expressions() -> list[str]:
    """Give every expression of both files."""
    return [rule["expr"] for rule in ALERTS.values()] + [
        target["expr"] for panel in PANELS for target in panel["targets"]
    ]


def parts(expression: Any) -> Iterator[Any]:
    """Walk through a parsed expression."""
    yield expression
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        found = getattr(expression, name, None)
        for part in found if isinstance(found, list) else [found]:
            if part is not None:
                yield from parts(part)


def selectors(text: str) -> Iterator[Any]:
    """Give the selectors of an expression, or fail if it is not PromQL."""
    parsed = promql_parser.parse(text)
    return (part for part in parts(parsed) if type(part).__name__ == "VectorSelector")


def labels_of(metric: str) -> frozenset[str] | None:
    """Give the labels of a metric of ours, None for one that we do not have."""
    for collector, names in Metrics().registry._collector_to_names.items():
        if metric in names:
            return frozenset(collector._labelnames)  # type: ignore[attr-defined]
    return None


async def exposed(stages: Stages) -> set[str]:
    """Give the names of all samples and families that a real node with some work behind it exposes."""
    stage = await stages()
    await trouble(stage)
    text = (await stage.ask("GET", "/metrics", certificate="viewer")).body.decode()
    names = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


async def test_every_metric_in_use_is_exposed_by_a_real_node(stages: Stages) -> None:
    """Each name in a rule, a panel or a variable is one that a node gives at /metrics."""
    names = await exposed(stages)
    assert len(names) > 30
    used = {selector.name for text in expressions() for selector in selectors(text)}
    variables = [each["definition"] for each in GRAFANA["templating"]["list"] if each["type"] == "query"]
    used |= {re.fullmatch(r"label_values\((\w+), \w+\)", text)[1] for text in variables}  # type: ignore[index]
    assert used - names == {"up"}


@pytest.mark.parametrize("text", expressions())
def test_expressions_are_promql_and_name_labels_that_exist(text: str) -> None:
    """Each expression parses, and selects and groups by labels that the metric has."""
    own: set[str] = set()
    for selector in selectors(text):
        labels = labels_of(selector.name) if selector.name != "up" else frozenset()
        assert labels is not None, selector.name
        named = {matcher.name for matcher in selector.matchers.matchers}
        assert named <= labels | SCRAPED, (selector.name, named)
        own |= labels
    for part in parts(promql_parser.parse(text)):
        modifier = getattr(part, "modifier", None)
        grouped = getattr(modifier, "labels", None) if type(part).__name__ == "AggregateExpr" else None
        assert set(grouped or ()) <= own | SCRAPED, text


def test_every_rule_says_when_how_urgent_and_what_to_do() -> None:
    """Each rule has an expression, a time, a severity, a summary and a description; names are unique."""
    assert sum(len(group["rules"]) for group in RULES["groups"]) == len(ALERTS) >= 15
    for name, rule in ALERTS.items():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, name
        assert re.fullmatch(r"\d+[smh]", rule["for"]), name
        assert rule["labels"]["severity"] in ("warning", "alert"), name
        assert set(rule["annotations"]) == {"summary", "description"}, name
        assert all(rule["annotations"].values()), name
        # A label in a text must survive the expression: it is one of the metric's, or Prometheus' own.
        known = {"instance"}.union(*(labels_of(each.name) or () for each in selectors(rule["expr"])))
        for text in rule["annotations"].values():
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= known, name


@pytest.mark.parametrize(
    ("alert", "metric", "limit", "severity"),
    [
        ("BsfgReplicationLag", "bsfg_replication_lags_seconds_bucket", status.LAG_WARNING_SECONDS, "warning"),
        ("BsfgReplicationLagHigh", "bsfg_replication_lags_seconds_bucket", status.LAG_ALERT_SECONDS, "alert"),
        ("BsfgConsumerBacklog", "bsfg_consumer_backlog", status.BACKLOG_WARNING, "warning"),
        ("BsfgConsumerBacklogHigh", "bsfg_consumer_backlog", status.BACKLOG_ALERT, "alert"),
        ("BsfgStoreBufferFilling", "bsfg_store_buffer_fill_percent", 50, "warning"),
        ("BsfgStoreBufferFull", "bsfg_store_buffer_fill_percent", 80, "alert"),
        ("BsfgRequestsSlow", "bsfg_request_seconds_bucket", 0.05, "warning"),
        ("BsfgRequestsVerySlow", "bsfg_request_seconds_bucket", 0.5, "alert"),
        ("BsfgConfirmationsStopped", "bsfg_confirm_requests_total", 0, "alert"),
        ("BsfgRequestRefused", "bsfg_refused_requests_total", 0, "alert"),
        ("BsfgHandshakesRefused", "bsfg_tls_handshakes_total", 0, "warning"),
        ("BsfgCertificateEnds", "bsfg_certificate_expiry_seconds", 30, "alert"),
        ("BsfgOldestUnconfirmedNearExpiry", "bsfg_oldest_unconfirmed_seconds", NEAR_SHARE, "alert"),
        ("BsfgAutonomyEnds", "bsfg_autonomy_hours", status.AUTONOMY_WARNING_HOURS, "warning"),
    ],
)
def test_thresholds_are_those_of_the_health_table(alert: str, metric: str, limit: float, severity: str) -> None:
    """Each signal of the table has its rule, with the same limit as `bsfg status` and the dashboard use."""
    rule = ALERTS[alert]
    found = list(parts(promql_parser.parse(rule["expr"])))
    assert metric in {part.name for part in found if type(part).__name__ == "VectorSelector"}
    assert limit in {part.val for part in found if type(part).__name__ == "NumberLiteral"}
    assert rule["labels"]["severity"] == severity


def test_rules_keep_waits_out_of_the_time_of_requests() -> None:
    """Operations that wait on purpose, or last as long as their data, do not count as slow."""
    from bsfg.wire.messages import ADMIN, BOUNDARY

    names = {*BOUNDARY, *ADMIN}
    for alert in ("BsfgRequestsSlow", "BsfgRequestsVerySlow"):
        [matcher] = re.findall(r'operation!~"([^"]+)"', ALERTS[alert]["expr"])
        excluded = {name for name in names if re.fullmatch(matcher, name)}
        streams = {name for name, method in BOUNDARY.items() if method.request_streams or method.response_streams}
        assert streams | {"FetchFacts"} <= excluded
        assert {"AppendFact", "ConfirmReceipt", "GetFact"} <= names - excluded
        assert re.fullmatch(matcher, "http_fetch")


def test_the_configuration_for_prometheus_names_the_rules() -> None:
    """The scrape configuration loads the rule file beside it and its job is the one that the rules name."""
    config = yaml.safe_load((EXAMPLES / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert [EXAMPLES / "prometheus" / name for name in config["rule_files"]] == [
        EXAMPLES / "prometheus" / "bsfg-alerts.yml"
    ]
    [job] = config["scrape_configs"]
    assert (job["job_name"], job["scheme"], job["metrics_path"]) == ("bsfg", "https", "/metrics")
    assert 'up{job="bsfg"}' in ALERTS["BsfgNodeDown"]["expr"]


def test_the_grafana_dashboard_is_whole() -> None:
    """Panels have a title, a description, a data source and targets, ids of their own, and do not overlap."""
    assert GRAFANA["title"] == "BSFG" and GRAFANA["uid"] == "bsfg"
    assert len({panel["id"] for panel in GRAFANA["panels"]}) == len(GRAFANA["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in GRAFANA["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["title"] and panel["description"] and panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["legendFormat"] and target["datasource"]["uid"] == "${datasource}"
    assert {each["name"] for each in GRAFANA["templating"]["list"]} == {"datasource", "instance", "stream"}
