"""Buffers and cursors in the memory of one process, for tests and simulation.

It keeps every promise of the ports but the one that it cannot: what it calls durable is its `Medium`, which outlives
the storage and not the process.
"""

from __future__ import annotations

from bsfg.stores.memory.state import Fault, Medium
from bsfg.stores.memory.storage import MemoryStorage

__all__ = ["Fault", "Medium", "MemoryStorage"]
