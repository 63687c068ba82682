"""`python -m bsfg` is the command line."""

from __future__ import annotations

import sys

from bsfg.cli import main

sys.exit(main())
