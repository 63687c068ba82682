"""Everything between processes: TLS, certificates, and the protocol on both sides.

Importing this package switches TLS 1.2 off in gRPC, which only works before gRPC itself is loaded.
"""

from bsfg.wire.hardening import harden

harden()
