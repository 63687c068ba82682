"""A zone's configuration is read as a whole, and every problem is named with its key and line."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.cli.init import commented_file
from bsfg.config import Role, ZoneConfig, consumer_name, doubts_of, load, parse
from bsfg.config.declare import tables_of, toml
from bsfg.config.kinds import ADDRESS, DURATION, MOMENT, SIZE, WHOLE_SECONDS, Address, Engine, Safety, WrongValue
from bsfg.errors import ConfigInvalid
from bsfg.ports import Buffer
from bsfg.retention import Overflow
from bsfg.sealing import IdStrategy

ROOT = Path(__file__).parents[2]

MINIMAL = """\
[zone]
name = "plant-a"

[tls]
ca = "ca.crt"
certificate = "plant-a.crt"
key = "plant-a.key"

[streams.operational]
"""

FULL = (
    MINIMAL
    + """
[identities."enterprise-bsfg"]
zone = "enterprise"
roles = ["peer"]
streams = ["*"]
relay_for = ["plant-b"]

[identities.mes]
zone = "plant-a"
roles = ["producer", "consumer"]
streams = ["operational"]
expires = 2027-06-30

[links.from-enterprise]
zone = "enterprise"
address = "enterprise.example:9443"

[serve.enterprise]
buffers = ["store", "forward"]
"""
)


def problems(text: str) -> list[dict[str, Any]]:
    """Give what is wrong with a file."""
    with pytest.raises(ConfigInvalid) as caught:
        parse(text)
    assert caught.value.code == "config_invalid"
    found: list[dict[str, Any]] = caught.value.details["problems"]
    return found


def test_minimal_file_has_defaults() -> None:
    """A file with only a name, certificates and a stream gets the documented defaults."""
    config = parse(MINIMAL, Path("etc/zone.toml"))
    assert config.zone.ids.strategy == IdStrategy.EXPLICIT
    assert (str(config.listen.grpc), str(config.listen.http)) == ("0.0.0.0:9443", "0.0.0.0:9080")
    assert config.data_folder == Path("etc/data")
    assert config.artifacts_folder == Path("etc/data/artifacts")
    policy = config.streams["operational"].store_policy
    assert (policy.capacity_bytes, policy.retention_seconds) == (10 << 30, 7 * 86_400)
    assert (policy.warning_fill_percent, policy.alert_fill_percent) == (50.0, 80.0)


def test_full_file() -> None:
    """Rows know their names, and links, identities and served zones are typed."""
    config = parse(FULL)
    assert config.identities["mes"].roles == (Role.PRODUCER, Role.CONSUMER)
    assert config.identities["mes"].expires_unix_ms == 1_814_400_000_000
    link = config.links["from-enterprise"]
    assert (link.expected_server, link.engine, link.address.each) == (
        "enterprise-bsfg",
        Engine.SPARK,
        (Address("enterprise.example", 9443),),
    )
    assert config.streams_of(link) == ("operational",)
    several = parse(FULL.replace('"enterprise.example:9443"', '["enterprise.example:9443", "[::1]:9"]'))
    assert str(several.links["from-enterprise"].address) == "enterprise.example:9443,[::1]:9"
    assert config.serve["enterprise"].buffers == (Buffer.STORE, Buffer.FORWARD)


def test_forward_buffer_never_drops() -> None:
    """A stream that drops its oldest facts still keeps its forward buffer: pulling pauses instead."""
    stream = parse(MINIMAL + 'overflow = "drop_oldest"\nforward_capacity = "2GiB"\n').streams["operational"]
    assert stream.store_policy.overflow == Overflow.DROP_OLDEST
    assert (stream.forward_policy.overflow, stream.forward_policy.capacity_bytes) == (Overflow.REJECT_NEW, 2 << 30)


def test_sil_stream() -> None:
    """Safety is handed on to the policy of both buffers."""
    stream = parse(MINIMAL + 'safety = "sil"\n').streams["operational"]
    assert stream.safety == Safety.SIL
    assert stream.store_policy.is_sil and stream.forward_policy.is_sil


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 << 30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("7b", 7),
        ("2tib", 2 << 40),
        (1024, 1024),
    ],
)
def test_sizes(text: object, size: int) -> None:
    """Sizes are written with decimal or binary units, or as bytes."""
    assert SIZE.read(text) == size


@pytest.mark.parametrize("text", ["", "10", "GiB", "-1GB", "1e3MB", "10 GiBB", 0, -5, True, 1.5, "0B", "9999999PB", []])
def test_bad_sizes(text: object) -> None:
    """Anything else is not a size."""
    with pytest.raises(WrongValue):
        SIZE.read(text)


@given(
    st.lists(st.tuples(st.integers(0, 999), st.sampled_from(["s", "m", "h", "d", "w", "y"])), min_size=1, max_size=4)
)
def test_durations_add_up(parts: list[tuple[int, str]]) -> None:
    """A duration is the sum of its parts."""
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
    text = " ".join(f"{number}{unit}" for number, unit in parts)
    assert WHOLE_SECONDS.read(text) == sum(number * seconds[unit] for number, unit in parts)


@pytest.mark.parametrize("text", ["", "7", "7 days", "-1s", "1s2", "d", 7, 1.5, True, None, "0s"])
def test_bad_durations(text: object) -> None:
    """A duration without a unit, or with words, is refused."""
    with pytest.raises(WrongValue):
        DURATION.read(text)


def test_bare_number_is_told_its_unit() -> None:
    """A number where a duration belongs is answered with how to write it."""
    with pytest.raises(WrongValue, match='needs a unit, such as "7s", "7h" or "7d"'):
        DURATION.read(7)
    with pytest.raises(WrongValue, match="whole seconds"):
        WHOLE_SECONDS.read("500ms")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("plant-a.example:9443", Address("plant-a.example", 9443)),
        ("[::1]:0", Address("::1", 0)),
        ("127.0.0.1:65535", Address("127.0.0.1", 65_535)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """An address is host and port, IPv6 in brackets, and prints as it was written."""
    assert ADDRESS.read(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:70000", "::1:9443", "[host]:1", "host:٣", 9443])
def test_bad_addresses(text: object) -> None:
    """Anything else is not an address."""
    with pytest.raises(WrongValue):
        ADDRESS.read(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example")),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    """Only addresses of this machine count as loopback."""
    assert Address(host, 1).is_loopback is loopback


def test_moments() -> None:
    """A date lasts to its end in UTC, a time needs its zone."""
    assert MOMENT.read(tomllib.loads("t = 2027-06-30")["t"]) == MOMENT.read("2027-07-01T00:00:00Z")
    with pytest.raises(WrongValue, match="time zone"):
        MOMENT.read(tomllib.loads("t = 2027-06-30T12:00:00")["t"])
    with pytest.raises(WrongValue):
        MOMENT.read("soon")


def test_all_problems_at_once() -> None:
    """Unknown keys, wrong types, bad values and contradictions of one file are reported together, in file order."""
    text = """\
[zone]
name = "plant-a"
message_id = "explicit"

[tls]
ca = "ca.crt"

[streams.operational]
retension = "7d"
overflow = "drop_all"
max_object = true

[log]
level = "loud"

[metrics]
"""
    found = problems(text)
    assert [(row["line"], row["key"]) for row in found] == [
        (3, "zone.message_id"),
        (5, "tls"),
        (5, "tls"),
        (9, "streams.operational.retension"),
        (10, "streams.operational.overflow"),
        (11, "streams.operational.max_object"),
        (14, "log.level"),
        (16, "metrics"),
    ]
    assert "did you mean 'message_ids'?" in found[0]["problem"]
    assert "did you mean 'retention'?" in found[3]["problem"]
    assert "not true or false" in found[5]["problem"]


def test_message_names_file_line_and_key() -> None:
    """The message alone tells where to look."""
    with pytest.raises(
        ConfigInvalid, match=re.escape("etc/zone.toml has a problem:\n  line 10: streams.operational.x: ")
    ):
        parse(MINIMAL + "x = 1\n", Path("etc/zone.toml"))


def test_misplaced_key_is_sent_home() -> None:
    """A key that belongs to another table is told where."""
    assert (
        problems(MINIMAL + 'server_identity = "x"\n')[0]["problem"] == "unknown key; it belongs in [links.<link name>]"
    )


def test_missing_required_key() -> None:
    """A missing key is reported at its table, with an example."""
    found = problems(MINIMAL + '\n[links.a]\nzone = "b"\n')
    assert (found[0]["line"], found[0]["key"]) == (11, "links.a")
    assert (
        'address is missing (host:port or a list of them, for example "enterprise.example:9443")' in found[0]["problem"]
    )


def test_empty_file() -> None:
    """An empty file is told what is missing, at line 1."""
    assert problems("")[0]["line"] == 1


def test_not_toml() -> None:
    """A syntax error names its line."""
    assert problems(MINIMAL + "retention = 7d\n")[0]["line"] == 10
    assert problems(MINIMAL + 'retention = "7d\n')[0]["line"] in (10, 11)


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a folder and a file that is not text are errors with a hint."""
    with pytest.raises(ConfigInvalid, match="there is no file") as caught:
        load(tmp_path / "zone.toml")
    assert "bsfg init" in caught.value.hint
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "zone.toml").write_bytes(b"[zone]\nname = '\xff'\n")
    with pytest.raises(ConfigInvalid, match="not UTF-8"):
        load(tmp_path / "zone.toml")


IDENTITY = '[identities.x]\nzone = "plant-a"\nroles = ["producer"]\n'

CONTRADICTIONS = [
    ('[zone]\nmessage_ids = "semantic"', "zone.message_ids", "needs semantic_fields"),
    ('[zone]\nsemantic_fields = ["labels"]', "zone.semantic_fields", "only with"),
    ('[zone]\nmessage_ids = "semantic-v1"', "zone.message_ids", "needs semantic_fields"),
    (
        '[zone]\nmessage_ids = "semantic"\nsemantic_fields = ["labels.no name"]',
        "zone.semantic_fields",
        "must be one of",
    ),
    ('[zone]\nmessage_ids = "semantic"\nsemantic_fields = ["labels", "labels.a"]', "zone.semantic_fields", "part of"),
    ('[zone]\nmessage_ids = "semantic-v1"\nsemantic_fields = ["labels.a"]', "zone.semantic_fields", "cannot be part"),
    ('[listen]\ngrpc = "h:1"\nhttp = "h:1"', "listen.http", "same address"),
    ('[listen]\nplaintext = true\nhttp_enabled = false\nplaintext_identity = "mes"', "listen.grpc", "loopback"),
    ('[listen]\nplaintext_identity = "mes"', "listen.plaintext_identity", "only with plaintext"),
    ('[listen]\ngrpc="[::1]:1"\nhttp="localhost:2"\nplaintext = true', "listen.plaintext", "plaintext_identity"),
    (
        '[listen]\ngrpc="[::1]:1"\nhttp_enabled=false\nplaintext = true\nplaintext_identity="mess"',
        "listen.plaintext_identity",
        "did you mean 'mes'?",
    ),
    ('[identities.x]\nzone = "Enterprise"\nroles = ["viewer"]', "identities.x.zone", "spelled 'enterprise'"),
    ('[identities.x]\nzone = "plant-a"\nroles = ["peer"]', "identities.x.roles", "is this zone"),
    ('[identities.x]\nzone = "enterprise"\nroles = ["producer"]', "identities.x.roles", "belongs to this zone"),
    ('[identities.x]\nzone = "enterprise"\nroles = ["pipeline"]', "identities.x.roles", "belongs to this zone"),
    ('[identities.x]\nzone = "plant-a"\nroles = []', "identities.x.roles", "no role"),
    ('[identities.x]\nzone = "plant-a"\nroles = ["viewer", "viewer"]', "identities.x.roles", "twice"),
    (IDENTITY + "revoked = true", "identities.x.revoked", "needs a reason"),
    (IDENTITY + 'streams = ["operationl"]', "identities.x.streams", "did you mean 'operational'?"),
    (
        '[identities.x]\nzone="plant-a"\nroles=["viewer"]\nrelay_for=["b"]',
        "identities.x.relay_for",
        "only for the roles",
    ),
    ('[streams.a]\nsafety = "sil"\noverflow = "drop_oldest"', "streams.a.overflow", "reject_new"),
    ('[streams.a]\nretention = "8d"', "streams.a.retention", "longer than max_age"),
    ('[streams.a]\nmax_age = "31d"', "streams.a.max_age", "longer than key_horizon"),
    (
        '[streams.a]\nsafety = "sil"\nretention = "1h"\nmax_age = "1h"\nkey_horizon = "23h"',
        "streams.a.key_horizon",
        "at least",
    ),
    ('[links.from-enterprise]\nmax_age = "31d"', "links.from-enterprise.max_age", "longer than key_horizon"),
    ("[streams.a]\nwarning_fill = 90", "streams.a.warning_fill", "above alert_fill"),
    ('[streams.a]\nmax_object = "2GiB"', "streams.a.max_object", "above max_batch"),
    ('[streams.a]\nmax_batch = "11GiB"', "streams.a.max_batch", "never be stored"),
    ('[links.l]\nzone = "plant-a"\naddress = "h:1"', "links.l.zone", "this zone"),
    ('[links.l]\nzone = "idmz"\naddress = "h:1"', "links.l.server_identity", "no row in [identities]"),
    (
        '[links.l]\nzone = "idmz"\naddress = "h:1"\nserver_identity = "enterprise-bsfg"',
        "links.l.server_identity",
        "must be a peer of zone 'idmz'",
    ),
    ('[links.l]\nzone = "enterprise"\naddress = "h:1"', "links.l.streams", "already pulled"),
    (
        '[identities.idmz-bsfg]\nzone = "idmz"\nroles = ["peer"]\n'
        '[links.l]\nzone = "idmz"\naddress = "h:1"\nbuffer = "forward"',
        "links.l.buffer",
        "relay_for",
    ),
    ("[links.from-enterprise]\nnormal_backlog = 20000", "links.from-enterprise.normal_backlog", "above"),
    ('[links.from-enterprise]\nbackoff_first = "1m"', "links.from-enterprise.backoff_first", "longer than"),
    ('[links.from-enterprise]\nbandwidth = "fast"', "links.from-enterprise.bandwidth", "a size such as"),
    ('[links.from-enterprise]\nbandwidth = ["6-18 1MiB"]', "links.from-enterprise.bandwidth", "times of the day"),
    (
        '[links.from-enterprise]\nbandwidth = ["22:00-06:00 1MiB", "05:59-07:00 2MiB"]',
        "links.from-enterprise.bandwidth",
        "a time twice",
    ),
    ('[links.from-enterprise]\npriority = ["operational"]', "links.from-enterprise.priority", "it has none"),
    (
        '[links.from-enterprise]\nbandwidth = "1MiB"\npriority = ["absent"]',
        "links.from-enterprise.priority",
        "not a stream of this link",
    ),
    ("[serve.enterprize]", "serve.enterprize", "did you mean 'enterprise'?"),
    ("[serve.enterprise]\nbuffers = []", "serve.enterprise.buffers", "names no buffer"),
    ('[streams."operational.forward"]', "serve.enterprise", "would also be that of"),
    (f"[streams.{'s' * 52}]", "serve.enterprise", "longer than 64"),
    (
        '[identities.enterprise]\nzone="plant-a"\nroles=["consumer"]\nstreams=["*"]',
        "identities.enterprise",
        "could confirm as",
    ),
    ('[identities.mes]\nconsumers = ["enter*"]', "identities.mes", "could confirm as 'enterprise.operational'"),
    ('[alerts]\nwebhook = "http://alarms.example/x"', "alerts.webhook", "https"),
    ("[limits]\nconcurrent_requests = 10", "limits.concurrent_per_identity", "above"),
    ('[artifacts]\ncapacity = "1GiB"', "artifacts.max_artifact", "above capacity"),
]


def merged(base: str, extra: str) -> str:
    """Add keys to a file, or replace those that are there."""

    def join(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {name: join(old[name], new[name]) for name in old.keys() & new.keys() if isinstance(old[name], dict)}
        return old | new | both

    def write(table: dict[str, Any], path: str) -> str:
        plain = [f"{name} = {toml(value)}" for name, value in table.items() if not isinstance(value, dict)]
        inner = [write(value, f'{path}."{name}"') for name, value in table.items() if isinstance(value, dict)]
        return "\n".join([f"[{path.removeprefix('.')}]" if path else "", *plain, *inner])

    return write(join(tomllib.loads(base), tomllib.loads(extra)), "")


@pytest.mark.parametrize(("extra", "key", "says"), CONTRADICTIONS)
def test_contradictions(extra: str, key: str, says: str) -> None:
    """Settings that cannot go together are named by the key to change, with a reason."""
    found = problems(merged(FULL, extra))
    assert [(row["key"], says in row["problem"]) for row in found] == [(key, True)]


def test_plaintext_on_loopback_needs_no_certificates() -> None:
    """A trial on one machine runs without TLS when it says so."""
    text = """\
[zone]
name = "lab"
[listen]
grpc = "127.0.0.1:9443"
http = "[::1]:9080"
plaintext = true
plaintext_identity = "trial"
[identities.trial]
zone = "lab"
roles = ["producer", "consumer", "operator"]
streams = ["*"]
[streams.operational]
"""
    assert parse(text).tls.ca is None


def test_no_stream() -> None:
    """A zone without streams is refused at the top of the file."""
    found = problems(MINIMAL.replace("[streams.operational]", ""))
    assert found == [
        {"line": 1, "key": "", "problem": "no stream is configured; add a table such as [streams.operational]"}
    ]


def test_consumer_names() -> None:
    """Both sides of a link derive the same consumer, and the two buffers have two."""
    assert consumer_name("Plant_A", "audit") == "plant_a.audit"
    assert consumer_name("idmz", "audit", Buffer.FORWARD) == "idmz.audit.forward"


def test_every_default_has_the_declared_type() -> None:
    """What a key gives when it is left out is of the type its field promises."""
    for table in tables_of(ZoneConfig):
        hints = get_type_hints(table.cls)
        for item in dataclasses.fields(table.cls):
            if item.default is not dataclasses.MISSING and item.default is not None:
                allowed = hints[item.name]
                origin = getattr(allowed, "__origin__", allowed)
                assert isinstance(item.default, origin), (table.name, item.name)


def test_every_example_can_be_read() -> None:
    """Examples and defaults of the reference are values that the key accepts."""
    for table in tables_of(ZoneConfig):
        for item in table.settings():
            assert item.says.endswith("."), (table.name, item.name)
            for value in (item.example, None if item.required else item.default):
                if value is not None:
                    item.kind.read(tomllib.loads(f"value = {toml(value)}")["value"])
            assert item.example is not None or item.default is not None, (table.name, item.name)


DOUBTS = [
    ("", []),
    (IDENTITY, [("identities.x.streams", "so it may use none")]),
    (IDENTITY + "streams = []", [("identities.x.streams", "so it may use none")]),
    (IDENTITY + 'streams = ["operational"]', []),
    (IDENTITY + 'revoked = true\nreason = "lost"', []),
    (
        "[streams.secret]\n" + '[identities."enterprise-bsfg"]\nstreams = ["operational"]',
        [
            ("serve.enterprise.streams", "no peer of it has 'secret'"),
            ("links.from-enterprise.streams", "'secret' cannot be brought"),
        ],
    ),
]


@pytest.mark.parametrize(("more", "expected"), DOUBTS)
def test_what_is_hardly_meant_is_told(more: str, expected: list[tuple[str, str]]) -> None:
    """A row that relied on having all streams by saying nothing is named, and so is what nobody may carry."""
    found = [(doubt.key, doubt.says) for doubt in doubts_of(parse(merged(FULL, more)))]
    assert [key for key, _ in found] == [key for key, _ in expected]
    assert all(words in says for (_, says), (_, words) in zip(found, expected, strict=True))


def test_commented_file_keeps_the_defaults() -> None:
    """A generated file means the same when every commented default is uncommented."""
    values: dict[str, dict[str, Any]] = {
        "zone": {"name": "plant-a"},
        "tls": {"ca": "a", "certificate": "b", "key": "c"},
        "identities": {"x": {"zone": "plant-a", "roles": ["viewer"]}, "y.z": {"zone": "plant-a", "roles": ["viewer"]}},
        "streams": {"operational": {}, "audit": {"retention": "1d"}},
    }
    text = commented_file("A zone.", values)
    config = parse(text)
    assert (config.streams["audit"].retention_seconds, set(config.identities)) == (86_400, {"x", "y.z"})
    defaults = {
        f"# {item.name} = {toml(item.default)}"
        for table in tables_of(ZoneConfig)
        for item in table.settings()
        if not item.required and item.default is not None
    }
    lines = [line.removeprefix("# ") if line in defaults else line for line in text.splitlines()]
    uncommented = "\n".join(lines)
    assert parse(uncommented) == config
    assert uncommented.count("\nretention = ") == 3


def test_commented_file_shows_every_key() -> None:
    """No key is left out of a generated file that has a row in every table."""
    values: dict[str, dict[str, Any]] = {
        table.name: {"a": {}} if table.named else {} for table in tables_of(ZoneConfig)
    }
    text = commented_file("", values)
    for table in tables_of(ZoneConfig):
        for item in table.settings():
            assert re.search(rf"^# {item.name} = ", text, re.MULTILINE), (table.name, item.name)
