"""What the tests of attacks share: coroutines as tests, and no node or attacker that outlives its test."""

from tests.e2e.conftest import cleanup, pytest_pyfunc_call

__all__ = ["cleanup", "pytest_pyfunc_call"]
