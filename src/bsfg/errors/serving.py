"""Errors of a node that cannot answer, or not now."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class Overloaded(BsfgError):
    """The node serves as many requests as it may, for this caller or for all."""

    code = "overloaded"
    retryable = True
    default_hint = "Wait a moment and try again; send larger batches over fewer connections."


class TimedOut(BsfgError):
    """The answer did not come in time; what was asked may or may not have happened."""

    code = "timed_out"
    retryable = True
    default_hint = "Repeat the request with the same ids; allow more time if it happens often."


class MessageTooLarge(BsfgError):
    """A message on the wire exceeds the limit of its receiver."""

    code = "message_too_large"
    default_hint = "Split the batch, or raise `message` in [limits] of the node."


class PortUnavailable(BsfgError):
    """The node cannot listen where its configuration says: another process does, or this user may not."""

    code = "port_unavailable"
    default_hint = "Stop what uses the port (`bsfg doctor` names it), or choose another one in [listen]."


class NotReady(BsfgError):
    """The node is starting, stopping, or has lost its storage."""

    code = "not_ready"
    retryable = True
    default_hint = "Wait until /readyz answers 200; the node's log says what it waits for."


class FactNotFound(BsfgError):
    """No fact with this key is retained here."""

    code = "fact_not_found"
    default_hint = "Check stream, from_zone and message_id; what left the buffer is listed as gap records."


class UnknownStream(BsfgError):
    """The node has no stream of this name."""

    code = "unknown_stream"
    default_hint = "Use one of the configured streams, or add a table [streams.NAME] to the configuration."


class UnknownService(BsfgError):
    """A health check asks for a service that the node does not have."""

    code = "unknown_service"
    default_hint = "Ask for bsfg.v1.Boundary, bsfg.v1.Admin, or without a name for the whole node."


class UnknownLink(BsfgError):
    """The node has no link of this name, or not on this side."""

    code = "unknown_link"
    default_hint = "List the links with `bsfg gate`; inbound ones are named in [links], outbound ones in [serve]."


class GateHeld(BsfgError):
    """An operator holds the gate of this link; ``details`` name it."""

    code = "gate_held"
    retryable = True
    default_hint = "Wait until the gate is released; `bsfg gate` shows who holds it and why."


class LeaseHeld(BsfgError):
    """Somebody else holds the lease of the link; ``details`` say who, and for how long at most."""

    code = "lease_held"
    retryable = True
    default_hint = "Let the other pipeline work, or stop it; its lease ends by itself when it is gone."


class LeaseLost(BsfgError):
    """The lease of the link is not, or no longer, held with this token."""

    code = "lease_lost"
    default_hint = "Stop what is under way and take the lease again."
