"""Who may do what is decided by the table alone, and every decision can be audited."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bsfg.config import Identity, IdentityFrom, Role, parse
from bsfg.config.access import Authority
from bsfg.config.kinds import MEANINGS, ROLE_ACTIONS, Action
from bsfg.config.vouching import Vouching
from bsfg.errors import BsfgError, IdentityRevoked, IdentityUnknown, PermissionRefused
from bsfg.node.authorize import Decision, Matrix, Request, Rule
from bsfg.ports import Buffer
from bsfg.wire.certs import IssuingAuthority
from bsfg.wire.peer import PeerNames

NOW = 1_800_000_000_000

CONFIG = """\
[zone]
name = "idmz"
[tls]
ca = "a"
certificate = "b"
key = "c"
[streams.operational]
[streams.audit]

[identities.plant-a-bsfg]
zone = "plant-a"
roles = ["peer"]
streams = ["*"]
relay_for = ["plant-a-lab"]
[identities.enterprise-bsfg]
zone = "enterprise"
roles = ["peer"]
streams = ["operational"]
to_zones = ["plant-a", "idmz"]
[identities.adapter]
zone = "idmz"
roles = ["producer"]
streams = ["operational"]
relay_for = ["idmz-lab"]
to_zones = ["enterprise"]
[identities.lab-bsfg]
zone = "lab"
roles = ["peer"]
streams = ["*"]
[identities.empty-bsfg]
zone = "empty"
roles = ["peer"]
[identities.blank]
zone = "idmz"
roles = ["producer", "consumer", "pipeline", "operator"]
[identities.historian]
zone = "idmz"
roles = ["consumer"]
streams = ["*"]
[identities.group]
zone = "idmz"
roles = ["consumer"]
streams = ["*"]
consumers = ["shared", "mes-*"]
[identities.spark]
zone = "idmz"
roles = ["pipeline"]
streams = ["*"]
[identities.alice]
zone = "idmz"
roles = ["operator"]
streams = ["*"]
[identities.soc]
zone = "enterprise"
roles = ["viewer"]
[identities.laptop]
zone = "idmz"
roles = ["operator"]
revoked = true
reason = "stolen"
[identities.guest]
zone = "idmz"
roles = ["viewer"]
expires = 2027-01-15T08:00:00Z

[links.up]
zone = "enterprise"
address = "h:1"
streams = ["operational"]
[links.down]
zone = "plant-a"
address = "h:2"
[links.from-lab]
zone = "lab"
address = "h:3"
[links.aside]
zone = "empty"
address = "h:4"
[serve.empty]
[serve.enterprise]
streams = ["operational"]
buffers = ["store", "forward"]
[serve.plant-a]
"""

MATRIX = Matrix.of(parse(CONFIG))


def decide(identity: str, action: Action, **rest: object) -> Decision:
    """Decide with the sample tables; zones may be given as lists."""
    for name in ("from_zones", "to_zones"):
        if name in rest:
            rest[name] = frozenset(rest[name])  # type: ignore[call-overload]
    return MATRIX.decide(identity, Request(action, **rest), NOW)  # type: ignore[arg-type]


OPERATIONAL = {"stream": "operational"}
STORE = {"stream": "operational", "buffer": Buffer.STORE}
FORWARD = {"stream": "operational", "buffer": Buffer.FORWARD}

CASES = [
    # A producer speaks for its zone and for those it relays for, to the zones and streams of its row.
    ("adapter", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz"], "to_zones": ["enterprise"]}, Rule.ALLOWED),
    ("adapter", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz", "idmz-lab"]}, Rule.ALLOWED),
    ("adapter", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz", "plant-a"]}, Rule.FROM_ZONE),
    ("adapter", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz"], "to_zones": ["plant-a"]}, Rule.TO_ZONE),
    ("adapter", Action.APPEND, {"stream": "audit", "from_zones": ["idmz"]}, Rule.STREAM),
    ("adapter", Action.APPEND, {"from_zones": ["idmz"]}, Rule.STREAM),
    ("adapter", Action.UPLOAD, {}, Rule.ALLOWED),
    ("adapter", Action.FETCH, {**STORE, "consumer": "adapter"}, Rule.ROLE),
    # A consumer has its own cursors and no others.
    ("historian", Action.FETCH, {**FORWARD, "consumer": "historian"}, Rule.ALLOWED),
    ("historian", Action.CONFIRM, {**FORWARD, "consumer": "historian.operational.forward"}, Rule.ALLOWED),
    ("historian", Action.CONFIRM, {**STORE, "consumer": "plant-a.operational"}, Rule.CONSUMER),
    ("historian", Action.CONFIRM, {**STORE, "consumer": "historian2"}, Rule.CONSUMER),
    ("historian", Action.FETCH, {**STORE}, Rule.CONSUMER),
    ("historian", Action.READ, FORWARD, Rule.ALLOWED),
    ("historian", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz"]}, Rule.ROLE),
    ("group", Action.CONFIRM, {**FORWARD, "consumer": "mes-7"}, Rule.ALLOWED),
    ("group", Action.CONFIRM, {**FORWARD, "consumer": "shared"}, Rule.ALLOWED),
    ("group", Action.CONFIRM, {**FORWARD, "consumer": "shared2"}, Rule.CONSUMER),
    ("group", Action.CONFIRM, {**FORWARD, "consumer": "group"}, Rule.CONSUMER),
    # A peer pulls what it is served, as the consumer of its own zone.
    ("enterprise-bsfg", Action.FETCH, {**STORE, "consumer": "enterprise.operational"}, Rule.ALLOWED),
    ("enterprise-bsfg", Action.FETCH, {**FORWARD, "consumer": "enterprise.operational.forward"}, Rule.ALLOWED),
    ("enterprise-bsfg", Action.FETCH, {"stream": "audit", "consumer": "enterprise.audit"}, Rule.STREAM),
    ("enterprise-bsfg", Action.CONFIRM, {**STORE, "consumer": "plant-a.operational"}, Rule.CONSUMER),
    ("enterprise-bsfg", Action.CONFIRM, {**FORWARD, "consumer": "enterprise.operational"}, Rule.CONSUMER),
    ("plant-a-bsfg", Action.FETCH, {**FORWARD, "consumer": "plant-a.operational.forward"}, Rule.SERVED),
    ("plant-a-bsfg", Action.READ, FORWARD, Rule.SERVED),
    ("plant-a-bsfg", Action.READ, STORE, Rule.ALLOWED),
    ("plant-a-bsfg", Action.DOWNLOAD, STORE, Rule.ALLOWED),
    ("plant-a-bsfg", Action.DOWNLOAD, FORWARD, Rule.SERVED),
    ("enterprise-bsfg", Action.READ, {"stream": "audit"}, Rule.STREAM),
    ("lab-bsfg", Action.READ, STORE, Rule.SERVED),
    ("lab-bsfg", Action.DOWNLOAD, STORE, Rule.SERVED),
    ("lab-bsfg", Action.CONFIRM, {**STORE, "consumer": "lab.operational"}, Rule.SERVED),
    ("lab-bsfg", Action.FETCH, {**FORWARD, "consumer": "lab.operational.forward"}, Rule.SERVED),
    # A row that names no stream has none, whatever its role.
    ("empty-bsfg", Action.READ, STORE, Rule.STREAM),
    ("empty-bsfg", Action.DOWNLOAD, STORE, Rule.STREAM),
    ("blank", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz"]}, Rule.STREAM),
    ("blank", Action.FETCH, {**FORWARD, "consumer": "blank"}, Rule.STREAM),
    ("blank", Action.READ, FORWARD, Rule.STREAM),
    ("blank", Action.VIEW, FORWARD, Rule.STREAM),
    ("blank", Action.ACT, FORWARD, Rule.STREAM),
    ("blank", Action.PUT, {**FORWARD, "link": "down", "from_zones": ["plant-a"]}, Rule.STREAM),
    ("spark", Action.PUT, {**FORWARD, "link": "aside", "from_zones": ["empty"]}, Rule.STREAM),
    ("plant-a-bsfg", Action.APPEND, {**OPERATIONAL, "from_zones": ["plant-a"]}, Rule.ROLE),
    ("plant-a-bsfg", Action.PUT, {**FORWARD, "link": "down", "from_zones": ["plant-a"]}, Rule.ROLE),
    ("plant-a-bsfg", Action.VIEW, {}, Rule.ROLE),
    # The pipeline puts what the link's peer may send.
    ("spark", Action.PUT, {**FORWARD, "link": "down", "from_zones": ["plant-a", "plant-a-lab"]}, Rule.ALLOWED),
    ("spark", Action.PUT, {**FORWARD, "link": "down", "from_zones": ["enterprise"]}, Rule.FROM_ZONE),
    ("spark", Action.PUT, {**FORWARD, "link": "up", "from_zones": ["enterprise"], "to_zones": ["x"]}, Rule.TO_ZONE),
    ("spark", Action.PUT, {"stream": "audit", "link": "up", "from_zones": ["enterprise"]}, Rule.STREAM),
    ("spark", Action.PUT, {**FORWARD, "link": "sideways", "from_zones": ["plant-a"]}, Rule.LINK),
    ("spark", Action.PUT, {**FORWARD, "from_zones": ["plant-a"]}, Rule.LINK),
    ("spark", Action.REPORT, {"link": "up"}, Rule.ALLOWED),
    ("spark", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz"]}, Rule.ROLE),
    ("spark", Action.ACT, {}, Rule.ROLE),
    # Operators act, viewers look.
    ("alice", Action.ACT, {}, Rule.ALLOWED),
    ("alice", Action.APPEND, {**OPERATIONAL, "from_zones": ["idmz"]}, Rule.ROLE),
    ("soc", Action.VIEW, {}, Rule.ALLOWED),
    ("soc", Action.ACT, {}, Rule.ROLE),
    ("soc", Action.READ, STORE, Rule.ROLE),
    # Whoever is not in the table, or no longer, may do nothing.
    ("nobody", Action.VIEW, {}, Rule.UNKNOWN),
    ("Alice", Action.VIEW, {}, Rule.UNKNOWN),
    ("laptop", Action.VIEW, {}, Rule.REVOKED),
    ("guest", Action.VIEW, {}, Rule.EXPIRED),
]


@pytest.mark.parametrize(("identity", "action", "rest", "rule"), CASES)
def test_cases(identity: str, action: Action, rest: dict[str, object], rule: Rule) -> None:
    """Each request is decided by the rule that a reader of the table would name."""
    assert decide(identity, action, **rest).rule == rule


@pytest.mark.parametrize(
    ("identity", "error", "code", "says"),
    [
        ("nobody", IdentityUnknown, "identity_unknown", "'nobody' is not in [identities]"),
        ("laptop", IdentityRevoked, "identity_revoked", "'laptop' was revoked: stolen"),
        (
            "soc",
            PermissionRefused,
            "permission_denied",
            "'soc' may not act: its roles are viewer, it would need operator",
        ),
    ],
)
def test_refusals_are_errors(identity: str, error: type[BsfgError], code: str, says: str) -> None:
    """A refusal raises an error with a stable code, a precise message and a hint."""
    with pytest.raises(error) as caught:
        decide(identity, Action.ACT).checked()
    assert (caught.value.code, caught.value.message, caught.value.retryable) == (code, says, False)
    assert caught.value.hint


def test_allowed_decision_is_given_back() -> None:
    """An allowed decision can be chained and names the caller's zone."""
    assert decide("soc", Action.VIEW).checked().zone == "enterprise"


def test_expiry_is_exact() -> None:
    """An identity is refused from the very moment it expires."""
    end = MATRIX.identities["guest"].expires_unix_ms
    assert end is not None
    assert MATRIX.decide("guest", Request(Action.VIEW), end - 1).allowed
    assert not MATRIX.decide("guest", Request(Action.VIEW), end).allowed


def test_revoked_server_may_not_send() -> None:
    """A link's server that was revoked cannot bring anything, by the pipeline or by the node itself."""
    text = CONFIG.replace('relay_for = ["plant-a-lab"]', 'revoked = true\nreason = "keys leaked"')
    matrix = Matrix.of(parse(text))
    zones = frozenset({"plant-a"})
    request = Request(Action.PUT, "operational", Buffer.FORWARD, zones, link="down")
    assert matrix.decide("spark", request, NOW).rule == Rule.REVOKED
    assert matrix.decide_link("down", "operational", zones, frozenset(), NOW).rule == Rule.REVOKED


def test_link_decision_is_the_pipelines() -> None:
    """The node's own engine is bound by the same rules as the pipeline."""
    for link, stream, zone in [
        ("up", "operational", "enterprise"),
        ("up", "audit", "enterprise"),
        ("down", "audit", "x"),
    ]:
        zones = frozenset({zone})
        request = Request(Action.PUT, stream, Buffer.FORWARD, zones, link=link)
        assert (
            MATRIX.decide_link(link, stream, zones, frozenset(), NOW).rule == MATRIX.decide("spark", request, NOW).rule
        )
    assert MATRIX.decide_link("sideways", "audit", frozenset(), frozenset(), NOW).rule == Rule.LINK


def test_a_refusal_says_why() -> None:
    """A decision that refuses has its rule, and an error with code and words."""
    decision = decide("adapter", Action.APPEND, stream="operational", from_zones=["idmz", "plant-a"])
    assert (decision.identity, decision.zone, str(decision.rule)) == ("adapter", "idmz", "from_zone_in_row")
    assert decision.error is not None and decision.error.code == "permission_denied"
    assert decision.error.message == "'adapter' may not bring from_zone 'plant-a': it speaks for idmz, idmz-lab"


def test_common_name_decides() -> None:
    """With `cn` the one common name is looked up, whatever the alternative names say."""
    peer = PeerNames(("alice",), ("laptop",))
    assert MATRIX.decide_peer(peer, Request(Action.ACT), NOW).allowed
    for names in ((), ("alice", "soc")):
        decision = MATRIX.decide_peer(PeerNames(names, ("alice",)), Request(Action.VIEW), NOW)
        assert (decision.rule, type(decision.error)) == (Rule.UNKNOWN, IdentityUnknown)


def test_alternative_name_decides() -> None:
    """With `san` exactly one alternative name must be in the table; the common name does not count."""
    matrix = Matrix("idmz", MATRIX.identities, IdentityFrom.SAN)

    def rule(*names: str) -> Rule:
        return matrix.decide_peer(PeerNames(("alice",), names), Request(Action.VIEW), NOW).rule

    assert rule("host.example", "soc", "soc") == Rule.ALLOWED
    assert rule("host.example") == Rule.UNKNOWN
    assert rule() == Rule.UNKNOWN
    assert rule("soc", "guest") == Rule.AMBIGUOUS


def test_a_name_that_every_machine_has_is_nobodys() -> None:
    """Certificates of nodes carry localhost: a row of that name is not theirs, and hides none of their own."""
    rows = {**MATRIX.identities, "localhost": replace(MATRIX.identities["soc"], name="localhost")}
    matrix = Matrix("idmz", rows, IdentityFrom.SAN)
    assert matrix.name_of(PeerNames(("x",), ("soc", "localhost"))) == "soc"
    for name in ("localhost", "LOCALHOST."):
        with pytest.raises(IdentityUnknown):
            matrix.name_of(PeerNames(("x",), (name,)))


def test_every_action_and_role_is_described() -> None:
    """No action lacks a meaning or a role that may do it, and every role can do something."""
    assert set(MEANINGS) == set(Action)
    assert set(ROLE_ACTIONS) == set(Role)
    assert set().union(*ROLE_ACTIONS.values()) == set(Action)
    assert all(ROLE_ACTIONS.values())


ZONES = ("home", "far", "other")
STREAMS = ("s", "t")
LANES = [(stream, buffer) for stream in STREAMS for buffer in Buffer]
NAMES = ("anna", "far", "far.s")
SPELLED_OUT = """
producer append; producer upload
consumer fetch; consumer confirm; consumer read; consumer download
peer fetch; peer confirm; peer read; peer download
pipeline put; pipeline read; pipeline upload; pipeline download; pipeline report; pipeline view
operator view; operator act
viewer view
"""
PAIRS = {tuple(pair.split()) for pair in SPELLED_OUT.replace("\n", ";").split(";") if pair.strip()}


def subset(rng: Random, items: tuple[str, ...]) -> tuple[str, ...]:
    """Draw some of a few names, or the star."""
    return ("*",) if rng.random() < 0.3 else tuple(rng.sample(items, rng.randint(0, len(items))))


def draw_row(rng: Random) -> Identity:
    """Draw a row of the table; most are in force."""
    return Identity(
        name=rng.choice(NAMES),
        zone=rng.choice(ZONES),
        roles=tuple(rng.sample(list(Role), rng.randint(1, 3))),
        streams=subset(rng, STREAMS),
        relay_for=subset(rng, ZONES),
        to_zones=subset(rng, ZONES),
        consumers=rng.choice([(), (), (), ("anna",), ("far.*",), ("x",)]),
        expires_unix_ms=rng.choice([None] * 7 + [NOW - 1, NOW, NOW + 1]),
        revoked=rng.random() < 0.1,
        reason="why",
    )


def draw_request(rng: Random) -> Request:
    """Draw a request, sensible or not."""
    return Request(
        action=rng.choice(list(Action)),
        stream=rng.choice([None, "s", "s", "t"]),
        buffer=rng.choice(list(Buffer)),
        from_zones=frozenset(rng.sample(ZONES, rng.randint(0, 2))),
        to_zones=frozenset(rng.sample(ZONES, rng.randint(0, 2))),
        consumer=rng.choice([None, "anna", "anna.s", "far", "far.s", "far.s.forward", "other.s.forward", "x", "xx"]),
        link=rng.choice([None, "up", "up", "gone"]),
    )


def covers(allowed: tuple[str, ...], wanted: set[str] | frozenset[str]) -> bool:
    """Tell whether a list, which may be the star, has all that is wanted."""
    return "*" in allowed or set(wanted) <= set(allowed)


def valid(row: Identity) -> bool:
    """Tell whether a row is in force."""
    return not row.revoked and (row.expires_unix_ms is None or row.expires_unix_ms > NOW)


def sends(row: Identity, request: Request) -> bool:
    """Tell whether a row may send facts of these zones to those zones."""
    return covers((*row.relay_for, row.zone), request.from_zones) and covers(row.to_zones, request.to_zones)


def own_names(row: Identity, request: Request) -> set[str]:
    """Spell out the consumers that belong to a row without a list of its own."""
    owner = row.zone if "peer" in row.roles else row.name
    tail = ".forward" if request.buffer == "forward" else ""
    return {f"{owner}.{request.stream}{tail}"} | (set() if "peer" in row.roles else {row.name})


def naive(row: Identity, sender: Identity, served: set[tuple[str, Buffer]], request: Request) -> bool:
    """Decide by conditions that stand side by side, without an order."""
    action = str(request.action)
    conditions = [valid(row), any((str(role), action) in PAIRS for role in row.roles)]
    if request.stream is not None:
        conditions.append(covers(row.streams, {request.stream}))
    if action in ("append", "fetch", "confirm", "read", "put"):
        conditions.append(request.stream is not None)
    if action == "append":
        conditions.append(sends(row, request))
    elif action == "put":
        carried = request.link == "up" and request.stream == "s" and covers(sender.streams, {"s"})
        conditions.append(carried and valid(sender) and sends(sender, request))
    elif action in ("fetch", "confirm", "read", "download") and request.stream is not None and row.zone != "home":
        conditions.append(row.zone == "far" and (request.stream, request.buffer) in served)
    if action in ("fetch", "confirm"):
        name = request.consumer or ""
        listed = name in row.consumers or ("far.*" in row.consumers and name.startswith("far."))
        conditions.append(listed if row.consumers else name in own_names(row, request))
    return all(conditions)


@given(st.integers(0, 1 << 32))
def test_matrix_agrees_with_a_naive_table(seed: int) -> None:
    """What is allowed is exactly what a table of independent conditions allows, and a refusal always says why."""
    rng = Random(seed)
    for _ in range(200):
        row, sender, request = draw_row(rng), draw_row(rng), draw_request(rng)
        served = set(rng.sample(LANES, rng.randint(0, 4)))
        matrix = Matrix(
            "home",
            {"caller": row, "server": sender},
            served={"far": frozenset(served)},
            link_servers={"up": "server"},
            link_streams={"up": frozenset({"s"})},
        )
        decision = matrix.decide("caller", request, NOW)
        assert decision.allowed == naive(row, sender, served, request), (row, sender, served, request)
        assert decision.allowed == (decision.rule == Rule.ALLOWED) == (decision.error is None)


@given(st.integers(0, 1 << 32))
def test_more_rights_never_refuse(seed: int) -> None:
    """What a peer's row allows stays allowed when it gets further roles, streams and zones."""
    rng = Random(seed)
    for _ in range(50):
        row, request = draw_row(rng), draw_request(rng)
        wider = replace(row, roles=tuple(Role), streams=("*",), relay_for=("*",), to_zones=("*",))
        before, after = (Matrix("home", {"caller": one}).decide("caller", request, NOW) for one in (row, wider))
        assert after.allowed or not before.allowed or Role.PEER not in row.roles


def test_prefix_does_not_give_another_zones_cursor() -> None:
    """The zone `a` does not own the consumers of the zone `a.b`, although their names begin alike."""
    row = Identity(name="a-bsfg", zone="a", roles=(Role.PEER,))
    assert row.owns_consumer("a.s", "s", Buffer.STORE)
    assert not row.owns_consumer("a.b.s", "s", Buffer.STORE)


def test_the_nearest_authority_with_a_row_decides() -> None:
    """An authority below another is bound by its own row, however much the one above it may."""
    below, above = IssuingAuthority("line", "sha256:" + "1" * 64), IssuingAuthority("company", "sha256:" + "2" * 64)
    rows = {
        "line": Authority(name="line", key=below.key, zones=("plant",)),
        "company": Authority(name="company", key=above.key, zones=("*",)),
    }
    vouching = Vouching(authorities=rows)
    assert vouching._speaks((below, above), "plant") and vouching._speaks((above,), "enterprise")
    assert not vouching._speaks((below, above), "enterprise")
    assert not vouching._speaks((IssuingAuthority("unknown", "sha256:" + "3" * 64),), "plant")
