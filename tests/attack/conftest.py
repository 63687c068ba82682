"""What the tests of attacks share: no node or attacker that outlives its test."""

from tests.e2e.conftest import cleanup

__all__ = ["cleanup"]
