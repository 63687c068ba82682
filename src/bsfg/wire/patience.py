"""Patience with callers who send one wrong request after the other: it ends, and their answers come later and later.

A wrong request costs the node as much as a right one. Whoever makes many of them, out of malice or in a loop without a
pause, is slowed down until he costs little, while everybody else is served as before. Nobody is locked out: a caller
who stops is forgiven within seconds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from bsfg.errors import BsfgError

BLAMED = frozenset(
    {
        "artifact_missing",
        "certificate_invalid",
        "digest_mismatch",
        "fact_too_large",
        "frame_invalid",
        "identity_revoked",
        "identity_unknown",
        "implausible_time",
        "invalid_argument",
        "invalid_fact",
        "message_too_large",
        "offset_out_of_range",
        "permission_denied",
        "sign_in_required",
        "signature_invalid",
        "signature_missing",
        "unknown_consumer",
        "unknown_link",
        "unknown_service",
        "unknown_stream",
        "zone_not_allowed",
    }
)
"""Errors that the caller could have known before."""

FREE_FAULTS = 20.0
DELAY_SECONDS_PER_FAULT = 0.02
DELAY_SECONDS_MAX = 2.0
FORGIVEN_PER_SECOND = 10.0
CALLERS_MAX = 10_000


class Patience:
    """Counts the faults of each caller and says how long the answer to the next one waits."""

    def __init__(self, now_seconds: Callable[[], float] = time.monotonic) -> None:
        self._now_seconds = now_seconds
        self._faults: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def delay_seconds(self, caller: str, error: Exception) -> float:
        """Take note of an error and give how long its answer is held back."""
        if not isinstance(error, BsfgError) or error.code not in BLAMED:
            return 0.0
        return self.asked(caller)

    def asked(self, caller: str) -> float:
        """Take note of a request that its caller need not make often, and give how long its answer is held back."""
        now = self._now_seconds()
        faults, since = self._faults.pop(caller, (0.0, now))
        faults = max(0.0, faults - FORGIVEN_PER_SECOND * (now - since)) + 1.0
        # Beyond this more faults would only take longer to forgive.
        faults = min(faults, FREE_FAULTS + DELAY_SECONDS_MAX / DELAY_SECONDS_PER_FAULT)
        self._faults[caller] = (faults, now)
        if len(self._faults) > CALLERS_MAX:
            self._faults.popitem(last=False)
        return min(DELAY_SECONDS_MAX, max(0.0, faults - FREE_FAULTS) * DELAY_SECONDS_PER_FAULT)
