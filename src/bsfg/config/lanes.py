"""The keys of streams, of the links that bring facts, and of the peers that are served."""

# ruff: noqa: RUF009 - the calls in the class bodies declare fields; nothing they give is shared or mutable

from __future__ import annotations

from dataclasses import dataclass, replace

from bsfg.config.declare import given_name, optional, setting
from bsfg.config.kinds import (
    ADDRESS,
    ANY,
    COUNT,
    DURATION,
    FLAG,
    IDENTITY_NAME,
    PERCENT,
    SIZE,
    STREAMS,
    WHOLE_SECONDS,
    ZONE_NAME,
    Address,
    choice,
    integer,
    list_of,
)
from bsfg.config.words import Engine, Safety, Start
from bsfg.ports import Buffer
from bsfg.retention import Overflow, Policy
from bsfg.rules import Limits as FactLimits


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

    @property
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

    @property
    def forward_policy(self) -> Policy:
        """Give the settings of the forward buffer, which drops nothing that somebody must read: pulling pauses."""
        sil = self.safety == Safety.SIL
        return replace(
            self.store_policy,
            capacity_bytes=self.forward_capacity_bytes,
            overflow=Overflow.REJECT_NEW,
            keep_latest=sil if self.keep_latest is None else self.keep_latest,
        )

    @property
    def fact_limits(self) -> FactLimits:
        """Give the limits of the message model."""
        return FactLimits(
            max_object_bytes=self.max_object_bytes,
            max_batch_facts=self.max_batch_facts,
            max_batch_bytes=self.max_batch_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Link:
    """An inbound link: a peer zone from which this node pulls."""

    name: str = given_name()
    zone: str = setting(ZONE_NAME, says="The zone that is pulled from.", example="enterprise")
    address: Address = setting(ADDRESS, says="Where its node listens.", example="enterprise.example:9443")
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
    engine: Engine = setting(choice(Engine), "spark", says="What moves the facts: Spark, or the node itself.")
    rate_limit: int = setting(integer(0), 0, says="Most facts per second; 0 for no limit.", example=5_000)
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
    required: bool = setting(FLAG, True, says="Whether facts are kept until this zone has confirmed them.")
    start: Start = setting(choice(Start), "earliest", says="Where its consumers begin when they are created.")
    lost_after_seconds: float = setting(
        DURATION, "30s", says="Silence after which this side is autonomous; where it is required, with an alert."
    )
