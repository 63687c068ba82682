"""The audit trail as values: who did what, or was kept from it, in records that are chained to each other.

Each record has a number, from 1 on without a gap, and the SHA-256 of the record before it. So whoever alters, removes,
inserts or moves a record must alter all that follow it, and the last digest, which stands in a place of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

BEGINNING = hashlib.sha256(b"bsfg audit trail").hexdigest()
"""The digest before the first record."""

DONE, REFUSED, FAILED = "done", "refused", "failed"
"""How an event ended: it was done, the caller may not do it, or it could not be done."""

STRANGER = "stranger"
"""What everybody is called together who is in no table."""

NODE = "node"
"""The identity of what the node does by itself."""

TEXT_CHARACTERS_MAX = 500
NAME_CHARACTERS_MAX = 200

ACTIONS: dict[str, str] = {
    "backup_made": "The zone was copied: by whom, where to, and how much.",
    "buffer_truncated": "An operator removed what everybody had confirmed, or tried to.",
    "certificate_reloaded": "Changed certificate files came into use.",
    "config_loaded": "The configuration with this digest came into force.",
    "consumer_created": "A durable consumer was created.",
    "consumer_retired": "A durable consumer was ended; what it had not confirmed became gap records.",
    "events_lost": "Events could not be written and had to be given up; the record says how many.",
    "gate_held": "An operator, or the node itself, closed a gate.",
    "gate_released": "An operator opened a gate.",
    "handshake_refused": "Somebody connected and no TLS handshake came of it. Repeats are counted.",
    "migrated": "The zone was moved from one storage to another; the record is on both sides.",
    "node_started": "The node serves.",
    "node_stopped": "The node was stopped in order; after a kill there is none.",
    "quarantine_dropped": "An operator gave up a quarantined fact.",
    "quarantine_retried": "An operator had a quarantined fact put again.",
    "request_refused": "A caller asked for what it may not. Repeats are counted in one record a minute.",
    "restored": "The folder was brought back from a backup.",
    "salvaged": "The folder was made of what was readable in a damaged one.",
    "sign_in_refused": "Somebody showed a token that is not one of this zone. Repeats are counted.",
    "signed_in": "Somebody signed in to the dashboard.",
    "signed_out": "Somebody signed out of the dashboard.",
    "trail_begun": "The trail begins here, with a name of its own.",
    "trail_damaged": "Something of the trail, or beside it, was missing, not as it was written, or not ours.",
    "trail_trimmed": "The oldest files of the trail left, by age or size; the record says up to which number.",
}
"""Every action that a record can have, and what it means."""

OF_COMMANDS = frozenset({"backup_made", "migrated", "restored", "salvaged"})
"""The actions that commands beside the node tell of; of all others the node alone knows."""

USER = "user:"
"""How the identity of a user of the system begins, who runs a command."""


@dataclass(frozen=True, slots=True)
class TrailEvent:
    """Something that happened: who, from where, what, to which thing, how it ended, by which rule and why."""

    action: str
    identity: str
    address: str = ""
    about: str = ""
    outcome: str = DONE
    rule: str = ""
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    at_unix_ms: int = 0

    def at(self, unix_ms: int) -> TrailEvent:
        """Give the event with its time, unless it has one."""
        return self if self.at_unix_ms else replace(self, at_unix_ms=unix_ms)

    def bounded(self) -> TrailEvent:
        """Give the event with texts that are not without end: some are the words of strangers."""
        return replace(
            self,
            identity=self.identity[:NAME_CHARACTERS_MAX],
            address=self.address[:NAME_CHARACTERS_MAX],
            about=self.about[:TEXT_CHARACTERS_MAX],
            rule=self.rule[:NAME_CHARACTERS_MAX],
            reason=self.reason[:TEXT_CHARACTERS_MAX],
        )


@dataclass(frozen=True, slots=True)
class TrailRecord:
    """An event in its place in the chain."""

    number: int
    before: str
    event: TrailEvent

    def head(self) -> dict[str, Any]:
        """Give what is stored and digested: what is empty is left out."""
        event = self.event
        words = {name: getattr(event, name) for name in ("identity", "address", "about", "outcome", "rule", "reason")}
        filled: dict[str, Any] = {name: text for name, text in words.items() if text}
        if event.details:
            filled["details"] = dict(event.details)
        return {"n": self.number, "before": self.before, "at": event.at_unix_ms, "action": event.action, **filled}

    @property
    def digest(self) -> str:
        """Give what the next record is chained to."""
        return digest_of(self.head())

    def document(self) -> dict[str, Any]:
        """Give the form for programs: every key is there."""
        event = self.event
        return {
            "number": self.number,
            "at_unix_ms": event.at_unix_ms,
            "action": event.action,
            "identity": event.identity,
            "address": event.address,
            "about": event.about,
            "outcome": event.outcome,
            "rule": event.rule,
            "reason": event.reason,
            "details": dict(event.details),
            "before": self.before,
            "digest": self.digest,
        }


def digest_of(head: Mapping[str, Any]) -> str:
    """Give the digest of a record as it is stored."""
    return hashlib.sha256(orjson.dumps(dict(head))).hexdigest()


def record_from(head: Mapping[str, Any]) -> TrailRecord | None:
    """Read a record, None when it is none of ours."""
    number, before, at, action = (head.get(name) for name in ("n", "before", "at", "action"))
    details = head.get("details", {})
    if not isinstance(number, int) or number < 1 or not isinstance(at, int) or not isinstance(details, dict):
        return None
    names = ("identity", "address", "about", "outcome", "rule", "reason")
    words = {name: head.get(name, "") for name in names}
    if not all(isinstance(text, str) for text in (before, action, *words.values())):
        return None
    return TrailRecord(number, str(before), TrailEvent(str(action), **words, details=details, at_unix_ms=at))


@dataclass(frozen=True, slots=True)
class TrailQuery:
    """Which records are asked for; what is not given does not matter. ``until_unix_ms`` is exclusive."""

    since_unix_ms: int | None = None
    until_unix_ms: int | None = None
    identity: str = ""
    action: str = ""
    outcome: str = ""

    def wants(self, event: TrailEvent) -> bool:
        """Tell whether an event is one of them."""
        if self.since_unix_ms is not None and event.at_unix_ms < self.since_unix_ms:
            return False
        if self.until_unix_ms is not None and event.at_unix_ms >= self.until_unix_ms:
            return False
        if self.identity and self.identity not in (event.identity, event.details.get("name")):
            return False
        return self.action in ("", event.action) and self.outcome in ("", event.outcome)
