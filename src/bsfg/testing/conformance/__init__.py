"""The conformance kit: one contract per port, to be subclassed by the tests of a storage.

A subclass supplies `StorageCase.make` and `StorageCase.reopen`; the contracts of faults ask for one method more. All
tests are plain pytest methods. See ``docs/writing-a-backend.md``.
"""

from __future__ import annotations

import pytest

_MODULES = (
    "artifact_uploads",
    "artifacts",
    "buffers",
    "case",
    "cursors",
    "faults",
    "records",
    "removing",
    "replaying",
    "storage",
    "writing",
)
# Assertions explain themselves only in modules that pytest rewrites, and it rewrites what is announced in time.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from bsfg.testing.conformance.artifacts import ArtifactStoreContract  # noqa: E402
from bsfg.testing.conformance.buffers import ForwardBufferContract, StoreBufferContract  # noqa: E402
from bsfg.testing.conformance.case import BufferUnderTest, Rig, StorageCase, scenario  # noqa: E402
from bsfg.testing.conformance.cursors import CursorTrackerContract  # noqa: E402
from bsfg.testing.conformance.faults import (  # noqa: E402
    BrokenMediumContract,
    HeldMediumContract,
    MediumFault,
    RandomOperationsContract,
)
from bsfg.testing.conformance.records import SetsAsideContract  # noqa: E402
from bsfg.testing.conformance.storage import StorageContract  # noqa: E402

__all__ = [
    "ArtifactStoreContract",
    "BrokenMediumContract",
    "BufferUnderTest",
    "CursorTrackerContract",
    "ForwardBufferContract",
    "HeldMediumContract",
    "MediumFault",
    "RandomOperationsContract",
    "Rig",
    "SetsAsideContract",
    "StorageCase",
    "StorageContract",
    "StoreBufferContract",
    "scenario",
]
