"""Who may do what: which certificate stands for which row, pure decisions, and a record of every refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from bsfg.config.access import Identity, Token
from bsfg.config.kinds import ANY, ROLE_ACTIONS, Action, IdentityFrom, Role
from bsfg.config.settings import ZoneConfig
from bsfg.config.vouching import Vouching
from bsfg.errors import BsfgError, CertificateInvalid, IdentityRevoked, IdentityUnknown, PermissionRefused
from bsfg.ports import Buffer, Clock
from bsfg.wire.peer import PeerNames, looks_like

if TYPE_CHECKING:
    # The core writes backups into the trail without the libraries of the wire.
    from bsfg.wire.certs import Trust
    from bsfg.wire.service import Caller


VOUCHED_MAX = 4_096
"""How many certificates are remembered to stand for their rows."""

_NEEDS_STREAM = frozenset({Action.APPEND, Action.FETCH, Action.CONFIRM, Action.READ, Action.PUT})
_READS = frozenset({Action.FETCH, Action.CONFIRM, Action.READ, Action.DOWNLOAD})


class Rule(StrEnum):
    """The rule that decided."""

    ALLOWED = "allowed"
    UNKNOWN = "identity_in_table"
    AMBIGUOUS = "one_identity"
    ISSUER = "authority_speaks_for_zone"
    CERTIFICATE = "certificate_in_force"
    REVOKED = "not_revoked"
    EXPIRED = "not_expired"
    ROLE = "role_allows_action"
    STREAM = "stream_in_row"
    FROM_ZONE = "from_zone_in_row"
    TO_ZONE = "to_zone_in_row"
    CONSUMER = "consumer_is_its_own"
    SERVED = "served_to_zone"
    NAMED = "artifact_named_by_readable_fact"
    LINK = "link_configured"
    TOKEN = "token_in_table"
    SESSION = "session_in_force"
    ORIGIN = "own_page_asks"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked: the action and whatever of the rest belongs to it."""

    action: Action
    stream: str | None = None
    buffer: Buffer = Buffer.STORE
    from_zones: frozenset[str] = frozenset()
    to_zones: frozenset[str] = frozenset()
    consumer: str | None = None
    link: str | None = None
    at_the_door: bool = False
    """Whether only the row and its roles are asked for, because what the request is about was not read yet."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer with its reason; ``error`` is None when the request is allowed."""

    identity: str
    zone: str | None
    request: Request
    rule: Rule
    error: BsfgError | None = None

    @property
    def allowed(self) -> bool:
        """Whether the request may go on."""
        return self.error is None

    def checked(self) -> Decision:
        """Give the decision if it allows the request, or raise its error."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True, slots=True)
class Matrix:
    """The tables a decision is made from."""

    zone: str
    identities: Mapping[str, Identity]
    identity_from: IdentityFrom = IdentityFrom.CN
    served: Mapping[str, frozenset[tuple[str, Buffer]]] = field(default_factory=dict)
    """Per peer zone, the buffers that it may read; a zone that is not here reads nothing."""
    link_servers: Mapping[str, str] = field(default_factory=dict)
    """Per link, the identity of the server that it pulls from."""
    link_streams: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tokens: Mapping[str, Identity] = field(default_factory=dict)
    """Who the bearer of a token is; apart from the identities, so that no certificate can be called like a token."""
    vouching: Vouching = field(default_factory=Vouching)
    """Whose certificates stand for a row."""
    _vouched: dict[tuple[str, str], int] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Until when a certificate, by its fingerprint, stands for a row; other tables begin with nothing."""

    @staticmethod
    def of(config: ZoneConfig, trust: Trust | None = None) -> Matrix:
        """Derive the tables from a configuration and the authorities that its files hold."""
        served = {
            zone: frozenset((stream, buffer) for stream in config.streams_of(serve) for buffer in serve.buffers)
            for zone, serve in config.serve.items()
        }
        return Matrix(
            zone=config.zone.name,
            identities=config.identities,
            identity_from=config.tls.identity,
            served=served,
            link_servers={name: link.expected_server for name, link in config.links.items()},
            link_streams={name: frozenset(config.streams_of(link)) for name, link in config.links.items()},
            tokens={name: _bearer(config.zone.name, token) for name, token in config.tokens.items()},
            vouching=Vouching(trust, config.authorities),
        )

    def gate_streams(self, link: str, side: str) -> frozenset[str]:
        """Give the streams that pass a gate: those of an inbound link, or what a zone that pulls is served."""
        if side == "receiver":
            return self.link_streams.get(link, frozenset())
        return frozenset(stream for stream, _ in self.served.get(link, ()))

    def name_of(self, peer: PeerNames) -> str:
        """Give the one name of a certificate that counts here, or raise `IdentityUnknown`.

        With ``cn`` that is the common name. With ``san`` it is the one alternative name that stands in the table;
        a certificate that could be two identities is nobody, and localhost, which the certificates of all nodes carry,
        is nobody's name.
        """
        if self.identity_from == IdentityFrom.CN:
            if len(peer.common_names) != 1:
                raise IdentityUnknown(f"the certificate has {len(peer.common_names)} common names, it must have one")
            return peer.common_names[0]
        found = sorted({name for name in peer.telling_names if name in self.identities})
        if len(found) > 1:
            raise IdentityUnknown(f"the certificate could be any of {', '.join(found)}", names=found)
        if not found:
            shown = ", ".join(peer.alternative_names) or "none"
            raise IdentityUnknown(f"no alternative name of the certificate is in [identities] (it has: {shown})")
        return found[0]

    def decide(self, identity: str, request: Request, now_unix_ms: int) -> Decision:
        """Decide one request of one identity at one moment."""
        row = self.identities.get(identity)
        if row is None:
            return Decision(identity, None, request, Rule.UNKNOWN, self._unknown(identity))
        return self._decide_row(row, request, now_unix_ms)

    def _unknown(self, name: str) -> IdentityUnknown:
        like = next((known for known in self.identities if looks_like(known) == looks_like(name)), None)
        spelled = "" if like is None else f"; names are compared exactly, and the row is called {like!r}"
        return IdentityUnknown(f"{name!r} is not in [identities]{spelled}", identity=name)

    def decide_token(self, token: str, request: Request, now_unix_ms: int) -> Decision:
        """Decide one request of the bearer of a token."""
        row = self.tokens.get(token)
        if row is None:
            return Decision(f"token:{token}", None, request, Rule.TOKEN, IdentityUnknown("the token is not known here"))
        return self._decide_row(row, request, now_unix_ms)

    def _decide_row(self, row: Identity, request: Request, now_unix_ms: int) -> Decision:
        error: BsfgError | None
        rule, error = (
            _not_in_force(row, now_unix_ms) or self._first_refusal(row, request, now_unix_ms) or (Rule.ALLOWED, None)
        )
        return Decision(row.name, row.zone, request, rule, error)

    def decide_peer(self, peer: PeerNames, request: Request, now_unix_ms: int) -> Decision:
        """Decide one request of the holder of a certificate."""
        try:
            name = self.name_of(peer)
        except IdentityUnknown as error:
            rule = Rule.AMBIGUOUS if "names" in error.details else Rule.UNKNOWN
            return Decision(str(peer), None, request, rule, error)
        row = self.identities.get(name)
        if row is not None and (refused := self._not_vouched(peer, row, now_unix_ms)) is not None:
            return Decision(name, row.zone, request, *refused)
        return self.decide(name, request, now_unix_ms)

    def _not_vouched(self, peer: PeerNames, row: Identity, now_unix_ms: int) -> tuple[Rule, BsfgError] | None:
        certificate = peer.certificate
        if certificate is None or now_unix_ms <= self._vouched.get((certificate.fingerprint, row.name), -1):
            return None
        try:
            self.vouching.check(peer, row, now_unix_ms)
        except IdentityUnknown as error:
            return Rule.ISSUER, error
        except (CertificateInvalid, IdentityRevoked) as error:
            return Rule.CERTIFICATE, error
        if len(self._vouched) >= VOUCHED_MAX:
            self._vouched.clear()
        self._vouched[certificate.fingerprint, row.name] = certificate.not_after_unix_ms
        return None

    def decide_link(
        self, link: str, stream: str, from_zones: frozenset[str], to_zones: frozenset[str], now_unix_ms: int
    ) -> Decision:
        """Decide whether what a link brought may be put, by the row of the server it was fetched from.

        Facts of this zone that come back over a relay are to be skipped before: nobody else may bring those.
        """
        request = Request(Action.PUT, stream, Buffer.FORWARD, from_zones, to_zones, link=link)
        server = self.link_servers.get(link, "")
        row = self.identities.get(server)
        if row is None:
            error: BsfgError | None = IdentityUnknown(f"the link {link!r} or its server is not configured", link=link)
            return Decision(server, None, request, Rule.LINK, error)
        rule, error = self._link_refusal(row, request, now_unix_ms) or (Rule.ALLOWED, None)
        return Decision(server, row.zone, request, rule, error)

    def _first_refusal(self, row: Identity, request: Request, now_unix_ms: int) -> tuple[Rule, BsfgError] | None:
        if not any(request.action in ROLE_ACTIONS[role] for role in row.roles):
            able = [str(role) for role, actions in ROLE_ACTIONS.items() if request.action in actions]
            says = f"may not {request.action}: its roles are {_listed(row.roles)}, it would need {' or '.join(able)}"
            return _refused(row, request, Rule.ROLE, says)
        if request.at_the_door:
            return None
        if request.stream is None and request.action in _NEEDS_STREAM:
            return _refused(row, request, Rule.STREAM, f"asks to {request.action} without naming a stream")
        if request.stream is not None and not _within(request.stream, row.streams):
            says = f"may not use the stream {request.stream!r}, only {_listed(row.streams)}"
            return _refused(row, request, Rule.STREAM, says)
        if request.action == Action.APPEND:
            return _zones(row, request)
        if request.action == Action.PUT:
            return self._put(row, request, now_unix_ms)
        if request.action in (Action.FETCH, Action.CONFIRM):
            return self._consumer(row, request) or self._served(row, request)
        return self._served(row, request)

    def _put(self, row: Identity, request: Request, now_unix_ms: int) -> tuple[Rule, BsfgError] | None:
        """A pipeline puts for a link, so it is that link's peer whose rights count."""
        sender = self.identities.get(self.link_servers.get(request.link or "", ""))
        if sender is None:
            return _refused(row, request, Rule.LINK, f"names the link {request.link!r}, which is not configured")
        return self._link_refusal(sender, request, now_unix_ms)

    def _link_refusal(self, sender: Identity, request: Request, now_unix_ms: int) -> tuple[Rule, BsfgError] | None:
        in_row = request.stream is not None and _within(request.stream, sender.streams)
        if not in_row or request.stream not in self.link_streams.get(request.link or "", ()):
            says = f"may not send the stream {request.stream!r} over the link {request.link!r}"
            return _refused(sender, request, Rule.STREAM, says)
        return _not_in_force(sender, now_unix_ms) or _zones(sender, request)

    def _consumer(self, row: Identity, request: Request) -> tuple[Rule, BsfgError] | None:
        if row.owns_consumer(request.consumer or "", request.stream, request.buffer):
            return None
        says = f"may not {request.action} as the consumer {request.consumer!r}, which is not its own"
        return _refused(row, request, Rule.CONSUMER, says)

    def _served(self, row: Identity, request: Request) -> tuple[Rule, BsfgError] | None:
        """Another zone reads exactly what it is served, in whatever way it asks."""
        if row.zone == self.zone or request.action not in _READS or request.stream is None:
            return None
        if (request.stream, request.buffer) in self.served.get(row.zone, ()):
            return None
        says = f"may not read the {request.buffer} buffer of {request.stream!r}: [serve.{row.zone}] does not give it"
        return _refused(row, request, Rule.SERVED, says)


def _bearer(zone: str, token: Token) -> Identity:
    # A consumer without a durable consumer of its own only reads.
    roles = (Role(str(token.role)), *((Role.CONSUMER,) if token.facts else ()))
    return Identity(
        name=f"token:{token.name}", zone=zone, roles=roles, streams=(ANY,), expires_unix_ms=token.expires_unix_ms
    )


def _not_in_force(row: Identity, now_unix_ms: int) -> tuple[Rule, BsfgError] | None:
    if row.revoked:
        error = IdentityRevoked(f"{row.name!r} was revoked: {row.reason}", identity=row.name, reason=row.reason)
        return Rule.REVOKED, error
    if row.expires_unix_ms is not None and now_unix_ms >= row.expires_unix_ms:
        hint = "Set a later `expires` in zone.toml if it is to go on."
        error = IdentityRevoked(f"{row.name!r} has expired in zone.toml", hint=hint, identity=row.name)
        return Rule.EXPIRED, error
    return None


def speaks_for(row: Identity, from_zones: frozenset[str], to_zones: frozenset[str]) -> bool:
    """Tell whether an identity may bring facts of these zones for those; who may not is told why by `Matrix.decide`."""
    brings = ANY in row.relay_for or from_zones <= {row.zone, *row.relay_for}
    return brings and (ANY in row.to_zones or to_zones.issubset(row.to_zones))


def _zones(row: Identity, request: Request) -> tuple[Rule, BsfgError] | None:
    """Check where facts come from and go to."""
    if ANY not in row.relay_for:
        foreign = sorted(request.from_zones - {row.zone, *row.relay_for})
        if foreign:
            says = f"may not bring from_zone {foreign[0]!r}: it speaks for {_listed((row.zone, *row.relay_for))}"
            return _refused(row, request, Rule.FROM_ZONE, says)
    if ANY not in row.to_zones:
        beyond = sorted(request.to_zones - set(row.to_zones))
        if beyond:
            says = f"may not address to_zone {beyond[0]!r}, only {_listed(row.to_zones)}"
            return _refused(row, request, Rule.TO_ZONE, says)
    return None


def _within(name: str, allowed: tuple[str, ...]) -> bool:
    return ANY in allowed or name in allowed


def _listed(names: Iterable[str]) -> str:
    return ", ".join(str(name) for name in names) or "nothing"


def _refused(row: Identity, request: Request, rule: Rule, says: str) -> tuple[Rule, BsfgError]:
    details = {"identity": row.name, "action": str(request.action), "rule": str(rule)}
    return rule, PermissionRefused(f"{row.name!r} {says}", **details)


Audit = Callable[[Decision, "Caller"], None]
"""Takes every refusal; it must not raise."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Decides by the matrix; a caller without TLS acts as the one identity that the configuration names for it."""

    matrix: Matrix
    clock: Clock
    audit: Audit
    plaintext_identity: str | None = None

    def check(self, caller: Caller, request: Request) -> Identity:
        """Give the identity of a caller who may do this, or record the refusal and raise it."""
        decision = self._decide(caller, request)
        if not decision.allowed:
            self.audit(decision, caller)
        name = decision.checked().identity
        return self.matrix.identities[name] if caller.token is None else self.matrix.tokens[caller.token]

    def admit(self, caller: Caller, actions: tuple[str, ...]) -> str:
        """Give the name of a caller whose row is in force and allows one of the actions, or record and raise why not.

        Without actions any role will do. What an action is about is not known yet, and judged by `check` when it is.
        """
        decision = self._at_the_door(caller, actions)
        if not decision.allowed:
            self.audit(decision, caller)
        return decision.checked().identity

    def known(self, caller: Caller) -> str | None:
        """Give the name of a caller whose row is in force, None for anybody else, without recording anything."""
        decision = self._at_the_door(caller, ())
        return decision.identity if decision.allowed else None

    def _at_the_door(self, caller: Caller, actions: tuple[str, ...]) -> Decision:
        """Decide by row and role alone; of several refusals the first one counts."""
        first = None
        for action in actions or tuple(Action):
            decision = self._decide(caller, Request(Action(action), at_the_door=True))
            if decision.allowed:
                return decision
            first = first or decision
            if decision.rule != Rule.ROLE:
                break
        assert first is not None
        return first

    def allows(self, caller: Caller, request: Request) -> bool:
        """Tell whether a caller may do this, without recording anything."""
        return self._decide(caller, request).allowed

    def identity(self, caller: Caller) -> str:
        """Give the name by which a caller is known here, for records; his own words when he is not."""
        if caller.token is not None:
            return str(caller)
        if caller.names is None:
            return self.plaintext_identity or "plaintext"
        try:
            return self.matrix.name_of(caller.names)
        except IdentityUnknown:
            return str(caller.names)

    def _decide(self, caller: Caller, request: Request) -> Decision:
        now_unix_ms = self.clock.now_unix_ms()
        if caller.token is not None:
            return self.matrix.decide_token(caller.token, request, now_unix_ms)
        if caller.names is not None:
            return self.matrix.decide_peer(caller.names, request, now_unix_ms)
        if self.plaintext_identity is not None:
            return self.matrix.decide(self.plaintext_identity, request, now_unix_ms)
        # A listener with TLS lets such a caller through only as far as he may sign in; this is the lock behind it.
        error = PermissionRefused("callers without a certificate are not served here")
        return Decision("plaintext", None, request, Rule.UNKNOWN, error)


def speaker_of(row: Identity) -> str:
    """Name who refuses facts when an identity does: another zone's node does so for its zone."""
    return row.zone if is_peer(row) else row.name


def is_peer(row: Identity) -> bool:
    """Tell whether an identity is another zone's node."""
    return Role.PEER in row.roles
