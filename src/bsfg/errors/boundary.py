"""Errors of what does not pass between zones."""

from __future__ import annotations

from bsfg.errors.base import BsfgError


class ZoneNotAllowed(BsfgError):
    """The caller or the link may not speak for this from_zone, or not send to this to_zone."""

    code = "zone_not_allowed"
    default_hint = "Use the zone of your certificate, or add the zone to the table of zones this link may carry."


class ImplausibleTime(BsfgError):
    """A fact's produced_at lies outside the plausibility window of the stream."""

    code = "implausible_time"
    default_hint = "Set the producer's clock, or widen or switch off the plausibility window of the stream."


class FrameInvalid(BsfgError):
    """What the other side sent is not a sequence of frames: holes, overlaps, or offsets that are not its own."""

    code = "frame_invalid"
    default_hint = "The other side is defective or not what it claims to be; inspect it before the link is released."
