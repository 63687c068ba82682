"""Makes gRPC refuse everything below TLS 1.3, for which its Python library has no setting.

gRPC reads the list of TLS 1.2 cipher suites from the environment when it is loaded; TLS 1.3 has suites of its own,
which the list does not touch. A list of pre-shared-key suites alone leaves nothing that TLS 1.2 could choose, because
no pre-shared key is ever set, and it does so for every kind of certificate and on both sides of a connection.
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
