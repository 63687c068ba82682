"""Everything between processes: TLS, certificates, and the protocol on both sides.

Importing this package switches TLS 1.2 off in gRPC, and its chatter on standard error, which only works before gRPC
itself is loaded.
"""

import os

from bsfg.wire.hardening import harden

harden()
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
