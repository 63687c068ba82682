"""The keys that say who this zone is, who may call it, and which streams, links and peers it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath

from bsfg.config.declare import given_name, optional, setting
from bsfg.config.kinds import (
    ADDRESS,
    ADDRESSES,
    ANY,
    AUTHORITY_NAME,
    BANDWIDTH,
    CONSUMER_PATTERN,
    COUNT,
    DURATION,
    FLAG,
    HOST_NAME,
    IDENTITY_NAME,
    KEY_HASH,
    MOMENT,
    PATH,
    PATTERNS,
    PERCENT,
    SIGNING_KEY,
    SIZE,
    STREAM_NAME,
    STREAMS,
    TEXT,
    TOKEN_HASH,
    WHOLE_SECONDS,
    ZONE_NAME,
    ZONES,
    Address,
    Addresses,
    Engine,
    HasherName,
    IdentityFrom,
    Role,
    Safety,
    Start,
    TlsVersion,
    TokenRole,
    choice,
    integer,
    list_of,
    one_of_or,
)
from bsfg.filters import FactFilter
from bsfg.journey.append import Plausibility
from bsfg.ports import Buffer
from bsfg.retention import Overflow, Policy
from bsfg.rules import DEFAULT_LIMITS
from bsfg.rules import Limits as FactLimits
from bsfg.sealing import LABEL_FIELD, SEMANTIC_FIELDS, IdStrategy, MessageIds
from bsfg.throttle import Bandwidth

# ruff: noqa: RUF009 - the calls in the class bodies declare fields; nothing they give is shared or mutable


def consumer_name(zone: str, stream: str, buffer: Buffer = Buffer.STORE) -> str:
    """Give the name of the durable consumer by which a peer zone pulls a stream; both sides derive it alike."""
    return f"{zone.lower()}.{stream}" + (".forward" if buffer == Buffer.FORWARD else "")


_ID_FIELD = one_of_or(SEMANTIC_FIELDS, "labels.NAME", LABEL_FIELD)


@dataclass(frozen=True, kw_only=True)
class Zone:
    """Who this zone is and where its data lie."""

    name: str = setting(ZONE_NAME, says="The zone's name: the from_zone of everything it produces.", example="plant-a")
    data_folder: PurePath = setting(PATH, "data", says="Where buffers and cursors are kept; relative to this file.")
    message_ids: IdStrategy = setting(
        choice(IdStrategy),
        "explicit",
        says=(
            "Where message ids come from: explicit (the producer's own; two equal readings are two facts), payload "
            "(the digest of the body; equal bodies are one fact), message (the digest of the whole message), semantic "
            "(of the fact and semantic_fields), object (of the object alone; equal payloads of different subjects "
            "become one fact) or semantic-v1 (as semantic was in version 0.1)."
        ),
    )
    semantic_fields: tuple[str, ...] = setting(
        list_of(_ID_FIELD),
        [],
        says='Envelope fields that are part of the id when message_ids = "semantic"; of labels also single ones.',
        example=["produced_at_unix_ms"],
    )

    hasher: HasherName = setting(
        choice(HasherName),
        "sha256",
        says=(
            "The function of the digests of this zone's facts, and of message ids that it derives: sha256, or blake3, "
            "which needs the extra of that name here and wherever the facts are checked."
        ),
    )

    @property
    def ids(self) -> MessageIds:
        """Give the strategy in the form the core uses."""
        return MessageIds(self.message_ids, self.semantic_fields)


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where the node can be reached."""

    grpc: Address = setting(ADDRESS, "0.0.0.0:9443", says="Address of the gRPC service; port 0 takes any free port.")
    http: Address = setting(ADDRESS, "0.0.0.0:9080", says="Address of JSON over HTTP, metrics and the dashboard.")
    http_enabled: bool = setting(FLAG, True, says="Whether the HTTP service runs at all.")
    http_names: tuple[str, ...] = setting(
        list_of(HOST_NAME),
        [],
        says=(
            "More names by which browsers and clients call the HTTP service, besides those in the certificate and "
            "addresses; a request that names another host is refused, because any name can be made to point here."
        ),
        example=["bsfg.plant.example"],
    )
    plaintext: bool = setting(
        FLAG, False, says="Serve without TLS. Refused unless both addresses are on loopback; for trials on one machine."
    )
    plaintext_identity: str | None = optional(
        IDENTITY_NAME, says="The row of [identities] as which every plaintext caller acts.", example="trial"
    )


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The node's certificate and whom it trusts."""

    ca: PurePath | None = optional(
        PATH, says="Certificates of the authorities that callers and servers must be signed by.", example="certs/ca.crt"
    )
    certificate: PurePath | None = optional(
        PATH, says="The node's certificate, with intermediates after it.", example="certs/plant-a-bsfg.crt"
    )
    key: PurePath | None = optional(
        PATH, says="The private key of the certificate; readable by its owner only.", example="certs/plant-a-bsfg.key"
    )
    identity: IdentityFrom = setting(
        choice(IdentityFrom), "cn", says="Which part of a certificate is looked up in [identities]."
    )
    crl: PurePath | None = optional(
        PATH,
        says="Revocation lists of the authorities, one or more in PEM form; read again when the file changes.",
        example="certs/ca.crl",
    )
    minimum: TlsVersion = setting(choice(TlsVersion), "1.3", says="The lowest TLS version; there is no other choice.")
    expiry_warning_seconds: int = setting(
        WHOLE_SECONDS, "30d", says="How long before its end a certificate raises a warning."
    )


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One certificate name and what its holder may do."""

    name: str = given_name()
    zone: str = setting(ZONE_NAME, says="The zone this certificate speaks for.", example="enterprise")
    roles: tuple[Role, ...] = setting(
        list_of(choice(Role)),
        says=(
            "What the holder is: producer (appends facts, uploads artifacts), consumer (fetches and confirms), peer "
            "(another zone's node), pipeline (this zone's own replication job), operator (holds gates, retires "
            "consumers, settles quarantine), viewer (sees what concerns its streams, changes nothing)."
        ),
        example=["peer"],
    )
    streams: tuple[str, ...] = setting(
        STREAMS,
        [],
        says='The streams it may use; none when left out. ["*"] means all.',
        example=["operational", "audit"],
    )
    relay_for: tuple[str, ...] = setting(
        ZONES, [], says="Other zones whose facts it may bring besides those of its own zone.", example=["plant-a"]
    )
    to_zones: tuple[str, ...] = setting(ZONES, [ANY], says="The zones it may address facts to.", example=["enterprise"])
    consumers: tuple[str, ...] = setting(
        list_of(CONSUMER_PATTERN),
        [],
        says=(
            "Durable consumers it may fetch and confirm as. Empty means its own: for a peer those named after its "
            "zone, for others those named after the identity."
        ),
        example=["historian", "mes-*"],
    )
    expires_unix_ms: int | None = optional(
        MOMENT, says="From when on the identity is refused although its certificate is valid.", example="2027-06-30"
    )
    revoked: bool = setting(FLAG, False, says="Refuse this certificate although its authority has not withdrawn it.")
    reason: str = setting(
        TEXT, "", says="Why it was revoked; required then, and shown in every refusal.", example="laptop lost"
    )
    authority: str | None = optional(
        AUTHORITY_NAME,
        says="The row of [authorities] that must have signed the certificate; any that speaks for the zone if not set.",
        example="corporate",
    )

    def owns_consumer(self, consumer: str, stream: str | None, buffer: Buffer) -> bool:
        """Tell whether a durable consumer belongs to this identity.

        Names are compared as a whole, never by prefix unless the row says so with ``*``: whoever may confirm for
        another zone could let its facts be truncated.
        """
        if self.consumers:
            return any(
                consumer.startswith(pattern[:-1]) if pattern.endswith("*") else consumer == pattern
                for pattern in self.consumers
            )
        owner = self.zone if Role.PEER in self.roles else self.name
        if stream is not None and consumer == consumer_name(owner, stream, buffer):
            return True
        return Role.PEER not in self.roles and consumer == self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Authority:
    """One authority of the file [tls] ca, and for whom it may sign."""

    name: str = given_name()
    key: str = setting(
        KEY_HASH,
        says="The SHA-256 of the authority's public key, as `bsfg certs show` prints it; a renewal keeps it.",
        example="sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    )
    zones: tuple[str, ...] = setting(
        ZONES,
        says="The zones whose certificates it signs; nobody of another zone is known by them.",
        example=["plant-a"],
    )


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token by which a person without a certificate signs in to the dashboard, and what he may do."""

    name: str = given_name()
    hash: str = setting(
        TOKEN_HASH,
        says="The SHA-256 of the token. `bsfg token` makes a token and prints its row; the token is kept nowhere.",
        example="sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    )
    role: TokenRole = setting(
        choice(TokenRole),
        says="viewer (sees everything) or operator (also holds gates, settles quarantine).",
        example="viewer",
    )
    facts: bool = setting(FLAG, False, says="Whether its bearer may also look at facts, of all streams.")
    expires_unix_ms: int | None = optional(MOMENT, says="From when on the token is refused.", example="2027-06-30")


@dataclass(frozen=True, kw_only=True)
class Signing:
    """The keys by which the facts of one zone are signed."""

    zone: str = given_name()
    keys: tuple[str, ...] = setting(
        list_of(SIGNING_KEY),
        says="The public keys of those who may say facts of this zone, as `bsfg certs signing-key` prints them.",
        example=["ed25519:line-7:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="],
    )
    require: bool = setting(
        FLAG,
        True,
        says="Whether a fact must be signed; if not, one without a signature passes and a wrong one does not.",
    )
    allow_v1: bool = setting(
        FLAG,
        False,
        says="Whether signatures of version 1 pass, which name no stream: a fact could be replayed in another one.",
    )


# ruff: noqa: RUF009 - the calls in the class bodies declare fields; nothing they give is shared or mutable


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A named lane of facts: its sizes, ages and limits."""

    name: str = given_name()
    store_capacity_bytes: int = setting(SIZE, "10GiB", says="Size of the store buffer: what this zone produced.")
    forward_capacity_bytes: int = setting(
        SIZE,
        "10GiB",
        says="Size of the forward buffer: what other zones sent. When it is full of facts that a required consumer "
        "has not read, or of any on a sil stream, pulling pauses; else the oldest make room, with a gap record.",
    )
    quarantine_bytes: int = setting(
        SIZE,
        "256MiB",
        says="Size of the quarantine of each of the two buffers: refused facts that wait for an operator. When it is "
        "full, links that bring more of them pause, with an alert.",
    )
    overflow: Overflow = setting(
        choice(Overflow),
        "reject_new",
        says="What a full store buffer does: reject_new, or drop_oldest, which leaves a gap record.",
    )
    safety: Safety = setting(
        choice(Safety),
        "none",
        says='"sil" for safety functions: needs reject_new, unconfirmed facts never expire, and what leaves unread is '
        "a gap record.",
    )
    retention_seconds: int = setting(
        WHOLE_SECONDS, "7d", says="How long confirmed facts are kept; a full buffer takes their place earlier."
    )
    max_age_seconds: int = setting(WHOLE_SECONDS, "7d", says="Age at which an unconfirmed fact expires, with a record.")
    key_horizon_seconds: int = setting(
        WHOLE_SECONDS,
        "30d",
        says="How long keys outlive their facts; a repeat is recognised for that long. On a sil stream it counts from "
        "when all links that bring it were last in step, and is at least 1d.",
    )
    keep_latest: bool | None = optional(
        FLAG,
        says="Whether the forward buffer keeps the newest fact of each subject and predicate beyond all ages (of "
        "100,000 of them); true on a sil stream when left out.",
        example=True,
    )
    latest_max_age_seconds: int | None = optional(
        WHOLE_SECONDS,
        says="Age of the newest fact of a subject and predicate in the forward buffer above which an alert is raised.",
        example="1h",
    )
    warning_fill_percent: float = setting(PERCENT, 50, says="Fill of a buffer from which a warning is raised.")
    alert_fill_percent: float = setting(PERCENT, 80, says="Fill of a buffer above which an alert is raised.")
    max_object_bytes: int = setting(SIZE, "1MiB", says="Largest object of a fact; what is larger is an artifact.")
    max_batch_facts: int = setting(COUNT, 1_000_000, says="Most facts in one batch.")
    max_batch_bytes: int = setting(SIZE, "1GiB", says="Largest batch.")
    plausible_past_seconds: float | None = optional(
        DURATION, says="How far before now a producer's produced_at may lie; not checked when left out.", example="30d"
    )
    plausible_future_seconds: float | None = optional(
        DURATION, says="How far after now a producer's produced_at may lie; not checked when left out.", example="5m"
    )

    @cached_property
    def store_policy(self) -> Policy:
        """Give the settings of the store buffer."""
        return Policy(
            capacity_bytes=self.store_capacity_bytes,
            overflow=self.overflow,
            safety="sil" if self.safety == Safety.SIL else "",
            retention_seconds=self.retention_seconds,
            max_age_seconds=self.max_age_seconds,
            key_horizon_seconds=self.key_horizon_seconds,
            warning_fill_percent=self.warning_fill_percent,
            alert_fill_percent=self.alert_fill_percent,
            quarantine_bytes=self.quarantine_bytes,
        )

    @cached_property
    def forward_policy(self) -> Policy:
        """Give the settings of the forward buffer, which drops nothing that somebody must read: pulling pauses."""
        sil = self.safety == Safety.SIL
        return replace(
            self.store_policy,
            capacity_bytes=self.forward_capacity_bytes,
            overflow=Overflow.REJECT_NEW,
            keep_latest=sil if self.keep_latest is None else self.keep_latest,
        )

    @cached_property
    def fact_limits(self) -> FactLimits:
        """Give the limits of the message model."""
        return FactLimits(
            max_object_bytes=self.max_object_bytes,
            max_batch_facts=self.max_batch_facts,
            max_batch_bytes=self.max_batch_bytes,
        )

    @cached_property
    def link_limits(self) -> FactLimits:
        """Give the limits for what a peer sends: how it batches is bounded by what was asked for, not as here."""
        own, usual = self.fact_limits, DEFAULT_LIMITS
        facts = max(own.max_batch_facts, usual.max_batch_facts)
        return replace(own, max_batch_facts=facts, max_batch_bytes=max(own.max_batch_bytes, usual.max_batch_bytes))

    @cached_property
    def plausibility(self) -> Plausibility | None:
        """Give how far produced_at may lie from now, None where nobody looks."""
        past, future = self.plausible_past_seconds, self.plausible_future_seconds
        return None if past is None and future is None else Plausibility(past, future)

    @property
    def expires_after_seconds(self) -> float | None:
        """Give the age at which an unconfirmed fact expires, None where nothing does."""
        return None if self.store_policy.is_sil else self.max_age_seconds


@dataclass(frozen=True, kw_only=True)
class Link:
    """An inbound link: a peer zone from which this node pulls."""

    name: str = given_name()
    zone: str = setting(ZONE_NAME, says="The zone that is pulled from.", example="enterprise")
    address: Addresses = setting(
        ADDRESSES,
        says="Where its node listens; of a zone with several nodes, where each of them does.",
        example="enterprise.example:9443",
    )
    server_identity: str | None = optional(
        IDENTITY_NAME,
        says="The certificate name its node must have; <zone>-bsfg when left out. It needs a row in [identities].",
        example="enterprise-bsfg",
    )
    streams: tuple[str, ...] = setting(STREAMS, [ANY], says="The streams to pull.", example=["operational"])
    buffer: Buffer = setting(
        choice(Buffer), "store", says='Which buffer to pull: "store" (what the peer produced) or "forward" (a relay).'
    )
    carry_only: tuple[str, ...] = setting(
        list_of(ZONE_NAME),
        [],
        says="Take only facts addressed to these zones; the rest is reported.",
        example=["plant-a"],
    )
    subjects: tuple[str, ...] = setting(
        PATTERNS,
        [],
        says="Take only facts about these subjects, * for any text; the sender leaves out the rest, which is reported.",
        example=["asset:press-*"],
    )
    predicates: tuple[str, ...] = setting(
        PATTERNS, [], says="Take only facts with these predicates, likewise.", example=["alarm_*"]
    )
    engine: Engine = setting(choice(Engine), "spark", says="What moves the facts: Spark, or the node itself.")
    rate_limit: int = setting(integer(0), 0, says="Most facts per second; 0 for no limit.", example=5_000)
    bandwidth: Bandwidth | None = optional(
        BANDWIDTH,
        says='Most bytes per second, facts and artifacts together: "1MiB", or by the time of day in UTC; other times '
        "have no bound.",
        example=["06:00-18:00 256KiB", "18:00-06:00 8MiB"],
    )
    compression: bool = setting(
        FLAG, False, says="Have the sender compress facts (Zstandard): for narrow lines. Artifacts come as they are."
    )
    priority: tuple[str, ...] = setting(
        list_of(STREAM_NAME),
        [],
        says="Streams that come first where bandwidth bounds: while one of them has facts to wait for, the others "
        "have a tenth.",
        example=["operational"],
    )
    batch_facts: int = setting(COUNT, 10_000, says="Most facts in one fetch.")
    fetch_wait_seconds: float = setting(DURATION, "10s", says="How long a fetch waits for new facts.")
    request_timeout_seconds: float = setting(DURATION, "30s", says="When a call that does not wait counts as failed.")
    backoff_first_seconds: float = setting(
        DURATION, "500ms", says="The first pause after a failure; it doubles from there."
    )
    backoff_max_seconds: float = setting(DURATION, "30s", says="The longest pause between two attempts.")
    lost_after_failures: int = setting(COUNT, 3, says="Failed fetches in a row after which the link is autonomous.")
    lost_after_seconds: float = setting(
        DURATION, "30s", says="Time without anybody who moves the link after which it is autonomous, with an alert."
    )
    reconciliation_backlog: int = setting(COUNT, 10_000, says="Backlog above which the link is in reconciliation.")
    normal_backlog: int = setting(integer(0), 100, says="Backlog at or below which the link is normal again.")
    max_age_seconds: int | None = optional(
        WHOLE_SECONDS,
        says="Age at the origin after which facts are refused; the stream's max_age when left out.",
        example="7d",
    )

    @property
    def filter(self) -> FactFilter:
        """Give which facts are asked for."""
        return FactFilter(self.subjects, self.predicates)

    @property
    def expected_server(self) -> str:
        """Give the certificate name that the peer's node must have."""
        return self.server_identity or f"{self.zone}-bsfg"

    @property
    def stalled_after_seconds(self) -> float:
        """Give how long an engine that holds the lease may say nothing: its longest turn, and as long as nobody may."""
        longest_turn = self.fetch_wait_seconds + self.request_timeout_seconds + self.backoff_max_seconds
        return self.lost_after_seconds + longest_turn


@dataclass(frozen=True, kw_only=True)
class Serve:
    """A peer zone that pulls from this node: the consumers that are created for it."""

    zone: str = given_name()
    streams: tuple[str, ...] = setting(STREAMS, [ANY], says="The streams it may pull.", example=["operational"])
    buffers: tuple[Buffer, ...] = setting(
        list_of(choice(Buffer)), ["store"], says='What it may pull; "forward" lets this zone relay what others sent.'
    )
    subjects: tuple[str, ...] = setting(
        PATTERNS,
        [],
        says="Give it only facts about these subjects, * for any text; the rest is reported as left out.",
        example=["asset:press-*"],
    )
    predicates: tuple[str, ...] = setting(
        PATTERNS, [], says="Give it only facts with these predicates, likewise.", example=["alarm_*"]
    )
    required: bool = setting(FLAG, True, says="Whether facts are kept until this zone has confirmed them.")
    start: Start = setting(choice(Start), "earliest", says="Where its consumers begin when they are created.")
    lost_after_seconds: float = setting(
        DURATION, "30s", says="Silence after which this side is autonomous; where it is required, with an alert."
    )

    @property
    def filter(self) -> FactFilter:
        """Give which facts it may have."""
        return FactFilter(self.subjects, self.predicates)
