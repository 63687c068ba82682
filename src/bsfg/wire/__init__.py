"""Everything between processes: TLS, certificates, and the protocol on both sides.

Importing this package switches TLS 1.2 off in gRPC, and its chatter on standard error, which only works before gRPC
itself is loaded.
"""

from __future__ import annotations

import os
import sys

from bsfg.errors import TlsNotHardened

VARIABLE = "GRPC_SSL_CIPHER_SUITES"
SUITES = "ECDHE-PSK-AES128-CBC-SHA"

_state = {"too_late": False}


def harden() -> None:
    """Set the suites; remember if gRPC was loaded too early for them to count. Repeats are harmless."""
    if os.environ.get(VARIABLE) == SUITES:
        return
    os.environ[VARIABLE] = SUITES
    _state["too_late"] = "grpc._cython.cygrpc" in sys.modules


def require_hardened() -> None:
    """Raise `TlsNotHardened` unless gRPC refuses TLS 1.2 in this process."""
    harden()
    if _state["too_late"]:
        raise TlsNotHardened(
            "grpc was imported before bsfg, so that it would still accept TLS 1.2",
            hint=f"Import bsfg before grpc, or start the process with {VARIABLE}={SUITES} in its environment.",
        )


harden()
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
