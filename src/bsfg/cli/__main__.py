"""Lets `python -m bsfg.cli` run the command line."""

import sys

from bsfg.cli import main

sys.exit(main())
