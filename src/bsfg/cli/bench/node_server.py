"""A node that ends when whoever started it does: `bsfg node`, with its standard input as the leash."""

from __future__ import annotations

import os
import signal
import sys
import threading


def leash() -> None:
    """Stop this process cleanly when its standard input ends, which it also does when its parent is killed."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    from bsfg.cli.app import run

    leash()
    sys.exit(run(["node", *sys.argv[1:]]))
