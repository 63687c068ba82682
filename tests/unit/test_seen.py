"""Whoever may see only some streams sees those, and of the rest of the node nothing that tells of others."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from bsfg.config import Identity, Role
from bsfg.node.authorize import Matrix
from bsfg.node.status import EVERYTHING, SeenMetrics, VisibleStreams
from bsfg.ports import Buffer

MATRIX = Matrix(
    "plant",
    {},
    served={"north": frozenset({("open", Buffer.STORE)}), "south": frozenset({("secret", Buffer.FORWARD)})},
    link_streams={"both": frozenset({"open", "secret"}), "other": frozenset({"secret"})},
)
GATES = [("both", "receiver"), ("other", "receiver"), ("north", "sender"), ("south", "sender")]


def alert(name: str, about: str) -> dict[str, str]:
    """Make an alert that lasts."""
    return {"alert": name, "about": about}


DOCUMENT: dict[str, Any] = {
    "zone": "plant",
    "buffers": [{"stream": stream, "buffer": "store"} for stream in ("open", "secret")],
    "consumers": [{"name": "north.open", "stream": "open"}, {"name": "south.secret.forward", "stream": "secret"}],
    "links": [
        {"link": link, "side": side, "reports": [{"stream": "open"}, {"stream": "secret"}]} for link, side in GATES
    ],
    "artifacts": {"artifacts": 3},
    "scrub": {"last": "fine"},
    "alerts": [
        alert("disk_full", "plant"),
        alert("certificate_expiry", "plant.crt"),
        alert("buffer_fill", "open/store"),
        alert("buffer_fill", "secret/store"),
        alert("latest_stale", "open"),
        alert("latest_stale", "secret"),
        alert("consumer_backlog", "north.open"),
        alert("consumer_backlog", "south.secret.forward"),
        alert("gate_held", "both/receiver"),
        alert("gate_held", "other/receiver"),
        alert("link_dead", "both"),
        alert("link_dead", "other"),
        alert("scrub_damage", "streams/secret/store/0.log"),
    ],
    "certificates": [{"file": "plant.crt"}],
}


def row(*streams: str) -> Identity:
    """Make a row that names some streams."""
    return Identity(name="eyes", zone="plant", roles=(Role.VIEWER,), streams=streams)


def test_a_row_with_all_streams_sees_everything() -> None:
    """The star leaves nothing out."""
    scope = VisibleStreams.of(row("*"))
    assert scope == EVERYTHING
    assert scope.document(DOCUMENT, MATRIX) == DOCUMENT
    assert scope.series(("anything",), DOCUMENT)


def test_a_row_with_one_stream_sees_that() -> None:
    """Buffers, consumers, links, reports and alerts of the other stream are not there, nor sums over all of them."""
    seen = VisibleStreams.of(row("open")).document(DOCUMENT, MATRIX)
    assert [each["stream"] for each in seen["buffers"]] == ["open"]
    assert [each["name"] for each in seen["consumers"]] == ["north.open"]
    assert [(each["link"], each["side"]) for each in seen["links"]] == [("both", "receiver"), ("north", "sender")]
    assert all(each["reports"] == [{"stream": "open"}] for each in seen["links"])
    assert (seen["artifacts"], seen["scrub"]) == (None, None)
    assert seen["certificates"] == DOCUMENT["certificates"]
    expected = [
        ("disk_full", "plant"),
        ("certificate_expiry", "plant.crt"),
        ("buffer_fill", "open/store"),
        ("latest_stale", "open"),
        ("consumer_backlog", "north.open"),
        ("gate_held", "both/receiver"),
        ("link_dead", "both"),
    ]
    assert [(each["alert"], each["about"]) for each in seen["alerts"]] == expected
    assert "secret" not in str(seen) and "south" not in str(seen)


def test_a_row_without_streams_sees_none() -> None:
    """What is left tells of no stream, consumer or link."""
    seen = VisibleStreams.of(row()).document(DOCUMENT, MATRIX)
    assert (seen["buffers"], seen["consumers"], seen["links"]) == ([], [], [])


@pytest.mark.parametrize(
    ("series", "there"),
    [
        (("end", "open", "store"), True),
        (("fill", "secret", "store"), False),
        (("frontier", "north.open"), True),
        (("backlog", "south.secret.forward"), False),
        (("left", "both", "open"), True),
        (("lag", "both", "secret"), False),
        (("something", "new"), False),
    ],
)
def test_the_history_has_the_same_bounds(series: tuple[str, ...], there: bool) -> None:
    """A chart shows what the table beside it may show."""
    scope = VisibleStreams.of(row("open"))
    assert scope.series(series, scope.document(DOCUMENT, MATRIX)) == there


def test_metrics_have_the_same_bounds() -> None:
    """Samples with a label of something else are left out; those without such a label stay."""
    registry = CollectorRegistry()
    facts = Counter("facts_total", "Facts.", ["stream", "result"], registry=registry)
    lag = Gauge("lag_seconds", "Lag.", ["link", "stream"], registry=registry)
    backlog = Gauge("backlog", "Backlog.", ["consumer"], registry=registry)
    Gauge("in_flight", "Requests.", registry=registry).set(7)
    for stream in ("open", "secret"):
        facts.labels(stream, "inserted").inc()
        lag.labels("both", stream).set(1)
    lag.labels("other", "secret").set(1)
    for consumer in ("north.open", "south.secret.forward"):
        backlog.labels(consumer).set(3)
    seen = VisibleStreams.of(row("open")).document(DOCUMENT, MATRIX)
    text = generate_latest(SeenMetrics(registry, seen)).decode()
    assert 'facts_total{result="inserted",stream="open"} 1.0' in text
    assert 'lag_seconds{link="both",stream="open"} 1.0' in text
    assert 'backlog{consumer="north.open"} 3.0' in text
    assert "in_flight 7.0" in text
    assert "secret" not in text and "other" not in text
