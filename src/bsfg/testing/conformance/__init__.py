"""The conformance kit: one contract per port, to be subclassed by the tests of a storage.

A subclass supplies `StorageCase.make` and `StorageCase.reopen`; the contracts of faults ask for one method more. All
tests are plain pytest methods. See ``docs/writing-a-backend.md``.
"""

from __future__ import annotations

import pytest

_MODULES = (
    "artifact_case",
    "artifact_history",
    "artifact_uploads",
    "artifacts",
    "capacity",
    "case",
    "commits",
    "consumers",
    "cursors",
    "faults",
    "forward_buffer",
    "random_operations",
    "records",
    "removing",
    "replaying",
    "storage",
    "store_buffer",
    "writing",
)
# Assertions explain themselves only in modules that pytest rewrites, and it rewrites what is announced in time.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from bsfg.testing.conformance.artifacts import ArtifactStoreContract  # noqa: E402
from bsfg.testing.conformance.case import Lane, Rig, StorageCase, scenario  # noqa: E402
from bsfg.testing.conformance.cursors import CursorTrackerContract  # noqa: E402
from bsfg.testing.conformance.faults import BrokenMediumContract, HeldMediumContract, MediumFault  # noqa: E402
from bsfg.testing.conformance.forward_buffer import ForwardBufferContract  # noqa: E402
from bsfg.testing.conformance.random_operations import RandomOperationsContract  # noqa: E402
from bsfg.testing.conformance.records import SetsAsideContract  # noqa: E402
from bsfg.testing.conformance.storage import StorageContract  # noqa: E402
from bsfg.testing.conformance.store_buffer import StoreBufferContract  # noqa: E402

__all__ = [
    "ArtifactStoreContract",
    "BrokenMediumContract",
    "CursorTrackerContract",
    "ForwardBufferContract",
    "HeldMediumContract",
    "Lane",
    "MediumFault",
    "RandomOperationsContract",
    "Rig",
    "SetsAsideContract",
    "StorageCase",
    "StorageContract",
    "StoreBufferContract",
    "scenario",
]
