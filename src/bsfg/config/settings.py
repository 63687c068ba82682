"""The whole configuration file: its tables, and the keys that concern the node itself."""

# ruff: noqa: RUF009 - the calls in the class bodies declare fields; nothing they give is shared or mutable

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from bsfg.config.access import Authority, Identity, Link, Listen, Serve, Signing, Stream, Tls, Token, Zone
from bsfg.config.declare import given_name, optional, setting, table, tables
from bsfg.config.kinds import (
    ANY,
    ARGUMENTS,
    AUTHORITY_NAME,
    BACKEND_NAME,
    COUNT,
    DURATION,
    FLAG,
    FREE_TABLE,
    IDENTITY_NAME,
    LINK_NAME,
    NATS_URL,
    PATH,
    PIPELINE_NAME,
    REPLICAS,
    SCHEMA_NAME,
    SIZE,
    STREAM_NAME,
    TEXT,
    TOKEN_NAME,
    URL,
    WHOLE_SECONDS,
    ZONE_NAME,
    LogFormat,
    LogLevel,
    PipelineKind,
    choice,
    list_of,
)
from bsfg.signatures import TrustedKeys, read_key

if TYPE_CHECKING:
    from bsfg.wire.tls import TlsFiles


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """Where alerts go besides log and metrics."""

    webhook: str | None = optional(
        URL, says="Each alert is posted here as JSON.", example="https://alarms.example/bsfg"
    )
    command: tuple[str, ...] | None = optional(
        ARGUMENTS,
        says="Each alert is given to this command as JSON on its input.",
        example=["/usr/bin/logger", "-t", "bsfg"],
    )
    timeout_seconds: float = setting(DURATION, "10s", says="When a delivery counts as failed.")
    repeat_every_seconds: float = setting(DURATION, "1h", says="How often an alert that lasts is sent again.")


@dataclass(frozen=True, kw_only=True)
class DashboardSettings:
    """The dashboard of the HTTP service."""

    enabled: bool = setting(FLAG, True, says="Whether the node serves its dashboard, at /dashboard/.")
    session_seconds: float = setting(DURATION, "12h", says="How long one may look on before signing in again.")
    idle_seconds: float = setting(
        DURATION,
        "30m",
        says="How long a session that may act lasts while nobody uses it; one that only looks is not ended by this.",
    )
    watchers: int = setting(COUNT, 32, says="Browsers that may watch at once; one more is told to come back later.")


@dataclass(frozen=True, kw_only=True)
class ArtifactSettings:
    """Files that facts refer to by digest."""

    folder: PurePath | None = optional(
        PATH, says="Where artifacts are kept; inside the data folder when left out.", example="artifacts"
    )
    max_artifact_bytes: int = setting(SIZE, "10GiB", says="Largest artifact.")
    capacity_bytes: int = setting(SIZE, "100GiB", says="Size of the store.")
    orphan_grace_seconds: int = setting(
        WHOLE_SECONDS, "24h", says="Age at which an artifact that no fact names may go."
    )


@dataclass(frozen=True, kw_only=True)
class StorageTable:
    """What keeps the zone's facts, and how the embedded log keeps its folder."""

    backend: str = setting(
        BACKEND_NAME,
        "log",
        says="What keeps facts and consumers: log (files in the data folder), postgres (see [storage.postgres]), "
        "jetstream (see [storage.jetstream]), memory (for tests; a restart loses all), or the name that an installed "
        "package gives its own.",
    )
    options: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Given as it stands to a storage of another package, which says what it understands.",
        example={"path": "facts.db"},
    )
    reserve_bytes: int = setting(
        SIZE,
        "64MiB",
        says="Space that is taken for nothing, and given to confirmations and truncation when the disk is full.",
    )
    group_reads: bool = setting(
        FLAG,
        False,
        says="Whether the group of the node's account may read what the node stores, such as a reader of its own "
        "account; else nobody but the node's account may.",
    )
    scrub: bool = setting(FLAG, True, says="Whether the node re-reads old files and raises an alert when they decay.")
    scrub_period_seconds: float = setting(DURATION, "7d", says="How often everything is re-read.")
    scrub_rate_bytes: int = setting(SIZE, "4MiB", says="The most that is re-read in a second.")


@dataclass(frozen=True, kw_only=True)
class PostgresTable:
    """Where PostgreSQL is."""

    dsn: str | None = optional(
        TEXT,
        says="How the server is reached, as libpq reads it. Keep the password out of it: `passfile=` names a file.",
        example="host=db.example dbname=plant user=bsfg sslmode=verify-full",
    )
    schema: str = setting(SCHEMA_NAME, "bsfg", says="The schema with the zone's tables; each zone has one of its own.")
    patience_seconds: float = setting(
        DURATION, "20s", says="How long callers wait for a server that went away before they are told so."
    )
    takeover_after_seconds: float = setting(
        DURATION,
        "5s",
        says="How long the zone's active node may give no sign of life before one that stands by takes over.",
    )
    allow_unsafe: bool = setting(
        FLAG,
        False,
        says="Whether the node starts although the server has fsync, synchronous_commit or full_page_writes off; "
        "acknowledged facts may then be lost.",
    )


@dataclass(frozen=True, kw_only=True)
class JetStreamTable:
    """Where NATS JetStream is."""

    servers: tuple[str, ...] | None = optional(
        list_of(NATS_URL),
        says="How the servers are reached; the first that lets the node in is used. `tls://` demands TLS.",
        example=["nats://nats-1.example:4222", "nats://nats-2.example:4222"],
    )
    prefix: str = setting(
        SCHEMA_NAME, "bsfg", says="What the names of all streams and subjects begin with; the zone's name follows."
    )
    replicas: int = setting(
        REPLICAS, 1, says="How many servers keep each stream that the node makes. With three, one may be lost."
    )
    monitor_url: str | None = optional(
        URL,
        says="Where a single server says how it is set up, so that the node sees that sync_interval is always.",
        example="http://nats-1.example:8222",
    )
    credentials: PurePath | None = optional(
        PATH, says="The file with the node's credentials, as `nsc` writes it.", example="nats/plant.creds"
    )
    ca: PurePath | None = optional(
        PATH, says="Certificates of the authorities that the servers must be signed by.", example="nats/ca.crt"
    )
    certificate: PurePath | None = optional(
        PATH, says="The certificate that the node shows the servers.", example="nats/plant.crt"
    )
    key: PurePath | None = optional(PATH, says="The private key of that certificate.", example="nats/plant.key")
    patience_seconds: float = setting(
        DURATION, "20s", says="How long callers wait for servers that went away before they are told so."
    )
    allow_unsafe: bool = setting(
        FLAG,
        False,
        says="Whether the node starts although it cannot see that the server syncs what it acknowledges; acknowledged "
        "facts may then be lost.",
    )


@dataclass(frozen=True, kw_only=True)
class AuditTrailTable:
    """How much is kept of who did what, or was kept from it."""

    retention_seconds: float = setting(
        DURATION, "400d", says="How long records are kept; a file leaves when all its records are older."
    )
    max_size_bytes: int = setting(
        SIZE, "1GiB", says="Size of all its files; beyond it the oldest leave before their time, with an alert."
    )


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """What callers may ask of the node at once."""

    message_bytes: int = setting(
        SIZE,
        "4MiB",
        says="Largest message on the wire; more where a stream allows facts that need it. Senders cut their batches.",
    )
    memory_ceiling_bytes: int = setting(
        SIZE,
        "1GiB",
        says="Memory that the node stays below whatever callers send; what may be under way at once follows from it.",
    )
    concurrent_requests: int = setting(COUNT, 512, says="Requests served at once; more are refused with a retry hint.")
    concurrent_per_identity: int = setting(COUNT, 256, says="Requests served at once for one identity.")
    connections: int = setting(
        COUNT,
        1_000,
        says="Open connections of each of the two services; fewer where the system allows few descriptors.",
    )
    request_timeout_seconds: float = setting(DURATION, "60s", says="When a request that does not stream is ended.")
    idle_timeout_seconds: float = setting(DURATION, "60s", says="When a silent stream or connection is ended.")
    fetch_wait_max_seconds: float = setting(DURATION, "60s", says="The longest wait that a fetch may ask for.")
    connection_age_seconds: float = setting(
        DURATION,
        "1h",
        says="How long a connection takes new calls, and a stream new requests; callers connect again by themselves.",
    )


@dataclass(frozen=True, kw_only=True)
class Log:
    """What is logged, to standard error."""

    level: LogLevel = setting(choice(LogLevel), "info", says="The least severe records that are written.")
    format: LogFormat = setting(choice(LogFormat), "json", says="json for machines, text for people.")


@dataclass(frozen=True, kw_only=True)
class PipelineTable:
    """A pipeline that `bsfg pipeline run` keeps alive: what it does, with the options of the command of that name."""

    name: str = given_name()
    replicate: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Move inbound links: the options of `bsfg pipeline replicate` by their names, with _ for -. All links "
        'with engine = "spark" when empty.',
        example={"link": ["from-plant-a"]},
    )
    land: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Land a buffer as files: the options of `bsfg pipeline land`. Paths start from the folder of this file.",
        example={"stream": "operational", "buffer": "forward", "out": "lake"},
    )
    ingest: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Make facts of the files of a folder, and of those that come: the options of `bsfg pipeline ingest`.",
        example={"files": ["inbox"], "mapping": "readings.toml"},
    )
    audit: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Compare both ends of a link: the options of `bsfg pipeline audit`. What is not clean is an alert.",
        example={"link": "from-plant-a"},
    )
    sql: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Write the facts of a consumer into tables of PostgreSQL: the options of `bsfg pipeline sql`.",
        example={"consumer": "historian", "dsn_file": "dsn"},
    )
    webhook: Mapping[str, object] | None = optional(
        FREE_TABLE,
        says="Post the facts of a consumer to a web server: the options of `bsfg pipeline webhook`.",
        example={"consumer": "tickets", "url": "https://tickets.example/facts", "secret": "secret"},
    )
    every_seconds: float | None = optional(
        DURATION,
        says="From the end of a run of ingest or audit to the begin of the next: 30s for ingest, 1d for audit when "
        "left out. The others never end by themselves.",
        example="12h",
    )
    settled_seconds: float = setting(
        DURATION, "5s", says="How long a file must not have changed before ingest takes it up; it may still be written."
    )
    identity: str | None = optional(
        IDENTITY_NAME,
        says="Who calls the node, a row of [identities]; found by its role when left out, as by the command.",
        example="lake",
    )
    restart_after_seconds: float = setting(
        DURATION, "5s", says="The pause after a failure; it doubles with every further one."
    )
    restart_max_seconds: float = setting(DURATION, "5m", says="The longest pause.")
    enabled: bool = setting(FLAG, True, says="Whether it runs.")

    @property
    def kinds(self) -> tuple[PipelineKind, ...]:
        """Give what the table asks for; it is to be one thing."""
        return tuple(kind for kind in PipelineKind if getattr(self, kind) is not None)

    @property
    def kind(self) -> PipelineKind:
        """Give what the pipeline does."""
        return self.kinds[0]

    @property
    def options(self) -> Mapping[str, object]:
        """Give the options of its command, as they stand in the file."""
        found: Mapping[str, object] = getattr(self, self.kind)
        return found

    @property
    def pause_seconds(self) -> float | None:
        """Give the time between two runs, None for what goes on until it is ended."""
        usual = {PipelineKind.INGEST: 30.0, PipelineKind.AUDIT: 86_400.0}.get(self.kind)
        return usual if self.every_seconds is None else self.every_seconds


@dataclass(frozen=True, kw_only=True)
class ZoneConfig:
    """The whole configuration of one zone's node."""

    zone: Zone = table("Who this zone is.")
    listen: Listen = table("Where the node can be reached.")
    tls: Tls = table("The node's certificate. Files are read again when they change; no restart is needed.")
    authorities: Mapping[str, Authority] = tables(
        "Which authority of [tls] ca speaks for which zones. Without a row here the authority of the node's own "
        "certificate speaks for all, and no other for anybody; with rows, those and nobody else.",
        named=AUTHORITY_NAME,
        example_name="corporate",
    )
    identities: Mapping[str, Identity] = tables(
        "Who may call, by the name in the certificate; anybody else is refused.",
        named=IDENTITY_NAME,
        example_name="enterprise-bsfg",
    )
    tokens: Mapping[str, Token] = tables(
        "Who may use the dashboard without a certificate. With a row here, the HTTP service no longer wants a "
        "certificate from everybody at the door, but from every request that shows no token.",
        named=TOKEN_NAME,
        example_name="control-room",
    )
    streams: Mapping[str, Stream] = tables(
        "The lanes of facts, each with a store buffer and a forward buffer.",
        named=STREAM_NAME,
        example_name="operational",
    )
    links: Mapping[str, Link] = tables(
        "Inbound: the zones this node pulls from.", named=LINK_NAME, example_name="from-enterprise"
    )
    serve: Mapping[str, Serve] = tables(
        "Outbound: the zones that pull from this node.", named=ZONE_NAME, example_name="enterprise"
    )
    signing: Mapping[str, Signing] = tables(
        "Whose facts must be signed, by the zone that says them. They are checked when they are appended and when a "
        "link brings them; facts of other zones may carry a signature that is not looked at.",
        named=ZONE_NAME,
        example_name="plant-a",
    )
    pipelines: Mapping[str, PipelineTable] = tables(
        "What `bsfg pipeline run` keeps alive in one process: each table is one pipeline, and has one of replicate, "
        "land, ingest, audit, sql and webhook.",
        named=PIPELINE_NAME,
        example_name="lake",
    )
    alerts: Alerts = table("Where alerts go besides log and metrics.")
    dashboard: DashboardSettings = table("The dashboard of the HTTP service.")
    storage: StorageTable = table("What keeps the zone's facts, and how the embedded log keeps its folder.")
    postgres: PostgresTable = table('Where PostgreSQL is, with backend = "postgres".', name="storage.postgres")
    jetstream: JetStreamTable = table('Where NATS JetStream is, with backend = "jetstream".', name="storage.jetstream")
    artifacts: ArtifactSettings = table("Files that facts refer to by digest.")
    audit_trail: AuditTrailTable = table(
        "The audit trail in the data folder: who did what, or was kept from it. `bsfg audit-trail` reads it."
    )
    limits: LimitSettings = table("What callers may ask of the node at once.")
    log: Log = table("What the node logs, to standard error.")
    source: Path = Path("zone.toml")
    digest: str = field(default="", compare=False)
    """That of the text which this was read from: the file may be another one by now."""

    def path(self, relative: PurePath) -> Path:
        """Resolve a path of the file against the folder the file is in."""
        return self.source.parent / relative

    @property
    def data_folder(self) -> Path:
        """Give the folder of buffers and cursors."""
        return self.path(self.zone.data_folder)

    @property
    def tls_files(self) -> TlsFiles | None:
        """Give the files of the node's certificate, None when there are none."""
        from bsfg.wire.tls import TlsFiles

        tls = self.tls
        if tls.ca is None or tls.certificate is None or tls.key is None:
            return None
        return TlsFiles(self.path(tls.ca), self.path(tls.certificate), self.path(tls.key))

    @property
    def artifacts_folder(self) -> Path:
        """Give the folder of artifacts."""
        return self.path(self.artifacts.folder) if self.artifacts.folder else self.data_folder / "artifacts"

    @property
    def trusted_keys(self) -> TrustedKeys:
        """Give the keys by which signatures are checked."""
        rows = self.signing.items()
        return TrustedKeys(
            {zone: dict(map(read_key, row.keys)) for zone, row in rows},
            unsigned=frozenset(zone for zone, row in rows if not row.require),
            v1=frozenset(zone for zone, row in rows if row.allow_v1),
        )

    def streams_of(self, row: Identity | Link | Serve) -> tuple[str, ...]:
        """Give the streams that a row means, in the order of the file; ``*`` means all."""
        return (
            tuple(self.streams) if ANY in row.streams else tuple(name for name in self.streams if name in row.streams)
        )
