"""Every error a user of BSFG can meet, each with a stable code, a retry verdict and a hint.

The codes are part of the product: the same string appears in Python, gRPC details, JSON bodies, log records and
``--json`` output. A duplicate is a result, never an error.
"""

from bsfg.errors.base import *  # noqa: F403
from bsfg.errors.operation import *  # noqa: F403
from bsfg.errors.requests import *  # noqa: F403
