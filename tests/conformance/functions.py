"""Contracts that run once more, on facts sealed by another digest function than the default."""

import pytest

from bsfg.batch import FactBatch
from bsfg.digest import Blake3, Hasher
from bsfg.sealing import seal
from bsfg.testing import facts


def by_blake3(batch: FactBatch, *, hasher: Hasher) -> FactBatch:
    """Seal with BLAKE3 what the default would seal."""
    return seal(batch, hasher=Blake3() if hasher is facts.SHA256 else hasher)


class SealedByBlake3:
    """Seals what a contract does not seal with a function of its own choice with BLAKE3."""

    @pytest.fixture(autouse=True)
    def _seal_by_blake3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(facts, "seal", by_blake3)
