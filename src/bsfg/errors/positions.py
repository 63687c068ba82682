"""Errors of offsets, consumers and gates."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class OffsetOutOfRange(BsfgError):
    """The offset lies beyond the end of the buffer."""

    code = "offset_out_of_range"
    default_hint = "Ask for the buffer's stats and use an offset below its end."


class TruncateRefused(BsfgError):
    """The entries to be removed are not all confirmed by the required consumers."""

    code = "truncate_refused"
    default_hint = "Truncate at most to committed + 1, or retire the consumer that holds the frontier back."


class UnknownConsumer(BsfgError):
    """No durable consumer has this name."""

    code = "unknown_consumer"
    default_hint = "Create it first with a start position (earliest, latest, an offset or a time)."


class ConsumerExists(BsfgError):
    """A consumer of this name exists with other settings."""

    code = "consumer_exists"
    default_hint = "Use another name, or retire the existing consumer with a reason."


class ConsumerRetired(BsfgError):
    """The consumer was retired by an operator."""

    code = "consumer_retired"
    default_hint = "Create a consumer with a new name; what the retired one missed is listed as gap records."


class TooManyRanges(BsfgError):
    """The consumer holds more open confirmation ranges than the limit allows."""

    code = "too_many_ranges"
    retryable = True
    default_hint = "Confirm the missing offsets below the open ranges first."


class InvalidTransition(BsfgError):
    """A gate cannot make this move from its present mode."""

    code = "invalid_transition"
    default_hint = "Look at the gate's mode; a held gate must be released first."
