"""Checks of the clock: ages, expiry and certificates are judged by it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from datetime import UTC, datetime

from bsfg.cli.doctor.findings import Finding, Says, Subject
from bsfg.cli.output import time_text

EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)
"""No machine that runs this was set up before."""

AHEAD_MS = 60_000
_UNSYNCHRONISED = 0x40

_says = Says("clock")


def clock(subject: Subject) -> Iterator[Finding]:
    """Look whether the time is plausible, kept by a time service, and not behind what is stored."""
    now = subject.now
    if now < EARLIEST:
        yield _says.problem(f"the clock says {now:%Y-%m-%d %H:%M}Z, which cannot be", "Set it, and enable NTP.")
        return
    newest = _newest(subject)
    if newest is not None and newest > now.timestamp() * 1000 + AHEAD_MS:
        says = f"the newest stored fact is of {time_text(newest)}, but the clock says {now:%Y-%m-%d %H:%M:%S}Z"
        do = "Find out when the clock was wrong; new facts carry the later time until the clock has passed it."
        yield _says.warning(says, do)
    synchronised = kernel_synchronised()
    if synchronised is None:
        yield _says.ok(f"the clock says {now:%Y-%m-%d %H:%M:%S}Z; whether it is synchronised cannot be told here")
    elif synchronised:
        yield _says.ok(f"the clock says {now:%Y-%m-%d %H:%M:%S}Z and is synchronised")
    else:
        do = "Enable a time service (chrony, systemd-timesyncd); ages, expiry and certificates go by this clock."
        yield _says.warning(f"the clock says {now:%Y-%m-%d %H:%M:%S}Z but no time service keeps it", do)


class _Timex(ctypes.Structure):
    """The kernel's ``struct timex``: the status is its sixth long; the rest is room enough."""

    _fields_ = [("values", ctypes.c_long * 64)]


def kernel_synchronised() -> bool | None:
    """Ask the kernel whether a time service keeps the clock; None when it does not say."""
    try:
        answer = _Timex()
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(answer))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return not answer.values[5] & 0xFFFF_FFFF & _UNSYNCHRONISED


def _newest(subject: Subject) -> int | None:
    from bsfg.errors import BsfgError

    try:
        times = [log.newest_unix_ms for log in subject.data.logs]
    except BsfgError:
        return None
    return max((each for each in times if each is not None), default=None)
