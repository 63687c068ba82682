"""A command of ours that ends when whoever started it does: its standard input is the leash.

Run as `python -m bsfg.cli.demo.child node -c zone.toml` and so on.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from bsfg.cli.app import run
    from bsfg.cli.bench.node_server import leash

    leash()
    sys.exit(run(sys.argv[1:]))
